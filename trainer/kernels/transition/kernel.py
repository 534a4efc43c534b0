"""Triton kernels of the SwiGLU transition, with the layer norm before it or without; forward and backward.

Shapes: M rows (all leading axes of the input), C channels (a power of two, also of the output), H hidden
channels. Weights are contiguous and of the dtype of the products: ``weight_in`` [2·H, C], the rows that swish
sees first, ``weight_out`` [C, H].

A program keeps BM normalised rows and goes through the hidden channels BH at a time: the hidden activation is
never in memory. The backward computes it anew in the same way and has the input's gradient at the end. The
gradients of the weights are products over all rows, so what they need is written to scratch memory: a strip
of rows, | dGate and dValue: 2·H | hidden: H |, and the normalised input. A second kernel sums its products.
The caller takes as many rows at a time as it has scratch for.

A strip lies in memory in tiles of 8 rows by 64 columns, one after the other along a row of them, and each 32
of a tile's columns in the order in which the matrix units deal them to threads (``dealing.py``): a thread has
16 bytes that are neighbours there, and what is computed is written without a way through shared memory.

Gate and value are one product: the rows of ``weight_in`` are taken eight of the gate's and eight of the
value's in turn, and so are the columns of dGate and dValue. As eight columns are what the matrix units give a
thread two of, parting and uniting the two moves nothing between threads.

HELD: a tile that is the left side of many products stays in registers, in the layout that the matrix units
take. A product with zeros that is added to it makes the compiler lay it out so. Otherwise it stays in shared
memory, and every product reads it from there.

Bases are 64-bit pointers, offsets within a tile 32-bit.
"""

import triton
import triton.language as tl

from megafold.trainer.kernels.dealing import dealt, pinned
from megafold.trainer.kernels.layernorm.kernel import load_channels, standardised, store_rows
from megafold.trainer.kernels.products import LOG2E
from megafold.trainer.kernels.vendors import narrowed


@triton.jit
def _sigmoid(x):
    """Within some 1e-7: of base-2 exponential and reciprocal root, which are one instruction each.

    The exponential and the division that ``tl.sigmoid`` is made of look after subnormal numbers, which cannot
    matter here, at more than twice the instructions.
    """
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))
    return root * root


@triton.jit
def _load_rows(base, first, stride, M, C: tl.constexpr, BM: tl.constexpr):
    """Rows ``first`` to ``first`` + BM as they are; those from M on are 0."""
    row, c = tl.arange(0, BM), tl.arange(0, C)
    pointers = base + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + c[None, :])
    return tl.load(pointers, mask=row[:, None] < M - first, other=0.0)


@triton.jit
def _input(
    x, norm_weight, norm_bias, first, stride, M, dtype: tl.constexpr,
    C: tl.constexpr, BM: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """What the first product sees of BM rows from ``first`` on; for those from M on the last one again."""
    row, c = tl.minimum(tl.arange(0, BM), M - 1 - first)[:, None], tl.arange(0, C)[None, :]
    tile = tl.load(x + tl.cast(first, tl.int64) * stride + (row * stride + c)).to(tl.float32)
    if HELD:
        tile = pinned(tile, dtype)
    if NORM:
        tile, _ = standardised(tile, C, C, EPS)
        tile = tile * load_channels(norm_weight, C, C) + load_channels(norm_bias, C, C)
    return tile.to(dtype)


@triton.jit
def _eights(BH: tl.constexpr, H: tl.constexpr):
    """Rows of ``weight_in`` for the first BH hidden channels: eight gates, eight values, and so on."""
    n = tl.arange(0, 2 * BH)
    return (n // 8 % 2) * H + n // 16 * 8 + n % 8


@triton.jit
def _part(both, BM: tl.constexpr, BH: tl.constexpr):
    """[BM, 2·BH] in eights → gate, value [BM, BH]."""
    gate, value = tl.split(tl.permute(tl.reshape(both, (BM, BH // 8, 2, 8)), (0, 1, 3, 2)))
    return tl.reshape(gate, (BM, BH)), tl.reshape(value, (BM, BH))


@triton.jit
def _unite(gate, value, BM: tl.constexpr, BH: tl.constexpr):
    """The inverse of :func:`_part`."""
    both = tl.join(tl.reshape(gate, (BM, BH // 8, 8)), tl.reshape(value, (BM, BH // 8, 8)))
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), (BM, 2 * BH))


@triton.jit
def _store_strip(lines, first, value, W: tl.constexpr, BM: tl.constexpr, WIDTH: tl.constexpr):
    """Write [BM, WIDTH] to a strip of rows W wide, from its column ``first`` on, a multiple of 32."""
    GROUPS: tl.constexpr = WIDTH // 32
    SIXTEENS: tl.constexpr = BM // 16
    # A warp has 16 rows, a thread two of each eight columns of one of each eight rows.
    value = tl.reshape(value, (SIXTEENS, 2, 8, GROUPS, 4, 4, 2))
    value = tl.reshape(tl.permute(value, (1, 3, 0, 2, 5, 4, 6)), (2 * GROUPS * SIXTEENS, 256))
    m, n = tl.arange(0, 2 * GROUPS * SIXTEENS), tl.arange(0, 256)
    eight = m % SIXTEENS * 2 + m // (SIXTEENS * GROUPS)
    group = first // 32 + m // SIXTEENS % GROUPS
    place = (eight * (W // 64) + group // 2) * 512 + group % 2 * 32
    tl.store(lines + (place[:, None] + (n // 32 * 64 + n % 32)[None, :]), value)


@triton.jit(do_not_specialize=["M"])
def forward_kernel(
    x, norm_weight, norm_bias, weight_in, weight_out, out, M, x_row,
    BM: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, H: tl.constexpr, NORM: tl.constexpr,
    EPS: tl.constexpr, HELD: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One program: BM rows. RESIDUAL: add them."""
    dtype = weight_in.dtype.element_ty
    first = tl.program_id(0) * BM
    c, n = tl.arange(0, C), tl.arange(0, BH)
    tile = _input(x, norm_weight, norm_bias, first, x_row, M, dtype, C, BM, NORM, EPS, HELD)
    picked = _eights(BH, H)
    acc = tl.zeros([BM, C], tl.float32)
    for start in range(0, H, BH):
        in_rows = tl.load(weight_in + ((start + picked)[:, None] * C + c[None, :]))
        out_columns = tl.load(weight_out + (c[:, None] * H + (start + n)[None, :]))
        gate, value = _part(tl.dot(tile, tl.trans(in_rows)), BM, BH)
        hidden = narrowed(gate * _sigmoid(gate) * value, dtype)
        acc = tl.dot(hidden, tl.trans(out_columns), acc)
    if RESIDUAL:
        # Read again, for the last time, which tells the compiler that it is another load: kept, it would fill
        # registers all the way.
        row = tl.minimum(tl.arange(0, BM), M - 1 - first)
        again = x + tl.cast(first, tl.int64) * x_row + (row[:, None] * x_row + c[None, :])
        acc += tl.load(again, eviction_policy="evict_first").to(tl.float32)
    store_rows(out, first, acc, M, C, C, BM)


@triton.jit(do_not_specialize=["M"])
def input_gradient_kernel(
    x, norm_weight, norm_bias, weight_in, weight_out, dout, dx, norm_parts, strip, normal, M, x_row,
    BM: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, H: tl.constexpr, NORM: tl.constexpr,
    EPS: tl.constexpr, HELD: tl.constexpr, RESIDUAL: tl.constexpr, INPUT: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """One program: BM rows.

    INPUT: write dX, to which RESIDUAL adds dOut, and, with NORM, this program's sums of the norm's gradients
    to ``norm_parts`` [programs, 2, C]. WEIGHTS: write ``strip`` and ``normal`` [rows, C]; rows from M on have
    no gradient, so nothing adds up.
    """
    dtype = weight_in.dtype.element_ty
    first = tl.program_id(0) * BM
    row, c, n = tl.arange(0, BM), tl.arange(0, C), tl.arange(0, BH)
    tile = _input(x, norm_weight, norm_bias, first, x_row, M, dtype, C, BM, NORM, EPS, HELD)
    grad = _load_rows(dout, first, C, M, C, BM)
    lines = strip + tl.cast(first, tl.int64) * (3 * H)
    if WEIGHTS:
        tl.store(normal + tl.cast(first, tl.int64) * C + (row[:, None] * C + c[None, :]), tile)
    picked = _eights(BH, H)
    acc = tl.zeros([BM, C], tl.float32)
    for start in range(0, H, BH):
        in_rows = tl.load(weight_in + ((start + picked)[:, None] * C + c[None, :]))
        out_columns = tl.load(weight_out + (c[:, None] * H + (start + n)[None, :]))
        gate, value = _part(tl.dot(tile, tl.trans(in_rows)), BM, BH)
        dhidden = tl.dot(grad, out_columns)
        sigmoid = _sigmoid(gate)
        swish = gate * sigmoid
        dvalue = narrowed(dhidden * swish, dtype)
        dgate = narrowed(dhidden * value * (sigmoid + swish * (1.0 - sigmoid)), dtype)
        dboth = _unite(dgate, dvalue, BM, BH)
        if WEIGHTS:
            _store_strip(lines, 2 * start, dboth, 3 * H, BM, 2 * BH)
            _store_strip(lines, 2 * H + start, narrowed(swish * value, dtype), 3 * H, BM, BH)
        if INPUT:
            acc = tl.dot(dboth, in_rows, acc)
    if INPUT:
        if NORM:
            again = _load_rows(x, first, x_row, M, C, BM).to(tl.float32)
            standard, inverse = standardised(again, C, C, EPS)
            parts = norm_parts + tl.program_id(0) * 2 * C + c
            tl.store(parts, tl.sum(acc * standard, 0))
            tl.store(parts + C, tl.sum(acc, 0))
            acc = acc * load_channels(norm_weight, C, C)
            mean = (tl.sum(acc, 1) / C)[:, None]
            along = (tl.sum(acc * standard, 1) / C)[:, None]
            acc = (acc - mean - standard * along) * inverse
        if RESIDUAL:
            acc += _load_rows(dout, first, C, M, C, BM).to(tl.float32)
        store_rows(dx, first, acc, M, C, C, BM)


@triton.jit(do_not_specialize=["M", "splits", "earlier"])
def weight_gradient_kernel(
    strip, normal, dout, parts, M, splits, earlier,
    BN: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Sums over the M rows of a strip, of ``normal`` and of ``dout`` [M, C].

    parts: [splits, 3·H, C] float32, of dGate's and dValue's products with the normalised input, then of the
    hidden activation's with dout, in the order of the strip's columns. Every program owns BN rows of one part
    and adds to what is there, if there are ``earlier`` strips: the order of the sum is always the same. The
    strip is written up to a multiple of BK.
    """
    TILES: tl.constexpr = 3 * H // BN
    pid = tl.program_id(0)
    left = (pid % TILES) * BN
    split = pid // TILES
    k, n, c = tl.arange(0, BK), tl.arange(0, BN), tl.arange(0, C)
    right = tl.where(left < 2 * H, normal, dout)
    tiles = (k // 8)[:, None] * (3 * H // 64) + (left // 64 + n // 64)[None, :]
    within = tiles * 512 + ((k % 8)[:, None] * 64 + (n % 64)[None, :])
    place = parts + tl.cast(split, tl.int64) * (3 * H * C) + ((left + n)[:, None] * C + c[None, :])
    acc = tl.load(place, mask=c[None, :] < tl.where(earlier > 0, C, 0), other=0.0)
    # Neighbouring splits take neighbouring rows, so that what all tiles of a row need is in the L2 cache; the
    # last rows first, for they still are there from when they were written.
    last = (tl.cdiv(M, BK) - 1) * BK
    for before in range(split * BK, M, splits * BK):
        first = last - before
        a = tl.load(strip + tl.cast(first, tl.int64) * (3 * H) + within)
        there = right + tl.cast(first, tl.int64) * C + (k[:, None] * C + c[None, :])
        b = tl.load(there, mask=(k < M - first)[:, None], other=0.0)
        acc = tl.dot(tl.trans(a), b, acc)
    tl.store(place, acc)


@triton.jit(do_not_specialize=["splits"])
def sum_weights_kernel(
    parts, dweight_in, dweight_out, splits,
    BN: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    WEIGHT_IN: tl.constexpr, WEIGHT_OUT: tl.constexpr,
):  # fmt: skip
    """Sum ``parts`` over the splits; one program: BN of the 3·H rows, to whichever weight they belong."""
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, C)
    acc = tl.zeros([BN, C], tl.float32)
    for split in tl.range(0, splits, loop_unroll_factor=4):
        acc += tl.load(parts + split * (3 * H * C) + (n[:, None] * C + c[None, :]))
    if WEIGHT_IN:
        kept = (n < 2 * H)[:, None]
        both = dealt(n)
        place = (both // 8 % 2) * H + both // 16 * 8 + both % 8
        tl.store(
            dweight_in + (place[:, None] * C + c[None, :]), acc.to(dweight_in.dtype.element_ty), mask=kept
        )
    if WEIGHT_OUT:
        kept = (n >= 2 * H)[:, None]
        place = dweight_out + (c[None, :] * H + dealt(n - 2 * H)[:, None])
        tl.store(place, acc.to(dweight_out.dtype.element_ty), mask=kept)


@triton.jit
def _copy(source, target, block, COUNT, BLOCK: tl.constexpr):
    at = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < COUNT).to(target.dtype.element_ty), mask=at < COUNT)


@triton.jit
def cast_kernel(weight_in, weight_out, cast_in, cast_out, IN, OUT, BLOCK: tl.constexpr):
    """IN numbers of one weight and OUT of the other in another dtype. One program: BLOCK of either."""
    pid, blocks_in = tl.program_id(0), tl.cdiv(IN, BLOCK)
    if pid < blocks_in:
        _copy(weight_in, cast_in, pid, IN, BLOCK)
    else:
        _copy(weight_out, cast_out, pid - blocks_in, OUT, BLOCK)


@triton.jit
def activation_kernel(both, hidden, H: tl.constexpr, BLOCK: tl.constexpr):
    """both [rows, 2·H] → hidden [rows, H], where the products are cuBLAS's. One program: BLOCK of a row."""
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    row, h = tl.program_id(0) // BLOCKS, (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    at = both + row.to(tl.int64) * (2 * H) + h
    gate = tl.load(at, mask=h < H, other=0.0).to(tl.float32)
    value = tl.load(at + H, mask=h < H, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * value
    tl.store(hidden + row.to(tl.int64) * H + h, result.to(hidden.dtype.element_ty), mask=h < H)


@triton.jit
def activation_gradient_kernel(both, dhidden, hidden, H: tl.constexpr, BLOCK: tl.constexpr):
    """``both`` becomes its own gradient, and ``hidden`` is computed anew. One program: BLOCK of a row."""
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    row, h = tl.program_id(0) // BLOCKS, (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    at, place = both + row.to(tl.int64) * (2 * H) + h, row.to(tl.int64) * H + h
    gate = tl.load(at, mask=h < H, other=0.0).to(tl.float32)
    value = tl.load(at + H, mask=h < H, other=0.0).to(tl.float32)
    grad = tl.load(dhidden + place, mask=h < H, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    swish = gate * sigmoid
    dtype = both.dtype.element_ty
    tl.store(hidden + place, (swish * value).to(dtype), mask=h < H)
    tl.store(at, (grad * value * (sigmoid + swish * (1.0 - sigmoid))).to(dtype), mask=h < H)
    tl.store(at + H, (grad * swish).to(dtype), mask=h < H)
