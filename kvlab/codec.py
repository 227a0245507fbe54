"""Codec: how K and V become stored bytes and come back. Pure functions on tensors, no runtime, no model.

Write `regions`, `encode` and `decode`; the runtime then gives paging, batching, chunked prefill, fork, an exact tail
and composition with any pruner. `decode` DEFINES the meaning of the stored bytes; every faster path is
tested against it.

    regions(geom, B)       what one block holds (cache/layout.py)
    encode(layer, k, v)    k, v [M, Hk, t, D] -> {region: tensor [M, Hk, t, *shape]}     scope "token": any t
                                                  or [M, Hk, *shape] for block regions    scope "block": t == B
    decode(layer, page)    {region: [M, Hk, n, *shape]; block regions [M, Hk, n/B, *shape]} ->
                           k, v float32 [M, Hk, n, D]

Optional, for speed: attention may run in a basis of the codec's own (a rotated one, say). Then
    query(layer, q)        q [N, Hk, R, D] -> q in that basis
    read(layer, page)      like decode, but in that basis:  query(q) . read(k) == q . decode(k)
    output(layer, o)       [N, Hk, R, D] back to the model's basis, once, after all sources are joined
    page_format()          the page as data (kernels/format.py): attention then runs on packed pages, without `read`
A basis may be wider than D (a sketch beside the codes), as long as query, keys and values of `read` agree on the width.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Literal

import torch
from torch import Tensor

from kvlab.cache.layout import Geom, Region
from kvlab.cache.scratch import Scratch
from kvlab.kernels.format import Format

Page = dict[str, Tensor]


class Codec:
    """Base class. `scope` "block" = sealed B tokens at a time from an exact tail; "token" = each token alone."""

    scope: Literal["token", "block"] = "token"
    residual: int = 0  # newest slots kept exact (needs a tail: scope "block", or residual > 0)
    family = "quantizer"

    geom: Geom
    block: int

    def setup(self, geom: Geom, block: int) -> None:
        """Called once before anything else. Check what cannot work (ValueError) and build tables here."""
        self.geom, self.block = geom, block

    def regions(self, geom: Geom, block: int) -> tuple[Region, ...]:
        raise NotImplementedError(f"{type(self).__name__} must declare its regions")

    def tail_dtype(self) -> torch.dtype:
        """Of the exact tail, float32, bfloat16 or float16: the model's, unless a method says another. After `setup`."""
        return self.geom.dtype

    def encode(self, layer: int, k: Tensor, v: Tensor) -> Page:
        raise NotImplementedError(f"{type(self).__name__} must define encode")

    def decode(self, layer: int, page: Page) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(f"{type(self).__name__} must define decode")

    def query(self, layer: int, q: Tensor) -> Tensor:
        return q

    def read(self, layer: int, page: Page, scratch: Scratch) -> tuple[Tensor, Tensor]:
        return self.decode(layer, page)

    def output(self, layer: int, o: Tensor) -> Tensor:
        return o

    def page_format(self) -> Format | None:
        """What kernels over packed pages need to know; None = they cannot read these pages."""
        return None

    def static(self) -> dict[str, Tensor]:
        """Method-wide constants that are not per token (rotations, codebooks): listed once in the ledger."""
        return {}

    def to(self, device: torch.device | str) -> Codec:
        """Move the tables that `setup` built (tensors, also in dicts and lists) to where k and v are."""
        for name, value in vars(self).items():
            setattr(self, name, _moved(value, device))
        return self

    def label(self) -> str:
        """Short name for tables, e.g. `turboquant k4 v4`."""
        return type(self).__name__.lower()

    def fingerprint(self) -> str:
        """Everything that changes the meaning of stored bytes."""
        opts = {f.name: getattr(self, f.name) for f in fields(self)} if is_dataclass(self) else {}
        return f"{type(self).__name__}({','.join(f'{k}={v}' for k, v in sorted(opts.items()))})"


def _moved(value, device):
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: _moved(v, device) for k, v in value.items()}
    return [_moved(v, device) for v in value] if isinstance(value, list) else value
