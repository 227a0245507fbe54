"""The only access to pages inside a step: gather tiles, scatter tokens, pair exact blocks with their sealed form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.arrays import Arrays
from kvlab.cache.scratch import Scratch
from kvlab.cache.step import Bucket, Step
from kvlab.cache.tables import ClassTables, Growth
from kvlab.cache.tiles import Source, Tile, TileBuilder
from kvlab.kernels.backend import View


class Pages:
    """Views of one class (the layers it serves) in one step."""

    def __init__(self, tables: ClassTables, step: Step, growth: Growth, builder: TileBuilder, scratch: Scratch):
        self.t, self.step, self.growth, self.builder, self.scratch = tables, step, growth, builder, scratch
        self.block = tables.block
        self._write: Tensor | None = None
        self._stored: Pages | None = None
        self._seal: tuple[Tensor, Tensor, Tensor | None] | None = None
        self.views: dict[tuple, View | None] = {}  # of packed.view

    def fix(self, write: Tensor, seal: tuple[Tensor, Tensor, None] | None, views: dict[tuple, View | None]) -> None:
        """Take what a step's rows write, seal and see as it is given (cache/fixed.py), not from tables."""
        self._write, self._seal, self.views = write, seal, views

    def arrays(self, source: Source) -> Arrays:
        return self.t.stored(source == "tail")[1]

    def stored(self) -> Pages:
        """These pages, this step's tokens read from where they were written: no tile of source "chunk"."""
        b = self.builder
        if not b.exact or self.t.tail is not None:
            return self
        if self._stored is None:
            builder = TileBuilder(self.t, self.step, self.growth, b.width, False, b.G, b.dtype)
            self._stored = Pages(self.t, self.step, self.growth, builder, self.scratch)
        return self._stored

    # -- reading -------------------------------------------------------------------------------------------------
    def tiles(self, bucket: Bucket, layer: int) -> Iterator[Tile]:
        """Every tile the bucket's rows read in this layer, body first."""
        for source in self.builder.sources(bucket):
            yield from self.builder.tiles(bucket, source, layer)

    def gather(self, tile: Tile, layer: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Regions of a tile: [Nb, Hk, width, *shape], or [Nb, Hk, width/B, *shape] for block regions. Reused memory:
        valid until the next gather of the same region."""
        arrays, rows, out = self.arrays(tile.source), tile.rows, {}
        if tile.layer_step:
            rows = rows + tile.layer_step * self.t.layer_index[layer]
        for name in names:
            region, flat = arrays.regions[name], arrays.block_rows[name]
            buffer = self.scratch.get(name, (len(rows), flat.shape[1]), region.dtype)
            torch.index_select(flat, 0, rows, out=buffer)
            slots = tile.width if region.scope == "token" else tile.width // self.block
            out[name] = buffer.view(-1, self.heads, slots, *region.shape)
        return out

    @property
    def heads(self) -> int:
        return self.t.group_of.shape[1]

    # -- writing -------------------------------------------------------------------------------------------------
    def write_rows(self, layer: int) -> Tensor:
        """Token rows where this step's tokens go, int64 [Hk * T], in the tail if there is one, else in the body."""
        return self.all_write_rows()[self.t.layer_index[layer]]

    def all_write_rows(self) -> Tensor:
        """`write_rows` of every layer of the class, int64 [Lc, Hk * T]."""
        if self._write is None:
            self._write = self.step.tensor(self.find_write_rows().reshape(len(self.t.layers), -1))
        return self._write

    def find_write_rows(self) -> np.ndarray:
        """int64 [Lc, Hk, T]"""
        t, step, B = self.t, self.step, self.block
        slot = self.growth.before[step.row_seq] + step.row_at[:, None]  # [T, groups]
        table, arrays = t.stored(t.tail is not None)
        block = table[step.cache_rows[step.row_seq][:, None], np.arange(slot.shape[1])[None], slot // B]
        row = block.astype(np.int64) * B + slot % B  # of the flat [.., B] token view, at the first place
        return arrays.row(row.T[t.group_of], t.place[..., None] * B)

    def write_at(self, layer: int, rows: np.ndarray, slots: np.ndarray, values: dict[str, Tensor]) -> None:
        """Overwrite encoded slots that only these sequences hold: rows [N] cache rows, slots [N, k], values {region:
        [N, Hk, k, *shape]}."""
        t, li = self.t, self.t.layer_index[layer]
        block = t.body[rows[:, None, None], np.arange(len(t.groups))[None, :, None], slots[:, None] // self.block]
        block = block[:, t.group_of[li]].astype(np.int64)  # [N, Hk, k]
        row = t.arrays.row(block, t.place[li][:, None])
        at = self.step.tensor((row * self.block + (slots % self.block)[:, None]).ravel())
        for name, value in values.items():
            flat = t.arrays.token_rows[name]
            flat.index_copy_(0, at, value.reshape(len(at), flat.shape[1]).to(flat.dtype))

    def scatter(self, layer: int, values: dict[str, Tensor]) -> None:
        """Write this step's T tokens: {region: [1, Hk, T, *shape]}."""
        arrays = self.arrays("body" if self.t.tail is None else "tail")
        rows = self.write_rows(layer)
        for name, value in values.items():
            flat = arrays.token_rows[name]
            flat.index_copy_(0, rows, value.reshape(len(rows), flat.shape[1]).to(flat.dtype))

    # -- sealing -------------------------------------------------------------------------------------------------
    def seal_rows(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """(tail block rows [M*Hk], body block rows [M*Hk], which of them are real) for what this step seals;
        None = nothing.

        M counts (sequence, logical block); where heads seal different blocks (ragged tables) some entries are not real.
        """
        pairs = self.all_seal_rows()
        return None if pairs is None else tuple(x if x is None else x[self.t.layer_index[layer]] for x in pairs)

    def all_seal_rows(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """`seal_rows` of every layer of the class, [Lc, M*Hk] each."""
        if self.t.tail is None:
            return None
        if self._seal is None:
            src, dst, real = self.seal_pairs
            if not src.size:
                return None
            flat = [self.step.tensor(x.reshape(len(x), -1)) for x in (src, dst)]
            self._seal = *flat, None if real.all() else self.step.tensor(real.reshape(len(real), -1))
        return self._seal

    @cached_property
    def seal_pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tail block rows, body block rows, which are real) [Lc, M, Hk], of a class with a tail."""
        t, rows = self.t, self.step.cache_rows
        lo, hi = self.growth.body  # [N, groups]
        if not self.growth.need[0]:  # most steps
            none = np.zeros((len(t.layers), 0, self.heads), np.int64)
            return none, none, none.astype(bool)
        spans = [np.arange(a, b) for a, b in zip(lo.min(1), hi.max(1))]
        n, i = np.repeat(np.arange(len(rows)), [len(s) for s in spans]), np.concatenate(spans)
        real = (i[:, None] >= lo[n]) & (i[:, None] < hi[n])  # [M, groups]
        at = (rows[n][:, None], np.arange(real.shape[1])[None], i[:, None])
        pair = []
        for table, arrays in (t.stored(True), t.stored(False)):
            block = np.where(real, table[at], 0)[:, t.group_of].transpose(1, 0, 2).astype(np.int64)  # [Lc, M, Hk]
            pair.append(arrays.row(block, t.place[:, None]))
        return pair[0], pair[1], real[:, t.group_of].transpose(1, 0, 2)
