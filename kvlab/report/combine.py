"""Many result files, one report: a combined summary, its tables and its pictures.

Equal (method label, config hash) means the same run: the newest stays. The full cache that every run of a sweep
measures again is one row, as long as all runs got the same numbers. Equal labels with different numbers are different
settings that the label does not show: they are told apart by the config keys in which they differ. A file that is no
valid result is an error that names all such files, unless `strict=False`, which lists them in `warnings`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvlab.errors import ConfigError, CorruptFile, KvlabError
from kvlab.report import columns as col
from kvlab.report import plots, points, result, table
from kvlab.report.compare import config_diff

# measured anew in each run, so they do not tell two settings apart
MACHINE = {"prefill_tok_s", "decode_tok_s", "note"}
FORMATS = ("md", "csv", "tex")
PLOTS = ("pareto", "ledger", "heatmap")


@dataclass
class Combined:
    """`summary` and `rows` carry the final labels; `sources` tells which file each label came from."""

    summary: list[dict]
    rows: list[dict]
    sources: dict[str, str]
    caption: str
    warnings: list[str] = field(default_factory=list)


def find(paths: Iterable[Path | str]) -> list[Path]:
    """result.json files: a file as it is, a folder with everything below it, in sorted order."""
    out: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            below = sorted(path.rglob("result.json"))
            if not below:
                raise ConfigError(f"report: no result.json under {path}. A finished run writes one into its folder.")
            out += below
        else:
            out.append(path)  # absent: `result.read` says so
    return list(dict.fromkeys(p.resolve() for p in out))


def load(paths: Iterable[Path | str], strict: bool = True) -> tuple[list[tuple[str, dict]], list[str]]:
    """Validated (path, result) pairs, and what was wrong with the files left out."""
    loaded, bad = [], []
    for path in find(paths):
        try:
            loaded.append((str(path), result.read(path)))
        except KvlabError as error:
            bad.append(str(error))
    if bad and strict:
        raise CorruptFile("\n".join([f"report: {len(bad)} of {len(loaded) + len(bad)} files cannot be used:", *bad]))
    if not loaded:
        raise ConfigError("\n".join(["report: nothing to report", *bad]))
    return loaded, bad


def combine(results: Sequence[tuple[str, Mapping]]) -> Combined:
    """Merge (name, result) pairs; pure."""
    newest = sorted(results, key=lambda r: str(r[1].get("finished")))
    entries: dict[tuple[str, str], dict] = {}
    for name, one in newest:
        for s in one["summary"]:
            entries[(s["method"], one["config_hash"])] = {"name": name, "result": one, "row": s}
    kept = _merge_equal(list(entries.values()))
    labels = _labels(kept)
    by_label = dict(zip(labels, kept, strict=True))
    summary = col.order([{**e["row"], "method": label} for label, e in by_label.items()])
    rows = []
    for label, e in ((s["method"], by_label[s["method"]]) for s in summary):
        rows += [{**r, "method": label} for r in e["result"]["rows"] if r["method"] == e["row"]["method"]]
    used = [r for _, r in newest]
    base = {**used[-1], "rows": [r for u in used for r in u["rows"]], "summary": summary}
    if len({u.get("protocol") for u in used}) > 1:
        base["protocol"] = ",".join(sorted({str(u.get("protocol")) for u in used}))
    return Combined(
        summary=summary,
        rows=rows,
        sources={s["method"]: by_label[s["method"]]["name"] for s in summary},
        caption=table.caption(base),
        warnings=_mixed(used),
    )


def _merge_equal(entries: list[dict]) -> list[dict]:
    """One entry per label and set of numbers, the newest; order of first appearance."""
    out: dict[tuple, dict] = {}
    for e in entries:
        known = ((k, v) for k, v in sorted(e["row"].items()) if k not in MACHINE and v is not None)
        numbers = tuple((k, float(f"{v:.6g}") if isinstance(v, float) else v) for k, v in known)
        model = (e["result"].get("model") or {}).get("weights_sha256")
        out[(numbers, model)] = e
    return list(out.values())


def _labels(entries: Sequence[dict]) -> list[str]:
    """The method label, with `(key=value)` of the config where equal labels mean different settings."""
    labels = [e["row"]["method"] for e in entries]
    for label in {x for x in labels if labels.count(x) > 1}:
        same = [i for i, x in enumerate(labels) if x == label]
        configs = [entries[i]["result"].get("config") or {} for i in same]
        keys = {d["key"]: None for c in configs[1:] for d in config_diff(configs[0], c)}
        silent = ("paths", "logger", "hydra", *(("method",) if entries[same[0]]["row"]["family"] == "full" else ()))
        keys = [k for k in keys if k.split(".")[0] not in silent][:2]
        for i, config in zip(same, configs, strict=True):
            parts = [f"{k.rpartition('.')[2]}={_at(config, k)}" for k in keys]
            labels[i] = f"{label} ({', '.join(parts)})" if parts else label
        if len({labels[i] for i in same}) < len(same):
            for i in same:
                labels[i] = f"{label} ({entries[i]['result']['config_hash'][:6]})"
        if len({labels[i] for i in same}) < len(same):  # one config, other code or machine
            for n, i in enumerate(same, 1):
                labels[i] = f"{labels[i]} run {n}"
    return labels


def _at(config: Mapping, dotted: str) -> object:
    for part in dotted.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def _mixed(results: Sequence[Mapping]) -> list[str]:
    """Reasons why rows of one table may not be compared with each other."""
    found = []
    facts = {
        "models": lambda r: [(r.get("model") or {}).get("id")],
        "model dtypes": lambda r: [(r.get("model") or {}).get("dtype")],
        "weights": lambda r: [(r.get("kernels") or {}).get("weights", "model")],
        "protocols": lambda r: [r.get("protocol")],
        "sets of tasks": lambda r: [",".join(sorted({x["task"] for x in r["rows"]}))],
        "chunk sizes": lambda r: {x["chunk"] for x in r["rows"] if x.get("chunk") is not None},
        "commits": lambda r: [(r.get("code") or {}).get("git_commit")],
    }
    for what, of in facts.items():
        seen = sorted({str(v) for r in results for v in of(r)})
        if len(seen) > 1:
            found.append(f"this table mixes {what}: {', '.join(seen)}")
    return found


def write(
    combined: Combined,
    folder: Path | str,
    formats: Sequence[str] = ("md", "csv"),
    draw: Sequence[str] = ("pareto", "ledger"),
) -> dict[str, Path]:
    """Tables and plots into `folder`: summary.md, summary.csv, summary.tex, rows.csv, pareto*.*, ledger.*, heatmap.*.

    A plot that the rows cannot feed (no losses, no bytes) is left out with a line in `combined.warnings`.
    """
    for what, asked, known in (("format", formats, FORMATS), ("plot", draw, PLOTS)):
        if unknown := [a for a in asked if a not in known]:
            raise ConfigError(f"report: unknown {what} {', '.join(unknown)}; known: {', '.join(known)}")
    folder = Path(folder)
    files = {"rows.csv": result.write_rows(combined.rows, folder / "rows.csv", result.ROW)}
    jobs = []
    if "pareto" in draw:
        axes = [y for y in points.AXES if any(col.known(s.get(y)) for s in combined.summary if s["family"] != "full")]
        axes = [y for y in axes if y != "kl_mean" or "delta_nll" not in axes] or [None]
        for i, y in enumerate(axes):
            jobs.append((f"pareto_{y}" if i else "pareto", lambda to, y=y: plots.pareto(combined.summary, to, y)))
    if "ledger" in draw:
        jobs.append(("ledger", lambda to: plots.ledger(combined.summary, to)))
    if "heatmap" in draw:
        jobs.append(("heatmap", lambda to: plots.heatmap(combined.rows, to)))
    drawn = []
    for name, job in jobs:
        try:
            files |= {f"{name}.{kind}": path for kind, path in job(folder / name).items()}
            drawn.append(name)
        except ConfigError as error:
            combined.warnings.append(f"{name} not drawn: {error}")
    if "csv" in formats:
        files["summary.csv"] = table.csv(combined.summary, folder / "summary.csv")
    if "tex" in formats:
        files["summary.tex"] = result.write_text(
            folder / "summary.tex", table.latex(combined.summary, combined.caption)
        )
    if "md" in formats:
        text = table.markdown(combined.summary, combined.caption)
        text += "".join(f"\n> {w}\n" for w in combined.warnings) + "".join(f"\n![{n}]({n}.png)\n" for n in drawn)
        text += "\nSources:\n\n" + "".join(f"- {name}: `{_short(p, folder)}`\n" for name, p in combined.sources.items())
        files["summary.md"] = result.write_text(folder / "summary.md", text)
    return files


def _short(path: str, folder: Path) -> str:
    """The path as seen from the report, so that a moved folder still makes sense."""
    return os.path.relpath(path, folder) if Path(path).is_absolute() else path
