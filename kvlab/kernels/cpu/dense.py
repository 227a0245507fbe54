"""A model's matrices and layers for step.cpp: packed once, then called with packed rows.

Rows are float32 [T, width], width padded to a multiple of 32 (`padded`); the last axis is dense.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.hugepages import Arena
from kvlab.kernels.cpu.structs import accept, dense_rows

KINDS = {"float32": 0, "bf16": 1, "int8": 2}
PANEL = 16
LARGEST = 127  # code of a weight
TINY = 1e-30  # a channel of zeros has a scale too


class kv_matrix(Structure):
    _fields_ = [
        ("size", c_int32), ("kind", c_int32), ("inputs", c_int32), ("outputs", c_int32), ("top", c_float),
        ("reserved", c_int32), ("weight", c_void_p), ("scale", c_void_p), ("bias", c_void_p),
    ]  # fmt: skip


class kv_layer(Structure):
    _fields_ = [
        ("size", c_int32), ("turned", c_int32), ("dim", c_int32), ("wide", c_int32), ("eps", c_float),
        ("qk_eps", c_float), ("norm", c_void_p), ("mlp_norm", c_void_p), ("qk_norm", c_void_p),
        ("qkv", kv_matrix), ("o", kv_matrix), ("gate_up", kv_matrix), ("down", kv_matrix),
    ]  # fmt: skip


def prototypes(lib: ctypes.CDLL) -> ctypes.CDLL:
    m, l, p, i, n = POINTER(kv_matrix), POINTER(kv_layer), c_void_p, c_int32, c_int64
    lib.kv_check_matrix.argtypes, lib.kv_check_matrix.restype = [m], i
    lib.kv_check_layer.argtypes, lib.kv_check_layer.restype = [l], i
    lib.kv_layer_bytes.argtypes, lib.kv_layer_bytes.restype = [l, i], n
    lib.kv_matrix_bytes.argtypes, lib.kv_matrix_bytes.restype = [m, i], n
    lib.kv_front.argtypes, lib.kv_front.restype = [l, p, n, i, p, p, n, p, n, i], i
    lib.kv_back.argtypes, lib.kv_back.restype = [l, p, n, p, n, i, p, n, i], i
    lib.kv_step.argtypes, lib.kv_step.restype = [p], i
    lib.kv_head.argtypes, lib.kv_head.restype = [m, p, c_float, p, n, i, p, n, p, n, i], i
    return lib


def padded(n: int) -> int:
    return -(-n // (2 * PANEL)) * 2 * PANEL


class Matrix:
    """weight [outputs, inputs] of any float type, bias [outputs] or None, as the kernels read them.

    int8: symmetric codes with one scale per output. Rows become integers up to `top`, the largest with which no sum of
    products can leave int32: 32767 unless a matrix has very many inputs. arena: where the packed weight lies.
    """

    def __init__(self, kind: str, weight: Tensor, bias: Tensor | None, arena: Arena | None = None) -> None:
        self.inputs, self.outputs = weight.shape[1], weight.shape[0]
        rows = padded(self.outputs) - self.outputs
        self.bias = None if bias is None else F.pad(bias.detach().float(), (0, rows))
        self.scale, self.top = None, 0.0
        weight = F.pad(weight.detach(), (0, 0, 0, rows))
        if kind == "int8":
            weight = weight.float()
            self.scale = weight.abs().amax(1).clamp_min(TINY) / LARGEST
            codes = torch.round(weight / self.scale[:, None]).to(torch.int8)
            largest_sum = int(codes.abs().sum(1, dtype=torch.int64).max())
            self.top = float(min(2**15 - 1, (2**31 - 1) // max(largest_sum, 1)))
            codes = F.pad(codes, (0, self.inputs % 2)).view(-1, PANEL, (self.inputs + 1) // 2, 2)
            packed = codes.transpose(1, 2)
        else:
            weight = weight.to(torch.bfloat16 if kind == "bf16" else torch.float32)
            packed = weight.view(-1, PANEL, self.inputs).transpose(1, 2)
        self.data = (arena or Arena(0)).copy(packed)
        self.struct = kv_matrix(
            ctypes.sizeof(kv_matrix), KINDS[kind], self.inputs, self.outputs, self.top, 0,
            self.data.data_ptr(), _pointer(self.scale), _pointer(self.bias),
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.data, self.scale, self.bias) if t is not None)


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """[n, ...] twice -> rows of both, 16 of the one before 16 of the other, zeros where n ends."""
    parts = [F.pad(x, (*(0, 0) * (x.dim() - 1), 0, -len(x) % PANEL)).unflatten(0, (-1, PANEL)) for x in (gate, up)]
    return torch.stack(parts, 1).flatten(0, 2)


@dataclass(frozen=True)
class LayerParts:
    """What a layer is made of. norm, mlp_norm [inputs]; qk_norm [turned heads, dim] or None. gate_up: of
    `interleaved` weights."""

    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    norm: Tensor
    mlp_norm: Tensor
    qk_norm: Tensor | None
    eps: float
    qk_eps: float
    turned: int
    dim: int


class Step:
    """The layers and the head of one model on the kernels of one library."""

    def __init__(self, lib: ctypes.CDLL, layers: list[LayerParts], norm: Tensor, eps: float, head: Matrix) -> None:
        self.lib, self.parts = prototypes(lib), layers
        self.norm, self.eps, self.head_matrix = norm, eps, head
        self.layers = [self._layer(p) for p in layers]
        self._addresses = np.array([ctypes.addressof(x) for x in self.layers], np.int64)
        self.address = self._addresses.ctypes.data  # of pointers to the layers
        accept("kv_check_matrix", lib.kv_check_matrix(head.struct))

    def _layer(self, p: LayerParts) -> kv_layer:
        out = kv_layer(ctypes.sizeof(kv_layer), p.turned, p.dim, p.down.inputs, p.eps, p.qk_eps)
        out.norm, out.mlp_norm, out.qk_norm = p.norm.data_ptr(), p.mlp_norm.data_ptr(), _pointer(p.qk_norm)
        for name in ("qkv", "o", "gate_up", "down"):
            setattr(out, name, getattr(p, name).struct)
        accept("kv_check_layer", self.lib.kv_check_layer(out))
        return out

    def front(self, i: int, x: Tensor, rope: Tensor) -> Tensor:
        """x [T, width], rope [T, dim] (dim / 2 cosines, then sines) -> q, k, v of all heads side by side,
        [T, heads * dim]; q and k are turned."""
        dense_rows(x, rope)
        layer, T, outputs = self.layers[i], len(x), self.parts[i].qkv.outputs
        out, work = torch.empty(T, padded(outputs)), _scratch(self.room(T))
        code = self.lib.kv_front(
            layer, x.data_ptr(), x.stride(0), T, rope.data_ptr(), out.data_ptr(), out.stride(0),
            work.data_ptr(), len(work), torch.get_num_threads(),
        )  # fmt: skip
        accept("kv_front", code)
        return out[:, :outputs]

    def back(self, i: int, attended: Tensor, x: Tensor) -> None:
        """x [T, width] += o(attended [T, H * dim]); then x += the MLP of its norm."""
        dense_rows(attended, x)
        layer, T = self.layers[i], len(x)
        work = _scratch(self.room(T))
        code = self.lib.kv_back(
            layer, attended.data_ptr(), attended.stride(0), x.data_ptr(), x.stride(0), T, work.data_ptr(), len(work),
            torch.get_num_threads(),
        )  # fmt: skip
        accept("kv_back", code)

    def head(self, x: Tensor) -> Tensor:
        """x [k, width] -> logits [k, outputs] of its norm."""
        dense_rows(x)
        m, k = self.head_matrix, len(x)
        out = torch.empty(k, padded(m.outputs))
        work = _scratch(self.lib.kv_matrix_bytes(m.struct, k))
        code = self.lib.kv_head(
            m.struct, self.norm.data_ptr(), self.eps, x.data_ptr(), x.stride(0), k, out.data_ptr(), out.stride(0),
            work.data_ptr(), len(work), torch.get_num_threads(),
        )  # fmt: skip
        accept("kv_head", code)
        return out[:, : m.outputs]

    def room(self, T: int) -> int:
        """Bytes of scratch for T rows of a layer, a multiple of 4; all layers of a model are alike."""
        return self.lib.kv_layer_bytes(self.layers[0], T)


def _scratch(n: int) -> Tensor:
    """n bytes. Fresh: labs of one model share a Step."""
    return torch.empty(n, dtype=torch.uint8)


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()
