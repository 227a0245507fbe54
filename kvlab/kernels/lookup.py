"""From packed codes (order `split`) to floats, into a buffer that is reused: what a decode step does all day.

One byte of the widest plane holds 8/w codes. Their floats stand side by side as ONE element of a table (float32,
complex64, complex128 = 1, 2, 4 floats), so a gather moves 2 or 4 values per index; the tables are 2 to 64 KiB hot. Bits
of the narrower planes (3, 5, 6, 7-bit codes) are spread above the byte by shifts and masks on whole words.

The floats come out in the order of the widest plane's bit stream, NOT in channel order: `order(n, bits)` says which
channel stands where. Attention does not mind as long as the query is permuted alike; undoing it here would cost a pass.

Rows with n % 8 != 0 take the plain path: unpack, then one gather per code, channel order.
`get(name, shape, dtype)` returns a scratch buffer (kvlab/cache/scratch.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from kvlab.kernels.packing import permutation, planes, unpack

Get = Callable[..., Tensor]
_WIDE = {1: torch.complex128, 2: torch.complex128, 4: torch.complex64, 8: torch.float32}  # by width of the first plane
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def order(D: int, bits: int, group: int = 0) -> Tensor:
    """int64 [D]: channel at each position of what `lookup` and `codes` return; D packed in rows of `group`."""
    n = group or D
    row = torch.arange(n) if n % 8 else permutation(n, planes(bits)[0])
    return (torch.arange(0, D, n)[:, None] + row).flatten()


def table(values: Tensor, n: int) -> Tensor:
    """values float32 [2**bits] -> the table `lookup` takes for rows of n codes."""
    bits = (len(values) - 1).bit_length()
    if n % 8 or bits == 8:
        return values.contiguous()
    w = planes(bits)[0]
    rest = bits - w
    if bits == 1:  # a byte holds 8: taken as two nibbles of four
        index = torch.arange(16)[:, None] >> torch.arange(4) & 1
    else:
        slots = w * torch.arange(8 // w)
        byte = torch.arange(256 << (8 - w + rest if rest else 0))[:, None]
        index = (byte >> slots & (2**w - 1)) | (byte >> (8 + slots) & (2**rest - 1)) << w
    return values[index].contiguous().view(_WIDE[w]).view(-1)


def lookup(packed: Tensor, bits: int, tab: Tensor, out: Tensor, get: Get) -> Tensor:
    """packed uint8 [..., packed_bytes(n)] -> out float32 [..., n] contiguous, filled and returned."""
    n, packed = out.shape[-1], packed.contiguous()
    if n % 8:
        return out.copy_(tab[unpack(packed, n, bits).int()])
    w, *rest = planes(bits)
    if bits == 1:
        index = get("lookup.index", (packed.numel() * 2,), torch.int32).copy_(_nibbles(packed, get).view(-1))
    elif not rest:
        index = get("lookup.index", (packed.numel(),), torch.int32).copy_(packed.view(-1))
    else:
        index = _with_rest(packed, n, w, rest, get)
    torch.index_select(tab, 0, index, out=out.view(tab.dtype).view(-1))
    return out


def codes(packed: Tensor, bits: int, out: Tensor, get: Get) -> Tensor:
    """Like `lookup` with the table 0, 1, 2, ...: the codes themselves as floats, for formats with a step."""
    if bits == 8:
        return out.copy_(packed)
    if bits == 4 and out.shape[-1] % 8 == 0:  # vectorised arithmetic beats a gather
        return out.copy_(_nibbles(packed.contiguous(), get))
    return lookup(packed, bits, _counting(bits, out.shape[-1], out.device), out, get)


@lru_cache(maxsize=64)
def _counting(bits: int, n: int, device: torch.device) -> Tensor:
    return table(torch.arange(2**bits, dtype=torch.float32), n).to(device)


def _nibbles(packed: Tensor, get: Get) -> Tensor:
    """uint8 [..., m] -> uint8 [..., 2m]: low, high, low, high."""
    wide = get("lookup.wide", tuple(packed.shape), torch.int16).copy_(packed)
    high = torch.mul(wide, 16, out=get("lookup.high", tuple(packed.shape), torch.int16))
    return wide.bitwise_or_(high).bitwise_and_(0x0F0F).view(torch.uint8)


def _with_rest(packed: Tensor, n: int, w: int, rest: list[int], get: Get) -> Tensor:
    """int32 [...]: bytes of the widest plane (w bits), and above each the other planes' bits of the same codes.

    Code e = i*nb + j is slot i of byte j of the widest plane. In a plane of width v with m = n*v/8 bytes it is byte
    j mod m, bits from w*i + v*(j div m): so (plane >> v*r) & mask, r = j div m, lines up with byte j's slots.
    """
    lead, nb = tuple(packed.shape[:-1]), n * w // 8
    index = get("lookup.index", (*lead, nb), torch.int32).copy_(packed[..., :nb])
    upper = get("lookup.upper", (*lead, nb), torch.uint8)
    start, unit = nb, 256
    for v in rest:
        m = n * v // 8
        odd = m | start | packed.shape[-1] | packed.storage_offset()
        size, word = next((s, t) for s, t in _WORDS if odd % s == 0)
        plane = packed[..., start : start + m].view(word)
        runs = upper.view(word).view(*lead, w // v, m // size).unbind(-2)
        runs[0].copy_(plane)
        for r, run in enumerate(runs[1:], 1):
            torch.bitwise_right_shift(plane, v * r, out=run)  # bits that come over from a neighbour byte are masked
        mask = sum((2**v - 1) << (w * i) for i in range(8 // w))
        index.add_(upper.bitwise_and_(mask), alpha=unit)
        start, unit = start + m, unit << v
    return index.view(-1)
