"""Pages with known content, and the kernels over them.

A `Cache` holds one codec's pages of N sequences. Slots that nobody sees can be spoiled: random bytes, a quarter of the
floats NaN. `attend` runs the kernels on rows of queries, `exact` (float64.py) is the definition.
"""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from float64 import ATOL, ATOL_16, RMS_16, assert_exact, decode, exact, tolerance  # noqa: F401  (tests find them here)
from torch import Tensor

from kvlab import registry
from kvlab.cache.arrays import Arrays
from kvlab.cache.layout import Geom
from kvlab.codec import Codec
from kvlab.kernels.cpu import isa, lib
from kvlab.kernels.cpu.attend import Layers, View
from kvlab.kernels.cpu.structs import prototypes  # noqa: F401  (for tests that call the library themselves)

VARIANTS = tuple(isa.VARIANTS)


def isa_of(library: ctypes.CDLL) -> str:
    """The instruction set that a library was compiled for."""
    library.kv_isa.restype = ctypes.c_char_p
    return library.kv_isa().decode()


def library(variant: str) -> ctypes.CDLL:
    """The kernels of a variant. Skipped where the CPU or the compiler is missing; what a compiler refuses fails."""
    if missing := isa.lacking(variant):
        pytest.skip(f"this CPU has no {', '.join(missing)}")
    loaded = lib.load(variant)
    if loaded.library is None and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip(f"no kernels: {loaded.reason}")
    assert loaded.library is not None, loaded.reason
    return loaded.library


def flat_mask(valid: Tensor) -> Tensor:
    """[n_blocks, layers, heads, B] as kernels take it: a row per token, in the order of the arrays."""
    return valid.movedim(0, 2).reshape(-1, 1)


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
    valid: Tensor | None = None  # the same as pages have it, uint8 [n_blocks, layers, heads, B], 0 = hole (`punch`)
    fast: bool = False  # what the newest `layers` compute with, and so how close they are
    operands: torch.dtype = torch.float32  # the same: what products multiply

    @property
    def flat(self) -> dict[str, Tensor]:
        return {n: self.arrays.token_rows.get(n, rows) for n, rows in self.arrays.block_rows.items()}

    @property
    def binding(self) -> dict:
        """What a backend's `layers` are made of, by name."""
        a, fmt, arrays = self.arrays, self.codec.page_format(), self.flat
        if self.valid is not None:
            fmt, arrays = replace(fmt, valid="valid"), {**arrays, "valid": flat_mask(self.valid)}
        offset = a.row(0, np.arange(self.group_of.size).reshape(self.group_of.shape) * (not self.ragged))
        return {
            "fmt": fmt, "arrays": arrays, "block": self.block, "layers": [*range(self.geom.L)],
            "group_of": self.group_of, "offset": offset, "stride": 1, "capacity": a.n_blocks,
            "G": self.geom.G, "scale": self.geom.scale,
        }  # fmt: skip

    def layers(self, library: ctypes.CDLL, **changes) -> Layers:
        args = self.binding | changes
        self.fast = args.get("fast", False)
        return Layers(library, **args)

    @property
    def ragged(self) -> bool:
        return self.table.shape[1] > 1

    def punch(self, holes: Tensor) -> None:
        """Make slots `holes` bool [N, slots] of a cache with one table for all heads holes, and put garbage there."""
        self.holes, table = holes, torch.from_numpy(self.table[:, 0]).long()
        n, slot = holes.nonzero().T
        at = table[n, slot // self.block], slice(None), slice(None), slot % self.block
        self.valid = torch.ones(self.arrays.n_blocks, self.arrays.layers, self.arrays.heads, self.block).byte()
        self.valid[at] = 0
        for name, t in self.arrays.data.items():
            if self.arrays.regions[name].scope == "token":
                t[at] = torch.nan if t.is_floating_point() else torch.iinfo(t.dtype).max

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


def halves(rows: Rows, at: np.ndarray) -> list[Rows]:
    """What each row sees, cut at slot `at`."""
    return [Rows(rows.count, rows.lo, np.minimum(rows.hi, at)), Rows(rows.count, np.maximum(rows.lo, at), rows.hi)]


def arrays_of(view: View) -> dict[str, np.ndarray]:
    """The arrays of a view, where they lie."""
    s = view.struct
    shapes = {"table": (s.N, s.groups, s.blocks), "lo": (s.N, s.groups, s.rows), "hi": (s.N, s.groups, s.rows),
              "first": (s.N,), "count": (s.N,)}  # fmt: skip
    ends = np.cumsum([np.prod(x) for x in shapes.values()])
    return {n: a.reshape(x) for (n, x), a in zip(shapes.items(), np.split(view.numbers, ends[:-1]))}


def build(method: str, geom: Geom, block: int, slots: list[int], seed: int = 0, ragged: bool = False, spare: int = 0,
          shift: float = 0.0, size: float = 1.0, **options) -> Cache:  # fmt: skip
    """Random keys and values in shuffled blocks, all of the pool (but `spare` blocks). shift: of key channels."""
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


def attend_all(cache: Cache, layers: Layers, parts: list[Rows], q: Tensor) -> tuple[Tensor, Tensor]:
    """`attend` over what all parts see, which are of the same rows: one call of the kernels."""
    q, out, lse = q.float(), torch.full(q.shape, torch.nan), torch.full(q.shape[:2], torch.nan)
    views, fmt = [p.view(cache.table) for p in parts], layers.formats[0]
    source = [ctypes.addressof(x) for view in views for x in (fmt, view.struct)]
    work = torch.empty(sum(layers.lib.kv_workspace(fmt, view.struct) for view in views))
    code = layers.lib.kv_attend_all(
        (ctypes.c_void_p * len(source))(*source), len(parts), q.data_ptr(), q.stride(1), q.stride(0), out.data_ptr(),
        out.stride(1), out.stride(0), lse.data_ptr(), lse.stride(1), lse.stride(0), 0, work.data_ptr(), len(work),
        torch.get_num_threads(),
    )  # fmt: skip
    assert code == 0, f"refused: {code}"
    return out, lse
