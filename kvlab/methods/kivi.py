"""kivi: keys with a step per channel over a group of tokens, values with a step per token over a group of channels.

Outliers of keys sit in a few channels, those of values do not: each side is grouped along the axis where a group stays
narrow. A key group needs all its tokens at once, so the newest tokens wait exact (`residual`) until a block is full.

Stored   k               uint8 [Hk, B, D bits_k/8]    codes, packed over the channels of a token in order `split`
         k_step, k_zero  fp16 [Hk, B/group, D]        per BLOCK: one per channel and `group` consecutive tokens
         v               uint8 [Hk, B, D bits_v/8]    codes, rows of whole groups packed in order `split`
         v_step, v_zero  fp16 [Hk, B, D/group]        per token and `group` consecutive channels
Bytes    D bits_k/8 + 4D/group + D bits_v/8 + 4D/group per token and kv head, without the exact tail:
         48 at D=64, 2 bits, group=32 (3 bits an element); fp16: 256. A token of the tail: 4D in 16 bits, as in the
         paper (window_dtype=float16 or bfloat16, or a model of 16 bits), 8D in float32
Error    |x - decode(x)| <= max(step/2, max(u|zero|, e0) + (2**bits-1) max(u step, e0)),  u = 2**-11, e0 = 2**-25
Keys     post-RoPE. Groups are aligned to absolute positions; a sealed block depends only on its own tokens, but after a
         prefix hit the last `residual` tokens exist as codes only, where a cold run had them exact
Source   KIVI, arXiv 2402.02750, eq. 1, section 3.3 and algorithm 1 (group 32, residual 128; 2 or 4 bits)

Not covered: window=paper. The paper seals keys `residual` tokens at a time and values one by one, so its key tail is
0..R tokens long and its value tail R; here one window serves both (`unified`): a block is sealed when all its tokens
are older than `residual`. Key and value regions are encoded by separate functions, so that they can be sealed apart.
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
class Kivi(Codec):
    bits_k: int = 2
    bits_v: int = 2
    group: int = 32
    residual: int = 128
    window: str = "unified"
    window_dtype: str = "model"
    meta_dtype: str = "float16"

    scope = "block"

    def setup(self, geom: Geom, block: int) -> None:
        super().setup(geom, block)
        for key, bits in (("bits_k", self.bits_k), ("bits_v", self.bits_v)):
            if not 1 <= bits <= 8:
                raise ConfigError(f"kivi: {key}={bits} is not 1 to 8 bits. The paper uses 2 and 4; 16 is method=full.")
        affine.check_group("kivi", self.group, geom.D, geom.model)
        if block % self.group:
            raise ConfigError(
                f"kivi: a block of {block} tokens is not a whole number of groups of {self.group}, and a group of keys "
                f"shares one step, so it is sealed as a whole. Use a block of {self.group * -(-block // self.group)} "
                f"tokens (a longer exact tail), or method.group={block} (more metadata)."
            )
        if self.residual < 0:
            raise ConfigError(f"kivi: residual={self.residual} tokens cannot be negative; 0 seals every full block.")
        if self.window == "paper":
            raise ConfigError(
                "kivi: window=paper (keys sealed `residual` tokens at a time, values one by one) is not built yet: "
                "both sides of a token leave the exact tail together. Use window=unified; its bytes differ by less "
                "than one residual window of one side."
            )
        if self.window != "unified":
            raise ConfigError(f"kivi: window={self.window!r} is unknown; use unified.")
        self.meta = meta.dtype_of("kivi", "meta_dtype", self.meta_dtype)
        if self.window_dtype != "model" and self.window_dtype not in meta.DTYPES:
            raise ConfigError(
                f"kivi: window_dtype={self.window_dtype!r} is unknown. Use model (the model's own type, "
                f"{str(geom.dtype)[6:]} for {geom.model}), {', '.join(meta.DTYPES)}."
            )
        self.channel_k = lookup.order(geom.D, self.bits_k)
        parts = 8 // packing.planes(self.bits_v)[0]
        self.pack_v = max(
            n
            for n in range(self.group, self.group * parts + 1, self.group)
            if n == self.group or (geom.D % n == 0 and n % parts == 0 and self.group % (n // parts) == 0)
        )
        self.channel_v = lookup.order(geom.D, self.bits_v, self.pack_v)

    def regions(self, geom: Geom, block: int) -> tuple[Region, ...]:
        D, g = geom.D, self.group
        per_block, per_token = (block // g, D), (D // g,)
        return (
            Region("k", torch.uint8, (packing.packed_bytes(D, self.bits_k),)),
            Region("v", torch.uint8, (D // self.pack_v * packing.packed_bytes(self.pack_v, self.bits_v),)),
            Region("k_step", self.meta, per_block, "block", "metadata"),
            Region("k_zero", self.meta, per_block, "block", "metadata"),
            Region("v_step", self.meta, per_token, "token", "metadata"),
            Region("v_zero", self.meta, per_token, "token", "metadata"),
        )

    def tail_dtype(self) -> torch.dtype:
        return meta.DTYPES.get(self.window_dtype, self.geom.dtype)

    def encode(self, layer: int, k: Tensor, v: Tensor) -> Page:
        kg, vg = k.unflatten(-2, (-1, self.group)), v.unflatten(-1, (-1, self.group))
        ks, kz = affine.asymmetric_params(kg, -2, self.bits_k, self.meta)
        vs, vz = affine.asymmetric_params(vg, -1, self.bits_v, self.meta)
        if not meta.finite(ks, kz, vs, vz):
            meta.refuse("kivi", layer, "meta_dtype", k=(k, ks + kz), v=(v, vs + vz))
        return {**self._encode_k(kg, ks, kz), **self._encode_v(vg, vs, vz)}

    def _encode_k(self, kg: Tensor, step: Tensor, zero: Tensor) -> Page:
        """kg [M, Hk, B/group, group, D]"""
        codes = affine.asymmetric_codes(kg, step, zero, self.bits_k).flatten(-3, -2)
        return {"k": packing.pack(codes, self.bits_k), "k_step": step[..., 0, :], "k_zero": zero[..., 0, :]}

    def _encode_v(self, vg: Tensor, step: Tensor, zero: Tensor) -> Page:
        """vg [M, Hk, B, D/group, group]"""
        codes = affine.asymmetric_codes(vg, step, zero, self.bits_v)
        rows = codes.flatten(-2).unflatten(-1, (-1, self.pack_v))
        return {"v": packing.pack(rows, self.bits_v).flatten(-2), "v_step": step[..., 0], "v_zero": zero[..., 0]}

    def decode(self, layer: int, page: Page) -> tuple[Tensor, Tensor]:
        codes = packing.unpack(page["k"], self.geom.D, self.bits_k).unflatten(-2, (-1, self.group))
        k = affine.asymmetric_values(codes, *self._key_params(page)).flatten(-3, -2)
        packed = page["v"].unflatten(-1, (self.geom.D // self.pack_v, -1))
        codes = packing.unpack(packed, self.pack_v, self.bits_v).flatten(-2).unflatten(-1, (-1, self.group))
        return k, affine.asymmetric_values(codes, page["v_step"][..., None], page["v_zero"][..., None]).flatten(-2)

    def _key_params(self, page: Page) -> list[Tensor]:
        """step, zero [M, Hk, n/group, 1, D] from block regions [M, Hk, n/B, B/group, D]."""
        return [page[n].flatten(-3, -2)[..., None, :] for n in ("k_step", "k_zero")]

    def query(self, layer: int, q: Tensor) -> Tensor:
        """Channels in the order in which packed codes come out."""
        return q.index_select(-1, self.channel_k)

    def read(self, layer: int, page: Page, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Bitwise `decode`, channels permuted."""
        D, g = self.geom.D, self.group
        lead = tuple(page["k"].shape[:-1])
        k = scratch.get("kivi.k", (*lead, D), torch.float32)
        lookup.codes(page["k"], self.bits_k, k, scratch.get)
        step, zero = (p.index_select(-1, self.channel_k) for p in self._key_params(page))
        k.view(*lead[:-1], -1, g, D).mul_(step).add_(zero)
        v = scratch.get("kivi.v", (*lead, D // self.pack_v, self.pack_v), torch.float32)
        lookup.codes(page["v"].reshape(*lead, D // self.pack_v, -1), self.bits_v, v, scratch.get)
        n = self.pack_v // g  # groups of a row; the codes of a byte belong to all of them, one after the other
        by_group = v.view(*lead, D // self.pack_v, -1, n, 1 if n == 1 else 8 // packing.planes(self.bits_v)[0] // n)
        step, zero = (page[p].unflatten(-1, (-1, 1, n, 1)) for p in ("v_step", "v_zero"))
        by_group.mul_(step).add_(zero)
        return k, v.view(*lead, D)

    def output(self, layer: int, o: Tensor) -> Tensor:
        return torch.empty_like(o).index_copy_(-1, self.channel_v, o)

    def page_format(self) -> Format:
        D, g = self.geom.D, self.group
        k = Side("k", "codes", D, self.bits_k, D, "block", g, "k_step", zero="k_zero", fit="minmax")
        v = Side("v", "codes", D, self.bits_v, self.pack_v, "token", g, "v_step", zero="v_zero", fit="minmax")
        return Format((k,), v)

    def label(self) -> str:
        kind = "" if self.window_dtype == "model" else f" {self.window_dtype}"
        return f"kivi k{self.bits_k} v{self.bits_v} g{self.group} r{self.residual}{kind}"
