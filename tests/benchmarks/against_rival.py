"""Runs a benchmark with a stand-in for the rival, which speaks as `rival_worker.py` does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_BEFORE = f"""#!{sys.executable}
import json, os, sys
answers = os.fdopen(int(sys.argv[2]), "w")
def answer(message):
    print(json.dumps(message), file=answers, flush=True)
answer({{"atomworks": "none"}})
print("noise on standard output")
for line in sys.stdin:
    path = json.loads(line)["path"]
"""
_AFTER = """
    times = {"parse_s": 40.0, "transforms_s": 60.0, "parse_cpu_s": 4.0, "transforms_cpu_s": 6.0}
    answer({**times, "tokens": 9})
"""


def run_benchmark(folder: Path, script: str, exceptions: str, *options: str | Path) -> tuple[Any, str]:
    """What a benchmark writes as JSON, and prints.

    Args:
        folder: for its files.
        script: in ``benchmarks/``.
        exceptions: lines of Python that see the ``path`` of a file which the stand-in might not do.
        options: further ones of the benchmark's.
    """
    stand_in, written = folder / "python", folder / "out.json"
    stand_in.write_text(_BEFORE + indent(exceptions, "    ") + _AFTER)
    stand_in.chmod(0o755)
    shown = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *options, "--json", written, "--rival-python", stand_in],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(written.read_text()), shown.stdout
