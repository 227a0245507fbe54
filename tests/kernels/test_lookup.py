"""The fast way from packed codes to floats equals unpacking them one by one."""

import pytest
import torch

from kvlab.cache.scratch import Scratch
from kvlab.kernels import lookup
from kvlab.kernels.packing import pack


def poisoned():
    """Scratch whose buffers hold NaN: whoever reads what was not written shows it."""

    class Poisoned(Scratch):
        def get(self, name, shape, dtype):
            out = super().get(name, shape, dtype)
            return out.fill_(float("nan") if dtype.is_floating_point else 85)

    return Poisoned().get


@pytest.mark.parametrize("n", [8, 16, 24, 40, 64, 72, 80, 96, 128, 256, 6, 20, 36])
@pytest.mark.parametrize("bits", range(1, 9))
def test_lookup_is_a_gather_of_unpacked_codes(bits, n):
    """n % 8 != 0 takes the plain path; 24, 40, 72 have planes that no 8-byte word divides."""
    g = torch.Generator().manual_seed(n)
    values = torch.randn(2**bits, generator=g)
    codes = torch.randint(0, 2**bits, (3, 5, n), dtype=torch.uint8, generator=g)
    tab = lookup.table(values, n)
    out = lookup.lookup(pack(codes, bits), bits, tab, torch.full((3, 5, n), torch.nan), poisoned())
    assert torch.equal(out, values[codes.long()][..., lookup.order(n, bits)])
    plain = lookup.codes(pack(codes, bits), bits, torch.full((3, 5, n), torch.nan), poisoned())
    assert torch.equal(plain, codes.float()[..., lookup.order(n, bits)])


@pytest.mark.parametrize("bits", range(1, 9))
def test_order_is_a_permutation_per_group(bits):
    assert lookup.order(96, bits, 32).view(3, 32).sort(-1).values.tolist() == torch.arange(96).view(3, 32).tolist()


@pytest.mark.parametrize("bits", [3, 7])
def test_pages_may_start_anywhere(bits):
    """A view whose storage does not start on a word boundary, and one that is not contiguous."""
    codes = torch.randint(0, 2**bits, (4, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    want, tab = codes.float()[..., lookup.order(64, bits)], lookup.table(torch.arange(2**bits).float(), 64)
    packed = pack(codes, bits)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), packed.flatten()])[3:].view_as(packed)
    strided = torch.stack([packed, packed], 1)[:, 0]
    for page in (shifted, strided):
        assert torch.equal(lookup.lookup(page, bits, tab, torch.empty(4, 64), Scratch().get), want)


def test_every_index_of_a_table_with_spread_bits_is_inside():
    """Any byte may stand in an unused slot of a page; a read of it must not leave the table."""
    for bits in range(1, 9):
        page = torch.full((2, 8 * bits), 255, dtype=torch.uint8)
        out = lookup.lookup(
            page, bits, lookup.table(torch.arange(2**bits).float(), 64), torch.empty(2, 64), Scratch().get
        )
        assert out.eq(2**bits - 1).all()
