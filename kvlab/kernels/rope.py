"""Turn keys that are already rotated: RoPE rotations add, R(a) R(b) = R(a + b), so a key can be moved."""

from __future__ import annotations

import torch
from torch import Tensor


def turn(k: Tensor, by: Tensor, inv_freq: Tensor) -> Tensor:
    """Move keys by `by` positions. k [..., D] half-split pairing (channel j with j + r/2, r = 2 len(inv_freq) rotary
    channels, the rest untouched); by broadcastable to k's leading axes; inv_freq float32 [r/2]. float32 [..., D].

    Angles are float64 before the sine: at position 100,000 a float32 angle is off by 0.004 rad.
    """
    angle = by.double()[..., None] * inv_freq.double()
    cos, sin = angle.cos().float(), angle.sin().float()
    half = len(inv_freq)
    a, b, rest = k.float().split((half, half, k.shape[-1] - 2 * half), -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
