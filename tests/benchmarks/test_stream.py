"""The benchmark of samples: its figures add up, with a stand-in for the rival."""

import pytest

from tests.benchmarks.against_rival import run_benchmark
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The stand-in cannot do the second entry."""
    folder = tmp_path_factory.mktemp("stream")
    chains = [Chain(["ALA", "GLY", "LYS"] * 3)]
    names = [f"{number}abc" for number in (1, 2, 3)]
    fake.publish(folder / "cache", [(fake.structure(name, chains), chains, "") for name in names])
    (folder / "corpus").mkdir()
    for name in (*names, "9xyz"):  # the last one is not in the cache
        (folder / "corpus" / f"{name}.cif").write_text("data_x\n")
    exceptions = """
if path.endswith("2abc.cif"):
    answer({"error": "ValueError: no"})
    continue
"""
    options = [folder / "cache", "--samples", "5", "--corpus", folder / "corpus"]
    return run_benchmark(folder, "stream.py", exceptions, *options)


def test_samples_are_those_of_the_cache(result):
    found, shown = result
    assert found["samples"] == found["cold"]["samples"] == found["warm"]["samples"] == 5
    # ALA 5 atoms, GLY 4, LYS 9, three times, and the last residue's OXT.
    assert found["median"] == {"tokens": 9, "atoms": 3 * 18 + 1, "MSA rows": 1, "templates": 0}
    for name in ("cold", "warm"):
        stages = found[name]["stages_ms"]
        assert sum(stages.values()) == pytest.approx(found[name]["mean_ms"])
        assert all(stage in shown for stage in stages)
    if found["cold"]["bytes_read"] is not None:
        assert found["warm"]["bytes_read"] < found["cold"]["bytes_read"]


def test_ratios_are_of_the_entries_that_both_can_do(result):
    found, shown = result
    rival = found["rival"]
    assert [row["entry"] for row in rival["rows"]] == ["1abc", "2abc", "3abc"]
    assert [row["rival_error"] for row in rival["rows"]] == ["", "ValueError: no", ""]
    both = [row for row in rival["rows"] if "ratio" in row]
    assert rival["compared"] == len(both) == 2
    assert [row["ratio"] for row in both] == [100 / row["ours_s"] for row in both]
    assert [row["cpu_ratio"] for row in both] == [10 / row["ours_cpu_s"] for row in both]
    assert rival["median_ratio"] == pytest.approx(sum(row["ratio"] for row in both) / 2)
    assert "2 of 3 entries compared" in shown
