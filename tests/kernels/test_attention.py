"""Attention partials against softmax in float64: values, masks, empty rows, joins, and the weight each key received."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlab.kernels.attention import mass, merge, partial

# Unit-variance inputs: a logit is a float32 sum of D products (error D 2**-24 at worst, sqrt(D) 2**-24 typically), an
# output a convex mean of values below 6: 2e-6 is what the runtime's specification (9.2) asks for.
ATOL = 2e-6


def inputs(N: int, Hk: int, R: int, n: int, D: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(N, Hk, x, D, generator=gen).to(dtype) for x in (R, n, n)]


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float64 (out, lse, weights); seen: bool [N, 1|Hk, R, n]. A row that sees nothing: zeros, -inf, zeros."""
    logits = (q.double() @ k.double().transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse[..., None]).nan_to_num(0.0)
    return weights @ v.double(), lse, weights


def masked(seen: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The runtime's form: rows that see nothing get a mask of zeros and a flag."""
    empty = ~seen.any(-1)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~(seen | empty[..., None]), -torch.inf), empty


def random_mask(N: int, heads: int, R: int, n: int, seed: int = 0) -> Tensor:
    """Every kind of row: all, some, one, none."""
    gen = torch.Generator().manual_seed(seed)
    seen = torch.rand(N, heads, R, n, generator=gen) < 0.5
    seen[:, :, 0] = True
    seen[:, :, R // 2] = False
    seen[:, :, -1] = torch.arange(n) == n - 1
    return seen


@pytest.mark.parametrize("n", [1, 7, 33, 81, 256])
@pytest.mark.parametrize("R, D", [(1, 16), (2, 64), (17, 64), (48, 80)])
def test_a_partial_is_softmax_attention_and_its_log_sum_exp(n, R, D):
    """Fails for a lse in base 2, a scale applied twice, or heads folded in another order than keys."""
    q, k, v = inputs(2, 3, R, n, D)
    out, lse = partial(q, k, v, D**-0.5, None, None)
    want, want_lse, _ = exact(q, k, v, D**-0.5, torch.ones(2, 1, R, n, dtype=torch.bool))
    assert out.dtype == lse.dtype == torch.float32 and out.shape == (2, 3, R, D) and lse.shape == (2, 3, R)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=ATOL)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=ATOL)


@pytest.mark.parametrize("heads", [1, 3], ids=["one mask", "a mask per head"])
@pytest.mark.parametrize("n", [1, 7, 64, 81])
def test_a_masked_key_has_no_weight_and_an_empty_row_is_zeros_and_minus_infinity(n, heads):
    """Fails when an empty row returns the mean of all values (its mask row is all zeros), or NaN."""
    q, k, v = inputs(2, 3, 9, n, 32)
    seen = random_mask(2, heads, 9, n)
    mask, empty = masked(seen)
    out, lse = partial(q, k, v, 0.25, mask, empty)
    want, want_lse, _ = exact(q, k, v, 0.25, seen)
    gone = empty.expand(2, 3, 9)
    assert gone.any() and (out[gone] == 0).all() and (lse[gone] == -torch.inf).all()
    torch.testing.assert_close(out.double(), want, rtol=0, atol=ATOL)
    torch.testing.assert_close(lse[~gone].double(), want_lse[~gone], rtol=0, atol=ATOL)


def test_keys_far_from_each_other_neither_overflow_nor_lose_the_small_ones():
    """Logits of +-400: exp overflows float32 beyond 88. Fails when the maximum is not subtracted."""
    q = torch.full((1, 1, 1, 1), 20.0)
    k = torch.tensor([20.0, 20.0, -20.0, 19.95]).view(1, 1, 4, 1)
    v = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 1, 4, 1)
    out, lse = partial(q, k, v, 1.0, None, None)
    want, want_lse, _ = exact(q, k, v, 1.0, torch.ones(1, 1, 1, 4, dtype=torch.bool))
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=0)  # a logit of 400 is known to 400 * 2**-24
    torch.testing.assert_close(lse.double(), want_lse, rtol=2**-22, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_partial_is_right_to_the_rounding_of_its_type(dtype):
    """q, k, v and the weights are rounded once: 4 roundings of a relative half ulp on values below 6, summed."""
    q, k, v = inputs(2, 2, 5, 40, 64, dtype=dtype)
    seen = random_mask(2, 1, 5, 40)
    mask, empty = masked(seen, dtype)
    out, lse = partial(q, k, v, 0.125, mask, empty)
    want, want_lse, _ = exact(q, k, v, 0.125, seen)
    ulp = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), want, rtol=0, atol=4 * ulp * 6)
    some = ~empty.expand(2, 2, 5)
    torch.testing.assert_close(lse[some].double(), want_lse[some], rtol=0, atol=4 * ulp * 6)


def test_the_query_takes_the_type_of_the_keys():
    """Codecs decode to float32 for models in bfloat16: fails when the keys are rounded to the query's type instead."""
    q, k, v = inputs(1, 1, 3, 20, 16)
    out, _ = partial(q.bfloat16(), k, v, 0.25, None, None)
    want, _, _ = exact(q.bfloat16(), k, v, 0.25, torch.ones(1, 1, 3, 20, dtype=torch.bool))
    torch.testing.assert_close(out.double(), want, rtol=0, atol=ATOL)


# -- joins -----------------------------------------------------------------------------------------------------------
@settings(max_examples=40)
@given(cuts=st.lists(st.integers(0, 40), min_size=1, max_size=5), seed=st.integers(0, 10**6))
def test_any_split_of_the_keys_joins_to_the_whole(cuts, seed):
    """Splits of any size, empty ones too. Fails when weights are averaged instead of weighted by their sums."""
    q, k, v = inputs(1, 2, 5, 40, 16, seed)
    seen = random_mask(1, 1, 5, 40, seed)
    joined = None
    for lo, hi in zip([0, *sorted(cuts)], [*sorted(cuts), 40]):
        if lo == hi:
            continue
        mask, empty = masked(seen[..., lo:hi])
        joined = merge(joined, partial(q, k[:, :, lo:hi], v[:, :, lo:hi], 0.25, mask, empty))
    want, want_lse, _ = exact(q, k, v, 0.25, seen)
    torch.testing.assert_close(joined[0].double(), want, rtol=0, atol=2 * ATOL)  # and one rounding for each join
    torch.testing.assert_close(joined[1].double(), want_lse, rtol=0, atol=2 * ATOL)


def parts(seed: int, n: int = 3) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(seed)
    return [(torch.randn(2, 3, 7, 16, generator=gen), 10 * torch.randn(2, 3, 7, generator=gen)) for _ in range(n)]


def test_the_order_of_joins_matters_only_by_rounding():
    """A join rounds its weight and its mean: 2 joins of values below 5 differ by less than 8 half ulps of 5."""
    a, b, c = parts(0)
    left, right, turned = merge(merge(a, b), c), merge(a, merge(b, c)), merge(c, merge(b, a))
    for other in (right, turned):
        torch.testing.assert_close(left[0], other[0], rtol=0, atol=8 * 5 * 2**-24)
        torch.testing.assert_close(left[1], other[1], rtol=0, atol=8 * 40 * 2**-24)


def test_a_join_with_nothing_changes_no_bit():
    """Fails when the empty side's weight is computed as NaN, or when a value passes through an inexact weight."""
    (a,) = parts(1, 1)
    nothing = torch.zeros_like(a[0]), torch.full_like(a[1], -torch.inf)
    assert merge(None, a) is a
    for out, lse in (merge(a, nothing), merge(nothing, a)):
        assert torch.equal(out, a[0]) and torch.equal(lse, a[1])
    out, lse = merge(nothing, nothing)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_a_join_of_rows_of_every_kind_keeps_them_apart():
    """One row empty on the left, one on the right, one on both, one on none: fails when a row is judged by another."""
    a, b = parts(2, 2)
    for side, rows in ((a, [0, 2]), (b, [1, 2])):
        side[0][:, :, rows] = 0
        side[1][:, :, rows] = -torch.inf
    out, lse = merge(a, b)
    assert torch.equal(out[:, :, 0], b[0][:, :, 0]) and torch.equal(out[:, :, 1], a[0][:, :, 1])
    assert (out[:, :, 2] == 0).all() and (lse[:, :, 2] == -torch.inf).all()
    assert torch.isfinite(out).all() and torch.isfinite(lse[:, :, [0, 1, 3]]).all()


@pytest.mark.parametrize("far", [50.0, 200.0, 1e4])
def test_a_side_that_is_far_heavier_wins_without_overflow(far):
    """exp(1e4) overflows. Fails when the two sums are added before the larger maximum is taken out."""
    a, b = parts(3, 2)
    out, lse = merge(a, (b[0], b[1] + far + 100))
    torch.testing.assert_close(out, b[0], rtol=0, atol=10 * 2.718**-far + 1e-30)
    torch.testing.assert_close(lse, b[1] + far + 100, rtol=2**-23, atol=0)
    out, lse = merge((a[0], a[1] + far + 100), b)
    torch.testing.assert_close(out, a[0], rtol=2**-23, atol=10 * 2.718**-far + 1e-30)


def test_the_bits_of_a_join_do_not_depend_on_how_many_rows_are_joined():
    """A sequence must not notice who shares its batch. exp, log and log1p round alike everywhere; these do not."""
    gen = torch.Generator().manual_seed(4)
    a, b = ((torch.randn(64, 1, 9, 16, generator=gen), 3 * torch.randn(64, 1, 9, generator=gen)) for _ in "ab")
    out, lse = merge(a, b)
    for i in range(64):
        one = merge((a[0][i : i + 1], a[1][i : i + 1]), (b[0][i : i + 1], b[1][i : i + 1]))
        assert torch.equal(one[0][0], out[i]) and torch.equal(one[1][0], lse[i]), f"row {i}"


# -- what keys received ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("G, rows", [(1, 1), (2, 5), (3, 16)])
@pytest.mark.parametrize("n", [1, 33, 64])
def test_the_weight_a_key_received_is_the_column_sum_of_the_softmax(n, G, rows):
    """Per query head of a group, summed over its rows. Fails when heads and rows are folded in the other order, or when
    a row that sees nothing votes."""
    q, k, v = inputs(2, 3, G * rows, n, 16)
    seen = random_mask(2, 1, G * rows, n)
    mask, empty = masked(seen)
    _, lse = partial(q, k, v, 0.25, mask, empty)
    got = mass(q, k, 0.25, lse, mask, empty, G)
    want = exact(q, k, v, 0.25, seen)[2].view(2, 3, G, rows, n).sum(3)
    assert got.shape == (2, 3, G, n) and got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=0, atol=rows * 1e-5)  # eviction.md 0.4: 1e-5 per unit of weight


def test_a_row_without_a_vote_gives_nothing():
    """lse = +inf is how padding rows and rows outside the window are silenced."""
    q, k, v = inputs(1, 1, 6, 12, 8)
    _, lse = partial(q, k, v, 0.3, None, None)
    silent = lse.clone()
    silent[..., [1, 4]] = torch.inf
    got = mass(q, k, 0.3, silent, None, None, 2)
    weights = exact(q, k, v, 0.3, torch.ones(1, 1, 6, 12, dtype=torch.bool))[2].view(1, 1, 2, 3, 12)
    want = torch.stack([weights[:, :, 0, [0, 2]].sum(2), weights[:, :, 1, [0, 2]].sum(2)], 2)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def test_the_weights_of_two_tiles_sum_to_one_for_each_row():
    """The joined lse is used for both: fails when each tile is normalised by its own."""
    q, k, v = inputs(2, 1, 8, 50, 16)
    halves = [(k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 13), (13, 50))]
    joined = None
    for tk, tv in halves:
        joined = merge(joined, partial(q, tk, tv, 0.25, None, None))
    total = sum(mass(q, tk, 0.25, joined[1], None, None, 4).sum(-1) for tk, _ in halves)
    torch.testing.assert_close(total, torch.full((2, 1, 4), 2.0), rtol=0, atol=2e-5)  # two rows for each query head


def test_weights_of_half_precision_keys_are_summed_in_float32():
    """Fails when exp or the sum runs in bfloat16: 256 rows of weight 1 would then not add up beyond 256."""
    q, k = torch.zeros(1, 1, 600, 8).bfloat16(), torch.zeros(1, 1, 1, 8).bfloat16()
    got = mass(q, k, 1.0, torch.zeros(1, 1, 600), None, None, 1)
    assert got.item() == 600.0
