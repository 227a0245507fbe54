"""Whatever attends to pages, behind one interface: the torch path, the CPU's kernels, Triton's.

A test asks for the fixture `backend` (conftest.py) and runs on every one that this process can run: torch and the CPU's
kernels; in a process with TRITON_INTERPRET=1 Triton's in their interpreter, and nothing else; with a GPU all of them.

    layers = backend.layers(cache)                      bound to a pages.Cache: kernels/backend.py Layers
    out, lse = attend(backend, cache, rows, q)          of pages.Rows, as `pages.attend`
    weights = mass(backend, cache, rows, q, lse, 96)
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent / "cpu"))  # `import pages`, from any folder

import pages
from pages import Cache, Rows

from kvlab.cache.scratch import Scratch
from kvlab.kernels import attention
from kvlab.kernels.backend import Layers

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def names() -> tuple[str, ...]:
    """Backends of this process; one that the CPU lacks is skipped when it is made."""
    if INTERPRETED:
        return ("triton",)
    triton = ("triton",) if torch.cuda.is_available() and importlib.util.find_spec("triton") else ()
    return ("torch", *(f"cpu-{v}" for v in pages.VARIANTS), *triton)


def make(name: str, monkeypatch, split: int = 32) -> Backend:
    """split: slots of Triton's splits, so that few slots are several."""
    if name == "torch":
        return Backend(name, "cpu", TorchLayers, lambda *arrays: arrays)
    if name == "triton":
        from kvlab.kernels.triton import layers

        monkeypatch.setattr(layers, "SPLIT", split)
        kernels = layers.Kernels("cpu" if INTERPRETED else "cuda")
    else:
        from kvlab.kernels.cpu.attend import Kernels

        kernels = Kernels(pages.library(name.removeprefix("cpu-")), name)
    return Backend(name, getattr(kernels, "device", "cpu"), partial(bind, kernels), kernels.view)


def bind(kernels, cache: Cache, device: str, dtype: torch.dtype, **changes) -> Layers:
    args = cache.binding | changes
    args["arrays"] = {n: t.to(device) for n, t in args["arrays"].items()}
    layers = kernels.layers(**args, dtype=dtype)
    cache.fast, cache.operands = False, getattr(layers, "compute", torch.float32)
    if cache.operands == torch.float32 and not getattr(layers, "exact", True):
        cache.operands = torch.float16  # tf32 has as many bits
    return layers


class Backend:
    """dtype: of the model; 16 bits let kernels multiply in 16 bits. changes: of `Cache.binding`."""

    def __init__(self, name: str, device: str, bound, view) -> None:
        self.name, self.device, self.view, self._bound = name, device, view, bound

    def layers(self, cache: Cache, dtype: torch.dtype = torch.float32, **changes) -> Layers:
        """Raises Refused."""
        return self._bound(cache, device=self.device, dtype=dtype, **changes)


class TorchLayers:
    """The torch path on a Cache, a sequence at a time: Codec.read of its pages, partials of kernels/attention.py."""

    def __init__(self, cache: Cache, device: str, dtype: torch.dtype) -> None:
        self.cache, self.scratch = cache, Scratch(device)
        cache.fast, cache.operands = False, torch.float32

    def attend(self, i: int, view: tuple, q: Tensor, out: Tensor, lse: Tensor, join: bool = False) -> None:
        geom, codec = self.cache.geom, self.cache.codec
        for n, span in self._sequences(view):
            k, v, mask, empty = self._tile(i, view, n)
            o, z = attention.partial(codec.query(i, self._folded(q[span])), k, v, geom.scale, mask, empty)
            part = self._rows(codec.output(i, o)), self._rows(z)
            out[span], lse[span] = attention.merge((out[span], lse[span]) if join else None, part)

    def mass(self, i: int, view: tuple, q: Tensor, lse: Tensor, columns: int) -> Tensor:
        geom = self.cache.geom
        weights = torch.zeros(len(view[0]), geom.Hk, geom.G, columns)
        for n, span in self._sequences(view):
            k, _, mask, empty = self._tile(i, view, n)
            inner, seen = self.cache.codec.query(i, self._folded(q[span])), self._folded(lse[span, :, None])[..., 0]
            w = attention.mass(inner, k, geom.scale, seen, mask, empty, geom.G)[0, ..., :columns]
            weights[n, ..., : w.shape[-1]] = w
        return weights

    @staticmethod
    def _sequences(view: tuple):
        """(n, its query rows) of those that have some."""
        first, count = view[3], view[4]
        return [(n, slice(f, f + c)) for n, (f, c) in enumerate(zip(first.tolist(), count.tolist())) if c]

    def _folded(self, q: Tensor) -> Tensor:
        """[rows, H, W] -> [1, Hk, G * rows, W]"""
        return q.unflatten(1, (self.cache.geom.Hk, -1)).permute(1, 2, 0, 3).flatten(1, 2)[None]

    def _rows(self, x: Tensor) -> Tensor:
        """[1, Hk, G * rows, ..] -> [rows, H, ..]"""
        return x[0].unflatten(1, (self.cache.geom.G, -1)).flatten(0, 1).transpose(0, 1)

    def _tile(self, i: int, view: tuple, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(k, v [1, Hk, slots, W], mask [1, Hk, G * rows, slots], empty) of a sequence, unseen slots being zero."""
        table, lo, hi, _, count = view
        a, b = (torch.from_numpy(x[n][self.cache.group_of[i], : count[n]]) for x in (lo, hi))
        end = max(1, int(torch.where(a < b, b, 0).max()))
        ids = table[n][:, : -(-end // self.cache.block)]
        page = self._page(i, ids if ids.size else np.zeros((len(ids), 1), int))  # no keys at all crash torch's kernel
        k, v = (x.float() for x in self.cache.codec.read(i, page, self.scratch))
        slot = torch.arange(k.shape[2])
        seen = (slot >= a[..., None]) & (slot < b[..., None])
        if "valid" in page:
            seen = seen & (page["valid"][0, :, None] != 0)
        junk = ~seen.any(1)[None, :, :, None]
        seen = seen.repeat(1, self.cache.geom.G, 1)[None]
        empty = ~seen.any(-1)
        mask = torch.zeros(seen.shape).masked_fill_(~(seen | empty[..., None]), -torch.inf)
        return k.masked_fill(junk, 0), v.masked_fill(junk, 0), mask, empty

    def _page(self, i: int, table: np.ndarray) -> dict[str, Tensor]:
        """The regions of a sequence as codecs take them, [1, Hk, slots | blocks, *shape]. table [groups, blocks]."""
        c, out = self.cache, {}
        args = c.binding
        rows = torch.from_numpy(
            table[args["group_of"][i]] * args["stride"] + args["offset"][i][:, None]
        )  # [Hk, blocks]
        arrays = c.arrays.data if c.valid is None else {**c.arrays.data, "valid": c.valid}
        for name, t in arrays.items():
            x = t.movedim(0, 2).flatten(0, 2)[rows]
            token = name == "valid" or c.arrays.regions[name].scope == "token"
            out[name] = (x.flatten(1, 2) if token else x)[None]
        return out


def attend(
    backend: Backend, cache: Cache, rows: Rows, q: Tensor, layer: int = 0, table: np.ndarray | None = None,
    into: tuple[Tensor, Tensor] | None = None, layers: Layers | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [rows, H, D], lse [rows, H]) float32, on the CPU. q: of any float type, float64 goes in as float32.
    into: a partial to join, which stays as it is. layers: bound by the caller, with options of its own."""
    layers = layers or backend.layers(cache)
    start = into or (torch.full(q.shape, torch.nan), torch.full(q.shape[:2], torch.nan))
    out, lse = (x.to(backend.device, torch.float32, copy=True) for x in start)
    layers.attend(layer, seen(backend, cache, rows, table), given(backend, q), out, lse, join=into is not None)
    return out.cpu(), lse.cpu()


def mass(
    backend: Backend, cache: Cache, rows: Rows, q: Tensor, lse: Tensor, columns: int, layer: int = 0,
    table: np.ndarray | None = None, layers: Layers | None = None,
) -> Tensor:  # fmt: skip
    """float32 [N, Hk, G, columns], on the CPU; lse +inf = no vote. Else as `attend`."""
    layers = layers or backend.layers(cache)
    view = seen(backend, cache, rows, table)
    return layers.mass(layer, view, given(backend, q), lse.to(backend.device, torch.float32), columns).cpu()


def seen(backend: Backend, cache: Cache, rows: Rows, table: np.ndarray | None = None):
    table = cache.table if table is None else table
    return backend.view(table, rows.lo, rows.hi, rows.first, np.array(rows.count, np.int64))


def given(backend: Backend, q: Tensor) -> Tensor:
    return q.to(backend.device, torch.float32 if q.dtype == torch.float64 else q.dtype)
