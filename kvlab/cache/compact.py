"""Compaction: survivors of an eviction move to the front of their table, blocks that become free are given back.

A block that only this sequence holds is written in place; a shared or keyed one is never written, its survivors go to a
fresh block and the original stays for the others. Rows are read into a buffer before they are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.arrays import Arrays
from kvlab.cache.pool import BlockPool
from kvlab.cache.tables import ClassTables
from kvlab.errors import NoBlocks


def compact(t: ClassTables, rows: np.ndarray, keep: Tensor, n_keep: np.ndarray) -> None:
    """Keep only `keep` of the slots of `rows`.

    rows    int64 [Ne]             cache rows
    keep    int64 [Lc, Ne, Hk, k]  slot indices per layer of the class, ascending; entries from n_keep on are ignored
    n_keep  int64 [Ne, groups]     survivors; equal for all (layer, head) of a group

    Raises NoBlocks, with nothing changed, when shared blocks need copies and the pool has none left.
    """
    if t.tail is None:
        table, pool, arrays = t.body, t.pool, t.arrays
    else:
        assert not t.sealed[rows].any(), "slots that are already sealed cannot be compacted across an exact tail"
        table, pool, arrays = t.tail, t.tail_pool, t.tail_arrays
    assert all(r.scope == "token" for r in arrays.regions.values()), "block-scope regions cannot be compacted"
    old = table[rows].astype(np.int64)  # [Ne, groups, M]
    new = _targets(t, pool, old, n_keep)
    _move(t, arrays, torch.from_numpy(old), torch.from_numpy(new), keep, n_keep)
    table[rows] = new
    t.evicted[rows] += t.n_slots[rows] - n_keep
    t.n_slots[rows] = n_keep
    if t.tail is None:
        t.sealed[rows] = n_keep


def _targets(t: ClassTables, pool: BlockPool, old: np.ndarray, n_keep: np.ndarray) -> np.ndarray:
    """New tables [Ne, groups, M]. Only block books are touched: what loses its owner is given back FIRST, so that a
    fresh block may be one of those (`_move` reads before it writes) and sequences
    never need more than they held before."""
    count = -(-n_keep // t.block)
    new = np.where(np.arange(old.shape[2]) < count[..., None], old, 0)
    used = new[new > 0]
    shared = np.array([b for b in used.tolist() if pool.ref[b] > 1 or b in pool.key], np.int64)
    freed = old[(old > 0) & (new == 0)].tolist()
    at = np.argwhere(np.isin(new, shared) & (new > 0))
    freed += [int(new[tuple(i)]) for i in at]
    if len(at):
        back = sum(pool.ref[b] == k and not pool.pin[b] for b, k in Counter(freed).items())
        if len(at) > pool.available + back:
            raise NoBlocks(f"compaction must copy {len(at)} shared blocks, {pool.available + back} are available")
    for block in reversed(freed):
        pool.decref(block)
    for i, block in zip(at, pool.alloc(len(at))):
        new[tuple(i)] = block
    return new


def _move(t: ClassTables, arrays: Arrays, old: Tensor, new: Tensor, keep: Tensor, n_keep: np.ndarray) -> None:
    """Layer by layer, which needs the smallest buffer; all at once where a fresh block of one layer's table may be one
    that another layer still has to read."""
    rows = _rows(t, arrays, old, new, keep, n_keep)
    if not t.uniform and bool((new > 0).logical_and(new != old).any()):
        rows = [tuple(torch.cat(side) for side in zip(*rows))]
    for src, dst in rows:
        if len(src):
            arrays.move_rows(src, dst)


def _rows(
    t: ClassTables, arrays: Arrays, old: Tensor, new: Tensor, keep: Tensor, n_keep: np.ndarray
) -> Iterator[tuple[Tensor, Tensor]]:
    """(token rows to read, token rows to write) of each layer, those that stay in place left out."""
    B, k = t.block, keep.shape[-1]
    old, new = old.to(keep.device), new.to(keep.device)
    at = torch.arange(k, device=keep.device)
    limit = torch.from_numpy(n_keep).to(keep.device)
    for li in range(len(t.layers)):
        groups = torch.from_numpy(t.group_of[li]).to(keep.device)
        real = at < limit[:, groups][..., None]  # [Ne, Hk, k]
        src, dst = torch.where(real, keep[li], 0), at.expand_as(real)
        place = torch.from_numpy(t.place[li]).to(keep.device)[:, None]
        flat = []
        for tbl, slot in ((old, src), (new, dst)):
            block = tbl[:, groups].gather(2, slot // B)
            row = arrays.row(block, place) * B + slot % B
            flat.append(row[real])
        moved = flat[0] != flat[1]
        yield flat[0][moved], flat[1][moved]
