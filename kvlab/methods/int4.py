"""int4: asymmetric integers, one step and zero per token and group of channels. 2 and 3 bits too.

Stored   k, v            uint8 [Hk, B, D bits/8]   codes 0..2**bits-1; each group packed as a row in order `split`
         k_step, v_step  fp16 [Hk, B, D/group]     (max - min) / (2**bits - 1)
         k_zero, v_zero  fp16 [Hk, B, D/group]     min: value of code 0
Bytes    2 (D bits/8 + 4D/group) per token and kv head: 72 at D=64, 4 bits, group=64 (4.5 bits an element); fp16: 256
Error    |x - decode(x)| <= max(step/2, max(u|zero|, e0) + (2**bits-1) max(u step, e0)),  u = 2**-11, e0 = 2**-25
Keys     post-RoPE; a page depends only on its own tokens, so prefixes may be shared. A key channel with a large
         constant (Qwen2, Qwen2.5) stretches the range of every token: use method=kivi there
Source   house baseline; the arithmetic is KIVI's, arXiv 2402.02750, eq. 1, per token for keys too (its row K-T V-T)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache.layout import Geom, Region
from kvlab.cache.scratch import Scratch
from kvlab.codec import Codec, Page
from kvlab.errors import ConfigError
from kvlab.kernels import affine, lookup, meta, packing
from kvlab.kernels.format import Format, Side


@dataclass
class Int4(Codec):
    bits: int = 4
    group: int = 64
    meta_dtype: str = "float16"

    def setup(self, geom: Geom, block: int) -> None:
        super().setup(geom, block)
        if self.bits not in (2, 3, 4):
            raise ConfigError(
                f"int4: bits={self.bits} is not 2, 3 or 4. For 8 bits use method=int8 (symmetric, half the metadata); "
                "for 5 to 7 use method=turboquant, which packs any width."
            )
        affine.check_group("int4", self.group, geom.D, geom.model)
        self.meta = meta.dtype_of("int4", "meta_dtype", self.meta_dtype)
        self.channel = lookup.order(geom.D, self.bits, self.group)

    def regions(self, geom: Geom, block: int) -> tuple[Region, ...]:
        groups = geom.D // self.group
        codes = [Region(n, torch.uint8, (groups * packing.packed_bytes(self.group, self.bits),)) for n in ("k", "v")]
        params = [Region(f"{n}_{p}", self.meta, (groups,), role="metadata") for n in "kv" for p in ("step", "zero")]
        return (*codes, *params)

    def encode(self, layer: int, k: Tensor, v: Tensor) -> Page:
        x = torch.stack((k, v)).view(2, *k.shape[:-1], -1, self.group)  # both sides at once: half the calls
        step, zero = affine.asymmetric_params(x, -1, self.bits, self.meta)
        if not meta.finite(step, zero):
            both = step + zero
            meta.refuse("int4", layer, "meta_dtype", k=(k, both[0]), v=(v, both[1]))
        codes = affine.asymmetric_codes(x, step, zero, self.bits)
        packed = packing.pack(codes, self.bits).view(2, *k.shape[:-1], -1)
        step, zero = step.squeeze(-1), zero.squeeze(-1)
        return {
            "k": packed[0],
            "v": packed[1],
            "k_step": step[0],
            "v_step": step[1],
            "k_zero": zero[0],
            "v_zero": zero[1],
        }

    def decode(self, layer: int, page: Page) -> tuple[Tensor, Tensor]:
        k, v = (self._decode(n, page) for n in "kv")
        return k, v

    def _decode(self, name: str, page: Page) -> Tensor:
        packed = page[name].unflatten(-1, (self.geom.D // self.group, -1))
        codes = packing.unpack(packed, self.group, self.bits)
        step, zero = page[f"{name}_step"][..., None], page[f"{name}_zero"][..., None]
        return affine.asymmetric_values(codes, step, zero).flatten(-2)

    def query(self, layer: int, q: Tensor) -> Tensor:
        """Channels in the order in which packed codes come out."""
        return q.index_select(-1, self.channel)

    def read(self, layer: int, page: Page, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Bitwise `decode`, channels permuted."""
        k, v = (self._read(n, page, scratch) for n in "kv")
        return k, v

    def _read(self, name: str, page: Page, scratch: Scratch) -> Tensor:
        lead = tuple(page[name].shape[:-1])
        packed = page[name].reshape(*lead, self.geom.D // self.group, -1)
        out = scratch.get(f"int4.{name}", (*packed.shape[:-1], self.group), torch.float32)
        lookup.codes(packed, self.bits, out, scratch.get)
        out.mul_(page[f"{name}_step"].unsqueeze(-1)).add_(page[f"{name}_zero"].unsqueeze(-1))
        return out.view(*lead, self.geom.D)

    def output(self, layer: int, o: Tensor) -> Tensor:
        return torch.empty_like(o).index_copy_(-1, self.channel, o)

    def page_format(self) -> Format:
        k, v = (self._side(n) for n in "kv")
        return Format((k,), v)

    def _side(self, name: str) -> Side:
        D, g = self.geom.D, self.group
        return Side(name, "codes", D, self.bits, g, "token", g, f"{name}_step", zero=f"{name}_zero", fit="minmax")

    def label(self) -> str:
        return f"int{self.bits} g{self.group}"
