"""Join of partials over disjoint slots by their log-sum-exp: the splits of a row, and what it has seen elsewhere."""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.kernels.triton.numbers import LN2, LOG2E


@triton.jit(do_not_specialize=["splits", "l_split", "l_row", "l_head", "z_row", "z_head"])
def merge(
    part, part_lse, out, lse, first_row, count, p_split, p_row, p_head, l_split, l_row, l_head, o_row, o_head, z_row,
    z_head, splits,
    W: tl.constexpr, PAD: tl.constexpr, BS: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """part float32 [splits, rows, H, W], part_lse [splits, rows, H] -> out [rows, H, W], lse [rows, H], in rows
    first_row[n] + r, r < count[n], and in no other; grid (most rows of a sequence, H, N).

    JOIN: out and lse hold one partial more. A partial with lse -inf has nothing in it and is not read. Splits are taken
    BS at a time in their order: more of them that are empty change no bit.
    """
    r, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if r >= tl.load(count + n):
        return
    row = tl.load(first_row + n).to(tl.int64) + r
    c = tl.arange(0, PAD)
    part += row * p_row + h * p_head
    part_lse += row * l_row + h * l_head
    out += row * o_row + h * o_head
    lse += row * z_row + h * z_head
    top, total, acc = -float("inf"), 0.0, tl.zeros([PAD], tl.float32)
    if JOIN:
        top = tl.load(lse).to(tl.float32) * LOG2E
        if top != -float("inf"):
            total += 1.0
            acc = tl.load(out + c, mask=c < W, other=0.0).to(tl.float32)
    for start in range(0, splits, BS):
        s = start + tl.arange(0, BS)
        z = tl.load(part_lse + s * l_split, mask=s < splits, other=-float("inf")) * LOG2E
        some = z != -float("inf")
        peak = tl.maximum(top, tl.max(z, 0))
        shift = tl.where(peak == -float("inf"), 0.0, peak)
        w, alpha = tl.exp2(z - shift), tl.exp2(top - shift)
        x = tl.load(
            part + (s.to(tl.int64)[:, None] * p_split + c[None, :]), mask=some[:, None] & (c < W)[None, :], other=0.0
        )
        total = total * alpha + tl.sum(w, 0)
        acc = acc * alpha + tl.sum(x * w[:, None], 0)
        top = peak
    some = total != 0
    per = tl.where(some, 1 / total, 0.0)
    tl.store(out + c, (acc * per).to(out.dtype.element_ty), mask=c < W)
    tl.store(lse, tl.where(some, (tl.where(top == -float("inf"), 0.0, top) + tl.log2(total)) * LN2, -float("inf")))
