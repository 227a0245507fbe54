"""The bytes of one size class: an array per region, sharing block ids.

In memory an array is `[layers, heads, n_blocks, (B,) *shape]`: what a kernel reads of a layer and head lies in few
pages of memory, in whatever order its blocks are (docs/log.md has what that saves).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kvlab import hugepages
from kvlab.cache.layout import Region
from kvlab.kernels import move
from kvlab.kernels.backend import Moves

Index = int | np.ndarray | Tensor


class Arrays:
    """Storage of `n_blocks` blocks. Block 0 is zero and stays zero; the others start as whatever memory held.

    data         {region: [n_blocks, layers, heads, (B,) *shape]}, a view
    block_rows   {region: [layers * heads * n_blocks, ...]}: a row per (layer, head, block), see `row`
    token_rows   {region: [layers * heads * n_blocks * B, ...]}: a row per token, of token regions
    """

    def __init__(
        self, regions: tuple[Region, ...], n_blocks: int, layers: int, heads: int, block: int, device: torch.device,
        moves: Moves = move,
    ) -> None:  # fmt: skip
        """moves: who moves rows and blocks, torch by default."""
        self.moves = moves
        self.regions = {r.name: r for r in regions}
        self.n_blocks, self.layers, self.heads, self.block = n_blocks, layers, heads, block
        self.data: dict[str, Tensor] = {}
        self.block_rows: dict[str, Tensor] = {}
        self.token_rows: dict[str, Tensor] = {}
        rows = layers * heads * n_blocks
        for r in regions:
            inner = (block, *r.shape) if r.scope == "token" else r.shape
            storage = hugepages.empty((layers, heads, n_blocks, *inner), r.dtype, device)
            storage[:, :, 0].zero_()
            self.data[r.name] = storage.movedim(2, 0)
            self.block_rows[r.name] = storage.view(rows, -1)
            if r.scope == "token":
                self.token_rows[r.name] = storage.view(rows * block, math.prod(r.shape))

    def row(self, block: Index, place: Index) -> Index:
        """The row in `block_rows` of a block at a place: layer * heads + head, by their index in the class."""
        return block + place * self.n_blocks

    def block_of(self, row: Index) -> Index:
        return row % self.n_blocks

    @property
    def block_bytes(self) -> int:
        return self.layers * self.heads * sum(r.bytes(self.block) for r in self.regions.values())

    def nbytes(self) -> int:
        """Bytes of the live storages (not a formula)."""
        return sum(t.untyped_storage().nbytes() for t in self.data.values())

    def copy_blocks(self, src: Tensor, dst: Tensor) -> None:
        """Copy whole blocks, all regions and layers: copy-on-write. src, dst int64 [k], disjoint."""
        place = torch.arange(self.layers * self.heads, device=src.device)[:, None]
        rows = (self.row(x, place).flatten() for x in (src, dst))
        self.moves.copy_blocks(list(self.block_rows.values()), *rows)

    def move_rows(self, src: Tensor, dst: Tensor) -> None:
        """Token rows src to dst, int64 [k], of all regions: every row is read before any is written."""
        for flat in self.token_rows.values():
            self.moves.move_rows(flat, src, dst)

    def fill_garbage(self, seed: int = 0) -> None:
        """Random bytes, NaN patterns included, in every block but the null block: what tests run on."""
        gen = torch.Generator().manual_seed(seed)
        for t in self.data.values():
            raw = torch.randint(0, 256, (t[1:].numel() * t.element_size(),), dtype=torch.uint8, generator=gen)
            garbage = raw.view(t.dtype)
            if t.is_floating_point():  # a quarter of the values are NaN for certain
                garbage[::4] = float("nan")
            t[1:] = garbage.view(t[1:].shape)
