"""full: keys and values as they are. The reference that every other method is measured against.

Stored   k, v    `dtype` [Hk, B, D]   post-RoPE
Bytes    2 D itemsize per token and kv head: 256 at D=64 in float16, 512 in float32
Error    none when `dtype` holds the model's numbers; else one rounding, |x - decode(x)| <= 2**-11 |x| in float16
Keys     post-RoPE; a page depends only on its own tokens, so prefixes may be shared
Source   house baseline, no paper row to match
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache.layout import Geom, Region, kv_regions
from kvlab.cache.scratch import Scratch
from kvlab.codec import Codec, Page
from kvlab.errors import ConfigError
from kvlab.kernels import meta
from kvlab.kernels.format import Format, exact


@dataclass
class Full(Codec):
    dtype: str = "model"

    family = "full"

    def setup(self, geom: Geom, block: int) -> None:
        super().setup(geom, block)
        if self.dtype != "model" and self.dtype not in meta.DTYPES:
            raise ConfigError(
                f"full: dtype={self.dtype!r} is unknown. Use model (the model's own type, {str(geom.dtype)[6:]} for "
                f"{geom.model}), {', '.join(meta.DTYPES)}; for 8 bits take method=fp8 or method=int8."
            )
        self.stored = geom.dtype if self.dtype == "model" else meta.DTYPES[self.dtype]

    def regions(self, geom: Geom, block: int) -> tuple[Region, ...]:
        return kv_regions(geom, self.stored)

    def encode(self, layer: int, k: Tensor, v: Tensor) -> Page:
        return meta.stored("full", layer, "dtype", self.stored, k=k, v=v)

    def decode(self, layer: int, page: Page) -> tuple[Tensor, Tensor]:
        return page["k"].float(), page["v"].float()

    def read(self, layer: int, page: Page, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """The page itself when it is float32 already."""
        if self.stored == torch.float32:
            return page["k"], page["v"]
        k, v = (scratch.get(f"full.{n}", tuple(page[n].shape), torch.float32).copy_(page[n]) for n in "kv")
        return k, v

    def page_format(self) -> Format | None:
        return exact(self.stored, self.geom.D)

    def label(self) -> str:
        return f"full {str(self.stored)[6:]}" if hasattr(self, "stored") else "full"
