"""Engine: add sequences, call `step` until nothing is left.

A step: schedule -> take blocks -> run the model on packed tokens (pages are written and read inside its layers) ->
evict -> sample -> append. A failing step frees every sequence it touched and leaves the pool as if they had never been.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.paged import CacheSize, PagedCache, StepPages
from kvlab.cache.step import DECODE, PREFILL, PREFILL_LAST, Step
from kvlab.compressor import Compressor
from kvlab.engine.config import EngineCfg, Stats
from kvlab.engine.graphs import CudaRecorder, Graphs
from kvlab.engine.sampling import sample
from kvlab.engine.scheduler import Scheduler, Work
from kvlab.engine.sequence import Sampling, Sequence, Status
from kvlab.errors import ConfigError
from kvlab.kernels import dispatch, move

Forward = Callable[[Tensor, Tensor, Tensor, Compressor, object], Tensor]


class Engine:
    def __init__(self, forward: Forward, compressor: Compressor, geom, cfg: EngineCfg, device: str = "cpu") -> None:
        self.forward, self.compressor, self.cfg = forward, compressor, cfg
        self.device = torch.device(device)
        compressor.kernels = dispatch.backend(device, cfg.kernels, cfg.arithmetic)
        compressor.fast = cfg.arithmetic == "fast"
        plan = compressor.plan(geom, cfg.block)
        size = CacheSize(cfg.max_seqs, cfg.max_len, cfg.max_batch_tokens, cfg.pool_bytes, cfg.tile)
        self.cache = PagedCache(plan, size, device, compressor.kernels or move)
        self.scheduler = Scheduler(self.cache, compressor, cfg.max_batch_tokens, cfg.chunk)
        self.graphs = None
        if cfg.graph == "auto" and self.device.type == "cuda" and compressor.kernels is not None:
            self.graphs = Graphs(compressor, self.cache, CudaRecorder())
        self.stats = Stats()
        self._ids = itertools.count()

    # -- requests ------------------------------------------------------------------------------------------------
    def add(
        self, tokens: list[int], sampling: Sampling | None = None, context: int | None = None, **options
    ) -> Sequence:
        """Queue a prompt. context: how many of its tokens a pruner that acts once sees (default all).

        options: chunk_after, on_logits, on_finish (see Sequence). Raises ConfigError or CacheTooSmall; nothing is
        kept then.
        """
        sampling = sampling or Sampling()
        tokens = list(tokens)
        if not tokens:
            raise ConfigError("an empty prompt has no next token: give at least one token")
        context = len(tokens) if context is None else context
        if not 1 <= context <= len(tokens):
            raise ConfigError(f"context={context} must lie in 1..{len(tokens)}, the prompt's length")
        if (rows := options.get("chunk_after")) is not None and rows < 1:
            raise ConfigError(f"chunk_after={rows} rows a step would never end: give at least 1, or None for no limit")
        if sampling.n > self.cfg.max_seqs:
            raise ConfigError(
                f"n={sampling.n} samples need runtime.max_seqs >= {sampling.n}, it is {self.cfg.max_seqs}"
            )
        seq_id = next(self._ids)
        seq = Sequence(seq_id, tokens, sampling, context, len(tokens), arrival=seq_id, **options)
        self.scheduler.add(seq)
        return seq

    def abort(self, seq: Sequence, reason: str = "abort") -> None:
        """End a sequence in whatever state it is; its blocks go back."""
        if seq.finish_reason is None:  # else it has ended, or is ending right now: this call comes from its hook
            self._finish(seq, reason)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def run(self) -> None:
        """Step until every sequence is finished."""
        while self.busy:
            self.step()

    # -- a step --------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def step(self) -> list[tuple[Sequence, int]]:
        """One step. Returns (sequence, new token) for each sequence that got one."""
        work = self.scheduler.schedule()
        if not work:
            return []
        started = time.perf_counter()
        seqs = [s for s, _ in work]
        others = {s.id for s in self.scheduler.running} - {s.id for s in seqs}
        try:
            step, pages, wanted = self._begin(work)
            logits = self._run(step, pages, seqs, wanted)
            self.compressor.settle()
            pages.finish()
            self.compressor.evict(pages)
            self._count(step, time.perf_counter() - started)
            for seq, n in work:
                seq.computed += n
            self._give_logits(work, logits, wanted, step)
            new = self._sample(work, logits, wanted)
            for seq in seqs:
                if seq.status is Status.RUNNING and not seq.missing:  # only the prompt was asked for
                    self._finish(seq, "length")
        except BaseException:
            for seq in [s for s in self.scheduler.running if s.id not in others]:  # forks of this step too
                self._finish(seq, "error")
            raise
        if self.cfg.check:
            self.cache.check({s.row: s.computed for s in self.scheduler.running})
        return new

    def _begin(self, work: Work) -> tuple[Step, StepPages, list[range]]:
        seqs, q_len = [s for s, _ in work], np.array([n for _, n in work], np.int64)
        start = np.array([s.computed for s in seqs], np.int64)
        context = np.array([s.context for s in seqs], np.int64)
        phase = np.where(start >= context, DECODE, np.where(start + q_len >= context, PREFILL_LAST, PREFILL))
        rows = np.array([s.row for s in seqs], np.int64)
        step = Step(rows, q_len, start, phase.astype(np.int8), context, self.device)
        pages = self.cache.begin(step, self.scheduler.growths, self.cfg.prefill_reads == "exact")
        self.stats.peak_bytes = max(self.stats.peak_bytes, self._used_bytes())
        return step, pages, self._wanted(work, step)

    @staticmethod
    def _wanted(work: Work, step: Step) -> list[range]:
        """Packed rows whose logits each sequence needs: all scored ones, else the last when all its tokens are in."""
        out = []
        for i, (seq, n) in enumerate(work):
            first, end = int(step.cu[i]), int(step.cu[i + 1])
            begin = end
            if seq.missing == n and seq.sampling.max_tokens:
                begin = end - 1
            if seq.on_logits is not None:
                begin = min(begin, max(first, first + seq.logits_from - seq.computed))
            out.append(range(min(begin, end), end))
        return out

    def _run(self, step: Step, pages: StepPages, seqs: list[Sequence], wanted: list[range]) -> Tensor:
        tokens = [t for s, n in zip(seqs, step.q_len.tolist()) for t in s.tokens[s.computed : s.computed + n]]
        rows = [r for span in wanted for r in span]
        if self.graphs is not None and (logits := self.graphs.run(self.forward, tokens, rows, pages)) is not None:
            return logits
        ids, where = (torch.tensor(x, dtype=torch.int64, device=self.device) for x in (tokens, rows))
        return self.forward(ids, step.tensor(step.positions), where, self.compressor, pages)

    def _used_bytes(self) -> int:
        used = 0
        for t in self.cache.classes:
            used += t.pool.used * t.body_block_bytes
            if t.tail is not None:
                used += t.tail_pool.used * t.tail_block_bytes
        return used

    def _count(self, step: Step, seconds: float) -> None:
        s, prefill = self.stats, int(step.q_len[step.phase != DECODE].sum())
        s.steps += 1
        s.prefill_tokens += prefill
        s.decode_tokens += step.T - prefill
        if prefill:
            s.prefill_s += seconds
        else:
            s.decode_s += seconds
            s.itl.append(seconds)

    def _give_logits(self, work: Work, logits: Tensor, wanted: list[range], step: Step) -> None:
        at = 0
        for i, ((seq, _), span) in enumerate(zip(work, wanted)):
            if seq.on_logits is not None and len(span):
                position = int(step.start[i]) + span.start - int(step.cu[i])
                seq.on_logits(position, logits[at : at + len(span)])
            at += len(span)

    def _sample(self, work: Work, logits: Tensor, wanted: list[range]) -> list[tuple[Sequence, int]]:
        last = np.cumsum([len(span) for span in wanted]) - 1
        alive = [(s, int(at)) for (s, _), at in zip(work, last) if s.status is Status.RUNNING]  # a hook may abort
        owners = [(s, at) for s, at in alive if not s.missing and s.sampling.max_tokens]
        if not owners:
            return []
        first = [(s, at) for s, at in owners if not s.output and s.sampling.n > 1 and s.parent is None]
        for seq, at in first:
            owners = owners + [(child, at) for child in self._fork(seq)]
        at = [at for _, at in owners]
        chosen = sample(logits if at == list(range(len(logits))) else logits[at], [s for s, _ in owners])
        new = []
        for (seq, _), token in zip(owners, chosen):
            if seq.status is not Status.RUNNING:
                continue
            seq.tokens.append(token)
            new.append((seq, token))
            if token in seq.sampling.stop_tokens:
                self._finish(seq, "stop")
            elif len(seq.output) >= seq.sampling.max_tokens:
                self._finish(seq, "length")
        return new

    def _fork(self, seq: Sequence) -> list[Sequence]:
        """n - 1 copies that share the prompt's blocks; each samples its own first token."""
        children = []
        for i in range(1, seq.sampling.n):
            child = replace(seq, id=next(self._ids), tokens=list(seq.tokens), parent=seq.id, index=i, generator=None)
            mutable = self.compressor.pruner is not None and self.compressor.pruner.mutable
            child.row = self.cache.fork_row(seq.row, share=not mutable)
            self.scheduler.running.append(child)
            children.append(child)
        self.scheduler.running.sort(key=lambda s: s.arrival)  # samples are as old as their prompt
        return children

    def _finish(self, seq: Sequence, reason: str) -> None:
        seq.finish_reason = reason
        try:
            if seq.on_finish is not None and seq.status is Status.RUNNING and reason != "error":
                seq.on_finish(seq)
        finally:
            self.scheduler.remove(seq)
