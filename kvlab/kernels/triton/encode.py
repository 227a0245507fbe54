"""Kernels that write pages: tokens as they come (append), whole blocks from an exact tail (seal). The fits: fits.py.

Nothing depends on a number that was read: grids follow from shapes, and what must not be written has row -1 (or one
outside the pool), so both can be part of a CUDA graph. A number that is not finite, or does not fit its type, raises
bad[layer]; nobody waits to see it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.kernels.triton.fits import put_absmax, put_group, put_minmax, put_plain, put_table


@triton.jit
def put(side, E: tl.constexpr, x, rows, live, r, turn, BK: tl.constexpr):
    """Packed row r of tokens x [BT] (pointers to first channels) to token rows int64 [BT]. bool [BT]: all is finite.
    turn: where the head's matrix begins."""
    if E.fit == "as_is":
        return put_plain(side, E, x, rows, live, r)
    elif E.fit == "absmax":
        return put_absmax(side, E, x, rows, live, r)
    elif E.fit == "minmax":
        return put_minmax(side, E, x, rows, live, r)
    else:
        return put_table(side, E, x, rows, live, side.turn + turn, BK)


@triton.jit
def report(fine, bad):
    """bad becomes 1 unless all is fine."""
    if tl.min(fine.to(tl.int32), 0) == 0:
        tl.atomic_max(bad, 1)


@triton.jit(do_not_specialize=["layer", "T"], do_not_specialize_on_alignment=["rows"])
def append(
    k, v, to_k, to_v, rows, bad, layer, T, tokens, k_head, k_row, v_head, v_row, turn_k, turn_v,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """k, v [Hk, T, D] of any float type -> token rows int64 [Hk, T]; rows outside [0, tokens) are not written.

    Grid (tiles of BT tokens, kv heads, packed rows of K, then of V). turn_k, turn_v: from a head's matrix to the next.
    """
    h, r = tl.program_id(1).to(tl.int64), tl.program_id(2)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    to = tl.load(rows + (h * T + t), mask=t < T, other=-1)
    live = (to >= 0) & (to < tokens)
    t = t.to(tl.int64)
    if r < K.rows:
        report(put(to_k, K, k + (h * k_head + t * k_row), to, live, r, h * turn_k, BK), bad + layer)
    else:
        r -= K.rows
        report(put(to_v, V, v + (h * v_head + t * v_row), to, live, r, h * turn_v, BK), bad + layer)


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["src", "dst"])
def seal(
    k, v, to_k, to_v, src, dst, bad, layer, src_blocks, blocks, heads, turn_k, turn_v,
    K: tl.constexpr, V: tl.constexpr, B: tl.constexpr, K_JOBS: tl.constexpr, BT: tl.constexpr, BG: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Block rows src int64 [M] of exact k, v [src_blocks, B * D] -> block rows dst int64 [M] of `blocks`.

    Grid (M, jobs of K, then of V); pair m is of kv head m % heads. A row outside its arrays: the pair is left out.
    """
    m, job = tl.program_id(0), tl.program_id(1)
    a, b = tl.load(src + m), tl.load(dst + m)
    h = (m % heads).to(tl.int64)
    if (a >= 0) & (a < src_blocks) & (b >= 0) & (b < blocks):
        if job < K_JOBS:
            put_block(to_k, K, k, a, b, job, h * turn_k, bad + layer, B, BT, BG, BK)
        else:
            put_block(to_v, V, v, a, b, job - K_JOBS, h * turn_v, bad + layer, B, BT, BG, BK)


@triton.jit
def put_block(
    side, E: tl.constexpr, x, a, b, job, turn, bad, B: tl.constexpr, BT: tl.constexpr, BG: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """A job of block row a of x: a packed row of a group of tokens (axis "block") or of BT tokens -> block row b."""
    r, i = job % E.rows, job // E.rows
    x += a * (B * E.width)
    if E.axis == "block":
        scale = (b * (B // E.group) + i) * E.width
        report(put_group(side, E, x + i * (E.group * E.width), b * B + i * E.group, scale, r, BG), bad)
    else:
        t = i * BT + tl.arange(0, BT)
        report(put(side, E, x + t * E.width, b * B + t, t < B, r, turn, BK), bad)
