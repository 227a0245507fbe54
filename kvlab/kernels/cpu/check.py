"""Open a kernel library and find what is wrong with it, before anything calls into it.

`python check.py LIBRARY SOURCE_HASH` does that in a process of its own: a library that crashes while it is loaded, or
that changes the floating-point mode, then harms nobody. So this file imports nothing outside the standard library.

Flush-to-zero   a library linked with -ffast-math sets it when it is loaded, for torch and numpy in the whole process:
                numbers below 1.2e-38 become 0 and results change in places that have nothing to do with us.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

ABI = 6  # of kv.cpp and step.cpp; a change of any struct or signature counts it up on both sides


class BadLibrary(Exception):
    """Says what is wrong with a file, in words that follow its name."""


def keeps_denormals() -> bool:
    """Does this thread compute with numbers below the smallest normal one, as torch and numpy expect?"""
    half = sys.float_info.min / 2
    return half > 0 and half * 2 == sys.float_info.min


def open_library(path: Path, source_hash: str | None = None) -> ctypes.CDLL:
    """Load it and ask it for its ABI and the hash of its sources (any when None). Raises BadLibrary."""
    kept = keeps_denormals()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BadLibrary(f"cannot be loaded ({error})") from error
    if kept and not keeps_denormals():
        raise BadLibrary("sets flush-to-zero for the whole process when it is loaded (was it linked with -ffast-math?)")
    try:
        library.kv_source_hash.restype, library.kv_abi.restype = ctypes.c_char_p, ctypes.c_int
        abi, found = library.kv_abi(), (library.kv_source_hash() or b"").decode("ascii", "replace")
    except AttributeError as error:
        raise BadLibrary(f"is not a kernel library ({error})") from error
    if abi != ABI:
        raise BadLibrary(f"has ABI {abi}, and this version of kvlab calls ABI {ABI}")
    if source_hash is not None and found != source_hash:
        raise BadLibrary(f"was compiled from other sources ({found[:12] or 'no hash'}, not {source_hash[:12]})")
    return library


if __name__ == "__main__":
    try:
        open_library(Path(sys.argv[1]), sys.argv[2])
    except BadLibrary as bad:
        sys.exit(str(bad))
