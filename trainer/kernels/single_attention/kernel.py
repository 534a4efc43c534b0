"""A Triton kernel that casts several layers' weights at once."""

import triton
import triton.language as tl


@triton.jit
def _part(source, at, first, count):
    """Numbers ``at`` - ``first`` of ``source``, which has ``count``; 0 for others."""
    return tl.load(source + (at - first), mask=(at >= first) & (at < first + count), other=0.0).to(tl.float32)


@triton.jit
def pack_kernel(q, kv, gate, output, bias, offset, packed, SQUARE, BIAS, C, TOTAL, BLOCK: tl.constexpr):
    """In this order: SQUARE numbers of q, 2 · SQUARE of kv, gate, output; BIAS; C; zeros to TOTAL."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = _part(q, at, 0, SQUARE)
    value += _part(kv, at, SQUARE, 2 * SQUARE)
    value += _part(gate, at, 3 * SQUARE, SQUARE)
    value += _part(output, at, 4 * SQUARE, SQUARE)
    value += _part(bias, at, 5 * SQUARE, BIAS)
    value += _part(offset, at, 5 * SQUARE + BIAS, C)
    tl.store(packed + at, value.to(packed.dtype.element_ty), mask=at < TOTAL)
