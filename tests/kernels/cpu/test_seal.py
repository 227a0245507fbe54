"""Blocks of an exact window, of every float type, become the bytes that the reference makes of the same numbers."""

from __future__ import annotations

import pages
import pytest
import torch
from pages import VARIANTS

from kvlab.cache.layout import Geom

TYPES = [torch.float32, torch.bfloat16, torch.float16]
METHODS = {"kivi": {}, "kivi 3": {"bits_k": 3, "bits_v": 3}, "int4": {"group": 32}, "int8": {}, "fp8": {}, "full": {}}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sealed_block_is_what_the_reference_encodes(variant, name, dtype):
    """Blocks in any order, the last rows of both arrays included. Fails for a 16-bit type that is read as another."""
    library = pages.library(variant)
    cache = pages.build(name.split()[0], Geom(2, 6, 2, 64), 32, [100, 40], spare=3, **METHODS[name])
    layers, gen = cache.layers(library), torch.Generator().manual_seed(0)
    k, v = ((3 * torch.randn(5, 32 * 64, generator=gen)).to(dtype) for _ in "kv")
    flat = cache.arrays.block_rows
    rows = len(flat["k"])
    src, dst = torch.tensor([4, 0, 2]), torch.tensor([rows - 1, rows - 5, rows - 2])
    assert layers.seal(1, k, v, src, dst)
    want = cache.codec.encode(1, *(x[src].float().view(3, 1, 32, 64) for x in (k, v)))
    for region, x in want.items():
        got = flat[region][dst]
        assert torch.equal(got.view(torch.uint8), x.reshape(3, -1).to(got.dtype).view(torch.uint8)), region


@pytest.mark.parametrize("wrong", [lambda x: x.double(), lambda x: x.to(torch.int16), lambda x: x.T.contiguous().T])
def test_other_arrays_are_refused(wrong):
    cache = pages.build("kivi", Geom(1, 2, 1, 64), 32, [40])
    layers, x, at = cache.layers(pages.library("generic")), torch.zeros(2, 32 * 64), torch.tensor([1])
    for pair in ((wrong(x), wrong(x)), (x, x.bfloat16())):
        with pytest.raises(AssertionError, match="not contiguous floats of one type"):
            layers.seal(0, *pair, at, at)
