"""Rows that move: compaction of token rows (cache/compact.py) and copies of whole blocks (cache/arrays.py).

Bytes are moved as the widest integers that divide a row, so that no NaN is rewritten, and addresses are int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 2048  # of a program: one row's chunk of them, or several short rows
ROWS = 64


@triton.jit
def copy_rows(x, y, src, dst, n, words, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Row dst[i] of y [.., words] = row src[i] of x [.., words], i < n; None = i itself. Integers, both dense.

    Grid (ROWS of the n pairs, COLS of the words).
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    real = i < n
    a, b = i, i
    if src is not None:
        a = tl.load(src + i, mask=real, other=0).to(tl.int64)
    if dst is not None:
        b = tl.load(dst + i, mask=real, other=0).to(tl.int64)
    live = real[:, None] & (c < words)[None, :]
    tl.store(
        y + (b[:, None] * words + c[None, :]), tl.load(x + (a[:, None] * words + c[None, :]), mask=live), mask=live
    )


def move_rows(flat: Tensor, src: Tensor, dst: Tensor) -> None:
    """flat[dst] = flat[src], every row being read before any is written.

    flat [rows, width] of any type, dense. src, dst int64 [n] on its device; dst has no row twice, src may.

    Two launches with a buffer of n rows between them, which a graph can capture. In place, a program per (sequence,
    layer, head) that goes through its rows in order would need no buffer; that is legal only where no row is written
    before it was read: survivors in ascending order (row j comes from a row >= j of the same table), and tables that
    share no block. `compact` does not promise the second: a fresh block may be one that another sequence or layer has
    just given back and still has to be read from.
    """
    words = as_words(flat)
    buffer = torch.empty((len(src), words.shape[1]), dtype=words.dtype, device=words.device)
    _copy(words, buffer, src, None, len(src))
    _copy(buffer, words, None, dst, len(src))


def copy_blocks(arrays: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Block row dst[i] of each array = its row src[i]: copy-on-write, swaps. A launch per array.

    arrays: [rows, ...] of any type, dense. src, dst int64 [n] on their device, disjoint; dst has no row twice.
    """
    for x in arrays:
        words = as_words(x)
        _copy(words, words, src, dst, len(src))


def as_words(x: Tensor) -> Tensor:
    """x [rows, ...] as int64, int32, int16 or uint8 [rows, words]: the same memory, the fewest words."""
    assert x.is_contiguous(), f"rows that move must be dense, strides are {x.stride()} of {tuple(x.shape)}"
    flat = (x.flatten(1) if x.dim() > 1 else x[:, None]).view(torch.uint8)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if flat.shape[1] % dtype.itemsize == 0 and x.data_ptr() % dtype.itemsize == 0:
            return flat.view(dtype)
    return flat


def _copy(x: Tensor, y: Tensor, src: Tensor | None, dst: Tensor | None, n: int) -> None:
    words = x.shape[1]
    if not n or not words:
        return
    cols = min(WORDS, triton.next_power_of_2(words))
    rows = min(ROWS, WORDS // cols)
    copy_rows[(triton.cdiv(n, rows), triton.cdiv(words, cols))](x, y, src, dst, n, words, ROWS=rows, COLS=cols)
