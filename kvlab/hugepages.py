"""Large arrays in memory that a step walks through: on Linux they ask for pages of 2 MiB.

A step reads a model's weights and scattered blocks of a cache once each. On pages of 4 KiB it waits for address
translations: weights alone push the cache's out. It is a hint; where the system has no large pages to give, the arrays
lie on small ones.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

import torch
from torch import Tensor

LARGE = 2 << 20
ALIGNED = 64  # a cache line, and what kernels load at once


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """torch.empty that nothing has written to yet, on large pages if it fills one."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if out.device.type == "cpu" and out.nbytes >= LARGE and (advise := _madvise()) is not None:
        start = out.data_ptr() - out.data_ptr() % mmap.PAGESIZE
        advise(start, out.data_ptr() + out.nbytes - start, mmap.MADV_HUGEPAGE)
    return out


class Arena:
    """Many arrays in few large ones, which grow by `chunk` bytes. They live as long as one of them does."""

    def __init__(self, chunk: int = 64 << 20) -> None:
        self.chunk, self._rest = chunk, torch.empty(0, dtype=torch.uint8)

    def copy(self, x: Tensor) -> Tensor:
        """A contiguous copy of x in the arena."""
        size = -(-x.nbytes // ALIGNED) * ALIGNED
        if size > len(self._rest):
            self._rest = empty((max(size, self.chunk),), torch.uint8)
        out, self._rest = self._rest[: x.nbytes].view(x.dtype).view(x.shape), self._rest[size:]
        return out.copy_(x)


@cache
def _madvise():
    """The C library's madvise, None where there are no large pages to ask for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call
