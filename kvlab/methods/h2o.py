"""H2O: heavy hitters. Keep the tokens that received most attention from ALL queries so far, and the newest ones.

Stored   what the codec stores, for C = heavy + recent slots per (layer, kv head); score fp32 [Hk, B] beside each slot
Score    A[j] = sum over queries i >= j of a[i, j], prompt and generated; mean over the query heads of a kv head (`gqa`)
Rule     the prompt is cut once when the context is complete, with A of the whole causal matrix; later whenever a
         sequence holds `every` slots more than C (1 = the paper's per-step rule). The newest `recent` always stay,
         the rest are the top (C - recent) of A; equal scores keep the older slot
Budget   tokens = C, or fraction of the context; recent = half of C when null (the paper's H = R)
Cost     attention weights need a second pass over the keys that were read (they need the final log-sum-exp)
Mode     causal. The lm-eval script of the authors ranks by column sums that include FUTURE queries; not that
Source   arXiv 2306.14048, section 4 and Algorithm 1; per kv head under GQA
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvlab.cache.layout import Geom, Region
from kvlab.cache.paged import StepPages
from kvlab.cache.pages import Pages
from kvlab.cache.step import Bucket
from kvlab.errors import ConfigError
from kvlab.families.pruner import Pruner, Scoring

if TYPE_CHECKING:
    from kvlab.compressor import Compressor


@dataclass
class H2O(Pruner):
    tokens: int | None = 256
    recent: int | None = None
    every: int = 16
    gqa: Literal["mean", "sum"] = "mean"

    trigger = "step"
    mutable = True

    def __post_init__(self) -> None:
        if self.gqa not in ("mean", "sum"):
            raise ConfigError(
                f"h2o: gqa={self.gqa!r} is not one of mean, sum (a maximum cannot be accumulated per kv head)"
            )
        if self.recent is None:
            if self.tokens is None:
                raise ConfigError("h2o: with a fraction the recent window must be a number: set method.recent=N")
            self.recent = self.tokens // 2
        super().__post_init__()

    def regions(self, geom: Geom) -> tuple[Region, ...]:
        return (Region("score", torch.float32, (), role="metadata"),)

    def wrote(self, layer: int, p: Pages, k: Tensor, v: Tensor, pages: StepPages) -> None:
        flat = p.t.arrays.token_rows["score"]
        flat.index_fill_(0, p.write_rows(layer), 0.0)

    def watches(self, bucket: Bucket) -> bool:
        return True

    def attended(
        self, layer: int, comp: Compressor, p: Pages, bucket: Bucket, q: Tensor, lse: Tensor, pages: StepPages
    ) -> None:
        if bucket.keep is not None:  # padding rows have no vote
            real = torch.zeros(lse.shape[0] * bucket.rows, dtype=torch.bool, device=lse.device)
            real[bucket.keep] = True
            real = real.view(-1, 1, 1, bucket.rows).expand(-1, *lse.shape[1:2], self.geom.G, -1).flatten(2)
            lse = lse.masked_fill(~real, torch.inf)
        flat = p.t.arrays.block_rows["score"]
        for tile, weights in comp.received(layer, q, lse, p, bucket):
            got = (weights.mean(2) if self.gqa == "mean" else weights.sum(2)).view(-1, p.block)
            rows = tile.rows + tile.layer_step * p.t.layer_index[layer]
            real_blocks = p.t.arrays.block_of(tile.rows).nonzero()[:, 0]  # not the null block
            rows, got = rows[real_blocks], got[real_blocks]
            flat.index_copy_(0, rows, flat.index_select(0, rows) + got)

    def score(self, s: Scoring) -> Tensor:
        return s.value("score")
