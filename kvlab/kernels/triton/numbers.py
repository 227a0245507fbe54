"""Device functions that read pages: rows of tokens, numbers of packed rows, scales. Sides are described in sides.py."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def token_rows(table, start, end, stride, offset, B: tl.constexpr, BN: tl.constexpr):
    """(first, rows): tokens [start, start + BN) are rows first + rows of the flat [.., B] token view, first int64.

    A tile inside one block has one id and offsets that do not change in the loop; else ids are loaded per token. Those
    from `end` on get the null block: their address is valid, their bytes mean nothing. end None: all are below it.
    """
    j = tl.arange(0, BN)
    if BN <= B:
        block = tl.load(table + start // B).to(tl.int64)  # int64: rows pass 2**31 in a large pool
        return (block * stride + offset) * B + start % B, j
    else:
        t = start + j
        if end is None:
            block = tl.load(table + t // B).to(tl.int64)
        else:
            block = tl.load(table + t // B, mask=t < end, other=0).to(tl.int64)
        return tl.zeros([], tl.int64), (block * stride + offset) * B + t % B


@triton.jit
def channels(S: tl.constexpr, r: tl.constexpr):
    """(int32, bool) [parts * pad]: the channel at each column of packed row r, and whether it is one or padding."""
    c = tl.arange(0, tl.constexpr(S.parts * S.pad))
    return r * (S.width // S.rows) + c // S.pad * S.cols + c % S.pad, c % S.pad < S.cols


@triton.jit
def raw(side, S: tl.constexpr, r: tl.constexpr, first, rows, live):
    """(wide, narrow): what a packed row r of each token holds, [BN, pad]; live: bool [BN, 1] or None = read all.

    A narrower plane is read at the columns of the wide one: each byte `wide / narrow` times, from the same cache line.
    """
    c = tl.arange(0, tl.constexpr(S.pad))[None, :]
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
def narrow_shift(S: tl.constexpr, i: tl.constexpr):
    """int32 [1, pad]: where the bits of part i begin in the bytes of the narrow plane, at each column."""
    return ((i * (S.cols // S.narrow_cols) + tl.arange(0, tl.constexpr(S.pad)) // S.narrow_cols) * S.narrow)[None, :]


@triton.jit
def words(S: tl.constexpr, CT: tl.constexpr):
    """Registers that hold a table, for `numbers`; made once, outside of the loop."""
    out = ()
    if CT == tl.float16 and S.ptx is not None:
        for i in tl.static_range(tl.constexpr(len(S.ptx.words))):
            zero = tl.zeros([], tl.int32)
            out = out + (tl.inline_asm_elementwise(S.ptx.words[i], "=r,r", [zero], tl.int32, is_pure=True, pack=1),)
    return out


@triton.jit
def numbers(held, side, table, S: tl.constexpr, i: tl.constexpr, mid: tl.constexpr, CT: tl.constexpr):
    """Part i of a packed row as numbers of type CT, [BN, pad]. Times `factor` they are what the format means, up to
    mid, which float32 codes are counted from. held: of `raw`; table: of `words`."""
    wide, narrow = held
    if S.ptx is not None and (CT == tl.float16 or wide.dtype == tl.float32):
        # Not pure: what has effects stays where it is. Moved into the order in which products take operands it would
        # find bytes of several tokens there, and load them one by one; so float16 go through shared memory instead.
        if S.narrow:
            args = (wide, narrow, narrow_shift(S, i)) + table
        else:
            args = (wide,) + table
        to = tl.float32 if wide.dtype == tl.float32 else tl.float16
        return tl.inline_asm_elementwise(S.ptx.texts[i], S.ptx.constraints, args, to, is_pure=False, pack=4)
    if S.kind == "number":
        if CT == tl.float16 and wide.dtype == tl.int8:
            return half((wide ^ -128).to(tl.uint8, bitcast=True), 0, 255, 128)
        return wide.to(CT)
    if S.kind == "e4m3":  # sign, exponent and mantissa where float16 has them: 2**-8 of the value, never a NaN
        x = wide.to(tl.uint16)
        return (((x & 0x80) << 8) | ((x & 0x7F) << 7)).to(tl.float16, bitcast=True).to(CT)
    if S.kind == "e5m2":
        return (wide.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(CT)
    mask: tl.constexpr = (1 << S.wide) - 1
    if CT == tl.float16 and side.table is None and S.narrow == 0:
        return half(wide, i * S.wide, mask, 0)
    code = (wide >> (i * S.wide)) & mask if S.wide < 8 else wide
    if S.narrow:
        code = code | (((narrow >> narrow_shift(S, i).to(tl.uint8)) & ((1 << S.narrow) - 1)) << S.wide)
    if side.table is not None:
        return tl.load(side.table + code).to(CT)
    if CT == tl.float16:
        return half(code, 0, 255, 0)
    return code.to(CT) - mid


@triton.jit
def half(byte, at: tl.constexpr, mask: tl.constexpr, minus: tl.constexpr):
    """The bits `mask << at` of a byte as a float16, less `minus`, without a shift or a conversion: ptx._number."""
    bits = (byte.to(tl.uint16) & (mask << at)) | (0x6400 - at * 0x400)
    return bits.to(tl.float16, bitcast=True) - ((1024 >> at) + minus)


@triton.jit
def pair(a, b):
    """[BN, n], [BN, n] -> [BN, 2n], a first; no number moves to another lane."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def side_by_side(xs):
    """1, 2, 4 or 8 tiles as one."""
    if len(xs) == 1:
        return xs[0]
    elif len(xs) == 2:
        return pair(xs[0], xs[1])
    elif len(xs) == 4:
        return pair(pair(xs[0], xs[1]), pair(xs[2], xs[3]))
    else:
        return pair(pair(pair(xs[0], xs[1]), pair(xs[2], xs[3])), pair(pair(xs[4], xs[5]), pair(xs[6], xs[7])))


@triton.jit
def factor(S: tl.constexpr):
    return 256.0 if S.kind == "e4m3" else 1.0


@triton.jit
def of_token(ptr, S: tl.constexpr, g: tl.constexpr, first, rows, live):
    """float32 [BN]: what group g of each token has there, 0 where not live. live None: all are."""
    at = first * S.scales + (rows * S.scales + g)
    if live is None:
        return tl.load(ptr + at).to(tl.float32)
    else:
        return tl.load(ptr + at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def token_scales(side, S: tl.constexpr, first, rows, live):
    """(scale, zero) of each group of a token's channels, float32 [BN]; () unless they belong to tokens. Without zeros:
    the scale twice."""
    out = ()
    if S.axis == "token":
        for g in tl.static_range(tl.constexpr(S.scales)):
            s = of_token(side.scale, S, g, first, rows, live) * factor(S)
            if side.scale2 is not None:
                s *= of_token(side.scale2, S, g, first, rows, live)
            if side.zero is not None:
                out = out + ((s, of_token(side.zero, S, g, first, rows, live)),)
            else:
                out = out + ((s, s),)
    return out


@triton.jit
def of_channel(ptr, S: tl.constexpr, i: tl.constexpr, first, CT: tl.constexpr):
    """[1, pad]: what channels of unit i have there, in the group of tokens that holds the tile (axis "block")."""
    c = tl.arange(0, tl.constexpr(S.pad))
    at = first // S.group * S.scales + i * S.cols + c
    if S.pad == S.cols:
        return tl.load(ptr + at).to(CT)[None, :]
    else:
        return tl.load(ptr + at, mask=c < S.cols, other=0.0).to(CT)[None, :]


@triton.jit
def row(
    held, scales, side, table, S: tl.constexpr, r: tl.constexpr, first, SCALED: tl.constexpr, CT: tl.constexpr
):  # fmt: skip
    """Packed row r of each token as [BN, parts * pad] of type CT: what the format means, or (not SCALED) numbers that a
    token's scale multiplies, and S.mid is missing from if CT is float32."""
    out = ()
    for i in tl.static_range(tl.constexpr(S.parts)):
        x = numbers(held[r], side, table, S, i, S.mid if S.axis == "token" and not SCALED else 0, CT)
        if S.axis == "block":
            x *= (of_channel(side.scale, S, r * S.parts + i, first, tl.float32) * factor(S)).to(CT)
            if side.zero is not None:
                x += of_channel(side.zero, S, r * S.parts + i, first, CT)
        elif S.axis == "token" and SCALED:
            x *= scales[(r * (S.width // S.rows) + i * S.cols) // S.group][0].to(CT)[:, None]
            if side.zero is not None:
                x += scales[(r * (S.width // S.rows) + i * S.cols) // S.group][1].to(CT)[:, None]
        out = out + (x,)
    return side_by_side(out)
