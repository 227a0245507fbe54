"""Attention on packed pages is softmax in float64 over what the codec decodes: every codec, bit width, shape, backend.

A case draws its shape from a generator seeded by its name; `test_the_cases_cover` says that nothing was left out. The
slots that a case must not read hold garbage (pages.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from random import Random

import pages
import pytest
import torch
from formats import BLOCKS, DIMS, FORMATS, META, fits, options_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import VARIANTS, Rows

from kvlab.cache.layout import Geom
from kvlab.kernels.cpu import isa
from kvlab.kernels.format import Format, Side

# around a run of 16 tokens, a tile of 64, a split of 256 (longer ones: below), and the blocks
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 256, 257, 512, 600)


def draw(name: str, i: int) -> dict:
    """The shape of a case: three sequences, one of them decoding, one with the rows of a chunk, one with either."""
    r, (method, options) = Random(f"{name} {i}"), FORMATS[name]
    D, block = r.choice([(d, b) for d in DIMS for b in BLOCKS if fits(method, options, d, b)])
    lengths = [r.choice(LENGTHS) for _ in range(3)]
    count = [1, min(lengths[1], r.randint(2, 130)), min(lengths[2], r.choice((0, 1, 2, 70)))]
    return {
        "D": D, "block": block, "G": r.randint(1, 12), "Hk": r.randint(1, 3), "lengths": lengths, "count": count,
        "window": r.choice((None, None, 24, 100, 300)), "ragged": r.random() < 0.3, "shift": r.choice((0.0, 2.0)),
    }  # fmt: skip


CASES = [(name, i) for name in FORMATS for i in range(2)]


@lru_cache(maxsize=1)  # every variant of a case in turn
def made(name: str, i: int):
    s, method = draw(name, i), FORMATS[name][0]
    options = options_of(name, s["D"])
    geom = Geom(2, s["Hk"] * s["G"], s["Hk"], s["D"])
    cache = pages.build(method, geom, s["block"], s["lengths"], i, s["ragged"], shift=s["shift"], **options)
    rows = Rows.last(s["count"], s["lengths"], s["window"], cache.table.shape[1])
    cache.spoil(rows)
    return cache, rows, pages.queries(cache, rows)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("name", "i"), CASES)
def test_attention_on_packed_pages_is_softmax_over_what_the_codec_decodes(name, i, variant):
    """Fails for a plane read in another order, a scale of the neighbouring token, group or block, a head that reads
    another one's table, a slot too many or too few at the edge of a window, and garbage that is multiplied by zero."""
    library = pages.library(variant)
    cache, rows, q = made(name, i)
    layers = cache.layers(library)
    for layer in (1, 0):
        pages.assert_exact(cache, rows, q, pages.attend(cache, layers, rows, q, layer), layer)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", ["full", "kivi", "turboquant"])
def test_splits_of_every_length_hold_each_slot_once(method, variant):
    """Splits are 256, 512 and 1,024 slots long: fails for a slot that is lost or read twice where one ends, with and
    without a window that starts within a long one."""
    lengths = [1024, 1025, 1536, 4096, 4097, 5121, 6200]
    cache = pages.build(method, Geom(1, 3, 1, 64), 32, lengths)
    for window in (None, 2500):
        rows = Rows.last([1] * len(lengths), lengths, window, cache.table.shape[1])
        q = pages.queries(cache, rows)
        pages.assert_exact(cache, rows, q, pages.attend(cache, cache.layers(pages.library(variant)), rows, q))


def test_the_cases_cover_every_shape_that_kernels_treat_apart():
    shapes = [draw(*case) for case in CASES]
    assert {s["D"] for s in shapes} == set(DIMS) and {s["block"] for s in shapes} == set(BLOCKS)
    assert {s["G"] for s in shapes} == set(range(1, 13)) and {s["ragged"] for s in shapes} == {True, False}
    for i, kind in enumerate(("decoding", "a chunk")):
        assert {s["lengths"][i] for s in shapes} == set(LENGTHS), kind
    assert len({(s["D"], s["block"]) for s in shapes}) == len(DIMS) * len(BLOCKS)
    assert any(0 in s["count"] for s in shapes) and any(s["window"] for s in shapes)


@st.composite
def options(draw):
    """(method, options) of any codec, combinations that nobody would choose included."""
    method = draw(st.sampled_from(["full", "fp8", "int8", "int4", "kivi", "turboquant"]))
    any_of, bits, meta = st.sampled_from, st.integers(1, 8), st.sampled_from(["float16", *META])
    made = {
        "full": {"dtype": any_of(["float32", "bfloat16", "float16"])},
        "fp8": {"format": any_of(["e4m3", "e5m2"])},
        "int8": {"meta_dtype": meta},
        "int4": {"meta_dtype": meta, "bits": any_of([2, 3, 4])},
        "kivi": {"meta_dtype": meta, "bits_k": bits, "bits_v": bits},
        "turboquant": {
            "norm_dtype": meta, "bits_k": bits, "bits_v": bits, "variant": any_of(["mse", "prod"]),
            "share": any_of(["all", "layer", "head"]), "rotation": any_of(["haar", "identity"]),
            "scale": any_of(["none", "norm", "eden_mse", "eden_unbiased"]),
        },
    }[method]  # fmt: skip
    return method, draw(st.fixed_dictionaries(made))


@settings(max_examples=50)
@given(data=st.data())
def test_any_codec_any_shape_any_rows(data):
    """The same law where shapes have no pattern: head dims that are no multiple of 32, rows that see any interval."""
    method, opts = data.draw(options())
    D, block = data.draw(st.sampled_from([16, 48, *DIMS])), data.draw(st.sampled_from(BLOCKS))
    if method in ("int8", "int4", "kivi"):
        opts["group"] = data.draw(st.sampled_from([g for g in (8, 16, 32, 64, D) if D % g == 0 and block % 16 == 0]))
        if method == "kivi" and (block % opts["group"] or opts["group"] % 16):
            opts["group"] = 16
    G, Hk, N = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(1, 530), min_size=N, max_size=N))
    count = [data.draw(st.sampled_from([0, 1, 1, 2, 9])) for _ in lengths]
    cache = pages.build(method, Geom(1, Hk * G, Hk, D), block, lengths, data.draw(st.integers(0, 99)), **opts)
    rows = Rows.last([min(c, n) for c, n in zip(count, lengths)], lengths, data.draw(st.sampled_from([None, 1, 77])))
    cache.spoil(rows)
    q = pages.queries(cache, rows)
    for variant in isa.runnable():
        layers = cache.layers(pages.library(variant))
        pages.assert_exact(cache, rows, q, pages.attend(cache, layers, rows, q))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e2])
@pytest.mark.parametrize("method", ["full", "int8", "int4", "kivi", "turboquant", "fp8"])
def test_the_error_scales_with_the_numbers(method, size, variant):
    """Fails for anything absolute in a kernel: a floor under a scale, a constant added before a rounding."""
    cache = pages.build(method, Geom(1, 6, 2, 64), 32, [300, 90], size=size)
    rows = Rows.last([1, 40], [300, 90])
    q = pages.queries(cache, rows, size=1 / max(size, 1.0))
    got = pages.attend(cache, cache.layers(pages.library(variant)), rows, q)
    want, _, _ = pages.exact(cache, rows, q)
    error = (got[0] - want).abs().max() / cache.v.square().mean().sqrt()
    assert error <= 4 * pages.ATOL, f"{error:.1e} of the values"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_plain_numbers_may_have_scales_by_group_too(dtype, variant):
    """A format that no method of ours has: fails where a group's bytes are found as if a number were one byte."""
    cache = pages.build("full", Geom(1, 4, 2, 64), 32, [70, 33], dtype=dtype)
    rows = Rows.last([1, 1], [70, 33])
    cache.spoil(rows)
    scales = torch.tensor([2.0, 0.5]).repeat(cache.flat["k"].shape[0], 1)
    sides = (Side(n, dtype, 64, axis="token", group=32, scale="scales") for n in "kv")
    layers = cache.layers(
        pages.library(variant), fmt=Format((next(sides),), next(sides)), arrays={**cache.flat, "scales": scales}
    )
    for x in (cache.k, cache.v):
        x *= scales[0].repeat_interleave(32)
    q = pages.queries(cache, rows)
    pages.assert_exact(cache, rows, q, pages.attend(cache, layers, rows, q))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_a_table_may_hold_any_numbers(bits, variant):
    """Fails where the symmetry of the tables that methods have is taken for granted."""
    options = {"bits_k": bits, "bits_v": bits, "rotation": "identity"}
    cache = pages.build("turboquant", Geom(1, 4, 2, 64), 32, [70, 33], **options)
    rows = Rows.last([1, 1], [70, 33])
    cache.spoil(rows)
    fmt = cache.codec.page_format()
    k, v = (replace(s, table=s.table * (1 + (s.table > 0).float())) for s in (fmt.k[0], fmt.v))
    layers = cache.layers(pages.library(variant), fmt=replace(fmt, k=(k,), v=v))
    for x in (cache.k, cache.v):
        x *= 1 + (x > 0).double()
    q = pages.queries(cache, rows)
    pages.assert_exact(cache, rows, q, pages.attend(cache, layers, rows, q))


@pytest.mark.parametrize("D", [272, 288, 512])
@pytest.mark.parametrize("bits", [6, 7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_narrow_plane_may_be_longer_than_a_register(variant, bits, D):
    """Two bits of each of more than 256 channels, in whole runs of sixteen bytes and not."""
    cache = pages.build("turboquant", Geom(1, 2, 1, D), 32, [70], bits_k=bits, bits_v=bits)
    rows = Rows.last([1], [70])
    q = pages.queries(cache, rows)
    pages.assert_exact(cache, rows, q, pages.attend(cache, cache.layers(pages.library(variant)), rows, q))
