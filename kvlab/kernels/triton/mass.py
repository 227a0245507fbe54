"""Attention weight that each slot received from the rows of its sequence: pass two, with the joined log-sum-exps.

A program keeps the keys of one tile of slots and walks the rows that see it, several tokens of G heads at a time. Rows
are summed in their order, tiles begin at fixed slots: bits depend neither on the batch nor on `columns`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from kvlab.kernels.triton.attend import inverse, largest, prepare, query_rows, scores
from kvlab.kernels.triton.numbers import LOG2E, factor, token_rows, words
from kvlab.kernels.triton.tiles import attend_tiles

if TYPE_CHECKING:
    from kvlab.kernels.triton.layers import Layers, View

SCAN: tl.constexpr = tl.constexpr(128)  # rows whose ranges are looked at together


@triton.jit
def seers(lo, hi, count, start, end):
    """(first, last, most): of `count` rows [first, last) hold all that see slots of [start, end), up to slot `most`.
    None: last = 0."""
    first, last, most = count, count * 0, start
    for at in range(0, count, SCAN):
        r = at + tl.arange(0, SCAN)
        a = tl.maximum(tl.load(lo + r, mask=r < count, other=0), start)
        b = tl.minimum(tl.load(hi + r, mask=r < count, other=0), end)
        sees = a < b
        first = tl.minimum(first, tl.min(tl.where(sees, r, count), 0))
        last = tl.maximum(last, tl.max(tl.where(sees, r + 1, 0), 0))
        most = tl.maximum(most, tl.max(tl.where(sees, b, start), 0))
    return first, last, most


@triton.jit
def mass_kernel(
    q, lse, out, k, k2, valid, table, lo, hi, first_row, count, group_of, offsets,
    q_row, q_head, l_row, l_head, blocks, groups, rows, columns, stride, scale,
    K: tl.constexpr, K2: tl.constexpr, B: tl.constexpr, G: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    BN: tl.constexpr, CT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """out float32 [N, Hk, G, columns]; grid (tiles of BN slots, Hk, N). Else as `attend`, lse read.

    Column m of a product is head m // TOKENS of token m % TOKENS, HEADS = G padded: TOKENS and HEADS are powers of two.
    """
    start = tl.program_id(0) * BN
    h, n = tl.program_id(1), tl.program_id(2)
    group, offset = tl.load(group_of + h), tl.load(offsets + h)
    span = (n.to(tl.int64) * groups + group) * rows
    own = tl.load(count + n)
    first_seer, last_seer, most = seers(lo + span, hi + span, own, start, start + BN)

    table += (n.to(tl.int64) * groups + group) * blocks
    first, within = token_rows(table, start, most, stride, offset, B, BN)
    t = start + tl.arange(0, BN)
    live = t < most
    if valid is not None:
        live = live & (tl.load(valid + (first + within), mask=live, other=0) != 0)

    m = tl.arange(0, HEADS * TOKENS)
    head = h * G + m // TOKENS
    begin = tl.load(first_row + n).to(tl.int64)
    acc = tl.zeros([BN, HEADS * TOKENS], tl.float32)
    for tile in range(first_seer // TOKENS * TOKENS, last_seer, TOKENS):
        r = tile + m % TOKENS
        ok = (m // TOKENS < G) & (r < own)
        a, b = tl.load(lo + span + r, mask=ok, other=0), tl.load(hi + span + r, mask=ok, other=0)
        z = tl.load(lse + (begin + r) * l_row + head * l_head, mask=ok, other=float("inf"))
        seen = (t[:, None] >= a[None, :]) & (t[:, None] < b[None, :])
        seen = seen & live[:, None]
        x = logits(q, (begin + r) * q_row + head * q_head, ok, scale, k, k2, first, within, live, K, K2, CT, IP)
        acc += tl.where(seen, tl.exp2(x - z[None, :] * LOG2E), 0.0)  # what is not seen may be NaN or infinite

    weight = tl.sum(tl.reshape(acc, [BN, HEADS, TOKENS]), 2)
    g = tl.arange(0, HEADS)
    at = ((n.to(tl.int64) * tl.num_programs(1) + h) * G + g)[None, :] * columns + t[:, None]
    tl.store(out + at, weight, mask=(g < G)[None, :] & (t < columns)[:, None])


@triton.jit
def logits(
    q, at, ok, scale, k, k2, first, within, live,
    K: tl.constexpr, K2: tl.constexpr, CT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """float32 [BN, BM] in base 2: queries that begin at q + at, float [BM, width], times the keys of a tile."""
    xs = query_rows(q, at, ok, 0, K)
    if K2 is not None:
        xs2 = query_rows(q, at, ok, K.width, K2)
    per = tl.zeros_like(at).to(tl.float32) + 1.0
    if CT != tl.float32:
        per = largest(xs, tl.zeros_like(per))
        if K2 is not None:
            per = largest(xs2, per)
    to_log2 = per * (scale * LOG2E)
    if CT != tl.float32:
        per = inverse(per)
    if K.axis == "none":
        to_log2 *= factor(K)
    qs, sums = prepare(xs, per, CT)
    x = tl.zeros([live.shape[0], at.shape[0]], tl.float32)
    x = scores(x, qs, sums, k, words(K, CT), K, first, within, live, CT, IP)
    if K2 is not None:
        qs2, sums2 = prepare(xs2, per, CT)
        x = scores(x, qs2, sums2, k2, words(K2, CT), K2, first, within, live, CT, IP)
    return x * to_log2[None, :]


def mass(layers: Layers, i: int, view: View, q: Tensor, lse: Tensor, columns: int) -> Tensor:
    """float32 [N, Hk, G, columns]: exp(scale q.k - lse) of each slot, summed over the rows of a sequence that see it.

    i: index of the layer in its class. q [rows, H, D] any float type, last axis dense, in the model's basis; lse
    float32 [rows, H]; rows as in `Layers.attend`. lse +inf: the row has no vote. One far below a logit (of other keys)
    gives infinity, never NaN.
    """
    q = layers._turned(i, q)
    decode = view.most == 1
    t = attend_tiles(layers.fmt, layers.block, layers.G, decode, layers.exact, layers.capability)
    N, groups, blocks = view.table.shape
    heads = 1 << (layers.G - 1).bit_length()
    tokens = max(1, (16 if decode else 32) // heads)
    tiles = -(-min(columns, blocks * layers.block) // t.slots)
    make = q.new_empty if tiles * t.slots >= columns else q.new_zeros
    out = make((N, layers.Hk, layers.G, columns), dtype=lse.dtype)
    if N and tiles:
        mass_kernel[(tiles, layers.Hk, N)](
            q, lse, out, layers.k[0], layers.k[1] if len(layers.k) > 1 else None, layers.valid, view.table, view.lo,
            view.hi, view.first, view.count, layers.group_of[i], layers.offset[i], q.stride(0), q.stride(1),
            *lse.stride(), blocks, groups, view.lo.shape[2], columns, layers.stride, layers.scale, K=layers.K[0],
            K2=layers.K[1] if len(layers.K) > 1 else None, B=layers.block, G=layers.G, TOKENS=tokens, HEADS=heads,
            BN=t.slots, CT=getattr(tl, str(layers.compute).split(".")[1]), IP=layers.precision, num_warps=t.warps,
            num_stages=t.stages if len(layers.K) == 1 else min(t.stages, 2),  # queries of both parts are prefetched
        )  # fmt: skip
    return out
