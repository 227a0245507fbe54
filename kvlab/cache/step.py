"""One step: which rows of the packed `[1, T]` batch belong to which sequence, and what each row may see.

Built once a step by the engine from plain arrays; methods and kernels only read it.
Rows are grouped into **buckets** of equal padded length (1, then powers of two from 16 up), so that attention runs on
rectangles whose shapes depend on a sequence alone, never on who shares the batch, and so that no loop runs over
sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PREFILL, PREFILL_LAST, DECODE = 0, 1, 2
MIN_BUCKET = 16


@dataclass(frozen=True)
class Bucket:
    """Sequences of a step whose query rows are padded to `rows` rows each.

    members  int64 [Nb]        index into the step's sequences
    take     int64 [Nb*rows]   packed row of each padded row; padding repeats the last real one
    keep     int64 [k] | None  flat index (into Nb*rows) of the real rows; None = all are real
    target   int64 [k]         packed row of each real row
    """

    rows: int
    members: np.ndarray
    take: Tensor
    keep: Tensor | None
    target: Tensor
    prefill: bool


class Step:
    """N sequences with q_len[n] new tokens each; T = sum(q_len) packed rows in the order of the sequences.

    cache_rows int64 [N]  row of each sequence in the cache's tables
    q_len      int64 [N]  new tokens
    start      int64 [N]  position (tokens seen before this step)
    phase      int8  [N]  PREFILL, PREFILL_LAST (the context ends with this step) or DECODE
    context    int64 [N]  length of the context: a "prefill_end" pruner acts when it is complete
    """

    def __init__(
        self,
        cache_rows: np.ndarray,
        q_len: np.ndarray,
        start: np.ndarray,
        phase: np.ndarray,
        context: np.ndarray,
        device: torch.device | str = "cpu",
    ) -> None:
        self.cache_rows, self.q_len, self.start, self.phase, self.context = cache_rows, q_len, start, phase, context
        self.device = torch.device(device)
        self.N, self.T = len(q_len), int(q_len.sum())
        self.cu = np.zeros(self.N + 1, np.int64)  # packed row where each begins, and T
        np.cumsum(q_len, out=self.cu[1:])
        self.row_seq, self.row_at, self.positions = self._rows()
        self.buckets = self._buckets()

    def _rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each packed row, [T]: its sequence, its row within that, its position."""
        if self.T == self.N and self.q_len.all():  # a token each
            return self.cu[:-1], np.zeros(self.T, np.int64), self.start
        seq = np.repeat(np.arange(self.N), self.q_len)
        at = np.arange(self.T) - self.cu[:-1][seq]
        return seq, at, self.start[seq] + at

    def _buckets(self) -> list[Bucket]:
        found: dict[tuple[int, bool], list[int]] = {}
        for n, (length, phase) in enumerate(zip(self.q_len.tolist(), self.phase.tolist())):
            rows = 1 if length == 1 else 1 << (max(length, MIN_BUCKET) - 1).bit_length()
            found.setdefault((rows, phase != DECODE), []).append(n)
        return [self._bucket(rows, np.array(found[rows, prefill]), prefill) for rows, prefill in sorted(found)]

    def _bucket(self, rows: int, members: np.ndarray, prefill: bool) -> Bucket:
        if rows == 1:
            take = self.tensor(self.cu[members])
            return Bucket(1, members, take, None, take, prefill)
        at = np.arange(rows)[None]
        real = at < self.q_len[members][:, None]
        take = self.cu[members][:, None] + np.minimum(at, self.q_len[members][:, None] - 1)
        keep = None if real.all() else self.tensor(np.nonzero(real.ravel())[0])
        return Bucket(rows, members, self.tensor(take.ravel()), keep, self.tensor(take[real]), prefill)

    def tensor(self, array: np.ndarray) -> Tensor:
        """A host array on the step's device (a fresh buffer every step: an old one may still be being read)."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
