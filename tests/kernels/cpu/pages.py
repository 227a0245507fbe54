"""Pages with known content, the kernels over them, and softmax in float64 over what the codec says they mean.

A `Cache` holds one codec's pages of N sequences. Slots that nobody sees can be spoiled: random bytes, a quarter of the
floats NaN. `attend` runs the kernels on rows of queries, `exact` is the definition.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kvlab import registry
from kvlab.cache.arrays import Arrays
from kvlab.cache.layout import Geom
from kvlab.codec import Codec
from kvlab.kernels import packing
from kvlab.kernels.cpu import isa, lib
from kvlab.kernels.cpu.attend import Layers, View
from kvlab.kernels.cpu.structs import prototypes  # noqa: F401  (for tests that call the library themselves)
from kvlab.methods.turboquant import TurboQuant

# What a kernel may differ from float64 by, for queries, keys and values of unit variance (runtime.md 9.2): a logit is D
# float32 products times D**-0.5. Partial sums grow like sqrt(i) and each is rounded by at most 2**-24 of itself, so the
# logit is off by 2**-24 sqrt(D / 6) in the root mean square: 2.8e-7 at D = 128, seven sigma of it 2e-6 (a case has up to
# 10**6 logits). An lse or an output is a mean of those, weighted; what its own sums add is smaller.
ATOL = 2e-6
VARIANTS = tuple(isa.VARIANTS)


def library(variant: str) -> ctypes.CDLL:
    """The kernels of a variant; the test is skipped where this machine has none."""
    if missing := isa.lacking(variant):
        pytest.skip(f"this CPU has no {', '.join(missing)}")
    loaded = lib.load(variant)
    if loaded.library is None:
        pytest.skip(f"no kernels: {loaded.reason}")
    return loaded.library


@dataclass(eq=False)
class Cache:
    """k, v float64 [L, N, Hk, slots, D]: what is stored. table int [N, groups, blocks]: one group for all, or (ragged)
    one per (layer, kv head)."""

    codec: Codec
    geom: Geom
    block: int
    arrays: Arrays
    table: np.ndarray
    group_of: np.ndarray
    k: Tensor
    v: Tensor
    holes: Tensor | None = None  # bool [N, slots]: slots that nobody sees, of all heads

    @property
    def flat(self) -> dict[str, Tensor]:
        return {n: self.arrays.token_rows.get(n, rows) for n, rows in self.arrays.block_rows.items()}

    def layers(self, library: ctypes.CDLL, **changes) -> Layers:
        a = self.arrays
        offset = np.arange(self.group_of.size).reshape(self.group_of.shape) * (not self.ragged)
        args = {
            "fmt": self.codec.page_format(), "arrays": self.flat, "block": self.block, "layers": list(range(self.geom.L)),
            "group_of": self.group_of, "offset": offset, "stride": a.layers * a.heads, "capacity": a.n_blocks,
            "G": self.geom.G, "scale": self.geom.scale,
        } | changes  # fmt: skip
        return Layers(library, **args)

    @property
    def ragged(self) -> bool:
        return self.table.shape[1] > 1

    def spoil(self, rows: Rows, seed: int | None = 0) -> None:
        """Garbage (seed None: zeros) in every slot that no row sees, in its scales too, and in every block without a
        visible slot."""
        a, seen = self.arrays, np.zeros((self.arrays.n_blocks, self.block), bool)
        for n, count in enumerate(rows.count):
            for g in range(self.table.shape[1]):
                for lo, hi in zip(rows.lo[n, g, :count], rows.hi[n, g, :count]):
                    at = np.arange(lo, max(lo, hi))
                    seen[self.table[n, g, at // self.block], at % self.block] = True
        good = {n: t.clone() for n, t in a.data.items()}
        a.fill_garbage(seed or 0)
        for t in a.data.values() if seed is None else ():
            t.zero_()
        keep = torch.from_numpy(seen)
        keep[0] = True  # the null block is zero and stays so
        for name, t in a.data.items():
            if a.regions[name].scope == "block":
                t[keep.any(1)] = good[name][keep.any(1)]
            else:
                b, s = keep.nonzero().T
                t[b, :, :, s] = good[name][b, :, :, s]


@dataclass(eq=False)
class Rows:
    """count [N]; lo, hi int [N, groups, rows]: what each row sees. Rows beyond a sequence's count are nonsense."""

    count: list[int]
    lo: np.ndarray
    hi: np.ndarray

    @classmethod
    def last(cls, count: list[int], lengths: list[int], window: int | None = None, groups: int = 1) -> Rows:
        """The last `count[n]` tokens of each sequence, causal; a row sees `window` slots at most."""
        shape = (len(count), groups, max([1, *count]))
        lo, hi = np.full(shape, -7), np.full(shape, 10**9)
        for n, (c, length) in enumerate(zip(count, lengths)):
            hi[n, :, :c] = np.arange(length - c, length) + 1
            lo[n, :, :c] = 0 if window is None else np.maximum(hi[n, :, :c] - window, 0)
        return cls(count, lo, hi)

    @property
    def first(self) -> np.ndarray:
        return np.cumsum([0, *self.count])[:-1]

    @property
    def total(self) -> int:
        return sum(self.count)

    def view(self, table: np.ndarray) -> View:
        return View.of(table, self.lo, self.hi, self.first, np.array(self.count))


def build(method: str, geom: Geom, block: int, slots: list[int], seed: int = 0, ragged: bool = False, spare: int = 0,
          shift: float = 0.0, size: float = 1.0, **options) -> Cache:  # fmt: skip
    """Random keys and values in shuffled blocks, all of the pool (but `spare` blocks). shift: added to keys' channels."""
    codec = registry.build(method, **options).codec
    codec.setup(geom, block)
    N, nb, L, Hk, D = len(slots), -(-max(slots) // block), geom.L, geom.Hk, geom.D
    gen = torch.Generator().manual_seed(seed)
    groups = L * Hk if ragged else 1
    ids = torch.randperm(N * groups * nb, generator=gen).add(1).view(N, groups, nb)
    arrays = Arrays(codec.regions(geom, block), N * groups * nb + 1 + spare, *((1, 1) if ragged else (L, Hk)), block,
                    torch.device("cpu"))  # fmt: skip
    arrays.fill_garbage(seed)
    k, v = (size * torch.randn(L, N * nb, Hk, block, D, generator=gen) for _ in "kv")
    k += shift * torch.randn(Hk, 1, D, generator=gen)
    stored = []
    for layer in range(L):
        page = codec.encode(layer, k[layer], v[layer])
        for name, x in page.items():
            to = arrays.data[name]
            x = x.reshape(N, nb, Hk, *to.shape[3:])
            if ragged:
                for h in range(Hk):
                    to[ids[:, layer * Hk + h], 0, 0] = x[:, :, h]
            else:
                to[ids[:, 0], layer] = x
        full = {n: x if arrays.regions[n].scope == "token" else x[:, :, None] for n, x in page.items()}
        stored.append([x.view(N, nb, Hk, block, D).transpose(1, 2).flatten(2, 3) for x in decode(codec, layer, full)])
    group_of = np.arange(groups).reshape(L, Hk) if ragged else np.zeros((L, Hk), int)
    table = ids.numpy()
    return Cache(codec, geom, block, arrays, table, group_of, *(torch.stack(s) for s in zip(*stored)))


def decode(codec: Codec, layer: int, page: dict[str, Tensor]) -> list[Tensor]:
    """`codec.decode` in float64: where it multiplies matrices, float32 would add errors of its own."""
    if not isinstance(codec, TurboQuant):
        return [x.double() for x in codec.decode(layer, page)]
    out, D = [], codec.geom.D
    for role, pi in zip("kv", codec.pi.double()):
        bits, z = codec.bits[role], 0.0
        if bits:
            z = codec.centroids[role].double()[packing.unpack(page[role], D, bits).long()]
        if codec.variant == "prod" and role == "k":
            signs = packing.unpack(page["k_sign"], D, 1).double() * 2 - 1
            z = z + codec.factor * page["k_gamma"].double()[..., None] * (
                signs @ codec.sketch.double()[_row(codec, layer)]
            )
        out.append(z * page[f"{role}_norm"].double()[..., None] @ pi[_row(codec, layer)])
    return out


def _row(codec: TurboQuant, layer: int) -> int:
    return 0 if codec.share == "all" else layer


def queries(cache: Cache, rows: Rows, seed: int = 1, size: float = 1.0) -> Tensor:
    """float64 [rows, H, D], each a float32 number; never drawn like the keys, which it would then be parallel to."""
    gen = torch.Generator().manual_seed(10**6 + seed)
    return size * torch.randn(rows.total, cache.geom.H, cache.geom.D, generator=gen).double()


def attend(cache: Cache, layers: Layers, rows: Rows, q: Tensor, layer: int = 0, table: np.ndarray | None = None,
           into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [rows, H, D], lse [rows, H]) float32 as the kernels leave them. into: a partial to join."""
    out, lse = into or (torch.full(q.shape, torch.nan), torch.full(q.shape[:2], torch.nan))
    view = rows.view(cache.table if table is None else table)
    layers.attend(layer, view, q.float(), out, lse, join=into is not None)
    return out, lse


def exact(cache: Cache, rows: Rows, q: Tensor, layer: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """float64 out [rows, H, D], lse [rows, H], and of each sequence the weights [rows, Hk, G, slots]."""
    out, lse, weights = [], [], []
    slot = torch.arange(cache.k.shape[3])
    for n, (first, count) in enumerate(zip(rows.first, rows.count)):
        K, V = cache.k[layer, n], cache.v[layer, n]
        lo, hi = (torch.from_numpy(x[n][cache.group_of[layer], :count]).T[:, :, None, None] for x in (rows.lo, rows.hi))
        seen = (slot >= lo) & (slot < hi)  # [rows, Hk, 1, slots]
        if cache.holes is not None:
            seen = seen & ~cache.holes[n]
        heads = q[first : first + count].unflatten(1, (cache.geom.Hk, cache.geom.G))
        logits = torch.einsum("rhgd,hsd->rhgs", heads, K) * cache.geom.scale
        logits = logits.masked_fill(~seen, -torch.inf)
        z = logits.logsumexp(-1)
        w = (logits - z[..., None]).exp().nan_to_num(0.0)
        out.append(torch.einsum("rhgs,hsd->rhgd", w, V).flatten(1, 2))
        lse.append(z.flatten(1, 2))
        weights.append(w)
    return torch.cat(out), torch.cat(lse), weights


def tolerance(cache: Cache, q: Tensor, layer: int = 0) -> float:
    """ATOL, scaled to how large these queries, keys and values are. A codec with a basis of its own multiplies by
    matrices twice more: three sums of D products instead of one."""
    size = [max(1.0, x.square().mean().sqrt().item()) for x in (q, cache.k[layer], cache.v[layer]) if x.numel()]
    turned = cache.codec.page_format().turn is not None
    return ATOL * math.prod(size) * max(1.0, cache.geom.D / 128) ** 0.5 * (3**0.5 if turned else 1.0)


def assert_exact(cache: Cache, rows: Rows, q: Tensor, got: tuple[Tensor, Tensor], layer: int = 0, atol=None) -> None:
    """Outputs and lse of every row; one that sees nothing is zeros and -inf."""
    (want, lse, _), atol = exact(cache, rows, q, layer), atol or tolerance(cache, q, layer)
    none = lse == -torch.inf
    assert (got[0][none] == 0).all() and (got[1][none] == -torch.inf).all(), "a row that sees nothing"
    for name, x, y in (("out", got[0], want), ("lse", got[1], lse)):
        error = (x.double() - y)[~none].abs().max().item() if not none.all() else 0.0
        assert error <= atol, f"{name} is off by {error:.2e} > {atol:.1e}"  # NaN fails too
