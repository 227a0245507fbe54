"""Metadata of a code (scales, zeros, norms): storage types, and the one check that an encode pays for.

Metadata is computed in float32 and rounded to its storage type FIRST; codes are then chosen with the stored value.
min, max and norms carry NaN and inf of the input into the metadata, so looking at the (small) metadata finds both a
bad input and an overflow of the storage type: one sum per tensor, one read. Which of the two is worked out only then.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvlab.errors import ConfigError, KvlabError

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class NonFinite(KvlabError, ValueError):
    """A key or value is NaN or infinite: the model upstream is wrong, and storing it would hide that."""

    exit_code = 2


class MetaOverflow(KvlabError, ValueError):
    """A number, or its scale, zero or norm, does not fit its storage type."""

    exit_code = 2


def dtype_of(who: str, key: str, name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"{who}: {key}={name!r} is not a type for metadata; choose one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def finite(*meta: Tensor) -> bool:
    """True when every element is finite. A float32 sum may overflow and say False too: `refuse` looks again."""
    total = meta[0].sum(dtype=torch.float32)
    for m in meta[1:]:
        total = total + m.sum(dtype=torch.float32)
    return math.isfinite(total.item())


def stored(who: str, layer: int, key: str, dtype: torch.dtype, **sides: Tensor) -> dict[str, Tensor]:
    """Keys and values [M, Hk, t, D] in a float type. Only float16 lacks the others' range: there, as in `refuse`."""
    out = {n: x.to(dtype) for n, x in sides.items()}
    widens = any(x.dtype != dtype for x in sides.values())
    if dtype == torch.float16 and widens and not finite(*out.values()):
        refuse(who, layer, key, **{n: (sides[n], x) for n, x in out.items()})
    return out


def refuse(who: str, layer: int, key: str | None, **sides: tuple[Tensor, Tensor]) -> None:
    """After `finite` said False: raises NonFinite or MetaOverflow and says where; returns when all is well after all.

    sides: name = (input [M, Hk, t, D], its metadata). key: the option that widens the metadata.
    """
    for side, (x, stored) in sides.items():
        size = x.float().abs()
        if not torch.isfinite(size).all():
            value, at = _locate(x, (~torch.isfinite(size)).to(torch.uint8))
            raise NonFinite(
                f"{who}: layer {layer} {side} is {value} at {at}: the model upstream made it, nothing to store."
            )
        if not torch.isfinite(stored).all():
            value, at = _locate(x, size)
            raise MetaOverflow(
                f"{who}: layer {layer} {side}: a number, or its scale, zero or norm, does not fit "
                f"{str(stored.dtype)[6:]}; the largest input is {value:.4g} at {at}. Use method.{key}=float32 (2 bytes "
                "more each)."
            )


def _locate(x: Tensor, size: Tensor) -> tuple[float, str]:
    at = torch.unravel_index(size.argmax(), x.shape)
    return x[at].item(), ", ".join(f"{n} {i.item()}" for n, i in zip(("row", "head", "token", "channel"), at))
