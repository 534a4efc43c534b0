"""Triton kernels of a linear layer of normalised rows, forward and backward.

Shapes: M rows (all leading axes), C channels (a power of two), OUT outputs, any number. ``weight`` is
[OUT, C], contiguous and of the products' dtype. The normalised rows are never in memory: every kernel
computes them anew from what it reads anyway.

Bases are 64-bit pointers, offsets within a tile 32-bit.
"""

import triton
import triton.language as tl

from megafold.trainer.kernels.layernorm.kernel import load_channels, load_rows, standardised, store_rows
from megafold.trainer.kernels.vendors import narrowed


@triton.jit
def _normalised(
    x, norm_weight, norm_bias, first, stride, M,
    C: tl.constexpr, BM: tl.constexpr, EPS: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
):  # fmt: skip
    tile, _ = standardised(load_rows(x, first, stride, M, C, C, BM), C, C, EPS)
    tile = tile * load_channels(norm_weight, C, C)
    if HAS_NORM_BIAS:
        tile += load_channels(norm_bias, C, C)
    return tile


@triton.jit
def _load_outputs(base, first, start, M, OUT: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr):
    """[BM, BO] of a contiguous [M, OUT]; 0 beyond either end."""
    row, o = tl.arange(0, BM), start + tl.arange(0, BO)
    pointers = base + tl.cast(first, tl.int64) * OUT + (row[:, None] * OUT + o[None, :])
    present = row[:, None] < M - first
    if OUT % BO != 0:
        present = present & (o[None, :] < OUT)
    return tl.load(pointers, mask=present, other=0.0)


@triton.jit
def _load_weight(weight, start, OUT: tl.constexpr, C: tl.constexpr, BO: tl.constexpr):
    """[BO, C] from row ``start``; 0 from row OUT on."""
    o, c = start + tl.arange(0, BO), tl.arange(0, C)
    pointers = weight + (o[:, None] * C + c[None, :])
    if OUT % BO != 0:
        tile = tl.load(pointers, mask=o[:, None] < OUT, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit(do_not_specialize=["M"])
def forward_kernel(
    x, norm_weight, norm_bias, weight, bias, out, M, x_row,
    BM: tl.constexpr, BO: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, EPS: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program: BM rows, all outputs."""
    first = tl.program_id(0) * BM
    tile = _normalised(x, norm_weight, norm_bias, first, x_row, M, C, BM, EPS, HAS_NORM_BIAS)
    tile = narrowed(tile, weight.dtype.element_ty)
    row = tl.arange(0, BM)
    lines = out + tl.cast(first, tl.int64) * OUT
    for start in range(0, OUT, BO):
        o = start + tl.arange(0, BO)
        product = tl.dot(tile, tl.trans(_load_weight(weight, start, OUT, C, BO)))
        if HAS_BIAS:
            product += tl.load(bias + o, mask=o < OUT, other=0.0).to(tl.float32)[None, :]
        present = row[:, None] < M - first
        if OUT % BO != 0:
            present = present & (o[None, :] < OUT)
        tl.store(lines + (row[:, None] * OUT + o[None, :]), product.to(out.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["M"])
def input_gradient_kernel(
    x, norm_weight, weight, dout, dx, norm_parts, M, x_row,
    BM: tl.constexpr, BO: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, EPS: tl.constexpr,
    INPUT: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One program: BM rows. INPUT: write dX. SUMS: this program's sums of the norm's gradients [2, C]."""
    first = tl.program_id(0) * BM
    # Before the products, which do not wait for it.
    rows = load_rows(x, first, x_row, M, C, C, BM)
    acc = tl.zeros([BM, C], tl.float32)
    for start in range(0, OUT, BO):
        grad = _load_outputs(dout, first, start, M, OUT, BM, BO)
        acc = tl.dot(grad, _load_weight(weight, start, OUT, C, BO), acc)
    standard, inverse = standardised(rows, C, C, EPS)
    if SUMS:
        parts = norm_parts + tl.program_id(0) * 2 * C + tl.arange(0, C)
        tl.store(parts, tl.sum(acc * standard, 0))
        tl.store(parts + C, tl.sum(acc, 0))
    if INPUT:
        acc = acc * load_channels(norm_weight, C, C)
        mean = (tl.sum(acc, 1) / C)[:, None]
        along = (tl.sum(acc * standard, 1) / C)[:, None]
        store_rows(dx, first, (acc - mean - standard * along) * inverse, M, C, C, BM)


@triton.jit(do_not_specialize=["M", "splits"])
def weight_gradient_kernel(
    x, norm_weight, norm_bias, dout, parts, bias_parts, M, splits, x_row,
    BO: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, EPS: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program: BO outputs, every ``splits``-th block of BM rows.

    parts: [splits, OUT, C] float32, bias_parts: [splits, OUT] float32; the caller sums them in order.
    """
    TILES: tl.constexpr = (OUT + BO - 1) // BO
    pid = tl.program_id(0)
    start = (pid % TILES) * BO
    split = pid // TILES
    acc = tl.zeros([BO, C], tl.float32)
    bias_acc = tl.zeros([BO], tl.float32)
    for first in range(split * BM, M, splits * BM):
        grad = _load_outputs(dout, first, start, M, OUT, BM, BO)
        tile = _normalised(x, norm_weight, norm_bias, first, x_row, M, C, BM, EPS, HAS_NORM_BIAS)
        acc = tl.dot(tl.trans(grad), narrowed(tile, grad.dtype), acc)
        if HAS_BIAS:
            bias_acc += tl.sum(grad.to(tl.float32), 0)
    o, c = start + tl.arange(0, BO), tl.arange(0, C)
    place = parts + tl.cast(split, tl.int64) * (OUT * C) + (o[:, None] * C + c[None, :])
    tl.store(place, acc, mask=o[:, None] < OUT)
    if HAS_BIAS:
        tl.store(bias_parts + split * OUT + o, bias_acc, mask=o < OUT)


@triton.jit(do_not_specialize=["splits"])
def sum_splits_kernel(parts, out, count, splits, BP: tl.constexpr, BLOCK: tl.constexpr):
    """parts [splits, count] → out [count], always in the same order; BP of them at a time."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BP, BLOCK], tl.float32)
    for first in range(0, splits, BP):
        split = first + tl.arange(0, BP)
        pointers = parts + split.to(tl.int64)[:, None] * count + index[None, :]
        total += tl.load(pointers, mask=(split < splits)[:, None] & (index < count)[None, :], other=0.0)
    tl.store(out + index, tl.sum(total, 0).to(out.dtype.element_ty), mask=index < count)
