"""Projections and their gates: the order in which ``packed`` has them, and what a gate lets through."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from megafold.trainer.kernels.products import half_open

#: Rows of ``projection`` in a run of ``packed``; as many of ``gate`` follow.
RUN = tl.constexpr(8)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def gated(value, gate, WIDE: tl.constexpr):
    """``value`` times the sigmoid of what ``gate`` is -log2(e) times of: one division for both."""
    # One that rounds correctly costs ten instructions: float32 has it.
    if WIDE:
        return value * half_open(tl.exp2(gate))
    elif INTERPRETED:
        return value / (1.0 + tl.exp2(gate))
    else:
        return libdevice.fast_dividef(value, 1.0 + tl.exp2(gate))


@triton.jit
def openness(gate, WIDE: tl.constexpr):
    """What :func:`gated` multiplies by."""
    return gated(1.0, gate, WIDE)


@triton.jit
def reciprocal(x):
    """Of NVIDIA GPUs, whose quick division would be another instruction."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def masked(value, bits):
    """``value``, of 2 bytes, where all ``bits`` are set; 0 where none is.

    One instruction of NVIDIA GPUs for two of them, where a choice takes six.
    """
    bits = tl.broadcast_to(bits, value.shape)
    if INTERPRETED:
        value = tl.where(bits != 0, value, 0.0).to(value.dtype)
    else:
        value = tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [value, bits], dtype=value.dtype, is_pure=True, pack=2
        )
    return value


@triton.jit
def shifted(product, shift):
    """``product`` + ``shift``, but not by way of the dot's accumulator, which would wait for ``shift``."""
    return tl.fma(product, tl.full(product.shape, 1.0, tl.float32), tl.broadcast_to(shift, product.shape))


@triton.jit
def split_rows(both, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[2·BLOCK, ROWS] in the order of ``packed`` → projection's and gate's [BLOCK, ROWS]."""
    runs = tl.permute(tl.reshape(both, [BLOCK // RUN, 2, RUN, ROWS]), (0, 2, 3, 1))
    value, gate = tl.split(runs)
    return tl.reshape(value, [BLOCK, ROWS]), tl.reshape(gate, [BLOCK, ROWS])


@triton.jit
def join_rows(value, gate, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The opposite of :func:`split_rows`."""
    value = tl.reshape(value, [BLOCK // RUN, RUN, ROWS])
    gate = tl.reshape(gate, [BLOCK // RUN, RUN, ROWS])
    return tl.reshape(tl.permute(tl.join(value, gate), (0, 3, 1, 2)), [2 * BLOCK, ROWS])


@triton.jit
def split_columns(both, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, 2·BLOCK] in the order of ``packed`` → projection's and gate's [ROWS, BLOCK]."""
    runs = tl.permute(tl.reshape(both, [ROWS, BLOCK // RUN, 2, RUN]), (0, 1, 3, 2))
    value, gate = tl.split(runs)
    return tl.reshape(value, [ROWS, BLOCK]), tl.reshape(gate, [ROWS, BLOCK])


@triton.jit
def join_columns(value, gate, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The opposite of :func:`split_columns`."""
    value = tl.reshape(value, [ROWS, BLOCK // RUN, RUN])
    gate = tl.reshape(gate, [ROWS, BLOCK // RUN, RUN])
    return tl.reshape(tl.permute(tl.join(value, gate), (0, 1, 3, 2)), [ROWS, 2 * BLOCK])
