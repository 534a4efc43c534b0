"""Triton kernel of smooth lDDT and its gradient.

Shapes: atoms N of copies (b, s), B samples of S copies. A program has BM atoms i of one copy and goes through
all atoms j. Distances are symmetric, so what i gets from the pairs (i, j) and (j, i) is found at once.
"""

import triton
import triton.language as tl


@triton.jit
def _atoms(positions, atom, present):
    """x, y and z of atoms; 0 where absent, whatever is in memory there."""
    x = tl.load(positions + atom * 3, mask=present, other=0.0)
    y = tl.load(positions + atom * 3 + 1, mask=present, other=0.0)
    z = tl.load(positions + atom * 3 + 2, mask=present, other=0.0)
    return x, y, z


@triton.jit(do_not_specialize=["S", "N"])
def smooth_lddt_kernel(
    predicted, truth, radius, score, count, gradient, S, N,
    BM: tl.constexpr, BN: tl.constexpr, WITH_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Of each atom: Σ over its pairs of ε and of what they count, and the gradient of the sum of all ε."""
    tiles = tl.cdiv(N, BM)
    pid = tl.program_id(0)
    copy = (pid // tiles).to(tl.int64)
    predicted += copy * N * 3
    truth += copy // S * N * 3
    radius += copy // S * N
    i = pid % tiles * BM + tl.arange(0, BM)
    r_i = tl.load(radius + i, mask=i < N, other=0.0)
    x_i, y_i, z_i = _atoms(predicted, i, r_i > 0)
    u_i, v_i, w_i = _atoms(truth, i, r_i > 0)
    near = tl.zeros([BM], tl.float32)
    pairs = tl.zeros([BM], tl.float32)
    gx = tl.zeros([BM], tl.float32)
    gy = tl.zeros([BM], tl.float32)
    gz = tl.zeros([BM], tl.float32)
    for start in range(0, N, BN):
        j = start + tl.arange(0, BN)
        r_j = tl.load(radius + j, mask=j < N, other=0.0)
        u_j, v_j, w_j = _atoms(truth, j, r_j > 0)
        u, v, w = u_i[:, None] - u_j[None, :], v_i[:, None] - v_j[None, :], w_i[:, None] - w_j[None, :]
        true = u * u + v * v + w * w
        both = (r_i > 0)[:, None] & (r_j > 0)[None, :] & (i[:, None] != j[None, :])
        own = tl.where(both & (true < (r_i * r_i)[:, None]), 1.0, 0.0)
        weight = 0.5 * (own + tl.where(both & (true < (r_j * r_j)[None, :]), 1.0, 0.0))
        if tl.max(weight) > 0:  # atoms that are far apart in the sequence seldom are near
            x_j, y_j, z_j = _atoms(predicted, j, r_j > 0)
            x, y, z = x_i[:, None] - x_j[None, :], y_i[:, None] - y_j[None, :], z_i[:, None] - z_j[None, :]
            distance = tl.sqrt(x * x + y * y + z * z)
            difference = distance - tl.sqrt(true)
            e = tl.exp(tl.abs(difference))
            # sigmoid(t - error), t of 0.5, 1, 2 and 4
            a = 1 / (1 + e * 0.6065306597126334)
            b = 1 / (1 + e * 0.36787944117144233)
            c = 1 / (1 + e * 0.1353352832366127)
            d = 1 / (1 + e * 0.01831563888873418)
            sigmoids = a + b + c + d
            near += tl.sum(sigmoids * weight, 1)
            pairs += tl.sum(own, 1)
            if WITH_GRADIENT:
                slope = (a * a + b * b + c * c + d * d - sigmoids) * weight
                slope = tl.where(difference < 0, -slope, tl.where(difference > 0, slope, 0.0))
                slope = tl.where(distance > 0, slope / distance, 0.0)
                gx += tl.sum(slope * x, 1)
                gy += tl.sum(slope * y, 1)
                gz += tl.sum(slope * z, 1)
    tl.store(score + copy * N + i, near * 0.25, mask=i < N)
    tl.store(count + copy * N + i, pairs, mask=i < N)
    if WITH_GRADIENT:
        gradient += copy * N * 3 + i * 3
        tl.store(gradient, gx * 0.5, mask=i < N)
        tl.store(gradient + 1, gy * 0.5, mask=i < N)
        tl.store(gradient + 2, gz * 0.5, mask=i < N)
