"""Triton kernels of layer normalisation over the last axis, forward and backward.

Shapes: M rows (all leading axes), C channels (CP with padding). Statistics and sums are float32. The backward
computes the statistics anew: its rows are in registers anyway.

Bases are 64-bit pointers, offsets within a tile 32-bit.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(base, first, stride, M, C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr):
    """Rows ``first`` to ``first`` + BM in float32; rows from M on and channels from C on are 0."""
    row, c = tl.arange(0, BM), tl.arange(0, CP)
    present = row[:, None] < M - first
    if C != CP:
        present = present & (c[None, :] < C)
    pointers = base + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + c[None, :])
    return tl.load(pointers, mask=present, other=0.0).to(tl.float32)


@triton.jit
def row_mean(tile, C: tl.constexpr):
    """The mean [BM] of each row's C channels; the others are 0.

    Rounded as IEEE 754 says: the error of a quicker division is one for a whole row, which does not even out.
    """
    total = tl.sum(tile, 1)
    if (C & (C - 1)) == 0:
        mean = total * (1.0 / C)  # of a power of two it is exact
    else:
        mean = tl.div_rn(total, tl.full(total.shape, C, tl.float32))
    return mean


@triton.jit
def inverse_root(value):
    """1 / √value [BM] of rows, to a rounding.

    The instruction's error is three times that; one step of Newton's takes a fifth of what a rounded root and
    a rounded division take, which a kernel of 2-byte numbers would feel.
    """
    root = tl.rsqrt(value)
    product = value * root
    rest = tl.fma(-product, root, 1.0) - tl.fma(value, root, -product) * root
    return tl.fma(root * 0.5, rest, root)


@triton.jit
def standardised(tile, C: tl.constexpr, CP: tl.constexpr, EPS: tl.constexpr):
    """(x - mean) / standard deviation of each row, and one over the standard deviation [BM, 1]."""
    tile -= row_mean(tile, C)[:, None]
    if C != CP:
        tile = tl.where(tl.arange(0, CP)[None, :] < C, tile, 0.0)
    inverse = inverse_root(row_mean(tile * tile, C) + EPS)[:, None]
    return tile * inverse, inverse


@triton.jit
def load_channels(base, C: tl.constexpr, CP: tl.constexpr):
    """[1, CP] float32, 0 from C on."""
    c = tl.arange(0, CP)
    return tl.load(base + c, mask=c < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def store_rows(base, first, tile, M, C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr):
    """Write rows ``first`` to ``first`` + BM of a contiguous [M, C]."""
    row, c = tl.arange(0, BM), tl.arange(0, CP)
    present = row[:, None] < M - first
    if C != CP:
        present = present & (c[None, :] < C)
    pointers = base + tl.cast(first, tl.int64) * C + (row[:, None] * C + c[None, :])
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["M"])
def forward_kernel(
    x, weight, bias, out, M, x_row,
    BM: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, EPS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program: BM rows."""
    first = tl.program_id(0) * BM
    tile, _ = standardised(load_rows(x, first, x_row, M, C, CP, BM), C, CP, EPS)
    if HAS_WEIGHT:
        tile = tile * load_channels(weight, C, CP)
    if HAS_BIAS:
        tile += load_channels(bias, C, CP)
    store_rows(out, first, tile, M, C, CP, BM)


@triton.jit(do_not_specialize=["M", "steps"])
def backward_kernel(
    x, weight, dout, residual, dx, parts, M, x_row, steps,
    BM: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, EPS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, INPUT: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One program: ``steps`` blocks of BM rows, far apart from each other as all programs advance together.

    INPUT: write dX, with ``residual`` added where there is one. SUMS: write the program's sums of dWeight and
    dBias to ``parts`` [programs, 2, C].
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    if SUMS:
        scale_sum = tl.zeros([BM, CP], tl.float32)
        shift_sum = tl.zeros([BM, CP], tl.float32)
    for step in range(steps):
        # A block past the end holds no row: it loads zeros and writes nothing.
        first = (step * programs + pid) * BM
        standard, inverse = standardised(load_rows(x, first, x_row, M, C, CP, BM), C, CP, EPS)
        grad = load_rows(dout, first, C, M, C, CP, BM)
        if SUMS:
            scale_sum += grad * standard
            shift_sum += grad
        if INPUT:
            if HAS_WEIGHT:
                grad = grad * load_channels(weight, C, CP)
            mean = row_mean(grad, C)[:, None]
            along = row_mean(grad * standard, C)[:, None]
            dinput = (grad - mean - standard * along) * inverse
            if HAS_RESIDUAL:
                dinput += load_rows(residual, first, C, M, C, CP, BM)
            store_rows(dx, first, dinput, M, C, CP, BM)
    if SUMS:
        c = tl.arange(0, CP)
        place = parts + pid * 2 * C + c
        tl.store(place, tl.sum(scale_sum, 0), mask=c < C)
        tl.store(place + C, tl.sum(shift_sum, 0), mask=c < C)


@triton.jit(do_not_specialize=["count", "groups"])
def sum_parts_kernel(
    parts, scale, shift, count, groups,
    BP: tl.constexpr, BC: tl.constexpr, C: tl.constexpr,
    SCALE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """parts [count, 2, C] summed over the first axis, always in the same order.

    One group: to ``scale`` and ``shift`` [C], either only if wanted. More: ``scale`` is [groups, 2, C], and
    a group sums its part of the first axis.
    """
    BLOCKS: tl.constexpr = (2 * C + BC - 1) // BC
    pid = tl.program_id(0)
    group = pid // BLOCKS
    column = (pid % BLOCKS) * BC + tl.arange(0, BC)
    each = tl.cdiv(count, groups)
    end = tl.minimum(group * each + each, count)
    acc = tl.zeros([BP, BC], tl.float32)
    for first in range(group * each, end, BP):
        row = first + tl.arange(0, BP)
        acc += tl.load(
            parts + (row[:, None] * (2 * C) + column[None, :]),
            mask=(row < end)[:, None] & (column < 2 * C)[None, :],
            other=0.0,
        )
    total = tl.sum(acc, 0)
    if groups > 1:
        target = scale + group * (2 * C) + column
        tl.store(target, total.to(scale.dtype.element_ty), mask=column < 2 * C)
    else:
        if SCALE:
            tl.store(scale + column, total.to(scale.dtype.element_ty), mask=column < C)
        if SHIFT:
            tl.store(
                shift + column - C, total.to(shift.dtype.element_ty), mask=(column >= C) & (column < 2 * C)
            )
