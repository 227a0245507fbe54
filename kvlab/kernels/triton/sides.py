"""A page format as Triton kernels take it: what is known when one is compiled (Spec), and where the bytes are (Ptrs).

A kernel multiplies packed rows. One is PARTS of `cols` neighbouring channels that share a scale of each token: codes
of w bits in order `split` put channels [i cols, (i + 1) cols) of a row at the same bits of its bytes, so that part i is
one shift and mask of bytes which are loaded once for all parts. Plain numbers have one part; a row is then a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.kernels.format import Format, Refused, Side
from kvlab.kernels.packing import packed_bytes, planes
from kvlab.kernels.triton.ptx import Ptx, ptx

MAX_ROWS = 16  # products of one side: each keeps a tile of its own in registers
BY_TABLE = 4  # bits of a code that is looked up


class Spec(NamedTuple):
    """kind: "number" (stored as the pointer's type), "e4m3", "e5m2" or "codes". Symbols as in kernels/format.py.

    rows   packed rows of a token       row    elements of a packed row (bytes, for codes)
    parts  of a packed row        cols   channels of a part        pad   cols, a power of two from 16 up
    narrow, narrow_cols, narrow_at   width of the second plane (0: none), its bytes in a row and where they begin
    scales per token (axis "token") or per group of tokens (axis "block")
    mid    what float32 codes are counted from, in products that zeros are added to: numbers around 0 round less
    may_be_nan  garbage can be a NaN, so a slot that means nothing must not be read
    ptx    how bytes become float16 on an NVIDIA GPU; None: as everywhere
    """

    kind: str
    bits: int
    width: int
    axis: str
    group: int
    rows: int
    row: int
    parts: int
    cols: int
    pad: int
    wide: int
    narrow: int
    narrow_cols: int
    narrow_at: int
    scales: int
    mid: int
    may_be_nan: bool
    ptx: Ptx | None


class Ptrs(NamedTuple):
    """Arrays of a side; None = it has none."""

    codes: Tensor
    scale: Tensor | None
    scale2: Tensor | None
    zero: Tensor | None
    table: Tensor | None


def capability(device: torch.device) -> int:
    """Compute capability of the NVIDIA GPU that kernels over arrays there are compiled for (90: 9.0); 0: it is none."""
    if device.type == "cpu" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def spec(s: Side, to_ptx: bool = False) -> Spec:
    """Raises Refused for what the kernels do not hold. to_ptx: only an NVIDIA GPU can run it, not the interpreter."""
    scales = s.width // s.group if s.axis == "token" else s.width
    if s.kind == "codes":
        ws = planes(s.bits)
        if len(ws) > 2 or (s.table is not None and s.bits > BY_TABLE):
            raise Refused(f"codes of {s.bits} bits{' by table' if s.table is not None else ''}")
        if s.pack % 8:
            raise Refused(f"rows of {s.pack} codes: the kernels read whole bytes of 8 codes")
        parts, rows, row, kind = 8 // ws[0], s.width // s.pack, packed_bytes(s.pack, s.bits), "codes"
        narrow = ws[1] if len(ws) == 2 else 0
        mid = 2 ** (s.bits - 1) if s.table is None and s.zero else 0
        sizes = (ws[0], narrow, s.pack * narrow // 8, s.pack * ws[0] // 8)
    else:
        row = s.group if s.axis == "token" else s.width
        parts, rows, sizes, mid = 1, s.width // row, (8, 0, 0, 0), 0
        kind = s.kind if s.kind in ("e4m3", "e5m2") else "number"
    cols = row if kind != "codes" else s.pack // parts
    if s.axis == "token" and s.group % cols:
        raise Refused(f"parts of {cols} channels with scales over {s.group}")
    if rows > MAX_ROWS:
        raise Refused(f"{rows} packed rows of {s.width // rows} channels: the kernels hold {MAX_ROWS}")
    pad = max(16, 1 << (cols - 1).bit_length())
    nan = kind == "e5m2" or (kind == "number" and s.kind != "int8")
    text = ptx(s.kind, *sizes[:2], s.table) if to_ptx else None
    return Spec(kind, s.bits, s.width, s.axis, s.group, rows, row, parts, cols, pad, *sizes, scales, mid, nan, text)


def pointers(s: Side, arrays: dict[str, Tensor]) -> Ptrs:
    """arrays: {region: flat tensor}, live storages."""
    codes = arrays[s.codes]
    scale, scale2, zero = (None if n is None else arrays[n] for n in (s.scale, s.scale2, s.zero))
    table = None if s.table is None else s.table.to(codes.device, torch.float32).contiguous()
    return Ptrs(codes, scale, scale2, zero, table)


def compute(fmt: Format, arrays: dict[str, Tensor], exact: bool) -> tuple[torch.dtype, str]:
    """(type of the products' operands, precision of float32 ones): float32 as it is if exact, as tf32 for float32
    pages; else the pages' own 16-bit type, float16 for codes."""
    types = {arrays[s.codes].dtype for s in (*fmt.k, fmt.v)}
    if exact or torch.float32 in types:
        return torch.float32, "ieee" if exact else "tf32"
    return torch.bfloat16 if torch.bfloat16 in types else torch.float16, "tf32"
