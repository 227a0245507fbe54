"""Encoding of tokens and blocks into the arrays of a cache class: what the CPU's Layers.append and Layers.seal do."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.kernels.format import Format, Refused, Side
from kvlab.kernels.packing import packed_bytes
from kvlab.kernels.triton.encode import append, seal

TOKENS = 16  # of a program, the least that a product takes. Always: else the order of its sums would depend on T
GROUP = 32  # tokens of a program at a time where scales are per channel
SUM = 16  # channels that a product takes at a time: with 32 registers spill
TABLES = ("none", "norm", "eden_mse", "eden_unbiased", "const_unbiased")


class Encoding(NamedTuple):
    """How a side is written. fit, kind, bits, width, axis, group: as in kernels/format.py.

    rows    packed rows of a token     row    elements of one (bytes, for codes)
    parts   of a packed row: channels whose codes have the same bits in the bytes of the narrowest plane
    cols    channels of a part         tile   columns of a tile: parts times cols, cols rounded up to a power of two
    groups  of a packed row, with a scale of a token each (axis "token")
    factor  times the norm, where the fit is a constant of the table
    """

    fit: str
    kind: str
    bits: int
    width: int
    axis: str
    group: int
    rows: int
    row: int
    parts: int
    cols: int
    tile: int
    groups: int
    factor: float


class Places(NamedTuple):
    """Arrays that a side is written to, and its tables; None = it has none. turn: float32 [1 | Hk, width, width]."""

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    table: Tensor | None
    edges: Tensor | None
    turn: Tensor | None


def encoding(s: Side, turned: bool) -> Encoding:
    """turned: numbers are along Format.turn. Raises Refused for what the kernels do not write."""
    pack, row, parts = _packed_row(s, turned)
    cols = pack // parts
    grouped = s.axis == "token"
    if pack % parts or (grouped and (pack % s.group or s.group % cols)):
        raise Refused(f"rows of {pack} codes of {s.bits} bits with scales over {s.group}")
    tile, groups = parts << (cols - 1).bit_length(), pack // s.group if grouped else 1
    factor = s.factor if s.fit == "const_unbiased" else 1.0
    return Encoding(
        s.fit, s.kind, s.bits, s.width, s.axis, s.group, s.width // pack, row, parts, cols, tile, groups, factor
    )


def _packed_row(s: Side, turned: bool) -> tuple[int, int, int]:
    """(channels, elements, parts) of what is packed together."""
    by_table = s.fit in TABLES
    if by_table == turned and not s.scale2:
        if s.fit == "as_is":
            return s.width, s.width, 1
        if s.fit == "absmax" and s.kind in ("int8", "e4m3", "e5m2") and s.axis == "token":
            return s.group, s.group, 1
        if s.kind == "codes" and (s.fit == "minmax" or (by_table and s.pack == s.group == s.width)):
            return s.pack, packed_bytes(s.pack, s.bits), 8 // (s.bits & -s.bits)
    raise Refused(f"{s.kind} with fit {s.fit or 'none'!r}{' along a rotation' if turned else ''}")


class Writer:
    """One page format over the arrays of a cache class, for each of its layers.

    fmt, arrays, block, layers   as of Layers
    blocks   block rows of the arrays
    bad      int32, by the model's number of a layer: not 0 = a number there was not finite or does not fit its type,
             and its slots mean nothing. Set on the device, cleared by whoever reads it; nothing here waits for it
    appends, seals   whether it encodes tokens as they come (no scale spans tokens), and whole blocks
    refused  why it does neither
    """

    def __init__(
        self, fmt: Format, arrays: dict[str, Tensor], block: int, layers: list[int], blocks: int,
        bad: Tensor | None = None,
    ) -> None:  # fmt: skip
        device = arrays[fmt.v.codes].device
        self.block, self.layers, self.blocks = block, layers, blocks
        self.bad = torch.zeros(max(layers) + 1, dtype=torch.int32, device=device) if bad is None else bad
        self.appends = self.seals = False
        self.refused = ""
        try:
            if len(fmt.k) > 1:
                raise Refused(f"keys of {len(fmt.k)} parts")
            self.K, self.V = encoding(fmt.k[0], fmt.turn is not None), encoding(fmt.v, fmt.back is not None)
        except Refused as why:
            self.refused = str(why)
            return
        self.seals, self.appends = True, "block" not in (self.K.axis, self.V.axis)
        turn, turn_v = fmt.turn, None if fmt.back is None else fmt.back.mT
        self.k, self.v = _places(fmt.k[0], arrays, turn, layers), _places(fmt.v, arrays, turn_v, layers)
        self.turns = _head_step(turn), _head_step(turn_v)
        self.heads = max(1 if m is None else m.shape[1] for m in (turn, turn_v))
        most = TOKENS * max(E.tile for E in (self.K, self.V))
        self.warps = min(8, max(1, most // 512))  # sixteen numbers a thread

    def append(self, i: int, k: Tensor, v: Tensor, rows: Tensor) -> None:
        """Encode k, v [Hk, T, D] (any float type, last axis dense) into token rows int64 [Hk * T] of the class's
        arrays; a row of -1 is not written. i: index of the layer in its class."""
        assert k.stride(2) == v.stride(2) == 1 and rows.is_contiguous(), "keys and values with strides in a row"
        Hk, T, _ = k.shape
        if T:
            append[(-(-T // TOKENS), Hk, self.K.rows + self.V.rows)](
                k, v, self.k[i], self.v[i], rows, self.bad, self.layers[i], T, self.blocks * self.block,
                *k.stride()[:2], *v.stride()[:2], *self.turns, K=self.K, V=self.V, BT=TOKENS, BK=SUM,
                num_warps=self.warps, num_stages=2,
            )  # fmt: skip

    def seal(self, i: int, k: Tensor, v: Tensor, src: Tensor, dst: Tensor) -> None:
        """Encode block rows src int64 [M] of exact k, v [rows, B * D] to block rows dst int64 [M]; a pair with a -1 is
        left out. Where heads have rotations of their own, pair m is of kv head m % Hk."""
        assert k.is_contiguous() and v.is_contiguous() and len(k) == len(v), "exact blocks with gaps"
        k_jobs, v_jobs = self._jobs(self.K), self._jobs(self.V)
        if len(src):
            seal[(len(src), k_jobs + v_jobs)](
                k, v, self.k[i], self.v[i], src, dst, self.bad, self.layers[i], len(k), self.blocks, self.heads,
                *self.turns, K=self.K, V=self.V, B=self.block, K_JOBS=k_jobs, BT=TOKENS, BG=GROUP, BK=SUM,
                num_warps=self.warps, num_stages=2,
            )  # fmt: skip

    def _jobs(self, E: Encoding) -> int:
        """Programs of a block, as encode.put_block cuts it."""
        return E.rows * (self.block // E.group if E.axis == "block" else -(-self.block // TOKENS))


def _places(s: Side, arrays: dict[str, Tensor], turn: Tensor | None, layers: list[int]) -> list[Places]:
    """Of each layer of a class. turn: float32 [the model's layers, 1 | Hk, width, width]."""
    codes, scale, zero = (None if n is None else arrays[n] for n in (s.codes, s.scale, s.zero))
    table, edges, turn = (
        None if x is None else x.to(codes.device, torch.float32).contiguous() for x in (s.table, s.edges, turn)
    )
    return [Places(codes, scale, zero, table, edges, None if turn is None else turn[layer]) for layer in layers]


def _head_step(turn: Tensor | None) -> int:
    """Elements from a head's matrix to the next; 0 where heads share one."""
    return 0 if turn is None or turn.shape[1] == 1 else turn.shape[2] * turn.shape[3]
