"""Triton kernels of residual + keep · x and of its backward.

Shapes: positions (b, r, n) with B batch, R rows, N positions of a row, C channels. ``x``, ``residual`` and
results are contiguous; ``keep`` is addressed by strides of b, r and n, 0 along the axis that shares it.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["R", "N"])
def dropout_add_kernel(
    x, residual, keep, out, R, N, m_b, m_r, m_n,
    C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One program: BM positions of a row. Without a residual: keep · x, which is the backward."""
    tiles = tl.cdiv(N, BM)
    pid = tl.program_id(0)
    first, row = (pid % tiles) * BM, (pid // tiles).to(tl.int64)
    n, c = tl.arange(0, BM), tl.arange(0, CP)
    present = (n < N - first)[:, None] & (c < C)[None, :]
    place = (row * N + first) * C + n[:, None] * C + c[None, :]
    kept = keep + (row // R) * m_b + (row % R) * m_r + first * m_n + (n[:, None] * m_n + c[None, :])
    y = tl.load(x + place, mask=present, other=0.0).to(tl.float32)
    y *= tl.load(kept, mask=present, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual + place, mask=present, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=present)
