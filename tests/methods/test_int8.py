"""int8: symmetric, per token and group of channels."""

import pytest
import torch

from kvlab.cache.layout import Geom
from kvlab.methods.int8 import Int8


def int8(**options):
    codec = Int8(**options)
    codec.setup(Geom(L=1, H=3, Hk=3, D=64), 16)
    return codec


@pytest.mark.parametrize("size", [0.0, 1e-6, 1.0, 3e3])
@pytest.mark.parametrize("group", [64, 16])
def test_error_is_at_most_half_a_stored_step(size, group):
    codec = int8(group=group)
    k = size * torch.randn(1, 3, 50, 64, generator=torch.Generator().manual_seed(0))
    page = codec.encode(0, k, k)
    step = page["k_step"].float()[..., None].expand(1, 3, 50, -1, group).flatten(-2)
    limit = step / 2 + 127 * (step * 2**-11).clamp_min(2**-25)
    assert ((codec.decode(0, page)[0] - k).abs() <= limit * (1 + 1e-6)).all()


def test_by_hand():
    k = torch.zeros(1, 3, 1, 64)
    k[..., :5] = torch.tensor([127.0, -127, 0.5, 1.5, 63.5])
    page = int8().encode(0, k, k)
    assert page["k_step"].eq(1).all() and page["k"][0, 0, 0, :6].tolist() == [127, -127, 0, 2, 64, 0]


def test_an_outlier_hurts_only_its_own_group_and_token():
    """Fails when the step is taken per channel over tokens, or over the whole head."""
    k = torch.randn(1, 3, 8, 64, generator=torch.Generator().manual_seed(0))
    spiked = k.clone()
    spiked[0, 1, 3, 40] = 1e4
    codec = int8(group=16)
    a, b = codec.encode(0, k, k), codec.encode(0, spiked, k)
    differs = (a["k"] != b["k"]).nonzero()
    assert set(map(tuple, differs[:, :3].tolist())) == {(0, 1, 3)}
    assert differs[:, 3].min() >= 32 and differs[:, 3].max() < 48
    assert torch.equal(a["v"], b["v"]) and torch.equal(a["v_step"], b["v_step"])
