"""StreamingLLM: keep the first tokens (attention sinks) and the newest ones; nothing is scored.

Stored   what the codec stores, for sinks + recent slots; nothing beside it
Rule     at the end of every prefill chunk and whenever a decoding sequence holds `every` slots more than C = tokens:
         slots [0, sinks) and the newest C - sinks stay
Visible  a query sees the C kept slots and itself (the paper's window counts the new token)
Keys     post-RoPE at their ORIGINAL positions. The paper renumbers positions inside the cache (section 3.2); with original
         positions the distance from the newest token to the sinks grows. `positions` says so in every row.
Source   arXiv 2309.17453, section 3
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlab.families.pruner import Pruner, Scoring


@dataclass
class StreamingLLM(Pruner):
    tokens: int | None = 256
    sinks: int = 4
    every: int = 16

    trigger = "step"
    cut_chunks = True

    def score(self, s: Scoring) -> Tensor:
        at = s.zeros()
        return at + (at.new_ones(s.slots).cumsum(0))  # newer is better

    def label(self) -> str:
        size = self.tokens if self.tokens is not None else f"{self.fraction:g}"
        return f"streaming_llm {size}"
