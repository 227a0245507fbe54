"""Who stays: keep_top against sorting with plain lists."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import slow_keep

from kvlab.kernels.select import keep_top

SCORES = st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1e30, 256.0, 257.0])
JUNK = st.sampled_from([math.nan, math.inf, -math.inf, 3e38, 0.0])


@st.composite
def rows(draw):
    """(scores, n, budget) of one (sequence, head): slots beyond n hold anything."""
    n = draw(st.integers(0, 9))
    score = draw(st.lists(SCORES, min_size=n, max_size=n))
    return score + draw(st.lists(JUNK, min_size=10 - n, max_size=10 - n)), n, draw(st.integers(0, n))


@settings(max_examples=300)
@given(batch=st.lists(rows(), min_size=1, max_size=4), sinks=st.integers(0, 4), recent=st.integers(0, 4))
def test_what_stays_is_what_sorting_says(batch, sinks, recent):
    """Ties, -inf, protected slots that score worst, more protected than the budget allows, NaN beyond the last slot,
    budgets that differ in a batch. Fails for topk (ties), for a sentinel score (1e30), for a mask by value (-inf)."""
    score = torch.tensor([s for s, _, _ in batch], dtype=torch.float32)
    n, budget = (torch.tensor([b[i] for b in batch]) for i in (1, 2))
    got = keep_top(score, n, budget, sinks, recent)
    assert got.shape == (len(batch), int(budget.max()))
    for row, (s, m, k) in zip(got.tolist(), batch):
        assert row[:k] == slow_keep(s, m, k, sinks, recent)


def test_equal_scores_keep_the_lower_slot():
    """torch.topk returned slot 2737 first for these (eviction.md 0.2)."""
    score = torch.zeros(1, 4096)
    score[0, ::2] = 1.0
    got = keep_top(score, torch.tensor([4096]), torch.tensor([100]), 0, 0)
    assert got[0].tolist() == list(range(0, 200, 2))


def test_protection_does_not_touch_the_scores():
    """A sentinel of max + 1 ties at large scores: 2**24 + 1 is 2**24 in float32. The newest slot must stay."""
    score = torch.full((1, 1, 8), 2.0**24)
    score[..., 7] = -5.0
    got = keep_top(score, torch.tensor([[8]]), torch.tensor([[3]]), sinks=1, recent=1)
    assert got[0, 0].tolist() == [0, 1, 7]


def test_leading_axes_are_kept_apart():
    """[layers, sequences, heads, slots], each head with its own scores, length and budget."""
    gen = torch.Generator().manual_seed(0)
    score = torch.randn(2, 3, 2, 12, generator=gen)
    n = torch.randint(4, 13, (2, 3, 2), generator=gen)
    budget = torch.randint(1, 5, (2, 3, 2), generator=gen)
    got = keep_top(score, n, budget, 1, 1)
    for at in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(2)).tolist():
        at, k = tuple(at), int(budget[tuple(at)])
        assert got[at][:k].tolist() == slow_keep(score[at].tolist(), int(n[at]), k, 1, 1), at


@pytest.mark.parametrize("budget", [0, 5])
def test_nothing_and_everything_are_budgets_too(budget):
    got = keep_top(torch.randn(2, 5), torch.tensor([5, 5]), torch.tensor([budget, budget]), 0, 0)
    assert got.tolist() == [list(range(budget))] * 2
