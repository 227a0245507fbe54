"""Device functions that read pages: rows of tokens, numbers of a unit, scales. Sides are described in sides.py."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def token_rows(table, start, end, stride, offset, B: tl.constexpr, BN: tl.constexpr):
    """(first, rows): tokens [start, start + BN) are rows first + rows of the flat [.., B] token view, first int64.

    A tile inside one block has one id and offsets that do not change in the loop; else ids are loaded per token. Those
    from `end` on get the null block: their address is valid, their bytes mean nothing.
    """
    j = tl.arange(0, BN)
    if BN <= B:
        block = tl.load(table + start // B).to(tl.int64)  # int64: rows pass 2**31 in a large pool
        return (block * stride + offset) * B + start % B, j
    else:
        t = start + j
        block = tl.load(table + t // B, mask=t < end, other=0).to(tl.int64)
        return tl.zeros([], tl.int64), (block * stride + offset) * B + t % B


@triton.jit
def channels(S: tl.constexpr, u: tl.constexpr):
    """int32 [pad]: the channel at each column of unit u; those from S.cols on are padding."""
    return (u // S.parts) * (S.width // S.rows) + (u % S.parts) * S.cols + tl.arange(0, S.pad)


@triton.jit
def group_of_unit(S: tl.constexpr, u: tl.constexpr):
    """Which of a token's scales unit u takes."""
    return ((u // S.parts) * (S.width // S.rows) + (u % S.parts) * S.cols) // S.group


@triton.jit
def raw(side, S: tl.constexpr, r: tl.constexpr, first, rows, live):
    """(wide, narrow): what a packed row r of each token holds, [BN, pad]; live: bool [BN, 1] or None = read all.

    A narrower plane is read at the columns of the wide one: each byte `wide / narrow` times, from the same cache line.
    """
    c = tl.arange(0, S.pad)[None, :]
    at = side.codes + first * (S.rows * S.row) + r * S.row
    ok = c < S.cols
    if live is not None:
        ok = ok & live
    if S.pad == S.cols and live is None:
        wide = tl.load(at + (rows[:, None] * (S.rows * S.row) + c))
    else:
        wide = tl.load(at + (rows[:, None] * (S.rows * S.row) + c), mask=ok, other=0)
    if S.narrow == 0:
        return wide, wide
    narrow = at + S.narrow_at + (rows[:, None] * (S.rows * S.row) + c % S.narrow_cols)
    return wide, tl.load(narrow, mask=c < S.cols, other=0)


@triton.jit
def numbers(planes, side, S: tl.constexpr, i: tl.constexpr, CT: tl.constexpr):
    """Part i of a packed row as numbers of type CT, [BN, pad]. Times `factor` they are what the format means, up to
    S.mid, which is subtracted from codes with a zero."""
    wide, narrow = planes
    if S.kind == "number":
        if CT == tl.float16 and wide.dtype == tl.int8:
            return half((wide ^ -128).to(tl.uint8, bitcast=True), 0, 255, 128)
        return wide.to(CT)
    if S.kind == "e4m3":  # sign, exponent and mantissa where float16 has them: 2**-8 of the value
        x = wide.to(tl.uint16)
        return (((x & 0x80) << 8) | ((x & 0x7F) << 7)).to(tl.float16, bitcast=True).to(CT)
    if S.kind == "e5m2":
        return (wide.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(CT)
    mask: tl.constexpr = (1 << S.wide) - 1
    if CT == tl.float16 and side.table is None and S.narrow == 0:
        return half(wide, i * S.wide, mask, S.mid)
    code = (wide >> (i * S.wide)) & mask if S.wide < 8 else wide
    if S.narrow:
        per: tl.constexpr = S.cols // S.narrow_cols  # bytes of the wide plane for one of the narrow one
        c = tl.arange(0, S.pad)[None, :]
        shift = ((i * per + c // S.narrow_cols) * S.narrow).to(tl.uint8)
        code = code | (((narrow >> shift) & ((1 << S.narrow) - 1)) << S.wide)
    if side.table is not None:
        return tl.load(side.table + code).to(CT)
    if CT == tl.float16:
        return half(code, 0, 255, S.mid)
    return code.to(CT) - S.mid


@triton.jit
def half(byte, at: tl.constexpr, mask: tl.constexpr, mid: tl.constexpr):
    """The bits `mask << at` of a byte as a float16 minus mid, without a shift or a conversion: under the exponent of
    2**(10 - at) bit number `at` of a float16 is worth 1."""
    bits = (byte.to(tl.uint16) & (mask << at)) | (0x6400 - at * 0x400)
    return bits.to(tl.float16, bitcast=True) - ((1024 >> at) + mid)


@triton.jit
def factor(S: tl.constexpr):
    return 256.0 if S.kind == "e4m3" else 1.0


@triton.jit
def token_scale(side, S: tl.constexpr, g: tl.constexpr, first, rows, live):
    """float32 [BN]: scale g of each token (axis "token"), 0 where not live."""
    at = first * S.scales + (rows * S.scales + g)
    x = tl.load(side.scale + at, mask=live, other=0.0).to(tl.float32)
    if side.scale2 is not None:
        x *= tl.load(side.scale2 + at, mask=live, other=0.0).to(tl.float32)
    return x


@triton.jit
def token_zero(side, S: tl.constexpr, g: tl.constexpr, scale, first, rows, live):
    """float32 [BN]: what is added to every channel of group g, codes being counted from their middle."""
    at = first * S.scales + (rows * S.scales + g)
    return tl.load(side.zero + at, mask=live, other=0.0).to(tl.float32) + S.mid * scale
