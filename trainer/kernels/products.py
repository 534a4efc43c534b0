"""Products of tiles, and sums, that round no more in float32 than cuBLAS's and PyTorch's.

On a GPU a float32 product is a chain of fused multiply-adds for each number of the result: over K channels
its error grows with K, where cuBLAS adds a few shorter chains. So wide float32 tiles are multiplied in parts,
and a product is added to a running sum after it is summed itself. Tiles of 2 bytes are multiplied as ever.

A running sum of n random numbers is off by some 0.3 · √(n / 2) roundings: long ones keep account of what they
lose.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
#: What float32 leaves of it.
LOG2E_REST = tl.constexpr(1.925963033500011079e-8)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def half_open(power):
    """1 / (1 + ``power``), rounded as IEEE 754 says."""
    return tl.div_rn(tl.full(power.shape, 1.0, tl.float32), 1.0 + power)


@triton.jit
def sigmoid(x):
    """Of float32, with the roundings of PyTorch's: quick divisions and powers would show."""
    # e^-x = 2^(-x·log2 e): the rounding of the product is put right.
    product = x * -LOG2E
    lost = tl.fma(x, -LOG2E, -product) - x * LOG2E_REST
    power = tl.exp2(product)
    return half_open(tl.where(product < 127.0, power + power * (lost * LN2), power))


@triton.jit
def plus(total, product):
    """``total`` + ``product``, which the compiler would make one chain with it if it were an addition."""
    return tl.fma(product, tl.full(product.shape, 1.0, tl.float32), total)


@triton.jit
def _halves(tile):
    """Even and odd columns."""
    ROWS: tl.constexpr = tile.shape[0]
    HALF: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.reshape(tile, [ROWS, HALF, 2]))


@triton.jit
def _in_two(a, b, PRECISION: tl.constexpr):
    a_even, a_odd = _halves(a)
    b_even, b_odd = _halves(b)
    even = tl.dot(a_even, tl.trans(b_even), input_precision=PRECISION)
    return plus(even, tl.dot(a_odd, tl.trans(b_odd), input_precision=PRECISION))


@triton.jit
def _in_four(a, b, PRECISION: tl.constexpr):
    a_even, a_odd = _halves(a)
    b_even, b_odd = _halves(b)
    return plus(_in_two(a_even, b_even, PRECISION), _in_two(a_odd, b_odd, PRECISION))


@triton.jit
def product_t(a, b, PRECISION: tl.constexpr, LEAST: tl.constexpr = 64):
    """a bᵀ of tiles [row, channel]; float32 ones of LEAST channels or more in two parts, of 128 in eight."""
    CHANNELS: tl.constexpr = a.shape[1]
    if a.dtype == tl.float32 and CHANNELS >= 128:
        a_even, a_odd = _halves(a)
        b_even, b_odd = _halves(b)
        result = plus(_in_four(a_even, b_even, PRECISION), _in_four(a_odd, b_odd, PRECISION))
    elif a.dtype == tl.float32 and CHANNELS >= LEAST:
        result = _in_two(a, b, PRECISION)
    else:
        result = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    return result


@triton.jit
def product(a, b, PRECISION: tl.constexpr, LEAST: tl.constexpr = 64):
    """a b, likewise."""
    if a.dtype == tl.float32:
        result = product_t(a, tl.trans(b), PRECISION, LEAST)
    else:
        result = tl.dot(a, b, input_precision=PRECISION)
    return result


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr):
    """``total`` + a b."""
    if a.dtype == tl.float32:
        total = plus(total, tl.dot(a, b, input_precision=PRECISION))
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def add_kept(total, lost, value):
    """``total`` + ``value``, and what rounding takes from it, to be put right by the next (Kahan's sum)."""
    put_right = value - lost
    result = total + put_right
    return result, (result - total) - put_right


@triton.jit
def add_product_kept(total, lost, a, b, PRECISION: tl.constexpr):
    """``total`` + a b, and what rounding takes from it in float32; ``lost`` stays 0 for tiles of 2 bytes."""
    if a.dtype == tl.float32:
        total, lost = add_kept(total, lost, product(a, b, PRECISION, 32))
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total, lost
