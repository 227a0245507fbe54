"""Tile sizes: plain functions of the shape. Nothing is tuned at import, and a row's bits are fixed."""

from __future__ import annotations

from typing import NamedTuple

from kvlab.kernels.format import Format

SPLIT = 512  # slots of a split of decoding rows


class Tiles(NamedTuple):
    """tokens: query tokens of a program. rows: its rows (heads of all of them), padded. slots: of a tile."""

    tokens: int
    rows: int
    slots: int
    warps: int
    stages: int


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def attend_tiles(fmt: Format, B: int, G: int, decode: bool, exact: bool) -> Tiles:
    """decode: one query token a program; else as many as fill 64 rows."""
    rows = max(16, _pow2(G))
    tokens = 1 if decode else max(1, 64 // G)
    if not decode:
        rows = max(16, _pow2(tokens * G))
    slots = 32
    for side in (*fmt.k, fmt.v):
        if side.axis == "block":
            slots = min(slots, side.group, B)
    return Tiles(tokens, rows, slots, 4, 1 if exact else 2)
