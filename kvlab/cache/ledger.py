"""Every byte the runtime holds for KV, counted from live storages. Formulas live only in tests.

logical       codes and metadata of the kept slots, packed with no waste        payload + metadata
payload       codes, kept vectors            metadata   scales, norms, scores, per-sequence state
residual      exact tail, not yet encoded    tables     block tables and counters
fragmentation allocated block bytes - bytes in use inside them
physical      payload + metadata + residual + tables + fragmentation = bytes held for live sequences
shared        part of physical that more than one sequence references
reserved      the pool's preallocated storages: (used + free + cached) x block bytes, null block apart
temporary     scratch buffers alive inside a step        static   method-wide constants, not per token
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np
import torch

from kvlab.cache.arrays import Arrays
from kvlab.cache.paged import PagedCache
from kvlab.cache.pool import BlockPool
from kvlab.cache.tables import ClassTables


@dataclass(frozen=True)
class Ledger:
    """Bytes; `tokens` = tokens seen by the sequences counted (not kept), so eviction shows as savings."""

    payload: float = 0
    metadata: float = 0
    residual: float = 0
    tables: float = 0
    fragmentation: float = 0
    shared: float = 0
    reserved: int = 0
    temporary: int = 0
    static: int = 0
    tokens: int = 0
    kept_slots: float = 0  # kept (layer, head, token) slots
    elements: float = 0  # scalars of K and V held, exact tail included
    code_bytes: float = 0  # payload + metadata of the encoded slots alone
    code_elements: float = 0

    @property
    def physical(self) -> float:
        return self.payload + self.metadata + self.residual + self.tables + self.fragmentation

    @property
    def logical(self) -> float:
        return self.payload + self.metadata

    @property
    def bytes_per_token(self) -> float:
        return self.physical / self.tokens if self.tokens else 0.0

    def ratio(self, reference_bytes_per_token: int) -> float:
        """Full cache in the reference dtype / physical. Above 1 is smaller."""
        return reference_bytes_per_token * self.tokens / self.physical if self.physical else 0.0

    @property
    def bits_per_element(self) -> float:
        """Stored bits of the encoded slots, metadata included, per K or V scalar."""
        return 8 * self.code_bytes / self.code_elements if self.code_elements else 0.0

    def as_dict(self) -> dict[str, float]:
        return asdict(self) | {"physical": self.physical, "logical": self.logical}


@dataclass(frozen=True)
class LedgerReport:
    """`sequences` one ledger each (shared blocks count 1/owners), `total` their sum, `reference` full-cache B/token."""

    sequences: list[Ledger]
    total: Ledger
    reference: int

    @property
    def ratio(self) -> float:
        return self.total.ratio(self.reference)

    def __str__(self) -> str:
        t = self.total
        lines = [
            f"{t.tokens:,} tokens in {len(self.sequences)} sequences: {t.physical:,.0f} bytes, "
            f"{t.bytes_per_token:,.0f} B/token, ratio {self.ratio:.2f} (full float16 cache / these bytes)"
        ]
        for name in ("payload", "metadata", "residual", "tables", "fragmentation"):
            lines.append(f"  {name:14s} {getattr(t, name):14,.0f}")
        lines.append(
            f"  shared {t.shared:,.0f}   static {t.static:,}   reserved {t.reserved:,}   temporary {t.temporary:,}"
        )
        return "\n".join(lines)


def sum_ledgers(ledgers: list[Ledger]) -> Ledger:
    """Categories add up; pool-wide figures (reserved, temporary, static) are the largest seen."""
    if not ledgers:
        return Ledger()
    wide = ("reserved", "temporary", "static")
    return Ledger(
        **{
            f.name: (max if f.name in wide else sum)(getattr(led, f.name) for led in ledgers)  # type: ignore[operator]
            for f in fields(Ledger)
        }
    )


def measure(cache: PagedCache, rows: list[int] | None = None, tokens: dict[int, int] | None = None, static: int = 0):
    """Ledger of the given rows (all live ones by default). A block that k sequences hold counts 1/k for each of
    them, so that per-sequence ledgers add up to the pool. tokens: {row: tokens seen}."""
    live = sorted(set(range(cache.size.max_seqs)) - set(cache.free_rows)) if rows is None else rows
    total = dict.fromkeys(("payload", "metadata", "residual", "fragmentation", "shared", "kept", "el", "cb", "ce"), 0.0)
    tables = 0
    reserved = 0
    for t in cache.classes:
        _class(cache, t, live, total)
        reserved += t.arrays.nbytes() + (t.tail_arrays.nbytes() if t.tail is not None else 0)
        tables += len(live) * _row_bytes(t)
    for s in cache.state.values():
        total["metadata"] += s.untyped_storage().nbytes() // s.shape[0] * len(cache.state_rows & set(live))
        reserved += s.untyped_storage().nbytes()
    return Ledger(
        payload=total["payload"],
        metadata=total["metadata"],
        residual=total["residual"],
        tables=tables,
        fragmentation=total["fragmentation"],
        shared=total["shared"],
        reserved=reserved,
        temporary=cache.scratch.bytes(),
        static=static,
        tokens=sum((tokens or {}).get(r, 0) for r in live),
        kept_slots=total["kept"],
        elements=total["el"],
        code_bytes=total["cb"],
        code_elements=total["ce"],
    )


def _row_bytes(t: ClassTables) -> int:
    """Host bytes of one row's tables and counters."""
    arrays = [a for a in (t.body, t.tail, t.n_slots, t.sealed, t.evicted) if a is not None]
    return sum(a.nbytes // a.shape[0] for a in arrays)


def _class(cache: PagedCache, t: ClassTables, live: list[int], total: dict[str, float]) -> None:
    pairs = t.places
    D = cache.plan.geom.D
    for table, pool, arrays, is_tail in (
        (t.body, t.pool, t.arrays, False),
        *([(t.tail, t.tail_pool, t.tail_arrays, True)] if t.tail is not None else []),
    ):
        per_slot, per_block = _split(arrays)
        for row in live:
            for g in range(len(t.groups)):
                ids = table[row, g][table[row, g] > 0]
                if not len(ids):
                    continue
                ref = np.array([pool.ref[b] for b in ids.tolist()], np.float64)
                n, sealed = int(t.n_slots[row, g]), int(t.sealed[row, g])
                slots = n - sealed if is_tail else sealed
                filled = np.minimum(cache.plan.block, slots - cache.plan.block * np.arange(len(ids)))
                share = float((filled / ref).sum())
                blocks = float((1 / ref).sum())
                payload = pairs * (share * per_slot["payload"] + blocks * per_block["payload"])
                metadata = pairs * (share * per_slot["metadata"] + blocks * per_block["metadata"])
                held = blocks * arrays.block_bytes
                total["fragmentation"] += held - payload - metadata
                total["shared"] += float((arrays.block_bytes / ref)[ref > 1].sum())
                total["kept"] += pairs * slots
                total["el"] += 2 * D * pairs * slots
                if is_tail:
                    total["residual"] += payload
                    total["metadata"] += metadata
                else:
                    total["payload"] += payload
                    total["metadata"] += metadata
                    total["cb"] += payload + metadata
                    total["ce"] += 2 * D * pairs * share


def _split(arrays: Arrays) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes by role of one slot, and of one block's block-scope regions, for one (layer, head)."""
    slot, block = {"payload": 0, "metadata": 0}, {"payload": 0, "metadata": 0}
    for r in arrays.regions.values():
        (slot if r.scope == "token" else block)[r.role] += r.bytes(1)
    return slot, block


def live_blocks_bytes(cache: PagedCache) -> dict[str, int]:
    """{"used", "free", "cached", "null"} block bytes over all pools; they add up to the live storages."""
    out = dict.fromkeys(("used", "free", "cached", "null"), 0)
    for t in cache.classes:
        pools: list[tuple[BlockPool, Arrays]] = [(t.pool, t.arrays)]
        if t.tail is not None:
            pools.append((t.tail_pool, t.tail_arrays))
        for pool, arrays in pools:
            for name, count in (("used", pool.used), ("free", pool.n_free), ("cached", pool.n_lru), ("null", 1)):
                out[name] += count * arrays.block_bytes
    return out


def reference_dtype() -> torch.dtype:
    """float16, also when the run is in float32: printed in every table."""
    return torch.float16
