"""Gradients of the matrices and of the norms before them.

The gradient of a matrix W behind a norm with scale w and offset b needs only H = Σ_r g_r ẑ_rᵀ and
S = Σ_r g_r, where g is the gradient of the product and ẑ the standardised row: dW = H·w + S bᵀ, dw_k = Σ_c
W_ck H_ck and db_k = Σ_c W_ck S_c. So the gradients of the norm cost no pass over the positions. H and S are
summed by as many programs as run at a time, each its own part, and the parts in a fixed order: no atomics.
"""

import triton
import triton.language as tl

from megafold.trainer.kernels.products import LN2, LOG2E, add_kept, add_product_kept, product_t
from megafold.trainer.kernels.triangle_multiplication.blocks import (
    load_channels,
    load_factors,
    load_positions,
)
from megafold.trainer.kernels.triangle_multiplication.gates import RUN, gated, join_rows, shifted, split_rows
from megafold.trainer.kernels.vendors import narrowed

# Numbers that Triton shall not compile variants for.
_COUNTS = ["Q", "blocks", "parts"]


@triton.jit(do_not_specialize=_COUNTS)
def weight_gradient_kernel(
    standard, dab, packed, offsets, factors, products, sums, Q, blocks, parts, Z: tl.constexpr,
    C2: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of H and S of BLOCK channels of a and b.

    products: [parts, 2·C2, Z], in the order of ``packed``; sums: [parts, 2·C2]. Programs that take the same
    positions follow each other, so that the standardised z is read from memory once.
    """
    R = Q * 64
    dtype = dab.dtype.element_ty
    SLICES: tl.constexpr = C2 // BLOCK
    part = tl.program_id(0) // SLICES
    start = tl.program_id(0) % SLICES * BLOCK
    k, m, c = tl.arange(0, Z), 2 * start + tl.arange(0, 2 * BLOCK), start + tl.arange(0, BLOCK)
    matrix = tl.load(packed + m[:, None] * Z + k[None, :])
    shift = tl.load(offsets + m)
    product = tl.zeros([2 * BLOCK, Z], tl.float32)
    total = tl.zeros([2 * BLOCK], tl.float32)
    product_lost = tl.zeros([2 * BLOCK, Z], tl.float32)
    total_lost = tl.zeros([2 * BLOCK], tl.float32)
    for block in range(part, blocks, parts):
        first = tl.cast(block, tl.int64) * ROWS
        valid = load_factors(factors + 2 * R, first, R, ROWS, EVEN)
        normal = load_positions(standard, first, k, R, Z, ROWS, EVEN)
        grad = load_channels(dab, first, c, R, ROWS, EVEN)
        both = shifted(product_t(matrix, normal, PRECISION), shift[:, None])
        value, gate = split_rows(both, BLOCK, ROWS)
        # Where the mask is not set, grad is 0, whatever the gate's slope.
        gate = gated(tl.broadcast_to(valid[None, :], [BLOCK, ROWS]), gate, dtype == tl.float32)
        grad = grad.to(tl.float32) * gate
        both = join_rows(grad, grad * value * (gate * LN2 - LN2), BLOCK, ROWS)
        if dtype == tl.float32:
            total, total_lost = add_kept(total, total_lost, tl.sum(both, 1))
        else:
            total += tl.sum(both, 1)
        both = narrowed(both, dtype)
        product, product_lost = add_product_kept(product, product_lost, both, normal, PRECISION)
    line = part * (2 * C2) + m
    tl.store(products + line[:, None] * Z + k[None, :], product)
    tl.store(sums + line, total)


@triton.jit(do_not_specialize=_COUNTS)
def output_weight_gradient_kernel(
    normal, dproduct, products, sums, Q, blocks, parts, Z: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of H and S of BLOCK of the Z channels of ``dproduct`` [R, Z].

    normal: [R, WIDTH], what was multiplied; products: [parts, Z, WIDTH]; sums: [parts, Z]. A kernel of its
    own: as a branch of the one above, ptxas lets no two matrix instructions overlap.
    """
    R = Q * 64
    SLICES: tl.constexpr = Z // BLOCK
    part = tl.program_id(0) // SLICES
    row = tl.program_id(0) % SLICES * BLOCK
    k, c = tl.arange(0, WIDTH), row + tl.arange(0, BLOCK)
    product = tl.zeros([BLOCK, WIDTH], tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    product_lost = tl.zeros([BLOCK, WIDTH], tl.float32)
    total_lost = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in range(part, blocks, parts):
        first = tl.cast(block, tl.int64) * ROWS
        tile = load_positions(normal, first, k, R, WIDTH, ROWS, EVEN)
        grad = load_positions(dproduct, first, c, R, Z, ROWS, EVEN)
        if grad.dtype == tl.float32:
            total, total_lost = add_kept(total, total_lost, grad)
        else:
            total += grad.to(tl.float32)
        product, product_lost = add_product_kept(product, product_lost, tl.trans(grad), tile, PRECISION)
    line = part * Z + c
    tl.store(products + line[:, None] * WIDTH + k[None, :], product)
    tl.store(sums + line, tl.sum(total, 0))


@triton.jit
def _finish(
    products, sums, matrix, norm_weight, norm_bias, dmatrix, shares, rows, parts, source, factor,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a matrix, which the parts have from row ``source`` on: gradient, share in the norm's.

    products: [parts, rows, WIDTH]; sums: [parts, rows]; matrix, dmatrix: at those rows; shares: [2, WIDTH].
    """
    c, k, p = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    place = c[:, None] * WIDTH + k[None, :]
    product = tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, parts, BLOCK):
        there = start + p < parts
        line = (start + p).to(tl.int64)[:, None] * rows + (source + c)[None, :]
        tile = products + line[:, :, None] * WIDTH + k[None, None, :]
        product += tl.sum(tl.load(tile, mask=there[:, None, None], other=0.0), 0)
        total += tl.sum(tl.load(sums + line, mask=there[:, None], other=0.0), 0)
    product *= factor
    total *= factor
    weight = tl.load(norm_weight + k).to(tl.float32)
    shift = tl.load(norm_bias + k).to(tl.float32)
    gradient = product * weight[None, :] + total[:, None] * shift[None, :]
    tl.store(dmatrix + place, gradient.to(dmatrix.dtype.element_ty))
    values = tl.load(matrix + place).to(tl.float32)
    tl.store(shares + k, tl.sum(values * product, 0))
    tl.store(shares + WIDTH + k, tl.sum(values * total[:, None], 0))


@triton.jit(do_not_specialize=["parts", "out_parts"])
def finish_kernel(
    products, sums, gate_products, gate_sums, out_products, out_sums, projection, gate, output_gate, output,
    in_weight, in_bias, out_weight, out_bias, dinput, doutput, in_shares, out_shares, parts, out_parts,
    Z: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows of the matrices: their gradient, and their share in the gradients of the norm.

    dinput: [4·C + Z, Z], projection, gate, output_gate; doutput: [Z, C]; in_shares: [(4·C + Z) / ROWS, 2, Z];
    out_shares: [Z / ROWS, 2, C]. ROWS divides 8.
    """
    C2: tl.constexpr = 2 * C
    first = tl.program_id(0) * ROWS
    if first < 2 * C2 + Z:
        # H and S of a and b are in the order of ``packed``.
        matrix = projection + first * Z
        source = first + first // RUN * RUN
        if first >= C2:
            matrix = gate + (first - C2) * Z
            source = first - C2 + (first - C2) // RUN * RUN + RUN
        if first >= 2 * C2:
            matrix = output_gate + (first - 2 * C2) * Z
            source = first - 2 * C2
            products = gate_products
            sums = gate_sums
            parts = out_parts
        rows = tl.where(first >= 2 * C2, Z, 2 * C2)
        factor = tl.where(first >= C2, -LOG2E, 1.0)
        _finish(
            products, sums, matrix, in_weight, in_bias, dinput + first * Z,
            in_shares + tl.program_id(0) * 2 * Z, rows, parts, source, factor, Z, ROWS, BLOCK,
        )  # fmt: skip
    else:
        row = first - 2 * C2 - Z
        _finish(
            out_products, out_sums, output + row * C, out_weight, out_bias, doutput + row * C,
            out_shares + row // ROWS * 2 * C, Z, out_parts, row, 1.0, C, ROWS, BLOCK,
        )  # fmt: skip


@triton.jit
def _sum_shares(
    shares, dnorm, first, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Columns from ``first`` on of shares [ROWS, WIDTH], added up."""
    k, c = first + tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for start in range(0, ROWS, BLOCK):
        there = (start + c < ROWS)[:, None]
        total += tl.load(shares + (start + c)[:, None] * WIDTH + k[None, :], mask=there, other=0.0)
    tl.store(dnorm + k, tl.sum(total, 0))


@triton.jit
def sum_shares_kernel(
    in_shares, out_shares, in_dnorm, out_dnorm, Z: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of the norms [2, Z] and [2, C] of what ``finish_kernel`` leaves, COLUMNS a program."""
    first = tl.program_id(0) * COLUMNS
    if first < 2 * Z:
        _sum_shares(in_shares, in_dnorm, first, (4 * C + Z) // ROWS, 2 * Z, COLUMNS, BLOCK)
    else:
        _sum_shares(out_shares, out_dnorm, first - 2 * Z, Z // ROWS, 2 * C, COLUMNS, BLOCK)
