"""Attention of query rows on packed pages: one kernel for decoding rows (splits) and for the rows of a chunk.

Grid (row tiles x splits, kv heads, sequences). A program takes BM query rows, G heads of one or more tokens, over the
slots [split * SPLIT, (split + 1) * SPLIT) (SPLIT 0: all), BN at a time, with a running maximum and sum in base 2.
Splits and tiles begin at fixed slots, so a row's bits do not depend on its neighbours. Out: normalised float32, natural
lse; zeros and -inf for a row that saw nothing (the out of an empty split is not written: merge.py skips it).

Scales of tokens multiply columns of logits and of probabilities, scales of key channels multiply the query, zeros
become sums: numbers stay as they are stored. With 16-bit operands queries and weighted probabilities are divided by the
largest of their row first, so that neither a small scale nor a large one leaves float16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.kernels.triton.numbers import (
    LN2,
    LOG2E,
    channels,
    factor,
    numbers,
    raw,
    token_rows,
    token_scale,
    token_zero,
)


@triton.jit
def query_units(q, at, ok, base: tl.constexpr, S: tl.constexpr):
    """float32 [BM, pad] of each unit of a side. at [BM]: where a row begins; base: the side's first channel."""
    out = ()
    for u in tl.static_range(S.rows * S.parts):
        live = ok[:, None] & (tl.arange(0, S.pad) < S.cols)[None, :]
        out = out + (tl.load(q + (at[:, None] + base + channels(S, u)[None, :]), mask=live, other=0.0).to(tl.float32),)
    return out


@triton.jit
def largest(xs, top):
    for u in tl.static_range(len(xs)):
        top = tl.maximum(top, tl.max(tl.abs(xs[u]), 1))
    return top


@triton.jit
def inverse(x):
    return tl.where(x > 0, 1 / x, 0.0)


@triton.jit
def prepare(xs, per, S: tl.constexpr, CT: tl.constexpr):
    """(operands, sums): query units times `per` as products take them, and the sum over each group of channels, which
    zeros multiply. Queries of keys with scales per channel stay float32: they are multiplied in every tile."""
    out, sums = (), ()
    for u in tl.static_range(len(xs)):
        x = xs[u] * per[:, None]
        if u % S.units == 0:
            sums = sums + (tl.sum(x, 1),)
        else:
            sums = sums[:-1] + (sums[len(sums) - 1] + tl.sum(x, 1),)
        if S.axis == "block":
            out = out + (x,)
        else:
            out = out + (x.to(CT),)
    return out, sums


@triton.jit
def load_rows(side, S: tl.constexpr, first, rows, live):
    """What the packed rows of each token hold, a tuple with one (wide, narrow) per row."""
    out = ()
    for r in tl.static_range(S.rows):
        out = out + (raw(side, S, r, first, rows, live),)
    return out


@triton.jit
def unit(held, side, S: tl.constexpr, u: tl.constexpr, CT: tl.constexpr):
    """[BN, pad] numbers of unit u."""
    return numbers(held[u // S.parts], side, S, u % S.parts, CT)


@triton.jit
def scores(x, qs, sums, side, S: tl.constexpr, first, rows, live, CT: tl.constexpr, IP: tl.constexpr):
    """x [BM, BN] plus queries times the keys of a tile."""
    held = load_rows(side, S, first, rows, None)
    if S.axis == "block":
        for u in tl.static_range(S.rows * S.parts):
            x = by_channel(x, qs[u], tl.trans(unit(held, side, S, u, CT)), side, S, u, first, CT, IP)
    else:
        for g in tl.static_range(S.rows * S.parts // S.units):
            part = x if S.axis == "none" else tl.zeros_like(x)
            for j in tl.static_range(S.units):
                k = tl.trans(unit(held, side, S, g * S.units + j, CT))
                part = tl.dot(qs[g * S.units + j], k, part, input_precision=IP)
            if S.axis == "token":
                s = token_scale(side, S, g, first, rows, live)
                x += part * (s * factor(S))[None, :]
                if side.zero is not None:
                    x += sums[g][:, None] * token_zero(side, S, g, s, first, rows, live)[None, :]
            else:
                x = part
    return x


@triton.jit
def by_channel(x, q, k, side, S: tl.constexpr, u: tl.constexpr, first, CT: tl.constexpr, IP: tl.constexpr):
    """x plus q [BM, pad] times a unit of keys whose scales belong to channels and a group of tokens that holds the
    whole tile."""
    real = tl.arange(0, S.pad) < S.cols
    at = first // S.group * S.scales + channels(S, u)
    s = tl.load(side.scale + at, mask=real, other=0.0).to(tl.float32)
    scaled = q * (s * factor(S))[None, :]
    if CT == tl.float32:
        x = tl.dot(scaled, k, x, input_precision=IP)
    else:
        top = tl.max(tl.abs(scaled), 1)
        x += tl.dot((scaled * inverse(top)[:, None]).to(CT), k) * top[:, None]
    if side.zero is not None:
        z = tl.load(side.zero + at, mask=real, other=0.0).to(tl.float32) + S.mid * s
        x += tl.sum(q * z[None, :], 1)[:, None]
    return x


@triton.jit
def weigh(acc, p, alpha, side, S: tl.constexpr, first, rows, live, CT: tl.constexpr, IP: tl.constexpr):
    """acc * alpha + p @ values, unit by unit. live [BN]: slots whose bytes mean something."""
    out = ()
    held = load_rows(side, S, first, rows, live[:, None] if S.may_be_nan else None)
    for g in tl.static_range(S.rows * S.parts // S.units):
        w = p
        if S.axis == "token":
            s = token_scale(side, S, g, first, rows, live)
            w = p * s[None, :]
            if CT != tl.float32:
                top = tl.max(tl.abs(w), 1)
                w = w * inverse(top)[:, None]
        for j in tl.static_range(S.units):
            v = unit(held, side, S, g * S.units + j, CT)
            a = acc[g * S.units + j] * alpha[:, None]
            if S.axis == "token" and CT != tl.float32:
                a += tl.dot(w.to(CT), v) * top[:, None]
            else:
                a = tl.dot(w.to(CT), v, a, input_precision=IP)
            if side.zero is not None:
                a += tl.sum(p * token_zero(side, S, g, s, first, rows, live)[None, :], 1)[:, None]
            out = out + (a,)
    return out


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

    row = tl.load(first_row + n).to(tl.int64) + r
    head = h * G + m % G
    at = row * q_row + head * q_head
    xs = query_units(q, at, ok, 0, K)
    if K2 is not None:
        xs2 = query_units(q, at, ok, K.width, K2)
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
    qs, sums = prepare(xs, per, K, CT)
    if K2 is not None:
        qs2, sums2 = prepare(xs2, per, K2, CT)

    acc = ()
    for _ in tl.static_range(V.rows * V.parts):
        acc = acc + (tl.zeros([BM, V.pad], tl.float32),)
    top, total = tl.zeros([BM], tl.float32) - float("inf"), tl.zeros([BM], tl.float32)
    for start in range(begin, end, BN):
        t = start + tl.arange(0, BN)
        seen = (t[None, :] >= a[:, None]) & (t[None, :] < b[:, None])
        first, within = token_rows(table, start, end, stride, offset, B, BN)
        live = t < end
        if valid is not None:
            live = live & (tl.load(valid + (first + within), mask=live, other=0) != 0)
            seen = seen & live[None, :]
        if TOKENS > 1:  # ranges of rows may leave a gap that none of them sees
            live = live & (tl.max(seen.to(tl.int32), 0) > 0)
        else:
            live = live & (t >= least)
        x = scores(tl.zeros([BM, BN], tl.float32), qs, sums, k, K, first, within, live, CT, IP)
        if K2 is not None:
            x = scores(x, qs2, sums2, k2, K2, first, within, live, CT, IP)
        x = tl.where(seen, x * to_log2[:, None], -float("inf"))
        peak = tl.maximum(top, tl.max(x, 1))
        shift = tl.where(peak == -float("inf"), 0.0, peak)
        p, alpha = tl.exp2(x - shift[:, None]), tl.exp2(top - shift)
        total = total * alpha + tl.sum(p, 1)
        acc = weigh(acc, p, alpha, v, V, first, within, live, CT, IP)
        top = peak

    some = total != 0  # NaN is some
    per = tl.where(some, 1 / total, 0.0)
    row_out = out + split * o_split + row * o_row + head * o_head
    keep = ok if SPLIT == 0 else ok & some
    for u in tl.static_range(V.rows * V.parts):
        real = keep[:, None] & (tl.arange(0, V.pad) < V.cols)[None, :]
        y = acc[u] * (per * factor(V))[:, None]
        tl.store(row_out[:, None] + channels(V, u)[None, :], y.to(out.dtype.element_ty), mask=real)
    z = tl.where(some, (tl.where(top == -float("inf"), 0.0, top) + tl.log2(total)) * LN2, -float("inf"))
    tl.store(lse + split * l_split + row * l_row + head * l_head, z, mask=ok)
