"""Four bytes of a page to four float16, as text for NVIDIA GPUs (tl.inline_asm_elementwise, pack=4).

A compiler widens each byte by itself; here four share most instructions. PRMT picks any four of the eight bytes of two
registers, by the nibbles of a third (of which bit 3 must be 0); an f16x2 instruction works on two float16. In a text:

    $0, $1   elements 0, 1 and 2, 3        $2  the bytes        $3, $4  those of a second plane, how far to shift them
    $A ..    Ptx.words

An element depends on its own byte alone, so a text is right for any layout of bytes over lanes.

    kind                                   instructions per element
    codes, int8                            1.25
    e4m3                                   2
    table of 2 or 4 / 8 / 16 numbers       1.5 / 2.25 / 2.25 (16: of both nibbles)
    a second plane                         +1.25
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

import torch
from torch import Tensor


class Ptx(NamedTuple):
    """texts: of each part of a packed row. constraints: of their operands. words: text that makes one register each."""

    texts: tuple[str, ...]
    constraints: str
    words: tuple[str, ...] = ()


def ptx(kind: str, wide: int, narrow: int, table: Tensor | None) -> Ptx | None:
    """None: there is no text, plain code does it. Symbols as in sides.Spec; kind also "int8"."""
    if kind == "int8":
        return _made([_number(0, 128, "xor.b32 a, $2, 0x80808080")])
    if kind == "e4m3":
        return _made([_e4m3()])
    if kind == "float32":  # nothing to do, but in numbers.py
        return Ptx(("".join(f"mov.b32 ${i}, ${4 + i}; " for i in range(4)),), "=r,=r,=r,=r,r,r,r,r")
    if kind != "codes":
        return None
    if table is None:
        return _made([_number(i, 0, *_codes(i, wide, narrow)) for i in range(0, 8, wide)], narrow)
    halves = [x & 0xFFFF for x in table.half().view(torch.int16).tolist()]
    if len(halves) == 16:
        if not torch.equal(table.half(), -table.half().flip(0)):
            return None
        return _made([_sixteen(i) for i in (0, 1)], 0, [*_bytes_of(halves[8:]), 0x8000])
    look = _four if len(halves) <= 4 else _eight
    return _made([(*_codes(i, wide, narrow, True), *look) for i in range(0, 8, wide)], narrow, _bytes_of(halves))


def _made(texts: list[tuple[str, ...]], narrow: int = 0, words: list[int] = []) -> Ptx:  # noqa: B006
    """What is said once for all elements takes four operands of a text, all the same."""
    first = 8 if narrow else 3
    at = {w: f"${first + 4 * i}" for i, w in enumerate("ABCDE")}
    done = (re.sub(r"\$([A-E])", lambda m: at[m[1]], "".join(f"{line}; " for line in t)) for t in texts)
    # The assembler copies a constant that it knows, from a uniform register, for every use: a fifth of a table look-up.
    # Bit 31 of this mask is 0 in every lane.
    hidden = (f"mov.u32 a, %lanemask_lt; and.b32 a, a, 0x80000000; or.b32 $0, a, 0x{x:08x}; " for x in words)
    return Ptx(
        tuple(f"{{ .reg .b32 a, b, c, d; {t}}}" for t in done),
        "=&r,=&r,r" + ",r,r,r,r,r" * bool(narrow) + ",r,r,r,r" * len(words),
        tuple(f"{{ .reg .b32 a; {t}}}" for t in hidden),
    )


def _codes(at: int, wide: int, narrow: int, alone: bool = False) -> tuple[str, ...]:
    """a <- codes in its bytes; without a second plane they stay at the bits `at` unless `alone`."""
    if not narrow and not alone:
        return (f"and.b32 a, $2, {_four_times((2**wide - 1) << at)}",)
    lines = (f"shr.b32 a, $2, {at}", f"and.b32 a, a, {_four_times(2**wide - 1)}")
    if not narrow:
        return lines
    high = (
        "shr.b32 b, $3, $4",
        f"and.b32 b, b, {_four_times(2**narrow - 1)}",
        f"shl.b32 b, b, {wide}",
        "or.b32 a, a, b",
    )
    return (*lines, *high)


def _number(at: int, minus: int, *lines: str) -> tuple[str, ...]:
    """The bytes of a, whose bits begin at `at`, as numbers. Under the exponent of 2**(10 - at) bit number `at` of a
    float16 is worth 1: that exponent goes above each byte, and what it adds is taken off again, exactly."""
    at = 0 if len(lines) > 1 else at  # codes of two planes were shifted down
    exponent, bits = _four_times(0x64 - 4 * at), struct.unpack("<H", struct.pack("<e", (1024 >> at) + minus))[0]
    return (
        *lines,
        f"prmt.b32 b, a, {exponent}, 0x4140",
        f"prmt.b32 c, a, {exponent}, 0x4342",
        f"mov.b32 d, 0x{bits * 0x00010001:08x}",
        "sub.rn.f16x2 $0, b, d",
        "sub.rn.f16x2 $1, c, d",
    )


def _e4m3() -> tuple[str, ...]:
    """2**-8 of the value: sign, exponent and mantissa where float16 has them."""
    out: list[str] = []
    for n, pick in ((0, "0x1404"), (1, "0x3424")):
        out += (f"prmt.b32 a, $2, 0, {pick}", "shr.b32 b, a, 1", "and.b32 b, b, 0x3f803f80")
        out += ("and.b32 a, a, 0x80008000", f"or.b32 ${n}, a, b")
    return tuple(out)


# Entries of the codes in the bytes of a. Low bytes of the table are in $A, high ones in $B: nibbles c, c + 4 pick both
# bytes of entry c, and 17 c + 64 is such a pair.
_four = (
    "mad.lo.u32 a, a, 17, 0x40404040",
    "prmt.b32 $0, $A, $B, a",
    "shr.b32 a, a, 16",
    "prmt.b32 $1, $A, $B, a",
)
# Low bytes in $A, $B, high ones in $C, $D: four codes become nibbles, which pick four low bytes, then the high ones.
_eight = (
    "shr.b32 b, a, 4",
    "or.b32 a, a, b",
    "prmt.b32 a, a, 0, 0x4420",
    "prmt.b32 b, $A, $B, a",
    "prmt.b32 c, $C, $D, a",
    "prmt.b32 $0, b, c, 0x5140",
    "prmt.b32 $1, b, c, 0x7362",
)


def _sixteen(part: int) -> tuple[str, ...]:
    """Entries of the low (part 0) or high nibbles of $2. The lower half of the table is the upper one negated, in
    reverse; of that half $A, $B hold the low bytes, $C, $D the high ones, $E the sign, 0x80 as byte 1 of zeros.

    All eight nibbles at once: a = 1 where a code is below 8, whose entry is number 7 - code of the upper half, negated;
    b = that number. It picks four low bytes, then four high ones; nibbles of a pick their signs.
    """
    out = ["shr.b32 a, $2, 3", "not.b32 a, a", "and.b32 a, a, 0x11111111"]
    out += ["mul.lo.u32 b, a, 7", "xor.b32 b, b, $2", "and.b32 b, b, 0x77777777"]
    for n in (0, 1):
        out += ["shr.b32 a, a, 16", "shr.b32 b, b, 16"] * n
        out += ["prmt.b32 c, $C, $D, b", "prmt.b32 d, $E, 0, a", "or.b32 d, d, c", "prmt.b32 c, $A, $B, b"]
        out += [f"prmt.b32 ${n}, c, d, {('0x6240', '0x7351')[part]}"]
    return tuple(out)


def _bytes_of(halves: list[int]) -> list[int]:
    """Low bytes of up to eight float16, four to a word, then the high ones."""
    halves = halves + [0] * (-len(halves) % 4)
    packed = [bytes(x >> s & 255 for x in halves) for s in (0, 8)]
    return [w for b in packed for (w,) in struct.iter_unpack("<I", b)]


def _four_times(byte: int) -> str:
    return f"0x{(byte & 255) * 0x01010101:08x}"
