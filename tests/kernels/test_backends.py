"""What attention on packed pages promises, whoever computes it: torch, the CPU's kernels, Triton's (backends.py).

Shapes are small, since Triton's interpreter is slow. The CPU's kernels and Triton's have larger ones in folders of
their own (cpu/, gpu/).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pages
import pytest
import torch
from backends import attend, mass
from formats import BLOCKS, FORMATS, fits, options_of
from pages import Cache, Rows
from torch.nn.functional import pad

from kvlab.cache.layout import Geom
from kvlab.kernels.format import Refused

LAWS = {  # a kind of number, scale, plane and basis each
    "full": {"dtype": "float16"}, "fp8": {}, "int4": {"group": 32}, "kivi": {"bits_k": 4, "bits_v": 4},
    "turboquant": {},
}  # fmt: skip
SOME = ("fp8", "kivi")  # for laws that formats have little to do with: scales of a token, of a block
LENGTHS = [40, 12]


def made(name: str, lengths: list[int] = LENGTHS, **args) -> Cache:
    args = {"geom": Geom(1, 2, 1, 32), "block": 32, **args}
    return pages.build(name, slots=lengths, **args, **LAWS[name])


@pytest.fixture(params=LAWS)
def cache(request) -> Cache:
    return made(request.param)


def halves(rows: Rows, at: np.ndarray) -> list[Rows]:
    """What each row sees, cut at slot `at`."""
    return [Rows(rows.count, rows.lo, np.minimum(rows.hi, at)), Rows(rows.count, np.maximum(rows.lo, at), rows.hi)]


def same_bits(a, b) -> bool:
    return all(torch.equal(x.contiguous().view(torch.int32), y.contiguous().view(torch.int32)) for x, y in zip(a, b))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_softmax_over_what_the_codec_decodes(backend, name):
    """Fails for a plane read in another order, a scale of the neighbouring token, group or block, and garbage that is
    multiplied by zero. Which formats kernels may refuse is for their own tests to say."""
    method, i = FORMATS[name][0], list(FORMATS).index(name)
    D, block = next((D, B) for D in (32, 64) for B in BLOCKS if fits(*FORMATS[name], D, B))
    length = 8 + i % 25
    cache = pages.build(method, Geom(1, 3, 1, D), block, [length], i, **options_of(name, D))
    rows = Rows.last([1 + i % 3], [length])
    cache.spoil(rows)
    try:
        layers = backend.layers(cache)
    except Refused as why:
        pytest.skip(f"refused: {why}")
    q = pages.queries(cache, rows)
    pages.assert_exact(cache, rows, q, attend(backend, cache, rows, q, layers=layers))


@pytest.mark.parametrize(("count", "window"), [([1, 1], None), ([9, 2], 20)])
def test_garbage_in_slots_that_no_row_sees_changes_no_bit(backend, cache, count, window):
    """Zeros, then garbage, in slots, scales, norms and whole blocks. Fails for NaN times zero, and for anything that is
    computed over all slots of a tile."""
    rows = Rows.last(count, LENGTHS, window)
    q, got = pages.queries(cache, rows), []
    for seed in (None, 1):
        cache.spoil(rows, seed)
        got.append(attend(backend, cache, rows, q))
    pages.assert_exact(cache, rows, q, got[0])
    assert same_bits(*got)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("count", [[1, 1], [9, 2]])
def test_what_rows_see_may_be_cut_in_two_and_joined(backend, name, count):
    """At a slot of each row's own, at an edge, with one half empty, or both. Fails when outputs are averaged instead of
    weighted, or an empty half counts."""
    cache, rows = made(name), Rows.last(count, LENGTHS)
    at = np.random.default_rng(0).integers(0, 40, rows.hi.shape)
    at[0, :, :1], at[1, :, -1:], rows.lo[0, :, 3:4] = 32, 0, 40
    q, cut = pages.queries(cache, rows), halves(rows, at)
    for first, second in (cut, cut[::-1]):
        part = attend(backend, cache, first, q)
        pages.assert_exact(cache, first, q, part)
        pages.assert_exact(cache, rows, q, attend(backend, cache, second, q, into=part))


@pytest.mark.parametrize("count", [1, 9])
def test_a_half_with_all_the_weight_takes_all_in_either_order(backend, count):
    """log-sum-exps of about +-1000: their exponentials exist in no float."""
    cache = made("fp8", [60])
    rows = Rows([count], np.zeros((1, 1, count), int), np.full((1, 1, count), 60))
    q, cut = pages.queries(cache, rows, size=1000.0), halves(rows, np.full(rows.hi.shape, 32))
    for first, second in (cut, cut[::-1]):
        part = attend(backend, cache, first, q)
        pages.assert_exact(cache, rows, q, attend(backend, cache, second, q, into=part))


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("count", [1, 9])
def test_rows_that_see_nothing_are_zeros_and_minus_infinity(backend, name, count):
    """hi == lo, hi < lo, hi == 0, among rows that see something; a table of no blocks; no rows."""
    cache = made(name, [30] * 4)
    rows = Rows.last([count] * 3 + [0], [30] * 4)
    rows.lo[0], rows.hi[0] = 30, 30
    rows.lo[1, :, ::2], rows.hi[1, :, ::2] = 20, 10
    rows.lo[2, :, 1:3], rows.hi[2, :, 1:3] = 0, 0
    q = pages.queries(cache, rows)
    pages.assert_exact(cache, rows, q, attend(backend, cache, rows, q))
    rows.lo[:], rows.hi[:] = 0, 0
    pages.assert_exact(cache, rows, q, attend(backend, cache, rows, q, table=cache.table[:, :, :0]))
    none = Rows([], np.zeros((0, 1, 1), int), np.zeros((0, 1, 1), int))
    attend(backend, cache, none, q[:0], table=cache.table[:0])


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("count", [1, 9])
def test_blocks_may_be_shared_and_those_outside_of_a_window_may_be_null(backend, name, count):
    """Sequence 1 reads sequence 0's first block; entries that no row sees are block 0, which is zeros."""
    cache = made(name, [96, 96])
    cache.table[1, :, :1] = cache.table[0, :, :1]
    for x in (cache.k, cache.v):
        x[0, 1, :, :32] = x[0, 0, :, :32]
    rows = Rows.last([count, count], [90, 44], 15)
    q = pages.queries(cache, rows)
    want = attend(backend, cache, rows, q)
    pages.assert_exact(cache, rows, q, want)
    null = cache.table.copy()
    for n in range(2):
        null[n, :, : int(rows.lo[n].min()) // 32] = 0
        null[n, :, -(-int(rows.hi[n].max()) // 32) :] = 0
    assert (null == 0).sum() >= 3
    assert same_bits(attend(backend, cache, rows, q, table=null), want)


@pytest.mark.parametrize("ragged", [False, True])
def test_layers_and_heads_have_pages_and_may_have_tables_of_their_own(backend, ragged):
    """Fails when a head reads the table, the range or the offset of another."""
    cache = made("fp8", [60, 20], geom=Geom(2, 4, 2, 32), ragged=ragged)
    rows = Rows.last([1, 1], [60, 20], groups=cache.table.shape[1])
    if ragged:
        rows.lo[:, 1], rows.hi[0, 2], rows.lo[1, 3] = 9, 35, 20
    cache.spoil(rows)
    q = pages.queries(cache, rows)
    for layer in (0, 1):
        pages.assert_exact(cache, rows, q, attend(backend, cache, rows, q, layer), layer)


@pytest.mark.parametrize("count", [1, 9])
def test_a_hole_changes_nothing_whatever_it_holds(backend, cache, count):
    """A whole tile and half of the other slots; all that a sequence has."""
    rows = Rows.last([count] * 2, LENGTHS)
    q = pages.queries(cache, rows)
    holes = torch.rand(2, cache.table.shape[2] * 32, generator=torch.Generator().manual_seed(0)) < 0.5
    holes[0, :32], holes[1] = True, True
    cache.punch(holes)
    got = attend(backend, cache, rows, q)
    pages.assert_exact(cache, rows, q, got)
    assert not got[0][count:].any(), "a sequence of holes"
    weights = mass(backend, cache, rows, q, got[1], holes.shape[1])
    assert (weights.sum((1, 2)) * holes == 0).all() and not weights.isnan().any()
    some = (got[1] > -torch.inf).float().sum(0)  # rows
    torch.testing.assert_close(weights[0].sum(-1), some[None], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("count", [[1, 1], [20, 2]])
def test_the_bits_of_a_sequence_do_not_depend_on_who_shares_its_batch(backend, name, count):
    """Whose table and rows are longer, too."""
    cache, rows = made(name), Rows.last(count, LENGTHS, 30)
    q = pages.queries(cache, rows)
    out, lse = attend(backend, cache, rows, q)
    weights = mass(backend, cache, rows, q, lse, 64)
    for n, (a, b) in enumerate(pairwise([*rows.first, rows.total])):
        one = Rows([b - a], rows.lo[n : n + 1, :, : b - a], rows.hi[n : n + 1, :, : b - a])
        table = cache.table[n : n + 1, :, : -(-LENGTHS[n] // 32)]
        got = attend(backend, cache, one, q[a:b], table=table)
        assert same_bits(got, (out[a:b], lse[a:b])), f"sequence {n}"
        alone = mass(backend, cache, one, q[a:b], lse[a:b], LENGTHS[n], table=table)
        assert same_bits(alone, weights[n : n + 1, ..., : LENGTHS[n]]), f"mass of sequence {n}"


@pytest.mark.parametrize("count", [1, 5])
def test_a_query_that_is_nan_gives_nan_and_spoils_no_other_row(backend, cache, count):
    """Comparisons lose a NaN: without care its row would look like one that sees nothing."""
    rows = Rows.last([count, 1], LENGTHS)
    q = pages.queries(cache, rows)
    want = attend(backend, cache, rows, q)
    others = torch.ones(want[1].shape, dtype=torch.bool)
    q[0, 1, 7], others[0, 1] = torch.nan, False
    got = attend(backend, cache, rows, q)
    assert got[0][0, 1].isnan().all() and got[1][0, 1].isnan()
    assert same_bits([x[others] for x in got], [x[others] for x in want])


@pytest.mark.parametrize(("count", "columns"), [([1, 1], 25), ([1, 20], 96)])
def test_mass_is_the_attention_that_each_slot_received(backend, cache, count, columns):
    """Fails when a row without a vote votes, a row counts for its neighbour, or garbage beyond the last slot shows."""
    rows = Rows.last(count, LENGTHS, 30)
    cache.spoil(rows)
    q = pages.queries(cache, rows)
    _, lse, weights = pages.exact(cache, rows, q)
    votes = torch.ones(rows.total)
    votes[2::3] = 0
    got = mass(backend, cache, rows, q, lse.masked_fill(votes[:, None] == 0, torch.inf), columns)
    assert got.shape == (2, 1, 2, columns) and got.dtype == torch.float32 and not got.isnan().any()
    for n, (a, b) in enumerate(pairwise([*rows.first, rows.total])):
        want = pad((weights[n] * votes[a:b, None, None, None]).sum(0), (0, 96))[..., :columns]
        # a weight is exp(logit - lse): its relative error is the error of a logit and the rounding of lse, below 16
        atol = want * (4 * pages.tolerance(cache, q) + 16 * 2**-24) + rows.total * 2.0**-126
        assert ((got[n] - want).abs() <= atol).all(), f"sequence {n}"
        assert (got[n][want == 0] == 0).all(), "slots that nobody sees"


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("count", [1, 20])
def test_mass_sums_to_the_number_of_rows(backend, name, count):
    cache, rows = made(name, [40, 12, 9]), Rows.last([count, 1, 0], [40, 12, 9])
    q = pages.queries(cache, rows)
    _, lse = attend(backend, cache, rows, q)
    got = mass(backend, cache, rows, q, lse, 64).double().sum(-1)
    want = torch.tensor([count, 1.0, 0.0], dtype=torch.float64)[:, None, None].expand_as(got)
    torch.testing.assert_close(got, want, rtol=0, atol=count * 4 * pages.tolerance(cache, q))


@pytest.mark.parametrize("above", [50, 95, 200])
def test_mass_beyond_all_floats_is_large_and_never_negative_or_nan(backend, above):
    """Votes may be counted with other keys than rows attended to (prefill_reads=exact): a logit may then lie far above
    the lse. What nobody sees stays 0 there, infinity times zero would be NaN."""
    cache, rows = made("fp8", [33]), Rows.last([2], [33], 20)
    cache.spoil(rows)
    q = pages.queries(cache, rows)
    _, lse, weights = pages.exact(cache, rows, q)
    got = mass(backend, cache, rows, q, lse - above, 48)[0].double()
    want = pad(weights[0].sum(0) * np.exp(above), (0, 48))[..., :48]
    ordinary = want < 2.0**120
    torch.testing.assert_close(got[ordinary], want[ordinary], rtol=1e-4, atol=2.0**-126)
    assert (got[~ordinary] >= 2.0**119).all()
