"""All layers of a step in one call: the model's products and the pages that their attention writes and reads."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kvlab.kernels.cpu.attend import Layers, View
from kvlab.kernels.cpu.dense import Step, padded
from kvlab.kernels.cpu.structs import accept, float_kind


class kv_write(Structure):
    _fields_ = [("format", c_void_p), ("rows", c_void_p), ("capacity", c_int64)]


class kv_moved(Structure):
    _fields_ = [
        ("format", c_void_p), ("src", c_void_p), ("dst", c_void_p), ("k", c_void_p), ("v", c_void_p),
        ("kind", c_int64), ("src_rows", c_int64), ("dst_rows", c_int64), ("count", c_int64),
    ]  # fmt: skip


class kv_read(Structure):
    _fields_ = [("format", c_void_p), ("view", c_void_p), ("join", c_int64)]


class kv_turn(Structure):
    _fields_ = [
        *((n, c_int32) for n in ["size", "layers", "T", "heads", "kv_heads", "dim"]),
        *((n, c_int32) for n in ["writes", "moves", "reads", "threads"]),
        *((n, c_void_p) for n in ["layer", "write", "move", "read", "x", "qkv", "attended", "lse", "rope"]),
        *((n, c_int64) for n in ["x_row", "qkv_row", "pages_floats", "work_bytes"]),
        ("pages_work", c_void_p), ("work", c_void_p),
    ]  # fmt: skip


@dataclass
class Turn:
    """What a step writes, encodes and reads, for all L layers of a model; filled in that order.

    encoded: blocks (or writes of encoded tokens) that running it adds to a compressor's counter.
    """

    L: int
    encoded: int = 0
    writes: list[kv_write] = field(default_factory=list)
    moves: list[kv_moved] = field(default_factory=list)
    reads: list[kv_read] = field(default_factory=list)
    floats: int = 0  # of scratch
    _floats: int = 0  # of what is read together
    libs: set[ctypes.CDLL] = field(default_factory=set)
    kept: list = field(default_factory=list)  # whatever the pointers point to

    def write(self, to: Layers, rows: Tensor) -> None:
        """rows int64 [layers of the class, Hk * T]: token rows of the class's arrays."""
        self.writes.append(kv_write(self._formats(to), self._by_layer(to, rows), to.tokens))

    def move(self, to: Layers, k: Tensor, v: Tensor, src: Tensor, dst: Tensor) -> None:
        """As Layers.seal: src, dst int64 [layers of the class, M]."""
        at = self._by_layer(to, src), self._by_layer(to, dst)
        size = len(k), to.tokens // to.block, src.shape[1]
        self.moves.append(kv_moved(self._formats(to), *at, k.data_ptr(), v.data_ptr(), float_kind(k, v), *size))

    def read(self, source: Layers, view: View, join: bool) -> None:
        self._floats = source.admit(view) + self._floats * join
        self.floats = max(self.floats, self._floats)
        self.kept.append(view)
        self.reads.append(kv_read(self._formats(source), ctypes.addressof(view.struct), join))

    def run(self, step: Step, x: Tensor, rope: Tensor, H: int, Hk: int) -> bool:
        """x [T, width] through all layers, in place; rope [T, dim] as in `Step.front`. False: a key or value cannot be
        written (it is not finite, or does not fit), or pages and model are of different libraries; x and the slots
        written then mean nothing."""
        if any(lib is not step.lib for lib in self.libs):
            return False
        part, T = step.parts[0], len(x)
        lists = self.writes, self.moves, self.reads
        arrays = [(kind * len(items))(*items) for kind, items in zip((kv_write, kv_moved, kv_read), lists)]
        width, work = padded(part.qkv.outputs), step.room(T)
        floats = T * width, T * H * part.dim, T * H, self.floats, work // 4
        *starts, end = accumulate((-(-n // 16) * 16 for n in floats), initial=0)
        memory = torch.empty(end)
        qkv, attended, lse, pages, work_at = (memory.data_ptr() + 4 * at for at in starts)
        s = kv_turn(
            ctypes.sizeof(kv_turn), self.L, T, H, Hk, part.dim, *map(len, lists), torch.get_num_threads(),
            step.address, *map(ctypes.addressof, arrays), x.data_ptr(), qkv, attended, lse, rope.data_ptr(),
            x.stride(0), width, self.floats, work, pages, work_at,
        )  # fmt: skip
        code = step.lib.kv_step(ctypes.addressof(s))
        accept("kv_step", code)
        return code == 0

    def _formats(self, layers: Layers) -> int:
        self.libs.add(layers.lib)
        return layers.pointers(self.L).ctypes.data

    def _by_layer(self, layers: Layers, rows: Tensor) -> int:
        rows, out = rows.contiguous(), np.zeros(self.L, np.int64)
        out[layers.layers] = rows.data_ptr() + np.arange(len(rows)) * rows.stride(0) * rows.element_size()
        self.kept += [rows, out]
        return out.ctypes.data
