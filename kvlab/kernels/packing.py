"""Codes of b bits, really packed: 3-bit codes take 3 bits. Pure torch; this file is the definition of the bytes.

A row of n codes is stored as one or more PLANES; a plane of width w holds w bits of every code, w | 8 where it matters
for speed. An ORDER says which planes there are and where a code sits inside one:

    le      one plane of width b, a little-endian bit stream: code p at bits [b*p, b*p + b). Hand vectors, export.
    split   planes of the binary expansion of b (3 = 2+1, 5 = 4+1, 6 = 4+2, 7 = 4+2+1), the widest first and holding
            the low bits. In a plane of width w a row has nb = ceil(n*w/8) bytes, and byte j holds the codes j, j + nb,
            j + 2nb, ... from low to high bits. A kernel loads a byte once and meets whole runs of channels.

Rows are padded with zero codes to whole bytes (per plane). For n % 8 == 0 both orders take n*b/8 bytes.
Not covered: order `cpu` of the C++ kernels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

Order = Literal["le", "split"]


@lru_cache(maxsize=32)
def planes(bits: int, order: Order = "split") -> tuple[int, ...]:
    """Widths of the planes, the one with the lowest bits first: 7 -> (4, 2, 1) in `split`, (7,) in `le`."""
    if not 1 <= bits <= 8:
        raise ValueError(f"codes have 1 to 8 bits, got {bits}")
    if order == "le":
        return (bits,)
    if order == "split":
        return tuple(w for w in (8, 4, 2, 1) if bits & w)
    raise ValueError(f"unknown packing order {order!r}; known: le, split")


def packed_bytes(n: int, bits: int, order: Order = "split") -> int:
    """Bytes of one packed row of n codes."""
    return sum(-(-n * w // 8) for w in planes(bits, order))


@lru_cache(maxsize=256)
def permutation(n: int, width: int, order: Order = "split") -> Tensor:
    """int64 [p]: which code stands at position p of a plane's bit stream. Positions >= n of the row are zero padding.

    THE definition of an order: `pack` of a plane == the little-endian stream of `codes[permutation]`.
    """
    if order == "le":
        return torch.arange(n)
    if 8 % width:
        raise ValueError(f"order split has planes of 1, 2, 4 or 8 bits, got {width}")
    per, nb = 8 // width, -(-n * width // 8)
    return (torch.arange(nb)[:, None] + nb * torch.arange(per)).reshape(-1)


def pack(codes: Tensor, bits: int, order: Order = "split") -> Tensor:
    """codes uint8 [..., n], each below 2**bits -> uint8 [..., packed_bytes(n)]."""
    parts, low = [], 0
    for w in planes(bits, order):
        part = codes if w == bits else (codes >> low) & (2**w - 1)
        parts.append(_pack_plane(part, w, order))
        low += w
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def unpack(packed: Tensor, n: int, bits: int, order: Order = "split") -> Tensor:
    """uint8 [..., packed_bytes(n)] -> codes uint8 [..., n]."""
    codes, low, start = None, 0, 0
    for w in planes(bits, order):
        size = -(-n * w // 8)
        part = _unpack_plane(packed[..., start : start + size], n, w, order)
        codes = part if codes is None else codes | (part << low)
        low, start = low + w, start + size
    return codes


def convert(packed: Tensor, n: int, bits: int, src: Order, dst: Order) -> Tensor:
    """The same codes in another order."""
    return packed if src == dst else pack(unpack(packed, n, bits, src), bits, dst)


def _pack_plane(codes: Tensor, w: int, order: Order) -> Tensor:
    n = codes.shape[-1]
    if w == 8:
        return codes
    if 8 % w:
        return _pack_stream(codes, w)
    per, nb = 8 // w, -(-n * w // 8)
    if nb * per != n:
        codes = pad(codes, (0, nb * per - n))
    if order == "split":
        runs = codes.reshape(*codes.shape[:-1], per, nb)
    else:
        runs = codes.reshape(*codes.shape[:-1], nb, per).transpose(-1, -2)
    out, *rest = runs.unbind(-2)
    for i, run in enumerate(rest, 1):
        out = out | (run << (i * w))
    return out


def _unpack_plane(packed: Tensor, n: int, w: int, order: Order) -> Tensor:
    if w == 8:
        return packed
    if 8 % w:
        return _unpack_stream(packed, n, w)
    runs = [(packed >> s) & (2**w - 1) if s else packed & (2**w - 1) for s in range(0, 8, w)]
    codes = torch.cat(runs, -1) if order == "split" else torch.stack(runs, -1).flatten(-2)
    return codes[..., :n]


def _pack_stream(codes: Tensor, w: int) -> Tensor:
    """Any width, bit by bit: 8 codes fill w bytes."""
    bits = ((codes[..., None] >> torch.arange(w, dtype=torch.uint8, device=codes.device)) & 1).flatten(-2)
    bits = pad(bits, (0, -bits.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (bits << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)


def _unpack_stream(packed: Tensor, n: int, w: int) -> Tensor:
    bits = ((packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1).flatten(-2)
    bits = bits[..., : n * w].unflatten(-1, (n, w))
    return (bits << torch.arange(w, dtype=torch.uint8, device=packed.device)).sum(-1, dtype=torch.uint8)
