"""Runs the inline PTX of kernels/triton/ptx.py without a GPU: 32-bit integers and pairs of float16, as numpy arrays.

Semantics: PTX ISA 8.8, chapter 9.7. An instruction, an operand or a modifier that is not here is refused.
"""

from __future__ import annotations

import re

import numpy as np

LANEMASK_LT = np.uint32(2**31 - 1)  # of lane 31, the lane with the most bits


def prmt(a, b, c):
    """Four bytes of {b, a}, by the low nibbles of c; bit 3 of a nibble copies the byte's sign over it."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for i in range(4):
        pick = c >> np.uint32(4 * i)
        byte = (both >> (8 * (pick & 7)).astype(np.uint64)).astype(np.uint32) & 255
        byte = np.where(pick & 8, (byte >> 7) * 255, byte).astype(np.uint32)
        out |= byte << np.uint32(8 * i)
    return out


def shift(left: bool):
    def run(a, b):
        n = np.minimum(b, 31)
        return np.where(b > 31, 0, a << n if left else a >> n).astype(np.uint32)

    return run


def halves(f):
    """f of both float16 of a register."""

    def run(*xs):
        pairs = [np.ascontiguousarray(x)[..., None].view(np.float16) for x in np.broadcast_arrays(*xs)]
        return f(*pairs).astype(np.float16).view(np.uint32)[..., 0]

    return run


OPS = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "not.b32": lambda a: ~a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": shift(True),
    "shr.b32": shift(False),
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "prmt.b32": prmt,
    "sub.rn.f16x2": halves(lambda a, b: a - b),
}
_TEXT = re.compile(r"\{ \.reg \.b32 ([a-z](?:, [a-z])*); (.*)\}")
_LINE = re.compile(r"(\S+) (\$?\w+)((?:, [\w$%]+)+)")


def run(text: str, constraints: str, *operands: np.ndarray) -> list[np.ndarray]:
    """Outputs of a text whose inputs are registers uint32, in the order of its constraints."""
    wants = constraints.split(",")
    outputs = [w for w in wants if w.startswith("=")]
    assert set(wants) <= {"=r", "=&r", "r"} and len(operands) == len(wants) - len(outputs), "operands"
    held = {f"${len(outputs) + i}": np.asarray(x, np.uint32) for i, x in enumerate(operands)}
    names, body = _TEXT.fullmatch(text).groups()
    free = {*names.split(", "), *(f"${i}" for i in range(len(outputs)))}
    early = {f"${i}" for i, w in enumerate(outputs) if w == "=r"}  # may be the register of an input
    lines = [x.strip() for x in body.split(";") if x.strip()]
    for at, line in enumerate(lines):
        op, to, rest = _LINE.fullmatch(line).groups()
        assert to in free, f"{line}: {to} is no register of the text"
        assert to not in early or not any("$" in x.split(",", 1)[1] for x in lines[at + 1 :]), f"{line}: needs =&r"
        held[to] = OPS[op](*(_value(x, held) for x in rest[2:].split(", ")))
    return [held[f"${i}"] for i in range(len(outputs))]


def _value(name: str, held: dict[str, np.ndarray]) -> np.ndarray:
    if name[0].isdigit():
        return np.uint32(int(name, 0))
    return LANEMASK_LT if name == "%lanemask_lt" else held[name]
