"""Partials that join, the attention that each slot received, and numbers far from one: against float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pages
import pytest
import torch
from pages import VARIANTS, Rows

from kvlab.cache.arrays import Arrays
from kvlab.cache.layout import Geom
from kvlab.kernels.cpu.attend import Layers

FORMATS = {
    "full": {"dtype": "float32"}, "fp8": {}, "int8": {"group": 16}, "int4": {}, "kivi": {"bits_k": 3},
    "turboquant": {}, "turboquant prod": {"variant": "prod"},
}  # fmt: skip
LENGTHS = [300, 90, 270]


@pytest.fixture(params=VARIANTS)
def library(request):
    return pages.library(request.param)


@pytest.fixture(params=FORMATS)
def make(request, library):
    def build(lengths=LENGTHS, **args):
        args = {"geom": Geom(1, 10, 2, 64), "block": 32, **args}
        cache = pages.build(request.param.split()[0], slots=lengths, **args, **FORMATS[request.param])
        return cache, cache.layers(library)

    return build


@pytest.mark.parametrize("count", [[1, 1, 1], [1, 60, 7]])
def test_two_partials_join_to_the_whole(make, count):
    """Cuts anywhere, empty halves on either side and on both. Fails when outputs are averaged instead of weighted, or a
    half that is empty counts."""
    cache, layers = make()
    rows = Rows.last(count, LENGTHS, 200)
    rows.lo[2, :, 0] = rows.hi[2, :, 0]  # sees nothing at all
    q, gen = pages.queries(cache, rows), np.random.default_rng(0)
    for at in (0, 1000, gen.integers(0, 300, rows.hi.shape), np.full(rows.hi.shape, 64)):
        first, second = pages.halves(rows, np.broadcast_to(at, rows.hi.shape))
        got = pages.attend(cache, layers, first, q)
        pages.assert_exact(cache, first, q, got)
        pages.assert_exact(cache, rows, q, pages.attend(cache, layers, second, q, into=got))


@pytest.mark.parametrize("count", [[1, 1, 1], [1, 60, 7]])
def test_two_sources_in_one_call_are_two_calls(make, count):
    """To the bit, for decoding rows and chunks. Fails when a source reads the other's queries, splits or scratch."""
    cache, layers = make()
    rows, gen = Rows.last(count, LENGTHS, 200), np.random.default_rng(1)
    q = pages.queries(cache, rows)
    for at in (0, 1000, 64, gen.integers(0, 300, rows.hi.shape)):
        first, second = pages.halves(rows, np.broadcast_to(at, rows.hi.shape))
        want = pages.attend(cache, layers, second, q, into=pages.attend(cache, layers, first, q))
        got = pages.attend_all(cache, layers, [first, second], q)
        assert all(torch.equal(a, b) for a, b in zip(got, want)), at


@pytest.mark.parametrize("count", [1, 9])
def test_a_half_with_all_the_weight_takes_all_in_either_order(make, count):
    """log-sum-exps of about +-3000: their exponentials exist in no float."""
    cache, layers = make([300])
    rows = Rows([count], np.zeros((1, 1, count), int), np.full((1, 1, count), 300))
    q = pages.queries(cache, rows, size=1000.0)
    for order in (1, -1):
        first, second = pages.halves(rows, np.full(rows.hi.shape, 150))[::order]
        got = pages.attend(cache, layers, first, q)
        pages.assert_exact(cache, rows, q, pages.attend(cache, layers, second, q, into=got))


@pytest.mark.parametrize("columns", [320, 300, 64, 17])
@pytest.mark.parametrize("count", [[1, 1, 1], [1, 90, 30]])
def test_mass_is_the_attention_that_each_slot_received(make, count, columns):
    """Fails when a row without a vote votes, a row counts for its neighbour, or garbage beyond the last slot shows."""
    cache, layers = make()
    rows = Rows.last(count, LENGTHS, 250)
    cache.spoil(rows)
    q = pages.queries(cache, rows)
    _, lse, weights = pages.exact(cache, rows, q)
    votes = torch.ones(rows.total, dtype=torch.bool)
    if rows.total > 3:
        votes[::3] = False
    lse = lse.masked_fill(~votes[:, None], torch.inf)
    got = layers.mass(0, rows.view(cache.table), q.float(), lse.float(), columns)
    assert got.shape == (3, 2, 5, columns) and not got.isnan().any()
    for n, (first, c) in enumerate(zip(rows.first, rows.count)):
        want = (weights[n] * votes[first : first + c, None, None, None]).sum(0)[..., :columns]
        # a weight is exp(logit - lse): its relative error is the error of a logit and the rounding of lse, below 16
        error = (got[n, ..., : want.shape[-1]] - want).abs()
        assert (error <= want * (4 * pages.tolerance(cache, q) + 16 * 2**-24) + rows.total * 2.0**-126).all()
        assert (got[n][:, :, want.shape[-1] :] == 0).all()
        assert (got[n, ..., : want.shape[-1]][want == 0] == 0).all(), "slots that nobody sees"


@pytest.mark.parametrize("above", [50, 87, 95, 200])
def test_mass_beyond_all_floats_is_large_and_never_negative_or_nan(make, above):
    """prefill_reads=exact attends to keys as they came, and counts votes with keys as they are stored: at few bits a
    logit may then lie far above the lse. Fails when 2**n is made of bits without a bound on n."""
    cache, layers = make([80])
    rows = Rows.last([1], [80])
    q = pages.queries(cache, rows)
    _, lse, weights = pages.exact(cache, rows, q)
    got = layers.mass(0, rows.view(cache.table), q.float(), (lse - above).float(), 96)
    want = (weights[0][0] * np.exp(above)).float()  # some infinite from 88 on
    assert (got >= 0).all()
    ordinary = want < 2.0**120
    torch.testing.assert_close(got[0, ..., : want.shape[-1]][ordinary], want[ordinary], rtol=1e-4, atol=2.0**-126)
    assert (got[0, ..., : want.shape[-1]][~ordinary] >= 2.0**119).all()


@pytest.mark.parametrize("count", [1, 20])
def test_mass_sums_to_the_number_of_votes(make, count):
    cache, layers = make([300])
    rows = Rows.last([count], [300])
    q = pages.queries(cache, rows)
    _, lse = pages.attend(cache, layers, rows, q)
    got = layers.mass(0, rows.view(cache.table), q.float(), lse, 320).double().sum(-1)
    torch.testing.assert_close(got, torch.full_like(got, count), rtol=0, atol=count * 4 * pages.tolerance(cache, q))


@pytest.mark.parametrize("size", [3e3, -3e3])
@pytest.mark.parametrize("count", [1, 20])
def test_logits_of_ten_thousand_overflow_nothing(make, count, size):
    """Along the mean key, so that the logits of all slots are far up, or far down, together. Products have one sign
    then: partial sums grow with i, D roundings of 2**-24 of them add up like a random walk."""
    cache, layers = make([300], shift=4.0)
    rows = Rows.last([count], [300])
    direction = cache.k[0].mean((0, 2)).repeat_interleave(5, 0)  # [H, D]: the mean key of each head
    q = (size * direction / direction.norm(dim=-1, keepdim=True)).float().double().expand(count, -1, -1).contiguous()
    logits = torch.einsum("hd,hsd->hs", q[-1], cache.k[0, 0, :, :300].repeat_interleave(5, 0)) / 8
    assert logits.abs().max() > 1e4
    atol = 2**-24 * 64**0.5 * logits.abs().max().item()
    pages.assert_exact(cache, rows, q, pages.attend(cache, layers, rows, q), atol=atol)


@pytest.mark.parametrize("count", [1, 20])
def test_the_same_logit_everywhere_gives_the_mean(make, count):
    cache, layers = make([300])
    rows = Rows.last([count], [300])
    q = torch.zeros(count, 10, 64, dtype=torch.float64)
    out, lse = pages.attend(cache, layers, rows, q)
    pages.assert_exact(cache, rows, q, (out, lse))
    torch.testing.assert_close(lse[-1].double(), torch.full((10,), 300.0).double().log(), rtol=0, atol=2**-20)


@pytest.mark.parametrize("count", [1, 20])
def test_pages_beyond_four_gigabytes_are_found(library, count):
    """Fails when a byte's place is an int32, signed or not, or the index of a float is one. The storage is reserved,
    not touched."""
    small = pages.build("full", Geom(1, 2, 1, 256), 128, [300], dtype="float32")
    last = 2**31 // (128 * 256) + 9  # floats of a block
    try:
        big = Arrays(tuple(small.arrays.regions.values()), last + 1, 1, 1, 128, torch.device("cpu"))
    except (RuntimeError, MemoryError) as short:
        pytest.skip(f"memory is short: {short}")
    for name, x in small.arrays.data.items():
        big.data[name][last - small.table[0, 0]] = x[small.table[0, 0]]
    cache = dataclasses.replace(small, arrays=big, table=last - small.table)
    rows = Rows.last([count], [300])
    q = pages.queries(cache, rows)
    layers: Layers = cache.layers(library)
    pages.assert_exact(cache, rows, q, pages.attend(cache, layers, rows, q))
