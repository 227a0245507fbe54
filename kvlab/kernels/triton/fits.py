"""Numbers, scales and planes of a tile of tokens, for each `Side.fit`.

Scales are found and rounded to their stored type FIRST, codes are chosen with the stored number: `Codec.encode` in
Triton, float32 operation by operation (kernels/affine.py, fp8.py), so the same bytes, whatever else is written along.
Divisions are IEEE, halves round to even, and no product meets a sum that it could be fused with. Along Format.turn a
coordinate is a sum in another order than a BLAS takes: a code may move to its neighbour where it lies within float32
rounding of an edge.

A packed row of a tile is PARTS: runs of `cols` channels whose codes have the same bits in the bytes of the narrowest
plane (order split). A byte of any plane is a sum over parts, each shifted, so all planes hold the same codes: there are
no others.
"""

from __future__ import annotations

import triton
import triton.language as tl

INF: tl.constexpr = tl.constexpr(float("inf"))
ROUND: tl.constexpr = tl.constexpr(1.5 * 2**23)  # x + ROUND: x to the nearest integer, ties to even, in the low bits


@triton.jit
def columns(E: tl.constexpr):
    """(channel of a packed row at each column of a tile, int32 [tile], whether there is one)."""
    j = tl.arange(0, tl.constexpr(E.tile))
    c = j % (E.tile // E.parts)
    return j // (E.tile // E.parts) * E.cols + c, c < E.cols


@triton.jit
def load(x, live, E: tl.constexpr, r):
    """[BT, tile]: packed row r of tokens, 0 where there is none. x [BT]: pointers to first channels."""
    c, real = columns(E)
    return tl.load(x[:, None] + (r * (E.parts * E.cols) + c)[None, :], mask=live[:, None] & real[None, :], other=0.0)


@triton.jit
def floats(x, live, E: tl.constexpr, r):
    """`load` as float32; what is not finite becomes inf, which neither a step nor a zero hides."""
    y = load(x, live, E, r).to(tl.float32)
    return tl.where(tl.abs(y) < INF, y, INF)


@triton.jit
def narrow(x, to):
    """(x rounded to the type that `to` points at, that as float32). bfloat16 by hand: the interpreter cuts it off."""
    if to.dtype.element_ty == tl.bfloat16:
        b = x.to(tl.uint32, bitcast=True)
        b = tl.where(x == x, b + 0x7FFF + ((b >> 16) & 1), 0x7FC00000)
        return (b >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), (b & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        y = x.to(to.dtype.element_ty)
        return y, y.to(tl.float32)


@triton.jit
def put_meta(to, at, x, live):
    """Writes x, rounded; returns what was written."""
    y, stored = narrow(x, to)
    tl.store(to + at, y, mask=live)
    return stored


@triton.jit
def quotient(x, step, lo: tl.constexpr, hi: tl.constexpr):
    """x / step in [lo, hi]; 0 where the step is 0, the code of a constant group."""
    q = tl.div_rn(x, tl.where(step == 0, INF, step))
    return tl.minimum(tl.maximum(q, lo), hi)


@triton.jit
def rounded(q):
    """int32 whose low 8 bits are q to the nearest integer."""
    return (q + ROUND).to(tl.int32, bitcast=True)


@triton.jit
def fp8(q, MAN: tl.constexpr, BIAS: tl.constexpr):
    """uint8 nearest to q, ties to even, |q| <= the type's maximum. By integers: the interpreter's cast is wrong."""
    b = q.to(tl.uint32, bitcast=True)
    size = b & 0x7FFFFFFF
    normal = ((size + ((1 << (22 - MAN)) - 1) + ((size >> (23 - MAN)) & 1)) >> (23 - MAN)) - ((127 - BIAS) << MAN)
    small = (tl.abs(q) * 2.0 ** (BIAS + MAN - 1) + ROUND).to(tl.uint32, bitcast=True) & 0xFF
    return (((b >> 24) & 0x80) | tl.where(size < ((128 - BIAS) << 23), small, normal)).to(tl.uint8)


@triton.jit
def put_row(y, side, E: tl.constexpr, rows, live, r):
    """Stores numbers [BT, tile] as packed row r of token rows int64 [BT]."""
    c, real = columns(E)
    to = side.codes + (rows * (E.rows * E.row) + r * E.row)
    tl.store(to[:, None] + c[None, :], y, mask=live[:, None] & real[None, :])


@triton.jit
def put_planes(codes, side, E: tl.constexpr, rows, live, r):
    """codes int32 [BT, tile], of which the low `bits` bits count."""
    for e in tl.static_range(4):
        if E.bits & (8 >> e):
            put_plane(codes, side, E, rows, live, r, 8 >> e)


@triton.jit
def put_plane(codes, side, E: tl.constexpr, rows, live, r, w: tl.constexpr):
    """The plane of w bits, bits [low, low + w) of every code. Its bytes are those of `each` parts side by side."""
    low: tl.constexpr = E.bits // (2 * w) * (2 * w)  # bits in wider planes, which come first
    codes = tl.reshape(codes, [codes.shape[0], 8 // w, E.tile * w // 8])
    shift = w * tl.arange(0, 8 // w)
    byte = tl.sum(((codes >> low) & ((1 << w) - 1)) << shift[None, :, None], 1)
    j = tl.arange(0, tl.constexpr(E.tile * w // 8))
    c = j % (E.tile // E.parts)
    at = E.parts * E.cols * low // 8 + j // (E.tile // E.parts) * E.cols + c
    to = side.codes + (rows * (E.rows * E.row) + r * E.row)
    tl.store(to[:, None] + at[None, :], byte.to(tl.uint8), mask=live[:, None] & (c < E.cols)[None, :])


# -- fits: bool [BT], whether a token's numbers and scales are finite in their types -------------------------------
@triton.jit
def put_plain(side, E: tl.constexpr, x, rows, live, r):
    """Numbers as they are, in the page's type. One that float16 cannot hold is not fine."""
    y = load(x, live, E, r)
    fine = live | True
    if x.dtype.scalar != side.codes.dtype:
        y, stored = narrow(y.to(tl.float32), side.codes)
        if side.codes.dtype.element_ty == tl.float16:
            fine = tl.max(tl.where(tl.abs(stored) < INF, 0, 1), 1) == 0
    put_row(y, side, E, rows, live, r)
    return fine


@triton.jit
def put_absmax(side, E: tl.constexpr, x, rows, live, r):
    """int8 and 8-bit floats; a packed row is a group."""
    top: tl.constexpr = 127.0 if E.kind == "int8" else 448.0 if E.kind == "e4m3" else 57344.0
    y = floats(x, live, E, r)
    step = put_meta(side.scale, rows * E.rows + r, tl.div_rn(tl.max(tl.abs(y), 1), top), live)
    q = quotient(y, step[:, None], -top, top)
    if E.kind == "int8":
        put_row(rounded(q).to(tl.int8), side, E, rows, live, r)
    else:
        put_row(fp8(q, 3, 7) if E.kind == "e4m3" else fp8(q, 2, 15), side, E, rows, live, r)
    return tl.abs(step) < INF


@triton.jit
def put_minmax(side, E: tl.constexpr, x, rows, live, r):
    """Codes with a step and a zero for each group, some neighbouring parts, of a packed row."""
    top: tl.constexpr = 2.0**E.bits - 1
    y = floats(x, live, E, r)
    y = tl.reshape(y, [y.shape[0], E.groups, E.tile // E.groups])
    real = tl.reshape(columns(E)[1], [1, E.groups, E.tile // E.groups])
    lo, hi = tl.min(tl.where(real, y, INF), 2), tl.max(tl.where(real, y, -INF), 2)
    at = (rows * (E.rows * E.groups) + r * E.groups)[:, None] + tl.arange(0, tl.constexpr(E.groups))[None, :]
    step = put_meta(side.scale, at, tl.div_rn(hi - lo, top), live[:, None])
    zero = put_meta(side.zero, at, lo, live[:, None])
    codes = rounded(quotient(y - zero[:, :, None], step[:, :, None], 0.0, top))
    put_planes(tl.reshape(codes, [y.shape[0], E.tile]), side, E, rows, live, r)
    return tl.max(tl.where((tl.abs(step) < INF) & (tl.abs(zero) < INF), 0, 1), 1) == 0


@triton.jit
def cell(z, edges, bits: tl.constexpr):
    """int32: how many of the 2**bits - 1 edges are not above z."""
    c = tl.zeros_like(z).to(tl.int32)
    for i in tl.static_range(bits - 1, -1, -1):
        c += tl.where(z >= tl.load(edges + c + ((1 << i) - 1)), 1 << i, 0)
    return c


@triton.jit
def turned(x, per, live, turn, E: tl.constexpr, BK: tl.constexpr):
    """float32 [BT, tile]: (x * per) @ turn, in the columns of a tile. turn: float32 [width, width]."""
    c, real = columns(E)
    z = tl.zeros([x.shape[0], tl.constexpr(E.tile)], tl.float32)
    for start in range(0, E.width, BK):
        d = start + tl.arange(0, BK)
        y = tl.load(x[:, None] + d[None, :], mask=live[:, None] & (d < E.width)[None, :], other=0.0).to(tl.float32)
        at = turn + (d * E.width)[:, None] + c[None, :]
        m = tl.load(at, mask=(d < E.width)[:, None] & real[None, :], other=0.0)
        z = tl.dot(y * per[:, None], m, z, input_precision="ieee")
    return z


@triton.jit
def put_table(side, E: tl.constexpr, x, rows, live, turn, BK: tl.constexpr):
    """n = |x|, z = (x / n) turn, each coordinate's cell, and the number that `fit` says (methods/turboquant.py)."""
    y = load(x, live, E, 0).to(tl.float32)
    n = tl.sqrt_rn(tl.sum(y * y, 1))
    nothing = n < 1e-30
    z = turned(x, tl.div_rn(1.0, tl.where(nothing, 1.0, n)), live, turn, E, BK)
    codes = cell(z, side.edges, E.bits)
    c = tl.where(columns(E)[1][None, :], tl.load(side.table + codes), 0.0)
    if E.fit == "norm":
        keep = tl.div_rn(n, tl.sqrt_rn(tl.sum(c * c, 1)))
    elif E.fit == "eden_mse":
        keep = tl.div_rn(n * tl.sum(z * c, 1), tl.sum(c * c, 1))
    elif E.fit == "eden_unbiased":
        keep = tl.div_rn(n, tl.where(nothing, 1.0, tl.sum(z * c, 1)))
    else:
        keep = n * E.factor
    stored = put_meta(side.scale, rows, tl.where(nothing, 0.0, keep), live)
    put_planes(tl.where(nothing[:, None], 0, codes), side, E, rows, live, 0)
    return tl.abs(stored) < INF


@triton.jit
def put_group(side, E: tl.constexpr, x, rows, at, r, BG: tl.constexpr):
    """Codes with a step and a zero per channel for `group` tokens, whose first is at pointer x and goes to token row
    `rows`; at: that of a channel's step. BG tokens at a time, read twice: a group may be longer than registers hold."""
    top: tl.constexpr = 2.0**E.bits - 1
    lo = tl.zeros([tl.constexpr(E.tile)], tl.float32) + INF
    hi = -lo
    for start in range(0, E.group, BG):
        t = start + tl.arange(0, BG)
        y = floats(x + t * E.width, t < E.group, E, r)
        lo = tl.minimum(lo, tl.min(tl.where((t < E.group)[:, None], y, INF), 0))
        hi = tl.maximum(hi, tl.max(tl.where((t < E.group)[:, None], y, -INF), 0))
    c, real = columns(E)
    step = put_meta(side.scale, at + r * (E.parts * E.cols) + c, tl.div_rn(hi - lo, top), real)
    zero = put_meta(side.zero, at + r * (E.parts * E.cols) + c, lo, real)
    for start in range(0, E.group, BG):
        t = start + tl.arange(0, BG)
        y = floats(x + t * E.width, t < E.group, E, r)
        codes = rounded(quotient(y - zero[None, :], step[None, :], 0.0, top))
        put_planes(codes, side, E, rows + t, t < E.group, r)
    return (tl.abs(step) < INF) & (tl.abs(zero) < INF) | ~real
