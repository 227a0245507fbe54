"""turboquant: rotate, then one fixed codebook for every coordinate; one norm per vector, nothing to calibrate.

A random rotation makes any vector look like a point drawn uniformly from a sphere, whose coordinates follow one known
law; the best scalar quantizer for that law (kernels/codebook.py) then has an error that is a constant of (D, bits).

    encode  n = |x|, z = Pi x/n, code_j = cell of z_j        decode  x~ = s Pi^T c[code]    s: the stored number

`scale` says what s is; the expectation of <y, x~> is (1 - mse) <y, x> without any correction:
    none            n                  the paper's: shrinks
    norm            n / |z~|           keeps the length
    eden_mse        n <z,z~> / |z~|^2  least squares
    eden_unbiased   n / <z,z~>         <x~,x> = |x|^2 for every vector
    const_unbiased  n / (1 - mse)      unbiased on average, one constant
`variant: prod` (keys only; `scale` is then about values) takes a bit from the codes and stores the signs of S (z - z~),
S random, and |z - z~|: unbiased inner products too, but at equal bits 4 to 6 times the variance of eden_unbiased from
2 bits on. It is here for the paper's sake.

Stored   k, v            uint8 [Hk, B, D bits/8]        codes, packed in order `split` (prod keys: bits - 1)
         k_norm, v_norm  fp16 [Hk, B]                   s
         k_sign, k_gamma uint8 [Hk, B, D/8], fp16 [Hk, B]   prod: signs, |z - z~|
Bytes    D bits_k/8 + 2 + D bits_v/8 + 2 per token and kv head (prod: 2 more for keys): 68 at D=64, 4 bits (4.25 bits an
         element); fp16: 256
Error    E|x - x~|^2 = mse |x|^2 with scale=none: 0.3584 0.1145 0.0334 0.0091 for 1..4 bits at D=64, whatever the data
Keys     post-RoPE, rotated; scores need no inverse rotation: <Pi q, Pi k> = <q, k>. A page depends only on its own
         tokens and the seed, so prefixes may be shared between caches with the same fingerprint
Source   TurboQuant, arXiv 2504.19874, algorithms 1 and 2; QJL, arXiv 2406.03482; scale modes: EDEN, arXiv 2105.08339,
         compared in arXiv 2604.18555. Many articles call stage one "PolarQuant"; arXiv 2502.02617 is another method.

Not covered: the paper's split of channels into outliers and the rest (its 2.5 and 3.5 bit rows).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache.layout import Geom, Region
from kvlab.cache.scratch import Scratch
from kvlab.codec import Codec, Page
from kvlab.errors import ConfigError
from kvlab.kernels import codebook, lookup, meta, packing, rotation
from kvlab.kernels.format import Format, Side

CHOICES = {
    "variant": ("mse", "prod"),
    "scale": ("none", "norm", "eden_mse", "eden_unbiased", "const_unbiased"),
    "rotation": ("haar", "rht", "identity"),
    "share": ("all", "layer", "head"),
    "qjl_matrix": ("gaussian", "orthogonal"),
}


ZERO = 1e-30  # vectors shorter than this are stored as norm 0, codes 0: their 1 / n, or the sum of it, may overflow


@dataclass
class TurboQuant(Codec):
    bits_k: int = 4
    bits_v: int = 4
    variant: str = "mse"
    scale: str = "eden_unbiased"
    rotation: str = "haar"
    rounds: int | None = None
    share: str = "layer"
    qjl_matrix: str = "gaussian"
    norm_dtype: str = "float16"
    seed: int = 0

    # -- setup ---------------------------------------------------------------------------------------------------
    def setup(self, geom: Geom, block: int) -> None:
        super().setup(geom, block)
        self._check(geom)
        D, prod = geom.D, self.variant == "prod"
        self.norm = meta.dtype_of("turboquant", "norm_dtype", self.norm_dtype)
        self.bits = {"k": self.bits_k - prod, "v": self.bits_v}
        self.together = ("kv",) if self.bits_k == self.bits_v and not prod else ("k", "v")  # encoded in one go
        self.pi = torch.stack([self._matrices(role, "pi") for role in "kv"])  # [2, 1 | L, (Hk,) D, D]
        self.centroids, self.slots, self.half, self.mse, self.tables, self.channel = {}, {}, {}, {}, {}, {}
        for role, bits in self.bits.items():
            if bits:
                book = codebook.lloyd_max(D, bits)
                self.centroids[role], self.mse[role] = book.centroids.float(), book.mse
                self.half[role], *self.slots[role] = codebook.grid(D, bits)
                self.tables[role] = lookup.table(self.centroids[role], D)
                self.channel[role] = lookup.order(D, bits)
        if prod:
            self.sketch = self._matrices("k", "s")
            self.factor = math.sqrt(math.pi / 2) / D
            if self.qjl_matrix == "orthogonal":  # 1 / (D E|coordinate|); its limit sqrt(pi / 2D) is 0.4 % off at D=64
                self.factor = math.sqrt(math.pi) * math.exp(math.lgamma((D + 1) / 2) - math.lgamma(D / 2)) / D
            self.tables["k_sign"] = lookup.table(torch.tensor([-self.factor, self.factor]), D)
            self.channel["k_sign"] = lookup.order(D, 1)

    def _check(self, geom: Geom) -> None:
        for key, known in CHOICES.items():
            if getattr(self, key) not in known:
                got = getattr(self, key)
                raise ConfigError(f"turboquant: {key}={got!r} is unknown; choose one of {', '.join(known)}.")
        for key in ("bits_k", "bits_v"):
            if not 1 <= getattr(self, key) <= 8:
                raise ConfigError(
                    f"turboquant: {key}={getattr(self, key)} is not 1 to 8 bits: a code fits a byte. More bits than 8 "
                    "are method=full dtype=float16."
                )
        if self.rotation == "rht" and geom.D & (geom.D - 1):
            raise ConfigError(
                f"turboquant: rotation=rht needs a power-of-two head_dim, {geom.model} has {geom.D}. Use "
                f"method.rotation=haar (any head_dim, same bytes and error), or method=kivi, which needs no rotation."
            )
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"turboquant: rounds={self.rounds} is not a number of rounds; use 1 or more, or null.")
        if geom.D < 3:
            raise ConfigError(f"turboquant: head_dim {geom.D} of {geom.model} is below 3: the sphere law needs 3.")

    def _matrices(self, role: str, purpose: str) -> Tensor:
        """float32 [1 | L, D, D], or [L, Hk, D, D] with share=head."""
        geom, D = self.geom, self.geom.D
        rounds = self.rounds or (3 if D <= 64 else 2)

        def one(layer: int, head: int) -> Tensor:
            g = rotation.generator(self.seed, layer, head, role, purpose)
            if purpose == "pi":
                return rotation.rotation(self.rotation, D, g, rounds)
            return (rotation.gaussian(D, g) if self.qjl_matrix == "gaussian" else rotation.haar(D, g)).float()

        if self.share == "all":
            return one(-1, -1)[None]
        if self.share == "layer":
            return torch.stack([one(layer, -1) for layer in range(geom.L)])
        return torch.stack([torch.stack([one(layer, h) for h in range(geom.Hk)]) for layer in range(geom.L)])

    def _row(self, layer: int) -> int:
        """Where the matrices of a layer are."""
        return 0 if self.share == "all" else layer

    # -- bytes ---------------------------------------------------------------------------------------------------
    def regions(self, geom: Geom, block: int) -> tuple[Region, ...]:
        out = []
        for role, bits in self.bits.items():
            if bits:
                out.append(Region(role, torch.uint8, (packing.packed_bytes(geom.D, bits),)))
            out.append(Region(f"{role}_norm", self.norm, (), role="metadata"))
        if self.variant == "prod":
            out.append(Region("k_sign", torch.uint8, (packing.packed_bytes(geom.D, 1),)))
            out.append(Region("k_gamma", self.norm, (), role="metadata"))
        return tuple(out)

    def encode(self, layer: int, k: Tensor, v: Tensor) -> Page:
        given, page = {"k": k, "v": v}, {}
        for roles in self.together:
            x = torch.stack([given[r] for r in roles])
            for name, value in self._encode(roles, layer, x).items():
                for role, side in zip(roles, value):
                    page[role + name] = side
        return page

    def _encode(self, roles: str, layer: int, x: Tensor) -> Page:
        """x [S, M, Hk, t, D], one side per role -> {suffix of a region: [S, M, Hk, t, ...]}."""
        role, x = roles[0], x.float()
        bits, prod = self.bits[role], self.variant == "prod" and role == "k"
        n = torch.linalg.vector_norm(x, dim=-1)
        per_n = n.reciprocal()  # infinite for a zero vector: set right below, so that the usual case pays nothing
        z = rotation.apply(x * per_n.unsqueeze(-1), self._pi(roles, layer))
        codes = codebook.quantize(z, self.half[role], *self.slots[role]) if bits else None
        out = {}
        if prod:
            rest = z - self._values(role, codes) if bits else z
            signs = (rotation.apply(rest, self.sketch[None, self._row(layer)]) >= 0).view(torch.uint8)
            gamma = torch.linalg.vector_norm(rest, dim=-1).to(self.norm)
            stored = n.to(self.norm)
            out = {"_sign": signs, "_gamma": gamma}
        else:
            stored = self._corrected(role, n, z, codes).to(self.norm)
        if not meta.finite(stored, per_n):
            zero = n < ZERO
            for t in (codes, out.get("_sign"), stored, out.get("_gamma")):
                if t is not None:
                    t.masked_fill_(zero.unsqueeze(-1) if t.dim() == x.dim() else zero, 0)
            meta.refuse("turboquant", layer, "norm_dtype", **dict(zip(roles, zip(x, stored))))
        if prod:
            out["_sign"] = packing.pack(signs, 1)
        if bits:
            out[""] = packing.pack(codes, bits)
        return out | {"_norm": stored}

    def _corrected(self, role: str, n: Tensor, z: Tensor, codes: Tensor) -> Tensor:
        """The number to store, by `scale`: z~ = c[codes], n = |x|."""
        if self.scale == "none":
            return n
        if self.scale == "const_unbiased":
            return n / (1 - self.mse[role])
        zt = self._values(role, codes)
        if self.scale == "norm":
            return n / torch.linalg.vector_norm(zt, dim=-1)
        dot = (z * zt).sum(-1)
        return n / dot if self.scale == "eden_unbiased" else n * dot / (zt * zt).sum(-1)

    def _pi(self, roles: str, layer: int) -> Tensor:
        """[S, (Hk,) D, D]"""
        return self.pi["kv".index(roles[0]) :, self._row(layer)][: len(roles)]

    def _values(self, role: str, codes: Tensor) -> Tensor:
        return torch.index_select(self.centroids[role], 0, codes.reshape(-1).to(torch.int32)).view(codes.shape)

    # -- meaning -------------------------------------------------------------------------------------------------
    def decode(self, layer: int, page: Page) -> tuple[Tensor, Tensor]:
        k, v = (rotation.inverse(self._rotated(r, layer, page), self._pi(r, layer)[0]) for r in "kv")
        return k, v

    def _rotated(self, role: str, layer: int, page: Page) -> Tensor:
        """The stored vector before the inverse rotation."""
        z, D, bits = 0.0, self.geom.D, self.bits[role]
        if bits:
            z = self._values(role, packing.unpack(page[role], D, bits))
        if self.variant == "prod" and role == "k":
            signs = packing.unpack(page["k_sign"], D, 1).float() * 2 - 1
            gamma = page["k_gamma"].float().unsqueeze(-1)
            z = z + self.factor * gamma * rotation.inverse(signs, self.sketch[self._row(layer)])
        return z * page[f"{role}_norm"].float().unsqueeze(-1)

    # -- attention in the rotated basis ----------------------------------------------------------------------------
    # Channels come in the order in which packed codes are read. Keys of variant prod are twice as wide,
    # [n c[code], n gamma factor sign] against [Pi q, S Pi q]; values are then padded with zeros to the same width.
    def query(self, layer: int, q: Tensor) -> Tensor:
        q = rotation.apply(q, self._pi("k", layer)[0])
        parts = [q.index_select(-1, self.channel["k"])] if self.bits["k"] else []
        if self.variant == "prod":
            sketch = rotation.apply(q, self.sketch[self._row(layer)])
            parts.append(sketch.index_select(-1, self.channel["k_sign"]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def read(self, layer: int, page: Page, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Rotated keys and values. A row's bits do not depend on what it is read with."""
        if self.variant == "mse" or not self.bits["k"]:
            name = "k" if self.variant == "mse" else "k_sign"
            return self._scaled(name, page, scratch), self._scaled("v", page, scratch)
        D, lead = self.geom.D, tuple(page["k_norm"].shape)
        k, v = (scratch.get(f"turboquant.wide.{r}", (*lead, 2 * D), torch.float32) for r in "kv")
        self._scaled("k", page, scratch, k[..., :D])
        self._scaled("k_sign", page, scratch, k[..., D:])
        self._scaled("v", page, scratch, v[..., :D])
        v[..., D:] = 0
        return k, v

    def _scaled(self, name: str, page: Page, scratch: Scratch, out: Tensor | None = None) -> Tensor:
        c = scratch.get(f"turboquant.{name}", (*page[name].shape[:-1], self.geom.D), torch.float32)
        lookup.lookup(page[name], self.bits.get(name, 1), self.tables[name], c, scratch.get)
        norm = page[f"{name[0]}_norm"]
        if name == "k_sign":
            norm = norm.float() * page["k_gamma"].float()
        return torch.mul(c, norm.unsqueeze(-1), out=c if out is None else out)

    def output(self, layer: int, o: Tensor) -> Tensor:
        z = torch.empty((*o.shape[:-1], self.geom.D), dtype=o.dtype, device=o.device)
        z.index_copy_(-1, self.channel["v"], o[..., : self.geom.D])
        return rotation.inverse(z, self._pi("v", layer)[0])

    # -- attention on packed pages: the rotated basis, channels in order ---------------------------------------------
    def page_format(self) -> Format:
        D, prod = self.geom.D, self.variant == "prod"
        k = [self._side("k", "none" if prod else self.scale)] if self.bits["k"] else []
        if prod:
            signs = torch.tensor([-self.factor, self.factor])
            k.append(Side("k_sign", "codes", D, 1, D, "token", D, "k_norm", "k_gamma", table=signs, fit="sketch"))
        v = self._side("v", self.scale)
        turn = [self.pi[0]] if self.bits["k"] else []
        if prod:
            turn.append((self.sketch.double() @ self.pi[0].double()).float())
        return Format(tuple(k), v, self._per_layer(torch.cat(turn, -2).mT), self._per_layer(self.pi[1]))

    def _side(self, role: str, fit: str) -> Side:
        D, book = self.geom.D, codebook.lloyd_max(self.geom.D, self.bits[role])
        return Side(
            role, "codes", D, self.bits[role], D, "token", D, f"{role}_norm", table=self.centroids[role],
            edges=book.edges.float(), factor=1 / (1 - book.mse), fit=fit,
        )  # fmt: skip

    def _per_layer(self, m: Tensor) -> Tensor:
        """[1 | L, (Hk,) ..] -> [L, 1 | Hk, ...]"""
        m = m if self.share == "head" else m.unsqueeze(1)
        return m.expand(self.geom.L, -1, -1, -1).contiguous()

    # -- reports ---------------------------------------------------------------------------------------------------
    def static(self) -> dict[str, Tensor]:
        out = {"pi": self.pi} | {f"centroids_{r}": c for r, c in self.centroids.items()}
        out |= {f"table_{n}": t for n, t in self.tables.items()}
        out |= {f"slots_{r}.{i}": t for r, ts in self.slots.items() for i, t in enumerate(ts)}
        return out | ({"sketch": self.sketch} if self.variant == "prod" else {})

    def label(self) -> str:
        parts = [f"turboquant k{self.bits_k} v{self.bits_v}"]
        parts += [f"prod {self.qjl_matrix}"] if self.variant == "prod" else []
        parts += [self.scale] if self.scale != "eden_unbiased" else []
        return " ".join(parts + ([self.rotation] if self.rotation != "haar" else []))
