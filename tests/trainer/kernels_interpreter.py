"""Runs files of kernel checks in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path


def check_in_interpreter(*files: Path) -> None:
    """Run pytest on ``files`` of one folder, in a process: Triton reads its setting when it is imported."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "--durations=8",
            *map(str, files),
        ],
        cwd=files[0].parents[2],
        # One thread: with more, eager's sums and so the errors to compare with depend on the machine.
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
