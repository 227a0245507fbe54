"""What a block holds. This page defines the layout; every other file points here.

Symbols, everywhere in kvlab: L layers, H query heads, Hk kv heads, G = H / Hk, D head_dim, B tokens a block,
N sequences in a step, T packed rows in a step, n token slots of a sequence.

A **Region** is one typed array of a block: `[n_blocks, layers, heads, B, *shape]` (scope "token") or
`[n_blocks, layers, heads, *shape]` (scope "block": shared by the B tokens, valid once the block is sealed). In memory
the blocks of a layer and head lie together (arrays.py).
A **Group** is the set of (layer, kv head) pairs that hold the same NUMBER of slots and so share one block table; which
token a slot holds may differ per head. Uniform budgets: one group. Ragged: a group per layer, or per (layer, head).
A **CachePlan** says which groups exist, what their blocks hold, and whether an exact tail stands before them.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Literal

import torch

Scope = Literal["token", "block"]
Role = Literal["payload", "metadata"]


@dataclass(frozen=True)
class Region:
    """One typed array of a block. `shape` is per token (scope "token") or per block (scope "block"), for one head.

    role: "payload" = codes or kept vectors, "metadata" = what decoding or scoring needs beside them (scales, norms...).
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    scope: Scope = "token"
    role: Role = "payload"

    def bytes(self, block: int) -> int:
        """Bytes of one (layer, head) of a block of `block` tokens. Nothing is rounded up on the device."""
        return self.dtype.itemsize * math.prod(self.shape) * (block if self.scope == "token" else 1)


@dataclass(frozen=True)
class Geom:
    """The shape of a model's KV cache. `windows[l]`: sliding window of layer l in tokens, None = full attention.

    dtype: compute dtype of k, v. scale: multiplies q.k. inv_freq: RoPE frequencies per layer for methods that turn keys
    (float32 [D/2], half-split pairing), empty when the model has no plain RoPE.
    """

    L: int
    H: int
    Hk: int
    D: int
    dtype: torch.dtype = torch.float32
    scale: float = 0.0
    windows: tuple[int | None, ...] = ()
    inv_freq: tuple[tuple[float, ...], ...] = field(default=(), repr=False)
    model: str = "model"

    def __post_init__(self) -> None:
        if self.H % self.Hk:
            raise ValueError(f"{self.model}: {self.H} query heads are not a multiple of {self.Hk} kv heads")
        object.__setattr__(self, "scale", self.scale or self.D**-0.5)
        object.__setattr__(self, "windows", self.windows or (None,) * self.L)

    @property
    def G(self) -> int:
        """Query heads per kv head."""
        return self.H // self.Hk

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token of the full cache in `dtype`, all layers, K and V."""
        return 2 * self.L * self.Hk * self.D * dtype.itemsize


@dataclass(frozen=True)
class Group:
    """(layers x heads) that share one block table. `window`: sliding window of these layers, None = all tokens."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    regions: tuple[Region, ...]
    window: int | None = None

    def block_bytes(self, block: int) -> int:
        return len(self.layers) * len(self.heads) * sum(r.bytes(block) for r in self.regions)


@dataclass(frozen=True)
class CachePlan:
    """What the cache must hold for a model and a compressor.

    block      B, tokens a block
    groups     body groups; together they cover every (layer, head) exactly once
    tail       exact k, v regions of the tail class, or () when tokens are encoded as they come
    residual   the newest `residual` slots are never sealed (only with a tail)
    stage      "prompt": nothing is sealed before the prompt is complete (a pruner sees exact keys first)
    state      regions held once per sequence and layer: shape [*shape] each, `[max_seqs, L, *shape]` in all
    """

    geom: Geom
    block: int
    groups: tuple[Group, ...]
    tail: tuple[Region, ...] = ()
    residual: int = 0
    stage: Literal["none", "prompt"] = "none"
    state: tuple[Region, ...] = ()
    fingerprint: str = ""

    def __post_init__(self) -> None:
        pairs = [(layer, h) for g in self.groups for layer in g.layers for h in g.heads]
        want = {(layer, h) for layer in range(self.geom.L) for h in range(self.geom.Hk)}
        if len(pairs) != len(set(pairs)) or set(pairs) != want:
            raise ValueError("groups must cover every (layer, kv head) exactly once")
        if self.residual and not self.tail:
            raise ValueError("a residual window needs an exact tail")

    @property
    def layout_id(self) -> bytes:
        """16 bytes: two caches may exchange blocks only if these are equal."""
        spec = {
            "geom": [self.geom.L, self.geom.H, self.geom.Hk, self.geom.D, str(self.geom.dtype), self.geom.model],
            "block": self.block,
            "groups": [[g.layers, g.heads, g.window, [_region_spec(r) for r in g.regions]] for g in self.groups],
            "tail": [_region_spec(r) for r in self.tail],
            "residual": self.residual,
            "fingerprint": self.fingerprint,
        }
        text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _region_spec(r: Region) -> list:
    return [r.name, str(r.dtype), list(r.shape), r.scope, r.role]


def window_groups(geom: Geom, regions: tuple[Region, ...]) -> tuple[Group, ...]:
    """One group per distinct sliding window, full attention first: what every dense codec needs."""
    heads = tuple(range(geom.Hk))
    kinds = sorted(set(geom.windows), key=lambda w: (w is not None, w or 0))
    return tuple(
        Group(tuple(i for i, w in enumerate(geom.windows) if w == kind), heads, regions, kind) for kind in kinds
    )


def kv_regions(geom: Geom, dtype: torch.dtype) -> tuple[Region, Region]:
    """Plain keys and values, `[Hk, B, D]` each."""
    return Region("k", dtype, (geom.D,)), Region("v", dtype, (geom.D,))
