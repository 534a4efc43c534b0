"""EvoFlash-3D: Triton kernels of attention with a bias that rows share, forward and backward.

Shapes as in :mod:`megafold.trainer.ops.attention`: B batch, R rows that share one bias, H heads, NI queries,
NJ keys (JP with padding), D channels (DP with padding). Programs are numbered so that those of one head
follow each other: its bias (NI·NJ numbers) stays in the L2 cache while all rows go by.

The softmax runs in base 2: logits are kept multiplied by log2(e), the bias comes so prepared. ``lse`` is the
base-2 logarithm of the denominator, 0 for a query without keys, whose output and gradients are zero.

Offsets are 64-bit: the pair tensor of 3 000 tokens has more elements than 32 bits count.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(pointer, rows, stride, channels, channel_stride):
    return pointer + rows.to(tl.int64)[:, None] * stride + channels[None, :] * channel_stride


@triton.jit
def _load(pointers, present, channels, D: tl.constexpr, DP: tl.constexpr, EVEN: tl.constexpr):
    """A tile [row, channel]; rows that are not ``present`` and channels beyond D are 0."""
    # A mask that is always true still costs the wide loads: leave it out where nothing is masked.
    if EVEN:
        if D == DP:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=channels[None, :] < D, other=0.0)
    else:
        if D == DP:
            tile = tl.load(pointers, mask=present[:, None], other=0.0)
        else:
            tile = tl.load(pointers, mask=present[:, None] & (channels[None, :] < D), other=0.0)
    return tile


@triton.jit
def _logits(left, right, bias, scale, WIDE: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr):
    """left·right plus bias. In float32 the scale comes last: folded into a factor it costs a rounding."""
    if WIDE:
        s = tl.dot(left, right, input_precision=PRECISION) * scale
        if HAS_BIAS:
            s += bias
    else:
        if HAS_BIAS:
            s = tl.dot(left, right, bias.to(tl.float32), input_precision=PRECISION)
        else:
            s = tl.dot(left, right, input_precision=PRECISION)
    return s


@triton.jit
def _power(difference, WIDE: tl.constexpr):
    """e or 2 to the ``difference`` of two logits, whichever their unit is."""
    if WIDE:
        difference *= LOG2E
    return tl.exp2(difference)


@triton.jit
def prepare_bias_kernel(
    bias, out, H, NI, NJ, JP, stride_b, stride_h, stride_i,
    stride_j, SCALE: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bias of any strides → [B, H, NI, JP] contiguous, times ``SCALE``; -inf beyond NJ masks the padding."""
    row = tl.program_id(0).to(tl.int64)
    b, rest = row // (H * NI), row % (H * NI)
    h, i = rest // NI, rest % NI
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = bias + b * stride_b + h * stride_h + i * stride_i + j.to(tl.int64) * stride_j
    value = tl.load(source, mask=j < NJ, other=0.0).to(tl.float32) * SCALE
    if LIMIT > 0:
        value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
    value = tl.where(j < NJ, value, float("-inf"))
    tl.store(out + row * JP + j, value.to(out.dtype.element_ty), mask=j < JP)


@triton.jit
def forward_kernel(
    q, k, v, bias, mask, out, lse, R, H, NI, NJ, JP,
    q_b, q_r, q_h, q_i, q_d, k_b, k_r, k_h, k_j, k_d, v_b, v_r, v_h, v_j, v_d,
    m_b, m_r, m_j, o_b, o_r, o_h, o_i, o_d, scale_log2,
    BQ: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BQ queries of one row and head, all keys."""
    blocks = tl.cdiv(NI, BQ)
    pid = tl.program_id(0)
    block, rest = pid % blocks, pid // blocks
    r, rest = (rest % R).to(tl.int64), rest // R
    h, b = (rest % H).to(tl.int64), (rest // H).to(tl.int64)
    i = block * BQ + tl.arange(0, BQ)
    d = tl.arange(0, DP)
    present_d = d[None, :] < D
    queries = tl.load(
        _tile(q + b * q_b + r * q_r + h * q_h, i, q_i, d, q_d), mask=(i[:, None] < NI) & present_d, other=0.0
    )
    WIDE: tl.constexpr = q.dtype.element_ty == tl.float32
    if not WIDE:
        queries = (queries * scale_log2).to(q.dtype.element_ty)
    keys = k + b * k_b + r * k_r + h * k_h
    values = v + b * v_b + r * v_r + h * v_h
    row_mask = mask + b * m_b + r * m_r
    bias_rows = bias + ((b * H + h) * NI + tl.minimum(i, NI - 1).to(tl.int64))[:, None] * JP
    # A finite start: a maximum of -inf would make NaN of keys that are all absent.
    top = tl.full([BQ], -1e30, tl.float32)
    total = tl.zeros([BQ], tl.float32)
    acc = tl.zeros([BQ, DP], tl.float32)
    for start in range(0, NJ, BK):
        j = start + tl.arange(0, BK)
        kt = _load(_tile(keys, j, k_j, d, k_d), j < NJ, d, D, DP, EVEN)
        vt = _load(_tile(values, j, v_j, d, v_d), j < NJ, d, D, DP, EVEN)
        if HAS_BIAS:
            b_tile = tl.load(bias_rows + j[None, :])
        else:
            b_tile = 0.0
        s = _logits(queries, tl.trans(kt), b_tile, scale_log2, WIDE, HAS_BIAS, PRECISION)
        if not HAS_BIAS and not EVEN:
            s = tl.where(j[None, :] < NJ, s, float("-inf"))
        if HAS_MASK:
            if EVEN:
                present = tl.load(row_mask + j * m_j)
            else:
                present = tl.load(row_mask + j * m_j, mask=j < NJ, other=0)
            s = tl.where(present[None, :] != 0, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = _power(s - higher[:, None], WIDE)
        fade = _power(top - higher, WIDE)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(vt.dtype), vt, acc * fade[:, None], input_precision=PRECISION)
        top = higher
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(
        _tile(out + b * o_b + r * o_r + h * o_h, i, o_i, d, o_d),
        acc.to(out.dtype.element_ty),
        mask=(i[:, None] < NI) & present_d,
    )
    logarithm = tl.log2(tl.where(some, total, 1.0))
    if WIDE:
        logarithm /= LOG2E
    logarithm = tl.where(some, top + logarithm, 0.0)
    tl.store(lse + ((b * R + r) * H + h) * NI + i, logarithm, mask=i < NI)


@triton.jit
def query_gradient_kernel(
    q, k, v, bias, mask, out, lse, dout, delta, dq, R, H, NI, NJ, JP,
    q_b, q_r, q_h, q_i, q_d, k_b, k_r, k_h, k_j, k_d, v_b, v_r, v_h, v_j, v_d,
    m_b, m_r, m_j, o_b, o_r, o_h, o_i, o_d, g_b, g_r, g_h, g_i, g_d, scale_log2, scale,
    BQ: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of BQ queries of one row and head; also Σ dO·O of each query, which the other kernels read.

    dQ has the layout of the output's gradient's sibling: the strides ``o_*`` are those of ``out`` and ``dq``.
    """
    blocks = tl.cdiv(NI, BQ)
    pid = tl.program_id(0)
    block, rest = pid % blocks, pid // blocks
    r, rest = (rest % R).to(tl.int64), rest // R
    h, b = (rest % H).to(tl.int64), (rest // H).to(tl.int64)
    i = block * BQ + tl.arange(0, BQ)
    d = tl.arange(0, DP)
    present_d = d[None, :] < D
    inside = (i[:, None] < NI) & present_d
    queries = tl.load(_tile(q + b * q_b + r * q_r + h * q_h, i, q_i, d, q_d), mask=inside, other=0.0)
    WIDE: tl.constexpr = q.dtype.element_ty == tl.float32
    if not WIDE:
        queries = (queries * scale_log2).to(q.dtype.element_ty)
    here = _tile(b * o_b + r * o_r + h * o_h, i, o_i, d, o_d)
    outputs = tl.load(out + here, mask=inside, other=0.0)
    grads = tl.load(_tile(dout + b * g_b + r * g_r + h * g_h, i, g_i, d, g_d), mask=inside, other=0.0)
    line = ((b * R + r) * H + h) * NI + i
    log_total = tl.load(lse + line, mask=i < NI, other=0.0)
    correction = tl.sum(outputs.to(tl.float32) * grads.to(tl.float32), 1)
    tl.store(delta + line, correction, mask=i < NI)
    keys = k + b * k_b + r * k_r + h * k_h
    values = v + b * v_b + r * v_r + h * v_h
    row_mask = mask + b * m_b + r * m_r
    bias_rows = bias + ((b * H + h) * NI + tl.minimum(i, NI - 1).to(tl.int64))[:, None] * JP
    acc = tl.zeros([BQ, DP], tl.float32)
    for start in range(0, NJ, BK):
        j = start + tl.arange(0, BK)
        kt = _load(_tile(keys, j, k_j, d, k_d), j < NJ, d, D, DP, EVEN)
        vt = _load(_tile(values, j, v_j, d, v_d), j < NJ, d, D, DP, EVEN)
        if HAS_BIAS:
            b_tile = tl.load(bias_rows + j[None, :])
        else:
            b_tile = 0.0
        s = _logits(queries, tl.trans(kt), b_tile, scale_log2, WIDE, HAS_BIAS, PRECISION)
        if not HAS_BIAS and not EVEN:
            s = tl.where(j[None, :] < NJ, s, float("-inf"))
        if HAS_MASK:
            if EVEN:
                present = tl.load(row_mask + j * m_j)
            else:
                present = tl.load(row_mask + j * m_j, mask=j < NJ, other=0)
            s = tl.where(present[None, :] != 0, s, float("-inf"))
        p = _power(s - log_total[:, None], WIDE)
        dp = tl.dot(grads, tl.trans(vt), input_precision=PRECISION)
        ds = p * (dp - correction[:, None])
        acc = tl.dot(ds.to(kt.dtype), kt, acc, input_precision=PRECISION)
    tl.store(dq + here, (acc * scale).to(dq.dtype.element_ty), mask=inside)


@triton.jit
def key_gradient_kernel(
    q, k, v, bias, mask, lse, dout, delta, dk, dv, R, H, NI, NJ, JP,
    q_b, q_r, q_h, q_i, q_d, k_b, k_r, k_h, k_j, k_d, v_b, v_r, v_h, v_j, v_d,
    m_b, m_r, m_j, w_b, w_r, w_h, w_j, w_d, g_b, g_r, g_h, g_i, g_d, scale_log2, scale,
    BQ: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of BK keys of one row and head: all queries go by. Strides ``w_*`` are those of dk and dv."""
    blocks = tl.cdiv(NJ, BK)
    pid = tl.program_id(0)
    block, rest = pid % blocks, pid // blocks
    r, rest = (rest % R).to(tl.int64), rest // R
    h, b = (rest % H).to(tl.int64), (rest // H).to(tl.int64)
    j = block * BK + tl.arange(0, BK)
    d = tl.arange(0, DP)
    present_d = d[None, :] < D
    inside = (j[:, None] < NJ) & present_d
    keys = tl.load(_tile(k + b * k_b + r * k_r + h * k_h, j, k_j, d, k_d), mask=inside, other=0.0)
    WIDE: tl.constexpr = k.dtype.element_ty == tl.float32
    if not WIDE:
        keys = (keys * scale_log2).to(k.dtype.element_ty)
    values = tl.load(_tile(v + b * v_b + r * v_r + h * v_h, j, v_j, d, v_d), mask=inside, other=0.0)
    if HAS_MASK:
        present = tl.load(mask + b * m_b + r * m_r + j * m_j, mask=j < NJ, other=0) != 0
    else:
        present = j < NJ
    queries = q + b * q_b + r * q_r + h * q_h
    grads = dout + b * g_b + r * g_r + h * g_h
    line = ((b * R + r) * H + h) * NI
    bias_head = bias + (b * H + h) * NI * JP
    dk_acc = tl.zeros([BK, DP], tl.float32)
    dv_acc = tl.zeros([BK, DP], tl.float32)
    for start in range(0, NI, BQ):
        i = start + tl.arange(0, BQ)
        qt = _load(_tile(queries, i, q_i, d, q_d), i < NI, d, D, DP, EVEN)
        gt = _load(_tile(grads, i, g_i, d, g_d), i < NI, d, D, DP, EVEN)
        if EVEN:
            log_total = tl.load(lse + line + i)
            correction = tl.load(delta + line + i)
        else:
            # +inf makes the weights of queries beyond the end zero.
            log_total = tl.load(lse + line + i, mask=i < NI, other=float("inf"))
            correction = tl.load(delta + line + i, mask=i < NI, other=0.0)
        if HAS_BIAS:
            row = tl.minimum(i, NI - 1).to(tl.int64) * JP
            b_tile = tl.load(bias_head + row[None, :] + j[:, None])
        else:
            b_tile = 0.0
        s = _logits(keys, tl.trans(qt), b_tile, scale_log2, WIDE, HAS_BIAS, PRECISION)
        s = tl.where(present[:, None], s, float("-inf"))
        p = _power(s - log_total[None, :], WIDE)
        dv_acc = tl.dot(p.to(gt.dtype), gt, dv_acc, input_precision=PRECISION)
        dp = tl.dot(values, tl.trans(gt), input_precision=PRECISION)
        ds = p * (dp - correction[None, :])
        dk_acc = tl.dot(ds.to(qt.dtype), qt, dk_acc, input_precision=PRECISION)
    there = _tile(b * w_b + r * w_r + h * w_h, j, w_j, d, w_d)
    tl.store(dk + there, (dk_acc * scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + there, dv_acc.to(dv.dtype.element_ty), mask=inside)


@triton.jit
def bias_gradient_kernel(
    q, k, v, bias, mask, lse, dout, delta, dbias, B, R, H, NI, NJ, JP, part_rows,
    q_b, q_r, q_h, q_i, q_d, k_b, k_r, k_h, k_j, k_d, v_b, v_r, v_h, v_j, v_d,
    m_b, m_r, m_j, g_b, g_r, g_h, g_i, g_d, scale_log2,
    BQ: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_MASK: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dBias of one tile: its program owns it and sums over rows in registers. No atomics: bitwise repeatable.

    dbias: [part, B, H, NI, NJ] float32. Rows are dealt to parts of ``part_rows`` where the tiles of the bias
    alone would not fill the GPU; the caller sums the parts.
    """
    blocks_i, blocks_j = tl.cdiv(NI, BQ), tl.cdiv(NJ, BK)
    pid = tl.program_id(0)
    block_i, rest = pid % blocks_i, pid // blocks_i
    block_j, rest = rest % blocks_j, rest // blocks_j
    part, rest = rest % tl.cdiv(R, part_rows), rest // tl.cdiv(R, part_rows)
    h, b = (rest % H).to(tl.int64), (rest // H).to(tl.int64)
    i = block_i * BQ + tl.arange(0, BQ)
    j = block_j * BK + tl.arange(0, BK)
    d = tl.arange(0, DP)
    row_i = tl.minimum(i, NI - 1).to(tl.int64)
    b_tile = tl.load(bias + ((b * H + h) * NI + row_i)[:, None] * JP + j[None, :])
    WIDE: tl.constexpr = q.dtype.element_ty == tl.float32
    acc = tl.zeros([BQ, BK], tl.float32)
    first_row = part.to(tl.int64) * part_rows
    for step in range(0, tl.minimum(part_rows, R - part * part_rows)):
        r = first_row + step
        qt = _load(_tile(q + b * q_b + r * q_r + h * q_h, i, q_i, d, q_d), i < NI, d, D, DP, EVEN)
        gt = _load(_tile(dout + b * g_b + r * g_r + h * g_h, i, g_i, d, g_d), i < NI, d, D, DP, EVEN)
        kt = _load(_tile(k + b * k_b + r * k_r + h * k_h, j, k_j, d, k_d), j < NJ, d, D, DP, EVEN)
        vt = _load(_tile(v + b * v_b + r * v_r + h * v_h, j, v_j, d, v_d), j < NJ, d, D, DP, EVEN)
        line = ((b * R + r) * H + h) * NI + row_i
        log_total = tl.load(lse + line)
        correction = tl.load(delta + line)
        if not WIDE:
            qt = (qt * scale_log2).to(q.dtype.element_ty)
        s = _logits(qt, tl.trans(kt), b_tile, scale_log2, WIDE, True, PRECISION)
        if HAS_MASK:
            present = tl.load(mask + b * m_b + r * m_r + j * m_j, mask=j < NJ, other=0)
            s = tl.where(present[None, :] != 0, s, float("-inf"))
        p = _power(s - log_total[:, None], WIDE)
        acc += p * (tl.dot(gt, tl.trans(vt), input_precision=PRECISION) - correction[:, None])
    place = (((part * B + b) * H + h) * NI + i.to(tl.int64))[:, None] * NJ + j[None, :]
    tl.store(dbias + place, acc, mask=(i[:, None] < NI) & (j[None, :] < NJ))
