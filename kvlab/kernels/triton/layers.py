"""Kernels bound to the arrays of a cache class: the same entry points as the CPU's (kernels/cpu/attend.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from kvlab.kernels.backend import block_rows
from kvlab.kernels.format import Format
from kvlab.kernels.triton import move, sides
from kvlab.kernels.triton.attend import attend
from kvlab.kernels.triton.mass import mass
from kvlab.kernels.triton.merge import merge
from kvlab.kernels.triton.tiles import SPLIT, attend_tiles
from kvlab.kernels.triton.writer import Writer

ALIGNED = 4  # arrays begin at multiples of 16 bytes: Triton compiles a kernel anew for pointers that do not
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, eq=False)
class View:
    """Rows of N sequences and what each sees, on the device.

    table   int32 [N, groups, blocks]  block ids       lo, hi  int32 [N, groups, rows]  slots [lo, hi) of each row
    first   int32 [N]  where a sequence's first query row is     count  int32 [N]  its rows (1 = a decoding row)
    most    the most rows that a sequence has
    """

    table: Tensor
    lo: Tensor
    hi: Tensor
    first: Tensor
    count: Tensor
    most: int

    @property
    def blocks(self) -> int:
        return self.table.shape[2]

    @classmethod
    def of(
        cls, table: np.ndarray, lo: np.ndarray, hi: np.ndarray, first: np.ndarray, count: np.ndarray,
        device: torch.device | str = "cpu",
    ) -> View:  # fmt: skip
        """One copy to the device: the arrays lie in a buffer of their own, which no later step writes."""
        arrays = [np.asarray(a) for a in (table, lo, hi, first, count)]
        sizes = [-(-a.size // ALIGNED) * ALIGNED for a in arrays]
        flat = np.zeros(sum(sizes), np.int32)
        for part, a in zip(np.split(flat, np.cumsum(sizes)[:-1]), arrays):
            part[: a.size] = a.ravel()
        parts = [x[: a.size].view(a.shape) for x, a in zip(torch.from_numpy(flat).to(device).split(sizes), arrays)]
        return cls(*parts, most=int(count.max()) if count.size else 0)


def interpreted() -> bool:
    """Whether kernels run in triton's interpreter, on any device."""
    return not isinstance(attend, JITFunction)


class Kernels:
    """A GPU's `Backend` (kernels/backend.py).

    A float32 model's products are float32 (fast: 16-bit operands, tf32 for float32 pages); a 16-bit model's are 16 bits
    wide, as its own are. Sums are float32.
    """

    name, whole, fixes = "triton", False, True

    def __init__(self, device: torch.device | str, fast: bool = False) -> None:
        self.device, self.fast = torch.device(device), fast
        self.flags: list[Tensor] = []  # of all that was bound: nobody waits for them but `bad`

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype in TYPES

    def layers(self, *args, dtype: torch.dtype, **named) -> Layers:
        made = Layers(*args, **named, exact=dtype == torch.float32 and not self.fast)
        self.flags.append(made.writer.bad)
        return made

    move_rows, copy_blocks = staticmethod(move.move_rows), staticmethod(move.copy_blocks)

    def bad(self) -> list[int]:
        if not self.flags or not torch.cat(self.flags).any():
            return []
        layers = sorted({i for x in self.flags for i in x.nonzero().flatten().tolist()})
        for x in self.flags:
            x.zero_()
        return layers

    def view(self, *arrays: np.ndarray) -> View:
        return View.of(*arrays, device=self.device)

    def fixed(self, table: Tensor, lo: Tensor, hi: Tensor, first: Tensor, count: Tensor) -> View:
        return View(table, lo, hi, first, count, most=1)


class Layers:
    """One page format over the arrays of a cache class, for each of its layers. Arguments as of the CPU's; exact:
    float32 products, else 16-bit operands and float32 sums."""

    def __init__(
        self, fmt: Format, arrays: dict[str, Tensor], block: int, layers: list[int], group_of: np.ndarray,
        offset: np.ndarray, stride: int, capacity: int, G: int, scale: float, exact: bool = True,
    ) -> None:  # fmt: skip
        if len(fmt.k) > 2:
            raise sides.Refused(f"a key has {len(fmt.k)} parts, the kernels hold 2")
        if block & (block - 1) or block < 16:
            raise sides.Refused(f"blocks of {block} tokens: runtime.block must be a power of two, 16 or more")
        if fmt.v.axis == "block":
            raise sides.Refused("values with scales over tokens")
        device = arrays[fmt.v.codes].device
        self.fmt, self.block, self.layers, self.stride, self.capacity = fmt, block, layers, stride, capacity
        self.G, self.Hk, self.scale, self.exact = G, group_of.shape[1], scale, exact
        self.capability = 0 if interpreted() else sides.capability(device)
        self.K = [sides.spec(s, self.capability > 0) for s in fmt.k]
        self.V = sides.spec(fmt.v, self.capability > 0)
        self.k = [sides.pointers(s, arrays) for s in fmt.k]
        self.v = sides.pointers(fmt.v, arrays)
        self.valid = fmt.valid and arrays[fmt.valid]
        self.writer = Writer(fmt, arrays, block, layers, block_rows(offset, stride, capacity))
        self.compute, self.precision = sides.compute(fmt, arrays, exact)
        wide = ((0, 0), (0, -self.Hk % ALIGNED))
        self.group_of = torch.from_numpy(np.pad(group_of, wide).astype(np.int32)).to(device)
        self.offset = torch.from_numpy(np.pad(offset, wide).astype(np.int64)).to(device)
        self.turn, self.back = (None if m is None else m.to(device) for m in (fmt.turn, fmt.back))

    @property
    def words(self) -> int:
        """What 16-bit operands take: 1 keys, 2 values, 3 both, 0 nothing."""
        return 0 if self.exact else 3

    # -- writing -------------------------------------------------------------------------------------------------
    @property
    def appends(self) -> bool:
        return self.writer.appends

    @property
    def seals(self) -> bool:
        return self.writer.seals

    def append(self, i: int, k: Tensor, v: Tensor, rows: Tensor) -> bool:
        """Encode k, v [Hk, T, D] into token rows int64 [Hk * T]; -1 = nowhere. Bad numbers: Kernels.bad."""
        self.writer.append(i, k, v, rows)
        return True

    def seal(self, i: int, k: Tensor, v: Tensor, src: Tensor, dst: Tensor) -> bool:
        """Encode block rows src of exact k, v [rows, B * D] to block rows dst; -1 = leave out."""
        self.writer.seal(i, k, v, src, dst)
        return True

    # -- reading -------------------------------------------------------------------------------------------------
    def attend(self, i: int, view: View, q: Tensor, out: Tensor, lse: Tensor, join: bool = False) -> None:
        """Fills out and lse, or joins them with what they hold. i: index of the layer in its class.

        q [rows, H, D] and out of any float type, lse float32 [rows, H]: strided views whose row axis is what View.first
        counts in; the last axis of q and out is dense.
        """
        turned = self._turned(i, q)
        if self.back is None:
            self._attend(i, view, turned, out, lse, join)
            return
        body = torch.empty((*q.shape[:2], self.V.width), dtype=torch.float32, device=q.device)
        body_lse = torch.empty_like(lse)
        self._attend(i, view, turned, body, body_lse, False)
        self._merge(view, self._times(body, self.back[self.layers[i]])[None], body_lse[None], out, lse, join)

    def mass(self, i: int, view: View, q: Tensor, lse: Tensor, columns: int) -> Tensor:
        """Attention weight that each slot received, float32 [N, Hk, G, columns]. q, lse as in `attend`."""
        return mass(self, i, view, q, lse, columns)

    def _turned(self, i: int, q: Tensor) -> Tensor:
        return q if self.turn is None else self._times(q.float(), self.turn[self.layers[i]])

    def _times(self, x: Tensor, m: Tensor) -> Tensor:
        """x [rows, H, D] @ m [1 | Hk, D, E], a kv head's matrix for all of its query heads."""
        if len(m) == 1:
            return x @ m[0]
        return torch.einsum("rhgd,hde->rhge", x.unflatten(1, (self.Hk, self.G)), m).flatten(1, 2)

    def _attend(self, i: int, view: View, q: Tensor, out: Tensor, lse: Tensor, join: bool) -> None:
        decode = view.most == 1
        t = attend_tiles(self.fmt, self.block, self.G, decode, self.exact, self.capability)
        N, groups, blocks = view.table.shape
        splits = max(1, -(-blocks * self.block // SPLIT)) if decode else 1
        to, to_lse = out[None], lse[None]
        if splits > 1 or join:
            to = torch.empty((splits, *out.shape), dtype=torch.float32, device=q.device)
            to_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device)
        if N and view.most:
            attend[(splits * -(-view.most // t.tokens), self.Hk, N)](
                q, to, to_lse, self.k[0], self.k[1] if len(self.k) > 1 else None, self.v, self.valid, view.table,
                view.lo, view.hi, view.first, view.count, self.group_of[i], self.offset[i], q.stride(0), q.stride(1),
                *to.stride()[:3], *to_lse.stride(), blocks, groups, view.lo.shape[2], splits, self.stride, self.scale,
                K=self.K[0], K2=self.K[1] if len(self.K) > 1 else None, V=self.V, B=self.block, G=self.G,
                TOKENS=t.tokens, BM=t.rows, BN=t.slots, SPLIT=SPLIT if splits > 1 else 0, CT=TYPES[self.compute],
                IP=self.precision, **t.options,
            )  # fmt: skip
        if to.data_ptr() != out.data_ptr():
            self._merge(view, to, to_lse, out, lse, join)

    @staticmethod
    def _merge(view: View, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor, join: bool) -> None:
        _, H, W = out.shape
        merge[(view.most, H, len(view.count))](
            part, part_lse, out, lse, view.first, view.count, *part.stride()[:3], *part_lse.stride(),
            *out.stride()[:2], *lse.stride(),
            len(part), W=W, PAD=1 << (W - 1).bit_length(), BS=8, JOIN=join, num_warps=2,
        )  # fmt: skip
