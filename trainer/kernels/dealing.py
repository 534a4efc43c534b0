"""Tiles between memory and the matrix units without a way through shared memory.

Of a result [rows, columns] of 16-bit matrix instructions a thread has columns 2t and 2t + 1 of every eight,
in rows g and g + 8 of every sixteen (t: its place among four threads; g: among eight such fours). Memory
wants 16 neighbouring bytes of a thread. So columns are dealt: what belongs at column 8t + 2i + e of 32 stands
at column 8i + 2t + e of the tile, which costs nothing where a tile's columns are rows of another matrix, read
in this order. A thread then has 8 neighbours, and four threads have 32.

All of it is no more than another order of a tensor's elements, so results are the same with any layout.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dealt(n, DEAL: tl.constexpr = True):
    """What is at place ``n`` of a dealt tile; being its own inverse, also the place of ``n``."""
    if DEAL:
        n = n // 32 * 32 + n // 2 % 4 * 8 + n // 8 % 4 * 2 + n % 2
    return n


@triton.jit
def gathered(tile, DEAL: tl.constexpr = True):
    """A tile [rows, columns], its columns dealt, as memory takes it: [columns / 32 · rows, 32].

    :func:`gathered_rows` and :func:`gathered_columns` say where a row of the result belongs.
    """
    if DEAL:
        SIXTEENS: tl.constexpr = tile.shape[0] // 16
        GROUPS: tl.constexpr = tile.shape[1] // 32
        tile = tl.reshape(tile, [SIXTEENS, 2, 8, GROUPS, 4, 4, 2])
        tile = tl.reshape(tl.permute(tile, (3, 1, 0, 2, 5, 4, 6)), [GROUPS * SIXTEENS * 16, 32])
    return tile


@triton.jit
def scattered(tile, ROWS: tl.constexpr, DEAL: tl.constexpr = True):
    """The inverse of :func:`gathered`: the tile of ROWS rows, its columns dealt."""
    if DEAL:
        SIXTEENS: tl.constexpr = ROWS // 16
        GROUPS: tl.constexpr = tile.shape[0] // ROWS
        tile = tl.reshape(tile, [GROUPS, 2, SIXTEENS, 8, 4, 4, 2])
        tile = tl.reshape(tl.permute(tile, (2, 1, 3, 0, 5, 4, 6)), [ROWS, GROUPS * 32])
    return tile


@triton.jit
def gathered_rows(ROWS: tl.constexpr, GROUPS: tl.constexpr = 1, DEAL: tl.constexpr = True):
    """The row of the tile that each row of a gathered tile of GROUPS · 32 columns belongs to."""
    m = tl.arange(0, GROUPS * ROWS)
    if DEAL:
        m = m // 8 % (ROWS // 16) * 16 + m // (ROWS // 2) % 2 * 8 + m % 8
    return m


@triton.jit
def gathered_columns(ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEAL: tl.constexpr = True):
    """The column, before it was dealt, of each element of a gathered tile: [rows or 1, columns]."""
    if DEAL:
        column = (tl.arange(0, COLUMNS // 32 * ROWS) // ROWS * 32)[:, None] + tl.arange(0, 32)[None, :]
    else:
        column = tl.arange(0, COLUMNS)[None, :]
    return column


@triton.jit
def paired(m, PAIR: tl.constexpr = True):
    """The position whose row is ``m``, if rows g and g + 8 of every sixteen are to be neighbours.

    A thread then has two neighbours of a column, and eight threads have 16: a tile goes to where its columns
    are rows, by 4 bytes of a thread and 32 in a piece.
    """
    if PAIR:
        m = m // 16 * 16 + m % 8 * 2 + m // 8 % 2
    return m


@triton.jit
def pinned(tile, dtype: tl.constexpr):
    """The float32 tile, which a product with zeros makes the compiler lay out as the matrix units do."""
    left = tl.zeros([tile.shape[0], 16], dtype)
    return tl.dot(left, tl.zeros([16, tile.shape[1]], dtype), tile)


@triton.jit
def in_registers(tile):
    """The tile, of 2 bytes, as a left operand that products take from registers: NVIDIA GPUs alone.

    Of what is loaded they would take it from shared memory, once for each tile of the right operand.
    """
    if INTERPRETED or tile.dtype.primitive_bitwidth != 16:
        return tile
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=True, pack=2
        )


@triton.jit
def opaque(number, other):
    """``number``, which 32 bits hold, of which the compiler thinks that it depends on ``other``."""
    if INTERPRETED:
        return number
    else:
        numbers = [tl.cast(number, tl.int32), tl.cast(other, tl.int32)]
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", numbers, dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def load_pairs(base, first, length, COLUMNS: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """Positions ``first`` to ``first`` + ROWS of a tensor [COLUMNS, length] of 2 bytes; 0 beyond its length.

    [COLUMNS / 4, 2 * ROWS] of 32 bits: two positions each, in the order in which threads have them. Length
    and first are even; EVEN: nothing is beyond.
    """
    n = tl.arange(0, COLUMNS // 2 * ROWS)
    pair, column = n // 4 % (ROWS // 2), n // (4 * ROWS) * 8 + n % 4 * 2 + n // (2 * ROWS) % 2
    # Of one number each, as they have them: of neighbours the compiler would give a thread four.
    place = tl.max_contiguous(column * (length // 2) + pair, [1])
    pointers = base.to(tl.pointer_type(tl.int32), bitcast=True) + first // 2 + place
    if EVEN:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=2 * pair < length - first, other=0)
    return tl.reshape(tile, [COLUMNS // 4, 2 * ROWS])


@triton.jit
def pairs_of(values, first, length, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """For :func:`load_pairs`: [2 * ROWS], all bits of the positions whose number in ``values`` is not 0."""
    place = tl.max_contiguous(tl.arange(0, 2 * ROWS) // 4 * 2, [1])
    pointers = values + first + place
    if EVEN:
        low, high = tl.load(pointers), tl.load(pointers + 1)
    else:
        inside = place < length - first
        low, high = tl.load(pointers, mask=inside, other=0.0), tl.load(pointers + 1, mask=inside, other=0.0)
    return tl.where(low != 0, 0xFFFF, 0) | tl.where(high != 0, -0x10000, 0)


@triton.jit
def parted(pairs, dtype: tl.constexpr):
    """What :func:`load_pairs` gives of a tensor of ``dtype``, as [ROWS, COLUMNS] in float32, rows paired."""
    COLUMNS: tl.constexpr = pairs.shape[0] * 4
    ROWS: tl.constexpr = pairs.shape[1] // 2
    if dtype == tl.bfloat16:
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = (pairs & -0x10000).to(tl.float32, bitcast=True)
    else:
        low = pairs.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    tile = tl.reshape(tl.join(low, high), [COLUMNS // 8, 2, ROWS // 16, 8, 4, 2])
    return tl.reshape(tl.permute(tile, (2, 5, 3, 0, 4, 1)), [ROWS, COLUMNS])
