"""full: exact where it can be, one rounding where it cannot."""

import pytest
import torch

from kvlab.cache.layout import Geom
from kvlab.cache.scratch import Scratch
from kvlab.kernels.meta import MetaOverflow, NonFinite
from kvlab.methods.full import Full


def full(dtype, model=torch.float32):
    codec = Full(dtype)
    codec.setup(Geom(L=1, H=3, Hk=3, D=64, dtype=model), 16)
    return codec


def kv():
    g = torch.Generator().manual_seed(0)
    return torch.randn(1, 3, 16, 64, generator=g), torch.randn(1, 3, 16, 64, generator=g)


@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16, torch.float16])
def test_the_models_own_type_loses_nothing(model):
    k, v = (x.to(model) for x in kv())
    codec = full("model", model)
    assert codec.family == "full" and {r.dtype for r in codec.regions(codec.geom, 16)} == {model}
    for x, y in zip((k, v), codec.decode(0, codec.encode(0, k, v))):
        assert torch.equal(x.float(), y)


@pytest.mark.parametrize(("dtype", "u"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_one_rounding_otherwise(dtype, u):
    codec = full(dtype)
    for x, y in zip(kv(), codec.decode(0, codec.encode(0, *kv()))):
        assert ((x - y).abs() <= u * x.abs()).all() and not torch.equal(x, y)


def test_a_float32_page_is_read_without_a_copy():
    codec = full("model")
    page = codec.encode(0, *kv())
    k, v = codec.read(0, page, Scratch())
    assert k.data_ptr() == page["k"].data_ptr() and v.data_ptr() == page["v"].data_ptr()


def test_float16_refuses_what_it_cannot_hold():
    k, v = kv()
    k[0, 1, 2, 3] = 1e5
    with pytest.raises(MetaOverflow, match=r"Use method\.dtype=float32"):
        full("float16").encode(0, k, v)
    assert torch.isfinite(full("bfloat16").encode(0, k, v)["k"]).all()
    k[0, 1, 2, 3] = torch.nan
    with pytest.raises(NonFinite, match="layer 0 k is nan"):
        full("float16").encode(0, k, v)
