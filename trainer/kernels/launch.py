"""Launching Triton kernels from the host at a small part of the usual cost.

Triton inspects every argument of every launch to find out which compiled variant serves it. For the forty
arguments of a kernel that takes any strides this can last longer than a short kernel runs. Here a launch
whose shapes, strides, dtypes, alignments and constants were seen before goes to the variant found then.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import triton
from torch import Tensor

#: Signatures remembered for a kernel, far beyond what a model meets; beyond it the memory starts anew.
_REMEMBERED: Final = 4096
#: What Triton asks of a pointer before it reads 16 bytes at a time.
_ALIGNMENT: Final = 16


def blocks(length: int, block: int) -> int:
    """Blocks of ``block`` that cover ``length``."""
    return -(-length // block)


class Launcher:
    """One kernel's launches.

    Its parameters are to be in this order: tensors, numbers, constants.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._known: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor],
        numbers: Sequence[int | float],
        constants: Mapping[str, Any],
        options: Mapping[str, int],
    ) -> None:
        """Launch a one-dimensional grid; ``options`` as a Triton launch takes them (num_warps and so on)."""
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(programs, tensors, numbers, constants, options)
        aligned = tuple([t.data_ptr() % _ALIGNMENT == 0 for t in tensors])
        dtypes = tuple([t.dtype for t in tensors])
        key = (*numbers, aligned, dtypes, device.index, *constants.values(), *options.values())
        known = self._known.get(key)
        if known is not None:
            known[(programs, 1, 1)](*tensors, *numbers, *constants.values())
            return None
        made = self.kernel[(programs,)](*tensors, *numbers, **constants, **options)
        # The interpreter compiles nothing.
        if isinstance(made, triton.compiler.CompiledKernel):
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = made
        return None
