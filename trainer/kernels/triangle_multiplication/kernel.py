"""Triton kernels of triangle multiplication, forward and backward, around a batched matrix product.

Shapes: B batch, N tokens (NP with padding to a multiple of 8, so that rows start at 16 bytes), Z channels
of the pair tensor, C hidden channels, R = B·NP² = 64·Q positions (b, i, j); given as Q, R is known to be a
multiple, and wide loads follow. What stands in the padding is zero.

a, b, x and their gradients have channels first, [channels, R], as the matrix product takes them. z and x are
kept standardised, [R, Z] and [R, C], so that a kernel's tile goes from memory to the matrix units without
passing registers. ``factors`` [3, R] in float32: the reciprocal deviations of z and x, and the mask as 1 or
0. The projections are not stored: the backward multiplies again.

``prepare_kernel`` takes the norms' scales into the matrices behind them and their offsets into a vector, and
subtracts from each row of a matrix its mean: the product with a standardised row stays what it is, and the
gradient that comes back through it has mean zero, as the gradient of a norm asks. Gates are in units of
-ln 2, for sigmoid(x) = 1 / (1 + 2^-x·log2(e)). Channel c's rows of ``projection`` and ``gate`` are 8 rows
apart in ``packed``: one product gives both, and both in the same thread.

The gradient of a matrix W behind a norm with scale w and offset b needs only H = Σ_r g_r ẑ_rᵀ and
S = Σ_r g_r, where g is the gradient of the product and ẑ the standardised row: dW = H·w + S bᵀ, dw_k = Σ_c
W_ck H_ck and db_k = Σ_c W_ck S_c. So the gradients of the norm cost no pass over the positions. H and S are
summed by as many programs as run at a time, each its own part, and the parts in a fixed order: no atomics.

Of 2 bytes, tiles of results whose columns are dealt go to memory and back without shared memory
(``dealing``): a and b with the positions of a block dealt, everything else with the channels of a block of
32, as which the matrices' rows are read. ``closing`` is there a second time with its columns dealt, for the
standardised x that has come from registers.

A tile's base is a 64-bit pointer, for the pair tensor of 3 000 tokens has more elements than 32 bits count;
offsets within a tile are 32-bit, but for those of channels, which are R apart.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from megafold.trainer.kernels.dealing import (
    dealt,
    gathered,
    gathered_columns,
    gathered_rows,
    in_registers,
    load_pairs,
    opaque,
    paired,
    pairs_of,
    parted,
    pinned,
    scattered,
)
from megafold.trainer.kernels.fetching import fetch_channels, fetch_rows, loaded
from megafold.trainer.kernels.layernorm.kernel import inverse_root
from megafold.trainer.kernels.products import (
    LN2,
    LOG2E,
    add_kept,
    add_product,
    add_product_kept,
    half_open,
    product_t,
)

#: Rows of ``projection`` in a run of ``packed``; as many of ``gate`` follow.
RUN = tl.constexpr(8)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Numbers that Triton shall not compile variants for.
_SIZES = ["N", "NP", "Q"]
_COUNTS = ["Q", "blocks", "parts"]
# Below what Q is: branches on it are always taken, which the compiler does not know.
_NONE = tl.constexpr(-1)


@triton.jit
def _open(gate, WIDE: tl.constexpr):
    """The sigmoid of what ``gate`` is -log2(e) times of."""
    # A division that rounds correctly costs ten instructions: float32 has it.
    if WIDE:
        return half_open(tl.exp2(gate))
    elif INTERPRETED:
        return 1.0 / (1.0 + tl.exp2(gate))
    else:
        return libdevice.fast_dividef(1.0, 1.0 + tl.exp2(gate))


@triton.jit
def _opened(value, gate, WIDE: tl.constexpr):
    """``value`` times :func:`_open`, for which the quick division needs no instruction more."""
    if WIDE:
        return value * _open(gate, WIDE)
    elif INTERPRETED:
        return value / (1.0 + tl.exp2(gate))
    else:
        return libdevice.fast_dividef(value, 1.0 + tl.exp2(gate))


@triton.jit
def _reciprocal(x):
    """Of NVIDIA GPUs, whose quick division would be another instruction."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _masked(value, bits):
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
def _shifted(product, shift):
    """``product`` + ``shift``, but not by way of the dot's accumulator, which would wait for ``shift``."""
    return tl.fma(product, tl.full(product.shape, 1.0, tl.float32), tl.broadcast_to(shift, product.shape))


@triton.jit
def _positions(first, N, NP, R, local, EVEN: tl.constexpr):
    """Of the block's positions: their row in [B·N·N], and whether they are there and not padding."""
    # 32-bit divisions: R has no more bits, only what it is multiplied by.
    r = first.to(tl.int32) + local
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
def _load_rows(base, first, local, row, present, channels, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """[ROWS, channels] of a tensor [B·N·N, WIDTH]; 0 where nothing is present.

    ``channels``: of all rows, or [ROWS, channels], of each its own.
    """
    columns = channels if len(channels.shape) == 2 else channels[None, :]
    if EVEN:
        tile = tl.load((base + first * WIDTH) + (local[:, None] * WIDTH + columns))
    else:
        tile = tl.load(base + row[:, None] * WIDTH + columns, mask=present[:, None], other=0.0)
    return tile


@triton.jit
def _store_rows(base, value, first, local, row, present, channels, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """As :func:`_load_rows`."""
    value = value.to(base.dtype.element_ty)
    columns = channels if len(channels.shape) == 2 else channels[None, :]
    if EVEN:
        tl.store((base + first * WIDTH) + (local[:, None] * WIDTH + columns), value)
    else:
        tl.store(base + row[:, None] * WIDTH + columns, value, mask=present[:, None])


@triton.jit
def _load_keep(
    keep, first, local, row, channels, N, WIDTH: tl.constexpr, DROPPED: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Dropout's factors [rows, channels], which (b, i, j) share along axis DROPPED: 1 (i) or 2 (j).

    WHOLE: the block's positions have i in common, so that no two of them need divisions of their own.
    """
    if WHOLE:
        line = first // N
        if DROPPED == 1:
            start = keep + (line // N * N + first % N) * WIDTH
            tile = tl.load(start + (local[:, None] * WIDTH + channels[None, :]))
        else:
            tile = tl.load(keep + line * WIDTH + channels)[None, :]
    else:
        row = row.to(tl.int32)
        line = row // N
        line = line // N * N + (row % N if DROPPED == 1 else line % N)
        tile = tl.load(keep + line.to(tl.int64)[:, None] * WIDTH + channels[None, :])
    return tile


@triton.jit
def _load_positions(
    base, first, channels, R, WIDTH: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    AGAIN: tl.constexpr = False, PAIR: tl.constexpr = False,
):  # fmt: skip
    """[ROWS, channels] of a tensor [R, WIDTH]; AGAIN: for the last time; PAIR: its rows paired."""
    POLICY: tl.constexpr = "evict_first" if AGAIN else ""
    local = paired(tl.arange(0, ROWS), PAIR)
    pointers = (base + first * WIDTH) + (local[:, None] * WIDTH + channels[None, :])
    if EVEN:
        tile = tl.load(pointers, eviction_policy=POLICY)
    else:
        tile = tl.load(pointers, mask=(local < R - first)[:, None], other=0.0, eviction_policy=POLICY)
    return tile


@triton.jit
def _store_positions(
    base, value, first, local, channels, R, WIDTH: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """As :func:`_load_positions`."""
    value = value.to(base.dtype.element_ty)
    pointers = (base + first * WIDTH) + (local[:, None] * WIDTH + channels[None, :])
    if EVEN:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=(local < R - first)[:, None])


@triton.jit
def _load_dealt_positions(base, first, R, WIDTH: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """[ROWS, WIDTH] of a tensor [R, WIDTH] of 2 bytes, rows paired, columns dealt: for :func:`_laid_out`."""
    ROW: tl.constexpr = WIDTH // 2
    local, m = paired(gathered_rows(ROWS, WIDTH // 32)), tl.arange(0, WIDTH // 32 * ROWS)
    place = (local * ROW + m // ROWS * 16)[:, None] + tl.arange(0, 16)[None, :]
    pointers = base.to(tl.pointer_type(tl.int32), bitcast=True) + first * ROW + place
    if EVEN:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(local < R - first)[:, None], other=0)
    return tile


@triton.jit
def _laid_out(tile, dtype: tl.constexpr, ROWS: tl.constexpr):
    """The tile [ROWS, WIDTH] of ``dtype`` that :func:`_load_dealt_positions` gives by twos."""
    low, high = tile.to(tl.int16).to(dtype, bitcast=True), (tile >> 16).to(tl.int16).to(dtype, bitcast=True)
    return scattered(tl.reshape(tl.join(low, high), [tile.shape[0], 32]), ROWS)


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
def _store_dealt_positions(
    base, value, first, R, WIDTH: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """``value`` [ROWS, WIDTH], its columns dealt, to [R, WIDTH]."""
    GROUPS: tl.constexpr = WIDTH // 32
    value = gathered(value.to(base.dtype.element_ty))
    local = gathered_rows(ROWS, GROUPS)
    pointers = (base + first * WIDTH) + ((local * WIDTH)[:, None] + gathered_columns(ROWS, WIDTH))
    if EVEN:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=(local < R - first)[:, None])


@triton.jit
def _store_dealt_channels(base, value, first, start, R, EVEN: tl.constexpr):
    """``value`` [channels, positions], these dealt, to [channels, R] from channel ``start`` on."""
    BLOCK: tl.constexpr = value.shape[0]
    GROUPS: tl.constexpr = value.shape[1] // 32
    value = tl.reshape(value.to(base.dtype.element_ty), [BLOCK, GROUPS, 4, 4, 2])
    value = tl.reshape(tl.permute(value, (1, 0, 3, 2, 4)), [GROUPS * BLOCK, 32])
    m, n = tl.arange(0, GROUPS * BLOCK), tl.arange(0, 32)
    local = (m // BLOCK * 32)[:, None] + n[None, :]
    pointers = (base + first) + ((start + m % BLOCK).to(tl.int64)[:, None] * R + local)
    if EVEN:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=local < R - first)


@triton.jit
def _store_paired_channels(base, value, first, block, Q, EVEN: tl.constexpr):
    """``value`` [positions, channels], its rows paired, to [channels, R], for each ``block`` of a loop."""
    ROWS: tl.constexpr = value.shape[0]
    CHANNELS: tl.constexpr = value.shape[1]
    # Else the offsets of all channels, which the loop does not change, would be kept in registers.
    R = opaque(Q, block) * 64
    value = tl.reshape(value.to(base.dtype.element_ty), [ROWS // 16, 2, 8, CHANNELS // 8, 4, 2])
    value = tl.reshape(tl.permute(value, (3, 5, 0, 2, 4, 1)), [CHANNELS * ROWS // 2, 2])
    m = tl.arange(0, CHANNELS * ROWS // 2)
    channel = m // (4 * ROWS) * 8 + m % 4 * 2 + m // (2 * ROWS) % 2
    local = (m // 32 % (ROWS // 16) * 16 + m // 4 % 8 * 2)[:, None] + tl.arange(0, 2)[None, :]
    pointers = (base + first) + (channel.to(tl.int64) * R)[:, None] + local
    if EVEN:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=local < Q * 64 - first)


@triton.jit
def _load_factors(
    factors, first, R, ROWS: tl.constexpr, EVEN: tl.constexpr, PAIR: tl.constexpr = False
):  # fmt: skip
    """Those of a block's positions, of [R]; PAIR: paired."""
    local = paired(tl.arange(0, ROWS), PAIR)
    if EVEN:
        factor = tl.load(factors + first + local)
    else:
        factor = tl.load(factors + first + local, mask=local < R - first, other=0.0)
    return factor


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
def _split_columns(both, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, 2·BLOCK] in the order of ``packed`` → projection's and gate's [ROWS, BLOCK]."""
    runs = tl.permute(tl.reshape(both, [ROWS, BLOCK // RUN, 2, RUN]), (0, 1, 3, 2))
    value, gate = tl.split(runs)
    return tl.reshape(value, [ROWS, BLOCK]), tl.reshape(gate, [ROWS, BLOCK])


@triton.jit
def _join_columns(value, gate, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The opposite of :func:`_split_columns`."""
    value = tl.reshape(value, [ROWS, BLOCK // RUN, RUN])
    gate = tl.reshape(gate, [ROWS, BLOCK // RUN, RUN])
    return tl.reshape(tl.permute(tl.join(value, gate), (0, 1, 3, 2)), [ROWS, 2 * BLOCK])


@triton.jit
def _prepare(
    matrix, norm_weight, norm_bias, out, offsets, source, target, factor, WIDTH: tl.constexpr,
    DEALT: tl.constexpr = 0,
):  # fmt: skip
    """RUN rows of a matrix behind a norm, as the module says; ``factor``: of the gates.

    DEALT: elements from ``out`` to where they are once more, with columns dealt; 0: they are not.
    """
    c, k = tl.arange(0, RUN), tl.arange(0, WIDTH)
    tile = tl.load(matrix + (source + c)[:, None] * WIDTH + k[None, :]).to(tl.float32) * factor
    shift = tl.load(norm_bias + k).to(tl.float32)
    tl.store(offsets + target + c, tl.sum(tile * shift[None, :], 1))
    tile *= tl.load(norm_weight + k).to(tl.float32)[None, :]
    tile -= (tl.sum(tile, 1) / WIDTH)[:, None]
    tile = tile.to(out.dtype.element_ty)
    tl.store(out + (target + c)[:, None] * WIDTH + k[None, :], tile)
    if DEALT > 0:
        # Dealing twice changes nothing: the place of column k is what is at place k.
        tl.store(out + DEALT + (target + c)[:, None] * WIDTH + dealt(k, WIDTH % 32 == 0)[None, :], tile)


@triton.jit
def prepare_kernel(
    projection, gate, output_gate, output, in_weight, in_bias, out_weight, out_bias,
    packed, closing, offsets, Z: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One run of 8 rows of the matrices.

    packed: [4·C + Z, Z], runs of projection and gate in turn, then output_gate; closing: [2, Z, C], of
    output, the second with its columns dealt; offsets: [4·C + 2·Z] float32, of both.
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
        _prepare(output, out_weight, out_bias, closing, offsets + 4 * C + Z, source, source, 1.0, C, Z * C)


@triton.jit
def _load_z(z, first, N, NP, R, Z: tl.constexpr, ROWS: tl.constexpr, DEAL: tl.constexpr, EVEN: tl.constexpr):
    """z [ROWS, Z] of a block."""
    k, local = tl.arange(0, Z), dealt(tl.arange(0, ROWS), DEAL)
    row, present = _positions(first, N, NP, R, local, EVEN)
    return _load_rows(z, first, local, row, present, k, Z, EVEN)


@triton.jit
def _standardised(
    tile, mask, standard, factors, first, N, NP, R, eps, Z: tl.constexpr, ROWS: tl.constexpr,
    DEAL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """z of a block standardised, and the mask, both kept in memory as well."""
    k, local = tl.arange(0, Z), dealt(tl.arange(0, ROWS), DEAL)
    row, present = _positions(first, N, NP, R, local, EVEN)
    tile = tile.to(tl.float32)
    tile -= (tl.sum(tile, 1) / Z)[:, None]
    scale = inverse_root(tl.sum(tile * tile, 1) / Z + eps)
    narrow = (tile * scale[:, None]).to(standard.dtype.element_ty)
    if EVEN:
        held = tl.load(mask + first + local) != 0
    else:
        held = tl.load(mask + row, mask=present, other=0) != 0
    tl.store(factors + first + local, scale, mask=local < R - first)
    # The backward reads 4 bytes at a time ahead of their use, which it cannot do with bytes of a mask.
    tl.store(factors + 2 * R + first + local, held.to(tl.float32), mask=local < R - first)
    _store_positions(standard, narrow, first, local, k, R, Z, EVEN)
    return narrow, held


@triton.jit
def _project(
    matrix, shift, narrow, held, ab, first, start, R, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    DEAL: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of a and b from ``start`` on; ``held``: the mask, or -1 of 2 bytes where it is set."""
    if narrow.dtype == tl.float32:
        both = product_t(matrix, narrow, PRECISION)
    else:
        both = tl.dot(matrix, tl.trans(narrow), input_precision=PRECISION)
    value, gate = _split_rows(_shifted(both, shift[:, None]), BLOCK, ROWS)
    value = _opened(value, gate, narrow.dtype == tl.float32)
    if held.dtype == tl.int16:
        value = _masked(value.to(narrow.dtype), held[None, :])
    else:
        value = tl.where(held[None, :], value, 0.0)
    if DEAL:
        _store_dealt_channels(ab, value, first, start, R, EVEN)
    else:
        _store_channels(ab, value, first, start + tl.arange(0, BLOCK), R, ROWS, EVEN)


@triton.jit(do_not_specialize=[*_SIZES, "blocks"])
def project_kernel(
    z, mask, packed, offsets, ab, standard, factors, N, NP, Q, blocks, eps, Z: tl.constexpr, C2: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z standardised, and from it a and b, 2·C = C2 channels, BLOCK at a time.

    HELD: a program goes through many of all blocks, and the matrices stay in shared memory, as four tiles of
    BLOCK channels. Else it has one block, and the matrices come again for each.
    """
    R = Q * 64
    DEAL: tl.constexpr = ROWS % 32 == 0 and ab.dtype.element_ty.primitive_bitwidth == 16
    program = tl.program_id(0)
    first = program.to(tl.int64) * ROWS
    m = tl.arange(0, 2 * BLOCK)
    rows = packed + (m[:, None] * Z + tl.arange(0, Z)[None, :])
    tile = _load_z(z, first, N, NP, R, Z, ROWS, DEAL, EVEN)
    if HELD:
        tl.static_assert(C2 == 4 * BLOCK)
        # By name: what is kept in shared memory has no index.
        w0, s0 = tl.load(rows), tl.load(offsets + m)
        w1, s1 = tl.load(rows + 2 * BLOCK * Z), tl.load(offsets + 2 * BLOCK + m)
        w2, s2 = tl.load(rows + 4 * BLOCK * Z), tl.load(offsets + 4 * BLOCK + m)
        w3, s3 = tl.load(rows + 6 * BLOCK * Z), tl.load(offsets + 6 * BLOCK + m)
        for block in tl.range(program, blocks, tl.num_programs(0), disable_licm=True):
            first = tl.cast(block, tl.int64) * ROWS
            after = tl.minimum(block + tl.num_programs(0), blocks - 1).to(tl.int64) * ROWS
            ahead = _load_z(z, after, N, NP, R, Z, ROWS, DEAL, EVEN)
            narrow, held = _standardised(
                tile, mask, standard, factors, first, N, NP, R, eps, Z, ROWS, DEAL, EVEN
            )
            if narrow.dtype.primitive_bitwidth == 16:
                held = tl.where(held, -1, 0).to(tl.int16)
            _project(w0, s0, narrow, held, ab, first, 0, R, BLOCK, ROWS, DEAL, EVEN, PRECISION)
            _project(w1, s1, narrow, held, ab, first, BLOCK, R, BLOCK, ROWS, DEAL, EVEN, PRECISION)
            _project(w2, s2, narrow, held, ab, first, 2 * BLOCK, R, BLOCK, ROWS, DEAL, EVEN, PRECISION)
            _project(w3, s3, narrow, held, ab, first, 3 * BLOCK, R, BLOCK, ROWS, DEAL, EVEN, PRECISION)
            tile = ahead
    else:
        narrow, held = _standardised(tile, mask, standard, factors, first, N, NP, R, eps, Z, ROWS, DEAL, EVEN)
        for start in range(0, C2, BLOCK):
            matrix = tl.load(rows + 2 * start * Z)
            shift = tl.load(offsets + 2 * start + m)
            _project(matrix, shift, narrow, held, ab, first, start, R, BLOCK, ROWS, DEAL, EVEN, PRECISION)


@triton.jit(do_not_specialize=_SIZES)
def output_kernel(
    standard, x, gate_matrix, closing, gate_offsets, offsets, z, keep, out, summed, factors, N, NP, Q, eps,
    Z: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
    DROPPED: tl.constexpr, RESIDUAL: tl.constexpr, WHOLE: tl.constexpr, FETCH: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output of one block, BLOCK channels at a time; KEEP: x standardised is left in ``summed``.

    DROPPED: times ``keep``, shared along that axis; 0: none. RESIDUAL: ``z`` is added.
    """
    R = Q * 64
    first = tl.program_id(0).to(tl.int64) * ROWS
    dtype = x.dtype.element_ty
    k, c, local = tl.arange(0, Z), tl.arange(0, C), tl.arange(0, ROWS)
    DEAL: tl.constexpr = BLOCK == 32 and C % 32 == 0 and dtype.primitive_bitwidth == 16
    rows = gathered_rows(ROWS, 1, DEAL)
    row, present = _positions(first, N, NP, R, rows, EVEN)
    if FETCH and RESIDUAL:
        fetch_rows(z, row, Z)
    normal = _load_positions(standard, first, k, R, Z, ROWS, EVEN)
    tile = tl.trans(_load_channels(x, first, dealt(c, DEAL), R, ROWS, EVEN)).to(tl.float32)
    if DEAL:
        tile = pinned(tile, dtype)
    tile -= (tl.sum(tile, 1) / C)[:, None]
    scale = inverse_root(tl.sum(tile * tile, 1) / C + eps)
    narrow = (tile * scale[:, None]).to(dtype)
    if KEEP:
        tl.store(factors + R + first + local, scale, mask=local < R - first)
        if DEAL:
            _store_dealt_positions(summed, narrow, first, R, C, ROWS, EVEN)
        else:
            _store_positions(summed, narrow, first, local, c, R, C, EVEN)
    if DEAL:
        closing += Z * C
    for start in range(0, Z, BLOCK):
        n, channels = start + dealt(tl.arange(0, BLOCK), DEAL), start + tl.arange(0, BLOCK)
        gate = tl.load(gate_matrix + n[:, None] * Z + k[None, :])
        value = tl.load(closing + n[:, None] * C + c[None, :])
        gate_shift, shift = tl.load(gate_offsets + n), tl.load(offsets + n)
        # Before the products, which take as long as these loads.
        if DROPPED > 0:
            kept = _load_keep(keep, first, rows, row, channels, N, Z, DROPPED, WHOLE)
        if RESIDUAL:
            before = _load_rows(z, first, rows, row, present, channels, Z, EVEN)
        gate = _shifted(product_t(normal, gate, PRECISION), gate_shift[None, :])
        value = _shifted(product_t(narrow, value, PRECISION), shift[None, :])
        result = gathered(_opened(value, gate, narrow.dtype == tl.float32), DEAL)
        if DROPPED > 0:
            result *= kept.to(tl.float32)
        if RESIDUAL:
            result += before.to(tl.float32)
        _store_rows(out, result, first, rows, row, present, channels, Z, EVEN)


@triton.jit
def _output_matrices(
    gate_matrix, closing, start, Z: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, DEAL: tl.constexpr
):  # fmt: skip
    """BLOCK rows of the gate's matrix and of output's, from ``start`` on."""
    n = start + dealt(tl.arange(0, BLOCK), DEAL)
    opening = tl.load(gate_matrix + n[:, None] * Z + tl.arange(0, Z)[None, :])
    return opening, tl.load(closing + n[:, None] * C + tl.arange(0, C)[None, :])


@triton.jit
def _output_gradient(
    normal, tile, dtile, opening, matrix, grad, keep, gate_offsets, offsets, dgate, dvalue, first, local, row,
    start, N, Q, Z: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DROPPED: tl.constexpr,
    WHOLE: tl.constexpr, HELD: tl.constexpr, DEAL: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK channels from ``start`` on: dgate and dvalue, and ``dtile`` with what comes through them."""
    R = Q * 64
    dtype = tile.dtype
    n, channels = start + dealt(tl.arange(0, BLOCK), DEAL), start + tl.arange(0, BLOCK)
    if HELD:
        # In branches, which the compiler puts first: what the loop loads elsewhere is copied to shared memory
        # ahead of time, and too little is left for another program.
        gate_shift, shift = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        if _NONE - start < Q:
            gate_shift, shift = tl.load(gate_offsets + n), tl.load(offsets + n)
    else:
        gate_shift, shift = tl.load(gate_offsets + n), tl.load(offsets + n)
    grad = grad.to(tl.float32)
    if DROPPED > 0:
        kept = _load_keep(keep, first, local, row, channels, N, Z, DROPPED, WHOLE)
    gate = product_t(normal, opening, PRECISION)
    value = product_t(tile, matrix, PRECISION)
    gate = _open(_shifted(gate, gate_shift[None, :]), dtype == tl.float32)
    if DROPPED > 0:
        grad *= kept.to(tl.float32)
    grad = scattered(grad, ROWS, DEAL) * gate
    dtile = add_product(dtile, grad.to(dtype), matrix, PRECISION)
    opened = gathered(grad.to(dtype), DEAL)
    _store_positions(dvalue, opened, first, local, channels, R, Z, EVEN)
    grad *= _shifted(value, shift[None, :]) * (gate * LN2 - LN2)
    grad = gathered(grad.to(dtype), DEAL)
    _store_positions(dgate, grad, first, local, channels, R, Z, EVEN)
    return dtile


@triton.jit(do_not_specialize=[*_SIZES, "blocks"])
def output_gradient_kernel(
    standard, summed, dout, keep, gate_matrix, closing, gate_offsets, offsets, factors, dx, dgate, dvalue,
    N, NP, Q, blocks, Z: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    DROPPED: tl.constexpr, WHOLE: tl.constexpr, HELD: tl.constexpr, FETCH: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dx [C, R]; dgate and dvalue [R, Z], gradients of the gate's product and of output's.

    HELD: a program goes through many of all blocks, whose tensors are copied to shared memory one block
    ahead, and the matrices stay there, as four tiles of BLOCK channels. Else it has one block.
    """
    R = Q * 64
    dtype = summed.dtype.element_ty
    program = tl.program_id(0)
    first = program.to(tl.int64) * ROWS
    k, c, n, every = tl.arange(0, Z), tl.arange(0, C), tl.arange(0, BLOCK), tl.arange(0, ROWS)
    DEAL: tl.constexpr = BLOCK == 32 and dtype.primitive_bitwidth == 16
    if HELD:
        tl.static_assert(Z == 4 * BLOCK)
        local = paired(gathered_rows(ROWS, 1, DEAL))
        # By name: what is kept in shared memory has no index.
        o0, m0 = _output_matrices(gate_matrix, closing, 0, Z, C, BLOCK, DEAL)
        o1, m1 = _output_matrices(gate_matrix, closing, BLOCK, Z, C, BLOCK, DEAL)
        o2, m2 = _output_matrices(gate_matrix, closing, 2 * BLOCK, Z, C, BLOCK, DEAL)
        o3, m3 = _output_matrices(gate_matrix, closing, 3 * BLOCK, Z, C, BLOCK, DEAL)
        for block in tl.range(program, blocks, tl.num_programs(0), disable_licm=True, num_stages=2):
            first = tl.cast(block, tl.int64) * ROWS
            row, present = _positions(first, N, NP, R, local, EVEN)
            normal = in_registers(_load_positions(standard, first, k, R, Z, ROWS, EVEN, False, True))
            tile = in_registers(_load_positions(summed, first, c, R, C, ROWS, EVEN, False, True))
            g0 = _load_rows(dout, first, local, row, present, n, Z, EVEN)
            g1 = _load_rows(dout, first, local, row, present, BLOCK + n, Z, EVEN)
            g2 = _load_rows(dout, first, local, row, present, 2 * BLOCK + n, Z, EVEN)
            g3 = _load_rows(dout, first, local, row, present, 3 * BLOCK + n, Z, EVEN)
            scale = tl.zeros([ROWS], tl.float32)
            if _NONE - Z < Q:
                scale = _load_factors(factors + R, first, R, ROWS, EVEN, True)
            if FETCH:
                # The copies begin when this block ends, and wait for the cache alone.
                after = tl.minimum(block + tl.num_programs(0), blocks - 1).to(tl.int64) * ROWS
                later, _ = _positions(after, N, NP, R, every, EVEN)
                fetch_rows(dout, later, Z)
                later = tl.minimum(after + every, R - 1)
                fetch_rows(standard, later, Z)
                fetch_rows(summed, later, C)
            dtile = tl.zeros([ROWS, C], tl.float32)
            dtile = _output_gradient(
                normal, tile, dtile, o0, m0, g0, keep, gate_offsets, offsets, dgate, dvalue, first, local,
                row, 0, N, Q, Z, ROWS, BLOCK, DROPPED, WHOLE, HELD, DEAL, EVEN, PRECISION,
            )  # fmt: skip
            dtile = _output_gradient(
                normal, tile, dtile, o1, m1, g1, keep, gate_offsets, offsets, dgate, dvalue, first, local,
                row, BLOCK, N, Q, Z, ROWS, BLOCK, DROPPED, WHOLE, HELD, DEAL, EVEN, PRECISION,
            )  # fmt: skip
            dtile = _output_gradient(
                normal, tile, dtile, o2, m2, g2, keep, gate_offsets, offsets, dgate, dvalue, first, local,
                row, 2 * BLOCK, N, Q, Z, ROWS, BLOCK, DROPPED, WHOLE, HELD, DEAL, EVEN, PRECISION,
            )  # fmt: skip
            dtile = _output_gradient(
                normal, tile, dtile, o3, m3, g3, keep, gate_offsets, offsets, dgate, dvalue, first, local,
                row, 3 * BLOCK, N, Q, Z, ROWS, BLOCK, DROPPED, WHOLE, HELD, DEAL, EVEN, PRECISION,
            )  # fmt: skip
            wide = tile.to(tl.float32)
            slope = tl.sum(dtile * wide, 1) / C
            dtile = (dtile - wide * slope[:, None]) * scale[:, None]
            _store_paired_channels(dx, dtile, first, block, Q, EVEN)
    else:
        local = gathered_rows(ROWS, 1, DEAL)
        row, present = _positions(first, N, NP, R, local, EVEN)
        if FETCH:
            fetch_rows(dout, row, Z)
        normal = _load_positions(standard, first, k, R, Z, ROWS, EVEN)
        tile = _load_positions(summed, first, c, R, C, ROWS, EVEN)
        dtile = tl.zeros([ROWS, C], tl.float32)
        for start in range(0, Z, BLOCK):
            opening, matrix = _output_matrices(gate_matrix, closing, start, Z, C, BLOCK, DEAL)
            grad = _load_rows(dout, first, local, row, present, start + n, Z, EVEN)
            dtile = _output_gradient(
                normal, tile, dtile, opening, matrix, grad, keep, gate_offsets, offsets, dgate, dvalue, first,
                local, row, start, N, Q, Z, ROWS, BLOCK, DROPPED, WHOLE, HELD, DEAL, EVEN, PRECISION,
            )  # fmt: skip
        # Read again and not kept: the registers are wanted above, and the cache still has it.
        tile = _load_positions(summed, first, c, R, C, ROWS, EVEN).to(tl.float32)
        scale = _load_factors(factors + R, first, R, ROWS, EVEN)
        slope = tl.sum(dtile * tile, 1) / C
        dtile = (dtile - tile * slope[:, None]) * scale[:, None]
        _store_channels(dx, tl.trans(dtile.to(dtype)), first, c, R, ROWS, EVEN)


@triton.jit(do_not_specialize=_SIZES)
def input_gradient_kernel(
    standard, dab, dgate, packed, offsets, factors, dout, dz, N, NP, Q, Z: tl.constexpr,
    C2: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GATE_BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr, FETCH: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz of one block: what comes through a, b and the output's gate, back through the norm.

    RESIDUAL: and ``dout``.
    """
    R = Q * 64
    dtype = dab.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * ROWS
    k, m, block = tl.arange(0, Z), tl.arange(0, 2 * BLOCK), tl.arange(0, BLOCK)
    row, present = _positions(first, N, NP, R, tl.arange(0, ROWS), EVEN)
    if FETCH:
        fetch_channels(dab, first, R, C2, ROWS)
        fetch_rows(dgate, tl.minimum(first + tl.arange(0, ROWS), R - 1), Z)
    normal = _load_positions(standard, first, k, R, Z, ROWS, EVEN)
    held = _load_factors(factors + 2 * R, first, R, ROWS, EVEN)
    dnormal = tl.zeros([ROWS, Z], tl.float32)
    lost = tl.zeros([ROWS, Z], tl.float32)
    # Turns a tile by a product, which is exact and leaves it in the layout of the matrix units.
    unit = (block[:, None] == block[None, :]).to(dtype)
    ahead = _load_channels(dab, first, block, R, ROWS, EVEN)
    for start in range(0, C2, BLOCK):
        # 64-bit offsets: one address and constants, where each 32-bit offset takes two registers.
        rows = (packed + 2 * start * Z) + (m[:, None].to(tl.int64) * Z + k[None, :])
        matrix, shift = tl.load(rows), tl.load(offsets + 2 * start + m)
        grad = tl.trans(ahead)
        # Into registers, for shared memory that it would be copied to is wanted for a third program; the last
        # reads the first again.
        ahead = _load_channels(dab, first, (start + BLOCK + block) % C2, R, ROWS, EVEN)
        both = _shifted(product_t(normal, matrix, PRECISION), shift[None, :])
        value, gate = _split_columns(both, BLOCK, ROWS)
        gate = _open(gate, dtype == tl.float32)
        if dtype.primitive_bitwidth == 16:
            grad = tl.dot(grad, unit)
        grad *= gate * held[:, None]
        opening = grad * value * (gate * LN2 - LN2)
        if dtype.primitive_bitwidth == 16:
            both = _join_columns(grad.to(dtype), opening.to(dtype), BLOCK, ROWS)
            dnormal = add_product(dnormal, both, matrix, PRECISION)
        else:
            value_matrix, gate_matrix = _split_rows(matrix, BLOCK, Z)
            dnormal, lost = add_product_kept(dnormal, lost, grad, value_matrix, PRECISION)
            dnormal, lost = add_product_kept(dnormal, lost, opening, gate_matrix, PRECISION)
    for start in range(0, Z, GATE_BLOCK):
        c = start + tl.arange(0, GATE_BLOCK)
        matrix = tl.load(packed + (2 * C2 + c)[:, None] * Z + k[None, :])
        grad = _load_positions(dgate, first, c, R, Z, ROWS, EVEN)
        dnormal, lost = add_product_kept(dnormal, lost, grad, matrix, PRECISION)
    # Read again and not kept: the registers are wanted above, and the cache still has it. The policy tells
    # the compiler that it is another load.
    tile = _load_positions(standard, first, k, R, Z, ROWS, EVEN, True).to(tl.float32)
    scale = _load_factors(factors, first, R, ROWS, EVEN)
    slope = tl.sum(dnormal * tile, 1) / Z
    result = (dnormal - tile * slope[:, None]) * scale[:, None]
    if RESIDUAL:
        result += _load_rows(dout, first, tl.arange(0, ROWS), row, present, k, Z, EVEN).to(tl.float32)
    _store_rows(dz, result, first, tl.arange(0, ROWS), row, present, k, Z, EVEN)


@triton.jit
def _held_shift(offsets, dtype: tl.constexpr):
    """[offsets, 16]: their product with rows of ones gives the offsets, of whose float32 little is lost."""
    part, rest = offsets.to(dtype), offsets
    column = tl.arange(0, 16)[None, :]
    shift = tl.where(column == 0, part[:, None], tl.zeros([1, 16], dtype))
    for place in tl.static_range(1, 3):
        rest -= part.to(tl.float32)
        part = rest.to(dtype)
        shift = tl.where(column == place, part[:, None], shift)
    return shift


@triton.jit
def _held_matrix(
    packed, offsets, part: tl.constexpr, BLOCK: tl.constexpr, Z: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Rows of ``packed`` with their columns dealt, and their offsets."""
    m = part * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    matrix = tl.load(packed + m[:, None] * Z + dealt(tl.arange(0, Z))[None, :])
    return matrix, _held_shift(tl.load(offsets + m), dtype)


@triton.jit(do_not_specialize=[*_SIZES, "blocks"])
def held_input_gradient_kernel(
    standard, dab, dgate, packed, offsets, factors, dout, dz, N, NP, Q, blocks, Z: tl.constexpr,
    C2: tl.constexpr, ROWS: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """``input_gradient_kernel`` of 2 bytes, for NVIDIA GPUs: programs go through many of all blocks.

    All matrices are in shared memory and nothing else: rows paired and columns dealt, tiles come from memory
    as the matrix units take them from registers. So a warp waits only for the other three of its matrix
    instructions, and while four warps multiply, four do the rest. What a block reads is read during the one
    before. As loads return in their order, each waits for those: no load may be wanted soon, and the offsets
    come from shared memory, by way of a product with ones.
    """
    R = Q * 64
    BLOCK: tl.constexpr = C2 // 8
    THREADS: tl.constexpr = 2 * ROWS
    dtype: tl.constexpr = dab.dtype.element_ty
    program = tl.program_id(0)
    k, column = dealt(tl.arange(0, Z)), tl.arange(0, 16)[None, :]
    # By name: what is kept in shared memory has no index.
    w0, s0 = _held_matrix(packed, offsets, 0, BLOCK, Z, dtype)
    w1, s1 = _held_matrix(packed, offsets, 1, BLOCK, Z, dtype)
    w2, s2 = _held_matrix(packed, offsets, 2, BLOCK, Z, dtype)
    w3, s3 = _held_matrix(packed, offsets, 3, BLOCK, Z, dtype)
    w4, s4 = _held_matrix(packed, offsets, 4, BLOCK, Z, dtype)
    w5, s5 = _held_matrix(packed, offsets, 5, BLOCK, Z, dtype)
    w6, s6 = _held_matrix(packed, offsets, 6, BLOCK, Z, dtype)
    w7, s7 = _held_matrix(packed, offsets, 7, BLOCK, Z, dtype)
    matrices, shifts = (w0, w1, w2, w3, w4, w5, w6, w7), (s0, s1, s2, s3, s4, s5, s6, s7)
    gate_matrix = tl.load(packed + 2 * C2 * Z + (k[:, None] * Z + k[None, :]))
    ones = tl.broadcast_to(tl.where(column < 3, 1.0, 0.0).to(dtype), [ROWS, 16])
    lines, columns = paired(gathered_rows(ROWS, Z // 32)), gathered_columns(ROWS, Z)
    first = program.to(tl.int64) * ROWS
    next_normal = _load_dealt_positions(standard, first, R, Z, ROWS, EVEN)
    next_held = pairs_of(factors + 2 * R, first, R, ROWS, EVEN)
    pairs = load_pairs(dab, first, R, BLOCK, ROWS, EVEN)
    next_pairs = load_pairs(dab + tl.cast(R, tl.int64) * BLOCK, first, R, BLOCK, ROWS, EVEN)
    for block in tl.range(program, blocks, tl.num_programs(0), disable_licm=True):
        first = tl.cast(block, tl.int64) * ROWS
        after = tl.minimum(block + tl.num_programs(0), blocks - 1).to(tl.int64) * ROWS
        row, present = _positions(first, N, NP, R, lines, EVEN)
        grad = _load_dealt_positions(dgate, first, R, Z, ROWS, EVEN)
        scale = _load_factors(factors, first, R, ROWS, EVEN, True)
        held, next_held = next_held, pairs_of(factors + 2 * R, after, R, ROWS, EVEN)
        loaded(THREADS)
        # 0, which the compiler does not know: the matrix units want the tile in other registers than it was
        # loaded into, and it would move it as soon as it is there, at the end of the last block.
        normal = _laid_out(next_normal ^ (Q >> 31), dtype, ROWS)
        dnormal = tl.zeros([ROWS, Z], tl.float32)
        for part in tl.static_range(8):
            both = tl.dot(normal, tl.trans(matrices[part]), tl.dot(ones, tl.trans(shifts[part])))
            rows = dab + tl.cast(R, tl.int64) * ((part + 2) % 8 * BLOCK)
            later = load_pairs(rows, first if part < 6 else after, R, BLOCK, ROWS, EVEN)
            if part == 5:
                if RESIDUAL:
                    before = _load_rows(dout, first, lines, row, present, columns, Z, EVEN)
                else:
                    next_normal = _load_dealt_positions(standard, after, R, Z, ROWS, EVEN)
            loaded(THREADS)
            value, gate = _split_columns(both, BLOCK, ROWS)
            gate = _reciprocal(1.0 + tl.exp2(gate))
            opened = parted(pairs & held[None, :], dtype) * gate
            opening = opened * value * (gate * LN2 - LN2)
            both = _join_columns(opened.to(dtype), opening.to(dtype), BLOCK, ROWS)
            dnormal = tl.dot(both, matrices[part], dnormal)
            pairs, next_pairs = next_pairs, later
            if part == 1:
                dnormal = tl.dot(_laid_out(grad, dtype, ROWS), gate_matrix, dnormal)
        if RESIDUAL:
            # Registers have no room for both earlier.
            next_normal = _load_dealt_positions(standard, after, R, Z, ROWS, EVEN)
            loaded(THREADS)
        tile = normal.to(tl.float32)
        slope = tl.sum(dnormal * tile, 1) / Z
        result = gathered((dnormal - tile * slope[:, None]) * scale[:, None])
        if RESIDUAL:
            result += before.to(tl.float32)
        _store_rows(dz, result, first, lines, row, present, columns, Z, EVEN)


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
        held = _load_factors(factors + 2 * R, first, R, ROWS, EVEN)
        normal = _load_positions(standard, first, k, R, Z, ROWS, EVEN)
        grad = _load_channels(dab, first, c, R, ROWS, EVEN)
        both = _shifted(product_t(matrix, normal, PRECISION), shift[:, None])
        value, gate = _split_rows(both, BLOCK, ROWS)
        # Where the mask is not set, grad is 0, whatever the gate's slope.
        gate = _opened(tl.broadcast_to(held[None, :], [BLOCK, ROWS]), gate, dtype == tl.float32)
        grad = grad.to(tl.float32) * gate
        both = _join_rows(grad, grad * value * (gate * LN2 - LN2), BLOCK, ROWS)
        if dtype == tl.float32:
            total, total_lost = add_kept(total, total_lost, tl.sum(both, 1))
        else:
            total += tl.sum(both, 1)
        product, product_lost = add_product_kept(product, product_lost, both.to(dtype), normal, PRECISION)
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
        tile = _load_positions(normal, first, k, R, WIDTH, ROWS, EVEN)
        grad = _load_positions(dproduct, first, c, R, Z, ROWS, EVEN)
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
