"""Attention of query rows on packed pages: one kernel for decoding rows (splits) and for the rows of a chunk.

Grid (row tiles x splits, kv heads, sequences). A program takes BM query rows, G heads of one or more tokens, over the
slots [split * SPLIT, (split + 1) * SPLIT) (SPLIT 0: all), BN at a time, with a running maximum and sum in base 2.
Splits and tiles begin at fixed slots, so a row's bits do not depend on its neighbours. Out: normalised float32, natural
lse; zeros and -inf for a row that saw nothing (the out of an empty split is not written: merge.py skips it).

Query rows are the COLUMNS of every product, slots or channels its rows: few heads are padded to 8 columns where they
would be padded to 16 rows. Tiles that all rows see whole have no masks.

A key's one scale a token multiplies its logits, zeros become sums, and queries are divided by the largest of their row,
so that float16 numbers stay as they are stored. All other scales multiply numbers as they are unpacked, with 16-bit
operands to values that float16 must hold (65504).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.kernels.triton.numbers import (
    LN2,
    LOG2E,
    channels,
    factor,
    raw,
    row,
    token_rows,
    token_scales,
    words,
)


@triton.jit
def query_rows(q, at, ok, base: tl.constexpr, S: tl.constexpr):
    """float32 [channels of a packed row, BM], a tuple with one per packed row. at [BM]: where a query row begins; base:
    the side's first channel."""
    out = ()
    for r in tl.static_range(tl.constexpr(S.rows)):
        c, real = channels(S, r)
        x = tl.load(q + (at[None, :] + base + c[:, None]), mask=ok[None, :] & real[:, None], other=0.0)
        out = out + (x.to(tl.float32),)
    return out


@triton.jit
def largest(xs, top):
    for r in tl.static_range(tl.constexpr(len(xs))):
        top = tl.maximum(top, tl.max(tl.abs(xs[r]), 0))
    return top


@triton.jit
def inverse(x):
    return tl.where(x > 0, 1 / x, 0.0)


@triton.jit
def prepare(xs, per, CT: tl.constexpr):
    """(operands, sums): queries times `per` as products take them, and what they then sum up to, which zeros multiply:
    a rounded query meets the keys that the page means."""
    out, sums = (), ()
    for r in tl.static_range(tl.constexpr(len(xs))):
        x = (xs[r] * per[None, :]).to(CT)
        out = out + (x,)
        sums = sums + (tl.sum(x.to(tl.float32), 0),)
    return out, sums


@triton.jit
def load_rows(side, S: tl.constexpr, first, rows, live):
    """What the packed rows of each token hold, a tuple with one (wide, narrow) per row."""
    out = ()
    for r in tl.static_range(tl.constexpr(S.rows)):
        out = out + (raw(side, S, r, first, rows, live),)
    return out


@triton.jit
def scores(x, qs, sums, side, table, S: tl.constexpr, first, rows, live, CT: tl.constexpr, IP: tl.constexpr):
    """x [BN, BM] plus the keys of a tile times queries. live [BN]: slots whose bytes mean something; None: all."""
    SCALED: tl.constexpr = S.group < S.width // S.rows  # a packed row has several scales
    scales = token_scales(side, S, first, rows, live)
    held = load_rows(side, S, first, rows, None)
    for r in tl.static_range(tl.constexpr(S.rows)):
        k = row(held, scales, side, table, S, r, first, SCALED, CT)
        if S.axis == "token" and not SCALED:
            s, z = scales[r * (S.width // S.rows) // S.group]
            x += tl.dot(k, qs[r], input_precision=IP) * s[:, None]
            if side.zero is not None:
                if CT == tl.float32:
                    z += S.mid * s
                x += sums[r][None, :] * z[:, None]
        else:
            x = tl.dot(k, qs[r], x, input_precision=IP)
    return x


@triton.jit
def weigh(
    acc, p, alpha, scales, side, table, S: tl.constexpr, first, rows, live, CT: tl.constexpr, IP: tl.constexpr
):  # fmt: skip
    """acc * alpha plus the transposed values of a tile times p, packed row by packed row. live as in `scores`."""
    out = ()
    if S.may_be_nan and live is not None:
        held = load_rows(side, S, first, rows, live[:, None])
    else:
        held = load_rows(side, S, first, rows, None)
    w = p.to(CT)
    for r in tl.static_range(tl.constexpr(S.rows)):
        v = tl.trans(row(held, scales, side, table, S, r, first, True, CT))
        out = out + (tl.dot(v, w, acc[r] * alpha[None, :], input_precision=IP),)
    return out


@triton.jit
def walk(
    state, begin, end, a, b, least, to_log2, qs, sums, qs2, sums2, k, k2, v, k_table, k2_table, v_table, valid, table,
    stride, offset, K: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, B: tl.constexpr, TOKENS: tl.constexpr,
    BN: tl.constexpr, CT: tl.constexpr, IP: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """state (acc, top, total) after the slots [begin, end). WHOLE: all rows see all of them. total [BN, BM]: sums of a
    slot of every tile, added up at the end."""
    acc, top, total = state
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        if WHOLE:
            first, within = token_rows(table, start, None, stride, offset, B, BN)
            live = None
        else:
            t = start + tl.arange(0, BN)
            seen = (t[:, None] >= a[None, :]) & (t[:, None] < b[None, :])
            first, within = token_rows(table, start, end, stride, offset, B, BN)
            live = t < end
            if valid is not None:
                live = live & (tl.load(valid + (first + within), mask=live, other=0) != 0)
                seen = seen & live[:, None]
            if TOKENS > 1:  # ranges of rows may leave a gap that none of them sees
                live = live & (tl.max(seen.to(tl.int32), 1) > 0)
            else:
                live = live & (t >= least)
        scales = token_scales(v, V, first, within, live)  # early: nothing prefetches them
        x = scores(tl.zeros_like(total), qs, sums, k, k_table, K, first, within, live, CT, IP)
        if K2 is not None:
            x = scores(x, qs2, sums2, k2, k2_table, K2, first, within, live, CT, IP)
        x = x * to_log2[None, :]
        if not WHOLE:
            x = tl.where(seen, x, -float("inf"))
        peak = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(peak == -float("inf"), 0.0, peak)
        p, alpha = tl.exp2(x - shift[None, :]), tl.exp2(top - shift)
        total = total * alpha[None, :] + p
        acc = weigh(acc, p, alpha, scales, v, v_table, V, first, within, live, CT, IP)
        top = peak
    return acc, top, total


@triton.jit(do_not_specialize=["blocks", "groups", "rows", "splits", "stride", "l_split", "l_row", "l_head"])
def attend(
    q, out, lse, k, k2, v, valid, table, lo, hi, first_row, count, group_of, offsets,
    q_row, q_head, o_split, o_row, o_head, l_split, l_row, l_head, blocks, groups, rows, splits, stride, scale,
    K: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, B: tl.constexpr, G: tl.constexpr, TOKENS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, CT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """q [rows, H, width], any float type. out [splits, rows, H, width of v], lse [splits, rows, H] float32.

    table int32 [N, groups, blocks], lo, hi int32 [N, groups, rows], first_row, count int32 [N]: kernels/cpu/attend.py
    View. group_of int32, offsets int64 [Hk]. TOKENS query tokens a program, of G heads each; BM >= TOKENS * G.
    """
    split, tile = tl.program_id(0) % splits, tl.program_id(0) // splits
    h, n = tl.program_id(1), tl.program_id(2)
    group, offset = tl.load(group_of + h), tl.load(offsets + h)
    m = tl.arange(0, BM)
    r = tile * TOKENS + m // G
    ok = (m < TOKENS * G) & (r < tl.load(count + n))
    span = (n.to(tl.int64) * groups + group) * rows + r
    a, b = tl.load(lo + span, mask=ok, other=0), tl.load(hi + span, mask=ok, other=0)
    ok_q = ok & (b > a)
    least = tl.min(tl.where(ok_q, a, 2**31 - 1), 0)
    begin = least // BN * BN
    end = tl.max(tl.where(ok_q, b, 0), 0)
    if SPLIT > 0:
        begin, end = tl.maximum(begin, split * SPLIT), tl.minimum(end, (split + 1) * SPLIT)
    table += (n.to(tl.int64) * groups + group) * blocks
    whole = tl.cdiv(tl.max(tl.where(ok, a, 0), 0), BN) * BN  # every row sees all slots of [whole, rest)
    rest = tl.min(tl.where(ok, tl.where(b > a, b, 0), 2**31 - 1), 0) // BN * BN
    whole = tl.minimum(tl.maximum(whole, begin), end)
    rest = tl.maximum(tl.minimum(rest, end), whole)

    row_at = tl.load(first_row + n).to(tl.int64) + r
    head = h * G + m % G
    at = row_at * q_row + head * q_head
    xs = query_rows(q, at, ok, 0, K)
    if K2 is not None:
        xs2 = query_rows(q, at, ok, K.width, K2)
    per = tl.zeros([BM], tl.float32) + 1.0
    if CT != tl.float32:
        per = largest(xs, tl.zeros([BM], tl.float32))
        if K2 is not None:
            per = largest(xs2, per)
    to_log2 = per * (scale * LOG2E)
    if CT != tl.float32:
        per = inverse(per)
    if K.axis == "none":
        to_log2 *= factor(K)
    qs, sums = prepare(xs, per, CT)
    qs2, sums2, k2_table = (), (), ()
    if K2 is not None:
        qs2, sums2 = prepare(xs2, per, CT)
        k2_table = words(K2, CT)
    k_table, v_table = words(K, CT), words(V, CT)

    acc = ()
    for _ in tl.static_range(tl.constexpr(V.rows)):
        acc = acc + (tl.zeros([tl.constexpr(V.parts * V.pad), BM], tl.float32),)
    state = (acc, tl.zeros([BM], tl.float32) - float("inf"), tl.zeros([BN, BM], tl.float32))
    if valid is not None:
        state = walk(
            state, begin, end, a, b, least, to_log2, qs, sums, qs2, sums2, k, k2, v, k_table, k2_table, v_table, valid,
            table, stride, offset, K, K2, V, B, TOKENS, BN, CT, IP, False, None,
        )  # fmt: skip
    else:
        for i in tl.static_range(3):
            state = walk(
                state, begin if i == 0 else whole if i == 1 else rest, whole if i == 0 else rest if i == 1 else end,
                a, b, least, to_log2, qs, sums, qs2, sums2, k, k2, v, k_table, k2_table, v_table, None,
                table, stride, offset, K, K2, V, B, TOKENS, BN, CT, IP, i == 1, None if i == 1 else 1,
            )  # fmt: skip
    acc, top, total = state

    total = tl.sum(total, 0)
    some = total != 0  # NaN is some
    per = tl.where(some, 1 / total, 0.0)
    row_out = out + split * o_split + row_at * o_row + head * o_head
    keep = ok if SPLIT == 0 else ok & some
    if V.axis == "none":
        per *= factor(V)
    for r in tl.static_range(tl.constexpr(V.rows)):
        c, real = channels(V, r)
        y = (acc[r] * per[None, :]).to(out.dtype.element_ty)
        tl.store(row_out[None, :] + c[:, None], y, mask=keep[None, :] & real[:, None])
    z = tl.where(some, (tl.where(top == -float("inf"), 0.0, top) + tl.log2(total)) * LN2, -float("inf"))
    tl.store(lse + split * l_split + row_at * l_row + head * l_head, z, mask=ok)
