"""Triton's attention and mass against float64: formats, head dims, blocks, heads, rows, operand types; far addresses.

In the interpreter, or on a GPU (tests/kernels/conftest.py). Cases are a pairwise covering array of small shapes: at
most 8 programs of 4 tiles. Laws that hold for every backend are in tests/kernels/test_backends.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, count, pairwise

import backends
import numpy as np
import pages
import pytest
import torch
from formats import BLOCKS, DIMS, FORMATS, fits, options_of
from pages import Cache, Rows
from pairs import all_pairs, covering, pairs

from kvlab import registry
from kvlab.cache.arrays import Arrays
from kvlab.cache.layout import Geom
from kvlab.kernels.format import Refused
from kvlab.kernels.triton import sides

CHOSEN = (  # a way to store numbers, planes, scales or a basis each; test_backends.py has all formats, at one shape
    "full float32", "full bfloat16", "full float16", "fp8 e4m3", "int8 g32", "int4 2 gD", "int4 4 g32",
    "kivi k4 v5 g32", "kivi k6 v3 g32", "turboquant head prod",
)  # fmt: skip
ROWS = {  # count of rows of all heads of a group (1: a decoding row), lengths, window
    "one split": ([1], [29], None),
    "three splits": ([1], [71], None),
    "splits in a window": ([1], [75], 20),
    "a chunk": ([40], [45], None),
    "a chunk in a window": ([30], [50], 12),
    "one sees nothing": ([1, 1], [20, 30], None),
    "all kinds": ([1, 20, 0], [15, 33, 8], None),
}
GROUPS = {"1": (1,), "2^n": (2, 4, 8), "odd": (3, 5, 7, 9, 11), "even": (6, 10, 12)}
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
OPERANDS = {  # type of the model, which says what is multiplied; type of the queries
    "float32": (F32, F32), "float32, 16-bit queries": (F32, F16), "16 bits": (F16, F16), "16 bits, float32 queries":
    (F16, F32), "16 bits, bfloat16 queries": (F16, BF16),
}  # fmt: skip
TABLES = {"one head": (1, False), "a table a head": (2, True)}


@pytest.fixture
def triton(monkeypatch) -> backends.Backend:
    return backends.make("triton", monkeypatch)


def refused(name: str, D: int, block: int) -> str:
    """Why the kernels do not hold a format, "" if they do."""
    codec = registry.build(FORMATS[name][0], **options_of(name, D)).codec
    codec.setup(Geom(1, 1, 1, D), block)
    fmt = codec.page_format()
    try:
        [sides.spec(s) for s in (*fmt.k, fmt.v)]
    except Refused as why:
        return str(why)
    return ""


def held(name: str, D: int, block: int) -> bool:
    return fits(*FORMATS[name], D, block) and not refused(name, D, block)


SHAPES = [{"format": name, "D": D, "block": B} for name in CHOSEN for D in DIMS for B in BLOCKS if held(name, D, B)]
FREE = {"rows": tuple(ROWS), "group": tuple(GROUPS), "operands": tuple(OPERANDS), "tables": tuple(TABLES)}
CASES = covering(SHAPES, FREE)


def size(i: int, case: dict) -> int:
    """Query heads of a kv head."""
    of = GROUPS[case["group"]]
    return of[i % len(of)]


def made(i: int, case: dict) -> tuple[Cache, Rows]:
    many, lengths, window = ROWS[case["rows"]]
    Hk, ragged = TABLES[case["tables"]]
    geom = Geom(2, Hk * size(i, case), Hk, case["D"])
    method, options = FORMATS[case["format"]][0], options_of(case["format"], case["D"])
    cache = pages.build(method, geom, case["block"], lengths, i, ragged, shift=2.0 * (i % 2), **options)
    many = [c if c < 2 else max(2, c // cache.geom.G) for c in many]
    rows = Rows.last(many, lengths, window, cache.table.shape[1])
    if case["rows"] == "one sees nothing":
        rows.lo[0], rows.hi[0] = 20, 10
    cache.spoil(rows)
    return cache, rows


def agree(
    triton: backends.Backend, cache: Cache, rows: Rows, operands: str, layer: int = 1, mass: bool = False
) -> None:
    """Outputs, lse and (mass) the weights of slots are float64's, as near as their operands allow."""
    model, queries = OPERANDS[operands]
    fmt = cache.codec.page_format()
    if backends.INTERPRETED and BF16 in {cache.flat[s.codes].dtype for s in (*fmt.k, fmt.v)}:
        model = F32  # bfloat16 products are wrong there (runtime.md 9.4)
    layers = triton.layers(cache, model)
    q = pages.queries(cache, rows).to(queries)
    given, atol = q.double(), pages.tolerance(cache, q.double(), layer)
    got = backends.attend(triton, cache, rows, q, layer, layers=layers)
    pages.assert_exact(cache, rows, given, got, layer)
    out, lse, weights = pages.exact(cache, rows, given, layer)
    if cache.operands != F32:
        error = (got[0] - out).square().mean() / out.square().mean()
        # A value with a zero is rounded twice: the product, which is as large as the range of its group (three times
        # the spread of numbers in it), and the sum.
        twice = 2.5 if fmt.v.zero else 1.0
        few = 1.5  # the bound is for many; a case may have 32 outputs, whose errors come from the same logits
        assert error.sqrt() <= few * twice * pages.RMS_16[cache.operands] / pages.ATOL_16[cache.operands] * atol
    if mass:
        got = backends.mass(triton, cache, rows, q, lse, 80, layer, layers=layers)
        for n, (a, b) in enumerate(pairwise([*rows.first, rows.total])):
            want = torch.nn.functional.pad(weights[n][: b - a].sum(0), (0, 80))[..., :80]
            assert ((got[n] - want).abs() <= want * (4 * atol + 16 * 2**-24)).all()  # 0 where nobody looks


@pytest.mark.parametrize(
    ("i", "case"), [pytest.param(i, case, id=", ".join(map(str, case.values()))) for i, case in enumerate(CASES)]
)
def test_attention_on_packed_pages_is_softmax_over_what_the_codec_decodes(monkeypatch, i, case):
    triton = backends.make("triton", monkeypatch, split=32 if "splits" in case["rows"] else 512)
    agree(triton, *made(i, case), case["operands"], mass=i % 5 == 0)


def test_the_cases_cover_every_two_choices():
    """A generator that forgets pairs, or shapes that lost a value, would make the test above weaker in silence."""
    assert set().union(*map(pairs, CASES)) >= all_pairs(SHAPES, FREE)
    for name, values in {"format": CHOSEN, "D": DIMS, "block": BLOCKS, **FREE}.items():
        assert {case[name] for case in CASES} == set(values)
    met = {(case["format"], case["D"]) for case in CASES}
    assert met == {(s["format"], s["D"]) for s in SHAPES} and len(met) > 55
    assert {size(i, case) for i, case in enumerate(CASES)} == set(range(1, 13))


def test_the_generator_finds_what_can_meet():
    """By hand: b=2 goes with a=1 alone."""
    shapes = [{"a": 0, "b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 2}]
    cases = covering(shapes, {"c": (7, 8), "d": (9,)})
    met = {frozenset(p) for case in cases for p in combinations(case.items(), 2)}
    assert all({k: case[k] for k in "ab"} in shapes for case in cases)
    assert {frozenset(p.items()) for p in shapes} <= met
    assert all(frozenset({("b", b), ("c", c)}) in met for b in (1, 2) for c in (7, 8)) and len(cases) < 6


def test_what_the_kernels_do_not_hold_is_known():
    """A codec would run the torch path, which is slower, and say so: nothing joins this list unseen."""
    lacking = {name: why for name in FORMATS if fits(*FORMATS[name], 128, 64) and (why := refused(name, 128, 64))}
    seven = {f"kivi k{k} v{9 - k} g{g}" for k in (2, 7) for g in (16, 32, 64)}
    tables = {f"turboquant k{k} v{9 - k}" for k in range(1, 9)} | {f"prod k{b} v{b}" for b in range(5, 9)}
    assert set(lacking) == seven | tables, lacking
    assert all("7 bits" in lacking[n] for n in seven) and all("by table" in lacking[n] for n in tables)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_at_every_head_dim_and_block(triton, name):
    """All of them, with each number of heads, kind of rows, operands and tables in turn."""
    turn = count()
    for D in DIMS:
        for block in BLOCKS:
            if held(name, D, block):
                i = next(turn)
                case = {k: v[i // 4 % len(v)] if k == "group" else v[i % len(v)] for k, v in FREE.items()}
                agree(triton, *made(i, case | {"format": name, "D": D, "block": block}), case["operands"], mass=True)


@pytest.mark.parametrize("name", ["full float16", "int4 4 g32", "kivi k4 v5 g32", "turboquant"])
@pytest.mark.parametrize("many", [[1, 1], [9, 2]])
def test_16_bit_operands_are_not_touched_by_what_no_row_sees(triton, name, many):
    """Rows are scaled by their largest number before they are rounded: garbage must not be in it, nor a hole."""
    cache = pages.build(FORMATS[name][0], Geom(1, 2, 1, 32), 32, [40, 20], **options_of(name, 32))
    rows = Rows.last(many, [40, 20], 20)
    q, got = pages.queries(cache, rows), []
    cache.punch(torch.arange(64).expand(2, 64) % 5 == 0)
    for seed in (None, 1):
        good = cache.valid.clone()
        cache.spoil(rows, seed)
        cache.valid = good
        got.append(backends.attend(triton, cache, rows, q, layers=triton.layers(cache, F16)))
    pages.assert_exact(cache, rows, q, got[0])
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(*got))


@pytest.mark.parametrize("size", [1e-3, 1e3])
@pytest.mark.parametrize("name", ["int4 float32", "kivi float32", "turboquant float32"])
def test_16_bit_operands_are_as_near_for_small_and_large_numbers(triton, name, size):
    """Keys and values that float16 holds, queries that it may not: those are divided by the largest of their row first.
    Fails for a query that is rounded as it is."""
    cache = pages.build(FORMATS[name][0], Geom(1, 2, 1, 32), 32, [40], size=size, **FORMATS[name][1])
    rows = Rows.last([1], [40])
    q = pages.queries(cache, rows, size=1 / size)
    layers = triton.layers(cache, F16)
    out, lse = backends.attend(triton, cache, rows, q, layers=layers)
    want, want_lse, weights = pages.exact(cache, rows, q)
    assert (out - want).abs().max() <= 2 * pages.ATOL_16[F16] * size
    assert (lse - want_lse).abs().max() <= 2 * pages.ATOL_16[F16]
    got, want = backends.mass(triton, cache, rows, q, want_lse, 40, layers=layers)[0], weights[0][0, ..., :40]
    assert ((got - want).abs() <= 4 * pages.ATOL_16[F16] * want).all()


def far(small: Cache) -> Cache:
    """The same at the end of a pool of more than 2**31 numbers, which is reserved and not touched."""
    a = small.arrays
    last = 2**31 // (small.block * small.geom.D) + 9
    try:
        big = Arrays(tuple(a.regions.values()), last + 1, 1, 1, small.block, torch.device("cpu"))
    except (RuntimeError, MemoryError) as short:
        pytest.skip(f"memory is short: {short}")
    for name, x in a.data.items():
        big.data[name][last - small.table[0, 0]] = x[small.table[0, 0]]
    return replace(small, arrays=big, table=last - small.table)


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("many", [1, 9])
def test_pages_beyond_two_billion_numbers_are_found(triton, block, many):
    """Fails when a number's place is an int32, in a tile of one block and in one of several."""
    cache = far(pages.build("int8", Geom(1, 2, 1, 256), block, [40], group=256))
    rows = Rows.last([many], [40])
    q = pages.queries(cache, rows)
    layers = triton.layers(cache)
    out, lse = backends.attend(triton, cache, rows, q, layers=layers)
    pages.assert_exact(cache, rows, q, (out, lse))
    weights = backends.mass(triton, cache, rows, q, lse, 40, layers=layers)
    want = pages.exact(cache, rows, q)[2][0][..., :40].sum(0)
    assert ((weights[0] - want).abs() <= want * (4 * pages.ATOL + 16 * 2**-24)).all()
    assert int(np.max(cache.table)) * block * 256 > 2**31
