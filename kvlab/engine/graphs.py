"""Decoding steps as CUDA graphs: launches are recorded once per batch size and table width, then replayed.

A step is replayed when kernels do all of its work between the model and its pages (`Compressor.kernels_do`), every
sequence gives one token, and no hook has to see it; all others run as before, launch by launch. A graph is recorded for
n = 1, 2, 4, ... sequences and a power of two of blocks; a real step fills the inputs (cache/fixed.py) and pads them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvlab.cache.fixed import FixedPages, blocks_of, fits
from kvlab.cache.paged import PagedCache, StepPages
from kvlab.compressor import Compressor

log = logging.getLogger(__name__)
Forward = Callable[..., Tensor]
LEAST_BLOCKS = 16  # of a table: fewer would record a graph again and again while a sequence grows


class Recorder(Protocol):
    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A function that does what `run` does now, on the memory that it used, and returns the same tensor."""


class CudaRecorder:
    """Graphs of one engine share their memory: they never run at the same time."""

    def __init__(self) -> None:
        self.pool = None

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles kernels and allocates what libraries keep: neither can be recorded
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = run()
        self.pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


@dataclass(frozen=True)
class Recorded:
    pages: FixedPages
    replay: Callable[[], Tensor]  # logits [n, vocab]


class Graphs:
    """Recorded steps of one engine."""

    def __init__(self, compressor: Compressor, cache: PagedCache, recorder: Recorder) -> None:
        self.compressor, self.cache, self.recorder = compressor, cache, recorder
        self.steps: dict[tuple[Forward, int, int], Recorded] = {}
        self.replayed = 0
        self.warning = ""  # why nothing is recorded any more

    def run(self, forward: Forward, ids: list[int], where: list[int], pages: StepPages) -> Tensor | None:
        """Logits [k, vocab] of the packed rows `where`; None = this step cannot be replayed."""
        n = 1 << (len(ids) - 1).bit_length()
        if self.warning or not fits(pages, n) or not self.compressor.kernels_do(pages):
            return None
        blocks = 1 << (max(LEAST_BLOCKS, blocks_of(pages)) - 1).bit_length()
        step = self._recorded(forward, n, blocks)
        if step is None:
            return None
        counters = self.compressor.counters
        counted = counters.encoded_blocks + self._encoded(pages, step.pages.fill(pages, ids))
        logits = step.replay()
        counters.encoded_blocks = counted  # a replay runs no Python that would count
        self.replayed += 1
        return logits[where]  # a copy: the next step overwrites what the graph wrote

    def _encoded(self, pages: StepPages, sealed: int) -> int:
        """What `Compressor.write` would have counted."""
        writes = sum(len(p.t.layers) for p in pages.by_class if p.t.tail is None)
        return sealed + writes * (self.compressor.codec.family != "full")

    def _recorded(self, forward: Forward, n: int, blocks: int) -> Recorded | None:
        key = (forward, n, blocks)
        if key not in self.steps:
            pages = FixedPages(self.cache, self.compressor.packed, n, blocks)
            where = torch.arange(n, device=self.cache.device)
            before = self.compressor.counters.encoded_blocks
            try:
                replay = self.recorder.record(
                    lambda: forward(pages.ids, pages.positions, where, self.compressor, pages)
                )
            except RuntimeError as why:  # a model that waits for the device in its forward, say
                self.warning = f"decode steps are not recorded as CUDA graphs: {why}"
                log.warning(self.warning)
                self.compressor.packed.warning = self.warning
                return None
            finally:
                self.compressor.counters.encoded_blocks = before
            self.steps[key] = Recorded(pages, replay)
        return self.steps[key]
