"""The whole corpus gives the digests on record, however it is built."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from megafold.pipeline.builder.recipes import VERSIONS
from tests.pipeline.record_digests import RECORD

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m tests.pipeline.record_digests"
#: The record is made in one process, in sorted order, with one RDKit thread: here nothing is the same.
SETTINGS = ["--workers", "2", "--order", "reversed", "--rdkit-threads", "3"]


def test_record_is_of_the_stages_as_they_are():
    """Raising a stage's version and recording its digests go together."""
    recorded = json.loads(RECORD.read_text())
    recorded["stages"]["rdkit"] = VERSIONS["rdkit"]
    assert recorded["stages"] == dict(VERSIONS), f"stages changed: record the digests again with {COMMAND}"


@pytest.mark.corpus
@pytest.mark.slow
def test_corpus_gives_the_digests_on_record(corpus_dir):
    recorded = json.loads(RECORD.read_text())
    others = {
        name: (version(name), recorded["libraries"][name])
        for name in ("rdkit", "biotite")
        if version(name) != recorded["libraries"][name]
    }
    if others:
        pytest.skip(f"conformers and definitions are those of other versions (here, on record): {others}")
    shown = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.record_digests", "--check", *SETTINGS],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "11", "MEGAFOLD_CORPUS": str(corpus_dir)},
        capture_output=True,
        text=True,
        check=False,
    )
    advice = f"if a stage's output was meant to change, raise its version and record the digests: {COMMAND}"
    assert shown.returncode == 0, f"{shown.stdout[-3000:]}{shown.stderr[-1000:]}\n{advice}"
