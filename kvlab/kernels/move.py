"""Rows and blocks that move, in torch: compaction, copy-on-write. All reads come before all writes."""

from __future__ import annotations

from torch import Tensor


def move_rows(flat: Tensor, src: Tensor, dst: Tensor) -> None:
    """flat[dst] = flat[src]: flat [rows, width], src, dst int64 [n]; dst has no row twice."""
    flat.index_copy_(0, dst, flat.index_select(0, src))


def copy_blocks(arrays: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Block row dst[i] of each array [rows, ...] = its row src[i], int64 [n], disjoint."""
    for x in arrays:
        x[dst] = x[src]
