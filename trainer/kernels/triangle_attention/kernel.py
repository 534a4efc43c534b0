"""Triton kernels of the projections of triangle attention: LayerNorm(z), then q, k, v, gate and pair bias.

Shapes: positions (b, r, n), r the row whose positions attend to each other and n its positions, both N.
Around the starting node z is [B, r, n, C], around the ending node [B, n, r, C]: strides say which, and
nothing is transposed. H heads of D channels; HD = H·D.

projected: [4, B, R, H, N, D], q, k, v and gate. bias: [B, H, R, JP], as EvoFlash-3D reads it: times SCALE,
and -inf from N on. weight: the layers' weights in the products' dtype, stacked: [4·HD + HP, C], HP the heads
with padding (rows of zeros).
"""

import triton
import triton.language as tl

from megafold.trainer.kernels.dealing import pinned
from megafold.trainer.kernels.layernorm.kernel import row_mean, standardised
from megafold.trainer.kernels.products import add_kept, add_product_kept, product_t
from megafold.trainer.kernels.vendors import narrowed

#: Numbers that differ from length to length: nothing is compiled anew for one. Strides are multiples of C.
_SIZES = ["R", "N"]


@triton.jit
def pack_kernel(
    first, second, third, fourth, out, A, B, C, D, TOTAL, BLOCK: tl.constexpr
):  # fmt: skip
    """Arrays of A, B, C and D numbers, zeros after the third up to where the fourth begins, TOTAL - D."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(first + at, mask=at < A, other=0.0).to(tl.float32)
    value += tl.load(second + (at - A), mask=(at >= A) & (at < A + B), other=0.0).to(tl.float32)
    value += tl.load(third + (at - A - B), mask=(at >= A + B) & (at < A + B + C), other=0.0).to(tl.float32)
    value += tl.load(fourth + (at - TOTAL + D), mask=(at >= TOTAL - D) & (at < TOTAL), other=0.0).to(
        tl.float32
    )
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < TOTAL)


@triton.jit(do_not_specialize=_SIZES)
def project_kernel(
    z, norm_weight, norm_bias, weight, projected, bias, R, N, JP, z_b, z_r, z_n, part,
    C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SCALE: tl.constexpr, LIMIT: tl.constexpr, EPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BM positions of one row, all projections. ``part``: elements between q and k."""
    HD: tl.constexpr = H * D
    tiles = tl.cdiv(N, BM)
    pid = tl.program_id(0)
    first, row = (pid % tiles) * BM, pid // tiles
    b, r = (row // R).to(tl.int64), (row % R).to(tl.int64)
    n, c = tl.arange(0, BM), tl.arange(0, CP)
    inside = n < N - first
    source = z + b * z_b + r * z_r + tl.cast(first, tl.int64) * z_n + (n[:, None] * z_n + c[None, :])
    x = tl.load(source, mask=inside[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
    standard, _ = standardised(x, C, CP, EPS)
    scale = tl.load(norm_weight + c, mask=c < C, other=0.0).to(tl.float32)
    shift = tl.load(norm_bias + c, mask=c < C, other=0.0).to(tl.float32)
    normed = narrowed(standard * scale[None, :] + shift[None, :], weight.dtype.element_ty)
    target = projected + (b * R + r) * (N * HD) + tl.cast(first, tl.int64) * D + n[:, None] * D
    for start in range(0, 4 * HD, BN):
        column = start + tl.arange(0, BN)
        w = tl.load(
            weight + column[:, None] * C + c[None, :],
            mask=(column < 4 * HD)[:, None] & (c < C)[None, :],
            other=0.0,
        )
        y = product_t(normed, w, PRECISION)
        within = column % HD
        place = (column // HD).to(tl.int64) * part + (within // D).to(tl.int64) * (N * D) + within % D
        tl.store(
            target + place[None, :],
            y.to(projected.dtype.element_ty),
            mask=inside[:, None] & (column < 4 * HD)[None, :],
        )
    head = tl.arange(0, HP)
    w = tl.load(
        weight + (4 * HD + head)[:, None] * C + c[None, :],
        mask=(c < C)[None, :] & (head < HP)[:, None],
        other=0.0,
    )
    # Rounded once as a projection and once more with the scale, as it would be without the fusion.
    y = product_t(normed, w, PRECISION).to(weight.dtype.element_ty).to(tl.float32) * SCALE
    if LIMIT > 0:
        y = tl.minimum(tl.maximum(y, -LIMIT), LIMIT)
    y = tl.where(inside[:, None], y, float("-inf")).to(bias.dtype.element_ty)
    line = bias + ((b * H + head.to(tl.int64)) * R + r) * JP + first
    tl.store(line[None, :] + n[:, None], y, mask=(head < H)[None, :] & (n < JP - first)[:, None])
    if first + BM >= N:
        nothing = tl.full([BM, HP], float("-inf"), bias.dtype.element_ty)
        for beyond in range(BM, JP - first, BM):
            tl.store(line[None, :] + (n + beyond)[:, None], nothing, mask=(head < H)[None, :])


@triton.jit
def _add_to(sums, losses, rows, earlier, known, KEPT: tl.constexpr):
    """Add the sum of ``rows`` to what is at ``sums``, if there are ``earlier`` ones; KEPT: and keep account.

    All warps read before the sum, for which they wait for each other, and so before one of them writes.
    """
    total = tl.load(sums, mask=earlier, other=0.0)
    if KEPT:
        total, lost = add_kept(total, tl.load(losses, mask=earlier, other=0.0), tl.sum(rows, 0))
        tl.store(losses, lost, mask=known)
    else:
        total += tl.sum(rows, 0)
    tl.store(sums, total, mask=known)


@triton.jit(do_not_specialize=_SIZES)
def input_gradient_kernel(
    dprojected, dbias, dout, z, norm_weight, norm_bias, weight, dz, parts, B, R, N, JP,
    z_b, z_r, z_n, w_b, w_r, w_n, g_b, g_r, g_n, part,
    C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """dZ, with the residual's share where there is one; sums for the norm's and the bias layer's parameters.

    Strides: ``w_*`` of dz, ``g_*`` of dout. parts: [programs, HP + 2, C] float32: the bias layer's weight,
    the norm's weight, its offset; the caller adds the programs' in their order. The norm's are added up in
    the cache: a number a thread, where in registers every thread would hold what its rows share. In float32
    what rounding takes from them stands where the bias layer's go last.
    """
    HD: tl.constexpr = H * D
    dtype = weight.dtype.element_ty
    tiles = tl.cdiv(N, BM)
    n, c, head = tl.arange(0, BM), tl.arange(0, CP), tl.arange(0, HP)
    known = c < C
    w_bias = tl.load(weight + (4 * HD + head)[:, None] * C + c[None, :], mask=known[None, :], other=0.0)
    dw = tl.zeros([HP, CP], tl.float32)
    dw_lost = tl.zeros([HP, CP], tl.float32)
    own = parts + tl.program_id(0).to(tl.int64) * ((HP + 2) * C)
    sums = own + HP * C + c
    for tile in range(tl.program_id(0), B * R * tiles, tl.num_programs(0)):
        first, row = (tile % tiles) * BM, tile // tiles
        b, r = (row // R).to(tl.int64), (row % R).to(tl.int64)
        start = tl.cast(first, tl.int64)
        inside = (n < N - first)[:, None]
        # The last position stands for those beyond it, until ``dn`` is known: masks would fill registers.
        held = tl.minimum(n, N - 1 - first)[:, None]
        line = dbias + ((b * H + head.to(tl.int64)) * R + r) * JP + first
        # With the padding, for wide reads.
        db = tl.load(
            line[None, :] + n[:, None], mask=(n < JP - first)[:, None] & (head < H)[None, :], other=0.0
        )
        db = tl.where(inside, db, 0.0).to(dtype)
        dn = tl.dot(db, w_bias, input_precision=PRECISION)
        dn_lost = tl.zeros([BM, CP], tl.float32)
        source = dprojected + (b * R + r) * (N * HD) + start * D + held * D
        for from_column in range(0, 4 * HD, BN):
            column = from_column + tl.arange(0, BN)
            within = column % HD
            place = (column // HD).to(tl.int64) * part + (within // D).to(tl.int64) * (N * D) + within % D
            real = column < 4 * HD
            d = tl.load(source + place[None, :], mask=real[None, :], other=0.0)
            w = tl.load(
                weight + column[:, None] * C + c[None, :], mask=real[:, None] & known[None, :], other=0.0
            )
            dn, dn_lost = add_product_kept(dn, dn_lost, d, w, PRECISION)
        dn = tl.where(inside, dn, 0.0)
        source = z + b * z_b + r * z_r + start * z_n + (held * z_n + c[None, :])
        x = tl.load(source, mask=known[None, :], other=0.0)
        # A product with zeros brings the rows to where the matrix units leave ``dn``.
        x = pinned(x.to(tl.float32), dtype)
        standard, inverse = standardised(x, C, CP, EPS)
        # Read for each tile: kept, the two would fill registers all the way.
        scale = tl.load(norm_weight + c, mask=known, other=0.0).to(tl.float32)
        shift = tl.load(norm_bias + c, mask=known, other=0.0).to(tl.float32)
        normed = narrowed(standard * scale[None, :] + shift[None, :], dtype)
        dw, dw_lost = add_product_kept(dw, dw_lost, tl.trans(db), normed, PRECISION)
        earlier = c < tl.where(tile < tl.num_programs(0), 0, C)
        _add_to(sums, own + c, dn * standard, earlier, known, dtype == tl.float32)
        _add_to(sums + C, own + C + c, dn, earlier, known, dtype == tl.float32)
        ds = dn * scale[None, :]
        dx = ds - row_mean(ds, C)[:, None] - standard * row_mean(ds * standard, C)[:, None]
        dx *= inverse
        if HAS_RESIDUAL:
            grad = dout + b * g_b + r * g_r + start * g_n + (held * g_n + c[None, :])
            dx += tl.load(grad, mask=known[None, :], other=0.0).to(tl.float32)
        target = dz + b * w_b + r * w_r + start * w_n + (n[:, None] * w_n + c[None, :])
        tl.store(target, dx.to(dz.dtype.element_ty), mask=inside & known[None, :])
    tl.store(own + head[:, None] * C + c[None, :], dw, mask=known[None, :])


@triton.jit(do_not_specialize=[*_SIZES, "splits"])
def weight_gradient_kernel(
    dprojected, z, norm_weight, norm_bias, parts, B, R, N, splits, z_b, z_r, z_n, part,
    C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums for the weights of q, k, v and gate: BN of their rows over one of ``splits`` shares of the tiles.

    parts: [splits, 4·HD, C] float32. The programs of one share follow each other: they read the same z.
    """
    HD: tl.constexpr = H * D
    blocks: tl.constexpr = (4 * HD + BN - 1) // BN
    pid = tl.program_id(0)
    column = (pid % blocks) * BN + tl.arange(0, BN)
    split = pid // blocks
    tiles = tl.cdiv(N, BM)
    n, c = tl.arange(0, BM), tl.arange(0, CP)
    known, real = c < C, column < 4 * HD
    scale = tl.load(norm_weight + c, mask=known, other=0.0).to(tl.float32)
    shift = tl.load(norm_bias + c, mask=known, other=0.0).to(tl.float32)
    within = column % HD
    place = (column // HD).to(tl.int64) * part + (within // D).to(tl.int64) * (N * D) + within % D
    dw = tl.zeros([BN, CP], tl.float32)
    dw_lost = tl.zeros([BN, CP], tl.float32)
    for tile in range(split, B * R * tiles, splits):
        first, row = (tile % tiles) * BM, tile // tiles
        b, r = (row // R).to(tl.int64), (row % R).to(tl.int64)
        start = tl.cast(first, tl.int64)
        inside = n < N - first
        source = z + b * z_b + r * z_r + start * z_n + (n[:, None] * z_n + c[None, :])
        x = tl.load(source, mask=inside[:, None] & known[None, :], other=0.0).to(tl.float32)
        standard, _ = standardised(x, C, CP, EPS)
        normed = narrowed(standard * scale[None, :] + shift[None, :], dprojected.dtype.element_ty)
        line = dprojected + (b * R + r) * (N * HD) + start * D + n[:, None] * D
        d = tl.load(line + place[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        dw, dw_lost = add_product_kept(dw, dw_lost, tl.trans(d), normed, PRECISION)
    target = parts + (split.to(tl.int64) * (4 * HD) + column[:, None]) * C + c[None, :]
    tl.store(target, dw, mask=real[:, None] & known[None, :])


@triton.jit(do_not_specialize=["parts_a", "parts_b", "parts_c"])
def sum_kernel(
    first, second, third, out, A, B, C, parts_a, parts_b, parts_c, BLOCK: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Three arrays of parts [parts_a, A], [parts_b, B] and [parts_c, C] → their sums, one after the other.

    A program sums BLOCK numbers, STEP parts at a time, always in the same order; it belongs to one array.
    """
    pid = tl.program_id(0)
    blocks_a, blocks_b = tl.cdiv(A, BLOCK), tl.cdiv(B, BLOCK)
    if pid < blocks_a:
        _sum_parts(first, out, pid, A, parts_a, BLOCK, STEP)
    elif pid < blocks_a + blocks_b:
        _sum_parts(second, out + A, pid - blocks_a, B, parts_b, BLOCK, STEP)
    else:
        _sum_parts(third, out + A + B, pid - blocks_a - blocks_b, C, parts_c, BLOCK, STEP)


@triton.jit
def _sum_parts(parts, out, block, count, number, BLOCK: tl.constexpr, STEP: tl.constexpr):
    at = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([STEP, BLOCK], tl.float32)
    for begin in tl.range(0, number, STEP, loop_unroll_factor=2):
        part = begin + tl.arange(0, STEP)
        place = parts + part.to(tl.int64)[:, None] * count + at[None, :]
        total += tl.load(place, mask=(part < number)[:, None] & (at < count)[None, :], other=0.0)
    tl.store(out + at, tl.sum(total, 0), mask=at < count)
