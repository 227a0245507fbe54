"""What attention on packed pages promises beyond its value: a row's bits depend on it and the slots it sees alone."""

from __future__ import annotations

import numpy as np
import pages
import pytest
import torch
from pages import VARIANTS, Cache, Rows

from kvlab.cache.layout import Geom
from kvlab.kernels.cpu.attend import Layers

FORMATS = {  # a kind of number, scale and plane each
    "full": {"dtype": "float32"}, "full bfloat16": {"dtype": "bfloat16"}, "fp8": {}, "int8": {"group": 16},
    "int4": {"bits": 3}, "int4 groups": {"group": 16}, "kivi": {"bits_k": 2, "bits_v": 7},
    "turboquant": {"bits_k": 5}, "turboquant prod": {"variant": "prod", "share": "head"},
    "int4 fast": {"bits": 4}, "int8 fast": {}, "kivi fast": {"bits_v": 3}, "turboquant fast": {},
    "turboquant prod fast": {"variant": "prod", "bits_v": 2},
}  # fmt: skip
LENGTHS = [600, 70, 257]
WINDOWS = (None, 100)


@pytest.fixture(params=VARIANTS)
def library(request):
    return pages.library(request.param)


@pytest.fixture(params=FORMATS)
def make(request, library):
    """make(lengths, ...) -> a cache of this format, and the kernels bound to it."""

    def build(lengths=LENGTHS, **args) -> tuple[Cache, Layers]:
        geom = Geom(1, 10, 2, 64)
        cache = pages.build(request.param.split()[0], geom, 32, lengths, **args, **FORMATS[request.param])
        return cache, cache.layers(library, fast="fast" in request.param)

    return build


def alone(cache: Cache, rows: Rows, n: int) -> tuple[Rows, np.ndarray, slice]:
    """Sequence n of a batch by itself, with no more table and rows than it needs."""
    count, end = rows.count[n], int(rows.hi[n, :, : rows.count[n]].max())
    one = Rows([count], rows.lo[n : n + 1, :, :count], rows.hi[n : n + 1, :, :count])
    return one, cache.table[n : n + 1, :, : -(-end // cache.block)], slice(rows.first[n], rows.first[n] + count)


def same_bits(a: tuple, b: tuple) -> bool:
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b))


@pytest.mark.parametrize("window", WINDOWS)
def test_two_threads_give_the_bits_of_one(make, window):
    """Fails when a sum is split by threads, or two of them write the same scratch."""
    cache, layers = make()
    rows = Rows.last([1, 40, 1], LENGTHS, window)
    q = pages.queries(cache, rows)
    want = pages.attend(cache, layers, rows, q)
    view, lse = rows.view(cache.table), want[1]
    mass = layers.mass(0, view, q.float(), lse, 608)
    torch.set_num_threads(2)
    try:
        for _ in range(5):
            assert same_bits(pages.attend(cache, layers, rows, q), want)
            assert torch.equal(layers.mass(0, view, q.float(), lse, 608), mass)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("count", [[1, 1, 1], [1, 33, 2]])
def test_the_bits_of_a_sequence_do_not_depend_on_who_shares_its_batch(make, count, window):
    cache, layers = make()
    rows = Rows.last(count, LENGTHS, window)
    q = pages.queries(cache, rows)
    together = pages.attend(cache, layers, rows, q)
    for n in range(3):
        one, table, span = alone(cache, rows, n)
        got = pages.attend(cache, layers, one, q[span], table=table)
        assert same_bits(got, [x[span].contiguous() for x in together]), f"sequence {n}"


@pytest.mark.parametrize("window", WINDOWS)
def test_the_bits_of_a_prompts_row_do_not_depend_on_how_it_is_cut_into_chunks(make, window):
    """Chunks of two rows and more: one alone is a decoding row. Fails when tiles start where a chunk starts."""
    cache, layers = make([300])
    whole = Rows.last([130], [300], window)
    q = pages.queries(cache, whole)
    want = pages.attend(cache, layers, whole, q)
    for sizes in ([2, 128], [65, 65], [3, 7, 20, 100], [2] * 65):
        start = 0
        for size in sizes:
            part = Rows([size], whole.lo[:, :, start : start + size], whole.hi[:, :, start : start + size])
            got = pages.attend(cache, layers, part, q[start : start + size])
            assert same_bits(got, [x[start : start + size].contiguous() for x in want]), f"rows {start} of {sizes}"
            start += size


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("count", [[1, 1, 1], [1, 90, 2]])
def test_nothing_that_no_row_sees_changes_a_bit(make, count, window):
    """Zeros, then two kinds of garbage, in slots, scales, norms and whole blocks. Fails for NaN times zero, and for a
    maximum over all slots of a run of sixteen."""
    cache, layers = make(spare=3)
    rows = Rows.last(count, LENGTHS, window)
    q, got = pages.queries(cache, rows), []
    for seed in (None, 1, 2):
        cache.spoil(rows, seed)
        got.append(pages.attend(cache, layers, rows, q))
    pages.assert_exact(cache, rows, q, got[0])
    assert same_bits(got[0], got[1]) and same_bits(got[0], got[2])


@pytest.mark.parametrize("count", [1, 5])
def test_garbage_between_what_different_rows_see_changes_nothing(make, count):
    """Rows of one chunk that see intervals far from each other, with a hole that belongs to nobody."""
    cache, layers = make([300])
    lo, hi = [200, 3, 130, 40, 90][:count], [290, 17, 131, 60, 90][:count]
    rows = Rows([count], np.array(lo)[None, None], np.array(hi)[None, None])
    cache.spoil(rows)
    q = pages.queries(cache, rows)
    pages.assert_exact(cache, rows, q, pages.attend(cache, layers, rows, q))


@pytest.mark.parametrize("count", [1, 20])
def test_a_block_may_be_shared_and_one_that_left_the_window_may_be_null(make, count):
    """Sequence 1 reads sequence 0's blocks for its first 256 slots; entries below the window are block 0 (zeros)."""
    cache, layers = make([400, 400])
    cache.table[1, :, :8] = cache.table[0, :, :8]
    for x in (cache.k, cache.v):
        x[0, 1, :, :256] = x[0, 0, :, :256]
    rows = Rows.last([count, count], [400, 300], 200)
    q = pages.queries(cache, rows)
    want = pages.attend(cache, layers, rows, q)
    pages.assert_exact(cache, rows, q, want)
    null = cache.table.copy()
    for n in range(2):
        null[n, :, : int(rows.lo[n].min()) // 32] = 0
        null[n, :, -(-int(rows.hi[n].max()) // 32) :] = 0
    assert (null == 0).sum() > 8
    assert same_bits(pages.attend(cache, layers, rows, q, table=null), want)


@pytest.mark.parametrize("count", [1, 30])
def test_rows_that_see_nothing_are_zeros_and_minus_infinity(make, count):
    """hi == lo, hi < lo, hi == 0, a table of no blocks, among rows that see something, and a step without rows."""
    cache, layers = make([80, 80, 80])
    rows = Rows.last([count] * 3, [80, 80, 80])
    rows.lo[0], rows.hi[0] = 80, 80
    rows.lo[1, :, ::2], rows.hi[1, :, ::2] = 50, 20
    rows.lo[2, :, -1:], rows.hi[2, :, -1:] = 0, 0
    q = pages.queries(cache, rows)
    pages.assert_exact(cache, rows, q, pages.attend(cache, layers, rows, q))
    rows.lo[:], rows.hi[:] = 0, 0
    pages.assert_exact(cache, rows, q, pages.attend(cache, layers, rows, q, table=cache.table[:, :, :0]))
    none = Rows([], np.zeros((0, 1, 1), int), np.zeros((0, 1, 1), int))
    pages.attend(cache, layers, none, q[:0], table=cache.table[:0])


def test_only_the_rows_of_the_view_are_written_and_strides_do_not_matter(make):
    """Rows as the runtime folds them, [N, H, padded rows, D], against one after the other."""
    cache, layers = make([100, 70])
    rows = Rows.last([1, 9], [100, 70])
    q = pages.queries(cache, rows)
    want = pages.attend(cache, layers, rows, q)
    H, R, D = 10, 12, 64
    folded, out, lse = torch.full((2, H, R, D), torch.nan), torch.full((2, H, R, D), 7.0), torch.full((2, H, R), 7.0)
    folded[0, :, :1], folded[1, :, :9] = q[:1].transpose(0, 1).float(), q[1:].transpose(0, 1).float()
    view = rows.view(cache.table)
    pages.arrays_of(view)["first"][:] = 0, H * R  # first: in rows, of which a head has R
    strided = [x.as_strided((R, H, D), (D, R * D, 1)) for x in (folded, out)]
    layers.attend(0, view, *strided, lse.as_strided((R, H), (1, R)))
    got = [torch.cat([x[0, :, :1], x[1, :, :9]], 1).transpose(0, 1).contiguous() for x in (out, lse)]
    assert same_bits(got, want)
    assert (out[0, :, 1:] == 7).all() and (out[1, :, 9:] == 7).all() and (lse[0, :, 1:] == 7).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("count", [1, 5])
def test_a_query_that_is_not_finite_gives_no_plausible_number_and_spoils_no_other_row(make, count, bad):
    """Comparisons lose a NaN: without care its row would look like one that sees nothing, zeros, in the split of one
    that has fewer splits than its neighbours most of all."""
    cache, layers = make()
    rows = Rows.last([count, 1, 1], LENGTHS)
    q = pages.queries(cache, rows)
    want = pages.attend(cache, layers, rows, q)
    for row in (0, count, count + 1):
        spoiled = q.clone()
        spoiled[row, 3, 7] = bad
        got = pages.attend(cache, layers, rows, spoiled)
        assert got[0][row, 3].isnan().all() and got[1][row, 3].isnan()
        others = torch.ones(want[1].shape, dtype=torch.bool)
        others[row, 3] = False
        assert all(torch.equal(x[others], y[others]) for x, y in zip(got, want))
