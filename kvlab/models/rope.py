"""Angles of rotary embeddings from the model's own module: cosines and sines of a step's positions, [T, D].

transformers computes them in a dozen calls, a tenth of a millisecond and more once a step's weights have pushed them
out of the caches. Where an angle depends on its position alone they are kept, one row a position: [P, D], as many bytes
as one layer's keys of one head in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rope:
    """module: a rotary embedding of transformers, whose channels j and j + D/2 turn by the same angle."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        moving = "dynamic" in module.rope_type or module.rope_type == "longrope"  # angles depend on the longest prompt
        self.kept = not moving and module.inv_freq.device.type == "cpu"  # elsewhere `max` would wait for the device
        self._rows = torch.empty(0, 0)

    def __call__(self, like: Tensor, positions: Tensor) -> Tensor:
        """positions int64 [T] -> [T, D] in like's dtype: D/2 cosines, then D/2 sines."""
        if not self.kept:
            return self._compute(like, positions)
        end = int(positions.max()) + 1
        if end > len(self._rows) or self._rows.dtype != like.dtype:
            self._rows = self._compute(like, torch.arange(max(256, 1 << (end - 1).bit_length())))
        return self._rows.index_select(0, positions)

    def _compute(self, like: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.module(like, positions[None])
        half = cos.shape[-1] // 2
        return torch.cat([cos[0, :, :half], sin[0, :, :half]], -1)
