"""Integer codes with a step: asymmetric (step and zero) and symmetric (step only), round to nearest even.

    asymmetric   M = 2**bits - 1      zero = min, step = (max - min)/M    code = clamp(round((x - zero)/step), 0, M)
    symmetric    Q = 2**(bits-1) - 1  step = max|x|/Q                     code = clamp(round(x/step), -Q, Q)

Step and zero are rounded to their storage type first; codes and values both use the stored numbers. A step that is 0
(constant group, or a range below the storage type) gives code 0 everywhere: no epsilon, no division by zero. `zero` is
a float offset, not a grid point (KVQuant, arXiv 2401.18079, App. G: a clamped integer zero point is wrong for channels
of one sign). |x - value| <= step/2, or <= max(u|zero|, e0) + M max(u step, e0) where rounded metadata does not span the
group (u = 2**-11, e0 = 2**-25 for float16). Source: KIVI, arXiv 2402.02750, eq. 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.errors import ConfigError


def check_group(who: str, group: int, D: int, model: str) -> None:
    """Groups of channels tile head_dim exactly: a shorter last group would need a layout of its own."""
    if group < 1 or D % group:
        fits = [g for g in (128, 96, 80, 64, 48, 40, 32, 16) if D % g == 0]
        raise ConfigError(
            f"{who}: group={group} does not divide head_dim {D} of {model}, and groups never cross a head. "
            f"Use method.group={' or '.join(map(str, fits)) or D} (smaller groups: less error, more metadata)."
        )


def asymmetric_params(x: Tensor, dim: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x float [...] -> step, zero in `dtype`, `dim` kept with size 1."""
    lo, hi = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    return ((hi.float() - lo.float()) / (2**bits - 1)).to(dtype), lo.to(dtype)


def asymmetric_codes(x: Tensor, step: Tensor, zero: Tensor, bits: int) -> Tensor:
    """-> uint8 like x. step, zero: the STORED ones."""
    step = _divisor(step)
    codes = x.float().sub(zero.float()).div_(step).round_().clamp_(0, 2**bits - 1)
    return codes.to(torch.uint8) if bits == 8 else codes.to(torch.int8).view(torch.uint8)  # int8 casts are 4x faster


def asymmetric_values(codes: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    """-> float32, product and sum rounded apart. (A code times a 16-bit step is exact in float32, so a fused
    multiply-add gives the same bits; with float32 metadata it does not.)"""
    return codes.float().mul_(step.float()).add_(zero.float())


def symmetric_params(x: Tensor, dim: int, bits: int, dtype: torch.dtype) -> Tensor:
    """x float [...] -> step in `dtype`, `dim` kept with size 1."""
    return (x.abs().amax(dim, keepdim=True).float() / (2 ** (bits - 1) - 1)).to(dtype)


def symmetric_codes(x: Tensor, step: Tensor, bits: int) -> Tensor:
    """-> int8 like x, in [-Q, Q]; -2**(bits-1) is never used."""
    q = 2 ** (bits - 1) - 1
    return x.float().div(_divisor(step)).round_().clamp_(-q, q).to(torch.int8)


def _divisor(step: Tensor) -> Tensor:
    """float32 step, infinite where it is 0: x / inf = 0, the code of a constant group."""
    step = step.float()
    return step.masked_fill(step == 0, torch.inf)


def symmetric_values(codes: Tensor, step: Tensor) -> Tensor:
    """-> float32."""
    return codes.float().mul_(step.float())
