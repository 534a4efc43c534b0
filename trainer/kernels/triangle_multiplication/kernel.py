"""Triton kernels of triangle multiplication, forward and backward, around a batched matrix product.

Shapes: B batch, N tokens (NP with padding to a multiple of 8, so that rows start at 16 bytes), Z channels
of the pair tensor, C hidden channels, R = B·NP² = 64·Q positions (b, i, j); given as Q, R is known to be a
multiple, and wide loads follow. What stands in the padding is zero.

Most tensors between the kernels have channels first, [channels, R]: a, b and x as the matrix product takes
them, and the gradients. The standardised z is [R, Z], so that each kernel's tile goes from memory to the
matrix units without passing registers; the standardised x takes the place of x. The projections are not
stored: the backward multiplies again.

``prepare_kernel`` takes the norms' scales into the matrices behind them and their offsets into a vector, and
subtracts from each row of a matrix its mean: the product with a standardised row stays what it is, and the
gradient that comes back through it has mean zero, as the gradient of a norm asks. Gates are in units of
-ln 2, for sigmoid(x) = 1 / (1 + 2^-x·log2(e)). Channel c's rows of ``projection`` and ``gate`` are 8 rows
apart in ``packed``: one product gives both, and both in the same thread.

The gradient of a matrix W behind a norm with scale w and offset b needs only H = Σ_r g_r ẑ_rᵀ and
S = Σ_r g_r, where g is the gradient of the product and ẑ the standardised row: dW = H·w + S bᵀ, dw_k = Σ_c
W_ck H_ck and db_k = Σ_c W_ck S_c. So the gradients of the norm cost no pass over the positions. H and S are
summed by as many programs as run at a time, each its own part, and the parts in a fixed order: no atomics.

A tile's base is a 64-bit pointer, for the pair tensor of 3 000 tokens has more elements than 32 bits count;
offsets within a tile are 32-bit, but for those of channels, which are R apart.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
#: Rows of ``projection`` in a run of ``packed``; as many of ``gate`` follow.
RUN = tl.constexpr(8)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Numbers that Triton shall not compile variants for.
_SIZES = ["N", "NP", "Q"]
_COUNTS = [*_SIZES, "blocks", "parts"]


@triton.jit
def _open(gate):
    """The sigmoid of what ``gate`` is -log2(e) times of."""
    # A division that rounds correctly costs ten instructions.
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp2(gate))
    else:
        return libdevice.fast_dividef(1.0, 1.0 + tl.exp2(gate))


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
    """[ROWS, channels] of a tensor [B·N·N, WIDTH]; 0 where nothing is present."""
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
def _load_positions(base, first, channels, R, WIDTH: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """[ROWS, channels] of a tensor [R, WIDTH]."""
    local = tl.arange(0, ROWS)
    pointers = (base + first * WIDTH) + (local[:, None] * WIDTH + channels[None, :])
    if EVEN:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(local < R - first)[:, None], other=0.0)
    return tile


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
def _load_scale(scales, first, R, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """The reciprocal deviations of a block's positions, of [R]."""
    local = tl.arange(0, ROWS)
    if EVEN:
        scale = tl.load(scales + first + local)
    else:
        scale = tl.load(scales + first + local, mask=local < R - first, other=0.0)
    return scale


@triton.jit
def _load_mask(mask, first, row, present, EVEN: tl.constexpr):
    if EVEN:
        held = tl.load(mask + first + tl.arange(0, row.shape[0])) != 0
    else:
        held = tl.load(mask + row, mask=present, other=0) != 0
    return held


@triton.jit
def _split_rows(both, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[2·BLOCK, ROWS] in the order of ``packed`` → projection's and gate's [BLOCK, ROWS]."""
    runs = tl.permute(tl.reshape(both, [BLOCK // RUN, 2, RUN, ROWS]), (0, 2, 3, 1))
    value, gate = tl.split(runs)
    return tl.reshape(value, [BLOCK, ROWS]), tl.reshape(gate, [BLOCK, ROWS])


@triton.jit
def _join_rows(value, gate, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The opposite of :func:`_split_rows`."""
    value = tl.reshape(value, [BLOCK // RUN, RUN, ROWS])
    gate = tl.reshape(gate, [BLOCK // RUN, RUN, ROWS])
    return tl.reshape(tl.permute(tl.join(value, gate), (0, 3, 1, 2)), [2 * BLOCK, ROWS])


@triton.jit
def _prepare(matrix, norm_weight, norm_bias, out, offsets, source, target, factor, WIDTH: tl.constexpr):
    """RUN rows of a matrix behind a norm, as the module says; ``factor``: of the gates."""
    c, k = tl.arange(0, RUN), tl.arange(0, WIDTH)
    tile = tl.load(matrix + (source + c)[:, None] * WIDTH + k[None, :]).to(tl.float32) * factor
    shift = tl.load(norm_bias + k).to(tl.float32)
    tl.store(offsets + target + c, tl.sum(tile * shift[None, :], 1))
    tile *= tl.load(norm_weight + k).to(tl.float32)[None, :]
    tile -= (tl.sum(tile, 1) / WIDTH)[:, None]
    tl.store(out + (target + c)[:, None] * WIDTH + k[None, :], tile.to(out.dtype.element_ty))


@triton.jit
def prepare_kernel(
    projection, gate, output_gate, output, in_weight, in_bias, out_weight, out_bias,
    packed, closing, offsets, Z: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One run of 8 rows of the matrices.

    packed: [4·C + Z, Z], runs of projection and gate in turn, then output_gate; closing: [Z, C], of output;
    offsets: [4·C + 2·Z] float32, of both.
    """
    run = tl.program_id(0)
    RUNS: tl.constexpr = 2 * C // RUN
    if run < RUNS:
        _prepare(projection, in_weight, in_bias, packed, offsets, run * RUN, 2 * run * RUN, 1.0, Z)
    elif run < 2 * RUNS:
        run -= RUNS
        _prepare(gate, in_weight, in_bias, packed, offsets, run * RUN, (2 * run + 1) * RUN, -LOG2E, Z)
    elif run < 2 * RUNS + Z // RUN:
        source = (run - 2 * RUNS) * RUN
        _prepare(output_gate, in_weight, in_bias, packed, offsets, source, run * RUN, -LOG2E, Z)
    else:
        source = (run - 2 * RUNS) * RUN - Z
        _prepare(output, out_weight, out_bias, closing, offsets + 4 * C + Z, source, source, 1.0, C)


@triton.jit(do_not_specialize=_SIZES)
def project_kernel(
    z, mask, packed, offsets, ab, standard, scales, N, NP, Q, eps, Z: tl.constexpr, C2: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z of one block standardised, and from it a and b, 2·C = C2 channels, BLOCK at a time."""
    R = Q * 64
    first = tl.program_id(0).to(tl.int64) * ROWS
    k, local = tl.arange(0, Z), tl.arange(0, ROWS)
    row, present = _positions(first, N, NP, R, ROWS, EVEN)
    tile = _load_rows(z, first, row, present, k, Z, EVEN).to(tl.float32)
    tile -= (tl.sum(tile, 1) / Z)[:, None]
    scale = tl.rsqrt(tl.sum(tile * tile, 1) / Z + eps)
    narrow = (tile * scale[:, None]).to(standard.dtype.element_ty)
    target = (standard + first * Z) + (local[:, None] * Z + k[None, :])
    if EVEN:
        tl.store(scales + first + local, scale)
        tl.store(target, narrow)
    else:
        tl.store(scales + first + local, scale, mask=local < R - first)
        tl.store(target, narrow, mask=(local < R - first)[:, None])
    held = _load_mask(mask, first, row, present, EVEN)
    normal_t = tl.trans(narrow)
    for start in range(0, C2, BLOCK):
        m = 2 * start + tl.arange(0, 2 * BLOCK)
        matrix = tl.load(packed + m[:, None] * Z + k[None, :])
        both = tl.dot(matrix, normal_t, input_precision=PRECISION) + tl.load(offsets + m)[:, None]
        value, gate = _split_rows(both, BLOCK, ROWS)
        value = tl.where(held[None, :], _open(gate) * value, 0.0)
        _store_channels(ab, value, first, start + tl.arange(0, BLOCK), R, ROWS, EVEN)


@triton.jit(do_not_specialize=_SIZES)
def output_kernel(
    standard, x, gate_matrix, closing, gate_offsets, offsets, out, scales, N, NP, Q, eps,
    Z: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output of one block, BLOCK channels at a time; KEEP: x is standardised in its place."""
    R = Q * 64
    first = tl.program_id(0).to(tl.int64) * ROWS
    k, c, local = tl.arange(0, Z), tl.arange(0, C), tl.arange(0, ROWS)
    row, present = _positions(first, N, NP, R, ROWS, EVEN)
    normal = _load_positions(standard, first, k, R, Z, ROWS, EVEN)
    tile = _load_channels(x, first, c, R, ROWS, EVEN).to(tl.float32)
    tile -= (tl.sum(tile, 0) / C)[None, :]
    scale = tl.rsqrt(tl.sum(tile * tile, 0) / C + eps)
    narrow = (tile * scale[None, :]).to(x.dtype.element_ty)
    if KEEP:
        tl.store(scales + first + local, scale, mask=local < R - first)
        _store_channels(x, narrow, first, c, R, ROWS, EVEN)
    summed = tl.trans(narrow)
    for start in range(0, Z, BLOCK):
        n = start + tl.arange(0, BLOCK)
        gate = tl.load(gate_matrix + n[:, None] * Z + k[None, :])
        value = tl.load(closing + n[:, None] * C + c[None, :])
        gate = tl.dot(normal, tl.trans(gate), input_precision=PRECISION) + tl.load(gate_offsets + n)[None, :]
        value = tl.dot(summed, tl.trans(value), input_precision=PRECISION) + tl.load(offsets + n)[None, :]
        _store_rows(out, _open(gate) * value, first, row, present, n, Z, EVEN)


@triton.jit(do_not_specialize=_COUNTS)
def output_gradient_kernel(
    standard, x, dout, gate_matrix, closing, gate_offsets, offsets, scales, dx, dgate, products, sums,
    N, NP, Q, blocks, parts, Z: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dx [C, R], the gradient of the gate's product dgate [Z, R], and a part of H and S of ``output``.

    x: as the forward left it, standardised; products: [parts, Z, C]; sums: [parts, Z]; float32.
    """
    R = Q * 64
    dtype = x.dtype.element_ty
    part = tl.program_id(0)
    k, c, n = tl.arange(0, Z), tl.arange(0, C), tl.arange(0, Z)
    opening = tl.load(gate_matrix + n[:, None] * Z + k[None, :])
    matrix = tl.load(closing + n[:, None] * C + c[None, :])
    gate_shift = tl.load(gate_offsets + n)
    shift = tl.load(offsets + n)
    product = tl.zeros([Z, C], tl.float32)
    # Zeros, laid out as what is added to them.
    total = tl.sum(product, 1)
    for block in range(part, blocks, parts):
        first = tl.cast(block, tl.int64) * ROWS
        row, present = _positions(first, N, NP, R, ROWS, EVEN)
        normal = _load_positions(standard, first, k, R, Z, ROWS, EVEN)
        tile = _load_channels(x, first, c, R, ROWS, EVEN)
        scale = _load_scale(scales, first, R, ROWS, EVEN)
        gate = tl.dot(opening, tl.trans(normal), input_precision=PRECISION)
        value = tl.dot(matrix, tile, input_precision=PRECISION)
        gate = _open(gate + gate_shift[:, None])
        grad = tl.trans(_load_rows(dout, first, row, present, n, Z, EVEN)).to(tl.float32) * gate
        slope = tl.sum(grad * value, 0) / C
        _store_channels(dgate, grad * (value + shift[:, None]) * (gate * LN2 - LN2), first, n, R, ROWS, EVEN)
        total += tl.sum(grad, 1)
        narrow = grad.to(dtype)
        product = tl.dot(narrow, tl.trans(tile), product, input_precision=PRECISION)
        dtile = tl.dot(tl.trans(matrix), narrow, input_precision=PRECISION)
        dtile = (dtile - tile.to(tl.float32) * slope[None, :]) * scale[None, :]
        _store_channels(dx, dtile, first, c, R, ROWS, EVEN)
    tl.store(products + (part * Z + n)[:, None] * C + c[None, :], product)
    tl.store(sums + part * Z + n, total)


@triton.jit(do_not_specialize=_SIZES)
def input_gradient_kernel(
    standard, mask, dab, dgate, packed, offsets, scales, dz, N, NP, Q, Z: tl.constexpr, C2: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GATE_BLOCK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dz of one block: what comes through a, b and the output's gate, back through the norm."""
    R = Q * 64
    dtype = dab.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * ROWS
    k = tl.arange(0, Z)
    row, present = _positions(first, N, NP, R, ROWS, EVEN)
    normal = _load_positions(standard, first, k, R, Z, ROWS, EVEN)
    held = _load_mask(mask, first, row, present, EVEN)
    dnormal = tl.zeros([ROWS, Z], tl.float32)
    for start in range(0, C2, BLOCK):
        c = start + tl.arange(0, BLOCK)
        m = c + c // RUN * RUN
        value_matrix = tl.load(packed + m[:, None] * Z + k[None, :])
        gate_matrix = tl.load(packed + (m + RUN)[:, None] * Z + k[None, :])
        value = tl.dot(normal, tl.trans(value_matrix), input_precision=PRECISION)
        gate = tl.dot(normal, tl.trans(gate_matrix), input_precision=PRECISION)
        value += tl.load(offsets + m)[None, :]
        gate = _open(gate + tl.load(offsets + m + RUN)[None, :])
        grad = tl.trans(_load_channels(dab, first, c, R, ROWS, EVEN)).to(tl.float32)
        grad = tl.where(held[:, None], grad, 0.0) * gate
        dnormal = tl.dot(grad.to(dtype), value_matrix, dnormal, input_precision=PRECISION)
        grad *= value * (gate * LN2 - LN2)
        dnormal = tl.dot(grad.to(dtype), gate_matrix, dnormal, input_precision=PRECISION)
    for start in range(0, Z, GATE_BLOCK):
        c = start + tl.arange(0, GATE_BLOCK)
        matrix = tl.load(packed + (2 * C2 + c)[:, None] * Z + k[None, :])
        grad = _load_channels(dgate, first, c, R, ROWS, EVEN)
        dnormal = tl.dot(tl.trans(grad), matrix, dnormal, input_precision=PRECISION)
    # Read again and not kept: the registers are wanted above, and the cache still has it.
    tile = _load_positions(standard, first, k, R, Z, ROWS, EVEN).to(tl.float32)
    scale = _load_scale(scales, first, R, ROWS, EVEN)
    slope = tl.sum(dnormal * tile, 1) / Z
    _store_rows(dz, (dnormal - tile * slope[:, None]) * scale[:, None], first, row, present, k, Z, EVEN)


@triton.jit
def _input_products(
    standard, mask, dab, packed, offsets, products, sums, part, parts, blocks, start, N, NP, R,
    Z: tl.constexpr, C2: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of H and S of BLOCK channels of a and b, from channel ``start``."""
    dtype = dab.dtype.element_ty
    k, m, c = tl.arange(0, Z), 2 * start + tl.arange(0, 2 * BLOCK), start + tl.arange(0, BLOCK)
    matrix = tl.load(packed + m[:, None] * Z + k[None, :])
    shift = tl.load(offsets + m)
    product = tl.zeros([2 * BLOCK, Z], tl.float32)
    total = tl.zeros([2 * BLOCK], tl.float32)
    for block in range(part, blocks, parts):
        first = tl.cast(block, tl.int64) * ROWS
        row, present = _positions(first, N, NP, R, ROWS, EVEN)
        held = _load_mask(mask, first, row, present, EVEN)
        normal = _load_positions(standard, first, k, R, Z, ROWS, EVEN)
        grad = _load_channels(dab, first, c, R, ROWS, EVEN)
        both = tl.dot(matrix, tl.trans(normal), input_precision=PRECISION) + shift[:, None]
        value, gate = _split_rows(both, BLOCK, ROWS)
        gate = _open(gate)
        grad = tl.where(held[None, :], grad.to(tl.float32), 0.0) * gate
        both = _join_rows(grad, grad * value * (gate * LN2 - LN2), BLOCK, ROWS)
        total += tl.sum(both, 1)
        product = tl.dot(both.to(dtype), normal, product, input_precision=PRECISION)
    line = part * (2 * C2 + Z) + m
    tl.store(products + line[:, None] * Z + k[None, :], product)
    tl.store(sums + line, total)


@triton.jit
def _gate_products(
    standard, dgate, products, sums, part, parts, blocks, n, R, Z: tl.constexpr, C2: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of H and S of the channels ``n`` of the output's gate."""
    k = tl.arange(0, Z)
    product = tl.zeros([BLOCK, Z], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(part, blocks, parts):
        first = tl.cast(block, tl.int64) * ROWS
        normal = _load_positions(standard, first, k, R, Z, ROWS, EVEN)
        grad = _load_channels(dgate, first, n, R, ROWS, EVEN)
        total += tl.sum(grad.to(tl.float32), 1)
        product = tl.dot(grad, normal, product, input_precision=PRECISION)
    line = part * (2 * C2 + Z) + 2 * C2 + n
    tl.store(products + line[:, None] * Z + k[None, :], product)
    tl.store(sums + line, total)


@triton.jit(do_not_specialize=_COUNTS)
def weight_gradient_kernel(
    standard, mask, dab, dgate, packed, offsets, products, sums, N, NP, Q, blocks, parts,
    Z: tl.constexpr, C2: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GATE_BLOCK: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of H and S of BLOCK channels of a and b, or GATE_BLOCK of the output's gate.

    products: [parts, 2·C2 + Z, Z], in the order of ``packed``; sums: [parts, 2·C2 + Z]. Programs that take
    the same positions follow each other, so that the standardised z is read from memory once.
    """
    R = Q * 64
    SLICES: tl.constexpr = C2 // BLOCK
    ALL_SLICES: tl.constexpr = SLICES + Z // GATE_BLOCK
    piece = tl.program_id(0) % ALL_SLICES
    part = tl.program_id(0) // ALL_SLICES
    if piece < SLICES:
        _input_products(
            standard, mask, dab, packed, offsets, products, sums, part, parts, blocks, piece * BLOCK,
            N, NP, R, Z, C2, ROWS, BLOCK, EVEN, PRECISION,
        )  # fmt: skip
    else:
        n = (piece - SLICES) * GATE_BLOCK + tl.arange(0, GATE_BLOCK)
        _gate_products(
            standard, dgate, products, sums, part, parts, blocks, n, R, Z, C2, ROWS, GATE_BLOCK, EVEN,
            PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "parts", "stacked"])
def finish_kernel(
    products, sums, projection, gate, output_gate, norm_weight, norm_bias, dmatrix, shares, rows, parts,
    stacked, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows of stacked matrices: their gradient, and their share in the gradients of the norm.

    PACKED: the matrices are ``projection`` and ``gate``, ``stacked`` rows each, then ``output_gate``; H and S
    are in the order of ``packed``. Otherwise there is one, ``projection``.
    products: [parts, rows, WIDTH]; sums: [parts, rows]; dmatrix: [rows, WIDTH]; ROWS divides 8;
    shares: [rows / ROWS, 2, WIDTH].
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    c, k, p = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    place = c[:, None] * WIDTH + k[None, :]
    source = first
    factor = 1.0
    if PACKED:
        if first < stacked:
            matrix = tl.load(projection + first * WIDTH + place).to(tl.float32)
            source += first // RUN * RUN
        elif first < 2 * stacked:
            matrix = tl.load(gate + (first - stacked) * WIDTH + place).to(tl.float32)
            source += (first - stacked) // RUN * RUN + RUN - stacked
            factor *= -LOG2E
        else:
            matrix = tl.load(output_gate + (first - 2 * stacked) * WIDTH + place).to(tl.float32)
            factor *= -LOG2E
    else:
        matrix = tl.load(projection + first * WIDTH + place).to(tl.float32)
    product = tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, parts, BLOCK):
        there = start + p < parts
        line = (start + p)[:, None] * rows + (source + c)[None, :]
        tile = products + line[:, :, None] * WIDTH + k[None, None, :]
        product += tl.sum(tl.load(tile, mask=there[:, None, None], other=0.0), 0)
        total += tl.sum(tl.load(sums + line, mask=there[:, None], other=0.0), 0)
    product *= factor
    total *= factor
    weight = tl.load(norm_weight + k).to(tl.float32)
    shift = tl.load(norm_bias + k).to(tl.float32)
    gradient = product * weight[None, :] + total[:, None] * shift[None, :]
    tl.store(dmatrix + first * WIDTH + place, gradient.to(dmatrix.dtype.element_ty))
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
