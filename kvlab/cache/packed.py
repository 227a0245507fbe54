"""Attention on packed pages: a cache's arrays bound to kernels that read and write them, and what a step's rows see.

The kernels need no tiles: a `View` holds block tables and each row's visible slots [lo, hi), the same numbers that
tiles are cut from.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.layout import Geom
from kvlab.cache.pages import Pages
from kvlab.cache.step import Bucket
from kvlab.cache.tables import ClassTables
from kvlab.cache.tiles import Source, Tile
from kvlab.kernels.backend import Backend, Layers, View
from kvlab.kernels.cpu.turn import Turn
from kvlab.kernels.format import Format, Refused
from kvlab.kernels.meta import NonFinite

if TYPE_CHECKING:
    from kvlab.cache.paged import StepPages

log = logging.getLogger(__name__)
Bound = dict[Source, Layers]


class Packed:
    """The kernels for one method: `body` and, where there is an exact tail, `tail` say what pages mean."""

    def __init__(self, backend: Backend, label: str, geom: Geom, body: Format, tail: Format, fast: bool) -> None:
        self.backend, self.label, self.geom, self.fast = backend, label, geom, fast
        self.formats: dict[Source, Format] = {"body": body, "tail": tail}
        self.warning = ""  # what a run should know, once the kernels were asked
        self._bound: dict[ClassTables, Bound | None] = {}

    def bound(self, t: ClassTables) -> Bound | None:
        """Kernels for each source of a class; None: the torch path, which was said once."""
        if t not in self._bound:
            try:
                sources: tuple[Source, ...] = ("body",) if t.tail is None else ("body", "tail")
                self._bound[t] = {s: self._bind(t, s) for s in sources}
                if self.fast and not any(x.words for x in self._bound[t].values()):
                    self.warning = (
                        f"{self.label}: runtime.arithmetic=fast changes nothing, its pages hold no codes that are "
                        "multiplied as bytes (up to 5 bits, rows of 16 bytes or more)"
                    )
                    log.warning(self.warning)
            except Refused as why:
                self._bound[t] = None
                self.warning = f"{self.label} runs on the torch path, which is slower: {why}"
                log.warning(self.warning)
        return self._bound[t]

    def _bind(self, t: ClassTables, source: Source) -> Layers:
        arrays, pool = (t.arrays, t.pool) if source == "body" else (t.tail_arrays, t.tail_pool)
        flat = {n: arrays.token_rows.get(n, rows) for n, rows in arrays.block_rows.items()}
        return self.backend.layers(
            self.formats[source], flat, t.block, t.layers, t.group_of, arrays.row(0, t.place), 1, pool.n_blocks,
            self.geom.G, self.geom.scale, dtype=self.geom.dtype,
        )  # fmt: skip

    def settle(self) -> None:
        """After a step: NonFinite if kernels that do not wait have met a number that cannot be stored."""
        if bad := self.backend.bad():
            raise NonFinite(
                f"{self.label}: layers {bad}: a key or value is NaN or infinite, or its scale does not fit its type. "
                "Ways out: runtime.kernels=off names the number and its place; a float32 type for scales "
                "(method.meta_dtype or norm_dtype) if they are too large for float16."
            )

    # -- writing: False = it is up to the reference, which also says what is wrong with a bad number ---------------
    def append(self, layer: int, k: Tensor, v: Tensor, p: Pages) -> bool:
        """This step's k, v [1, Hk, T, D] into the tail if there is one, else the body."""
        bound, to = self.bound(p.t), "body" if p.t.tail is None else "tail"
        if bound is None or not bound[to].appends:
            return False
        k, v = (x[0] if self.backend.takes(x.dtype) else x[0].float() for x in (k, v))
        return bound[to].append(p.t.layer_index[layer], k, v, p.write_rows(layer))

    def seal(self, layer: int, p: Pages, src: Tensor, dst: Tensor) -> bool:
        """Block rows src of the tail, encoded to block rows dst of the body."""
        bound, tail = self.bound(p.t), p.t.tail_arrays.block_rows
        if bound is None or not self._seals(bound, p):
            return False
        return bound["body"].seal(p.t.layer_index[layer], tail["k"], tail["v"], src, dst)

    # -- reading -------------------------------------------------------------------------------------------------
    def reads(self, p: Pages, bucket: Bucket) -> bool:
        """Whether kernels read everything that the bucket attends to. Not a chunk's own keys as they come."""
        return not (p.builder.exact and bucket.prefill and p.t.tail is None) and self.bound(p.t) is not None

    def attend_rows(self, layer: int, q: Tensor, out: Tensor, p: Pages, bucket: Bucket) -> None:
        """q, out [T, H, D]: the bucket's rows where they lie, in a type that the kernels take."""
        self._attend(layer, q, out, torch.empty(q.shape[:2], device=q.device), p, bucket, folded=False)

    def attend(self, layer: int, q: Tensor, p: Pages, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """q [N, Hk, G * rows, D] -> (out, lse) float32; rows that only pad the bucket are zero."""
        q, rows = q.float().contiguous(), bucket.rows
        out, lse = torch.zeros_like(q), torch.zeros(q.shape[:3], device=q.device)
        self._attend(layer, _strided(q, rows), _strided(out, rows), _strided(lse, rows), p, bucket, folded=True)
        return out, lse

    def _attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor, p: Pages, bucket: Bucket, folded: bool) -> None:
        join = False
        for source, layers in self.bound(p.t).items():
            if (seen := self.view(p, bucket, source, folded)) is not None:
                layers.attend(p.t.layer_index[layer], seen, q, out, lse, join)
                join = True

    # -- all layers at once --------------------------------------------------------------------------------------
    def turn(self, pages: StepPages, encodes: bool) -> Turn:
        """A step's writing, sealing and reading of all layers, all of it the kernels'. encodes: a written token counts
        as encoded where there is no tail."""
        turn = Turn(pages.cache.plan.geom.L)
        for p in pages.by_class:
            bound, to = self.bound(p.t), "body" if p.t.tail is None else "tail"
            turn.write(bound[to], p.all_write_rows())
            turn.encoded += encodes * len(p.t.layers) * (p.t.tail is None)
            if (pairs := p.all_seal_rows()) is not None:
                (src, dst, _), tail = pairs, p.t.tail_arrays.block_rows
                turn.move(bound["body"], tail["k"], tail["v"], src, dst)
                turn.encoded += dst.numel()
            for bucket in p.step.buckets:
                views = [(layers, self.view(p, bucket, source, folded=False)) for source, layers in bound.items()]
                for j, (layers, seen) in enumerate([x for x in views if x[1] is not None]):
                    turn.read(layers, seen, join=j > 0)
        return turn

    def all_of(self, pages: StepPages) -> bool:
        """Whether kernels do everything between the model and its pages in this step."""
        for p in pages.by_class:
            bound, to = self.bound(p.t), "body" if p.t.tail is None else "tail"
            if bound is None or not bound[to].appends or not all(self.reads(p, b) for b in p.step.buckets):
                return False
            if p.t.tail is not None:
                real = p.seal_pairs[2]
                if real.size and not (real.all() and self._seals(bound, p)):
                    return False
        return True

    def _seals(self, bound: Bound, p: Pages) -> bool:
        return bound["body"].seals and len(p.t.tail_arrays.block_rows) == 2

    def received(self, layer: int, q: Tensor, lse: Tensor, p: Pages, bucket: Bucket) -> list[tuple[Tile, Tensor]]:
        """Compressor.received, a source at a time."""
        q, lse, out = q.float().contiguous(), lse.contiguous(), []
        for source, layers in self.bound(p.t).items():
            if (seen := self.view(p, bucket, source, folded=True)) is None:
                continue
            tile = p.builder.whole(bucket, source, layer, seen.blocks)
            rows = _strided(q, bucket.rows), _strided(lse, bucket.rows)
            out.append((tile, layers.mass(p.t.layer_index[layer], seen, *rows, tile.width)))
        return out

    def view(self, p: Pages, bucket: Bucket, source: Source, folded: bool) -> View | None:
        """What the bucket's rows see of a source, made once a step; None = nothing. folded: query rows come as
        [Nb, H, rows], so that sequence n's start at n * H * rows; else they are the packed rows of the step."""
        key = (id(bucket), source, folded)
        if key not in p.views:
            arrays = seen(p, bucket, source, folded)
            p.views[key] = None if arrays is None else self.backend.view(*arrays)
        return p.views[key]


def seen(p: Pages, bucket: Bucket, source: Source, folded: bool) -> tuple[np.ndarray, ...] | None:
    """(table, lo, hi, first, count) of a `Backend.view`; None = these rows see nothing of the source."""
    t, m = p.t, bucket.members
    lo, hi = p.builder.visible(bucket, source)
    some = hi > lo
    lo, hi = np.where(some, lo, 0), np.where(some, hi, 0)
    end = int(hi.max())
    if not end:
        return None
    table = t.body if source == "body" else t.tail
    span = table[p.step.cache_rows[m], :, : -(-end // t.block)]
    first = np.arange(len(m)) * (p.builder.G * p.heads * bucket.rows) if folded else p.step.cu[m]
    return span, lo, hi, first, p.step.q_len[m]


def _strided(x: Tensor, rows: int) -> Tensor:
    """Folded [N, Hk, G * rows, (D)] as the kernels' [row, H, (D)], for sequence 0: the next begins H * rows rows on."""
    H = x.shape[1] * x.shape[2] // rows
    W = x.shape[3] if x.dim() == 4 else 1
    return x.as_strided((rows, H, W) if x.dim() == 4 else (rows, H), (W, rows * W, 1) if x.dim() == 4 else (1, rows))
