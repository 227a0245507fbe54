"""Intervals against published values, closed forms, scipy and brute force."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from kvlab.report import stats

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # shared machines stall


def test_wilson_matches_values_worked_out_by_hand():
    # 8 of 10, z = 1.959964: centre (0.8 + 0.192073) / 1.384146, half 0.226565
    est = stats.wilson(8, 10)
    assert (est.low, est.high) == pytest.approx((0.490162, 0.943317), abs=2e-6)
    # 0 of 10: upper bound z^2 / (n + z^2)
    assert stats.wilson(0, 10)[1:3] == pytest.approx((0.0, 0.277533), abs=2e-6)


@CALM
@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_contains_the_share_and_agrees_with_scipy(case):
    hits, n = case
    est = stats.wilson(hits, n)
    reference = binomtest(hits, n).proportion_ci(method="wilson")
    assert 0 <= est.low <= est.value <= est.high <= 1
    assert (est.low, est.high) == pytest.approx((reference.low, reference.high), abs=1e-9)


def test_wilson_refuses_counts_that_cannot_be():
    for hits, n in [(0, 0), (-1, 3), (4, 3)]:
        with pytest.raises(ValueError, match="wilson"):
            stats.wilson(hits, n)


def test_paired_bootstrap_uses_the_pairing():
    """Unpaired resampling of these documents gives an interval of about +-0.2; the paired difference is exactly 0.1."""
    base = np.linspace(0, 1, 50)
    est = stats.paired_bootstrap(base, base + 0.1)
    assert est.value == pytest.approx(0.1) and est.n == 50
    assert est.high - est.low < 1e-12


def test_paired_bootstrap_has_the_width_theory_gives():
    rng = np.random.default_rng(1)
    diff = rng.normal(0.3, 1.0, 400)
    est = stats.paired_bootstrap(np.zeros(400), diff)
    half = 1.96 * diff.std() / math.sqrt(400)
    # bootstrap quantiles of B = 2000 scatter by about 4 % of the half width
    assert (est.value - est.low, est.high - est.value) == pytest.approx((half, half), rel=0.15)
    assert est == stats.paired_bootstrap(np.zeros(400), diff)  # seed 0, always


def test_paired_bootstrap_weighs_documents_by_tokens():
    est = stats.paired_bootstrap([1.0, 2.0], [2.0, 2.0], counts=[300, 100])
    assert est.value == pytest.approx(0.75)
    assert (est.low, est.high) == (0.0, 1.0)


def test_one_document_has_a_difference_but_no_interval():
    assert stats.paired_bootstrap([1.0], [3.0]) == stats.Estimate(2.0, None, None, 1)
    with pytest.raises(ValueError, match="common length"):
        stats.paired_bootstrap([1.0, 2.0], [1.0])


def test_bootstrap_in_blocks_equals_the_textbook_loop():
    """More documents than fit one block of draws: blocks must neither repeat nor drop resamples."""
    x = np.random.default_rng(3).normal(size=5000)
    est = stats.paired_bootstrap(np.zeros(5000), x, resamples=900)  # blocks of 800
    rng = np.random.default_rng(0)
    draws = np.concatenate([rng.integers(0, 5000, (b, 5000)) for b in (800, 100)])
    assert (est.low, est.high) == pytest.approx(tuple(np.quantile(x[draws].mean(1), [0.025, 0.975])), abs=1e-12)


@CALM
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60))
def test_mcnemar_is_the_exact_binomial_test_on_disagreements(pairs):
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    wins = sum(x and not y for x, y in pairs)
    losses = sum(y and not x for x, y in pairs)
    expected = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert stats.mcnemar(a, b) == pytest.approx(expected, abs=1e-12)


def test_mcnemar_by_hand():
    # 1 against 5 disagreements: 2 (1 + 6) / 64
    assert stats.mcnemar([1, 0, 0, 0, 0, 0, 1], [0, 1, 1, 1, 1, 1, 1]) == pytest.approx(14 / 64)


def test_perplexity_is_of_summed_losses_not_the_mean_of_perplexities():
    est = stats.perplexity([math.log(2) * 10, math.log(8) * 30], [10, 30])
    assert est.value == pytest.approx(2 ** ((10 + 90) / 40))
    assert est.low is None and est.n == 2


def test_perplexity_interval_needs_eight_documents_and_brackets_the_value():
    nll = [20.0, 22.0, 19.0, 25.0, 21.0, 18.0, 23.0, 20.5]
    est = stats.perplexity(nll, [10] * 8)
    assert est.low < est.value < est.high
    assert stats.perplexity(nll[:7], [10] * 7).low is None
