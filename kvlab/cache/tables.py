"""Block tables of one size class: which block holds which slots of which sequence and group.

A size class is all groups with equal block shape and equal window; they share one body pool and, when the plan has an
exact tail, one tail pool. Logical block i of a group covers its slots [iB, (i+1)B). Its encoded form is `body[row, g,
i]`, its exact form `tail[row, g, i]`; 0 is the null block. Counters are vectors over rows and groups: nothing here
loops over the sequences of a step except where blocks are really shared or dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvlab.cache.arrays import Arrays
from kvlab.cache.layout import CachePlan, Group
from kvlab.cache.pool import BlockPool
from kvlab.errors import NoBlocks
from kvlab.kernels import move
from kvlab.kernels.backend import Moves


def _missing(lo: np.ndarray, hi: np.ndarray) -> int:
    """Blocks in all ranges [lo, hi) that are not empty."""
    return int(np.maximum(hi - lo, 0).sum())


@dataclass
class Growth:
    """What one step needs of a class, worked out before anything changes. Arrays are [N, groups]."""

    before: np.ndarray  # slots held now
    after: np.ndarray  # slots after the step's tokens
    sealed_to: np.ndarray  # slots that will be encoded by the end of the step
    body: tuple[np.ndarray, np.ndarray]  # logical block ranges [from, to) that need a body block
    tail: tuple[np.ndarray, np.ndarray]
    cow: list[tuple[int, int, int]]  # (row, group, logical block): the open block is shared and must be copied
    need: tuple[int, int] = (0, 0)  # (body, tail) blocks, copies included


class ClassTables:
    def __init__(self, plan: CachePlan, groups: list[Group], max_seqs: int, max_slots: int, device: torch.device):
        first = groups[0]
        self.plan, self.groups, self.window = plan, groups, first.window
        self.block, self.residual = plan.block, plan.residual
        self.layers_of_group, self.heads_of_group = len(first.layers), len(first.heads)
        self.layers = sorted({layer for g in groups for layer in g.layers})
        self.device = device
        Hk = plan.geom.Hk
        shape = (len(self.layers), Hk)
        self.places = self.layers_of_group * self.heads_of_group
        # Of a head: its group, and its place there (Arrays.row).
        self.group_of, self.place = (np.zeros(shape, np.int64) for _ in range(2))
        index = {layer: i for i, layer in enumerate(self.layers)}
        for g, group in enumerate(groups):
            for li, layer in enumerate(group.layers):
                for hi, head in enumerate(group.heads):
                    at = (index[layer], head)
                    self.group_of[at], self.place[at] = g, li * self.heads_of_group + hi
        self.layer_index = index
        self.uniform = len(groups) == 1
        self.max_blocks = -(-max_slots // self.block) + 1
        dims = (max_seqs, len(groups))
        self.body = np.zeros((*dims, self.max_blocks), np.int32)
        self.tail = np.zeros((*dims, self.max_blocks), np.int32) if plan.tail else None
        self.n_slots, self.sealed, self.evicted = (np.zeros(dims, np.int64) for _ in range(3))

    def allocate(self, body_blocks: int, tail_blocks: int, moves: Moves = move) -> None:
        """Make the pools and their storages; `+1` for the null block is the caller's."""
        shape = (self.layers_of_group, self.heads_of_group, self.block, self.device, moves)
        self.pool = BlockPool(body_blocks)
        self.arrays = Arrays(self.groups[0].regions, body_blocks, *shape)
        self.tail_pool = BlockPool(tail_blocks) if self.plan.tail else None
        self.tail_arrays = Arrays(self.plan.tail, tail_blocks, *shape) if self.plan.tail else None

    def stored(self, tail: bool) -> tuple[np.ndarray, Arrays]:
        """(table, storages) of the exact tail, else of the body."""
        return (self.tail, self.tail_arrays) if tail else (self.body, self.arrays)

    @property
    def body_block_bytes(self) -> int:
        return self.groups[0].block_bytes(self.block)

    @property
    def tail_block_bytes(self) -> int:
        return self.places * sum(r.bytes(self.block) for r in self.plan.tail)

    # -- growing -------------------------------------------------------------------------------------------------
    def growth(self, rows: np.ndarray, add: np.ndarray, may_seal: np.ndarray) -> Growth:
        """rows, add, may_seal: [N]. `may_seal` false: the prompt is still staged, nothing is sealed."""
        B = self.block
        before = self.n_slots[rows]
        after = before + add[:, None]
        have, want = -(-before // B), -(-after // B)
        sealed = self.sealed[rows]
        if self.tail is None:
            sealed_to, body, tail = after, (have, want), (want, want)
            table, pool = self.body, self.pool
        else:
            target = B * (np.maximum(after - self.residual, 0) // B)
            sealed_to = np.where(may_seal[:, None], np.maximum(target, sealed), sealed)
            body, tail = (sealed // B, sealed_to // B), (have, want)
            table, pool = self.tail, self.tail_pool
        cow = []
        if pool.shared and (before % B).any():
            last = np.maximum(before - 1, 0) // B
            ids = table[rows[:, None], np.arange(last.shape[1]), last]
            shared = np.frombuffer(pool.ref, np.int32)[ids] > 1
            leaving: dict[int, int] = {}  # owners that get a copy in this step; the last one writes in place
            for n, g in zip(*np.nonzero(shared & (before % B > 0) & (add[:, None] > 0))):
                block = int(ids[n, g])
                if pool.ref[block] - leaving.get(block, 0) > 1:
                    leaving[block] = leaving.get(block, 0) + 1
                    cow.append((int(rows[n]), int(g), int(last[n, g])))
        need = [_missing(*body), 0 if self.tail is None else _missing(*tail)]
        need[self.tail is not None] += len(cow)
        return Growth(before, after, sealed_to, body, tail, cow, tuple(need))

    def can_grow(self, growth: Growth) -> bool:
        body, tail = growth.need
        return body <= self.pool.available and (not tail or tail <= self.tail_pool.available)

    def grow(self, rows: np.ndarray, growth: Growth) -> None:
        """Take the blocks and do the copies-on-write. Raises NoBlocks with nothing changed."""
        if not self.can_grow(growth):
            body, tail = growth.need
            raise NoBlocks(f"step needs {body} body and {tail} tail blocks")
        self._fill(self.body, self.pool, rows, *growth.body)
        if self.tail is not None:
            self._fill(self.tail, self.tail_pool, rows, *growth.tail)
        if growth.cow:
            table, pool, arrays = (
                (self.body, self.pool, self.arrays)
                if self.tail is None
                else (self.tail, self.tail_pool, self.tail_arrays)
            )
            old = [int(table[at]) for at in growth.cow]
            new = pool.alloc(len(old))
            arrays.copy_blocks(self._ids(old), self._ids(new))
            for at, block in zip(growth.cow, new):
                table[at] = block
            for block in old:
                pool.decref(block)
        self.n_slots[rows] = growth.after

    def _ids(self, blocks: list[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.device)

    @staticmethod
    def _fill(table: np.ndarray, pool: BlockPool, rows: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> None:
        count = np.maximum(hi - lo, 0)
        total = int(count.sum())
        if not total:
            return
        flat = count.ravel()
        n, g = np.divmod(np.repeat(np.arange(flat.size), flat), count.shape[1])
        within = np.arange(total) - np.repeat(np.cumsum(flat) - flat, flat)
        table[rows[n], g, lo[n, g] + within] = pool.alloc(total)

    def finish(self, rows: np.ndarray, growth: Growth) -> None:
        """After the forward pass: release the exact form of what was sealed, drop blocks that left the window."""
        if self.tail is not None and growth.need[0]:  # something was sealed
            for n, g in zip(*np.nonzero(growth.sealed_to > self.sealed[rows])):
                lo, hi = int(self.sealed[rows[n], g]) // self.block, int(growth.sealed_to[n, g]) // self.block
                self.drop_tail(int(rows[n]), int(g), lo, hi)
        self.sealed[rows] = growth.sealed_to
        if self.window is not None:
            self._drop_window(rows)

    def drop_tail(self, row: int, group: int, lo: int, hi: int) -> None:
        """Free the exact form of logical blocks [lo, hi)."""
        span = self.tail[row, group, lo:hi]
        self.tail_pool.free_table([b for b in span.tolist() if b])
        span[:] = 0

    def _drop_window(self, rows: np.ndarray) -> None:
        """The next query, at slot n, sees slots > n - window: whole blocks before that are freed."""
        B = self.block
        dead = np.maximum(self.n_slots[rows] - self.window + 1, 0) // B
        dead = np.minimum(dead, self.sealed[rows] // B)
        for n, g in zip(*np.nonzero(dead)):
            self.drop_front(int(rows[n]), int(g), int(dead[n, g]))

    def drop_front(self, row: int, group: int, k: int) -> None:
        """Free the first k (sealed) blocks of a group and shift its table."""
        self.pool.free_table(self.body[row, group, :k].tolist())
        for table in (self.body,) if self.tail is None else (self.body, self.tail):
            table[row, group, :-k] = table[row, group, k:].copy()
            table[row, group, -k:] = 0
        for counter, sign in ((self.n_slots, -1), (self.sealed, -1), (self.evicted, 1)):
            counter[row, group] += sign * k * self.block

    # -- whole sequences -----------------------------------------------------------------------------------------
    def blocks(self, row: int) -> tuple[list[int], list[int]]:
        """(body, tail) block ids of a row, all groups, logical order."""
        body = self.body[row][self.body[row] > 0].tolist()
        tail = self.tail[row][self.tail[row] > 0].tolist() if self.tail is not None else []
        return body, tail

    def fork(self, src: int, dst: int) -> None:
        """dst shares every block of src, the open and exact ones included."""
        body, tail = self.blocks(src)
        for b in body:
            self.pool.incref(b)
        for b in tail:
            self.tail_pool.incref(b)
        for array in (self.body, self.tail, self.n_slots, self.sealed, self.evicted):
            if array is not None:
                array[dst] = array[src]

    def unshare(self, row: int) -> None:
        """Copy every shared block of a row to one of its own. The caller has checked that there are enough."""
        pools = [(self.body, self.pool, self.arrays)]
        if self.tail is not None:
            pools.append((self.tail, self.tail_pool, self.tail_arrays))
        for table, pool, arrays in pools:
            old = [b for b in table[row][table[row] > 0].tolist() if pool.ref[b] > 1]
            if not old:
                continue
            new = pool.alloc(len(old))
            arrays.copy_blocks(self._ids(old), self._ids(new))
            swap = dict(zip(old, new))
            table[row] = np.vectorize(lambda b: swap.get(b, b), otypes=[np.int32])(table[row])  # noqa: B023
            for block in old:
                pool.decref(block)

    def free(self, row: int) -> None:
        body, tail = self.blocks(row)
        self.pool.free_table(body)
        if tail:
            self.tail_pool.free_table(tail)
        for array in (self.body, self.tail, self.n_slots, self.sealed, self.evicted):
            if array is not None:
                array[row] = 0
