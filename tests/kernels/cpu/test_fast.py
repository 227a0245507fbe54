"""The fast arithmetic: as close to float64 as bytes are (float64.fast_tolerance), for decoding rows alone, and the same
bits in every batch (test_laws.py runs its laws on it too)."""

from __future__ import annotations

import json
from functools import lru_cache

import pages
import pytest
import torch
from front import run
from pages import VARIANTS, Rows
from test_attend import LENGTHS
from test_batch_invariance import assert_batch_equals_singles, part

from kvlab.cache.layout import Geom
from kvlab.engine.config import EngineCfg
from kvlab.errors import ConfigError

CODECS = {
    "int8": {}, "int4": {}, "int4 3": {"bits": 3}, "int4 2": {"bits": 2},
    "int4 in groups": {"group": 32}, "int4 in groups of 16": {"group": 16},
    "kivi": {}, "kivi k4": {"bits_k": 4, "bits_v": 8}, "kivi k7": {"bits_k": 7}, "kivi 5": {"bits_k": 5, "bits_v": 5},
    "turboquant": {},
    **{f"turboquant {b}": {"bits_k": b, "bits_v": b} for b in (1, 2, 3, 5, 6)}, "turboquant prod": {"variant": "prod"},
    "turboquant k2 v7": {"bits_k": 2, "bits_v": 7},
}  # fmt: skip


@lru_cache(maxsize=2)
def made(name: str, D: int, block: int, count: int = 1):
    options = {"group": D} | CODECS[name] if name.split()[0] in ("int4", "int8") else CODECS[name]
    lengths = [600, 257, 16, 1]
    cache = pages.build(name.split()[0], Geom(1, 6, 2, D), block, lengths, shift=2.0, **options)
    rows = Rows.last([count, count, 1, 1], lengths, 300)
    cache.spoil(rows)
    return cache, rows, pages.queries(cache, rows)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_rows_are_off_by_their_roundings_and_no_more(name, variant):
    """Fails for sums that overflow, a middle taken off twice, pairs of tokens that meet others' weights."""
    library = pages.library(variant)
    for D, block in ((64, 32), (128, 16), (80, 64), (256, 128)):
        if ("kivi" in name and (D % 32 or block % 32)) or D % CODECS[name].get("group", 1):
            continue  # groups of 32
        cache, rows, q = made(name, D, block)
        got = pages.attend(cache, cache.layers(library, fast=True), rows, q)
        pages.assert_exact(cache, rows, q, got)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("D", [64, 128])
def test_avx512_takes_what_the_others_take(name, D):
    """Two files of decoders, one arithmetic: the sides it is for. But keys of one bit have sums of their own."""
    cache = made(name, D, 32)[0]
    here, there = (cache.layers(pages.library(v), fast=True).words for v in ("avx512", "generic"))
    assert here & there == there - (name == "turboquant 1" and there & 1)


@pytest.mark.parametrize("name", CODECS)
def test_it_is_another_arithmetic_where_there_are_codes_of_up_to_five_bits(name):
    """Else the tests here say nothing. Rows of less than sixteen bytes stay exact."""
    library = pages.library("generic")
    cache, rows, q = made(name, 64, 32)
    exact, fast = (pages.attend(cache, cache.layers(library, fast=f), rows, q)[0] for f in (False, True))
    stays = name in ("int8", "turboquant 6", "turboquant 1", "int4 in groups of 16")
    assert torch.equal(exact, fast) == stays


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", ["int4", "turboquant"])
def test_many_small_weights_beside_a_large_one_are_not_lost_together(method, variant):
    """One key takes 10 nats more than the others, as a first token does, and values have a common part, 3: rounded to
    the nearest, 255 weights below half a step would all become zero, 0.8 % of that part. Rounded up or down by chance,
    and their sum kept, they are off by what values differ."""
    cache = pages.build(method, Geom(1, 2, 1, 64), 32, [256], **({"group": 64} if method != "turboquant" else {}))
    codec, gen = cache.codec, torch.Generator().manual_seed(5)
    k, v = 0.02 * torch.randn(1, 8, 1, 32, 64, generator=gen), 3 + 0.1 * torch.randn(1, 8, 1, 32, 64, generator=gen)
    k[0, 0, 0, 0] = 1.0
    page = codec.encode(0, k[0], v[0])
    for name, value in page.items():
        cache.arrays.data[name][torch.from_numpy(cache.table[0, 0]).long()] = value.view(
            8, 1, *cache.arrays.data[name].shape[2:]
        )
    rows = Rows.last([1], [256])
    q = torch.full((1, 2, 64), 10.4 / 8, dtype=torch.float64)
    exact, fast = (pages.attend(cache, cache.layers(pages.library(variant), fast=f), rows, q)[0] for f in (False, True))
    step = max(1 / 254, 1 / (32767 // (127 if method == "turboquant" else 15) - 32))
    table = 5.5 * 3 / 254 / 12**0.5 if method == "turboquant" else 0.0
    off = (exact - fast).mean(-1).abs().max()  # over 64 channels, whose errors are independent
    assert off <= 5 * ((step / 2 * 0.15) ** 2 * 31 + table**2) ** 0.5 / 8
    assert off <= 0.5 * 0.008 * 3, "else this test could not fail"


def test_prompts_are_exact():
    library = pages.library("generic")
    cache, rows, q = made("int4", 64, 32, count=5)
    exact, fast = (pages.attend(cache, cache.layers(library, fast=f), rows, q)[0] for f in (False, True))
    assert torch.equal(exact[:10], fast[:10]), "the rows of chunks"
    assert not torch.equal(exact[10:], fast[10:])


@pytest.mark.parametrize("name", ["int4", "turboquant", "kivi"])
def test_a_batch_of_eight_gives_what_eight_single_runs_give(name):
    prompts = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS[:8]]
    assert_batch_equals_singles(lambda: [part(name)], prompts, 8, arithmetic="fast")


def test_settings_that_there_are_not_are_refused():
    with pytest.raises(ConfigError, match=r"runtime\.arithmetic='bf16' is not one of exact, fast"):
        EngineCfg(arithmetic="bf16")
    with pytest.raises(ConfigError, match=r"runtime\.arithmetic=fast is the CPU kernels'.*runtime\.kernels=auto"):
        EngineCfg(arithmetic="fast", kernels="off")


def test_a_method_without_integers_says_that_nothing_is_fast(tmp_path):
    words = ["model=tiny_llama", "task=fidelity", "task.context=48", "task.scored=16", "task.documents=1", "threads=1"]
    ran = run(tmp_path, *words, "+method=fp8", "runtime.arithmetic=fast")
    warnings = json.loads(ran.paths[0].read_text())["warnings"]
    assert any("fp8" in w and "arithmetic=fast changes nothing" in w for w in warnings)


def test_a_run_says_in_its_result_and_table_which_arithmetic_it_took(tmp_path):
    words = [
        "model=tiny_llama",
        "task=fidelity",
        "task.context=48",
        "task.scored=16",
        "task.documents=1",
        "threads=1",
        "+method=int4",
        "method.group=16",
    ]
    ran = run(tmp_path, *words, "runtime.arithmetic=fast")
    assert json.loads(ran.paths[0].read_text())["kernels"]["arithmetic"] == "fast"
    assert "arithmetic fast" in ran.out
