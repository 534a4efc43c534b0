"""Triton kernels of adaptive layer norm, after the products of the conditioning; forward and backward.

Shapes: ``a`` is [G, R, INNER] rows of C channels (CP with padding): R copies share one row of conditioning,
so that ``scale`` and ``shift`` are [G, INNER] rows. ``scale`` is the product without its bias and before the
sigmoid.

Bases are 64-bit pointers, offsets within a tile 32-bit.
"""

import triton
import triton.language as tl

from megafold.trainer.kernels.layernorm.kernel import (
    load_channels,
    load_rows,
    row_mean,
    standardised,
    store_rows,
)
from megafold.trainer.kernels.products import add_kept


@triton.jit
def _load(base, rows, stride, present, C: tl.constexpr, CP: tl.constexpr):
    """The rows [BM] of [rows, C] in float32; 0 where not ``present``, and from channel C on."""
    c = tl.arange(0, CP)
    kept = present[:, None]
    if C != CP:
        kept = kept & (c[None, :] < C)
    pointers = base + (rows.to(tl.int64) * stride)[:, None] + c[None, :]
    return tl.load(pointers, mask=kept, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["M", "R", "INNER"])
def forward_kernel(
    a, scale, shift, scale_bias, out, M, R, INNER, a_row,
    BM: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One program: BM rows of ``a``."""
    first = tl.program_id(0) * BM
    standard, _ = standardised(load_rows(a, first, a_row, M, C, CP, BM), C, CP, EPS)
    rows = first + tl.arange(0, BM)
    conditioning = rows // (R * INNER) * INNER + rows % INNER
    gate = _load(scale, conditioning, C, rows < M, C, CP) + load_channels(scale_bias, C, CP)
    offset = _load(shift, conditioning, C, rows < M, C, CP)
    store_rows(out, first, tl.sigmoid(gate) * standard + offset, M, C, CP, BM)


@triton.jit(do_not_specialize=["count", "R", "INNER"])
def backward_kernel(
    a, scale, scale_bias, dout, da, dscale, dshift, count, R, INNER, a_row,
    BM: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, EPS: tl.constexpr,
    INPUT: tl.constexpr, CONDITIONING: tl.constexpr,
):  # fmt: skip
    """One program: BM of the ``count`` = G·INNER rows of conditioning, and all that share them.

    INPUT: write da. CONDITIONING: write the gradients of the two products, summed over the copies.
    """
    first = tl.program_id(0) * BM
    rows = first + tl.arange(0, BM)
    present = rows < count
    gate = tl.sigmoid(_load(scale, rows, C, present, C, CP) + load_channels(scale_bias, C, CP))
    gate_sum = tl.zeros([BM, CP], tl.float32)
    shift_sum = tl.zeros([BM, CP], tl.float32)
    gate_lost = tl.zeros([BM, CP], tl.float32)
    shift_lost = tl.zeros([BM, CP], tl.float32)
    for copy in range(R):
        at = rows // INNER * (R * INNER) + copy * INNER + rows % INNER
        grad = _load(dout, at, C, present, C, CP)
        standard, inverse = standardised(_load(a, at, a_row, present, C, CP), C, CP, EPS)
        if CONDITIONING:
            # Copies are many, and one after the other they would round more than eager's sum, a tree.
            gate_sum, gate_lost = add_kept(gate_sum, gate_lost, grad * standard)
            shift_sum, shift_lost = add_kept(shift_sum, shift_lost, grad)
        if INPUT:
            grad = grad * gate
            mean = row_mean(grad, C)[:, None]
            along = row_mean(grad * standard, C)[:, None]
            result = (grad - mean - standard * along) * inverse
            c = tl.arange(0, CP)
            pointers = da + (at.to(tl.int64) * C)[:, None] + c[None, :]
            tl.store(pointers, result.to(da.dtype.element_ty), mask=present[:, None] & (c[None, :] < C))
    if CONDITIONING:
        store_rows(dscale, first, gate_sum * gate * (1.0 - gate), count, C, CP, BM)
        store_rows(dshift, first, shift_sum, count, C, CP, BM)
