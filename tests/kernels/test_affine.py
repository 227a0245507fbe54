"""Integer codes: the hand examples, the error bound, and metadata that is rounded before codes are chosen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import ConfigError
from kvlab.kernels import affine

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def asymmetric(x, bits, dtype=F16, dim=-1):
    step, zero = affine.asymmetric_params(x, dim, bits, dtype)
    codes = affine.asymmetric_codes(x, step, zero, bits)
    return codes, step, zero, affine.asymmetric_values(codes, step, zero)


def test_ties_go_to_the_even_code():
    """KIVI, eq. 1, by hand: 1.5 -> 2. Fails for round-half-up (0.5 -> 1) and for a truncating float-to-int store."""
    codes, step, zero, back = asymmetric(torch.tensor([-1.0, 0, 0.5, 2]), 2)
    assert (step.item(), zero.item()) == (1, -1)
    assert codes.tolist() == [0, 1, 2, 3] and back.tolist() == [-1, 0, 1, 2]
    codes, *_ = asymmetric(torch.tensor([0.0, 0.5, 2.5, 3]), 2)
    assert codes.tolist() == [0, 0, 2, 3]


def test_a_group_along_tokens_has_a_step_per_channel():
    """Fails when the axes are swapped: per token, every row here has another range."""
    x = torch.tensor([[0.0, 10], [1, 12], [2, 13], [3, 16]])
    codes, step, zero, back = asymmetric(x, 2, dim=0)
    assert step.tolist() == [[1, 2]] and zero.tolist() == [[0, 10]]
    assert codes[:, 1].tolist() == [0, 1, 2, 3] and back[:, 1].tolist() == [10, 12, 14, 16]


@pytest.mark.parametrize("value", [3.0, -7.5, 0.0, 60000.0, 2.0**-24])
def test_a_constant_group_comes_back_exactly(value):
    """Fails for an epsilon in the divisor of the wrong place, and for 0/0 (NaN)."""
    codes, step, _, back = asymmetric(torch.full((2, 4), value), 2)
    assert codes.eq(0).all() and step.eq(0).all() and back.eq(value).all()


def test_a_range_below_the_storage_type_gives_code_zero():
    codes, step, _, back = asymmetric(torch.tensor([1.0, 1 + 1e-7, 1 - 1e-7]), 4)
    assert step.item() == 0 and codes.eq(0).all() and torch.isfinite(back).all()


def test_one_sided_values_use_all_codes():
    """Fails for an integer zero point clamped to [0, M]: values near 100 with step 1/15 would need zero point -1500."""
    codes, *_ = asymmetric(100 + torch.linspace(0, 1, 16)[None], 4, F32)
    assert codes.tolist() == [list(range(16))]


def test_codes_come_from_the_stored_step():
    """Fails when codes are rounded with the float32 step but decoded with the stored one."""
    x = 3e3 * torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    step = affine.symmetric_params(x, -1, 8, F16)
    error = (affine.symmetric_values(affine.symmetric_codes(x, step, 8), step) - x).abs() / step.float()
    inside = x.abs() <= 127 * step.float()
    assert error[inside].max() <= 0.5 + 2**-14, f"worst error is {error.max():.4f} steps, the format allows 0.5"


def bound(x, step, zero, bits, dtype):
    """Half a step, or what rounding the metadata leaves uncovered at the ends of the range."""
    u, e0 = {F16: (2**-11, 2**-25), BF16: (2**-8, 0), F32: (2**-24, 0)}[dtype]
    s, z = step.double().abs(), zero.double().abs()
    ends = (u * z).clamp_min(e0) + (2**bits - 1) * (u * s).clamp_min(e0)
    slack = 2.0**-22 * (x.double().abs().amax(-1, keepdim=True) + (2**bits - 1) * s)  # float32 arithmetic
    return torch.maximum(s / 2, ends) + slack


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    dtype=st.sampled_from([F16, BF16, F32]),
    spread=st.sampled_from([1e-9, 1e-6, 1e-3, 1.0, 1e3]),
    offset=st.sampled_from([0.0, 1e-7, -1.0, 100.0, -3e4]),
    seed=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=200)
def test_the_error_bound_holds(bits, dtype, spread, offset, seed):
    """Large offsets (z rounds by more than half a step), ranges below the smallest fp16 step, subnormal metadata."""
    x = offset + spread * torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
    codes, step, zero, back = asymmetric(x, bits, dtype)
    assert codes.int().max() < 2**bits
    worst = ((back.double() - x.double()).abs() / bound(x, step, zero, bits, dtype)).max()
    assert worst <= 1, f"{worst:.4f} times the bound"


def test_int8_by_hand():
    x = torch.tensor([127.0, -127, 0.5, 1.5, 63.5])
    step = affine.symmetric_params(x, -1, 8, F16)
    assert step.item() == 1 and affine.symmetric_codes(x, step, 8).tolist() == [127, -127, 0, 2, 64]


def test_minus_128_is_never_used():
    x = torch.randn(1000, 16, generator=torch.Generator().manual_seed(1)) * 1e-6  # subnormal steps round down a lot
    step = affine.symmetric_params(x, -1, 8, F16)
    assert affine.symmetric_codes(x, step, 8).min() >= -127


def test_a_group_must_tile_the_head():
    with pytest.raises(ConfigError, match=r"group=64 does not divide head_dim 80 of phi.*method.group=80 or 40 or 16"):
        affine.check_group("int4", 64, 80, "phi")
