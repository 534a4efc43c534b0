"""The comparison of featurizing times: what it reports, with a stand-in for the rival."""

import pytest

from megafold.pipeline.sample_corpus import write_sample_corpus
from tests.benchmarks.against_rival import run_benchmark


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The stand-in ends itself on the second file and cannot do the third."""
    folder = tmp_path_factory.mktemp("featurize")
    write_sample_corpus(folder, entries=4, seed=1)
    names = [str(path) for path in sorted((folder / "structures").iterdir())]
    exceptions = f"""
if path == {names[1]!r}:
    sys.exit(3)
if path == {names[2]!r}:
    answer({{"error": "ValueError: no"}})
    continue
"""
    options = ["--corpus", folder / "structures", "--alignments", folder / "alignments"]
    return run_benchmark(folder, "featurize.py", exceptions, *options)


def test_ratios_are_of_the_entries_that_both_can_do(result):
    found, _ = result
    rows = {row["entry"]: row for row in found["rows"]}
    assert len(rows) == found["entries"] == 4
    ratios = [row["ratio"] for row in rows.values() if "ratio" in row]
    assert len(ratios) == found["compared"] == 2
    assert ratios == [100 / row["ours_s"] for row in rows.values() if "ratio" in row]
    assert found["minimum_ratio"] == min(ratios)
    assert found["median_ratio"] == pytest.approx(sum(ratios) / 2)
    assert found["rival"]["median_s"] == 100
    assert found["rival_cpu"]["worst_s"] == 10
    assert all(row["ours_tokens"] > 0 and row["ours_msa_rows"] > 0 for row in rows.values())


def test_failures_are_listed_and_a_dead_process_is_started_again(result):
    found, shown = result
    assert found["ours_failures"] == {}
    assert sorted(found["rival_failures"].values()) == ["ValueError: no", "its process ended"]
    assert "rival: 2 failed" in shown
    assert found["rival_versions"] == {"atomworks": "none"}
