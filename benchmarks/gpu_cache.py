"""Pages of a codec for gpu_kernels.py, and what attention over them must give.

A cache has `layers` layers in one pool of blocks, as in the engine, and the blocks of its sequences lie shuffled. All
blocks are copies of a few that the codec encoded: a cache of any size is filled in no time, and its attention is known
in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gpu_clock import Machine
from gpu_run import LeftOut
from torch import Tensor

from kvlab import registry
from kvlab.cache.arrays import Arrays
from kvlab.cache.layout import Geom
from kvlab.codec import Codec
from kvlab.kernels import dispatch

SHAPES = {"Llama-3-8B": (8, 4, 128), "SmolLM2-135M": (3, 3, 64), "tiny": (1, 2, 64)}  # kv heads, queries of each, D
CODECS = {
    "full float16": ("full", {"dtype": "float16"}),
    "full bfloat16": ("full", {"dtype": "bfloat16"}),
    "fp8 e4m3": ("fp8", {}),
    "int8": ("int8", {}),
    "int4": ("int4", {}),
    "int2": ("int4", {"bits": 2}),
    "kivi 4": ("kivi", {"bits_k": 4, "bits_v": 4}),
    "kivi 2": ("kivi", {}),
    "turboquant 4": ("turboquant", {}),
    "turboquant 3": ("turboquant", {"bits_k": 3, "bits_v": 3}),
    "turboquant 2": ("turboquant", {"bits_k": 2, "bits_v": 2}),
}
BLOCK = 32
DISTINCT = 8  # blocks that the others are copies of
# The largest error allowed, in units of the outputs' root mean square. Weights and outputs of 16 bits are off by up to
# 2**-12 of themselves (bfloat16: 2**-9), the largest of a million outputs is 5 of those units; a wrong block, scale or
# layer is off by a tenth and more.
WRONG = {torch.float16: 0.02, torch.bfloat16: 0.1, torch.float32: 1e-3}


@dataclass(eq=False)
class Pages:
    """A cache of one codec, and kernels bound to it. dtype: of queries, outputs and exact keys and values."""

    codec: Codec
    geom: Geom
    arrays: Arrays
    table: np.ndarray  # int [N, 1, blocks]
    context: int
    dtype: torch.dtype
    decoded: list[tuple[Tensor, Tensor]]  # of each layer: k, v float64 [DISTINCT, Hk, B, D]

    @classmethod
    def of(cls, facts: dict, machine: Machine, hollow: bool = False) -> Pages:
        """hollow: the same launches over a pool of one block, of which no row sees anything."""
        (Hk, G, D), (method, options) = SHAPES[facts["shape"]], CODECS[facts["codec"]]
        block, batch = facts.get("block", BLOCK), facts["batch"]
        dtype = _dtype(facts)
        codec = registry.build(method, **options).codec
        per_seq = -(-facts["context"] // block)
        one = sum(r.bytes(block) for r in _setup(codec, Geom(1, Hk * G, Hk, D, dtype), block)) * Hk * per_seq * batch
        layers = machine.layers(one, facts.get("layers"))
        while not hollow and layers > 1 and one * layers > machine.room():
            layers -= 1
        if not hollow and one * layers > machine.room():
            raise LeftOut(f"memory: {one / 1e9:.0f} GB of pages")
        geom = Geom(layers, Hk * G, Hk, D, dtype)
        regions, count = _setup(codec, geom, block), per_seq * batch
        arrays = Arrays(regions, (1 if hollow else count) + 1, layers, Hk, block, machine.device)
        table = np.ones(count, np.int64) if hollow else np.random.default_rng(0).permutation(count) + 1
        decoded = [] if hollow else _fill(codec, geom, block, arrays)
        context = 0 if hollow else per_seq * block
        return cls(codec, geom, arrays, table.reshape(batch, 1, per_seq), context, dtype, decoded)

    def bind(self, machine: Machine):
        """(kernels of all layers, what decoding rows see)"""
        backend, L, Hk = dispatch.backend(str(machine.device), "triton"), self.geom.L, self.geom.Hk
        flat = {n: self.arrays.token_rows.get(n, rows) for n, rows in self.arrays.block_rows.items()}
        exact = machine.dry and self.dtype == torch.bfloat16  # triton's interpreter multiplies no bfloat16
        bound = backend.layers(
            self.codec.page_format(), flat, self.arrays.block, list(range(L)), np.zeros((L, Hk), np.int64),
            self.arrays.row(0, np.arange(L * Hk).reshape(L, Hk)), 1, self.arrays.n_blocks, self.geom.G, self.geom.scale,
            dtype=torch.float32 if exact else self.dtype,
        )  # fmt: skip
        N = len(self.table)
        ends = np.full((N, 1, 1), self.context)
        return bound, backend.view(self.table, ends * 0, ends, np.arange(N), np.ones(N, np.int64))

    def queries(self, machine: Machine) -> tuple[Tensor, Tensor, Tensor]:
        """q [N, H, D], an out and an lse that hold NaN."""
        gen = torch.Generator().manual_seed(1)
        q = torch.randn(len(self.table), self.geom.H, self.geom.D, generator=gen).to(machine.device, self.dtype)
        return q, torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=q.device)

    @property
    def bytes(self) -> int:
        """Codes and metadata of one layer that all sequences together read."""
        return self.arrays.block_bytes // self.geom.L * self.table.size

    def expected(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """float64 out [N, H, D] and lse [N, H]: a softmax over the distinct blocks, each as often as a table has it."""
        k, v = (x.transpose(0, 1).flatten(1, 2) for x in self.decoded[layer])  # [Hk, DISTINCT * B, D]
        copies = torch.from_numpy((self.table[:, 0] - 1) % DISTINCT)
        often = torch.nn.functional.one_hot(copies, DISTINCT).sum(1).double().repeat_interleave(self.arrays.block, 1)
        heads = q.double().cpu().unflatten(1, (self.geom.Hk, self.geom.G))
        x = torch.einsum("nhgd,hsd->nhgs", heads, k) * self.geom.scale + often.log()[:, None, None]
        lse = x.logsumexp(-1)
        return torch.einsum("nhgs,hsd->nhgd", (x - lse[..., None]).exp(), v).flatten(1, 2), lse.flatten(1)


def _dtype(facts: dict) -> torch.dtype:
    if facts.get("products") == "float32":
        return torch.float32
    return torch.bfloat16 if facts["codec"] == "full bfloat16" else torch.float16


def _setup(codec: Codec, geom: Geom, block: int):
    codec.setup(geom, block)
    return codec.regions(geom, block)


def _fill(codec: Codec, geom: Geom, block: int, arrays: Arrays) -> list[tuple[Tensor, Tensor]]:
    """Every block of the pool, on whatever device it is; encoded and decoded on the CPU."""
    gen, decoded, pages = torch.Generator().manual_seed(0), [], []
    for layer in range(geom.L):
        k, v = (torch.randn(DISTINCT, geom.Hk, block, geom.D, generator=gen).to(geom.dtype) for _ in "kv")
        page = codec.encode(layer, k, v)
        whole = {n: x if arrays.regions[n].scope == "token" else x[:, :, None] for n, x in page.items()}
        decoded.append(tuple(x.view(k.shape).double() for x in codec.decode(layer, whole)))
        pages.append(page)
    for name, t in arrays.data.items():
        x = torch.stack([p[name].reshape(DISTINCT, *t.shape[2:]) for p in pages], 1).to(t.device, t.dtype)
        n, rest = divmod(len(t) - 1, DISTINCT)
        t[1 : 1 + n * DISTINCT].unflatten(0, (n, DISTINCT)).copy_(x.expand(n, *x.shape))
        t[1 + n * DISTINCT :] = x[:rest]
    return decoded


def accept(out: Tensor, want: Tensor, dtype: torch.dtype) -> float:
    """The largest difference, in units of the root mean square of what is right; ArithmeticError if it is too large."""
    error = float((out.double().cpu() - want).abs().max() / want.square().mean().sqrt())
    if not error <= WRONG[dtype]:  # NaN is wrong too
        raise ArithmeticError(f"wrong: off by {error:.2g} of the root mean square of what is right")
    return error
