"""8-bit floats with a scale: bytes on the page, torch's float8 types only for the casts.

    e4m3   float8_e4m3fn   max 448     relative error <= 1/17 (normal), absolute <= 2**-10 (subnormal), times the scale
    e5m2   float8_e5m2     max 57344   relative error <= 1/9, absolute <= 2**-17

Values are clamped to +-max BEFORE the cast: what a cast does above max (saturate, NaN, inf) depends on type, version
and device. Pages are uint8 because torch lacks most operations on float8 tensors (add, gather, scatter).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def max_of(fmt: str) -> float:
    return torch.finfo(FORMATS[fmt]).max


def scale_of(x: Tensor, fmt: str) -> Tensor:
    """x float [..., D] -> float32 [..., 1], so that the largest |x| becomes max. 0 for an all-zero row."""
    return x.abs().amax(-1, keepdim=True).float() / max_of(fmt)


def encode(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """-> uint8 like x, round to nearest even. scale 0: code 0."""
    top = max_of(fmt)
    scale = scale.masked_fill(scale == 0, torch.inf)
    return x.float().div(scale).clamp_(-top, top).to(FORMATS[fmt]).view(torch.uint8)


def decode(codes: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """uint8 -> float32: the definition."""
    return codes.view(FORMATS[fmt]).float().mul_(scale)


def read(codes: Tensor, scale: Tensor, fmt: str, out: Tensor, get: Callable[..., Tensor]) -> Tensor:
    """Like decode, into `out`, 10x faster on a CPU where the float8 cast is not vectorised. Bitwise equal on numbers.

    Both formats are float16 with bits cut off: put sign, exponent and mantissa in place and let the float16 cast, which
    is vectorised, do the work. e4m3's exponent bias is 8 below float16's, hence the factor 256. (NaN codes, which
    `encode` never writes, become numbers.)
    """
    half = get("fp8.half", tuple(codes.shape), torch.int16)
    half.copy_(codes.view(torch.int8))  # sign extended
    if fmt == "e4m3":
        half.bitwise_left_shift_(7).bitwise_and_(0xBF80 - 2**16)
        scale = scale * 256
    else:
        half.bitwise_left_shift_(8)
    return out.copy_(half.view(torch.float16)).mul_(scale)
