"""Per-slot validity: a hole is a slot that nobody sees, wherever it lies and whatever it holds."""

from __future__ import annotations

from dataclasses import replace

import pages
import pytest
import torch

from kvlab.cache.layout import Geom
from kvlab.kernels.cpu.attend import Layers

METHODS = [
    ("full", {}),
    ("int4", {}),
    ("int4", {"group": 16}),
    ("kivi", {"group": 16}),
    ("turboquant", {}),
    ("fp8", {}),
]


def attended(library, cache: pages.Cache, valid: torch.Tensor, rows: pages.Rows, q: torch.Tensor):
    """(out, lse) with the holes of `valid` uint8 [slots] of the only sequence, and float64 over the other slots."""
    a, n = cache.arrays, len(valid)
    mask = torch.zeros(a.n_blocks, a.layers, a.heads, cache.block, dtype=torch.uint8)
    at = torch.arange(n)
    blocks = torch.from_numpy(cache.table[0, 0].astype("int64"))[at // cache.block]
    mask[blocks, :, :, at % cache.block] = valid.view(-1, 1, 1).expand(-1, a.layers, a.heads)
    for name, t in a.data.items():  # a hole holds garbage, its scales too
        if a.regions[name].scope == "token":
            hole = mask[..., None] == 0 if t.dim() == 5 else mask == 0
            bad = float("nan") if t.is_floating_point() else torch.iinfo(t.dtype).max
            t.masked_fill_(hole, bad)
    fmt = replace(cache.codec.page_format(), valid="valid")
    arrays = {**cache.flat, "valid": pages.flat_mask(mask)}
    layers: Layers = cache.layers(library, fmt=fmt, arrays=arrays)
    out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:2], float("nan"))
    layers.attend(0, rows.view(cache.table), q, out, lse)
    G, seen = cache.geom.G, valid.bool()
    want, wlse = torch.zeros_like(q, dtype=torch.float64), torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for r in range(q.shape[0]):
        at = torch.arange(int(rows.lo[0, 0, r]), int(rows.hi[0, 0, r]))
        at = at[seen[at]]
        if len(at):
            k, v = (x[0, 0][:, at].repeat_interleave(G, 0) for x in (cache.k, cache.v))
            s = torch.einsum("hd,hnd->hn", q[r].double(), k) * cache.geom.scale
            want[r], wlse[r] = torch.einsum("hn,hnd->hd", s.softmax(-1), v), s.logsumexp(-1)
    return out, lse, want, wlse


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize(("method", "options"), METHODS, ids=lambda x: str(x))
@pytest.mark.parametrize("variant", pages.VARIANTS)
def test_a_hole_changes_nothing_whatever_it_holds(variant, method, options, count):
    library = pages.library(variant)
    for share in (0.5, 0.03, 1.0):
        gen = torch.Generator().manual_seed(int(100 * share))
        cache = pages.build(method, Geom(1, 6, 2, 64), 32, [300], **options)
        valid = (torch.rand(300, generator=gen) < share).to(torch.uint8)
        valid[:64] = 0  # the first tile, and the first blocks
        rows = pages.Rows.last([count], [300])
        q = torch.randn(count, 6, 64, generator=gen)
        out, lse, want, wlse = attended(library, cache, valid, rows, q)
        assert (out.double() - want).abs().max() <= 2e-5  # turboquant: the float32 rotation, see pages.tolerance
        both = torch.isfinite(wlse)
        assert (lse[both].double() - wlse[both]).abs().max() <= 2e-5


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("variant", pages.VARIANTS)
def test_a_row_that_sees_only_holes_is_empty(variant, count):
    cache = pages.build("int8", Geom(1, 6, 2, 64), 32, [600])
    q = torch.randn(count, 6, 64, generator=torch.Generator().manual_seed(0))
    valid = torch.zeros(600, dtype=torch.uint8)
    out, lse, _, _ = attended(pages.library(variant), cache, valid, pages.Rows.last([count], [600]), q)
    assert not out.any() and bool((lse == -torch.inf).all())
