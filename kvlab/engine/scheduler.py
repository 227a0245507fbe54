"""One rule, no phases: each step gives tokens to sequences so that `computed` catches up with `tokens`.

Running sequences first, oldest first, then waiting ones, under `max_batch_tokens`; decoding is the case "one token
missing". When the pool is short the newest running sequence is preempted (its blocks are freed, it is computed again
later); plans that cannot be recomputed reserve their peak at admission and are never a victim.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kvlab.cache.paged import PagedCache
from kvlab.cache.tables import Growth
from kvlab.compressor import Compressor
from kvlab.engine.sequence import Sequence, Status
from kvlab.errors import CacheTooSmall

Work = list[tuple[Sequence, int]]


class Scheduler:
    def __init__(self, cache: PagedCache, compressor: Compressor, max_batch_tokens: int, chunk: int) -> None:
        self.cache, self.compressor = cache, compressor
        self.max_batch_tokens, self.chunk = max_batch_tokens, min(chunk, max_batch_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0
        self.growths: list[Growth] = []  # what the work that `schedule` returned last takes of the cache

    # -- admission -----------------------------------------------------------------------------------------------
    def peak_blocks(self, seq: Sequence) -> tuple[tuple[int, int], ...]:
        max_new = seq.sampling.max_tokens
        body, tail = self.compressor.peak_slots(seq.prompt, seq.context, max_new, self.chunk)
        total = seq.prompt + max_new  # a pruner leaves sliding layers alone
        return tuple(self.cache.blocks_for(t, body if t.window is None else total, tail) for t in self.cache.classes)

    def usable(self) -> list[tuple[int, int]]:
        return [
            (t.pool.n_blocks - 1, t.tail_pool.n_blocks - 1 if t.tail is not None else 0) for t in self.cache.classes
        ]

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. CacheTooSmall when it could never run, alone in an empty pool."""
        size = self.cache.size
        seq.peak = self.peak_blocks(seq)
        if seq.prompt + seq.sampling.max_tokens > size.max_slots:
            raise CacheTooSmall(
                f"prompt of {seq.prompt} + max_tokens {seq.sampling.max_tokens} needs "
                f"{seq.prompt + seq.sampling.max_tokens} positions, the runtime was built for "
                f"{size.max_slots}. Raise runtime.max_len, or ask for less."
            )
        copies = seq.sampling.n if not self.compressor.caps.recompute_safe else 1
        for t, (need, need_tail), (have, have_tail) in zip(self.cache.classes, seq.peak, self.usable()):
            if need * copies > have or need_tail * copies > have_tail:
                wanted = copies * (need * t.body_block_bytes + need_tail * t.tail_block_bytes)
                there = have * t.body_block_bytes + have_tail * t.tail_block_bytes
                raise CacheTooSmall(
                    f"a sequence of {seq.prompt} + {seq.sampling.max_tokens} tokens needs {wanted:,} bytes of cache, "
                    f"the pool has {there:,}. Raise runtime.pool_bytes, shorten the prompt, or compress more."
                )
        self.waiting.append(seq)

    def _promised(self) -> int:
        """Rows that running prompts will need for their parallel samples."""
        return sum(s.sampling.n - 1 for s in self.running if s.parent is None and not s.output)

    def _reserved(self, extra: Sequence) -> bool:
        """Plans that cannot be recomputed: do the peaks of all admitted sequences, and this one, fit together?"""
        alive = [*self.running, *[extra] * extra.sampling.n]
        alive += [s for s in self.running if s.parent is None and not s.output for _ in range(s.sampling.n - 1)]
        for c, (body, tail) in enumerate(self.usable()):
            if sum(s.peak[c][0] for s in alive) > body or sum(s.peak[c][1] for s in alive) > tail:
                return False
        return True

    # -- a step --------------------------------------------------------------------------------------------------
    def schedule(self) -> Work:
        """[(sequence, tokens to run)] of the next step; rows are taken, blocks not yet."""
        budget, work, preempted = self.max_batch_tokens, [], False
        for seq in list(self.running):
            if seq.status is not Status.RUNNING:  # preempted by an older one in this very loop
                continue
            n = seq.next_chunk(min(budget, self.chunk), self.cache.plan.block)
            if not n:
                continue
            work.append((seq, n))
            budget -= n
        while work and not self._fits(work):
            preempted = True
            victim = self.running[-1]
            if not self.compressor.caps.recompute_safe or len(self.running) == 1:
                raise CacheTooSmall("the reserved peak does not hold: a sequence grew beyond its plan")
            self.preempt(victim)
            work = [(s, n) for s, n in work if s is not victim]
        while self.waiting and not preempted and budget > 0 and self._admit(work, budget):
            budget -= work[-1][1]
        return work

    def _admit(self, work: Work, budget: int) -> bool:
        seq = self.waiting[0]
        if len(self.cache.free_rows) - self._promised() < (seq.sampling.n if seq.parent is None else 1):
            return False
        if not self.compressor.caps.recompute_safe and not self._reserved(seq):
            return False
        n = seq.next_chunk(min(budget, self.chunk), self.cache.plan.block)
        row = self.cache.add_row()
        seq.row = row
        if not self._fits([*work, (seq, n)]):
            self.cache.free_row(row)
            seq.row = -1
            return False
        self.waiting.popleft()
        seq.status = Status.RUNNING
        self.running.append(seq)
        self.running.sort(key=lambda s: s.arrival)
        work.append((seq, n))
        return True

    def may_seal(self, seqs: list[Sequence]) -> np.ndarray:
        """A staged prompt stays exact until its context is complete and the pruner has acted."""
        if self.cache.plan.stage == "none":
            return np.ones(len(seqs), bool)
        return np.array([s.computed >= s.context for s in seqs], bool)

    def _fits(self, work: Work) -> bool:
        rows = np.array([s.row for s, _ in work])
        add = np.array([n for _, n in work])
        growths = self.cache.growth(rows, add, self.may_seal([s for s, _ in work]))
        if fits := self.cache.can_grow(growths):
            self.growths = growths
        return fits

    def preempt(self, seq: Sequence) -> None:
        """Free everything; the sequence waits at the front and is computed again, its output kept."""
        self.cache.free_row(seq.row)
        self.running.remove(seq)
        seq.recomputed += seq.computed
        seq.row, seq.computed, seq.status = -1, 0, Status.WAITING
        self.waiting.appendleft(seq)
        self.preemptions += 1

    def remove(self, seq: Sequence) -> None:
        """Finished or aborted, in whatever state: blocks and row go back."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self.cache.free_row(seq.row)
            seq.row = -1
        elif seq.status is Status.WAITING and seq in self.waiting:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
