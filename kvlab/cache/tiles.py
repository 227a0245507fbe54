"""Fixed-width tiles of what the rows of a bucket may read: which blocks, which mask, which slots are junk.

Widths are fixed and tables are padded with the null block, so that a sequence's result does not depend on who shares
its batch. A source is where keys lie: "body" (encoded pages), "tail" (exact pages), "chunk" (this step's own k, v).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.step import Bucket, Step
from kvlab.cache.tables import ClassTables, Growth

Source = Literal["body", "tail", "chunk"]
# A tile takes part of a bucket's rows in steps of this many: with 4 rows or more a row's bits do not depend on how many
# others are computed with it, with fewer they do.
ROWS = 16
# A decoding tile may end early at these widths: the matrix products of up to MAX_TRIMMED keys give a row the same bits
# whether the keys beyond are masked or absent (beyond that their blocking changes).
TRIMMED = (64, 128)
MAX_TRIMMED = 256


@dataclass(frozen=True)
class Tile:
    """Columns [start, start + width) of a source, and the query rows [first, last) of the bucket that see some of them.

    rows   int64 [Nb * Hk * width/B]        block rows of layer index 0; add `layer_step * layer` (uniform tables)
    mask   float [Nb, 1|Hk, G*(last-first), width]  0 or -inf; None = every row sees every column
    empty  bool  [Nb, 1|Hk, G*(last-first)]         rows that see no column; None = there is none
    junk   int64 [j]                        rows of the flat [Nb * Hk * width] tile that hold no token
    """

    source: Source
    start: int
    width: int
    first: int
    last: int
    rows: Tensor | None
    layer_step: int
    mask: Tensor | None
    empty: Tensor | None
    junk: Tensor | None


class TileBuilder:
    """Tiles of one class in one step; `width` tokens each (a multiple of the block)."""

    def __init__(self, tables: ClassTables, step: Step, growth: Growth, width: int, exact: bool, G: int, dtype):
        if width % tables.block:
            raise ValueError(f"tile of {width} tokens is not a multiple of block {tables.block}")
        self.t, self.step, self.growth, self.width, self.exact, self.G = tables, step, growth, width, exact, G
        self.dtype = dtype
        self._cache: dict[tuple, list[Tile]] = {}

    def sources(self, bucket: Bucket) -> tuple[Source, ...]:
        if self.t.tail is not None:
            return ("body", "tail")
        return ("body", "chunk") if self.exact and bucket.prefill else ("body",)

    def visible(self, bucket: Bucket, source: Source) -> tuple[np.ndarray, np.ndarray]:
        """Columns [lo, hi) that each padded row sees: int64 [Nb, groups, rows] each."""
        B, m = self.t.block, bucket.members
        p = before = self.growth.before[m][..., None]  # slot of the row itself; slots before the step
        at = np.zeros((1, 1, 1), np.int64)
        if bucket.rows > 1:
            at = np.minimum(np.arange(bucket.rows)[None], self.step.q_len[m][:, None] - 1)[:, None]
            p = before + at
        first = np.maximum(p + 1 - self.t.window, 0) if self.t.window is not None else np.zeros_like(p)
        if self.t.tail is None:
            if not (self.exact and bucket.prefill):
                return first, p + 1
            if source == "body":
                return first, np.broadcast_to(before, p.shape)
            return np.maximum(first - before, 0), np.broadcast_to(at + 1, p.shape)
        held = self.t.sealed[self.step.cache_rows[m]][..., None]
        if self.exact:
            body_hi = np.broadcast_to(held, p.shape)
        else:
            whole = B * (np.maximum(p + 1 - self.t.residual, 0) // B)
            body_hi = np.minimum(np.maximum(whole, held), self.growth.sealed_to[m][..., None])
        return (first, body_hi) if source == "body" else (np.maximum(first, body_hi), p + 1)

    def tiles(self, bucket: Bucket, source: Source, layer: int) -> list[Tile]:
        """All tiles with something visible. Uniform tables: the same list for every layer of the class."""
        li = 0 if self.t.uniform else self.t.layer_index[layer]
        key = (id(bucket), source, li)
        if key not in self._cache:
            if not self.t.uniform:  # ragged tables have a list per layer: keep only the newest
                self._cache = {k: v for k, v in self._cache.items() if k[2] == li}
            self._cache[key] = self._build(bucket, source, li)
        return self._cache[key]

    def whole(self, bucket: Bucket, source: Source, layer: int, blocks: int) -> Tile:
        """The first `blocks` blocks of a source as one tile, without a mask: for kernels that need none."""
        li, width = 0 if self.t.uniform else self.t.layer_index[layer], blocks * self.t.block
        rows = self.step.tensor(self._rows(bucket, source, li, 0, width))
        return Tile(source, 0, width, 0, bucket.rows, rows, self._layer_step(source), None, None, None)

    def _build(self, bucket: Bucket, source: Source, li: int) -> list[Tile]:
        lo, hi = self.visible(bucket, source)
        groups = [0] if self.t.uniform else self.t.group_of[li]
        lo, hi = lo[:, groups], hi[:, groups]  # [Nb, 1|Hk, rows]
        some = hi > lo
        if not some.any():
            return []
        first, last = int(lo[some].min()) // self.width, -(-int(hi[some].max()) // self.width)
        end = int(hi[some].max())
        tiles = [
            self._tile(bucket, source, li, i * self.width, self._trimmed(bucket, end - i * self.width), lo, hi)
            for i in range(first, last)
        ]
        return [tile for tile in tiles if tile is not None]

    def _trimmed(self, bucket: Bucket, need: int) -> int:
        """Width of a tile of which `need` columns are seen: the last one of decoding rows may be narrower."""
        if bucket.rows == 1 and self.width <= MAX_TRIMMED:
            for width in TRIMMED:
                if need <= width < self.width and width % self.t.block == 0:
                    return width
        return self.width

    def _tile(
        self, bucket: Bucket, source: Source, li: int, start: int, width: int, lo: np.ndarray, hi: np.ndarray
    ) -> Tile | None:
        first, last = 0, bucket.rows
        mask = empty = None
        if lo.max() > start or hi.min() < start + width:
            if bucket.rows > ROWS:
                hit = np.nonzero(((lo < start + width) & (hi > start) & (hi > lo)).any((0, 1)))[0]
                if not len(hit):
                    return None
                first, last = int(hit[0]) // ROWS * ROWS, -(-int(hit[-1] + 1) // ROWS) * ROWS
                lo, hi = lo[..., first:last], hi[..., first:last]
            col = start + np.arange(width)
            seen = (col >= lo[..., None]) & (col < hi[..., None])
            none = ~seen.any(-1)
            seen |= none[..., None]
            if not seen.all():
                dtype = torch.float32 if source == "body" else self.dtype  # what codecs decode to | exact k, v
                mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~torch.from_numpy(seen), -torch.inf)
                mask = mask.to(self.step.device)[:, :, None].expand(-1, -1, self.G, -1, -1).flatten(2, 3)
            if none.any():
                empty = self.step.tensor(np.repeat(none[:, :, None], self.G, 2).reshape(*none.shape[:2], -1))
        rows = junk = None
        if source != "chunk":
            rows = self.step.tensor(self._rows(bucket, source, li, start, width))
            junk = self._junk(bucket, source, li, start, width)
        return Tile(source, start, width, first, last, rows, self._layer_step(source), mask, empty, junk)

    def _rows(self, bucket: Bucket, source: Source, li: int, start: int, width: int) -> np.ndarray:
        t, k = self.t, width // self.t.block
        table, arrays = t.stored(source == "tail")
        span = table[self.step.cache_rows[bucket.members], :, start // t.block : start // t.block + k]
        blocks = np.zeros((*span.shape[:2], k), np.int64)
        blocks[..., : span.shape[2]] = span
        per_head = blocks[:, t.group_of[li]]  # [Nb, Hk, k]
        return arrays.row(per_head, t.place[li][None, :, None]).ravel()

    def _layer_step(self, source: Source) -> int:
        """Rows from one layer's to the next one's, where all layers share the tables."""
        arrays = self.t.stored(source == "tail")[1]
        return arrays.row(0, self.t.heads_of_group) if self.t.uniform and source != "chunk" else 0

    def _junk(self, bucket: Bucket, source: Source, li: int, start: int, width: int) -> Tensor | None:
        """Slots of the open block beyond the last token. Sealed blocks are full, so a body behind a tail has none."""
        t, B = self.t, self.t.block
        if source == "body" and t.tail is not None:
            return None
        end = self.growth.after[bucket.members][:, t.group_of[li]]  # [Nb, Hk]
        col = end[..., None] + np.arange(B - 1)
        bad = (col < -(-end // B)[..., None] * B) & (col >= start) & (col < start + width)
        if not bad.any():
            return None
        n, h, j = np.nonzero(bad)
        return self.step.tensor((n * bad.shape[1] + h) * width + col[n, h, j] - start)
