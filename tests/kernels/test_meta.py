"""The one check of an encode: bad inputs and overflowing metadata are told apart and located."""

import pytest
import torch

from kvlab.errors import ConfigError
from kvlab.kernels import meta


def test_finite_sees_one_bad_element():
    good = torch.full((1000,), 60000.0).half()
    assert meta.finite(good, good)
    for bad in (torch.nan, torch.inf, -torch.inf):
        with_bad = good.clone()
        with_bad[500] = bad
        assert not meta.finite(good, with_bad)
    assert not meta.finite(torch.tensor([torch.inf]), torch.tensor([-torch.inf]))


def test_a_bad_input_is_located():
    x = torch.zeros(1, 3, 4, 8)
    x[0, 2, 1, 5] = torch.nan
    with pytest.raises(meta.NonFinite, match="int4: layer 7 v is nan at row 0, head 2, token 1, channel 5"):
        meta.refuse("int4", 7, "meta_dtype", k=(torch.zeros_like(x), torch.zeros(1)), v=(x, x.amax(-1)))


def test_an_overflow_names_the_way_out():
    x = torch.zeros(1, 3, 4, 8)
    x[0, 1, 3, 2] = 1e6
    with pytest.raises(
        meta.MetaOverflow, match=r"layer 0 k: .* float16; .* 1e\+06 at row 0, head 1, token 3, channel 2"
    ):
        meta.refuse("int4", 0, "meta_dtype", k=(x, x.amax(-1).half()))


def test_a_false_alarm_returns():
    """Float32 metadata whose SUM overflows is fine."""
    big = torch.full((10,), 3e38)
    assert not meta.finite(big)
    meta.refuse("int4", 0, "meta_dtype", k=(torch.zeros(1, 1, 1, 8), big))


def test_unknown_types_are_refused():
    with pytest.raises(ConfigError, match="int8: meta_dtype='fp12'"):
        meta.dtype_of("int8", "meta_dtype", "fp12")
