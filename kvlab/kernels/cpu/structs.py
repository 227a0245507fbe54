"""The C structs of kv.cpp as ctypes, and a codec's page format turned into them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int16, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kvlab.kernels.format import Format, Refused, Side

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "e4m3": 3, "e5m2": 4, "int8": 5}
UNIFORM, TABLE = 6, 7
AXES = {"none": 0, "token": 1, "block": 2}
META = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
BY_TABLE = 5  # codes of up to this many bits come from a table in registers, also where the number is the code
MAX_LANES = 1024
FITS = ("", "as_is", "absmax", "minmax", "none", "norm", "eden_mse", "eden_unbiased", "const_unbiased", "sketch")


class kv_side(Structure):
    _fields_ = [
        ("kind", c_int32), ("bits", c_int32), ("width", c_int32), ("pack", c_int32), ("axis", c_int32),
        ("group", c_int32), ("meta", c_int32), ("slots", c_int32), ("mid", c_float), ("fit", c_int32),
        ("row_bytes", c_int64), ("codes", c_void_p), ("scale", c_void_p), ("scale2", c_void_p), ("zero", c_void_p),
        ("table", c_void_p), ("channel", c_void_p), ("edges", c_void_p),
        ("factor", c_float), ("reserved", c_int32),
    ]  # fmt: skip


class kv_format(Structure):
    _fields_ = [
        ("size", c_int32), ("heads", c_int32), ("group", c_int32), ("block", c_int32), ("keys", c_int32),
        ("scale", c_float), ("dim", c_int32), ("fast", c_int32),
        ("turn", c_void_p), ("back", c_void_p), ("turn_head", c_int64), ("back_head", c_int64),
        ("group_of", c_void_p), ("offset", c_void_p),
        ("stride", c_int64), ("valid", c_void_p),
        ("k", kv_side * 2), ("v", kv_side),
    ]  # fmt: skip


class kv_view(Structure):
    _fields_ = [
        ("size", c_int32), ("N", c_int32), ("groups", c_int32), ("blocks", c_int32), ("rows", c_int32),
        ("table", c_void_p), ("lo", c_void_p), ("hi", c_void_p), ("first", c_void_p), ("count", c_void_p),
    ]  # fmt: skip


CODES = {-1: "struct size differs: the library is of another version", -2: "format", -3: "block id outside the pool",
         -4: "rows or ranges", -5: "scratch is too small"}  # fmt: skip


def accept(who: str, code: int) -> None:
    """ValueError for the code of a call that was refused."""
    if code < 0:
        raise ValueError(f"{who}: refused, {CODES.get(code, code)}")


def dense_rows(*tensors: Tensor) -> None:
    """What the kernels are given pointers to: a wrong one would be garbage, not an error."""
    for t in tensors:
        assert t.dtype == torch.float32 and t.stride(-1) == 1, f"{t.dtype} {t.stride()}: not dense float32 rows"


def float_kind(*tensors: Tensor) -> int:
    """What `kind` means to the kernels, of contiguous tensors of one float type."""
    name = str(tensors[0].dtype).removeprefix("torch.")
    same = all(t.dtype == tensors[0].dtype and t.is_contiguous() for t in tensors)
    assert same and name in ("float32", "bfloat16", "float16"), f"{name}: not contiguous floats of one type"
    return KINDS[name]


def prototypes(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Argument types of every entry point: a wrong call fails in Python."""
    f, v, p, i, n = POINTER(kv_format), POINTER(kv_view), c_void_p, c_int32, c_int64
    lib.kv_slots.argtypes, lib.kv_slots.restype = [POINTER(kv_side), POINTER(c_int16)], i
    lib.kv_check_format.argtypes, lib.kv_check_format.restype = [f], i
    lib.kv_check_view.argtypes, lib.kv_check_view.restype = [v, i, i], i
    lib.kv_words.argtypes, lib.kv_words.restype = [f], i
    lib.kv_writes.argtypes, lib.kv_writes.restype = [f], i
    lib.kv_workspace.argtypes, lib.kv_workspace.restype = [f, v], n
    lib.kv_attend.argtypes, lib.kv_attend.restype = [f, v, p, n, n, p, n, n, p, n, n, i, p, n, i], i
    lib.kv_attend_all.argtypes, lib.kv_attend_all.restype = [p, i, p, n, n, p, n, n, p, n, n, i, p, n, i], i
    lib.kv_append.argtypes, lib.kv_append.restype = [f, p, n, n, p, n, n, p, n, i, i], i
    lib.kv_seal.argtypes, lib.kv_seal.restype = [f, i, p, p, p, n, p, n, i, i], i
    lib.kv_mass.argtypes, lib.kv_mass.restype = [f, v, p, n, n, p, n, n, p, i, i], i
    return lib


class Bound:
    """A format over live arrays as a `kv_side` per side, and what keeps its memory alive."""

    def __init__(self, lib: ctypes.CDLL, fmt: Format, arrays: dict[str, Tensor], block: int) -> None:
        if len(fmt.k) > 2:
            raise Refused(f"a key has {len(fmt.k)} parts, the kernels hold 2")
        if block % 16:
            raise Refused(
                f"blocks of {block} tokens: the kernels read 16 at a time, so runtime.block must be a multiple"
            )
        self.lib, self.arrays, self.block, self.kept = lib, arrays, block, []
        self.k = [self._side(s) for s in fmt.k]
        self.v = self._side(fmt.v)

    def _side(self, s: Side) -> kv_side:
        codes = self.arrays[s.codes]
        out = kv_side(width=s.width, axis=AXES[s.axis], group=s.group, bits=s.bits, pack=s.pack, factor=s.factor)
        out.fit = FITS.index(s.fit)
        table = s.table
        if s.kind != "codes":
            out.kind = KINDS[s.kind]
        else:
            if s.pack % 8:
                raise Refused(f"rows of {s.pack} codes: the kernels read whole bytes of 8 codes")
            out.kind = UNIFORM if table is None else TABLE
            out.mid = (2**s.bits - 1) / 2 if table is None and s.zero else 0.0
            if table is None and s.bits <= BY_TABLE:
                table = torch.arange(2**s.bits, dtype=torch.float32) - out.mid
        if s.kind != "codes" and s.width % 16:
            raise Refused(f"{s.width} channels are not a multiple of 16")
        if s.axis == "block" and s.group % 16:
            raise Refused(f"scales over {s.group} tokens: the kernels read 16 at a time")
        out.row_bytes = codes.shape[-1] * codes.element_size()
        out.codes = codes.data_ptr()
        for name in ("scale", "scale2", "zero"):
            if (region := getattr(s, name)) is not None:
                out.meta = META[self.arrays[region].dtype]
                setattr(out, name, self.arrays[region].data_ptr())
        if s.edges is not None:
            self.kept.append(s.edges.float().contiguous())
            out.edges = self.kept[-1].data_ptr()
        if table is not None:
            self.kept.append(table.float().contiguous())
            out.table = self.kept[-1].data_ptr()
        channel = (c_int16 * MAX_LANES)()
        slots = self.lib.kv_slots(ctypes.byref(out), channel)
        if slots < 1:
            raise Refused(f"{s.width} channels in rows of {s.pack or s.width}: more than the kernels hold")
        out.slots, out.channel = slots, ctypes.addressof(channel)
        self.kept.append(channel)
        return out
