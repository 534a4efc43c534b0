"""EvoFlash-3D: Triton kernels of attention with a bias that rows share, forward and backward.

Shapes as in :mod:`megafold.trainer.ops.attention`: B batch, R rows that share one bias, H heads, NI queries,
NJ keys (JP with padding), D channels (DP with padding).

A program takes ROWS rows at a time: the tile of the bias is read once for them, and their share of its
gradient is summed in registers. Programs are numbered so that those of one head follow each other: its bias
stays in the L2 cache while all rows go by.

``bias`` and ``mask`` come prepared: rows of JP keys, the bias times log2(e), so that the softmax runs in base
2 (float32 stays in base e), the mask as 0 or -inf, and -inf where the padding is. ``lse`` is the logarithm of
the softmax's denominator, 0 for a query without keys, whose output and gradients are zero; in float32, where
rounding it would show, it holds the largest logit and, after the row's IP queries, the reciprocal of the
denominator beside it. Rows of ``lse`` and ``delta`` are IP queries long; those of the padding are written as
well, so that their weights are 0.

A tile's base is a 64-bit pointer, for the pair tensor of 3 000 tokens has more elements than 32 bits count;
offsets within a tile are 32-bit.
"""

import triton
import triton.language as tl

from megafold.trainer.kernels.products import LN2, LOG2E, LOG2E_REST, add_product, product_t
from megafold.trainer.kernels.vendors import narrowed

#: Numbers that differ from length to length: nothing is compiled anew for one. Strides of rows are multiples
#: of 16 at every length, IP and JP of 128, and stay known to be.
_SIZES = ["R", "NI", "NJ"]
_MASK = ["m_b", "m_r", "m_j"]


@triton.jit
def _load(base, start, rows, stride, limit, channels, channel_stride, D: tl.constexpr, DP: tl.constexpr):
    """A tile [row, channel] from row ``start``: from ``limit`` on the last row again, beyond channel D zeros.

    So no row needs a mask, nor lengths that fit the tiles a kernel of their own.
    """
    rows = tl.minimum(rows, limit - 1 - start)
    offsets = rows[:, None] * stride + channels[None, :] * channel_stride
    pointers = (base + tl.cast(start, tl.int64) * stride) + offsets
    if D == DP:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=channels[None, :] < D, other=0.0)
    return tile


@triton.jit
def _power(difference, WIDE: tl.constexpr):
    """e or 2 to the ``difference`` of two logits, whichever their base is."""
    if WIDE:
        # e^x = 2^(x·log2 e): the rounding of the product is put right, or it would show in the 7th digit.
        product = difference * LOG2E
        lost = tl.fma(difference, LOG2E, -product) + difference * LOG2E_REST
        power = tl.exp2(product)
        power = tl.where(product > -1e30, power + power * (lost * LN2), 0.0)
    else:
        power = tl.exp2(difference)
    return power


@triton.jit
def _weights(logits, lines, WIDE: tl.constexpr, AXIS: tl.constexpr):
    """The softmax's weights; ``lines``: what :func:`_load_lines` gave for the queries, which are on AXIS."""
    weights = _power(logits - tl.expand_dims(lines[0], 1 - AXIS), WIDE)
    if WIDE:
        weights *= tl.expand_dims(lines[1], 1 - AXIS)
    return weights


@triton.jit
def _load_lines(lse, row, first, i, IP, counts, WIDE: tl.constexpr):
    """What ``lse`` holds of a row's queries; unless the row ``counts``, what makes their weights 0."""
    line = lse + row * (2 * IP if WIDE else IP) + first + i
    top = tl.load(line)
    if counts is not None:
        top = tl.where(counts, top, float("inf"))
    if WIDE:
        lines = (top, tl.load(line + IP))
    else:
        lines = (top,)
    return lines


@triton.jit
def _fill(line, first, end, value, BQ: tl.constexpr):
    """``value`` in queries ``first`` to ``end`` of a line: what of its padding no block covers."""
    for start in range(first, end, BQ):
        tl.store(line + start + tl.arange(0, BQ), tl.full([BQ], value, tl.float32))


@triton.jit(do_not_specialize=["BH", "H", "MR", *_SIZES, "stride_b", "stride_h", "stride_i", *_MASK])
def prepare_kernel(
    bias, mask, prepared, transposed, dbias, masked, BH, H, NI, NJ, IP, JP, MR,
    stride_b, stride_h, stride_i, stride_j, m_b, m_r, m_j,
    SCALE: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, MASK_ROWS: tl.constexpr,
    PREPARED: tl.constexpr, PLAIN: tl.constexpr, TRANSPOSED: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """All that the others read in a form of their own; first programs for the bias, then for the mask.

    Bias of any strides, times SCALE and -inf from NJ on → ``prepared`` [B, H, NI, JP] if PLAIN,
    ``transposed`` [B, H, JP, IP] if TRANSPOSED. PREPARED: the bias is all that already, [B, H, NI, JP].
    ZEROS: zeros → ``dbias`` [B, H, NI, JP]. Boolean mask of any strides, MR rows for each of B → ``masked``
    [B, MR, JP]: 0 where the key is present, else -inf.
    """
    blocks_i, blocks_j = tl.cdiv(IP, BLOCK), tl.cdiv(JP, BLOCK)
    pid = tl.program_id(0)
    if pid < BH * blocks_i * blocks_j:
        first_j, rest = (pid % blocks_j) * BLOCK, pid // blocks_j
        first_i, head = (rest % blocks_i) * BLOCK, (rest // blocks_i).to(tl.int64)
        i = first_i + tl.arange(0, BLOCK)[:, None]
        j = first_j + tl.arange(0, BLOCK)[None, :]
        if PLAIN or TRANSPOSED:
            if PREPARED:
                source = bias + head * NI * JP + (i * JP + j)
                value = tl.load(source, mask=(i < NI) & (j < JP), other=0.0).to(tl.float32)
            else:
                source = bias + (head // H) * stride_b + (head % H) * stride_h
                source += tl.cast(first_i, tl.int64) * stride_i + tl.cast(first_j, tl.int64) * stride_j
                source += (i - first_i) * stride_i + (j - first_j) * stride_j
                value = tl.load(source, mask=(i < NI) & (j < NJ), other=0.0).to(tl.float32) * SCALE
                if LIMIT > 0:
                    value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
                value = tl.where(j < NJ, value, float("-inf"))
        if PLAIN:
            place = prepared + head * NI * JP + (i * JP + j)
            tl.store(place, value.to(prepared.dtype.element_ty), mask=(i < NI) & (j < JP))
        if TRANSPOSED:
            # The queries of the padding have weight 0, whatever finite number stands here.
            it = first_i + tl.arange(0, BLOCK)[None, :]
            jt = first_j + tl.arange(0, BLOCK)[:, None]
            place = transposed + head * JP * IP + (jt * IP + it)
            turned = tl.trans(value).to(transposed.dtype.element_ty)
            tl.store(place, turned, mask=(it < IP) & (jt < JP))
        if ZEROS:
            nothing = tl.zeros([BLOCK, BLOCK], tl.float32)
            tl.store(dbias + head * NI * JP + (i * JP + j), nothing, mask=(i < NI) & (j < JP))
    else:
        tile, blocks_r = pid - BH * blocks_i * blocks_j, tl.cdiv(MR, MASK_ROWS)
        first_j, rest = (tile % blocks_j) * BLOCK, tile // blocks_j
        first_r, batch = (rest % blocks_r) * MASK_ROWS, (rest // blocks_r).to(tl.int64)
        row, key = tl.arange(0, MASK_ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
        held = mask + batch * m_b + tl.cast(first_r, tl.int64) * m_r + tl.cast(first_j, tl.int64) * m_j
        there = row < MR - first_r
        held = tl.load(held + (row * m_r + key * m_j), mask=there & (key < NJ - first_j), other=0) != 0
        absent = tl.where(held, 0.0, float("-inf")).to(masked.dtype.element_ty)
        line = masked + (batch * MR + first_r) * JP + first_j
        tl.store(line + (row * JP + key), absent, mask=there & (key < JP - first_j))


@triton.jit(do_not_specialize=_SIZES)
def forward_kernel(
    q, k, v, bias, mask, out, lse, R, H, NI, NJ, IP, JP,
    q_b, q_r, q_h, q_i, q_d, k_b, k_r, k_h, k_j, k_d, v_b, v_r, v_h, v_j, v_d,
    m_b, m_r, o_b, o_r, o_h, o_i, o_d, unit_scale,
    BQ: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program: BQ queries of ROWS rows and one head, all keys."""
    WIDE: tl.constexpr = q.dtype.element_ty == tl.float32
    blocks, groups = tl.cdiv(NI, BQ), tl.cdiv(R, ROWS)
    pid = tl.program_id(0)
    first_i, rest = (pid % blocks) * BQ, pid // blocks
    first_r, rest = (rest % groups) * ROWS, rest // groups
    h, b = (rest % H).to(tl.int64), (rest // H).to(tl.int64)
    i, j, d = tl.arange(0, BQ), tl.arange(0, BK), tl.arange(0, DP)
    queries = ()
    tops = ()
    totals = ()
    accs = ()
    for n in tl.static_range(ROWS):
        r = tl.minimum(first_r + n, R - 1).to(tl.int64)
        queries += (_load(q + b * q_b + r * q_r + h * q_h, first_i, i, q_i, NI, d, q_d, D, DP),)
        # A finite start: a maximum of -inf would make NaN of keys that are all absent.
        tops += (tl.full([BQ], -1e30, tl.float32),)
        totals += (tl.zeros([BQ], tl.float32),)
        accs += (tl.zeros([BQ, DP], tl.float32),)
    bias_rows = bias + ((b * H + h) * NI + tl.minimum(first_i + i, NI - 1))[:, None] * JP + j[None, :]
    for start in range(0, NJ, BK):
        if HAS_BIAS:
            b_tile = tl.load(bias_rows + start).to(tl.float32)
        old_tops = tops
        old_totals = totals
        old_accs = accs
        tops = ()
        totals = ()
        accs = ()
        for n in tl.static_range(ROWS):
            r = tl.minimum(first_r + n, R - 1).to(tl.int64)
            kt = _load(k + b * k_b + r * k_r + h * k_h, start, j, k_j, NJ, d, k_d, D, DP)
            vt = _load(v + b * v_b + r * v_r + h * v_h, start, j, v_j, NJ, d, v_d, D, DP)
            s = product_t(queries[n], kt, PRECISION) * unit_scale
            if HAS_BIAS:
                s += b_tile
            if HAS_MASK:
                s += tl.load(mask + b * m_b + r * m_r + start + j)[None, :]
            if not HAS_BIAS and not HAS_MASK:
                s = tl.where(j[None, :] < NJ - start, s, float("-inf"))
            top = tl.maximum(old_tops[n], tl.max(s, 1))
            p = _power(s - top[:, None], WIDE)
            fade = _power(old_tops[n] - top, WIDE)
            totals += (old_totals[n] * fade + tl.sum(p, 1),)
            accs += (add_product(old_accs[n] * fade[:, None], narrowed(p, vt.dtype), vt, PRECISION),)
            tops += (top,)
    for n in tl.static_range(ROWS):
        r = (first_r + n).to(tl.int64)
        inside = first_i + i < tl.where(r < R, NI, 0)
        some = totals[n] > 0
        total = tl.where(some, totals[n], 1.0)
        target = out + b * o_b + r * o_r + h * o_h + tl.cast(first_i, tl.int64) * o_i
        tl.store(
            target + (i[:, None] * o_i + d[None, :] * o_d),
            (accs[n] / total[:, None]).to(out.dtype.element_ty),
            mask=inside[:, None] & (d[None, :] < D),
        )
        # Queries of the padding get what makes their weights 0.
        line = lse + ((b * R + r) * H + h) * (2 * IP if WIDE else IP)
        top = tops[n] if WIDE else tops[n] + tl.log2(total)
        top = tl.where(first_i + i < NI, tl.where(some, top, 0.0), float("inf"))
        there = first_i + i < tl.where(r < R, IP, 0)
        tl.store(line + first_i + i, top, mask=there)
        end = tl.where((first_i + BQ >= NI) & (r < R), IP, 0)
        _fill(line, first_i + BQ, end, float("inf"), BQ)
        if WIDE:
            tl.store(line + IP + first_i + i, 1.0 / total, mask=there)
            _fill(line + IP, first_i + BQ, end, 0.0, BQ)


@triton.jit(do_not_specialize=_SIZES)
def query_gradient_kernel(
    q, k, v, bias, mask, out, lse, dout, delta, dq, dbias, R, H, NI, NJ, IP, JP,
    q_b, q_r, q_h, q_i, q_d, k_b, k_r, k_h, k_j, k_d, v_b, v_r, v_h, v_j, v_d,
    m_b, m_r, o_b, o_r, o_h, o_i, o_d, g_b, g_r, g_h, g_i, g_d, unit_scale, scale,
    BQ: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
):  # fmt: skip
    """dQ of BQ queries of ROWS rows and one head; also Σ dO·O of each query, which the other kernels read.

    With BIAS_GRADIENT the rows' sum of dBias is added to ``dbias`` [B, H, NI, JP], float32: one atomic for
    ROWS scores, 16 bytes at a time.
    """
    WIDE: tl.constexpr = q.dtype.element_ty == tl.float32
    blocks, groups = tl.cdiv(NI, BQ), tl.cdiv(R, ROWS)
    pid = tl.program_id(0)
    first_i, rest = (pid % blocks) * BQ, pid // blocks
    first_r, rest = (rest % groups) * ROWS, rest // groups
    h, b = (rest % H).to(tl.int64), (rest // H).to(tl.int64)
    i, j, d = tl.arange(0, BQ), tl.arange(0, BK), tl.arange(0, DP)
    queries = ()
    grads = ()
    logs = ()
    corrections = ()
    accs = ()
    for n in tl.static_range(ROWS):
        r = tl.minimum(first_r + n, R - 1).to(tl.int64)
        queries += (_load(q + b * q_b + r * q_r + h * q_h, first_i, i, q_i, NI, d, q_d, D, DP),)
        gt = _load(dout + b * g_b + r * g_r + h * g_h, first_i, i, g_i, NI, d, g_d, D, DP)
        ot = _load(out + b * o_b + r * o_r + h * o_h, first_i, i, o_i, NI, d, o_d, D, DP)
        if WIDE:
            # Eager's is a mean over keys, which evens out roundings; those of this sum would show.
            correction = tl.sum(ot.to(tl.float64) * gt.to(tl.float64), 1).to(tl.float32)
        else:
            correction = tl.sum(ot.to(tl.float32) * gt.to(tl.float32), 1)
        of_row = delta + ((b * R + r) * H + h) * IP
        tl.store(of_row + first_i + i, correction)
        _fill(of_row, first_i + BQ, tl.where(first_i + BQ >= NI, IP, 0), 0.0, BQ)
        # The last row stands for those there are not: once it counts.
        logs += (_load_lines(lse, (b * R + r) * H + h, first_i, i, IP, first_r + n < R, WIDE),)
        grads += (gt,)
        corrections += (correction,)
        accs += (tl.zeros([BQ, DP], tl.float32),)
    head_rows = (b * H + h) * NI + tl.minimum(first_i + i, NI - 1)
    bias_rows = bias + head_rows[:, None] * JP + j[None, :]
    dbias_rows = dbias + head_rows[:, None] * JP + j[None, :]
    for start in range(0, NJ, BK):
        if HAS_BIAS:
            b_tile = tl.load(bias_rows + start).to(tl.float32)
        if BIAS_GRADIENT:
            db_tile = tl.zeros([BQ, BK], tl.float32)
        old_accs = accs
        accs = ()
        for n in tl.static_range(ROWS):
            r = tl.minimum(first_r + n, R - 1).to(tl.int64)
            kt = _load(k + b * k_b + r * k_r + h * k_h, start, j, k_j, NJ, d, k_d, D, DP)
            vt = _load(v + b * v_b + r * v_r + h * v_h, start, j, v_j, NJ, d, v_d, D, DP)
            s = product_t(queries[n], kt, PRECISION) * unit_scale
            if HAS_BIAS:
                s += b_tile
            if HAS_MASK:
                s += tl.load(mask + b * m_b + r * m_r + start + j)[None, :]
            if not HAS_BIAS and not HAS_MASK:
                s = tl.where(j[None, :] < NJ - start, s, float("-inf"))
            p = _weights(s, logs[n], WIDE, 0)
            dp = product_t(grads[n], vt, PRECISION)
            correction = corrections[n]
            if WIDE:
                # So few keys that the output's own roundings would: all are here for the mean over keys.
                correction = tl.where(NJ <= BK, tl.sum(p * dp, 1), correction)
                line = delta + ((b * R + r) * H + h) * IP + first_i + i
                tl.store(line, correction, mask=first_i + i < tl.where(NJ <= BK, NI, 0))
            ds = p * (dp - correction[:, None])
            accs += (add_product(old_accs[n], narrowed(ds, kt.dtype), kt, PRECISION),)
            if BIAS_GRADIENT:
                db_tile += ds
        if BIAS_GRADIENT:
            tl.atomic_add(dbias_rows + start, db_tile, mask=(first_i + i < NI)[:, None], sem="relaxed")
    for n in tl.static_range(ROWS):
        r = (first_r + n).to(tl.int64)
        inside = first_i + i < tl.where(r < R, NI, 0)
        target = dq + b * o_b + r * o_r + h * o_h + tl.cast(first_i, tl.int64) * o_i
        tl.store(
            target + (i[:, None] * o_i + d[None, :] * o_d),
            (accs[n] * scale).to(dq.dtype.element_ty),
            mask=inside[:, None] & (d[None, :] < D),
        )


@triton.jit(do_not_specialize=[*_SIZES, *_MASK])
def key_gradient_kernel(
    q, k, v, bias_t, mask, lse, dout, delta, dk, dv, R, H, NI, NJ, IP, JP,
    q_b, q_r, q_h, q_i, q_d, k_b, k_r, k_h, k_j, k_d, v_b, v_r, v_h, v_j, v_d,
    m_b, m_r, m_j, w_b, w_r, w_h, w_j, w_d, g_b, g_r, g_h, g_i, g_d, unit_scale, scale,
    BQ: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """dK and dV of BK keys of ROWS rows and one head: all queries go by. Strides ``w_*``: of dk and dv.

    bias_t: [B, H, JP, IP], the prepared bias transposed, so that the tile is read as it is multiplied. mask:
    the boolean one.
    """
    WIDE: tl.constexpr = q.dtype.element_ty == tl.float32
    blocks, groups = tl.cdiv(NJ, BK), tl.cdiv(R, ROWS)
    pid = tl.program_id(0)
    first_j, rest = (pid % blocks) * BK, pid // blocks
    first_r, rest = (rest % groups) * ROWS, rest // groups
    h, b = (rest % H).to(tl.int64), (rest // H).to(tl.int64)
    i, j, d = tl.arange(0, BQ), tl.arange(0, BK), tl.arange(0, DP)
    keys = ()
    values = ()
    dks = ()
    dvs = ()
    for n in tl.static_range(ROWS):
        r = tl.minimum(first_r + n, R - 1).to(tl.int64)
        keys += (_load(k + b * k_b + r * k_r + h * k_h, first_j, j, k_j, NJ, d, k_d, D, DP),)
        values += (_load(v + b * v_b + r * v_r + h * v_h, first_j, j, v_j, NJ, d, v_d, D, DP),)
        dks += (tl.zeros([BK, DP], tl.float32),)
        dvs += (tl.zeros([BK, DP], tl.float32),)
    bias_rows = bias_t + ((b * H + h) * JP + first_j) * IP + (j[:, None] * IP + i[None, :])
    for start in range(0, NI, BQ):
        if HAS_BIAS:
            b_tile = tl.load(bias_rows + start).to(tl.float32)
        old_dks = dks
        old_dvs = dvs
        dks = ()
        dvs = ()
        for n in tl.static_range(ROWS):
            r = tl.minimum(first_r + n, R - 1).to(tl.int64)
            qt = _load(q + b * q_b + r * q_r + h * q_h, start, i, q_i, NI, d, q_d, D, DP)
            gt = _load(dout + b * g_b + r * g_r + h * g_h, start, i, g_i, NI, d, g_d, D, DP)
            row = (b * R + r) * H + h
            logs = _load_lines(lse, row, start, i, IP, None, WIDE)
            correction = tl.load(delta + row * IP + start + i)
            s = product_t(keys[n], qt, PRECISION) * unit_scale
            if HAS_BIAS:
                s += b_tile
            p = _weights(s, logs, WIDE, 1)
            dvs += (add_product(old_dvs[n], narrowed(p, gt.dtype), gt, PRECISION),)
            ds = p * (product_t(values[n], gt, PRECISION) - correction[None, :])
            dks += (add_product(old_dks[n], narrowed(ds, qt.dtype), qt, PRECISION),)
    for n in tl.static_range(ROWS):
        r = (first_r + n).to(tl.int64)
        inside = first_j + j < tl.where(r < R, NJ, 0)
        dk_tile = dks[n] * scale
        dv_tile = dvs[n]
        if HAS_MASK:
            # An absent key touches its own sums alone, so it is enough to drop them here.
            held = mask + b * m_b + tl.minimum(r, R - 1) * m_r + (first_j + j).to(tl.int64) * m_j
            held = tl.load(held, mask=first_j + j < NJ, other=0)[:, None] != 0
            dk_tile = tl.where(held, dk_tile, 0.0)
            dv_tile = tl.where(held, dv_tile, 0.0)
        target = b * w_b + r * w_r + h * w_h + tl.cast(first_j, tl.int64) * w_j
        there = j[:, None] * w_j + d[None, :] * w_d
        kept = inside[:, None] & (d[None, :] < D)
        tl.store(dk + target + there, dk_tile.to(dk.dtype.element_ty), mask=kept)
        tl.store(dv + target + there, dv_tile.to(dv.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["part_rows", *_SIZES])
def bias_gradient_kernel(
    q, k, v, bias, mask, lse, dout, delta, dbias, B, R, H, NI, NJ, IP, JP, part_rows,
    q_b, q_r, q_h, q_i, q_d, k_b, k_r, k_h, k_j, k_d, v_b, v_r, v_h, v_j, v_d,
    m_b, m_r, g_b, g_r, g_h, g_i, g_d, unit_scale,
    BQ: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PRECISION: tl.constexpr,
    HAS_MASK: tl.constexpr,
):  # fmt: skip
    """dBias of one tile: its program owns it and sums over rows in registers. No atomics: bitwise repeatable.

    dbias: [part, B, H, NI, JP] float32. Rows are dealt to parts of ``part_rows`` where the tiles of the bias
    alone would not fill the GPU; the caller sums the parts.
    """
    WIDE: tl.constexpr = q.dtype.element_ty == tl.float32
    blocks_i, blocks_j, parts = tl.cdiv(NI, BQ), tl.cdiv(NJ, BK), tl.cdiv(R, part_rows)
    pid = tl.program_id(0)
    first_i, rest = (pid % blocks_i) * BQ, pid // blocks_i
    first_j, rest = (rest % blocks_j) * BK, rest // blocks_j
    part, rest = rest % parts, rest // parts
    h, b = (rest % H).to(tl.int64), (rest // H).to(tl.int64)
    i, j, d = tl.arange(0, BQ), tl.arange(0, BK), tl.arange(0, DP)
    head_rows = (b * H + h) * NI + tl.minimum(first_i + i, NI - 1)
    b_tile = tl.load(bias + head_rows[:, None] * JP + first_j + j[None, :]).to(tl.float32)
    acc = tl.zeros([BQ, BK], tl.float32)
    first_row = part * part_rows
    for index in range(first_row, tl.minimum(first_row + part_rows, R)):
        r = tl.cast(index, tl.int64)
        qt = _load(q + b * q_b + r * q_r + h * q_h, first_i, i, q_i, NI, d, q_d, D, DP)
        kt = _load(k + b * k_b + r * k_r + h * k_h, first_j, j, k_j, NJ, d, k_d, D, DP)
        gt = _load(dout + b * g_b + r * g_r + h * g_h, first_i, i, g_i, NI, d, g_d, D, DP)
        vt = _load(v + b * v_b + r * v_r + h * v_h, first_j, j, v_j, NJ, d, v_d, D, DP)
        row = (b * R + r) * H + h
        logs = _load_lines(lse, row, first_i, i, IP, None, WIDE)
        correction = tl.load(delta + row * IP + first_i + i)
        s = product_t(qt, kt, PRECISION) * unit_scale + b_tile
        if HAS_MASK:
            s += tl.load(mask + b * m_b + r * m_r + first_j + j)[None, :]
        p = _weights(s, logs, WIDE, 0)
        acc += p * (product_t(gt, vt, PRECISION) - correction[:, None])
    place = (((part * B + b) * H + h) * NI + first_i + i)[:, None] * JP + first_j + j[None, :]
    tl.store(dbias + place, acc, mask=(first_i + i < NI)[:, None])
