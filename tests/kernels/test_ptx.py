"""Inline PTX gives, bit by bit, the float16 that the bytes mean; ahead-of-time compiles check that ptxas takes it."""

from __future__ import annotations

import emulator
import numpy as np
import pytest
import torch

from kvlab.kernels import codebook
from kvlab.kernels.packing import pack, planes, unpack
from kvlab.kernels.triton.ptx import ptx

BYTES = np.arange(256, dtype=np.uint32)
RNG = np.random.default_rng(0)


def rows(n: int) -> torch.Tensor:
    """uint8 [rows, n]: every byte value at every place, others around it."""
    x = torch.from_numpy(RNG.integers(0, 256, (256, n), dtype=np.uint8))
    return torch.cat(
        [torch.where(torch.arange(n) == i, torch.arange(256, dtype=torch.uint8)[:, None], x) for i in range(n)]
    )


def words(x: torch.Tensor) -> np.ndarray:
    """uint8 [..., 4 n] -> uint32 [..., n]"""
    return np.ascontiguousarray(x.numpy()).view(np.uint32)


def result(p, part: int, *operands) -> torch.Tensor:
    """float16 [..., 4 n] of a part, from registers uint32 [..., n]."""
    held = [emulator.run(t, "=r,r", np.uint32(0))[0] for t in p.words]
    out = emulator.run(p.texts[part], p.constraints, *operands, *(w for w in held for _ in range(4)))
    return torch.from_numpy(np.stack(out, -1).view(np.float16).reshape(*out[0].shape[:-1], -1))


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Bits, so that -0 is not 0."""
    assert torch.equal(got.view(torch.int16), want.half().view(torch.int16))


def tables(bits: int) -> list[torch.Tensor]:
    mirrored = torch.randn(2 ** (bits - 1)).abs() + 1e-3
    some = [codebook.lloyd_max(d, bits).centroids.float() for d in (64, 128)]
    return [*some, torch.cat([-mirrored.flip(0), mirrored])] + [torch.randn(2**bits)] * (bits < 4)


CASES = [(bits, None) for bits in range(1, 9) if len(planes(bits)) <= 2]
CASES += [(bits, i) for bits in (1, 2, 3, 4) for i in range(len(tables(bits)))]


@pytest.mark.parametrize(("bits", "which"), CASES)
def test_codes_become_their_numbers(bits, which):
    """Fails when a nibble that picks a byte has bit 3 set, a plane is shifted wrongly, an entry is not its own."""
    torch.manual_seed(bits)
    table = None if which is None else tables(bits)[which]
    wide, *rest = planes(bits)
    narrow = rest[0] if rest else 0
    n = 16 * 8  # codes of a row, as many as make whole words of both planes
    packed = (
        rows(n * bits // 8) if not narrow else torch.from_numpy(RNG.integers(0, 256, (4096, n * bits // 8), np.uint8))
    )
    codes = unpack(packed, n, bits)
    assert torch.equal(pack(codes, bits), packed)
    p, parts, cols = ptx("codes", wide, narrow, table), 8 // wide, n * wide // 8
    assert len(p.texts) == parts
    for i in range(parts):
        operands = [words(packed[:, :cols])]
        if narrow:  # as numbers.raw and narrow_shift lay them out
            c = torch.arange(cols)
            m = n * narrow // 8
            operands.append(words(packed[:, cols:][:, c % m]))
            shifts = ((i * (cols // m) + c // m) * narrow).numpy().astype(np.uint32)
            operands += [shifts[k::4] for k in range(4)]
        want = codes[:, i * cols : (i + 1) * cols]
        same(result(p, i, *operands), want.float() if table is None else table[want.int()])


def test_eight_bit_numbers_become_float16():
    x = rows(8)
    same(result(ptx("int8", 8, 0, None), 0, words(x)), x.view(torch.int8).float())
    values = x.view(torch.float8_e4m3fn).float()
    got = result(ptx("e4m3", 8, 0, None), 0, words(x)).float() * 256
    assert torch.equal(got[values.isfinite()], values[values.isfinite()])
    assert got.isfinite().all(), "what is not a NaN needs no mask"


def test_a_table_that_is_not_symmetric_is_left_to_plain_code():
    assert ptx("codes", 4, 0, torch.randn(16)) is None


@pytest.mark.parametrize("line", ["popc.b32 $0, $1", "sub.f16x2 $0, $1, $1", "mov.b32 z, $1", "mov.b32 $0, $9"])
def test_the_emulator_refuses_what_it_does_not_know(line):
    with pytest.raises((KeyError, AssertionError)):
        emulator.run(f"{{ .reg .b32 a; {line}; }}", "=r,r", BYTES)


def test_the_emulator_picks_bytes_as_prmt_does():
    a, b = np.uint32(0x83828180), np.uint32(0x47464544)
    for pick, want in ((0x3210, a), (0x7654, b), (0x0123, 0x80818283), (0x4040, 0x44804480), (0xC8C8, 0x00FF00FF)):
        assert emulator.prmt(a, b, np.uint32(pick)) == want, hex(pick)
