"""Samples of another project's pipeline, for benchmarks that compare: AtomWorks 3, parse plus AF3 transforms.

It runs in a process and an environment of its own. To make one (PyTorch's CPU build is enough):

    python3.11 -m venv RIVAL
    RIVAL/bin/pip install torch==2.13.0 'atomworks[ml]==3.0.4'

and give the benchmark ``--rival-python RIVAL/bin/python``.
"""

import json
import os
import select
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

WORKER = Path(__file__).with_name("rival_worker.py")
START_WITHIN_S = 300.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


def pin(cpu: int | None) -> int | None:
    """Keep this process and those it starts on one core, where the system can."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    chosen = max(os.sched_getaffinity(0)) if cpu is None else cpu
    os.sched_setaffinity(0, {chosen})
    return chosen


@dataclass(frozen=True, kw_only=True)
class RivalSample:
    """What one sample took, in seconds; ``error`` says why there is none, '' for none."""

    parse_s: float = 0.0
    transforms_s: float = 0.0
    parse_cpu_s: float = 0.0
    transforms_cpu_s: float = 0.0
    tokens: int = 0
    error: str = ""

    @property
    def wall_s(self) -> float:
        """Parsing and transforms."""
        return self.parse_s + self.transforms_s

    @property
    def cpu_s(self) -> float:
        """CPU time of parsing and transforms."""
        return self.parse_cpu_s + self.transforms_cpu_s


class Rival:
    """The worker process. It inherits this one's CPUs and has one thread a library."""

    def __init__(self, python: Path, *, limit_s: float = 300.0) -> None:
        """Start it.

        Args:
            python: the interpreter of its environment.
            limit_s: how long a sample may take before the process is ended and the sample counts as failed.

        Raises:
            RuntimeError: it does not start; the message has what it printed.
        """
        self._python = python
        self._limit_s = limit_s
        self._log: IO[str] = tempfile.NamedTemporaryFile("w+", prefix="rival-", suffix=".log")  # noqa: SIM115
        self._process: subprocess.Popen[str] | None = None
        self._answers: IO[str] | None = None
        self.versions: dict[str, str] = self._start()

    def sample(self, path: Path, *, tokens: int, seed: int) -> RivalSample:
        """One training sample of a structure file."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"path": str(path), "tokens": tokens, "seed": seed}) + "\n")
        self._process.stdin.flush()
        return RivalSample(**self._read(self._limit_s))

    def _start(self) -> dict[str, str]:
        reading, writing = os.pipe()
        self._process = subprocess.Popen(
            [self._python, WORKER, str(writing)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[writing],
            text=True,
            env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), "PYTHONWARNINGS": "ignore"},
        )
        os.close(writing)
        self._answers = os.fdopen(reading)
        answer = self._read(START_WITHIN_S)
        if "error" in answer:
            self._log.seek(0)
            raise RuntimeError(f"{self._python} {WORKER.name}: {answer['error']}\n{self._log.read()[-2000:]}")
        return answer

    def _read(self, limit_s: float) -> dict[str, Any]:
        """The next answer; a process that is late or gone is ended, and the next sample starts another."""
        assert self._answers is not None
        ready, _, _ = select.select([self._answers], [], [], limit_s)
        line = self._answers.readline() if ready else ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self.close()
        return {"error": "its process ended" if ready else f"took longer than {limit_s:g} s"}

    def close(self) -> None:
        """End the process."""
        if self._process is None or self._answers is None:
            return
        self._process.kill()
        self._process.communicate()
        self._answers.close()
        self._process = None

    def __enter__(self) -> "Rival":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
