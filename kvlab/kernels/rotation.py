"""Orthogonal matrices that make every coordinate of a vector look alike, and how they are applied.

    haar       uniform over the orthogonal group: QR of a Gaussian matrix, columns times sign(diag R) (LAPACK's Q alone
               is not uniform). Any size.
    rht        randomised Hadamard, `rounds` times (H diag(s)) / sqrt(d), s random signs. d a power of two. One round
               sends a one-hot vector to +-1/sqrt(d) exactly, which no codebook for the sphere law expects: two rounds
               at d >= 128 and three at d <= 64 bring the error of such vectors to that of haar.
    identity   none (ablation)

A matrix depends only on (seed, layer, kv head, role, purpose): drawn on the CPU in float64, then rounded to float32, so
a head keeps its matrix on every device and in every shard of a model. RHT is held as its dense matrix too: for head
dims up to 256 a matrix product is faster on a CPU than log2(d) passes over memory.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

# A BLAS takes another path for products with few rows and then rounds differently (seen below 4). Padding to this many
# rows makes the result of a row independent of how many rows come with it: token by token == batched, bit for bit.
MIN_ROWS = 8


def generator(seed: int, layer: int, head: int, role: str, purpose: str) -> torch.Generator:
    """role "k" or "v"; purpose "pi" (rotation) or "s" (sketch). layer, head: -1 when shared."""
    key = f"{seed}/{layer}/{head}/{role}/{purpose}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def gaussian(d: int, g: torch.Generator) -> Tensor:
    """float64 [d, d], entries N(0, 1)."""
    return torch.randn(d, d, dtype=torch.float64, generator=g)


def haar(d: int, g: torch.Generator) -> Tensor:
    """float64 [d, d], uniform over the orthogonal group."""
    q, r = torch.linalg.qr(gaussian(d, g))
    return q * torch.sign(torch.diagonal(r))


def hadamard(d: int) -> Tensor:
    """float64 [d, d], Sylvester's construction, entries +-1."""
    if d & (d - 1):
        raise ValueError(f"a Hadamard matrix of this kind needs a power of two, got {d}")
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(d.bit_length() - 1):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def rht(d: int, g: torch.Generator, rounds: int) -> Tensor:
    """float64 [d, d]."""
    h, m = hadamard(d) / math.sqrt(d), torch.eye(d, dtype=torch.float64)
    for _ in range(rounds):
        signs = torch.randint(0, 2, (d, 1), generator=g, dtype=torch.float64) * 2 - 1
        m = h @ (signs * m)
    return m


def rotation(kind: str, d: int, g: torch.Generator, rounds: int = 2) -> Tensor:
    """float32 [d, d]."""
    if kind == "haar":
        return haar(d, g).float()
    if kind == "rht":
        return rht(d, g, rounds).float()
    if kind == "identity":
        return torch.eye(d)
    raise ValueError(f"unknown rotation {kind!r}; known: haar, rht, identity")


def apply(x: Tensor, m: Tensor) -> Tensor:
    """Every vector times m, float32. x [..., Hk, t, D]; m [E, D], or one per kv head [Hk, E, D] -> [..., Hk, t, E].

    x may have keys and values stacked in front, [S, N, Hk, t, D]; then m has that axis too, [S, E, D] or [S, Hk, E, D].
    """
    sides, E = x.dim() - 4, m.shape[-2]
    if m.dim() == 2 + sides:  # all heads share
        rows = x.reshape(*x.shape[:sides], -1, x.shape[-1])
        return _times(rows.float(), m.mT).view(*x.shape[:-1], E)
    y = x.movedim(-3, sides)  # [S, Hk, N, t, D]
    rows = y.reshape(-1, y.shape[-3] * y.shape[-2], y.shape[-1])
    return _times(rows.float(), m.reshape(-1, *m.shape[-2:]).mT).view(*y.shape[:-1], E).movedim(sides, -3)


def inverse(z: Tensor, m: Tensor) -> Tensor:
    """Undo `apply` of an orthogonal m (multiply by its transpose)."""
    return apply(z, m.mT)


def _times(rows: Tensor, m: Tensor) -> Tensor:
    n = rows.shape[-2]
    if n >= MIN_ROWS:
        return rows @ m
    return (pad(rows, (0, 0, 0, MIN_ROWS - n)) @ m)[..., :n, :]
