"""The CPU kernels of this process: which variant, where its library comes from, or why torch does the work instead.

load("auto")      the best variant that this CPU runs        load("off")      the torch path
load("avx2")      that one; a ConfigError where the CPU lacks it, so that no result row claims what did not run

A library beside the sources (the wheel's own) comes first, if it was made from these sources; then the cache, then the
compiler (build.py). What fails there ends in the torch path, with one notice: a run never fails for want of a compiler.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch  # before any library of ours: both then share one libgomp, and so one pool of threads

from kvlab.errors import ConfigError
from kvlab.kernels.cpu import build, check
from kvlab.kernels.cpu.isa import CHOICES, lacking, runnable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """variant: what runs: avx512, avx2, generic or torch. library is None for torch, and reason says why."""

    variant: str
    library: ctypes.CDLL | None = None
    path: Path | None = None
    reason: str = ""


def load(
    variant: str = "auto",
    *,
    source: Path | None = None,
    root: Path | None = None,
    timeout: float = build.TIMEOUT_S,
) -> Loaded:
    """The kernels that `runtime.kernels=variant` means, loaded once per process; compiles on the first use ever.

    source: folder with kv.cpp and prebuilt libraries, the package's own when None. root: cache folder. timeout: seconds
    for the compiler. Raises ConfigError for a name that does not exist, or a variant that this CPU cannot run.
    """
    if variant not in CHOICES:
        raise ConfigError(f"runtime.kernels={variant!r} is not one of {', '.join(CHOICES)}")
    if variant == "off":
        return Loaded("torch", reason="runtime.kernels=off")
    if variant == "auto":
        variant = runnable()[0]
    elif missing := lacking(variant):
        raise ConfigError(
            f"runtime.kernels={variant}: this CPU has no {', '.join(missing)}, so it cannot run them. Ways out: "
            f"runtime.kernels=auto (here: {runnable()[0]}), one of {', '.join(runnable())}, or off (the torch path)."
        )
    return _load(variant, build.source_folder() if source is None else source, root, timeout)


@lru_cache(maxsize=16)
def _load(variant: str, source: Path, root: Path | None, timeout: float) -> Loaded:
    prebuilt = source / f"_kv_{variant}.so"
    if prebuilt.is_file():
        try:
            return Loaded(variant, open_library(prebuilt, build.source_hash(source)), prebuilt)
        except (check.BadLibrary, build.CannotBuild, OSError) as error:
            log.info("%s is not used: it %s", prebuilt, error)
    built = build.compile(variant, source=source, root=root, timeout=timeout, say=_say)
    reason = built.reason
    if built.path is not None:
        try:
            return Loaded(variant, open_library(built.path, build.source_hash(source)), built.path)
        except (check.BadLibrary, build.CannotBuild, OSError) as error:
            reason = f"{built.path} {error}; delete it to have it made again"
    _say(
        f"note: no CPU kernels: {reason}. The torch path runs instead: slower. Ways out: install a C++ compiler (g++), "
        "name one with CXX=COMMAND, or runtime.kernels=off to be silent."
    )
    return Loaded("torch", reason=reason)


def open_library(path: Path, source_hash: str | None = None) -> ctypes.CDLL:
    """`check.open_library` in this process. Whatever the library does, denormal numbers are kept as before."""
    kept = check.keeps_denormals()
    try:
        return check.open_library(path, source_hash)
    finally:
        if kept and not check.keeps_denormals():
            torch.set_flush_denormal(False)


def _say(text: str) -> None:
    """One line on stderr, and in the log of a run."""
    from rich.console import Console

    log.info(text)
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
