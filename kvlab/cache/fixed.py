"""Pages of a decoding step at fixed places on the device: what a recorded step reads and each real step fills.

A recorded step (a CUDA graph) replays launches with the pointers and sizes of the day it was recorded. So its block
tables, row ranges, write rows and seal pairs are views of two flat buffers, one per integer type; a step fills each by
one copy from a host buffer of its own (pinned for a GPU), which nobody writes again: a copy that is still under way
never sees a later step's numbers. Rows beyond the real ones are padding: they write to row -1, which is nowhere, and
see nothing.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.packed import Packed, seen
from kvlab.cache.paged import PagedCache, StepPages
from kvlab.cache.pages import Pages
from kvlab.cache.step import DECODE, Step
from kvlab.cache.tiles import TileBuilder

ALIGNED = 16  # bytes: kernels are compiled anew for arrays that begin elsewhere


class Buffers:
    """Named views of one flat device buffer. shapes: {name: (shape, what stands beyond the values of a step)}."""

    def __init__(
        self, shapes: dict[str, tuple[tuple[int, ...], int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes, self.pinned = shapes, device.type == "cuda"
        each = ALIGNED // dtype.itemsize
        self.sizes = [-(-math.prod(shape) // each) * each for shape, _ in shapes.values()]
        self.flat = torch.empty(sum(self.sizes), dtype=dtype, device=device)
        parts = zip(shapes.items(), self.flat.split(self.sizes))
        self.views = {n: x[: math.prod(shape)].view(shape) for (n, (shape, _)), x in parts}
        self.fill({})

    def fill(self, values: dict[str, np.ndarray]) -> None:
        """Each array goes to the first corner of its view."""
        host = torch.empty(self.flat.shape, dtype=self.flat.dtype, pin_memory=self.pinned)
        for (name, (shape, beyond)), part in zip(self.shapes.items(), host.split(self.sizes)):
            part = part[: math.prod(shape)].numpy().reshape(shape)
            part.fill(beyond)
            if name in values:
                part[tuple(slice(n) for n in values[name].shape)] = values[name]
        self.flat.copy_(host, non_blocking=True)


class FixedPages:
    """`StepPages` of up to n sequences with one token each, whose tables have up to `blocks` columns."""

    def __init__(self, cache: PagedCache, packed: Packed, n: int, blocks: int) -> None:
        self.cache, self.n, self.blocks = cache, n, blocks
        zeros, phase = np.zeros(n, np.int64), np.full(n, DECODE, np.int8)
        self.step = Step(zeros, zeros + 1, zeros, phase, zeros, cache.device)
        rows, tables = {"ids": ((n,), 0), "positions": ((n,), 0)}, {"first": ((n,), 0), "count": ((n,), 0)}
        for c, t in enumerate(cache.classes):
            Lc, Hk = t.group_of.shape
            rows[f"{c} write"] = ((Lc, Hk, n), -1)
            for source in ("body",) if t.tail is None else ("body", "tail"):
                tables[f"{c} {source} table"] = ((n, len(t.groups), min(blocks, t.max_blocks)), 0)
                tables |= {f"{c} {source} {end}": ((n, len(t.groups), 1), 0) for end in ("lo", "hi")}
            if t.tail is not None:
                rows |= {f"{c} {end}": ((Lc, n, Hk), -1) for end in ("src", "dst")}
        self.rows = Buffers(rows, torch.int64, cache.device)
        self.tables = Buffers(tables, torch.int32, cache.device)
        self.by_class = [self._pages(c, packed) for c in range(len(cache.classes))]

    def _pages(self, c: int, packed: Packed) -> Pages:
        t, plan = self.cache.classes[c], self.cache.plan
        builder = TileBuilder(t, self.step, None, self.cache.size.tile, False, plan.geom.G, plan.geom.dtype)
        pages, (bucket,) = Pages(t, self.step, None, builder, self.cache.scratch), self.step.buckets
        rows, tables = self.rows.views, self.tables.views
        seal = None
        if t.tail is not None:
            seal = *(rows[f"{c} {end}"].flatten(1) for end in ("src", "dst")), None
        views = {}
        for source in ("body",) if t.tail is None else ("body", "tail"):
            own = [tables[f"{c} {source} {x}"] for x in ("table", "lo", "hi")]
            views[(id(bucket), source, False)] = packed.backend.fixed(*own, tables["first"], tables["count"])
        pages.fix(rows[f"{c} write"].flatten(1), seal, views)
        return pages

    @property
    def ids(self) -> Tensor:
        return self.rows.views["ids"]

    @property
    def positions(self) -> Tensor:
        return self.rows.views["positions"]

    def layer(self, layer: int) -> Pages:
        return self.by_class[self.cache.class_of[layer]]

    def fill(self, pages: StepPages, ids: list[int]) -> int:
        """What a real step of N <= n decoding rows is. Returns the blocks that it seals, of all layers and heads."""
        step, sealed = pages.step, 0
        rows = {"ids": np.array(ids), "positions": step.positions}
        tables = {"first": np.arange(step.N), "count": step.q_len}
        for c, p in enumerate(pages.by_class):
            rows[f"{c} write"] = p.find_write_rows()
            for source in ("body",) if p.t.tail is None else ("body", "tail"):
                if (arrays := seen(p, step.buckets[0], source, folded=False)) is not None:
                    tables |= {f"{c} {source} {x}": a for x, a in zip(("table", "lo", "hi"), arrays)}
            if p.t.tail is not None:
                src, dst, real = p.seal_pairs
                rows |= {f"{c} src": np.where(real, src, -1), f"{c} dst": np.where(real, dst, -1)}
                sealed += int(real.sum())
        self.rows.fill(rows)
        self.tables.fill(tables)
        return sealed


def fits(pages: StepPages, n: int) -> bool:
    """Whether n rows of `FixedPages` hold a step: one token a sequence, and one block a sequence to seal."""
    step = pages.step
    if len(step.q_len) > n or (step.q_len != 1).any() or (step.phase != DECODE).any():
        return False
    return all(p.t.tail is None or p.seal_pairs[0].shape[1] <= n for p in pages.by_class)


def blocks_of(pages: StepPages) -> int:
    """Columns of the widest block table that a step reads."""
    return max(-(-int(p.growth.after.max()) // p.block) for p in pages.by_class)
