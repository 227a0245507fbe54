"""int8: one symmetric step per token and group of channels. The 8-bit baseline.

Stored   k, v            int8 [Hk, B, D]          codes -127..127 (-128 unused)
         k_step, v_step  fp16 [Hk, B, D/group]    what one code is worth, in the unit of k and v
Bytes    2D + 4D/group per token and kv head: 132 at D=64, group=64, 8.25 bits an element, where fp16 takes 256
Error    |x - decode(x)| <= step/2 + 127 max(2**-11 step, 2**-25);  step = max|x| / 127 over the group
Keys     post-RoPE; a page depends only on its own tokens, so prefixes may be shared
Source   house baseline, no paper row to match. Not KIVI: KIVI scales keys per channel, over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache.layout import Geom, Region
from kvlab.cache.scratch import Scratch
from kvlab.codec import Codec, Page
from kvlab.kernels import affine, meta
from kvlab.kernels.format import Format, Side


@dataclass
class Int8(Codec):
    group: int = 64
    meta_dtype: str = "float16"

    def setup(self, geom: Geom, block: int) -> None:
        super().setup(geom, block)
        self.meta = meta.dtype_of("int8", "meta_dtype", self.meta_dtype)
        affine.check_group("int8", self.group, geom.D, geom.model)

    def regions(self, geom: Geom, block: int) -> tuple[Region, ...]:
        codes = [Region(n, torch.int8, (geom.D,)) for n in ("k", "v")]
        steps = [Region(n, self.meta, (geom.D // self.group,), role="metadata") for n in ("k_step", "v_step")]
        return (*codes, *steps)

    def encode(self, layer: int, k: Tensor, v: Tensor) -> Page:
        x = torch.stack((k, v)).view(2, *k.shape[:-1], -1, self.group)  # both sides at once: half the calls
        step = affine.symmetric_params(x, -1, 8, self.meta)
        if not meta.finite(step):
            meta.refuse("int8", layer, "meta_dtype", k=(k, step[0]), v=(v, step[1]))
        codes, step = affine.symmetric_codes(x, step, 8).view(2, *k.shape), step.squeeze(-1)
        return {"k": codes[0], "v": codes[1], "k_step": step[0], "v_step": step[1]}

    def decode(self, layer: int, page: Page) -> tuple[Tensor, Tensor]:
        k, v = (
            affine.symmetric_values(page[n].unflatten(-1, (-1, self.group)), page[f"{n}_step"][..., None]).flatten(-2)
            for n in "kv"
        )
        return k, v

    def read(self, layer: int, page: Page, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Bitwise `decode`."""
        k, v = (self._read(n, page, scratch) for n in "kv")
        return k, v

    def _read(self, name: str, page: Page, scratch: Scratch) -> Tensor:
        codes = page[name]
        out = scratch.get(f"int8.{name}", tuple(codes.shape), torch.float32).copy_(codes)
        out.view(*codes.shape[:-1], -1, self.group).mul_(page[f"{name}_step"].unsqueeze(-1))
        return out

    def page_format(self) -> Format:
        k, v = (
            Side(n, "int8", self.geom.D, axis="token", group=self.group, scale=f"{n}_step", fit="absmax") for n in "kv"
        )
        return Format((k,), v)

    def label(self) -> str:
        return f"int8 g{self.group}"
