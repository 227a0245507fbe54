"""Weights & Biases: offline unless WANDB_API_KEY is set, so that no account is ever needed.

An offline run lies in `<run folder>/wandb/offline-run-*`; `wandb sync <that folder>` uploads it later. One run per
(method, task): name `<method>-<hash8>`, group = recipe or sweep id, tags = family, task, protocol, config = resolved
config + provenance. Streams are plotted over `position` (token position); final numbers go to the run's summary.
Files of one type form one artifact, logged at the end: `result-<hash12>` for type `kvlab-result`, aliases `latest`
and the recipe id. Samples: the first 50, texts cut at 2,000 characters.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.errors import ConfigError
from kvlab.track.base import Run
from kvlab.track.jsonl import plain

SAMPLES = 50
TEXT = 2000


class Wandb:
    """`mode`: offline, online or disabled; None decides by WANDB_API_KEY. `group` overrides recipe and sweep id."""

    def __init__(
        self,
        project: str = "kvlab",
        mode: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
    ):
        if mode not in (None, "offline", "online", "disabled"):
            raise ConfigError(f"wandb: mode={mode!r} is not one of offline, online, disabled")
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "wandb: the package is not installed. Use `pip install kvlab[wandb]`, or logger=jsonl, which needs "
                "nothing and is always on."
            )
        self.project, self.entity, self.group, self.tags = project, entity, group, list(tags)
        self.mode = mode or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run: Any = None
        self._about: Run | None = None
        self._files: dict[str, list[Path]] = {}

    def start(self, run: Run) -> None:
        import wandb

        Path(run.folder).mkdir(parents=True, exist_ok=True)
        self._about = run
        facts = {"provenance": run.provenance, "config_hash": run.config_hash, "method_label": run.method}
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group or run.group or run.recipe,
            job_type=run.job_type,
            name=run.name,
            tags=[t[:64] for t in dict.fromkeys([*run.tags, *self.tags])],  # 64: the service's limit
            config=plain({**run.config, **facts}),
            dir=str(run.folder),
            mode=self.mode,
            reinit="create_new",  # a sweep runs many in one process
            settings=wandb.Settings(
                silent=True, console="off", disable_code=True, disable_git=True, x_disable_stats=True
            ),
        )
        self._run.define_metric("*", step_metric="position")

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if step is None:
            self._run.summary.update(plain(metrics))
        else:
            self._run.log({**plain(metrics), "position": step})

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        if name == "samples":
            rows = [{k: v[:TEXT] if isinstance(v, str) else v for k, v in r.items()} for r in rows[:SAMPLES]]
        columns = list(dict.fromkeys(k for r in rows for k in r))
        data = [[plain(r.get(c)) for c in columns] for r in rows]
        self._run.log({name: wandb.Table(columns=columns, data=data, allow_mixed_types=True)})

    def artifact(self, path: Path | str, type: str) -> None:
        if not Path(path).exists():
            raise FileNotFoundError(f"no file {path} to keep")
        self._files.setdefault(type, []).append(Path(path))

    def finish(self) -> None:
        if self._run is None:
            return
        try:
            for type, paths in self._files.items():
                self._log_artifact(type, paths)
        finally:
            self._run.finish()
            self._run, self._files = None, {}

    def _log_artifact(self, type: str, paths: Sequence[Path]) -> None:
        import wandb

        stem = "result" if type == "kvlab-result" else _safe(type)
        about = self._about
        artifact = wandb.Artifact(f"{stem}-{about.config_hash}", type=type, metadata=plain(about.provenance))
        for path in paths:
            add = artifact.add_dir if path.is_dir() else artifact.add_file
            add(str(path), name=path.name)
        self._run.log_artifact(artifact, aliases=["latest", *([_safe(about.recipe)] if about.recipe else [])])


def _safe(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)
