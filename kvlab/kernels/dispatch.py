"""Which implementation of an op runs on a device; result rows carry it.

Every op is a torch reference (the definition). A faster one stands beside it and is chosen here: on a CPU the compiled
kernels of `runtime.kernels`, for everything that they hold (kernels/cpu); else the reference.
"""

from __future__ import annotations

import ctypes

from kvlab.kernels.cpu import lib

OPS = ("attention", "encode", "decode", "select")
COMPILED = ("attention", "encode")  # what the CPU kernels do


def library(device: str, kernels: str) -> ctypes.CDLL | None:
    """The compiled kernels for a device such as "cpu" or "cuda:0", None = torch. The first use ever compiles them."""
    return lib.load(kernels).library if str(device).startswith("cpu") else None


def chosen(device: str, kernels: str, arithmetic: str = "exact") -> dict[str, str]:
    """{op: implementation}, and the arithmetic of decoding rows."""
    variant = lib.load(kernels).variant if str(device).startswith("cpu") else "torch"
    ran = {op: variant if op in COMPILED and variant != "torch" else "torch" for op in OPS}
    return ran | {"arithmetic": "exact" if variant == "torch" else arithmetic}
