"""int4: asymmetric, per token and group of channels, 2 to 4 bits."""

import pytest
import torch

from kvlab.cache.layout import Geom
from kvlab.kernels import packing
from kvlab.methods.int4 import Int4


def int4(D=64, **options):
    codec = Int4(**options)
    codec.setup(Geom(L=1, H=3, Hk=3, D=D), 16)
    return codec


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_the_error_bound_holds(bits, offset):
    codec = int4(bits=bits, group=32)
    k = offset + torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    page = codec.encode(0, k, k)
    step, zero = (page[n].float()[..., None].expand(1, 3, 64, 2, 32).flatten(-2) for n in ("k_step", "k_zero"))
    ends = zero.abs() * 2**-11 + (2**bits - 1) * (step * 2**-11).clamp_min(2**-25)
    assert ((codec.decode(0, page)[0] - k).abs() <= torch.maximum(step / 2, ends) + 1e-4).all()


def test_a_group_is_a_packed_row():
    """Byte j of a group holds channels j (low nibble) and j + group/2 (high). Fails when groups interleave."""
    k = torch.arange(16.0).repeat(4).expand(1, 3, 2, 64)  # four groups of 16 channels, codes 0..15 in each
    page = int4(group=16).encode(0, k, k)
    assert page["k"][0, 0, 0].tolist() == [j | (j + 8) << 4 for j in range(8)] * 4
    codes = packing.unpack(page["k"].unflatten(-1, (4, 8)), 16, 4)
    assert codes[0, 0, 0].tolist() == [list(range(16))] * 4


def test_the_range_of_a_token_ends_on_codes_0_and_max():
    """Fails for a symmetric step, which wastes a code, and for a zero point on the integer grid."""
    k = torch.randn(1, 3, 20, 64, generator=torch.Generator().manual_seed(0)).half().float()
    codec = int4()
    back = codec.decode(0, codec.encode(0, k, k))[0]
    torch.testing.assert_close(back.amin(-1), k.amin(-1), rtol=0, atol=0)
    torch.testing.assert_close(back.amax(-1), k.amax(-1), rtol=2e-3, atol=2e-3)


def test_a_large_constant_channel_ruins_a_token():
    """Why keys of models with a key bias need kivi: the docstring's warning, measured."""
    k = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    codec = int4()
    plain = (codec.decode(0, codec.encode(0, k, k))[0] - k).norm()
    k[..., 0] += 50
    assert (codec.decode(0, codec.encode(0, k, k))[0] - k)[..., 1:].norm() > 5 * plain
