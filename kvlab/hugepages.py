"""Large arrays in memory that a step walks through: on Linux they ask for pages of 2 MiB.

A step reads a model's weights and scattered blocks of a cache once each. On pages of 4 KiB it waits for address
translations: weights alone push the cache's out. It is a hint; where the system has no large pages to give, the arrays
lie on small ones.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

LARGE = 2 << 20
ALIGNED = 64  # a cache line, and what kernels load at once


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """torch.empty, on large pages if it fills one. Those are fresh from the system: memory that the process had before
    would stay on the small pages that it has."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without large pages, or without so much memory: torch says that
        return torch.empty(shape, dtype=dtype, device=device)
    start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % LARGE
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start).view(dtype).view(shape)


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
