"""Tokens that a kernel writes: the reference's bytes, for every codec that kernels write."""

from __future__ import annotations

import numpy as np
import pages
import pytest
import torch
from formats import FORMATS, options_of

from kvlab.cache.arrays import Arrays
from kvlab.cache.layout import Geom
from kvlab.kernels.cpu.attend import Layers

EXACT = [
    ("full", {}),
    ("full", {"dtype": "bfloat16"}),
    ("full", {"dtype": "float16"}),
    ("fp8", {}),
    ("fp8", {"format": "e5m2"}),
    ("int8", {"group": 32}),
    ("int8", {"group": 16, "meta_dtype": "float32"}),
    ("int4", {"group": 16}),
    ("int4", {"bits": 3, "group": 32}),
    ("int4", {"bits": 2, "group": 16, "meta_dtype": "bfloat16"}),
]
SCALES = ("none", "norm", "eden_mse", "eden_unbiased", "const_unbiased")
T, HK, BLOCK = 48, 2, 16
CASES = [(m, o, D) for m, o in EXACT for D in (32, 64, 80, 128) if D % o.get("group", 16) == 0]  # groups tile head_dim


def written(library, method: str, options: dict, D: int, k: torch.Tensor, v: torch.Tensor):
    """(codec, what the reference encodes, what the kernel wrote, its answer, arrays); k, v [1, Hk, T, D]."""
    geom = Geom(1, 2 * HK, HK, D)
    codec = pages.registry.build(method, **options).codec
    codec.setup(geom, BLOCK)
    arrays = Arrays(codec.regions(geom, BLOCK), 2 + T // BLOCK, 1, HK, BLOCK, torch.device("cpu"))
    arrays.fill_garbage()
    before = {n: t.clone() for n, t in arrays.data.items()}
    flat = {n: arrays.token_rows[n] for n in arrays.data}
    layers = Layers(
        library, codec.page_format(), flat, BLOCK, [0], np.zeros((1, HK)), arrays.row(0, np.arange(HK)[None]), 1,
        arrays.n_blocks, 2,
        geom.scale,
    )  # fmt: skip
    order = torch.randperm(T // BLOCK, generator=torch.Generator().manual_seed(1)) + 1
    block, offset = order[torch.arange(T) // BLOCK], torch.arange(T) % BLOCK
    rows = torch.stack([arrays.row(block, h) * BLOCK + offset for h in range(HK)]).reshape(-1)
    ok = layers.append(0, k[0], v[0], rows)
    for n, old in before.items():  # blocks that were not asked for are as they were
        for b in (0, arrays.n_blocks - 1):
            assert torch.equal(arrays.data[n][b].view(torch.uint8), old[b].view(torch.uint8)), n
    return codec, {n: flat[n][rows].view(HK, T, *arrays.regions[n].shape) for n in flat}, ok


def tokens(D: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sizes from 1e-6 to 100, a zero vector, a constant one, one with a single channel, ties between codes."""
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, HK, T, D, generator=gen) * torch.logspace(-6, 2, T)[:, None] for _ in "kv")
    k[0, 0, 3], v[0, 1, 2], k[0, 1, 5] = 0, 1.5, 0
    k[0, 1, 5, 7] = -3
    v[0, 0, 9] = torch.arange(D) / 2
    return k, v


@pytest.mark.parametrize(("method", "options", "D"), CASES, ids=lambda x: str(x))
@pytest.mark.parametrize("variant", pages.VARIANTS)
def test_a_kernel_writes_the_bytes_of_encode(variant, method, options, D):
    k, v = tokens(D)
    codec, got, ok = written(pages.library(variant), method, options, D, k, v)
    assert ok
    for name, want in codec.encode(0, k, v).items():
        assert torch.equal(got[name].contiguous().view(torch.uint8), want[0].contiguous().view(torch.uint8)), name


TURNED = [("turboquant", {"scale": s}, 64) for s in SCALES]
TURNED += [
    ("turboquant", {"variant": "prod", "qjl_matrix": m, "rotation": r, "norm_dtype": t}, D)
    for m, r, t, D in (
        ("gaussian", "haar", "float16", 64),
        ("orthogonal", "rht", "bfloat16", 128),
        ("gaussian", "identity", "float32", 80),
    )
]


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_kernels_read_they_write(name):
    """With all options of every codec: where torch writes, a step takes several times as long."""
    method, options = FORMATS[name][0], options_of(name, 64)
    cache = pages.build(method, Geom(1, HK, HK, 64), 64, [64], **options)
    layers = cache.layers(pages.library("generic"))
    assert layers.appends or (cache.codec.scope == "block" and layers.seals)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("method", "options", "D"), TURNED, ids=lambda x: str(x))
@pytest.mark.parametrize("variant", pages.VARIANTS)
def test_a_kernel_writes_turboquant_but_for_rounding_at_the_edges_of_cells(variant, method, options, D, bits):
    """A coordinate is a sum of D float32 products in another order: off by sqrt(D) 2**-25 or so, which passes an edge
    once in some ten thousand coordinates at 8 bits, and zero, the sketch's edge, far less often. Either way the values
    are as near to the input."""
    options = {"bits_k": bits, "bits_v": bits, "share": "head"} | options
    k, v = tokens(D)
    codec, got, ok = written(pages.library(variant), method, options, D, k, v)
    assert ok
    want = codec.encode(0, k, v)
    assert got.keys() == want.keys()
    for name in got:
        if got[name].dtype == torch.uint8:
            same = (got[name] == want[name][0]).float().mean()
            assert same >= 0.999, f"{name}: {1 - same:.2e} of the bytes differ"
        else:  # a last bit of the type, and what a code that moved to its neighbour changes
            least = torch.finfo(got[name].dtype)
            near = ((got[name].double() - want[name][0].double()).abs() - least.smallest_normal * least.eps) / want[
                name
            ][0]
            assert near.nan_to_num(0).max() <= max(2 * least.eps, 1e-3), name
    page = {n: t[None] for n, t in got.items()}
    for x, mine, theirs in zip((k, v), codec.decode(0, page), codec.decode(0, want)):
        far, near = ((y - x).norm(dim=-1) for y in (mine, theirs))
        assert bool((far <= near * 1.001 + 1e-3 * x.norm(dim=-1)).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("method", "options"), [*EXACT[2:], ("turboquant", {}), ("turboquant", {"variant": "prod"})], ids=lambda x: str(x)
)
@pytest.mark.parametrize("variant", pages.VARIANTS)
def test_a_number_that_is_not_finite_is_noticed(variant, method, options, bad):
    """Then the reference encodes the same tokens and says what is wrong and where."""
    for side, at in (("k", 0), ("v", 63)):
        given = dict(zip("kv", tokens(64)))
        given[side][0, 1, 20, at] = bad
        codec, _, ok = written(pages.library(variant), method, options, 64, **given)
        assert not ok
        with pytest.raises(ValueError, match=f"layer 0 {side}"):
            codec.encode(0, **given)


@pytest.mark.parametrize("variant", pages.VARIANTS)
def test_what_does_not_fit_float16_is_noticed(variant):
    k, v = tokens(64)
    k[0, 0, 11, 5] = 70_000
    assert not written(pages.library(variant), "full", {"dtype": "float16"}, 64, k, v)[2]
    k[0, 0, 11] = 1e6
    for kind in ("mse", "prod"):
        assert not written(pages.library(variant), "turboquant", {"variant": kind}, 64, k, v)[2]


@pytest.mark.parametrize("variant", pages.VARIANTS)
def test_a_slot_outside_the_pool_is_refused(variant):
    k, v = tokens(64)
    geom = Geom(1, HK, HK, 64)
    codec = pages.registry.build("int8").codec
    codec.setup(geom, BLOCK)
    arrays = Arrays(codec.regions(geom, BLOCK), 2, 1, HK, BLOCK, torch.device("cpu"))
    layers = Layers(
        pages.library(variant), codec.page_format(), dict(arrays.token_rows), BLOCK, [0], np.zeros((1, HK)),
        arrays.row(0, np.arange(HK)[None]), 1, 2, 1, geom.scale,
    )  # fmt: skip
    for row in (-1, 2 * HK * BLOCK):
        with pytest.raises(ValueError, match="outside the pool"):
            layers.append(0, k[0, :, :1], v[0, :, :1], torch.tensor([0, row]))
