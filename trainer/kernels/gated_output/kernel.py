"""Triton kernels of residual + keep · Linear(sigmoid(gate) · x), forward and backward.

Shapes: positions (b, r, n) with B batch, R rows, N positions of a row; K = H·D channels of ``x`` and gate, in
memory H heads of D channels each; C channels of the result. KP and CP are K and C with padding.

``x`` and ``gate`` are addressed by strides of b, r, h and n, everything else by strides of b, r and n;
channels (of a head) lie next to each other. A tile is BM positions of one row. Offsets within a tile are
32-bit, its base is a 64-bit pointer.
"""

import triton
import triton.language as tl

from megafold.trainer.kernels.dealing import (
    dealt,
    gathered,
    gathered_columns,
    gathered_rows,
    pinned,
    scattered,
)
from megafold.trainer.kernels.fetching import fetch
from megafold.trainer.kernels.products import LOG2E, add_product, plus, product, product_t, sigmoid
from megafold.trainer.kernels.vendors import narrowed, quotient


@triton.jit
def _sigmoid(x, WIDE: tl.constexpr):
    if WIDE:
        return sigmoid(x)
    else:
        return quotient(1.0, 1.0 + tl.exp2(x * -LOG2E))


@triton.jit(do_not_specialize=["R", "N"])
def forward_kernel(
    x, gate, weight, residual, keep, out, R, N,
    x_b, x_r, x_h, x_n, g_b, g_r, g_h, g_n, z_b, z_r, z_n, m_b, m_r, m_n, o_b, o_r, o_n,
    H: tl.constexpr, D: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    BM: tl.constexpr, PRECISION: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_KEEP: tl.constexpr,
):  # fmt: skip
    """One program: BM positions."""
    tiles = tl.cdiv(N, BM)
    pid = tl.program_id(0)
    first, row = (pid % tiles) * BM, pid // tiles
    b, r = (row // R).to(tl.int64), (row % R).to(tl.int64)
    n, k, c = tl.arange(0, BM), tl.arange(0, KP), tl.arange(0, CP)
    inside = (n < N - first)[:, None]
    start = tl.cast(first, tl.int64)
    x_tile = x + b * x_b + r * x_r + start * x_n + n[:, None] * x_n + ((k // D) * x_h + k % D)[None, :]
    g_tile = gate + b * g_b + r * g_r + start * g_n + n[:, None] * g_n + ((k // D) * g_h + k % D)[None, :]
    present = inside & (k < H * D)[None, :]
    w = tl.load(
        weight + c[:, None] * (H * D) + k[None, :], mask=(c < C)[:, None] & (k < H * D)[None, :], other=0.0
    )
    g = _sigmoid(tl.load(g_tile, mask=present, other=0.0).to(tl.float32), w.dtype == tl.float32)
    u = narrowed(g * tl.load(x_tile, mask=present, other=0.0).to(tl.float32), w.dtype)
    y = product_t(u, w, PRECISION, 32)
    written = inside & (c < C)[None, :]
    if HAS_KEEP:
        kept = keep + b * m_b + r * m_r + start * m_n + n[:, None] * m_n + c[None, :]
        y *= tl.load(kept, mask=written, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        added = residual + b * z_b + r * z_r + start * z_n + n[:, None] * z_n + c[None, :]
        added = tl.load(added, mask=written, other=0.0).to(tl.float32)
        if w.dtype == tl.float32:
            # As the beginning of the product's chain every step would be rounded to it.
            y = plus(added, y)
        else:
            y += added
    target = out + b * o_b + r * o_r + start * o_n + n[:, None] * o_n + c[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=written)


@triton.jit
def _fetch(
    dout, x, gate, tile, left, B, R, N, x_b, x_r, x_h, x_n, g_b, g_r, g_h, g_n, o_b, o_r, o_n,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Fetch what ``backward_kernel`` reads of a tile, the last one at most."""
    tiles = tl.cdiv(N, BM)
    tile = tl.minimum(tile, B * R * tiles - 1)
    first, row = (tile % tiles) * BM, tile // tiles
    b, r = (row // R).to(tl.int64), (row % R).to(tl.int64)
    n = tl.minimum(first + tl.arange(0, BM), N - 1).to(tl.int64)[:, None]
    # A line has 64 numbers of 2 bytes, but a head's 32 may lie by themselves.
    k = tl.minimum(left + tl.arange(0, BK // 32) * 32, H * D - 1)[None, :]
    c = tl.minimum(tl.arange(0, (CP + 63) // 64) * 64, C - 1)[None, :]
    fetch(x + b * x_b + r * x_r + n * x_n + (k // D * x_h + k % D))
    fetch(gate + b * g_b + r * g_r + n * g_n + (k // D * g_h + k % D))
    fetch(dout + b * o_b + r * o_r + n * o_n + c)


@triton.jit(do_not_specialize=["B", "R", "N"])
def backward_kernel(
    dout, x, gate, weight, keep, dx, dgate, parts, B, R, N,
    x_b, x_r, x_h, x_n, g_b, g_r, g_h, g_n, y_b, y_r, y_h, y_n, w_b, w_r, w_h, w_n, m_b, m_r, m_n,
    o_b, o_r, o_n, H: tl.constexpr, D: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, HAS_KEEP: tl.constexpr,
    FETCH: tl.constexpr,
):  # fmt: skip
    """BK channels of dX and dGate; the sums for dW are kept in registers over many tiles.

    Strides: ``y_*`` of dX, ``w_*`` of dGate, ``o_*`` of ``dout``. parts: [programs · BK / KP, C, K] float32,
    sums of dW; the caller adds them in their order. Programs that take the same positions follow each other,
    so that dOut is read from memory once. FETCH: what the next tile takes is fetched into the cache.
    """
    SLICES: tl.constexpr = KP // BK
    dtype = weight.dtype.element_ty
    DEAL: tl.constexpr = dtype.primitive_bitwidth == 16 and BK % 32 == 0 and CP % 32 == 0
    C_GROUPS: tl.constexpr = CP // 32 if DEAL else 1
    K_GROUPS: tl.constexpr = BK // 32 if DEAL else 1
    tiles = tl.cdiv(N, BM)
    part, left = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES * BK
    # Of the weight, as the products take it; of the tiles, as memory has them.
    k, c = left + dealt(tl.arange(0, BK), DEAL), dealt(tl.arange(0, CP), DEAL)
    whole = (c < C)[:, None] & (k < H * D)[None, :]
    w = tl.load(weight + c[:, None] * (H * D) + k[None, :], mask=whole, other=0.0)
    n_c, n_k = gathered_rows(BM, C_GROUPS, DEAL), gathered_rows(BM, K_GROUPS, DEAL)
    c_c = gathered_columns(BM, CP, DEAL)
    c_k = left + gathered_columns(BM, BK, DEAL)
    dw = tl.zeros([CP, BK], tl.float32)
    # What the loop does not change would fill the registers all the way.
    for tile in tl.range(part, B * R * tiles, tl.num_programs(0) // SLICES, disable_licm=True):
        first, row = (tile % tiles) * BM, tile // tiles
        b, r = (row // R).to(tl.int64), (row % R).to(tl.int64)
        start = tl.cast(first, tl.int64)
        present = (n_k < N - first)[:, None] & (c_k < H * D)
        written = (n_c < N - first)[:, None] & (c_c < C)
        x_place = b * x_b + r * x_r + start * x_n + (n_k[:, None] * x_n + (c_k // D * x_h + c_k % D))
        g_place = b * g_b + r * g_r + start * g_n + (n_k[:, None] * g_n + (c_k // D * g_h + c_k % D))
        o_place = b * o_b + r * o_r + start * o_n + (n_c[:, None] * o_n + c_c)
        if FETCH:
            _fetch(
                dout, x, gate, tile + tl.num_programs(0) // SLICES, left, B, R, N, x_b, x_r, x_h, x_n,
                g_b, g_r, g_h, g_n, o_b, o_r, o_n, H, D, C, CP, BM, BK,
            )  # fmt: skip
        dy = tl.load(dout + o_place, mask=written, other=0.0)
        if HAS_KEEP:
            kept = keep + b * m_b + r * m_r + start * m_n + (n_c[:, None] * m_n + c_c)
            dy = dy.to(tl.float32) * tl.load(kept, mask=written, other=0.0).to(tl.float32)
        dy = scattered(dy.to(dtype), BM, DEAL)
        if DEAL:
            # Else the compiler would read dOut a second time, turned and two bytes at a time.
            dy = pinned(dy.to(tl.float32), dtype).to(dtype)
        g = scattered(tl.load(gate + g_place, mask=present, other=0.0), BM, DEAL)
        x_tile = scattered(tl.load(x + x_place, mask=present, other=0.0), BM, DEAL)
        du = product(dy, w, PRECISION, 32)
        g = _sigmoid(g.to(tl.float32), dtype == tl.float32)
        u = g * x_tile.to(tl.float32)
        dw = add_product(dw, tl.trans(dy), narrowed(u, dtype), PRECISION)
        y_place = b * y_b + r * y_r + start * y_n + (n_k[:, None] * y_n + (c_k // D * y_h + c_k % D))
        tl.store(dx + y_place, gathered((du * g).to(dx.dtype.element_ty), DEAL), mask=present)
        w_place = b * w_b + r * w_r + start * w_n + (n_k[:, None] * w_n + (c_k // D * w_h + c_k % D))
        dopening = (du * u * (1.0 - g)).to(dgate.dtype.element_ty)
        tl.store(dgate + w_place, gathered(dopening, DEAL), mask=present)
    place = part.to(tl.int64) * (C * H * D) + c[:, None] * (H * D) + k[None, :]
    tl.store(parts + place, dw, mask=whole)


@triton.jit(do_not_specialize=["M"])
def gate_kernel(x, gate, out, M, C, x_m, g_m, BM: tl.constexpr, BC: tl.constexpr):
    """sigmoid(gate) · x of M rows of C channels; for layers too wide to take their product along."""
    blocks = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    m = (pid // blocks) * BM + tl.arange(0, BM)
    c = (pid % blocks) * BC + tl.arange(0, BC)
    present = (m < M)[:, None] & (c < C)[None, :]
    row = m.to(tl.int64)[:, None]
    g = tl.load(gate + row * g_m + c[None, :], mask=present, other=0.0).to(tl.float32)
    g = _sigmoid(g, gate.dtype.element_ty == tl.float32)
    y = g * tl.load(x + row * x_m + c[None, :], mask=present, other=0.0).to(tl.float32)
    tl.store(out + row * C + c[None, :], y.to(out.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["M"])
def gate_gradient_kernel(
    dout, x, gate, dx, dgate, M, C, x_m, g_m, dg_m, BM: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """dX, contiguous as ``dout`` is, and dGate of :func:`gate_kernel`."""
    blocks = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    m = (pid // blocks) * BM + tl.arange(0, BM)
    c = (pid % blocks) * BC + tl.arange(0, BC)
    present = (m < M)[:, None] & (c < C)[None, :]
    row = m.to(tl.int64)[:, None]
    g = tl.load(gate + row * g_m + c[None, :], mask=present, other=0.0).to(tl.float32)
    g = _sigmoid(g, gate.dtype.element_ty == tl.float32)
    d = g * tl.load(dout + row * C + c[None, :], mask=present, other=0.0).to(tl.float32)
    tl.store(dx + row * C + c[None, :], d.to(dx.dtype.element_ty), mask=present)
    d *= (1.0 - g) * tl.load(x + row * x_m + c[None, :], mask=present, other=0.0).to(tl.float32)
    tl.store(dgate + row * dg_m + c[None, :], d.to(dgate.dtype.element_ty), mask=present)
