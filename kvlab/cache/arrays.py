"""The bytes of one size class: an array per region, `[n_blocks, layers, heads, (B,) *shape]`, sharing block ids."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvlab import hugepages
from kvlab.cache.layout import Region
from kvlab.kernels import move
from kvlab.kernels.backend import Moves


class Arrays:
    """Storage of `n_blocks` blocks. Block 0 is zero and stays zero; the others start as whatever memory held."""

    def __init__(
        self, regions: tuple[Region, ...], n_blocks: int, layers: int, heads: int, block: int, device: torch.device,
        moves: Moves = move,
    ) -> None:  # fmt: skip
        """moves: who moves rows and blocks, torch by default."""
        self.moves = moves
        self.regions = {r.name: r for r in regions}
        self.n_blocks, self.layers, self.heads, self.block = n_blocks, layers, heads, block
        self.data: dict[str, Tensor] = {}
        for r in regions:
            inner = (block, *r.shape) if r.scope == "token" else r.shape
            self.data[r.name] = hugepages.empty((n_blocks, layers, heads, *inner), r.dtype, device)
            self.data[r.name][0].zero_()
        # Flat views: one row per (block, layer, head) for reads, one row per token for writes and compaction.
        rows = n_blocks * layers * heads
        self.block_rows = {n: t.view(rows, -1) for n, t in self.data.items()}
        self.token_rows = {
            n: t.view(rows * block, math.prod(self.regions[n].shape))
            for n, t in self.data.items()
            if self.regions[n].scope == "token"
        }

    @property
    def block_bytes(self) -> int:
        return self.layers * self.heads * sum(r.bytes(self.block) for r in self.regions.values())

    def nbytes(self) -> int:
        """Bytes of the live storages (not a formula)."""
        return sum(t.untyped_storage().nbytes() for t in self.data.values())

    def copy_blocks(self, src: Tensor, dst: Tensor) -> None:
        """Copy whole blocks, all regions and layers: copy-on-write. src, dst int64 [k], disjoint."""
        self.moves.copy_blocks(list(self.data.values()), src, dst)

    def move_rows(self, src: Tensor, dst: Tensor) -> None:
        """Token rows src to dst, int64 [k], of all regions: every row is read before any is written."""
        for flat in self.token_rows.values():
            self.moves.move_rows(flat, src, dst)

    def fill_garbage(self, seed: int = 0) -> None:
        """Random bytes, NaN patterns included, in every block but the null block: what tests run on."""
        gen = torch.Generator().manual_seed(seed)
        for t in self.data.values():
            raw = torch.randint(0, 256, (t[1:].numel() * t.element_size(),), dtype=torch.uint8, generator=gen)
            t[1:] = raw.view(t.dtype).view(t[1:].shape)
            if t.is_floating_point():  # a quarter of the values are NaN for certain
                flat = t[1:].reshape(-1)
                flat[::4] = float("nan")
                t[1:] = flat.view(t[1:].shape)
