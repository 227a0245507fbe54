"""StreamingLLM: keep the first tokens (attention sinks) and the newest ones; nothing is scored.

Stored    what the codec stores, for sinks + recent slots; rerotate: beside it the sinks' exact k, v once per sequence
Rule      at the end of every prefill chunk and whenever a decoding sequence holds `every` slots more than C = tokens:
          slots [0, sinks) and the newest C - sinks stay
Visible   a query sees the C kept slots and itself (the paper's window counts the new token)
Positions rerotate (the paper, section 3.2): positions count inside the cache. Only differences matter under RoPE, so
          the sinks are moved towards the present by the number of evicted tokens, from their exact keys each time
          (no drift); all else stays where it is. original: nothing moves, the sinks' distance grows without bound
Source    arXiv 2309.17453, section 3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.layout import Geom, Region
from kvlab.cache.paged import StepPages
from kvlab.cache.pages import Pages
from kvlab.errors import ConfigError
from kvlab.families.pruner import Pruner, Scoring
from kvlab.kernels.rope import turn

if TYPE_CHECKING:
    from kvlab.compressor import Compressor


@dataclass
class StreamingLLM(Pruner):
    tokens: int | None = 256
    sinks: int = 4
    every: int = 16
    positions: Literal["rerotate", "original"] = "rerotate"

    name = "streaming_llm"
    trigger = "step"
    cut_chunks = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions not in ("rerotate", "original"):
            raise ConfigError(f"streaming_llm: positions={self.positions!r} is not one of rerotate, original")

    def setup(self, geom: Geom, block: int) -> None:
        super().setup(geom, block)
        if self.moves and not geom.inv_freq:
            raise ConfigError(
                f"streaming_llm: positions=rerotate turns keys, but {geom.model} has no plain half-split RoPE with "
                "fixed frequencies. Use method.positions=original."
            )

    @property
    def moves(self) -> bool:
        return self.positions == "rerotate" and self.sinks > 0

    def score(self, s: Scoring) -> Tensor:
        zeros = s.zeros()
        return zeros + zeros.new_ones(s.slots).cumsum(0)  # newer is better

    def state(self, geom: Geom) -> tuple[Region, ...]:
        if not self.moves:
            return ()
        return tuple(Region(f"sink_{r}", geom.dtype, (geom.Hk, self.sinks, geom.D), role="metadata") for r in "kv")

    def wrote(self, layer: int, p: Pages, k: Tensor, v: Tensor, pages: StepPages) -> None:
        """Remember the sinks exactly, as they were rotated at their own positions."""
        step = p.step
        first = np.nonzero(step.positions < self.sinks)[0] if self.moves else ()
        if not len(first):
            return
        rows, slots = step.tensor(step.cache_rows[step.row_seq[first]]), step.tensor(step.positions[first])
        for name, x in (("sink_k", k), ("sink_v", v)):
            pages.state(name)[rows, layer, :, slots] = x[0, :, step.tensor(first)].transpose(0, 1)

    def cut(self, comp: Compressor, p: Pages, rows: np.ndarray, pages: StepPages) -> None:
        if not self.moves:
            return
        at = torch.from_numpy(rows).to(p.step.device)
        by = torch.from_numpy(p.t.evicted[rows, 0]).to(p.step.device)[:, None, None]
        slots = np.broadcast_to(np.arange(self.sinks), (len(rows), self.sinks))
        for layer in p.t.layers:
            inv_freq = torch.tensor(self.geom.inv_freq[layer], device=p.step.device)
            k = turn(pages.state("sink_k")[at, layer], by, inv_freq)
            p.write_at(layer, rows, slots, comp.codec.encode(layer, k, pages.state("sink_v")[at, layer]))

    def label(self) -> str:
        return super().label() + ("" if self.positions == "rerotate" else " original")
