"""The forward: matrices prepared; z standardised and projected; the output."""

import triton
import triton.language as tl

from megafold.trainer.kernels.dealing import dealt, gathered, gathered_rows, pinned
from megafold.trainer.kernels.fetching import fetch_rows
from megafold.trainer.kernels.layernorm.kernel import inverse_root
from megafold.trainer.kernels.products import LOG2E, product_t
from megafold.trainer.kernels.triangle_multiplication.blocks import (
    SIZES,
    load_channels,
    load_keep,
    load_positions,
    load_rows,
    next_first,
    positions,
    store_channels,
    store_dealt_channels,
    store_dealt_positions,
    store_positions,
    store_rows,
)
from megafold.trainer.kernels.triangle_multiplication.gates import RUN, gated, masked, shifted, split_rows


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
    row, present = positions(first, N, NP, R, local, EVEN)
    return load_rows(z, first, local, row, present, k, Z, EVEN)


@triton.jit
def _standardised(
    tile, mask, standard, factors, first, N, NP, R, eps, Z: tl.constexpr, ROWS: tl.constexpr,
    DEAL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """z of a block standardised, and the mask, both kept in memory as well."""
    k, local = tl.arange(0, Z), dealt(tl.arange(0, ROWS), DEAL)
    row, present = positions(first, N, NP, R, local, EVEN)
    tile = tile.to(tl.float32)
    tile -= (tl.sum(tile, 1) / Z)[:, None]
    scale = inverse_root(tl.sum(tile * tile, 1) / Z + eps)
    narrow = (tile * scale[:, None]).to(standard.dtype.element_ty)
    if EVEN:
        valid = tl.load(mask + first + local) != 0
    else:
        valid = tl.load(mask + row, mask=present, other=0) != 0
    tl.store(factors + first + local, scale, mask=local < R - first)
    # The backward reads 4 bytes at a time ahead of their use, which it cannot do with bytes of a mask.
    tl.store(factors + 2 * R + first + local, valid.to(tl.float32), mask=local < R - first)
    store_positions(standard, narrow, first, local, k, R, Z, EVEN)
    return narrow, valid


@triton.jit
def _project(
    matrix, shift, narrow, valid, ab, first, start, R, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    DEAL: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of a and b from ``start`` on; ``valid``: the mask, or -1 of 2 bytes where it is set."""
    if narrow.dtype == tl.float32:
        both = product_t(matrix, narrow, PRECISION)
    else:
        both = tl.dot(matrix, tl.trans(narrow), input_precision=PRECISION)
    value, gate = split_rows(shifted(both, shift[:, None]), BLOCK, ROWS)
    value = gated(value, gate, narrow.dtype == tl.float32)
    if valid.dtype == tl.int16:
        value = masked(value.to(narrow.dtype), valid[None, :])
    else:
        value = tl.where(valid[None, :], value, 0.0)
    if DEAL:
        store_dealt_channels(ab, value, first, start, R, EVEN)
    else:
        store_channels(ab, value, first, start + tl.arange(0, BLOCK), R, ROWS, EVEN)


@triton.jit(do_not_specialize=[*SIZES, "blocks"])
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
        matrices, shifts = (w0, w1, w2, w3), (s0, s1, s2, s3)
        for block in tl.range(program, blocks, tl.num_programs(0), disable_licm=True):
            first = tl.cast(block, tl.int64) * ROWS
            after = next_first(block, blocks, ROWS)
            ahead = _load_z(z, after, N, NP, R, Z, ROWS, DEAL, EVEN)
            narrow, valid = _standardised(
                tile, mask, standard, factors, first, N, NP, R, eps, Z, ROWS, DEAL, EVEN
            )
            if narrow.dtype.primitive_bitwidth == 16:
                valid = tl.where(valid, -1, 0).to(tl.int16)
            for part in tl.static_range(4):
                _project(
                    matrices[part], shifts[part], narrow, valid, ab, first, part * BLOCK, R, BLOCK, ROWS,
                    DEAL, EVEN, PRECISION,
                )  # fmt: skip
            tile = ahead
    else:
        narrow, valid = _standardised(
            tile, mask, standard, factors, first, N, NP, R, eps, Z, ROWS, DEAL, EVEN
        )
        for start in range(0, C2, BLOCK):
            matrix = tl.load(rows + 2 * start * Z)
            shift = tl.load(offsets + 2 * start + m)
            _project(matrix, shift, narrow, valid, ab, first, start, R, BLOCK, ROWS, DEAL, EVEN, PRECISION)


@triton.jit(do_not_specialize=SIZES)
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
    row, present = positions(first, N, NP, R, rows, EVEN)
    if FETCH and RESIDUAL:
        fetch_rows(z, row, Z)
    normal = load_positions(standard, first, k, R, Z, ROWS, EVEN)
    tile = tl.trans(load_channels(x, first, dealt(c, DEAL), R, ROWS, EVEN)).to(tl.float32)
    if DEAL:
        tile = pinned(tile, dtype)
    tile -= (tl.sum(tile, 1) / C)[:, None]
    scale = inverse_root(tl.sum(tile * tile, 1) / C + eps)
    narrow = (tile * scale[:, None]).to(dtype)
    if KEEP:
        tl.store(factors + R + first + local, scale, mask=local < R - first)
        if DEAL:
            store_dealt_positions(summed, narrow, first, R, C, ROWS, EVEN)
        else:
            store_positions(summed, narrow, first, local, c, R, C, EVEN)
    if DEAL:
        closing += Z * C
    for start in range(0, Z, BLOCK):
        n, channels = start + dealt(tl.arange(0, BLOCK), DEAL), start + tl.arange(0, BLOCK)
        gate = tl.load(gate_matrix + n[:, None] * Z + k[None, :])
        value = tl.load(closing + n[:, None] * C + c[None, :])
        gate_shift, shift = tl.load(gate_offsets + n), tl.load(offsets + n)
        # Before the products, which take as long as these loads.
        if DROPPED > 0:
            kept = load_keep(keep, first, rows, row, channels, N, Z, DROPPED, WHOLE)
        if RESIDUAL:
            before = load_rows(z, first, rows, row, present, channels, Z, EVEN)
        gate = shifted(product_t(normal, gate, PRECISION), gate_shift[None, :])
        value = shifted(product_t(narrow, value, PRECISION), shift[None, :])
        result = gathered(gated(value, gate, narrow.dtype == tl.float32), DEAL)
        if DROPPED > 0:
            result *= kept.to(tl.float32)
        if RESIDUAL:
            result += before.to(tl.float32)
        store_rows(out, result, first, rows, row, present, channels, Z, EVEN)
