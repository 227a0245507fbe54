"""random: keep random slots. The baseline every pruner must beat.

Stored   what the codec stores, for the kept slots; nothing beside it
Rule     when the context is complete: `sinks` first and `recent` newest slots, the rest drawn without replacement
Seed     a draw depends on (seed, layer, kv head, slot) alone: not on the batch, not on the text
Source   house baseline; mandatory in every sweep of pruners
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvlab.families.pruner import Pruner, Scoring


@dataclass
class Random(Pruner):
    tokens: int | None = 256
    sinks: int = 4
    recent: int = 32
    seed: int = 0

    def score(self, s: Scoring) -> Tensor:
        draws = np.random.Generator(np.random.PCG64([self.seed, s.layer])).random((s.slots, s.n.shape[1]), np.float32)
        return torch.from_numpy(draws.T.copy()).to(s.ev.step.device).expand(*s.n.shape, s.slots)
