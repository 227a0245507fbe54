"""fp8: 8-bit floats with one scale per token and kv head, found when the token is written.

Stored   k, v              uint8 [Hk, B, D]   bits of float8 (e4m3: 3 mantissa bits, e5m2: 2)
         k_scale, v_scale  fp32 [Hk, B]       max|x| / 448 over D (e5m2: / 57344)
Bytes    2D + 8 per token and kv head: 136 at D=64, 8.5 bits an element, where fp16 takes 256
Error    |x - decode(x)| <= scale max(|x/scale| / 17, 2**-10)   (e5m2: 1/9, 2**-17)
Keys     post-RoPE; a page depends only on its own tokens, so prefixes may be shared
Source   the form is vLLM's fp8_per_token_head (vllm-project/vllm PR 38378) without its floor of 1e-6 under the scale.
         FP8 formats: arXiv 2209.05433. No calibrated (static) scales: not covered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache.layout import Geom, Region
from kvlab.cache.scratch import Scratch
from kvlab.codec import Codec, Page
from kvlab.errors import ConfigError
from kvlab.kernels import fp8, meta
from kvlab.kernels.format import Format, Side


@dataclass
class Fp8(Codec):
    format: str = "e4m3"

    def setup(self, geom: Geom, block: int) -> None:
        super().setup(geom, block)
        if self.format not in fp8.FORMATS:
            raise ConfigError(
                f"fp8: format={self.format!r} is unknown. Use e4m3 (3 mantissa bits) or e5m2 (2, more range, which a "
                "scale per token makes useless)."
            )

    def regions(self, geom: Geom, block: int) -> tuple[Region, ...]:
        codes = [Region(n, torch.uint8, (geom.D,)) for n in ("k", "v")]
        scales = [Region(n, torch.float32, (), role="metadata") for n in ("k_scale", "v_scale")]
        return (*codes, *scales)

    def encode(self, layer: int, k: Tensor, v: Tensor) -> Page:
        x = torch.stack((k, v))  # both sides at once: half the calls when one token comes
        scale = fp8.scale_of(x, self.format)
        if not meta.finite(scale):
            meta.refuse("fp8", layer, None, k=(k, scale[0]), v=(v, scale[1]))
        codes, scale = fp8.encode(x, scale, self.format), scale.squeeze(-1)
        return {"k": codes[0], "v": codes[1], "k_scale": scale[0], "v_scale": scale[1]}

    def decode(self, layer: int, page: Page) -> tuple[Tensor, Tensor]:
        k, v = (fp8.decode(page[n], page[f"{n}_scale"][..., None], self.format) for n in "kv")
        return k, v

    def read(self, layer: int, page: Page, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Bitwise `decode`."""
        k, v = (self._read(n, page, scratch) for n in "kv")
        return k, v

    def _read(self, name: str, page: Page, scratch: Scratch) -> Tensor:
        out = scratch.get(f"fp8.{name}", tuple(page[name].shape), torch.float32)
        return fp8.read(page[name], page[f"{name}_scale"].unsqueeze(-1), self.format, out, scratch.get)

    def page_format(self) -> Format:
        k, v = (
            Side(n, self.format, self.geom.D, axis="token", group=self.geom.D, scale=f"{n}_scale", fit="absmax")
            for n in "kv"
        )
        return Format((k,), v)

    def label(self) -> str:
        return f"fp8 {self.format}"
