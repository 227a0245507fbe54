"""The tracker that is always on: one JSON object per line in the run's folder, readable while the run goes on.

Lines: {"event": "start", ...}, {"event": "log", "step", "metrics"}, {"event": "table", "name", "rows"},
{"event": "artifact", "path", "type"}, {"event": "finish"}; each with `time`, ISO 8601 in UTC. Every line is flushed,
so that a killed run keeps all lines but at most its last. NaN and infinity are written as the strings JSON lacks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvlab.track.base import Run


class Jsonl:
    """`file`: name inside the run's folder."""

    def __init__(self, file: str = "events.jsonl"):
        self.file = file
        self._out = None
        self._folder = Path()

    def start(self, run: Run) -> None:
        self._folder = Path(run.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._out = open(self._folder / self.file, "a", encoding="utf-8")  # noqa: SIM115 (finish closes it)
        self._write(
            "start", run_id=run.id, name=run.name, tags=run.tags, group=run.group or run.recipe, job_type=run.job_type,
            config_hash=run.config_hash, config=run.config, provenance=run.provenance,
        )  # fmt: skip

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._write("log", step=step, metrics=metrics)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._write("table", name=name, rows=rows)

    def artifact(self, path: Path | str, type: str) -> None:
        path = Path(path)
        inside = path.is_absolute() and path.is_relative_to(self._folder.resolve())
        self._write("artifact", path=str(path.relative_to(self._folder.resolve()) if inside else path), type=type)

    def finish(self) -> None:
        if self._out is not None:
            self._write("finish")
            self._out.close()
            self._out = None

    def _write(self, event: str, **fields: Any) -> None:
        if self._out is None:
            raise RuntimeError(f"jsonl: {event} before start or after finish")
        line = {"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
        self._out.write(json.dumps(plain(line), ensure_ascii=False, allow_nan=False) + "\n")
        self._out.flush()


def plain(node: Any) -> Any:
    """Mappings, sequences and scalars of any library as JSON values."""
    if isinstance(node, Mapping):
        return {str(k): plain(node[k]) for k in node}
    if node is None or isinstance(node, str | bool | int):
        return node
    if isinstance(node, float):
        return float(node) if math.isfinite(node) else str(node)
    if isinstance(node, os.PathLike):
        return os.fspath(node)
    if hasattr(node, "tolist"):  # numpy and torch
        return plain(node.tolist())
    if isinstance(node, Sequence | set | frozenset):
        return [plain(v) for v in node]
    return str(node)
