"""Reused buffers for the inside of a step."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Named buffers that live as long as the runtime: fresh ones cost 4x in page faults.

    `get(name, shape, dtype)` returns uninitialised memory that is valid until the next `get` of the same name.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = 1
        for s in shape:
            size *= s
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < size:
            flat = torch.empty(size, dtype=dtype, device=self.device)
            self._flat[(name, dtype)] = flat
        return flat[:size].view(shape)

    def bytes(self) -> int:
        """Bytes held right now: the `temporary` column of the ledger."""
        return sum(t.untyped_storage().nbytes() for t in self._flat.values())
