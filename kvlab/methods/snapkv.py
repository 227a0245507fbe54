"""SnapKV: the last queries of the prompt vote for the tokens that stay, once, when the context is complete.

Stored   what the codec stores, for C slots per (layer, kv head); beside it the window's queries, per sequence
Votes    a[h, i, j] summed over the last `window` context queries i; aggregated over the query heads of a kv head
         (`gqa`) FIRST, then pooled along the slots with an odd `kernel`, stride 1, padding kernel // 2
         (avg counts the zero padding in its divisor, max pads with -inf); window slots get no vote, they always stay
Keep     top (C - window) of the pooled votes, and the window. n <= C: nothing changes, not a bit
Keys     post-RoPE at original positions; which token a slot holds differs per kv head
Source   arXiv 2404.14469, section 4; pooling and window as in the authors' code (snapkv_utils.py). GQA: the authors
         expand K and V to query heads, which stores them G times; here eviction is per kv head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.errors import ConfigError
from kvlab.families.pruner import Pruner, Scoring


def pool(votes: Tensor, kernel: int, kind: Literal["avg", "max"]) -> Tensor:
    """Same-length pooling of float32 [N, Hk, n] along the last axis."""
    fn = F.avg_pool1d if kind == "avg" else F.max_pool1d
    return fn(votes, kernel, stride=1, padding=kernel // 2)


@dataclass
class SnapKV(Pruner):
    tokens: int | None = 256
    window: int = 32
    kernel: int = 5
    pooling: Literal["avg", "max"] = "avg"
    gqa: Literal["mean", "max", "sum"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise ConfigError(f"snapkv: kernel={self.kernel} must be odd, or pooled votes move by half a slot")
        if self.window < 1:
            raise ConfigError("snapkv: window=0 leaves no query to vote; use window >= 1")
        for name, value, allowed in (
            ("pooling", self.pooling, ("avg", "max")),
            ("gqa", self.gqa, ("mean", "max", "sum")),
        ):
            if value not in allowed:
                raise ConfigError(f"snapkv: {name}={value!r} is not one of {', '.join(allowed)}")

    def score(self, s: Scoring) -> Tensor:
        votes = aggregate(s.votes(), self.gqa)
        at = torch.arange(s.slots, device=votes.device)
        outside = (
            at < (s.n - self.window).to(votes.device)[..., None]
        )  # window slots neither get votes nor smooth others'
        return pool(votes * outside, self.kernel, self.pooling)


def aggregate(weights: Tensor, how: Literal["mean", "max", "sum"]) -> Tensor:
    """[N, Hk, G, n] -> [N, Hk, n] over the query heads of a kv head."""
    if how == "max":
        return weights.amax(2)
    return weights.mean(2) if how == "mean" else weights.sum(2)
