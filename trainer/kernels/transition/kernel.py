"""Triton kernels of the SwiGLU transition, with the layer norm before it or without; forward and backward.

Shapes: M rows (all leading axes of the input), C channels (a power of two, also of the output), H hidden
channels. Weights are contiguous and of the dtype of the products: ``weight_in`` [2·H, C], the rows that swish
sees first, ``weight_out`` [C, H].

A program keeps BM normalised rows and goes through the hidden channels BH at a time: the hidden activation is
never in memory. The backward computes it anew in the same way and has the input's gradient at the end. The
gradients of the weights are products over all rows, so what they need is written to a strip of scratch rows

    | dGate, dValue: 2·H | hidden: H | normalised input: C | gradient of the output: C |

and a second kernel sums the products of its left and right columns. The caller takes as many rows at a time
as it wants to have scratch for.

Bases are 64-bit pointers, offsets within a tile 32-bit.
"""

import triton
import triton.language as tl

from megafold.trainer.kernels.layernorm.kernel import load_channels, standardised, store_rows


@triton.jit
def _load_rows(base, first, stride, M, C: tl.constexpr, BM: tl.constexpr):
    """Rows ``first`` to ``first`` + BM as they are; those from M on are 0."""
    row, c = tl.arange(0, BM), tl.arange(0, C)
    pointers = base + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + c[None, :])
    return tl.load(pointers, mask=row[:, None] < M - first, other=0.0)


@triton.jit
def _input(
    x, norm_weight, norm_bias, first, stride, M,
    C: tl.constexpr, BM: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """What the first product sees of rows ``first`` to ``first`` + BM, in the dtype of ``x`` or float32."""
    tile = _load_rows(x, first, stride, M, C, BM)
    if NORM:
        tile, _ = standardised(tile.to(tl.float32), C, C, EPS)
        tile = tile * load_channels(norm_weight, C, C) + load_channels(norm_bias, C, C)
    return tile


@triton.jit
def forward_kernel(
    x, norm_weight, norm_bias, weight_in, weight_out, out, M, x_row,
    BM: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, H: tl.constexpr, NORM: tl.constexpr,
    EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BM rows."""
    dtype = weight_in.dtype.element_ty
    first = tl.program_id(0) * BM
    c, n = tl.arange(0, C), tl.arange(0, BH)
    tile = _input(x, norm_weight, norm_bias, first, x_row, M, C, BM, NORM, EPS).to(dtype)
    acc = tl.zeros([BM, C], tl.float32)
    for start in range(0, H, BH):
        gate_rows = tl.load(weight_in + ((start + n)[:, None] * C + c[None, :]))
        value_rows = tl.load(weight_in + ((H + start + n)[:, None] * C + c[None, :]))
        out_columns = tl.load(weight_out + (c[:, None] * H + (start + n)[None, :]))
        gate = tl.dot(tile, tl.trans(gate_rows), input_precision=PRECISION)
        value = tl.dot(tile, tl.trans(value_rows), input_precision=PRECISION)
        hidden = (gate * tl.sigmoid(gate) * value).to(dtype)
        acc = tl.dot(hidden, tl.trans(out_columns), acc, input_precision=PRECISION)
    store_rows(out, first, acc, M, C, C, BM)


@triton.jit
def input_gradient_kernel(
    x, norm_weight, norm_bias, weight_in, weight_out, dout, dx, norm_parts, strip, M, x_row,
    BM: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, H: tl.constexpr, NORM: tl.constexpr,
    EPS: tl.constexpr, PRECISION: tl.constexpr, INPUT: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """One program: BM rows.

    INPUT: write dX and, with NORM, this program's sums of the norm's gradients to ``norm_parts``
    [programs, 2, C]. WEIGHTS: write the scratch rows; those from M on have no gradient, so nothing adds up.
    """
    dtype = weight_in.dtype.element_ty
    W: tl.constexpr = 3 * H + 2 * C
    first = tl.program_id(0) * BM
    row, c, n = tl.arange(0, BM), tl.arange(0, C), tl.arange(0, BH)
    tile = _input(x, norm_weight, norm_bias, first, x_row, M, C, BM, NORM, EPS).to(dtype)
    grad = _load_rows(dout, first, C, M, C, BM)
    lines = strip + tl.cast(first, tl.int64) * W
    if WEIGHTS:
        tl.store(lines + (row[:, None] * W + 3 * H + c[None, :]), tile)
        tl.store(lines + (row[:, None] * W + 3 * H + C + c[None, :]), grad)
    acc = tl.zeros([BM, C], tl.float32)
    for start in range(0, H, BH):
        gate_rows = tl.load(weight_in + ((start + n)[:, None] * C + c[None, :]))
        value_rows = tl.load(weight_in + ((H + start + n)[:, None] * C + c[None, :]))
        out_columns = tl.load(weight_out + (c[:, None] * H + (start + n)[None, :]))
        gate = tl.dot(tile, tl.trans(gate_rows), input_precision=PRECISION)
        value = tl.dot(tile, tl.trans(value_rows), input_precision=PRECISION)
        dhidden = tl.dot(grad, out_columns, input_precision=PRECISION)
        sigmoid = tl.sigmoid(gate)
        swish = gate * sigmoid
        dvalue = (dhidden * swish).to(dtype)
        dgate = (dhidden * value * (sigmoid + swish * (1.0 - sigmoid))).to(dtype)
        if WEIGHTS:
            there = lines + (row[:, None] * W + (start + n)[None, :])
            tl.store(there, dgate)
            tl.store(there + H, dvalue)
            tl.store(there + 2 * H, (swish * value).to(dtype))
        if INPUT:
            acc = tl.dot(dgate, gate_rows, acc, input_precision=PRECISION)
            acc = tl.dot(dvalue, value_rows, acc, input_precision=PRECISION)
    if INPUT:
        if NORM:
            # Read again: kept, it would fill registers all the way.
            again = _load_rows(x, first, x_row, M, C, BM).to(tl.float32)
            standard, inverse = standardised(again, C, C, EPS)
            parts = norm_parts + tl.program_id(0) * 2 * C + c
            tl.store(parts, tl.sum(acc * standard, 0))
            tl.store(parts + C, tl.sum(acc, 0))
            acc = acc * load_channels(norm_weight, C, C)
            mean = (tl.sum(acc, 1) / C)[:, None]
            along = (tl.sum(acc * standard, 1) / C)[:, None]
            acc = (acc - mean - standard * along) * inverse
        store_rows(dx, first, acc, M, C, C, BM)


@triton.jit
def weight_gradient_kernel(
    strip, parts, rows,
    BN: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, H: tl.constexpr, PRECISION: tl.constexpr,
    FIRST: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Products of a scratch strip's left and right columns, summed over its ``rows`` (a multiple of BK).

    parts: [SPLITS, 3·H, C] float32; every program owns BN rows of one part and adds to what is there, unless
    it is the FIRST strip: the order of the sum is always the same.
    """
    W: tl.constexpr = 3 * H + 2 * C
    TILES: tl.constexpr = 3 * H // BN
    pid = tl.program_id(0)
    left = (pid % TILES) * BN
    split = pid // TILES
    k, n, c = tl.arange(0, BK), tl.arange(0, BN), tl.arange(0, C)
    right = tl.where(left < 2 * H, 3 * H, 3 * H + C)
    place = parts + tl.cast(split, tl.int64) * (3 * H * C) + ((left + n)[:, None] * C + c[None, :])
    acc = tl.zeros([BN, C], tl.float32)
    # Neighbouring splits take neighbouring rows, so that what all tiles of a row need is in the L2 cache.
    for first in range(split * BK, rows, SPLITS * BK):
        lines = strip + tl.cast(first, tl.int64) * W
        a = tl.load(lines + (k[:, None] * W + left + n[None, :]))
        b = tl.load(lines + (k[:, None] * W + right + c[None, :]))
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
    if not FIRST:
        acc += tl.load(place)
    tl.store(place, acc)


@triton.jit
def sum_weights_kernel(
    parts, dweight_in, dweight_out,
    BN: tl.constexpr, C: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr,
    WEIGHT_IN: tl.constexpr, WEIGHT_OUT: tl.constexpr,
):  # fmt: skip
    """Sum ``parts`` over the splits; one program: BN of the 3·H rows, to whichever weight they belong."""
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, C)
    acc = tl.zeros([BN, C], tl.float32)
    for split in range(SPLITS):
        acc += tl.load(parts + split * (3 * H * C) + (n[:, None] * C + c[None, :]))
    if WEIGHT_IN:
        kept = (n < 2 * H)[:, None]
        tl.store(dweight_in + (n[:, None] * C + c[None, :]), acc.to(dweight_in.dtype.element_ty), mask=kept)
    if WEIGHT_OUT:
        kept = (n >= 2 * H)[:, None]
        place = dweight_out + (c[None, :] * H + (n - 2 * H)[:, None])
        tl.store(place, acc.to(dweight_out.dtype.element_ty), mask=kept)


@triton.jit
def activation_kernel(both, hidden, H, count, BLOCK: tl.constexpr):
    """both [rows, 2·H] → hidden [rows, H] of ``count`` elements: where the products are cuBLAS's."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    present = index < count
    gate_at = both + (index // H * H + index)
    gate = tl.load(gate_at, mask=present, other=0.0).to(tl.float32)
    value = tl.load(gate_at + H, mask=present, other=0.0).to(tl.float32)
    tl.store(hidden + index, (gate * tl.sigmoid(gate) * value).to(hidden.dtype.element_ty), mask=present)


@triton.jit
def activation_gradient_kernel(both, dhidden, hidden, H, count, BLOCK: tl.constexpr):
    """``both`` becomes its own gradient, and ``hidden`` is computed anew."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    present = index < count
    gate_at = both + (index // H * H + index)
    gate = tl.load(gate_at, mask=present, other=0.0).to(tl.float32)
    value = tl.load(gate_at + H, mask=present, other=0.0).to(tl.float32)
    grad = tl.load(dhidden + index, mask=present, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    swish = gate * sigmoid
    dtype = both.dtype.element_ty
    tl.store(hidden + index, (swish * value).to(dtype), mask=present)
    tl.store(gate_at, (grad * value * (sigmoid + swish * (1.0 - sigmoid))).to(dtype), mask=present)
    tl.store(gate_at + H, (grad * swish).to(dtype), mask=present)
