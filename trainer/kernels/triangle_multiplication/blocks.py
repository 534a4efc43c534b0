"""How a block of positions is read and written.

``rows``: of tensors [B·N·N, channels], which have no padding; ``positions``: of tensors [R, channels];
``channels``: of tensors [channels, R].
"""

import triton
import triton.language as tl

from megafold.trainer.kernels.dealing import (
    gathered,
    gathered_columns,
    gathered_rows,
    opaque,
    paired,
    scattered,
)

# Numbers that Triton shall not compile variants for.
SIZES = ["N", "NP", "Q"]


@triton.jit
def positions(first, N, NP, R, local, EVEN: tl.constexpr):
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
def next_first(block, blocks, ROWS: tl.constexpr):
    """The first position of what a program that goes through many blocks has after ``block``.

    Where nothing follows it is that of the last of all, which is read for nothing.
    """
    return tl.minimum(block + tl.num_programs(0), blocks - 1).to(tl.int64) * ROWS


@triton.jit
def load_factors(
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
def load_keep(
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
def load_rows(base, first, local, row, present, channels, WIDTH: tl.constexpr, EVEN: tl.constexpr):
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
def store_rows(base, value, first, local, row, present, channels, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """As :func:`load_rows`."""
    value = value.to(base.dtype.element_ty)
    columns = channels if len(channels.shape) == 2 else channels[None, :]
    if EVEN:
        tl.store((base + first * WIDTH) + (local[:, None] * WIDTH + columns), value)
    else:
        tl.store(base + row[:, None] * WIDTH + columns, value, mask=present[:, None])


@triton.jit
def load_positions(
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
def store_positions(
    base, value, first, local, channels, R, WIDTH: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """As :func:`load_positions`."""
    value = value.to(base.dtype.element_ty)
    pointers = (base + first * WIDTH) + (local[:, None] * WIDTH + channels[None, :])
    if EVEN:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=(local < R - first)[:, None])


@triton.jit
def load_dealt_positions(base, first, R, WIDTH: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """[ROWS, WIDTH] of a tensor [R, WIDTH] of 2 bytes, rows paired, columns dealt: for :func:`laid_out`."""
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
def laid_out(tile, dtype: tl.constexpr, ROWS: tl.constexpr):
    """The tile [ROWS, WIDTH] of ``dtype`` that :func:`load_dealt_positions` gives by twos."""
    low, high = tile.to(tl.int16).to(dtype, bitcast=True), (tile >> 16).to(tl.int16).to(dtype, bitcast=True)
    return scattered(tl.reshape(tl.join(low, high), [tile.shape[0], 32]), ROWS)


@triton.jit
def store_dealt_positions(
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
def load_channels(base, first, channels, R, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """[channels, ROWS] of a tensor [channels, R]."""
    local = tl.arange(0, ROWS)
    pointers = (base + first) + (channels.to(tl.int64)[:, None] * R + local[None, :])
    if EVEN:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(local < R - first)[None, :], other=0.0)
    return tile


@triton.jit
def store_channels(base, value, first, channels, R, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """As :func:`load_channels`."""
    value = value.to(base.dtype.element_ty)
    local = tl.arange(0, ROWS)
    pointers = (base + first) + (channels.to(tl.int64)[:, None] * R + local[None, :])
    if EVEN:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=(local < R - first)[None, :])


@triton.jit
def store_dealt_channels(base, value, first, start, R, EVEN: tl.constexpr):
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
def store_paired_channels(base, value, first, block, Q, EVEN: tl.constexpr):
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
