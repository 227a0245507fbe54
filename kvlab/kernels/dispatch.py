"""Which implementation of an op runs on a device; result rows carry it.

Every op is a torch reference (the definition). A faster one stands beside it and is chosen here by `runtime.kernels`:
on a CPU the compiled kernels (kernels/cpu), elsewhere Triton's (kernels/triton), for everything that they hold.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import lru_cache
from importlib.metadata import version

from kvlab.errors import ConfigError
from kvlab.kernels.backend import Backend
from kvlab.kernels.cpu import isa, lib

OPS = ("attention", "encode", "decode", "select", "move")
ON_CPU, ON_GPU = ("attention", "encode"), ("attention", "encode", "move")  # what kernels do beside the reference
CHOICES = (*isa.CHOICES, "triton")  # of runtime.kernels

OLDEST = (3, 6)  # of triton

log = logging.getLogger(__name__)


def backend(device: str, kernels: str = "auto", arithmetic: str = "exact") -> Backend | None:
    """The kernels for a device such as "cpu" or "cuda:0"; None = torch. The CPU's are compiled on the first use ever.

    Raises ConfigError for kernels that cannot run there.
    """
    fast = arithmetic == "fast"
    if variant(device, kernels) == "triton":
        from kvlab.kernels.triton.layers import Kernels

        return Kernels(device, fast)
    if not _cpu(device) or kernels == "off":
        return None
    from kvlab.kernels.cpu.attend import Kernels

    loaded = lib.load(kernels)
    return None if loaded.library is None else Kernels(loaded.library, loaded.variant, fast)


def variant(device: str, kernels: str = "auto") -> str:
    """What `runtime.kernels` means on a device: triton, avx512, avx2, generic or torch."""
    if kernels == "triton" or (kernels == "auto" and not _cpu(device)):
        why = _no_triton(device)
        if why and kernels == "triton":
            raise ConfigError(f"runtime.kernels=triton: {why}. Ways out: runtime.kernels=auto or off (the torch path).")
        if why:
            _notice(why)
        return "torch" if why else "triton"
    if kernels == "off" or _cpu(device):
        return lib.load(kernels).variant
    raise ConfigError(f"runtime.kernels={kernels} is the CPU's, the model is on {device}: use auto, triton or off.")


def chosen(device: str, kernels: str, arithmetic: str = "exact") -> dict[str, str]:
    """{op: implementation}, and the arithmetic of decoding rows."""
    ran = variant(device, kernels)
    held = {"torch": (), "triton": ON_GPU}.get(ran, ON_CPU)
    told = {op: ran if op in held else "torch" for op in OPS}
    return told | {"arithmetic": "exact" if ran == "torch" else arithmetic}


def _cpu(device: str) -> bool:
    return str(device).startswith("cpu")


def _no_triton(device: str) -> str:
    """Why Triton's kernels cannot run on a device; "" when they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    if tuple(map(int, version("triton").split(".")[:2])) < OLDEST:
        return f"triton {version('triton')} is older than {'.'.join(map(str, OLDEST))}, which they are written for"
    if not _cpu(device):
        return ""
    from kvlab.kernels.triton.layers import interpreted

    return (
        "" if interpreted() else "its kernels run on a GPU (or, for tests, in triton's interpreter: TRITON_INTERPRET=1)"
    )


@lru_cache(maxsize=8)
def _notice(why: str) -> None:
    """Said once: nothing is silently slower."""
    log.warning("no Triton kernels, %s: the torch path runs instead, slower", why)
