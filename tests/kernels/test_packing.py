"""Codes are packed to the byte, in both orders, at any length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.kernels.packing import convert, pack, packed_bytes, permutation, planes, unpack


def u8(*values):
    return torch.tensor(values, dtype=torch.uint8)


def stream(codes, width):
    """Six-line reference: a little-endian bit stream, by Python integers."""
    word = sum(int(c) << (width * i) for i, c in enumerate(codes))
    return list(word.to_bytes(-(-len(codes) * width // 8), "little"))


@pytest.mark.parametrize(
    ("codes", "bits", "want"),
    [
        (range(8), 3, "88c6fa"),
        (range(7, -1, -1), 3, "773905"),
        ([j % 4 for j in range(16)], 2, "e4e4e4e4"),
        (range(8), 4, "10325476"),
        ([5], 3, "05"),
        ([7, 7, 7], 3, "ff01"),
    ],
)
def test_le_gives_the_known_bytes(codes, bits, want):
    assert bytes(pack(u8(*codes), bits, "le").tolist()).hex() == want


def test_split_puts_whole_runs_of_channels_in_one_slot():
    """Fails for a nibble order that pairs neighbours (byte j = elements 2j, 2j + 1)."""
    codes = torch.arange(8, dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [0 | 4 << 4, 1 | 5 << 4, 2 | 6 << 4, 3 | 7 << 4]
    assert pack(codes & 3, 2).tolist() == [0b10_00_10_00, 0b11_01_11_01]  # codes 0 2 4 6 | 1 3 5 7, low bits first
    low, high = pack(codes, 3)[:2], pack(codes, 3)[2:]  # a 2-bit plane with the low bits, then a 1-bit plane
    assert low.tolist() == pack(codes & 3, 2).tolist()
    assert high.tolist() == [0b11110000]


@given(bits=st.integers(1, 8), n=st.integers(1, 70), order=st.sampled_from(["le", "split"]), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=150)
def test_unpack_of_pack_is_the_codes(bits, n, order, seed):
    """Lengths that are no multiple of 8 included: a packer with 32 // bits codes to a word breaks at 3 bits."""
    codes = torch.randint(0, 2**bits, (2, 3, n), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack(codes, bits, order)
    assert packed.shape == (2, 3, packed_bytes(n, bits, order))
    assert torch.equal(unpack(packed, n, bits, order), codes)
    if n % 8 == 0:
        assert packed.shape[-1] * 8 == n * bits, "not one bit is wasted"


@given(bits=st.integers(1, 8), n=st.integers(1, 70), order=st.sampled_from(["le", "split"]), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=100)
def test_an_order_is_a_permutation_of_a_bit_stream_per_plane(bits, n, order, seed):
    codes = torch.randint(0, 2**bits, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).tolist()
    want, low = [], 0
    for w in planes(bits, order):
        part = [c >> low & (2**w - 1) for c in codes] + [0] * 8 * n
        want += stream([part[e] if e < n else 0 for e in permutation(n, w, order).tolist()], w)
        low += w
    assert pack(u8(*codes), bits, order).tolist() == want


@pytest.mark.parametrize("bits", range(1, 9))
def test_convert_keeps_the_codes(bits):
    codes = torch.randint(0, 2**bits, (5, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    there = convert(pack(codes, bits, "split"), 40, bits, "split", "le")
    assert torch.equal(there, pack(codes, bits, "le"))
    assert torch.equal(convert(there, 40, bits, "le", "split"), pack(codes, bits, "split"))


def test_pack_takes_views():
    codes = torch.randint(0, 8, (40, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).t()
    assert torch.equal(unpack(pack(codes, 3), 40, 3), codes)


@pytest.mark.parametrize("bits", [0, 9])
def test_a_code_has_one_to_eight_bits(bits):
    with pytest.raises(ValueError, match="1 to 8"):
        packed_bytes(8, bits)
