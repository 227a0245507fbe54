"""What ships: each kernel for each codec, head_dim D, block B and form of launch, by name. No triton here: jobs.py.

A kernel joins by a line in KERNELS and a function of its name in jobs.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

TARGETS = ("sm_80", "sm_90", "gfx942")
CODECS = {
    "float16": ("full", {"dtype": "float16"}),
    "bfloat16": ("full", {"dtype": "bfloat16"}),
    "float32": ("full", {"dtype": "float32"}),
    "fp8": ("fp8", {}),
    "int8": ("int8", {}),
    "int4": ("int4", {}),
    "int4-D": ("int4", {"group": "D"}),
    "int3": ("int4", {"bits": 3}),
    "int2": ("int4", {"bits": 2}),
    "int2-D": ("int4", {"bits": 2, "group": "D"}),
    "kivi4": ("kivi", {"bits_k": 4, "bits_v": 4}),
    "kivi2": ("kivi", {}),
    "tq4": ("turboquant", {}),
    "tq3": ("turboquant", {"bits_k": 3, "bits_v": 3}),
    "tq2": ("turboquant", {"bits_k": 2, "bits_v": 2}),
    "tq1": ("turboquant", {"bits_k": 1, "bits_v": 1}),
    "tq-prod": ("turboquant", {"variant": "prod"}),
}
"""{name: (method, options)}; the default options are those of configs/method/*.yaml."""


@dataclass(frozen=True)
class Case:
    kernel: str
    codec: str
    form: str
    D: int
    B: int

    def __str__(self) -> str:
        return f"{self.kernel} {self.form} {self.codec} D{self.D} B{self.B}"


class Kernel(NamedTuple):
    """forms {form: its (D, B)}; codecs whose pages it takes."""

    forms: dict[str, list[tuple[int, int]]]
    codecs: tuple[str, ...] = tuple(CODECS)


ALL = [(D, B) for D in (64, 128) for B in (16, 32, 64)]
SOME = [(64, 32), (128, 16), (128, 64)]
FEW = [(64, 32), (128, 16)]
PAGED = tuple(c for c in CODECS if not c.startswith("kivi"))  # nothing spans tokens
WRITTEN = tuple(c for c in CODECS if c != "tq-prod")  # its keys are written by the torch path
KERNELS = {
    # decode: a row a sequence, in splits; short: not split; chunk: many rows; exact: float32 products
    "attend": Kernel({"decode": ALL, "short": [(128, 32)], "chunk": SOME, "exact": FEW, "exact-chunk": [(128, 32)]}),
    "mass": Kernel({"decode": FEW, "chunk": [(128, 32)]}),
    "append": Kernel({"tokens": FEW}, tuple(c for c in WRITTEN if c in PAGED)),
    "seal": Kernel({"blocks": [(64, 32), (128, 64)]}, WRITTEN),
    "move": Kernel({"rows": FEW, "blocks": [(128, 32)]}, ("float16", "int4", "tq3")),
}


def grid() -> Iterator[Case]:
    """Everything that ships."""
    for name, kernel in KERNELS.items():
        for form, shapes in kernel.forms.items():
            for codec, (D, B) in itertools.product(kernel.codecs, shapes):
                if codec in PAGED or B >= 32:  # the others have groups of 32 tokens
                    yield Case(name, codec, form, D, B)


def covering() -> list[tuple[Case, str]]:
    """Few (case, target) such that values of two of codec, form, D, B, target that occur together anywhere do so in one
    of them; but for codec and form, whose pairs alone would be most of the grid. Greedy, always the same."""
    left = list(itertools.product(grid(), TARGETS))
    pairs = {x: _pairs(*x) for x in left}
    open_, chosen = set().union(*pairs.values()), []
    while open_:
        chosen.append(max(left, key=lambda x: len(pairs[x] & open_)))  # the first of equals
        open_ -= pairs[chosen[-1]]
    return chosen


def _pairs(case: Case, target: str) -> set:
    values = {"codec": case.codec, "form": (case.kernel, case.form), "D": case.D, "B": case.B, "target": target}
    return {x for x in itertools.combinations(values.items(), 2) if {k for k, _ in x} != {"codec", "form"}}


KNOWN: dict[str, str] = {}
"""{pattern of "case target": why it breaks a law today}. A line that is not needed any more fails the test."""


def known(case: Case, target: str) -> str:
    return next((why for pattern, why in KNOWN.items() if re.fullmatch(pattern, f"{case} {target}")), "")
