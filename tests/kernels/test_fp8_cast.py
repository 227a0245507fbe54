"""8-bit floats: nearest even, clamped before the cast, and a fast path that is the same number bit for bit."""

import pytest
import torch

from kvlab.cache.scratch import Scratch
from kvlab.kernels import fp8

ONE = torch.ones(1)


def grid(fmt):
    """Non-negative finite values of the format, ascending, float64; index = code."""
    codes = torch.arange(128, dtype=torch.uint8)
    values = codes.view(fp8.FORMATS[fmt]).double()
    return values[torch.isfinite(values)]


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_midpoints_go_to_the_even_code(fmt):
    """Fails for a cast that rounds twice (through float16 by truncation) or half up."""
    g = grid(fmt)
    mid = ((g[1:] + g[:-1]) / 2).float()
    for nudge, want in ((-1, None), (0, "even"), (1, None)):
        x = mid if nudge == 0 else torch.nextafter(mid, torch.full_like(mid, nudge * torch.inf))
        low = torch.arange(len(mid))
        code = low + (low % 2) if want == "even" else low + (nudge > 0)
        for sign, top in ((1, 0), (-1, 128)):
            got = fp8.encode(sign * x, ONE, fmt).long()
            assert torch.equal(got, code + top), f"{fmt}: sign {sign}, midpoint {'+-'[nudge < 0] if nudge else ''}"


@pytest.mark.parametrize(("fmt", "top"), [("e4m3", 448.0), ("e5m2", 57344.0)])
def test_above_max_saturates(fmt, top):
    """Fails without the clamp: float8_e5m2 casts 61440 to inf."""
    x = torch.tensor([top * 1.01, 61440.0, 1e30, -1e30])
    assert fp8.decode(fp8.encode(x, ONE, fmt), ONE, fmt).tolist() == [min(top, 1e30), min(top, 61440), top, -top]


@pytest.mark.parametrize(("fmt", "numbers"), [("e4m3", 254), ("e5m2", 248)])
def test_the_fast_path_is_the_definition(fmt, numbers):
    codes = torch.arange(256, dtype=torch.uint8).repeat(5, 1)
    scale = torch.tensor([1.0, 0.3, 7e-12, 3e5, 0.0])[:, None]
    want = fp8.decode(codes, scale, fmt)
    fine = torch.isfinite(want)
    assert fine[0].sum() == numbers
    out = fp8.read(codes, scale, fmt, torch.empty_like(want), Scratch().get)
    assert torch.equal(out[fine], want[fine])


@pytest.mark.parametrize(("fmt", "normal", "subnormal"), [("e4m3", 1 / 17, 2**-10), ("e5m2", 1 / 9, 2**-17)])
def test_error_bounds(fmt, normal, subnormal):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 64, generator=g) * torch.logspace(-6, 6, 400)[:, None]
    scale = fp8.scale_of(x, fmt)
    error = (fp8.decode(fp8.encode(x, scale, fmt), scale, fmt) - x).abs()
    assert (error <= torch.maximum(x.abs() * normal, scale * subnormal) * (1 + 1e-6)).all()


def test_a_zero_row_has_scale_and_codes_zero():
    x = torch.zeros(2, 8)
    assert fp8.scale_of(x, "e4m3").eq(0).all() and fp8.encode(x, fp8.scale_of(x, "e4m3"), "e4m3").eq(0).all()
