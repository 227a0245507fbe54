"""What every task gets and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlab.cache.ledger import Ledger
from kvlab.errors import ConfigError
from kvlab.lab import Lab
from kvlab.tasks.progress import Progress


@dataclass(frozen=True)
class Bench:
    """One method on one model: `lab()` makes a fresh runtime for it, `full()` one for the full cache, same dtype."""

    lab: Callable[..., Lab]
    full: Callable[..., Lab]
    is_full: bool
    protocol: str
    seed: int
    progress: Progress

    def row(self, task: str, metric: str, value: float | None, n: int, **where: Any) -> dict[str, Any]:
        """A tidy row; the runner adds method, family and simulated."""
        return {
            "task": task,
            "metric": metric,
            "value": value,
            "n": n,
            "seed": self.seed,
            "protocol": self.protocol,
        } | where

    def document(self, task: str, metric: str, doc: int, value: float, count: int, **where: Any) -> dict[str, Any]:
        """One document's figure (a sum over `count` positions, or a score with count 1), for paired comparisons."""
        head = {"task": task, "metric": metric, "doc": doc, "value": value, "count": count}
        return head | {"seed": self.seed, "protocol": self.protocol} | where


@dataclass
class Outcome:
    """rows: one flat dict per (task, metric, length, depth, seed). summary: columns of the method's table row.
    documents: one dict per document, for paired comparisons. acted: the method encoded or evicted something."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    documents: list[dict[str, Any]] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)
    acted: bool = False
    label: str = ""
    family: str = ""
    warnings: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.rows += other.rows
        self.documents += other.documents
        self.data += other.data
        self.summary |= {k: v for k, v in other.summary.items() if v is not None}
        self.acted |= other.acted


def whole(task: Mapping[str, Any], key: str, least: int = 1) -> int:
    """A whole number of the task's options. ConfigError below `least`."""
    value = int(task[key])
    if value < least:
        raise ConfigError(f"task.{key}={value} must be {least} or more")
    return value


def wholes(task: Mapping[str, Any], key: str) -> list[int]:
    """A list of whole numbers, each 1 or more; at least one of them."""
    values = [int(x) for x in task[key]]
    if not values or min(values) < 1:
        raise ConfigError(f"task.{key}={values} must be a list of numbers that are 1 or more")
    return values


Task = Callable[[Bench, Mapping[str, Any]], Outcome]


def ledger_columns(lab: Lab, total: Ledger) -> dict[str, Any]:
    """Columns of the memory part of a summary row, bytes from live storages."""
    slots = lab.geom.L * lab.geom.Hk * total.tokens
    names = ("physical", "payload", "metadata", "residual", "tables", "fragmentation", "shared", "static")
    return {
        **{name: getattr(total, name) for name in names},
        "temporary_peak": total.temporary,
        "tokens_seen": total.tokens,
        "ratio": total.ratio(lab.reference_bytes),
        "bits_per_element": total.bits_per_element or None,
        "bytes_per_token": total.bytes_per_token,
        "kept": total.kept_slots / slots if slots else None,
    }
