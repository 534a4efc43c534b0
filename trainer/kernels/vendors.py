"""What is quick on one vendor's GPUs and slow on another's, each as a kernel's own GPU has it quick."""

from typing import Any, Final

import triton
import triton.language as tl
from triton.language.extra import libdevice

#: AMD's architectures with an instruction that rounds to bfloat16.
_ROUNDING: Final = ("gfx950", "gfx1250")


def _on_amd(_semantic: Any = None) -> tl.constexpr:
    return tl.constexpr(_semantic.builder.options.backend_name == "hip")


def _rounds_in_software(_semantic: Any = None) -> tl.constexpr:
    options = _semantic.builder.options
    return tl.constexpr(options.backend_name == "hip" and options.arch not in _ROUNDING)


def _interpreted() -> bool:
    return False


def _asked(question: Any) -> Any:
    """For kernels to ask of the GPU that they are compiled for; in the interpreter the answer is no."""
    return _interpreted if triton.knobs.runtime.interpret else tl.core.builtin(question)


on_amd = _asked(_on_amd)
rounds_in_software = _asked(_rounds_in_software)


@triton.jit
def quotient(x, y):
    """x / y of float32, off by two roundings at most.

    That is what ``/`` gives on NVIDIA GPUs. AMD's compiler makes it ten instructions that round correctly.
    """
    if on_amd():
        result = libdevice.fast_dividef(x, y)
    else:
        result = x / y
    return result


@triton.jit
def rounded(tile):
    """The float32 tile in bfloat16: to nearest, away from zero where two are as near.

    Two instructions for two numbers, and one more to put them side by side. Infinities stay, and so do the
    NaN that AMD's instructions give.
    """
    bits = tile.to(tl.int32, bitcast=True) + 0x8000
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def narrowed(tile, dtype: tl.constexpr):
    """The float32 tile in ``dtype``, to be multiplied.

    AMD GPUs without an instruction for it take five for each number to round to even and to look for NaN.
    """
    if rounds_in_software() and dtype == tl.bfloat16:
        result = rounded(tile)
    else:
        result = tile.to(dtype)
    return result
