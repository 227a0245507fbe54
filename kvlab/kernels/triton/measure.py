"""What an assembler made of a kernel: instructions of its main loop, loads, spills, from its text (`nvdisasm -c`).

Main loop: the innermost loop with the most matrix products. Every instruction from its label to the branch back counts,
both sides of the branches inside; prologue and epilogue of the pipeline lie outside. An assembler may have unrolled it,
so that a pass makes several turns of the loop in the PTX: their number is the ratio of products in both. A kernel
without such a loop is counted whole.

Lane-ops per element = instructions x 32 lanes x warps / turns / elements that a turn reads. Classes of instructions:

    mma      products                          memory   loads, stores, copies of global and shared memory
    unpack   bytes to operands: permutes, logic, shifts, conversions, arithmetic on 16-bit pairs, reads of shared memory
    float    32-bit floats, exp2, shuffles     control  barriers, waits, branches
    integer  everything else: addresses, comparisons, moves (and shifts that the assembler wrote as products)

A float16 kernel has some of `unpack` as well (rounding of weights, operands from shared memory): what a codec adds is
the difference of the two kernels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

CLASSES = {
    "mma": ("HMMA", "HGMMA", "IMMA", "IGMMA", "QGMMA", "DMMA"),
    "unpack": (
        "PRMT", "LOP3", "SHF", "SHL", "SHR", "SGXT", "BMSK", "I2F", "I2FP", "F2F", "F2FP", "F2I", "I2I", "I2IP",
        "HADD2", "HFMA2", "HMUL2", "HSET2", "HMNMX2", "LDS", "LDC",
    ),
    "memory": ("LDG", "LDGSTS", "LDSM", "STS", "STSM", "STG", "LDL", "STL", "LD", "ST", "ATOMG", "RED", "UTMALDG"),
    "float": ("FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSETP", "FSET", "FCHK", "MUFU", "SHFL", "FRND"),
    "control": (
        "BAR", "BRA", "BSSY", "BSYNC", "DEPBAR", "LDGDEPBAR", "ARRIVES", "SYNCS", "WARPSYNC", "WARPGROUP", "MEMBAR",
        "FENCE", "ERRBAR", "CCTL", "NOP", "EXIT", "CALL", "RET", "YIELD", "NANOSLEEP", "BREAK",
    ),
}  # fmt: skip
CLASS = {op: name for name, ops in CLASSES.items() for op in ops}
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_LABEL = re.compile(r"\s*(\$?[.\w$]+):")
_SASS = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_PTX = re.compile(r"\s+(?:@!?%p\d+\s+)?([a-z][\w.:]*)(.*)")


class Instruction(NamedTuple):
    op: str  # with its modifiers: LDG.E.128
    rest: str

    @property
    def base(self) -> str:
        return self.op.split(".")[0]

    @property
    def bytes(self) -> int:
        """What a lane loads or stores."""
        return next((_BYTES[m] for m in self.op.split(".")[1:] if m in _BYTES), 4)


def _parse(text: str, code: re.Pattern, jump: str) -> tuple[list[Instruction], list[list[Instruction]]]:
    """(all instructions, bodies between a label and a jump back to it)."""
    at, body, loops = {}, [], []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            at[label[1]] = len(body)
        elif m := code.match(line):
            body.append(Instruction(m[1], m[2]))
            if m[1].startswith(jump) and (to := re.search(r"\$?\.?L\w+", m[2])) and to[0] in at:
                loops.append(body[at[to[0]] :])
    return body, loops


def _main(loops: list[list[Instruction]], product: Callable[[Instruction], bool]) -> list[Instruction]:
    """Of loops with as many products the one that prefetches is the main one (others take what is left at its ends), or
    the shorter one, which is the inner one. Empty if no loop has any."""
    best = min(loops, key=lambda x: (-sum(map(product, x)), all(i.base != "LDGSTS" for i in x), len(x)), default=[])
    return best if any(map(product, best)) else []


def whole(sass: str) -> list[Instruction]:
    return _parse(sass, _SASS, "BRA")[0]


def main_loop(sass: str) -> list[Instruction]:
    body, loops = _parse(sass, _SASS, "BRA")
    return _main(loops, lambda i: i.base in CLASSES["mma"]) or body


def loop_counts(sass: str) -> dict[str, int]:
    """{opcode without modifiers: instructions in the main loop}, the most frequent first."""
    return dict(Counter(i.base for i in main_loop(sass)).most_common())


def classes(code: list[Instruction]) -> dict[str, int]:
    """{class: instructions}."""
    found = Counter(CLASS.get(i.base, "integer") for i in code)
    return {name: found[name] for name in (*CLASSES, "integer")}


def turns(sass: str, ptx: str) -> float:
    """Turns of the loop in the PTX that a pass of the main loop makes."""
    body, loops = _parse(ptx, _PTX, "bra")
    products = sum(map(_ptx_product, _main(loops, _ptx_product) or body))
    mine = classes(main_loop(sass))["mma"]
    return mine / products if mine and products else 1.0


def _ptx_product(i: Instruction) -> bool:
    return i.op.startswith(("mma.sync", "wgmma.mma"))


def load_widths(code: list[Instruction]) -> dict[int, int]:
    """{bytes of a lane: loads from global memory}, to registers or straight to shared memory."""
    return dict(sorted(Counter(i.bytes for i in code if i.base in ("LDG", "LDGSTS")).items()))


def spilled(code: list[Instruction], ops: tuple[str, ...] = ("STL",)) -> int:
    """Bytes that a lane stores to local memory, each store counted once."""
    return sum(i.bytes for i in code if i.base in ops)


def amd(text: str) -> dict[str, int]:
    """Registers of a lane (accumulators included), those spilled, local memory, products, from amdgcn."""

    def field(name: str) -> int:
        m = re.search(rf"\.{name}:\s+(\d+)", text)
        return int(m[1]) if m else 0

    names = {"regs": "vgpr_count", "spills": "vgpr_spill_count", "stack": "private_segment_fixed_size"}
    return {k: field(n) for k, n in names.items()} | {"mma": len(re.findall(r"^\s+v_s?mfma", text, re.M))}
