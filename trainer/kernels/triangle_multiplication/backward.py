"""The backward but for the weights: from the output to x, and from a, b and the output's gate to z."""

import triton
import triton.language as tl

from megafold.trainer.kernels.dealing import (
    dealt,
    gathered,
    gathered_columns,
    gathered_rows,
    in_registers,
    load_pairs,
    paired,
    pairs_of,
    parted,
    scattered,
)
from megafold.trainer.kernels.fetching import fetch_channels, fetch_rows, loaded
from megafold.trainer.kernels.products import LN2, add_product, add_product_kept, product_t
from megafold.trainer.kernels.triangle_multiplication.blocks import (
    SIZES,
    laid_out,
    load_channels,
    load_dealt_positions,
    load_factors,
    load_keep,
    load_positions,
    load_rows,
    next_first,
    positions,
    store_channels,
    store_paired_channels,
    store_positions,
    store_rows,
)
from megafold.trainer.kernels.triangle_multiplication.gates import (
    join_columns,
    openness,
    reciprocal,
    shifted,
    split_columns,
    split_rows,
)
from megafold.trainer.kernels.vendors import narrowed

# Below what Q is: branches on it are always taken, which the compiler does not know.
_NONE = tl.constexpr(-1)


@triton.jit
def _through_norm(grad, standard, scale, WIDTH: tl.constexpr):
    """The gradient of what a norm takes, of that of what it gives, ``standard`` [ROWS, WIDTH]."""
    slope = tl.sum(grad * standard, 1) / WIDTH
    return (grad - standard * slope[:, None]) * scale[:, None]


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
        kept = load_keep(keep, first, local, row, channels, N, Z, DROPPED, WHOLE)
    gate = product_t(normal, opening, PRECISION)
    value = product_t(tile, matrix, PRECISION)
    gate = openness(shifted(gate, gate_shift[None, :]), dtype == tl.float32)
    if DROPPED > 0:
        grad *= kept.to(tl.float32)
    grad = scattered(grad, ROWS, DEAL) * gate
    narrow = narrowed(grad, dtype)
    dtile = add_product(dtile, narrow, matrix, PRECISION)
    opened = gathered(narrow, DEAL)
    store_positions(dvalue, opened, first, local, channels, R, Z, EVEN)
    grad *= shifted(value, shift[None, :]) * (gate * LN2 - LN2)
    grad = gathered(narrowed(grad, dtype), DEAL)
    store_positions(dgate, grad, first, local, channels, R, Z, EVEN)
    return dtile


@triton.jit(do_not_specialize=[*SIZES, "blocks"])
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
        openings, matrices = (o0, o1, o2, o3), (m0, m1, m2, m3)
        for block in tl.range(program, blocks, tl.num_programs(0), disable_licm=True, num_stages=2):
            first = tl.cast(block, tl.int64) * ROWS
            row, present = positions(first, N, NP, R, local, EVEN)
            normal = in_registers(load_positions(standard, first, k, R, Z, ROWS, EVEN, False, True))
            tile = in_registers(load_positions(summed, first, c, R, C, ROWS, EVEN, False, True))
            g0 = load_rows(dout, first, local, row, present, n, Z, EVEN)
            g1 = load_rows(dout, first, local, row, present, BLOCK + n, Z, EVEN)
            g2 = load_rows(dout, first, local, row, present, 2 * BLOCK + n, Z, EVEN)
            g3 = load_rows(dout, first, local, row, present, 3 * BLOCK + n, Z, EVEN)
            grads = (g0, g1, g2, g3)
            scale = tl.zeros([ROWS], tl.float32)
            if _NONE - Z < Q:
                scale = load_factors(factors + R, first, R, ROWS, EVEN, True)
            if FETCH:
                # The copies begin when this block ends, and wait for the cache alone.
                after = next_first(block, blocks, ROWS)
                later, _ = positions(after, N, NP, R, every, EVEN)
                fetch_rows(dout, later, Z)
                later = tl.minimum(after + every, R - 1)
                fetch_rows(standard, later, Z)
                fetch_rows(summed, later, C)
            dtile = tl.zeros([ROWS, C], tl.float32)
            for part in tl.static_range(4):
                dtile = _output_gradient(
                    normal, tile, dtile, openings[part], matrices[part], grads[part], keep, gate_offsets,
                    offsets, dgate, dvalue, first, local, row, part * BLOCK, N, Q, Z, ROWS, BLOCK, DROPPED,
                    WHOLE, HELD, DEAL, EVEN, PRECISION,
                )  # fmt: skip
            dtile = _through_norm(dtile, tile.to(tl.float32), scale, C)
            store_paired_channels(dx, dtile, first, block, Q, EVEN)
    else:
        local = gathered_rows(ROWS, 1, DEAL)
        row, present = positions(first, N, NP, R, local, EVEN)
        if FETCH:
            fetch_rows(dout, row, Z)
        normal = load_positions(standard, first, k, R, Z, ROWS, EVEN)
        tile = load_positions(summed, first, c, R, C, ROWS, EVEN)
        dtile = tl.zeros([ROWS, C], tl.float32)
        for start in range(0, Z, BLOCK):
            opening, matrix = _output_matrices(gate_matrix, closing, start, Z, C, BLOCK, DEAL)
            grad = load_rows(dout, first, local, row, present, start + n, Z, EVEN)
            dtile = _output_gradient(
                normal, tile, dtile, opening, matrix, grad, keep, gate_offsets, offsets, dgate, dvalue, first,
                local, row, start, N, Q, Z, ROWS, BLOCK, DROPPED, WHOLE, HELD, DEAL, EVEN, PRECISION,
            )  # fmt: skip
        # Read again and not kept: the registers are wanted above, and the cache still has it.
        tile = load_positions(summed, first, c, R, C, ROWS, EVEN).to(tl.float32)
        scale = load_factors(factors + R, first, R, ROWS, EVEN)
        dtile = _through_norm(dtile, tile, scale, C)
        store_channels(dx, tl.trans(dtile.to(dtype)), first, c, R, ROWS, EVEN)


@triton.jit(do_not_specialize=SIZES)
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
    row, present = positions(first, N, NP, R, tl.arange(0, ROWS), EVEN)
    if FETCH:
        fetch_channels(dab, first, R, C2, ROWS)
        fetch_rows(dgate, tl.minimum(first + tl.arange(0, ROWS), R - 1), Z)
    normal = load_positions(standard, first, k, R, Z, ROWS, EVEN)
    valid = load_factors(factors + 2 * R, first, R, ROWS, EVEN)
    dnormal = tl.zeros([ROWS, Z], tl.float32)
    lost = tl.zeros([ROWS, Z], tl.float32)
    # Turns a tile by a product, which is exact and leaves it in the layout of the matrix units.
    unit = (block[:, None] == block[None, :]).to(dtype)
    ahead = load_channels(dab, first, block, R, ROWS, EVEN)
    for start in range(0, C2, BLOCK):
        # 64-bit offsets: one address and constants, where each 32-bit offset takes two registers.
        rows = (packed + 2 * start * Z) + (m[:, None].to(tl.int64) * Z + k[None, :])
        matrix, shift = tl.load(rows), tl.load(offsets + 2 * start + m)
        grad = tl.trans(ahead)
        # Into registers, for shared memory that it would be copied to is wanted for a third program; the last
        # reads the first again.
        ahead = load_channels(dab, first, (start + BLOCK + block) % C2, R, ROWS, EVEN)
        both = shifted(product_t(normal, matrix, PRECISION), shift[None, :])
        value, gate = split_columns(both, BLOCK, ROWS)
        gate = openness(gate, dtype == tl.float32)
        if dtype.primitive_bitwidth == 16:
            grad = tl.dot(grad, unit)
        grad *= gate * valid[:, None]
        opening = grad * value * (gate * LN2 - LN2)
        if dtype.primitive_bitwidth == 16:
            both = join_columns(narrowed(grad, dtype), narrowed(opening, dtype), BLOCK, ROWS)
            dnormal = add_product(dnormal, both, matrix, PRECISION)
        else:
            value_matrix, gate_matrix = split_rows(matrix, BLOCK, Z)
            dnormal, lost = add_product_kept(dnormal, lost, grad, value_matrix, PRECISION)
            dnormal, lost = add_product_kept(dnormal, lost, opening, gate_matrix, PRECISION)
    for start in range(0, Z, GATE_BLOCK):
        c = start + tl.arange(0, GATE_BLOCK)
        matrix = tl.load(packed + (2 * C2 + c)[:, None] * Z + k[None, :])
        grad = load_positions(dgate, first, c, R, Z, ROWS, EVEN)
        dnormal, lost = add_product_kept(dnormal, lost, grad, matrix, PRECISION)
    # Read again and not kept: the registers are wanted above, and the cache still has it. The policy tells
    # the compiler that it is another load.
    tile = load_positions(standard, first, k, R, Z, ROWS, EVEN, True).to(tl.float32)
    scale = load_factors(factors, first, R, ROWS, EVEN)
    result = _through_norm(dnormal, tile, scale, Z)
    if RESIDUAL:
        result += load_rows(dout, first, tl.arange(0, ROWS), row, present, k, Z, EVEN).to(tl.float32)
    store_rows(dz, result, first, tl.arange(0, ROWS), row, present, k, Z, EVEN)


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


@triton.jit(do_not_specialize=[*SIZES, "blocks"])
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
    next_normal = load_dealt_positions(standard, first, R, Z, ROWS, EVEN)
    next_valid = pairs_of(factors + 2 * R, first, R, ROWS, EVEN)
    pairs = load_pairs(dab, first, R, BLOCK, ROWS, EVEN)
    next_pairs = load_pairs(dab + tl.cast(R, tl.int64) * BLOCK, first, R, BLOCK, ROWS, EVEN)
    for block in tl.range(program, blocks, tl.num_programs(0), disable_licm=True):
        first = tl.cast(block, tl.int64) * ROWS
        after = next_first(block, blocks, ROWS)
        row, present = positions(first, N, NP, R, lines, EVEN)
        grad = load_dealt_positions(dgate, first, R, Z, ROWS, EVEN)
        scale = load_factors(factors, first, R, ROWS, EVEN, True)
        valid, next_valid = next_valid, pairs_of(factors + 2 * R, after, R, ROWS, EVEN)
        loaded(THREADS)
        # 0, which the compiler does not know: the matrix units want the tile in other registers than it was
        # loaded into, and it would move it as soon as it is there, at the end of the last block.
        normal = laid_out(next_normal ^ (Q >> 31), dtype, ROWS)
        dnormal = tl.zeros([ROWS, Z], tl.float32)
        for part in tl.static_range(8):
            both = tl.dot(normal, tl.trans(matrices[part]), tl.dot(ones, tl.trans(shifts[part])))
            rows = dab + tl.cast(R, tl.int64) * ((part + 2) % 8 * BLOCK)
            later = load_pairs(rows, first if part < 6 else after, R, BLOCK, ROWS, EVEN)
            if part == 5:
                if RESIDUAL:
                    before = load_rows(dout, first, lines, row, present, columns, Z, EVEN)
                else:
                    next_normal = load_dealt_positions(standard, after, R, Z, ROWS, EVEN)
            loaded(THREADS)
            value, gate = split_columns(both, BLOCK, ROWS)
            gate = reciprocal(1.0 + tl.exp2(gate))
            opened = parted(pairs & valid[None, :], dtype) * gate
            opening = opened * value * (gate * LN2 - LN2)
            both = join_columns(opened.to(dtype), opening.to(dtype), BLOCK, ROWS)
            dnormal = tl.dot(both, matrices[part], dnormal)
            pairs, next_pairs = next_pairs, later
            if part == 1:
                dnormal = tl.dot(laid_out(grad, dtype, ROWS), gate_matrix, dnormal)
        if RESIDUAL:
            # Registers have no room for both earlier.
            next_normal = load_dealt_positions(standard, after, R, Z, ROWS, EVEN)
            loaded(THREADS)
        result = gathered(_through_norm(dnormal, normal.to(tl.float32), scale, Z))
        if RESIDUAL:
            result += before.to(tl.float32)
        store_rows(dz, result, first, lines, row, present, columns, Z, EVEN)
