"""What a tracker is told, and when. Trackers only listen: nothing they do changes a run (evaluation.md 13)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class Run:
    """One evaluation: a method on a task.

    `folder` is where the run writes; `group` is the recipe or sweep id that holds runs together; `job_type` is
    eval, speed or diagnose; `config` the resolved config; `provenance` {host, packages, code}.
    """

    id: str
    folder: Path
    method: str
    task: str
    config_hash: str
    family: str | None = None
    protocol: str | None = None
    recipe: str | None = None
    group: str | None = None
    job_type: str = "eval"
    config: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`<method>-<hash8>`, as trackers show it."""
        return f"{self.method}-{self.config_hash[:8]}"

    @property
    def tags(self) -> list[str]:
        return [t for t in dict.fromkeys((self.family, self.task, self.protocol)) if t]


@runtime_checkable
class Tracker(Protocol):
    """Order of calls: start, then any of log, table, artifact, then finish exactly once, also after a failed run."""

    def start(self, run: Run) -> None: ...

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Numbers under `eval/<task>/<metric>`, `memory/<category>` or `speed/<name>`.

        `step` is the token position of a stream; without it the numbers are the final ones of the run.
        """

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Flat dicts; `rows`, `samples` and `pareto` are the names in use."""

    def artifact(self, path: Path | str, type: str) -> None:
        """A file or folder to keep; `kvlab-result` for result.json, rows.csv, plots and config."""

    def finish(self) -> None: ...


MEMORY = (
    "ratio", "bits_per_element", "bytes_per_token", "kept", "physical", "payload", "metadata", "residual", "tables",
    "fragmentation", "shared", "temporary_peak", "static", "peak_bytes",
)  # fmt: skip
SPEED = ("prefill_tok_s", "decode_tok_s")
COUNTS = ("tokens_seen", "acc_n")


def keyed(summary: Mapping[str, Any], task: str) -> dict[str, float]:
    """The numbers of a summary row as `memory/<category>`, `speed/<name>` or `eval/<task>/<metric>`; no nulls."""
    out = {}
    for key, value in summary.items():
        if key in COUNTS or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        prefix = "memory" if key in MEMORY else "speed" if key in SPEED else f"eval/{task}"
        out[f"{prefix}/{key}"] = value
    return out
