"""Attention of query rows over packed pages on the CPU: the torch reference's partials, without its tiles.

`Layers` binds a page format to the arrays of a cache, once. `View` says what the rows of a step may see, once a step.
A call then reads codes where they lie; nothing is gathered, and only a few tokens at a time become floats.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kvlab.kernels import move
from kvlab.kernels.backend import block_rows
from kvlab.kernels.cpu.structs import Bound, accept, dense_rows, float_kind, kv_format, kv_view, prototypes
from kvlab.kernels.format import Format

_FORMAT, _VIEW = ctypes.sizeof(kv_format), ctypes.sizeof(kv_view)


@dataclass(frozen=True, eq=False)
class View:
    """Rows of N sequences and what each sees; its arrays lie in one, which it keeps alive.

    table   int32 [N, groups, blocks]  block ids       lo, hi  int32 [N, groups, rows]  slots [lo, hi) of each row
    first   int32 [N]  where a sequence's first query row is     count  int32 [N]  its rows (1 = a decoding row)
    """

    struct: kv_view
    numbers: np.ndarray

    @property
    def blocks(self) -> int:
        return self.struct.blocks

    @classmethod
    def of(cls, table: np.ndarray, lo: np.ndarray, hi: np.ndarray, first: np.ndarray, count: np.ndarray) -> View:
        table, lo, *_ = arrays = [np.asarray(a) for a in (table, lo, hi, first, count)]
        numbers = np.concatenate([a.ravel() for a in arrays], dtype=np.int32, casting="unsafe")
        starts = accumulate((a.size for a in arrays[:-1]), initial=numbers.ctypes.data // 4)
        return cls(kv_view(_VIEW, *table.shape, lo.shape[2], *(4 * at for at in starts)), numbers)


class Kernels:
    """The CPU's `Backend` (kernels/backend.py). fast: decoding rows multiply integers where pages hold codes."""

    whole, fixes = True, False

    def __init__(self, library: ctypes.CDLL, name: str, fast: bool = False) -> None:
        self.library, self.name, self.fast = library, name, fast

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32

    def layers(self, *args, dtype: torch.dtype, **named) -> Layers:
        return Layers(self.library, *args, **named, fast=self.fast)

    move_rows, copy_blocks = staticmethod(move.move_rows), staticmethod(move.copy_blocks)

    def bad(self) -> list[int]:
        return []  # `append` and `seal` say it at once

    def view(self, *arrays: np.ndarray) -> View:
        return View.of(*arrays)


class Layers:
    """One page format over the arrays of a cache class, for each of its layers.

    arrays      {region: flat tensor, last axis = one token's row}: live storages, which must not move
    group_of    int [layers, Hk]  table that a head reads
    offset      int64 [layers, Hk], and stride: a block's row is id * stride + offset
    fast        decoding rows multiply integers where pages hold codes (fast.h), not float32
    capacity    blocks of the pool            layers  the model's number of each, for Format.turn
    """

    def __init__(
        self, lib: ctypes.CDLL, fmt: Format, arrays: dict[str, Tensor], block: int, layers: list[int],
        group_of: np.ndarray, offset: np.ndarray, stride: int, capacity: int, G: int, scale: float,
        fast: bool = False,
    ) -> None:  # fmt: skip
        self.lib, self.block, self.capacity = prototypes(lib), block, capacity
        self.bound = Bound(lib, fmt, arrays, block)
        self.G, self.Hk, self.dim = G, group_of.shape[1], fmt.v.width if fmt.back is None else fmt.back.shape[-1]
        self.turn, self.back, self.valid = fmt.turn, fmt.back, fmt.valid and arrays[fmt.valid]
        self.layers = layers
        self.group_of = np.ascontiguousarray(group_of, np.int32)
        self.offset = np.ascontiguousarray(offset, np.int64)
        self.tokens = block_rows(offset, stride, capacity) * block
        self.formats = [self._format(i, stride, scale, fast) for i in range(len(group_of))]
        writes = self.lib.kv_writes(self.formats[0])
        self.appends, self.seals = bool(writes & 1), bool(writes & 2)
        self._pointers = np.zeros(0, np.int64)
        self._work = torch.empty(0)
        self._checked: kv_view | None = None

    def _format(self, i: int, stride: int, scale: float, fast: bool) -> kv_format:
        out = kv_format(_FORMAT, self.Hk, self.G, self.block, len(self.bound.k), scale, self.dim, fast)
        for name in ("turn", "back"):
            if (m := getattr(self, name)) is not None:
                setattr(out, name, m[self.layers[i]].data_ptr())
        for name in ("turn", "back"):
            if (m := getattr(self, name)) is not None and m.shape[1] > 1:
                setattr(out, f"{name}_head", m.stride(1))
        out.group_of, out.offset, out.stride = self.group_of[i].ctypes.data, self.offset[i].ctypes.data, stride
        if self.valid is not None:
            out.valid = self.valid.data_ptr()
        for j, side in enumerate(self.bound.k):
            out.k[j] = side
        out.v = self.bound.v
        accept("kv_check_format", self.lib.kv_check_format(ctypes.byref(out)))
        return out

    def pointers(self, L: int) -> np.ndarray:
        """Addresses of the formats by the model's L layers, int64 [L]; 0 where a layer is of another class."""
        if len(self._pointers) != L:
            self._pointers = np.zeros(L, np.int64)
            self._pointers[self.layers] = [ctypes.addressof(f) for f in self.formats]
        return self._pointers

    @property
    def words(self) -> int:
        """What the fast arithmetic takes of these pages: 1 keys, 2 values, 3 both, 0 nothing."""
        return self.lib.kv_words(self.formats[0])

    def attend(self, i: int, view: View, q: Tensor, out: Tensor, lse: Tensor, join: bool = False) -> None:
        """Fills out and lse, or joins them with what they hold. i: index of the layer in its class.

        q, out float32 [rows, H, D], lse float32 [rows, H]: strided views whose row axis is what View.first counts in;
        the last axis of q and out is dense.
        """
        dense_rows(q, out)
        assert lse.dtype == torch.float32, f"lse is {lse.dtype}, not float32"
        if view.struct is not self._checked:
            need, self._checked = self.admit(view), view.struct
            if self._work.numel() < need:
                self._work = torch.empty(need)
        (q_row, q_head, _), (row, head, _), (lse_row, lse_head) = q.stride(), out.stride(), lse.stride()
        code = self.lib.kv_attend(
            self.formats[i], view.struct, q.data_ptr(), q_head, q_row, out.data_ptr(), head, row, lse.data_ptr(),
            lse_head, lse_row, join, self._work.data_ptr(), self._work.numel(), torch.get_num_threads(),
        )  # fmt: skip
        if code:
            accept("kv_attend", code)

    def admit(self, view: View) -> int:
        """Check a view against the pool, once for all layers. Returns the floats of scratch that it needs."""
        accept("kv_check_view", self.lib.kv_check_view(view.struct, self.block, self.capacity))
        return self.lib.kv_workspace(self.formats[0], view.struct)

    def append(self, i: int, k: Tensor, v: Tensor, rows: Tensor) -> bool:
        """Encode k, v float32 [Hk, T, D] (last axis dense) into token rows int64 [Hk * T] of the class's arrays.

        False: a number is not finite or does not fit its type; what those slots hold then means nothing.
        """
        dense_rows(k, v)
        bad = self.lib.kv_append(
            self.formats[i], k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0), v.stride(1),
            rows.data_ptr(), self.tokens, k.shape[1], torch.get_num_threads(),
        )  # fmt: skip
        if bad < 0:
            accept("kv_append", bad)
        return not bad

    def seal(self, i: int, k: Tensor, v: Tensor, src: Tensor, dst: Tensor) -> bool:
        """Encode whole blocks: block rows src int64 [M] of the exact k, v [rows, B * D], float32 or 16 bits, to block
        rows dst [M]. False as in `append`."""
        bad = self.lib.kv_seal(
            self.formats[i], float_kind(k, v), k.data_ptr(), v.data_ptr(), src.data_ptr(), len(k), dst.data_ptr(),
            self.tokens // self.block, len(src), torch.get_num_threads(),
        )  # fmt: skip
        if bad < 0:
            accept("kv_seal", bad)
        return not bad

    def mass(self, i: int, view: View, q: Tensor, lse: Tensor, columns: int) -> Tensor:
        """Attention weight that each slot received: float32 [N, Hk, G, columns], summed over a sequence's rows.

        q, lse as in `attend`; lse +inf = the row has no vote.
        """
        dense_rows(q, lse.unsqueeze(-1))
        accept("kv_check_view", self.lib.kv_check_view(view.struct, self.block, self.capacity))
        out = torch.empty(view.struct.N, self.Hk, self.G, columns)
        code = self.lib.kv_mass(
            self.formats[i], view.struct, q.data_ptr(), q.stride(1), q.stride(0), lse.data_ptr(), lse.stride(1),
            lse.stride(0), out.data_ptr(), columns, torch.get_num_threads(),
        )  # fmt: skip
        accept("kv_mass", code)
        return out
