"""What a set of kernels over packed pages offers; kernels/cpu and kernels/triton have one each, `dispatch` chooses.

Without one (or where it refuses a format) methods run in torch: `Codec.encode` and `read` on gathered tiles.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvlab.kernels.format import Format


def block_rows(offset: np.ndarray, stride: int, capacity: int) -> int:
    """How many block rows heads at `offset` have together, `capacity` each (see `Backend.layers`)."""
    return int(offset.max()) + (capacity - 1) * stride + 1


class View(Protocol):
    """Rows of N sequences and what each sees, as a backend's kernels take it. blocks: width of its block table."""

    @property
    def blocks(self) -> int: ...


class Layers(Protocol):
    """A page format over the arrays of a cache class. i: index of a layer in its class.

    appends, seals   whether it encodes single tokens, and blocks of an exact tail
    words            what `fast` arithmetic takes of these pages: 1 keys, 2 values, 3 both, 0 nothing
    """

    appends: bool
    seals: bool

    @property
    def words(self) -> int: ...

    def attend(self, i: int, view: View, q: Tensor, out: Tensor, lse: Tensor, join: bool = False) -> None:
        """Fills out [rows, H, D] and lse float32 [rows, H], or joins them with what they hold."""

    def mass(self, i: int, view: View, q: Tensor, lse: Tensor, columns: int) -> Tensor:
        """Attention weight that each slot received, float32 [N, Hk, G, columns]; lse +inf = the row has no vote."""

    def append(self, i: int, k: Tensor, v: Tensor, rows: Tensor) -> bool:
        """Encode k, v [Hk, T, D] into token rows int64 [Hk * T]. False: the reference must do it, or say what is
        wrong."""

    def seal(self, i: int, k: Tensor, v: Tensor, src: Tensor, dst: Tensor) -> bool:
        """Encode block rows src of exact k, v [rows, B * D], of any float type, to block rows dst. False as in
        `append`."""


class Moves(Protocol):
    """What kernels/move.py defines."""

    def move_rows(self, flat: Tensor, src: Tensor, dst: Tensor) -> None: ...

    def copy_blocks(self, arrays: list[Tensor], src: Tensor, dst: Tensor) -> None: ...


class Backend(Moves, Protocol):
    """name: of result rows.   whole: it runs all layers of a step at once (kernels/cpu/turn.py).   fixes: it has
    `fixed`, and nothing in a step waits for the device."""

    name: str
    whole: bool
    fixes: bool

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether queries and outputs may have this type."""

    def layers(
        self, fmt: Format, arrays: dict[str, Tensor], block: int, layers: list[int], group_of: np.ndarray,
        offset: np.ndarray, stride: int, capacity: int, G: int, scale: float, dtype: torch.dtype,
    ) -> Layers:  # fmt: skip
        """arrays {region: flat tensor, last axis = one token's row}: live storages, which must not move. group_of int
        [layers, Hk]: table that a head reads; offset int [layers, Hk], stride: block `id` of a head is block row id *
        stride + offset; capacity: blocks of the pool; layers: the model's number of each; dtype: the model's.
        Raises Refused."""

    def bad(self) -> list[int]:
        """Layers of the model in which a number that was written since the last call is not finite or does not fit its
        type, where `append` and `seal` don't wait to see it."""

    def fixed(self, table: Tensor, lo: Tensor, hi: Tensor, first: Tensor, count: Tensor) -> View:
        """`view` of decoding rows whose arrays stay where they are and change (cache/fixed.py)."""

    def view(self, table: np.ndarray, lo: np.ndarray, hi: np.ndarray, first: np.ndarray, count: np.ndarray) -> View:
        """table int [N, groups, blocks], lo, hi int [N, groups, rows] slots [lo, hi) of each row, first int [N] where a
        sequence's first query row is, count int [N] its rows."""
