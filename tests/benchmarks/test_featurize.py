"""The comparison of featurizing times: what it reports, with a stand-in for the rival."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megafold.pipeline.sample_corpus import write_sample_corpus

ROOT = Path(__file__).resolve().parents[2]
#: Speaks as `rival_worker.py` does; it ends itself on the second file and cannot do the third.
STAND_IN = """#!{python}
import json, os, sys
answers = os.fdopen(int(sys.argv[2]), "w")
def answer(message):
    print(json.dumps(message), file=answers, flush=True)
answer({{"atomworks": "none"}})
print("noise on standard output")
for line in sys.stdin:
    path = json.loads(line)["path"]
    if path == {names[1]!r}:
        sys.exit(3)
    if path == {names[2]!r}:
        answer({{"error": "ValueError: no"}})
        continue
    times = {{"parse_s": 40.0, "transforms_s": 60.0, "parse_cpu_s": 4.0, "transforms_cpu_s": 6.0}}
    answer({{**times, "tokens": 9}})
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("featurize")
    write_sample_corpus(folder, entries=4, seed=1)
    names = [str(path) for path in sorted((folder / "structures").iterdir())]
    stand_in = folder / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable, names=names))
    stand_in.chmod(0o755)
    options = ["--corpus", folder / "structures", "--alignments", folder / "alignments"]
    shown = subprocess.run(
        [
            *(sys.executable, "benchmarks/featurize.py", "--json", folder / "out.json"),
            *("--rival-python", stand_in, *options),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads((folder / "out.json").read_text()), shown.stdout


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
