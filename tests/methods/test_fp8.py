"""fp8: one scale per token and kv head."""

import pytest
import torch

from kvlab.cache.layout import Geom
from kvlab.methods.fp8 import Fp8


def fp8(fmt="e4m3"):
    codec = Fp8(fmt)
    codec.setup(Geom(L=1, H=3, Hk=3, D=64), 16)
    return codec


@pytest.mark.parametrize(("fmt", "rel", "floor"), [("e4m3", 1 / 17, 2**-10), ("e5m2", 1 / 9, 2**-17)])
def test_the_error_bound_holds_at_every_size(fmt, rel, floor):
    g = torch.Generator().manual_seed(0)
    k = torch.randn(1, 3, 100, 64, generator=g) * torch.logspace(-20, 20, 100)[:, None]
    codec = fp8(fmt)
    page = codec.encode(0, k, k)
    error = (codec.decode(0, page)[0] - k).abs()
    scale = page["k_scale"][..., None]
    assert (error <= torch.maximum(k.abs() * rel, scale * floor) * (1 + 1e-6)).all()


def test_the_largest_value_is_exact():
    """Fails for a scale with a safety factor, or for amax / 256: the largest code must be 448."""
    k = torch.randn(1, 3, 10, 64, generator=torch.Generator().manual_seed(1))
    page = fp8().encode(0, k, k)
    assert page["k"].view(torch.float8_e4m3fn).float().abs().amax(-1).eq(448).all()


def test_a_later_larger_token_does_not_saturate():
    """Fails for a scale frozen at the first update: there the second token would come back as 1."""
    k = torch.ones(1, 3, 2, 64)
    k[:, :, 1] = 10
    torch.testing.assert_close(fp8().decode(0, fp8().encode(0, k, k))[0], k, rtol=1e-6, atol=0)


def test_heads_have_their_own_scales():
    k = torch.ones(1, 3, 1, 64) * torch.tensor([1.0, 10, 100])[:, None, None]
    assert fp8().encode(0, k, k)["v_scale"].flatten().tolist() == pytest.approx([1 / 448, 10 / 448, 100 / 448])


def test_a_zero_token_comes_back_as_zero():
    """Fails for a division by the scale without a rule for 0 (NaN), and for a tiny floor that is stored."""
    k = torch.zeros(1, 3, 2, 64)
    k[:, :, 1] = 1e-30
    page = fp8().encode(0, k, k)
    back = fp8().decode(0, page)[0]
    assert page["k_scale"][:, :, 0].eq(0).all() and back[:, :, 0].eq(0).all()
    torch.testing.assert_close(back[:, :, 1], k[:, :, 1], rtol=1e-6, atol=0)
