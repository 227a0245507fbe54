"""Run methods on a task: load the weights once, measure the full cache once, write results.

A Session lives as long as the process's command: an in-process sweep shares its weights and its reference rows.
"""

from __future__ import annotations

import importlib
import itertools
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvlab.errors import ConfigError, MethodNeverActed
from kvlab.host import busy_cores
from kvlab.tasks.progress import Progress

TASKS = ("overview", "fidelity", "needle", "passkey", "speed", "memory")
Config = Mapping[str, Any]


@dataclass
class Session:
    """`folder` of each finished run in `folders`; `models` keeps weights, `baselines` the full cache's outcomes."""

    progress: Progress
    folders: list[Path] = field(default_factory=list)
    baselines: dict[str, Any] = field(default_factory=dict)
    models: Any = None
    threads: int | None = None  # what `threads: null` came to

    def run(self, config: Config, folder: Path, overrides: list[str] | None = None) -> dict:
        """One method on one task: returns the result; writes result.json, rows.csv, documents.jsonl, plots and events.

        Raises ConfigError and the other KvlabErrors before anything is measured; MethodNeverActed when all is written.
        """
        if self.models is None:  # the imports below take seconds the first time
            self.progress.say(f"starting: {config['model']['name']}, task {config['task']['name']}")
        from kvlab import registry
        from kvlab.report import result as results
        from kvlab.track import make

        task = config["task"]
        if task["name"] not in TASKS:
            raise ConfigError(f"task={task['name']!r} is unknown; there are {', '.join(TASKS)}")
        check_kinds(config)
        method = config.get("method")
        probe = registry.build(method)  # a wrong option fails before weights load
        self._runtime_kinds(config)
        tracker = make(config.get("logger") or {})
        self._threads(config.get("threads"))
        started = datetime.now(UTC)
        loaded = self._model(config["model"])
        self._fits(probe, loaded, config)
        is_full, outcomes = probe.family == "full", {}
        if config.get("baseline", True) or self._plain(method):
            outcomes["full"] = self._baseline(config, loaded)
        if not self._plain(method):
            outcomes["method"] = self._measure(config, loaded, method)
        body = self._result(config, loaded, outcomes, started, overrides or [])
        self._write(body, outcomes, folder, config, tracker, results)
        acted = all(o.acted for name, o in outcomes.items() if name == "method")
        if not is_full and not acted and not config.get("allow_noop"):
            raise MethodNeverActed(
                f"{probe.label()} never acted: no block was encoded and no token evicted in any request, so its row in "
                f"{folder} says nothing. Lower its budget or window, use longer inputs, or set allow_noop=true."
            )
        return body

    @staticmethod
    def _plain(method: Any) -> bool:
        """Is this the reference itself: the full cache in the model's own dtype?"""
        return method is None or (
            isinstance(method, Mapping)
            and str(method.get("_target_", "")).endswith(".Full")
            and method.get("dtype", "model") == "model"
        )

    def _threads(self, n: int | None) -> None:
        """Set torch's threads. null: the cores that nobody else uses, decided once per process: threads that wait for a
        core that another program holds make a step many times slower."""
        import torch

        if n is None:
            if self.threads is None:
                cores = torch.get_num_threads()
                self.threads = max(1, cores - busy_cores())
                if self.threads < cores:
                    self.progress.say(f"{self.threads} of {cores} threads: other programs are busy (threads=N decides)")
            n = self.threads
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ConfigError(f"threads={n} must be a whole number, 1 or more; null = the cores that are free")
        torch.set_num_threads(n)

    def _model(self, cfg: Config):
        from kvlab.models.load import ModelCache, ModelCfg

        if self.models is None:
            self.models = ModelCache()
        self.progress.say(f"loading {cfg['name']} ...")
        return self.models.get(ModelCfg(**cfg))

    def _runtime_kinds(self, config: Config) -> None:
        from kvlab.engine.config import EngineCfg
        from kvlab.models.weights import check_kind
        from kvlab.registry import check_types

        check_kind(config["runtime"].get("weights", "model"))
        check_types(EngineCfg, {k: v for k, v in config["runtime"].items() if v is not None}, "runtime.")

    def _runtime(self, config: Config, loaded, **least: int):
        """EngineCfg of a task: its own needs win over `runtime` where the config leaves room (max_len: null)."""
        from kvlab.engine.config import EngineCfg

        values = dict(config["runtime"])
        wanted = values.pop("max_len", None)
        values["max_seqs"] = least.get("max_seqs", values["max_seqs"])
        values["max_batch_tokens"] = max(values["max_batch_tokens"], values["max_seqs"])
        need = least.get("max_len", 2048)
        if need > loaded.max_length:
            raise ConfigError(
                f"{loaded.id} takes {loaded.max_length} positions, the task needs {need}. "
                "Shorten task.lengths or task.context."
            )
        if wanted is not None and wanted < need:
            raise ConfigError(
                f"runtime.max_len={wanted} is below the {need} positions that the task needs; raise it or drop it"
            )
        return EngineCfg(max_len=wanted or need, **values)

    def _fits(self, probe, loaded, config: Config) -> None:
        """Method, model and block must fit before anything runs."""
        from kvlab.models.geometry import geometry

        probe.plan(geometry(loaded.model, loaded.id), int(config["runtime"]["block"]))

    def _measure(self, config: Config, loaded, method: Any):
        from kvlab import registry
        from kvlab.lab import Lab
        from kvlab.tasks.base import Bench

        used = []

        def lab(of: Any, **least: int) -> Lab:
            used.append(registry.build(of))
            return Lab(loaded, used[-1], self._runtime(config, loaded, **least))

        task = importlib.import_module(f"kvlab.tasks.{config['task']['name']}")
        bench = Bench(
            lab=lambda **least: lab(method, **least),
            full=lambda **least: lab(None, **least),
            is_full=self._plain(method),
            protocol=config["protocol"]["name"],
            seed=int(config["seed"]),
            progress=self.progress,
        )
        import torch

        torch.set_grad_enabled(False)
        outcome = task.run(bench, config["task"])
        compressor = registry.build(method)
        if not self._plain(method):  # full in a dtype of its own is another row than the reference
            self._fits(compressor, loaded, config)
        for row in outcome.rows + outcome.documents:
            row.update(method=compressor.label())
        outcome.label, outcome.family = compressor.label(), compressor.family
        outcome.warnings = sorted({c.packed.warning for c in used if c.packed is not None and c.packed.warning})
        return outcome

    def _baseline(self, config: Config, loaded):
        """The full cache's outcome, measured once per (model, runtime, task, protocol, seed)."""
        key = json.dumps(
            {k: _plain(v) for k, v in config.items() if k not in ("method", "logger", "out")}, sort_keys=True
        )
        if key not in self.baselines:
            self.baselines[key] = self._measure(config, loaded, None)
        return self.baselines[key]

    def _result(self, config: Config, loaded, outcomes: dict, started: datetime, overrides: list[str]) -> dict:
        import torch

        from kvlab.report import result as results

        full = outcomes.get("full")
        summary, rows, data = [], [], []
        for outcome in outcomes.values():
            rows += [results.row(**(r | {"family": outcome.family})) for r in outcome.rows]
            columns = dict(outcome.summary)
            if columns.get("acc") is not None and full is not None and full.summary.get("acc") is not None:
                columns["acc_delta"] = columns["acc"] - full.summary["acc"]
                columns |= _interval(outcome, full)
            summary.append(results.summary_row(method=outcome.label, family=outcome.family, **columns))
            data = data or outcome.data
        plain = _plain(config)
        facts = results.provenance()
        return {
            "schema": results.SCHEMA_VERSION,
            "run_id": f"{started:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}",
            "started": started.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": facts["host"],
            "threads": torch.get_num_threads(),
            "code": facts["code"],
            "packages": facts["packages"],
            "config": plain,
            "config_hash": results.config_hash(plain),
            "overrides": overrides,
            "recipe_id": None,
            "seeds": {"seed": config["seed"]},
            "model": {
                "id": loaded.id,
                "source": loaded.source,
                "weights_sha256": loaded.weights_sha256,
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "tokenizer_sha256": loaded.tokenizer_sha256,
                "chat_template_sha256": loaded.chat_template_sha256,
            },
            "attention_backend": "kvlab",
            "kernels": _kernels(config) | _step(config["runtime"], loaded),
            "data": data,
            "protocol": config["protocol"]["name"],
            "ledger": {o.label: {k: v for k, v in o.summary.items() if k in _LEDGER} for o in outcomes.values()},
            "per_request": "documents.jsonl",
            "rows": rows,
            "summary": summary,
            "warnings": sorted({w for o in outcomes.values() for w in o.warnings}),
        }

    def _write(self, body: dict, outcomes: dict, folder: Path, config: Config, tracker, results) -> None:
        from kvlab.report import combine
        from kvlab.track import Run, keyed

        self.progress.start("tables and plots", 1)
        folder.mkdir(parents=True, exist_ok=True)
        documents = list(itertools.chain(*(o.documents for o in outcomes.values())))
        (folder / "documents.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents), encoding="utf-8")
        results.write(body, folder)
        files = combine.write(combine.combine([(str(folder / "result.json"), body)]), folder)
        self.folders.append(folder)
        head, task = body["summary"][-1], config["task"]["name"]
        run = Run(
            id=body["run_id"], folder=folder, method=head["method"], task=task, config_hash=body["config_hash"],
            family=head["family"], protocol=body["protocol"], config=body["config"],
            provenance={k: body[k] for k in ("host", "packages", "code")},
            job_type="speed" if task == "speed" else "eval",
        )  # fmt: skip
        tracker.start(run)
        try:
            tracker.log(keyed(head, task))
            tracker.table("rows", body["rows"])
            tracker.table("pareto", body["summary"])
            for path in [folder / "result.json", *files.values()]:
                tracker.artifact(path, "kvlab-result")
        finally:
            tracker.finish()


def check_kinds(config: Config) -> None:
    """ConfigError for the first value that is not of the kind its default has: number, list, text, true or false."""
    from omegaconf import OmegaConf

    folder = Path(__file__).parent / "configs"
    base = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"), resolve=False)
    plain = {k: v for k, v in base.items() if k not in ("defaults", "hydra", "method")}
    plain["task"] = OmegaConf.to_container(OmegaConf.load(folder / "task" / f"{config['task']['name']}.yaml"))
    for key, default in plain.items():
        if key in config:
            _kind(config[key], default, key)


def _kind(value: Any, default: Any, key: str) -> None:
    if default is None:
        return
    if isinstance(default, dict):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value} must be a group of keys: {', '.join(default)}")
        for name in default:
            if name in value:
                _kind(value[name], default[name], f"{key}.{name}")
        return
    is_list = isinstance(value, (list, tuple))
    if isinstance(default, list):
        if not is_list or not value:
            raise ConfigError(
                f"{key}={value} must be a list that is not empty, e.g. {key}={str(default).replace(' ', '')}"
            )
        for v in value:
            _kind(v, default[0], key)
        return
    if is_list and key.endswith("depths"):  # how many, or which
        return
    for kind, word in ((bool, "true or false"), (int, "a whole number"), (str, "text")):
        if isinstance(default, kind):
            if not isinstance(value, kind) or isinstance(value, bool) != isinstance(default, bool):
                raise ConfigError(f"{key}={value} must be {word}")
            return


_LEDGER = (
    "payload", "metadata", "residual", "tables", "fragmentation", "physical", "shared", "temporary_peak", "static",
)  # fmt: skip


def _interval(outcome, full) -> dict[str, float | None]:
    """Paired bootstrap interval of the accuracy difference, where there are enough documents."""
    from kvlab.report import stats

    a = [d["value"] for d in outcome.documents if d["metric"] == "accuracy"]
    b = [d["value"] for d in full.documents if d["metric"] == "accuracy"]
    if len(a) != len(b) or len(a) < stats.MIN_DOCUMENTS:
        return {}
    estimate = stats.paired_bootstrap(a, b)
    return {"acc_delta_low": estimate.low, "acc_delta_high": estimate.high}


def _kernels(config: Config) -> dict[str, str]:
    from kvlab.kernels import dispatch

    runtime, device = config["runtime"], str(config["model"]["device"])
    ran = dispatch.chosen(device, runtime.get("kernels", "auto"), runtime.get("arithmetic", "exact"))
    replayed = ran["attention"] == "triton" and device.startswith("cuda") and runtime.get("graph", "auto") == "auto"
    return ran | {"graph": "cuda" if replayed else "off"}


def _step(runtime: Config, loaded) -> dict[str, str]:
    """What ran the model: step, weights and how its matrices lie."""
    from kvlab.models.lean import runner

    asked = {k: runtime[k] for k in ("step", "weights", "kernels", "min_rows") if k in runtime}
    return runner(loaded, **asked, compiled=runtime.get("compile", False)).facts


def _plain(node: Any) -> Any:
    """A config as plain JSON values."""
    from omegaconf import DictConfig, ListConfig, OmegaConf

    if isinstance(node, (DictConfig, ListConfig)):
        return OmegaConf.to_container(node, resolve=True)
    if isinstance(node, Mapping):
        return {str(k): _plain(v) for k, v in node.items()}
    return [_plain(v) for v in node] if isinstance(node, (list, tuple)) else node
