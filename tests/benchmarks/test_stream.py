"""The benchmark of samples: its figures add up, with a stand-in for the rival."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain

ROOT = Path(__file__).resolve().parents[2]
#: Speaks as `rival_worker.py` does; it cannot do the second entry.
STAND_IN = """#!{python}
import json, os, sys
answers = os.fdopen(int(sys.argv[2]), "w")
def answer(message):
    print(json.dumps(message), file=answers, flush=True)
answer({{"atomworks": "none"}})
for line in sys.stdin:
    if json.loads(line)["path"].endswith("2abc.cif"):
        answer({{"error": "ValueError: no"}})
        continue
    times = {{"parse_s": 40.0, "transforms_s": 60.0, "parse_cpu_s": 4.0, "transforms_cpu_s": 6.0}}
    answer({{**times, "tokens": 9}})
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    chains = [Chain(["ALA", "GLY", "LYS"] * 3)]
    names = [f"{number}abc" for number in (1, 2, 3)]
    fake.publish(folder / "cache", [(fake.structure(name, chains), chains, "") for name in names])
    (folder / "corpus").mkdir()
    for name in (*names, "9xyz"):  # the last one is not in the cache
        (folder / "corpus" / f"{name}.cif").write_text("data_x\n")
    stand_in = folder / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o755)
    shown = subprocess.run(
        [
            *(sys.executable, "benchmarks/stream.py", folder / "cache", "--samples", "5"),
            *("--rival-python", stand_in, "--corpus", folder / "corpus", "--json", folder / "out.json"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads((folder / "out.json").read_text()), shown.stdout


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
