"""What a page means, as data: a codec writes it once, kernels over packed pages read it.

    value[token, channel] = scale * number + zero            in the codec's basis (Format.turn)

`number` is a stored float or integer, the code itself, or the code's entry in a table. `axis` says what a scale belongs
to. A codec without a description (or one that a kernel cannot hold) runs the torch path, `Codec.read`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


class Refused(ValueError):
    """Kernels cannot hold a format; the message says why. The torch path can."""


Kind = Literal["float32", "bfloat16", "float16", "e4m3", "e5m2", "int8", "codes"]


@dataclass(frozen=True, eq=False)
class Side:
    """Keys or values. Names are those of the codec's regions.

    codes    region of the numbers, [B, bytes of a token]
    kind     how a number is stored; "codes" = unsigned codes of `bits` bits, packed in rows of `pack` channels (split)
    width    channels of the codec's basis
    scale    region, or None: [B, width/group] (axis "token": one per token and `group` channels) or [B/group, width]
             (axis "block": one per channel and `group` tokens); scale2 is multiplied in; zero is added
    table    float32 [2**bits]: the number of each code; None = the code itself
    fit      how a vector's scale is found when it is written, each step in float32:
             as_is (no scale) | absmax: max|x| / the largest code or number | minmax: (max - min) / (2**bits - 1),
             zero = min | for a table, x = n z, z along Format.turn in cells between `edges`, the upper one's on an
             edge: none, norm, eden_mse, eden_unbiased, const_unbiased (n `factor`; see methods/turboquant.py) | for the
             last part of a key, sketch: signs of what the part before it (fit none) leaves of x / n, along columns of
             its own; scale = n, scale2 = its length; the other columns are orthogonal | "": no kernel writes it
    """

    codes: str
    kind: Kind
    width: int
    bits: int = 0
    pack: int = 0
    axis: Literal["none", "token", "block"] = "none"
    group: int = 0
    scale: str | None = None
    scale2: str | None = None
    zero: str | None = None
    table: Tensor | None = None
    edges: Tensor | None = None
    factor: float = 1.0
    fit: str = ""


@dataclass(frozen=True, eq=False)
class Format:
    """k: parts of a key, their scores add. v: values. What a layer's stored numbers are measured along:

    turn   float32 [layers, 1 | Hk, D, sum of key widths]   a query there is q @ turn       None = the model's own basis
    back   float32 [layers, 1 | Hk, width of v, D]          an output here is o @ back
    valid  region uint8 [B], or None: 0 = the slot is a hole that no query sees
    """

    k: tuple[Side, ...]
    v: Side
    turn: Tensor | None = None
    back: Tensor | None = None
    valid: str | None = None


_PLAIN: dict[torch.dtype, Kind] = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def exact(dtype: torch.dtype, width: int) -> Format | None:
    """Plain k and v, as the full cache and exact tails hold them; None for a type that kernels do not read."""
    if dtype not in _PLAIN:
        return None
    return Format((Side("k", _PLAIN[dtype], width, fit="as_is"),), Side("v", _PLAIN[dtype], width, fit="as_is"))
