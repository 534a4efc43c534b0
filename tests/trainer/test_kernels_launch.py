"""Launches of compiled kernels, with a launcher that writes down what it is given."""

from types import SimpleNamespace
from typing import Any

import pytest
import triton

from megafold.trainer.kernels.launch import _start

KERNEL = (32, 64, 7, 0.5, 16)
#: As Triton 3.6's launcher calls its function in C: grid, stream, function, cooperative, dependent launch,
#: global and profile scratch, packed metadata, launch metadata, hooks, the kernel's arguments.
IN_C = (6, 1, 1, "stream", "function", True, False, None, None, "packed", None, None, None, *KERNEL)
#: As a compiled kernel's launcher is called, in every version.
IN_PYTHON = (6, 1, 1, "stream", "function", "packed", None, None, None, *KERNEL)


class CudaLauncher:
    """As Triton's, but for what it does."""

    launch_cooperative_grid = True
    launch_pdl = False

    def __init__(self, scratch: int) -> None:
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def launch(self, *arguments: Any) -> None:
        self.calls.append(("C", arguments))

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(("Python", arguments))


class HIPLauncher(CudaLauncher):
    """AMD's, whose function in C takes other arguments."""


@pytest.mark.parametrize(
    ("version", "launcher", "expected"),
    [
        ("3.6.0", CudaLauncher(scratch=0), ("C", IN_C)),
        ("3.6.0", CudaLauncher(scratch=128), ("Python", IN_PYTHON)),
        ("3.6.0", HIPLauncher(scratch=0), ("Python", IN_PYTHON)),
        ("3.9.0", CudaLauncher(scratch=0), ("Python", IN_PYTHON)),
    ],
)
def test_what_launches_a_compiled_kernel(monkeypatch, version, launcher, expected):
    monkeypatch.setattr(triton, "__version__", version)
    kernel: Any = SimpleNamespace(run=launcher, function="function", packed_metadata="packed")
    start = _start(kernel, 6, (7, 0.5, 16))
    start("stream", [32, 64])  # type: ignore[arg-type]
    assert launcher.calls == [expected]
