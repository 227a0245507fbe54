"""PagedCache: all classes of a plan, their pools and tables, sequence rows, and the begin / finish of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.layout import CachePlan, Group
from kvlab.cache.pages import Pages
from kvlab.cache.scratch import Scratch
from kvlab.cache.step import Step
from kvlab.cache.tables import ClassTables, Growth
from kvlab.cache.tiles import TileBuilder
from kvlab.errors import CacheTooSmall, InvariantError, NoBlocks
from kvlab.kernels import move
from kvlab.kernels.backend import Moves


@dataclass(frozen=True)
class CacheSize:
    """How much the cache may hold.

    max_seqs          sequences with blocks at the same time
    max_slots         slots of the longest sequence
    max_batch_tokens  new tokens of one step
    pool_bytes        None = enough for max_seqs sequences of max_slots; else the bound on body + tail pools
    tile              tokens gathered at once (a multiple of the block)
    """

    max_seqs: int = 8
    max_slots: int = 2048
    max_batch_tokens: int = 512
    pool_bytes: int | None = None
    tile: int = 256


class PagedCache:
    def __init__(
        self, plan: CachePlan, size: CacheSize, device: torch.device | str = "cpu", moves: Moves = move
    ) -> None:
        """moves: who moves rows and blocks, torch by default."""
        self.moves = moves
        self.plan, self.size, self.device = plan, size, torch.device(device)
        self.scratch = Scratch(device)
        kinds: dict[tuple, list[Group]] = {}
        for group in plan.groups:
            kinds.setdefault((len(group.layers), len(group.heads), group.regions, group.window), []).append(group)
        # One layer must find all its heads in one class: its attention is one rectangle.
        self.classes = [ClassTables(plan, gs, size.max_seqs, size.max_slots, self.device) for gs in kinds.values()]
        self.class_of = {layer: c for c, t in enumerate(self.classes) for layer in t.layers}
        self._allocate()
        self.state = {
            r.name: torch.zeros((size.max_seqs, plan.geom.L, *r.shape), dtype=r.dtype, device=self.device)
            for r in plan.state
        }
        self.state_rows: set[int] = set()  # rows whose state is still needed
        self.free_rows = list(range(size.max_seqs - 1, -1, -1))

    # -- size ----------------------------------------------------------------------------------------------------
    def blocks_for(self, t: ClassTables, body_slots: int, tail_slots: int) -> tuple[int, int]:
        """(body, tail) blocks of one sequence that holds this many slots in every group of the class."""
        B, groups = self.plan.block, len(t.groups)
        if t.window is not None:
            body_slots = min(body_slots, t.window + self.size.max_batch_tokens + B)
        body = groups * -(-body_slots // B)
        return body, groups * -(-tail_slots // B) if self.plan.tail else 0

    def _allocate(self) -> None:
        size, plan = self.size, self.plan
        step_slots = min(size.max_batch_tokens, size.max_slots)
        want = []
        for t in self.classes:
            if plan.stage == "prompt":
                tail_slots, tail_seqs = size.max_slots, size.max_seqs
            else:
                tail_slots, tail_seqs = min(plan.residual + plan.block, size.max_slots), size.max_seqs
            body, tail = self.blocks_for(t, size.max_slots, tail_slots)
            extra = len(t.groups) * (-(-step_slots // plan.block) + size.max_seqs) if plan.tail else 0
            want.append([body * size.max_seqs, tail * tail_seqs + extra if plan.tail else 0])
        if size.pool_bytes is not None:
            want = self._shrink(want, size.pool_bytes)
        for t, (body, tail) in zip(self.classes, want):
            t.allocate(body + 1, max(tail, 1) + 1 if plan.tail else 0, self.moves)

    def _shrink(self, want: list[list[int]], budget: int) -> list[list[int]]:
        """Scale the number of blocks to `budget` bytes, tail and body alike."""
        bytes_ = [(t.body_block_bytes, t.tail_block_bytes) for t in self.classes]
        full = sum(w * b for ws, bs in zip(want, bytes_) for w, b in zip(ws, bs))
        least = sum(len(t.groups) * (b[0] + b[1]) for t, b in zip(self.classes, bytes_))
        if budget < 2 * least:
            raise CacheTooSmall(
                f"runtime.pool_bytes={budget:,} cannot hold two blocks of every group: {2 * least:,} bytes are needed "
                f"(block of {self.plan.block} tokens). Raise runtime.pool_bytes, or use a smaller runtime.block."
            )
        if full <= budget:
            return want
        floor = [[min(w, 2 * len(t.groups)) for w in ws] for t, ws in zip(self.classes, want)]
        fixed = sum(f * b for fs, bs in zip(floor, bytes_) for f, b in zip(fs, bs))
        left, more = budget - fixed, full - fixed
        return [[f + (w - f) * left // more for f, w in zip(fs, ws)] for fs, ws in zip(floor, want)]

    # -- sequences -----------------------------------------------------------------------------------------------
    def add_row(self) -> int:
        """A free row of the tables; its state is cleared."""
        if not self.free_rows:
            raise NoBlocks(f"all {self.size.max_seqs} sequence rows are taken")
        row = self.free_rows.pop()
        for t in self.state.values():
            t[row].zero_()
        if self.state:
            self.state_rows.add(row)
        return row

    def release_state(self, rows: Iterable[int]) -> None:
        """The state of these rows is not needed any more (a pruner that acts once has acted)."""
        self.state_rows.difference_update(int(r) for r in rows)

    def free_row(self, row: int) -> None:
        """Give back every block of a row, and the row."""
        for t in self.classes:
            t.free(row)
        self.state_rows.discard(row)
        self.free_rows.append(row)

    def fork_row(self, src: int, share: bool = True) -> int:
        """A new row that shares all blocks of src (copy-on-write), or copies them all (share=False: slots carry values
        that later steps change), and copies its state. NoBlocks changes nothing."""
        if not self.free_rows:
            raise NoBlocks(f"all {self.size.max_seqs} sequence rows are taken")
        if not share:
            for t in self.classes:
                body, tail = t.blocks(src)
                if len(body) > t.pool.available or (tail and len(tail) > t.tail_pool.available):
                    raise NoBlocks(f"copying {len(body)} + {len(tail)} blocks of a sequence: {self.describe()}")
        dst = self.add_row()
        for t in self.classes:
            t.fork(src, dst)
            if not share:
                t.unshare(dst)
        for s in self.state.values():
            s[dst] = s[src]
        if src not in self.state_rows:
            self.release_state([dst])
        return dst

    # -- steps ---------------------------------------------------------------------------------------------------
    def growth(self, rows: np.ndarray, add: np.ndarray, may_seal: np.ndarray) -> list[Growth]:
        """What a step of add[n] tokens for rows[n] needs, per class; changes nothing."""
        return [t.growth(rows, add, may_seal) for t in self.classes]

    def can_grow(self, growths: list[Growth]) -> bool:
        return all(t.can_grow(g) for t, g in zip(self.classes, growths))

    def begin(self, step: Step, growths: list[Growth], exact: bool = False) -> StepPages:
        """Take every block the step needs (its `growth`), or raise NoBlocks and change nothing."""
        if not self.can_grow(growths):
            raise NoBlocks(f"a step of {step.T} tokens does not fit: {self.describe()}")
        for t, g in zip(self.classes, growths):
            t.grow(step.cache_rows, g)
        return StepPages(self, step, growths, exact)

    def describe(self) -> str:
        parts = [f"class {i}: {t.pool.available}/{t.pool.n_blocks - 1} body" for i, t in enumerate(self.classes)]
        return ", ".join(parts)

    # -- invariants ----------------------------------------------------------------------------------------------
    def check(self, live: dict[int, int] | None = None) -> None:
        """Raise InvariantError unless I1-I9 hold. `live`: {row: tokens computed} to check I7 against."""
        used = set(range(self.size.max_seqs)) - set(self.free_rows)
        for t in self.classes:
            tables = [(t.body, t.pool, t.arrays)] + (
                [(t.tail, t.tail_pool, t.tail_arrays)] if t.tail is not None else []
            )
            for table, pool, arrays in tables:
                pool.check(table[table > 0].tolist())
                if any(bool(x[:: arrays.n_blocks].view(torch.uint8).any()) for x in arrays.block_rows.values()):
                    raise InvariantError("the null block is not zero")
            for row in range(self.size.max_seqs):
                self._check_row(t, row, row in used, (live or {}).get(row))

    def _check_row(self, t: ClassTables, row: int, used: bool, computed: int | None) -> None:
        B = self.plan.block
        for g in range(len(t.groups)):
            n, sealed = int(t.n_slots[row, g]), int(t.sealed[row, g])
            body = int((t.body[row, g] > 0).sum())
            tail = int((t.tail[row, g] > 0).sum()) if t.tail is not None else 0
            want_body, want_tail = (sealed // B, -(-n // B) - sealed // B) if t.tail is not None else (-(-n // B), 0)
            if (body, tail) != (want_body, want_tail) or (not used and n):
                raise InvariantError(
                    f"row {row} group {g}: {n} slots, {sealed} sealed, {body} body and {tail} tail blocks"
                )
            if computed is not None and n + int(t.evicted[row, g]) != computed:
                raise InvariantError(f"row {row} group {g}: {n} slots + {int(t.evicted[row, g])} evicted != {computed}")


class StepPages:
    """The pages of one step, by layer; `finish` once after the forward pass."""

    def __init__(self, cache: PagedCache, step: Step, growths: list[Growth], exact: bool) -> None:
        self.cache, self.step, self.growths, self.exact = cache, step, growths, exact
        geom = cache.plan.geom
        self.by_class = [
            Pages(t, step, g, TileBuilder(t, step, g, cache.size.tile, exact, geom.G, geom.dtype), cache.scratch)
            for t, g in zip(cache.classes, growths)
        ]

    def layer(self, layer: int) -> Pages:
        return self.by_class[self.cache.class_of[layer]]

    def state(self, name: str) -> Tensor:
        """Per-sequence state `[max_seqs, L, *shape]`; index with step.cache_rows."""
        return self.cache.state[name]

    def finish(self) -> None:
        for t, g in zip(self.cache.classes, self.growths):
            t.finish(self.step.cache_rows, g)
