"""The instruction sets that the CPU kernels are compiled for, and which of them this CPU runs."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

AVX2 = ("-mavx2", "-mfma", "-mf16c")
# Best first -> compiler flags. What follows -m is the name in /proc/cpuinfo but for underscores. AVX-512 from Ice Lake
# and Zen 4 on: CPUs without its byte permutations run avx2.
VARIANTS: dict[str, tuple[str, ...]] = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vbmi", "-mavx512vnni", *AVX2),
    "avx2": AVX2,
    "generic": (),
}
CHOICES = ("auto", *VARIANTS, "off")  # of runtime.kernels


@lru_cache(maxsize=4)
def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What an x86 CPU can do, in Linux' words; empty on another system or architecture, which runs `generic`."""
    try:
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                return frozenset(value.split())
    except OSError:
        pass
    return frozenset()


def lacking(variant: str, flags: frozenset[str] | None = None) -> list[str]:
    """Instruction sets that a variant uses and the CPU has not. flags: `cpu_flags()` when None."""
    has = {flag.replace("_", "") for flag in (cpu_flags() if flags is None else flags)}
    return [need.removeprefix("-m") for need in VARIANTS[variant] if need.removeprefix("-m") not in has]


def runnable(flags: frozenset[str] | None = None) -> list[str]:
    """The variants that this CPU runs, the best first."""
    return [variant for variant in VARIANTS if not lacking(variant, flags)]
