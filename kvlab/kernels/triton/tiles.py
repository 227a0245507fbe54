"""Tile sizes: plain functions of the shape. Nothing is tuned at import, and a row's bits are fixed.

What decides, with G = 4 and 128 channels on an H200: no spills, at most 128 registers for a decoding row's 128 threads,
so that four programs share a multiprocessor, and enough slots a tile that unpacking is most of the work (aot.json).
"""

from __future__ import annotations

from typing import NamedTuple

from kvlab.kernels.format import Format

SPLIT = 512  # slots of a split of decoding rows


class Tiles(NamedTuple):
    """tokens: query tokens of a program. rows: its rows (heads of all of them), padded. slots: of a tile. registers:
    the most that a lane may take; 0: the assembler decides."""

    tokens: int
    rows: int
    slots: int
    warps: int
    stages: int
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Of a launch. AMD's compiler does not know maxnreg."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def attend_tiles(fmt: Format, B: int, G: int, decode: bool, exact: bool, capability: int) -> Tiles:
    """decode: one query token a program; else as many as fill 32 rows (16 of wide heads, or of float32, or on AMD).
    capability: sides.capability."""
    nvidia, older = capability > 0, 0 < capability < 90
    sides = (*fmt.k, fmt.v)
    widest = max(sum(s.width for s in fmt.k), fmt.v.width)
    coded = all(s.kind in ("codes", "int8", "e4m3", "e5m2") for s in sides)
    large = not coded and (widest > 128 or any(s.kind == "float32" for s in sides))
    tables = any(s.table is not None for s in sides)
    tokens = 1 if decode else max(1, (16 if widest > 128 or large or exact or not nvidia else 32) // G)
    rows = max(8 if nvidia and decode else 16, _pow2(tokens * G))
    slots = 16 if exact and nvidia else 32 if large or not nvidia else 64
    for s in sides:
        if s.axis == "block":
            slots = min(slots, s.group, B)
    # Left alone, the assembler of older GPUs spills a few bytes of narrow heads to fit one program more.
    registers = 128 if older and decode and widest <= 64 else 0
    if exact:  # warps: with others some codecs spill
        few = nvidia and decode and tables and len(fmt.k) == 1
        return Tiles(tokens, rows, slots, 2 if few else 8 if older and not decode else 4, 1, registers)
    if not nvidia:  # tables would be gathered through shared memory
        return Tiles(tokens, rows, slots, 4, 1 if large or tables else 2)
    # A product's rows are slots, then channels: a warp takes 16. Block ids and pages are prefetched one after the
    # other, so with 3, 5, 7 stages one, two, three tiles are under way; a tile of float16 is as large as four of codes.
    stages = 3 if not (coded and decode) else 5 if slots == 64 else 7
    return Tiles(tokens, rows, slots, max(1, min(4, slots // 16)) if decode else 4, stages, registers)
