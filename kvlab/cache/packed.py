"""Attention on packed pages: a class's arrays bound to kernels that read them, and what the rows of a bucket see.

The kernels need no tiles: a `View` holds the block table and each row's visible slots [lo, hi), the same numbers that
tiles are cut from.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.pages import Pages
from kvlab.cache.step import Bucket
from kvlab.cache.tables import ClassTables
from kvlab.cache.tiles import Source
from kvlab.kernels.cpu.attend import Layers, View
from kvlab.kernels.format import Format


def bind(lib: ctypes.CDLL, fmt: Format, t: ClassTables, source: Source, G: int, scale: float) -> Layers:
    """Raises kernels.cpu.structs.Refused when the kernels cannot hold the format."""
    arrays, pool = (t.arrays, t.pool) if source == "body" else (t.tail_arrays, t.tail_pool)
    flat = {n: arrays.token_rows.get(n, rows) for n, rows in arrays.block_rows.items()}
    offset = t.layer_in * t.heads_of_group + t.head_in
    return Layers(
        lib,
        fmt,
        flat,
        t.block,
        t.layers,
        t.group_of,
        offset,
        t.layers_of_group * t.heads_of_group,
        pool.n_blocks,
        G,
        scale,
    )


def view(p: Pages, bucket: Bucket, source: Source, folded: bool) -> View | None:
    """What the bucket's rows see of a source, made once a step; None = nothing. folded: query rows come as [Nb, H, rows],
    so that sequence n's start at n * H * rows; else they are the packed rows of the step."""
    key = (id(bucket), source, folded)
    if key not in p.views:
        t, m = p.t, bucket.members
        lo, hi = p.builder.visible(bucket, source)
        some = hi > lo
        lo, hi = np.where(some, lo, 0), np.where(some, hi, 0)
        end = int(hi.max())
        table = t.body if source == "body" else t.tail
        span = table[p.step.cache_rows[m], :, : -(-end // t.block)]
        first = np.arange(len(m)) * (p.builder.G * p.heads * bucket.rows) if folded else p.step.cu[m]
        p.views[key] = View.of(span, lo, hi, first, p.step.q_len[m]) if end else None
    return p.views[key]


def rows_first(x: Tensor, rows: int) -> Tensor:
    """Folded [N, Hk, G * rows, W] as [row, H, W] for the kernels: row n * H * rows + r, heads `rows` rows apart."""
    W = x.shape[-1]
    H = x.shape[1] * x.shape[2] // rows
    return x.as_strided((rows, H, W), (W, rows * W, 1))  # of sequence 0; the next begins H * rows rows later


def lse_rows_first(x: Tensor, rows: int) -> Tensor:
    """Folded [N, Hk, G * rows] as [row, H]."""
    H = x.shape[1] * x.shape[2] // rows
    return x.as_strided((rows, H), (1, rows))


def empty(N: int, Hk: int, R: int, W: int) -> tuple[Tensor, Tensor]:
    """A partial that the kernels fill; rows that only pad a bucket stay zero."""
    return torch.zeros(N, Hk, R, W), torch.zeros(N, Hk, R)
