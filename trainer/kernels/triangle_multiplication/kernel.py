"""Triton kernels of triangle multiplication, forward and backward, around a batched matrix product.

Shapes: B batch, N tokens (NP with padding to a multiple of 8, so that rows start at 16 bytes), Z channels
of the pair tensor, C hidden channels, R = B·NP² = 64·Q positions (b, i, j); given as Q, R is known to be a
multiple and wide loads follow. Tensors between the kernels have channels first, [channels, R]: a, b and x as
the matrix product takes them, the gradients likewise. What stands in the padding is zero.
``statistics`` [2, 2, R]: mean and reciprocal deviation, of z, then of x.

Five kernels take a block of ROWS positions at a time. The normalised z is never stored: each computes it
from z and the saved mean and reciprocal deviation. Nor are the projections: the backward multiplies again.

The gradient of a matrix W behind a norm with scale w and offset b needs only H = Σ_r g_r ẑ_rᵀ and
S = Σ_r g_r, where g is the gradient of the product and ẑ the standardised row: dW = H·w + S bᵀ, dw_k = Σ_c
W_ck H_ck and db_k = Σ_c W_ck S_c. So the gradients of the norm cost no pass over the positions. H and S are
summed by as many programs as run at a time, each its own part, and the parts in a fixed order: no atomics.

A tile's base is a 64-bit pointer, for the pair tensor of 3 000 tokens has more elements than 32 bits count;
offsets within a tile are 32-bit, but for those of channels, which are R apart.
"""

import triton
import triton.language as tl

# Numbers that Triton shall not compile variants for.
_SIZES = ["N", "NP", "Q"]
_COUNTS = [*_SIZES, "blocks", "parts"]


@triton.jit
def _positions(first, N, NP, R, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """Of the block's positions: their row in [B·N·N], and whether they are there and not padding."""
    # 32-bit divisions: R has no more bits, only what it is multiplied by.
    r = first.to(tl.int32) + tl.arange(0, ROWS)
    if EVEN:
        row = r
        present = r >= 0
    else:
        line, j = r // NP, r % NP
        i = line % NP
        present = (r < R) & (i < N) & (j < N)
        row = tl.where(present, ((line // NP) * N + i) * N + j, 0)
    return row.to(tl.int64), present


@triton.jit
def _load_rows(base, first, row, present, channels, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """[ROWS, channels] of a tensor [B·N·N, WIDTH] in float32 or narrower; 0 where nothing is present."""
    if EVEN:
        local = tl.arange(0, row.shape[0])
        tile = tl.load((base + first * WIDTH) + (local[:, None] * WIDTH + channels[None, :]))
    else:
        tile = tl.load(base + row[:, None] * WIDTH + channels[None, :], mask=present[:, None], other=0.0)
    return tile


@triton.jit
def _store_rows(base, value, first, row, present, channels, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """As :func:`_load_rows`."""
    value = value.to(base.dtype.element_ty)
    if EVEN:
        local = tl.arange(0, row.shape[0])
        tl.store((base + first * WIDTH) + (local[:, None] * WIDTH + channels[None, :]), value)
    else:
        tl.store(base + row[:, None] * WIDTH + channels[None, :], value, mask=present[:, None])


@triton.jit
def _load_channels(base, first, channels, R, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """[channels, ROWS] of a tensor [channels, R]."""
    local = tl.arange(0, ROWS)
    pointers = (base + first) + (channels.to(tl.int64)[:, None] * R + local[None, :])
    if EVEN:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(local < R - first)[None, :], other=0.0)
    return tile


@triton.jit
def _store_channels(base, value, first, channels, R, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """As :func:`_load_channels`."""
    value = value.to(base.dtype.element_ty)
    local = tl.arange(0, ROWS)
    pointers = (base + first) + (channels.to(tl.int64)[:, None] * R + local[None, :])
    if EVEN:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=(local < R - first)[None, :])


@triton.jit
def _load_statistics(statistics, first, R, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """Mean and reciprocal deviation of a block's positions, of [2, R]."""
    local = tl.arange(0, ROWS)
    if EVEN:
        mean = tl.load(statistics + first + local)
        scale = tl.load(statistics + R + first + local)
    else:
        mean = tl.load(statistics + first + local, mask=local < R - first, other=0.0)
        scale = tl.load(statistics + R + first + local, mask=local < R - first, other=0.0)
    return mean, scale


@triton.jit
def _load_mask(mask, first, row, present, EVEN: tl.constexpr):
    if EVEN:
        held = tl.load(mask + first + tl.arange(0, row.shape[0])) != 0
    else:
        held = tl.load(mask + row, mask=present, other=0) != 0
    return held


@triton.jit(do_not_specialize=_SIZES)
def project_kernel(
    z, mask, norm_weight, norm_bias, projection, gate, ab, statistics, N, NP, Q, eps,
    Z: tl.constexpr, C2: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """sigmoid(gate · ẑ) ⊙ (projection · ẑ) of one block, all 2·C channels; C2 = 2·C, BLOCK at a time."""
    R = Q * 64
    first = tl.program_id(0).to(tl.int64) * ROWS
    k = tl.arange(0, Z)
    row, present = _positions(first, N, NP, R, ROWS, EVEN)
    tile = _load_rows(z, first, row, present, k, Z, EVEN).to(tl.float32)
    mean = tl.sum(tile, 1) / Z
    tile -= mean[:, None]
    scale = tl.rsqrt(tl.sum(tile * tile, 1) / Z + eps)
    local = tl.arange(0, ROWS)
    tl.store(statistics + first + local, mean, mask=local < R - first)
    tl.store(statistics + R + first + local, scale, mask=local < R - first)
    weight = tl.load(norm_weight + k).to(tl.float32)
    shift = tl.load(norm_bias + k).to(tl.float32)
    normal = tile * scale[:, None] * weight[None, :] + shift[None, :]
    normal_t = tl.trans(normal.to(ab.dtype.element_ty))
    held = _load_mask(mask, first, row, present, EVEN)
    for start in range(0, C2, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value = tl.load(projection + c[:, None] * Z + k[None, :])
        opening = tl.load(gate + c[:, None] * Z + k[None, :])
        value = tl.dot(value, normal_t, input_precision=PRECISION)
        opening = tl.dot(opening, normal_t, input_precision=PRECISION)
        value = tl.where(held[None, :], tl.sigmoid(opening) * value, 0.0)
        _store_channels(ab, value, first, c, R, ROWS, EVEN)


@triton.jit(do_not_specialize=_SIZES)
def output_kernel(
    z, x, statistics, in_weight, in_bias, out_weight, out_bias, output, output_gate, out,
    N, NP, Q, eps, Z: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sigmoid(output_gate · ẑ) ⊙ (output · LayerNorm(x)) of one block, BLOCK channels at a time."""
    R = Q * 64
    dtype = x.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * ROWS
    k, c = tl.arange(0, Z), tl.arange(0, C)
    row, present = _positions(first, N, NP, R, ROWS, EVEN)
    mean, scale = _load_statistics(statistics, first, R, ROWS, EVEN)
    tile = _load_rows(z, first, row, present, k, Z, EVEN).to(tl.float32)
    weight = tl.load(in_weight + k).to(tl.float32)
    shift = tl.load(in_bias + k).to(tl.float32)
    normal = ((tile - mean[:, None]) * scale[:, None] * weight[None, :] + shift[None, :]).to(dtype)
    tile_t = _load_channels(x, first, c, R, ROWS, EVEN).to(tl.float32)
    mean = tl.sum(tile_t, 0) / C
    tile_t -= mean[None, :]
    scale = tl.rsqrt(tl.sum(tile_t * tile_t, 0) / C + eps)
    local = tl.arange(0, ROWS)
    tl.store(statistics + 2 * R + first + local, mean, mask=local < R - first)
    tl.store(statistics + 3 * R + first + local, scale, mask=local < R - first)
    weight = tl.load(out_weight + c).to(tl.float32)
    shift = tl.load(out_bias + c).to(tl.float32)
    summed = tl.trans((tile_t * scale[None, :] * weight[:, None] + shift[:, None]).to(dtype))
    for start in range(0, Z, BLOCK):
        n = start + tl.arange(0, BLOCK)
        opening = tl.load(output_gate + n[:, None] * Z + k[None, :])
        value = tl.load(output + n[:, None] * C + c[None, :])
        opening = tl.dot(normal, tl.trans(opening), input_precision=PRECISION)
        value = tl.dot(summed, tl.trans(value), input_precision=PRECISION)
        _store_rows(out, tl.sigmoid(opening) * value, first, row, present, n, Z, EVEN)


@triton.jit(do_not_specialize=_COUNTS)
def output_gradient_kernel(
    z, x, dout, statistics, in_weight, in_bias, out_weight, out_bias, output, output_gate,
    dx, dgate, products, sums, N, NP, Q, blocks, parts, Z: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx [C, R], the gradient of the gate's product dgate [Z, R], and a part of H and S of ``output``.

    products: [parts, Z, C]; sums: [parts, Z]; float32.
    """
    R = Q * 64
    dtype = x.dtype.element_ty
    part = tl.program_id(0)
    k, c, n = tl.arange(0, Z), tl.arange(0, C), tl.arange(0, Z)
    gate_matrix = tl.load(output_gate + n[:, None] * Z + k[None, :])
    matrix = tl.load(output + n[:, None] * C + c[None, :])
    weight = tl.load(in_weight + k).to(tl.float32)
    shift = tl.load(in_bias + k).to(tl.float32)
    weight_t = tl.load(out_weight + c).to(tl.float32)
    shift_t = tl.load(out_bias + c).to(tl.float32)
    product = tl.zeros([Z, C], tl.float32)
    total = tl.zeros([Z], tl.float32)
    for block in range(part, blocks, parts):
        first = tl.cast(block, tl.int64) * ROWS
        row, present = _positions(first, N, NP, R, ROWS, EVEN)
        mean, scale = _load_statistics(statistics, first, R, ROWS, EVEN)
        tile = _load_rows(z, first, row, present, k, Z, EVEN).to(tl.float32)
        normal = ((tile - mean[:, None]) * scale[:, None] * weight[None, :] + shift[None, :]).to(dtype)
        opening = tl.sigmoid(tl.dot(gate_matrix, tl.trans(normal), input_precision=PRECISION))
        mean, scale = _load_statistics(statistics + 2 * R, first, R, ROWS, EVEN)
        tile_t = _load_channels(x, first, c, R, ROWS, EVEN).to(tl.float32)
        standard = (tile_t - mean[None, :]) * scale[None, :]
        summed = (standard * weight_t[:, None] + shift_t[:, None]).to(dtype)
        value = tl.dot(matrix, summed, input_precision=PRECISION)
        grad = tl.trans(_load_rows(dout, first, row, present, n, Z, EVEN)).to(tl.float32)
        grad *= opening
        _store_channels(dgate, grad * value * (1.0 - opening), first, n, R, ROWS, EVEN)
        total += tl.sum(grad, 1)
        narrow = grad.to(dtype)
        product = tl.dot(narrow, tl.trans(standard.to(dtype)), product, input_precision=PRECISION)
        dnormal = tl.dot(tl.trans(matrix), narrow, input_precision=PRECISION) * weight_t[:, None]
        level = tl.sum(dnormal, 0) / C
        slope = tl.sum(dnormal * standard, 0) / C
        dtile = (dnormal - level[None, :] - standard * slope[None, :]) * scale[None, :]
        _store_channels(dx, dtile, first, c, R, ROWS, EVEN)
    tl.store(products + (part * Z + n)[:, None] * C + c[None, :], product)
    tl.store(sums + part * Z + n, total)


@triton.jit(do_not_specialize=_SIZES)
def input_gradient_kernel(
    z, mask, dab, dgate, statistics, norm_weight, norm_bias, projection, gate, output_gate, dz, N, NP, Q,
    Z: tl.constexpr, C2: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    GATE_BLOCK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz of one block: what comes through a, b and the output's gate, back through the norm."""
    R = Q * 64
    dtype = dab.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * ROWS
    k = tl.arange(0, Z)
    row, present = _positions(first, N, NP, R, ROWS, EVEN)
    mean, scale = _load_statistics(statistics, first, R, ROWS, EVEN)
    weight = tl.load(norm_weight + k).to(tl.float32)
    shift = tl.load(norm_bias + k).to(tl.float32)
    tile = _load_rows(z, first, row, present, k, Z, EVEN).to(tl.float32)
    normal = ((tile - mean[:, None]) * scale[:, None] * weight[None, :] + shift[None, :]).to(dtype)
    held = _load_mask(mask, first, row, present, EVEN)
    dnormal = tl.zeros([ROWS, Z], tl.float32)
    for start in range(0, C2, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value_matrix = tl.load(projection + c[:, None] * Z + k[None, :])
        gate_matrix = tl.load(gate + c[:, None] * Z + k[None, :])
        grad = tl.trans(_load_channels(dab, first, c, R, ROWS, EVEN)).to(tl.float32)
        grad = tl.where(held[:, None], grad, 0.0)
        opening = tl.sigmoid(tl.dot(normal, tl.trans(gate_matrix), input_precision=PRECISION))
        value = tl.dot(normal, tl.trans(value_matrix), input_precision=PRECISION)
        grad *= opening
        dnormal = tl.dot(grad.to(dtype), value_matrix, dnormal, input_precision=PRECISION)
        grad *= value * (1.0 - opening)
        dnormal = tl.dot(grad.to(dtype), gate_matrix, dnormal, input_precision=PRECISION)
    for start in range(0, Z, GATE_BLOCK):
        c = start + tl.arange(0, GATE_BLOCK)
        gate_matrix = tl.load(output_gate + c[:, None] * Z + k[None, :])
        grad_t = _load_channels(dgate, first, c, R, ROWS, EVEN)
        dnormal = tl.dot(tl.trans(grad_t), gate_matrix, dnormal, input_precision=PRECISION)
    # Read again and not kept: the registers are wanted above, and the cache still has it.
    tile = _load_rows(z, first, row, present, k, Z, EVEN).to(tl.float32)
    standard = (tile - mean[:, None]) * scale[:, None]
    dnormal *= weight[None, :]
    level = tl.sum(dnormal, 1) / Z
    slope = tl.sum(dnormal * standard, 1) / Z
    dtile = (dnormal - level[:, None] - standard * slope[:, None]) * scale[:, None]
    _store_rows(dz, dtile, first, row, present, k, Z, EVEN)


@triton.jit
def _input_products(
    z, mask, dab, statistics, norm_weight, norm_bias, projection, gate, products, sums, part, parts, blocks,
    c, N, NP, R, Z: tl.constexpr, C2: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of H and S of the channels ``c`` of ``projection`` and ``gate``."""
    dtype = dab.dtype.element_ty
    k = tl.arange(0, Z)
    weight = tl.load(norm_weight + k).to(tl.float32)
    shift = tl.load(norm_bias + k).to(tl.float32)
    value_matrix = tl.load(projection + c[:, None] * Z + k[None, :])
    gate_matrix = tl.load(gate + c[:, None] * Z + k[None, :])
    value_product = tl.zeros([BLOCK, Z], tl.float32)
    gate_product = tl.zeros([BLOCK, Z], tl.float32)
    value_sum = tl.zeros([BLOCK], tl.float32)
    gate_sum = tl.zeros([BLOCK], tl.float32)
    for block in range(part, blocks, parts):
        first = tl.cast(block, tl.int64) * ROWS
        row, present = _positions(first, N, NP, R, ROWS, EVEN)
        mean, scale = _load_statistics(statistics, first, R, ROWS, EVEN)
        held = _load_mask(mask, first, row, present, EVEN)
        tile = _load_rows(z, first, row, present, k, Z, EVEN).to(tl.float32)
        standard = (tile - mean[:, None]) * scale[:, None]
        normal_t = tl.trans((standard * weight[None, :] + shift[None, :]).to(dtype))
        narrow = standard.to(dtype)
        opening = tl.sigmoid(tl.dot(gate_matrix, normal_t, input_precision=PRECISION))
        value = tl.dot(value_matrix, normal_t, input_precision=PRECISION)
        grad = _load_channels(dab, first, c, R, ROWS, EVEN).to(tl.float32)
        grad = tl.where(held[None, :], grad, 0.0) * opening
        value_sum += tl.sum(grad, 1)
        value_product = tl.dot(grad.to(dtype), narrow, value_product, input_precision=PRECISION)
        grad *= value * (1.0 - opening)
        gate_sum += tl.sum(grad, 1)
        gate_product = tl.dot(grad.to(dtype), narrow, gate_product, input_precision=PRECISION)
    line = part * (2 * C2 + Z) + c
    tl.store(products + line[:, None] * Z + k[None, :], value_product)
    tl.store(products + (line + C2)[:, None] * Z + k[None, :], gate_product)
    tl.store(sums + line, value_sum)
    tl.store(sums + line + C2, gate_sum)


@triton.jit
def _gate_products(
    z, dgate, statistics, products, sums, part, parts, blocks, n, N, NP, R, Z: tl.constexpr,
    C2: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of H and S of the channels ``n`` of the output's gate."""
    dtype = dgate.dtype.element_ty
    k = tl.arange(0, Z)
    product = tl.zeros([BLOCK, Z], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(part, blocks, parts):
        first = tl.cast(block, tl.int64) * ROWS
        row, present = _positions(first, N, NP, R, ROWS, EVEN)
        mean, scale = _load_statistics(statistics, first, R, ROWS, EVEN)
        tile = _load_rows(z, first, row, present, k, Z, EVEN).to(tl.float32)
        narrow = ((tile - mean[:, None]) * scale[:, None]).to(dtype)
        grad = _load_channels(dgate, first, n, R, ROWS, EVEN)
        total += tl.sum(grad.to(tl.float32), 1)
        product = tl.dot(grad, narrow, product, input_precision=PRECISION)
    line = part * (2 * C2 + Z) + 2 * C2 + n
    tl.store(products + line[:, None] * Z + k[None, :], product)
    tl.store(sums + line, total)


@triton.jit(do_not_specialize=_COUNTS)
def weight_gradient_kernel(
    z, mask, dab, dgate, statistics, norm_weight, norm_bias, projection, gate, products, sums,
    N, NP, Q, blocks, parts, Z: tl.constexpr, C2: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, GATE_BLOCK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of H and S of BLOCK channels of both input matrices, or GATE_BLOCK of the output's gate.

    products: [parts, 2·C2 + Z, Z], projection's rows, gate's, output_gate's; sums: [parts, 2·C2 + Z].
    Programs that take the same positions follow each other, so that z is read from memory once.
    """
    R = Q * 64
    SLICES: tl.constexpr = C2 // BLOCK
    ALL_SLICES: tl.constexpr = SLICES + Z // GATE_BLOCK
    piece = tl.program_id(0) % ALL_SLICES
    part = tl.program_id(0) // ALL_SLICES
    if piece < SLICES:
        _input_products(
            z, mask, dab, statistics, norm_weight, norm_bias, projection, gate, products, sums, part, parts,
            blocks, piece * BLOCK + tl.arange(0, BLOCK), N, NP, R, Z, C2, ROWS, BLOCK, EVEN, PRECISION,
        )  # fmt: skip
    else:
        n = (piece - SLICES) * GATE_BLOCK + tl.arange(0, GATE_BLOCK)
        _gate_products(
            z, dgate, statistics, products, sums, part, parts, blocks, n, N, NP, R, Z, C2, ROWS, GATE_BLOCK,
            EVEN, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "parts", "SPLIT_1", "SPLIT_2"])
def finish_kernel(
    products, sums, projection, gate, output, norm_weight, norm_bias, dmatrix, shares, rows, parts,
    SPLIT_1, SPLIT_2, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows of the stacked matrices: their gradient, and their share in the gradients of the norm.

    The matrices are ``projection`` up to row SPLIT_1, ``gate`` up to SPLIT_2, then ``output``.
    products: [parts, rows, WIDTH]; sums: [parts, rows]; dmatrix: [rows, WIDTH];
    shares: [rows / ROWS, 2, WIDTH].
    """
    first = tl.program_id(0) * ROWS
    c, k, p = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    product = tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, parts, BLOCK):
        there = start + p < parts
        line = (start + p)[:, None] * rows + (first + c)[None, :]
        tile = products + line[:, :, None] * WIDTH + k[None, None, :]
        product += tl.sum(tl.load(tile, mask=there[:, None, None], other=0.0), 0)
        total += tl.sum(tl.load(sums + line, mask=there[:, None], other=0.0), 0)
    place = c[:, None] * WIDTH + k[None, :]
    if first < SPLIT_1:
        matrix = tl.load(projection + first * WIDTH + place).to(tl.float32)
    elif first < SPLIT_2:
        matrix = tl.load(gate + (first - SPLIT_1) * WIDTH + place).to(tl.float32)
    else:
        matrix = tl.load(output + (first - SPLIT_2) * WIDTH + place).to(tl.float32)
    weight = tl.load(norm_weight + k).to(tl.float32)
    shift = tl.load(norm_bias + k).to(tl.float32)
    dmatrix_tile = product * weight[None, :] + total[:, None] * shift[None, :]
    tl.store(dmatrix + first * WIDTH + place, dmatrix_tile.to(dmatrix.dtype.element_ty))
    share = shares + tl.program_id(0) * 2 * WIDTH + k
    tl.store(share, tl.sum(matrix * product, 0))
    tl.store(share + WIDTH, tl.sum(matrix * total[:, None], 0))


@triton.jit(do_not_specialize=["rows"])
def sum_shares_kernel(
    shares, dnorm, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """shares [rows, WIDTH] → dnorm [WIDTH], COLUMNS a program."""
    k, c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for start in range(0, rows, BLOCK):
        there = (start + c < rows)[:, None]
        total += tl.load(shares + (start + c)[:, None] * WIDTH + k[None, :], mask=there, other=0.0)
    tl.store(dnorm + k, tl.sum(total, 0).to(dnorm.dtype.element_ty))
