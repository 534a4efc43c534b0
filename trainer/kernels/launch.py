"""Launching Triton kernels from the host at a small part of the usual cost.

Triton inspects every argument of every launch to find out which compiled variant serves it. For the forty
arguments of a kernel that takes any strides this can last longer than a short kernel runs. Here a launch
whose shapes, strides, dtypes, alignments and constants were seen before goes to the variant found then,
without Triton's launch hooks. What a call computes of shapes alone (numbers, constants, the tile) can be kept
as a :class:`Launch`, so that a step of a training run computes it once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

#: Signatures remembered for a kernel, far beyond what a model meets; beyond it the memory starts anew.
_REMEMBERED: Final = 4096
#: What Triton asks of a pointer before it reads 16 bytes at a time.
_ALIGNMENT: Final = 16
#: Of every launch. Products and sums become fused multiply-adds, which Triton no longer makes by itself from
#: 3.10 on: kernels are fast with them, and as exact as they are measured to be.
OPTIONS: Final[Mapping[str, int]] = {"enable_fp_fusion": True}
#: What takes a stream and the tensors' addresses and launches a compiled kernel.
Start = Callable[[int, Sequence[int]], None]
#: The device that is current, without PyTorch's wrapper around it; a build without GPUs has none.
_current_device: Final[Callable[[], int]] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
#: Where kernels go that are compiled and not launched; None: they are launched.
_compiled: ContextVar[list[Any] | None] = ContextVar("compiled", default=None)


@contextmanager
def only_compile(made: list[Any]) -> Iterator[None]:
    """Within, what was not launched before is not launched but compiled, into ``made``: for ``ahead.py``."""
    token = _compiled.set(made)
    try:
        yield
    finally:
        _compiled.reset(token)


def blocks(length: int, block: int) -> int:
    """Blocks of ``block`` that cover ``length``."""
    return -(-length // block)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; without bounds in the interpreter."""
    if device.type != "cuda":
        return 2**62
    properties = torch.cuda.get_device_properties(device)
    # ROCm does not tell it apart.
    name = "shared_memory_per_block" if torch.version.hip else "shared_memory_per_block_optin"
    return int(getattr(properties, name))


class Launch:
    """A kernel with everything but its tensors.

    Args:
        kernel: its parameters in this order: tensors, numbers, constants.
        programs: of a one-dimensional grid.
        numbers: in the order of the parameters.
        constants: likewise.
        options: as a Triton launch takes them (num_warps and so on).
        others: what the constants are for other lengths, for whom kernels are compiled ahead.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: Sequence[int | float],
        constants: Mapping[str, Any],
        options: Mapping[str, int],
        others: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._kernel = kernel
        self._programs = programs
        self._numbers = tuple(numbers)
        self._constants = dict(constants)
        self._options = {**OPTIONS, **options}
        self._others = others
        self._known: dict[tuple[Any, ...], Start] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the tensors' device."""
        index = tensors[0].get_device()
        if index >= 0 and index != _current_device():
            with torch.cuda.device(index):
                return self(*tensors)
        # Of a tensor Triton would ask the GPU's driver where its memory is.
        addresses = [t.data_ptr() for t in tensors]
        key = (index, tuple([a % _ALIGNMENT for a in addresses]), tuple([t.dtype for t in tensors]))
        start = self._known.get(key)
        if start is None:
            return self._first(key, tensors)
        return start(driver.active.get_current_stream(index), addresses)

    def _first(self, key: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        arguments, grid = (*tensors, *self._numbers), (self._programs,)
        compiled = _compiled.get()
        if compiled is not None:
            for constants in (self._constants, *self._others):
                compiled.append(self._kernel.warmup(*arguments, grid=grid, **constants, **self._options))
            return
        made = self._kernel[grid](*arguments, **self._constants, **self._options)
        # The interpreter compiles nothing.
        if isinstance(made, CompiledKernel):
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = _start(made, self._programs, (*self._numbers, *self._constants.values()))


def _start(kernel: CompiledKernel, programs: int, tail: tuple[Any, ...]) -> Start:
    """What launches ``kernel`` with its arguments after the tensors, ``tail``.

    Triton's launcher sees to scratch memory that these kernels do not have, then calls a function in C. Where
    that is known to take its arguments in this order, it is called at once.
    """
    launcher, function, packed = kernel.run, kernel.function, kernel.packed_metadata
    # Launch metadata and hooks for entry and exit.
    hooks = (None, None, None)
    run: Callable[..., None] = launcher
    fixed: tuple[Any, ...] = (function, packed, *hooks)
    if triton.__version__.startswith("3.6.") and _plain(launcher):
        run, no_scratch = launcher.launch, (None, None)
        flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        fixed = (function, *flags, *no_scratch, packed, *hooks)

    def start(stream: int, addresses: Sequence[int]) -> None:
        run(programs, 1, 1, stream, *fixed, *addresses, *tail)

    return start


def _plain(launcher: Any) -> bool:
    """Whether it is the launcher for Nvidia's GPUs, of a kernel without scratch memory."""
    return (
        type(launcher).__name__ == "CudaLauncher"
        and launcher.global_scratch_size == 0
        and launcher.profile_scratch_size == 0
    )


class Launcher:
    """One kernel's launches, each remembered as a :class:`Launch`."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._launches: dict[tuple[Any, ...], Launch] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor],
        numbers: Sequence[int | float],
        constants: Mapping[str, Any],
        options: Mapping[str, int],
    ) -> None:
        """Launch a one-dimensional grid; ``options`` as a Triton launch takes them (num_warps and so on)."""
        key = (programs, *numbers, *constants.values(), *options.values())
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= _REMEMBERED:
                self._launches.clear()
            launch = Launch(self.kernel, programs, numbers, constants, options)
            self._launches[key] = launch
        launch(*tensors)
