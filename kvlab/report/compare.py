"""Two results, paired: per metric the difference b - a with its 95 % interval.

Pairs are documents where both results bring their per-request records (the same document, seed, length and depth in
both), else cells, that is rows with equal task, metric, chunk, protocol, length, depth and seed. Cells are means, so
their spread understates what a new document would do; the column `unit` says which it was. Rows of different chunk
size or protocol are never paired. Fewer than 8 pairs: no interval. McNemar's p where documents are right or wrong and
there are at least 50.

Byte figures are exact, not sampled, and have no interval (unit `exact`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvlab.errors import ConfigError, CorruptFile
from kvlab.report import columns as col
from kvlab.report import stats, table

Row = Mapping
GROUP = ("task", "metric", "chunk", "protocol")
CELL = (*GROUP, "length", "depth", "seed")
EXACT = ("ratio", "bytes_per_token", "bits_per_element", "kept")


def documents(result: Mapping, folder: Path | str) -> list[dict] | None:
    """Per-request records of a result that lies in `folder`; None when it has none.

    One JSON object a line: method, task, metric, doc, value, count (tokens behind value; 1 if absent), and length,
    depth, seed, chunk, protocol where they apply. `value` is the mean of the document.
    """
    entry = result.get("per_request")
    name = entry.get("file") if isinstance(entry, Mapping) else entry
    if not name or not (Path(folder) / name).is_file():
        return None
    lines = (Path(folder) / name).read_text(encoding="utf-8").splitlines()
    try:
        records = [json.loads(line) for line in lines if line.strip()]
    except json.JSONDecodeError as error:
        raise CorruptFile(f"{Path(folder) / name}: not one JSON object a line ({error})") from None
    return [r for r in records if isinstance(r, Mapping) and "doc" in r and col.known(r.get("value"))]


def compare(
    a: Mapping,
    b: Mapping,
    documents_a: Sequence[Row] | None = None,
    documents_b: Sequence[Row] | None = None,
    methods: tuple[str, str] | None = None,
) -> dict:
    """{a, b, rows, config_diff, warnings}. `methods`: the labels to compare; see `pair_methods` for the default.

    A row: method_a, method_b, task, metric, chunk, protocol, unit, n, a, b, diff, low, high, p, note.
    """
    warnings = _incomparable(a, b)
    use_docs = documents_a is not None and documents_b is not None
    source_a, source_b = (documents_a, documents_b) if use_docs else (a["rows"], b["rows"])
    key, unit = ((*CELL, "doc"), "documents") if use_docs else (CELL, "cells")
    rows = []
    for method_a, method_b in [methods] if methods else pair_methods(a, b):
        left, right = _index(source_a, method_a, key), _index(source_b, method_b, key)
        groups = list(dict.fromkeys(k[: len(GROUP)] for k in [*left, *right]))
        for group in groups:
            head = dict(zip(GROUP, group, strict=True)) | {"method_a": method_a, "method_b": method_b}
            one = {k: v for k, v in left.items() if k[: len(GROUP)] == group}
            two = {k: v for k, v in right.items() if k[: len(GROUP)] == group}
            rows.append(_row(head, one, two, unit))
        rows += _exact_rows(a, b, method_a, method_b)
    return {
        "a": {"run_id": a.get("run_id"), "config_hash": a.get("config_hash")},
        "b": {"run_id": b.get("run_id"), "config_hash": b.get("config_hash")},
        "rows": rows,
        "config_diff": config_diff(a.get("config") or {}, b.get("config") or {}),
        "warnings": warnings,
    }


def pair_methods(a: Mapping, b: Mapping) -> list[tuple[str, str]]:
    """Labels to compare: equal labels, where there are any besides the full cache; else the only method of each."""
    names_a, names_b = ([s["method"] for s in r["summary"] if s.get("family") != "full"] for r in (a, b))
    common = [n for n in names_a if n in names_b]
    if common:
        return [(n, n) for n in common]
    names_a, names_b = (n or [s["method"] for s in r["summary"]] for n, r in ((names_a, a), (names_b, b)))
    if len(names_a) == len(names_b) == 1:
        return [(names_a[0], names_b[0])]
    raise ConfigError(
        f"compare: no method is in both results and there is more than one to choose from: {names_a} and {names_b}. "
        f"Name one of each."
    )


def config_diff(a: Mapping, b: Mapping, prefix: str = "") -> list[dict]:
    """Dotted keys whose values differ: [{key, a, b}]; a missing key counts as None."""
    out = []
    for key in dict.fromkeys([*a, *b]):
        x, y, name = a.get(key), b.get(key), f"{prefix}{key}"
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            out += config_diff(x, y, f"{name}.")
        elif x != y:
            out.append({"key": name, "a": x, "b": y})
    return out


def _incomparable(a: Mapping, b: Mapping) -> list[str]:
    """What makes the two runs differ besides the method."""
    found = []
    for name, path in {
        "model weights": ("model", "weights_sha256"),
        "model dtype": ("model", "dtype"),
        "tokenizer": ("model", "tokenizer_sha256"),
        "code commit": ("code", "git_commit"),
        "uncommitted changes": ("code", "diff_sha256"),
        "protocol": ("protocol",),
        "attention backend": ("attention_backend",),
    }.items():
        x, y = a, b
        for part in path:
            x, y = ((v or {}).get(part) for v in (x, y))
        if x != y:
            found.append(f"{name} differ: {x} and {y}")
    data = [{d["task"]: d.get("sha256") for d in r.get("data") or []} for r in (a, b)]
    found += [f"data of {task} differ" for task in data[0] if task in data[1] and data[0][task] != data[1][task]]
    return found


def _index(rows: Sequence[Row], method: str, key: Sequence[str]) -> dict[tuple, tuple[float, float]]:
    """key -> (value, weight); weight is tokens of a document or documents of a cell."""
    out: dict[tuple, tuple[float, float]] = {}
    for r in rows:
        if r["method"] != method or not col.known(r.get("value")):
            continue
        place = tuple(r.get(k) for k in key)
        if place in out:
            raise ConfigError(f"compare: two values of {method} at {dict(zip(key, place, strict=True))}")
        out[place] = (float(r["value"]), float(r.get("count") or r.get("n") or 1))
    return out


def _row(head: dict, left: dict, right: dict, unit: str) -> dict:
    common = [k for k in left if k in right]
    notes = [f"{n} only in {s}" for s, n in (("a", len(left) - len(common)), ("b", len(right) - len(common))) if n]
    moved = [k for k in common if left[k][1] != right[k][1]]
    if moved:
        notes.append(f"{len(moved)} pairs have different counts and are left out")
        common = [k for k in common if left[k][1] == right[k][1]]
    order = ("method_a", "method_b", *GROUP)
    out = {k: head[k] for k in order} | {"unit": unit, "n": len(common)}
    blank = dict.fromkeys(("a", "b", "diff", "low", "high", "p"))
    if not common:
        return out | blank | {"note": "; ".join(["no pairs", *notes])}
    x, y, w = [left[k][0] for k in common], [right[k][0] for k in common], [left[k][1] for k in common]
    mean_x, mean_y = (sum(v * c for v, c in zip(values, w, strict=True)) / sum(w) for values in (x, y))
    gap = stats.paired_bootstrap(x, y, w)
    low, high = gap.low, gap.high
    if len(common) < stats.MIN_DOCUMENTS:
        low = high = None
        notes.append(f"n={len(common)} is too few for an interval")
    binary = unit == "documents" and all(v in (0.0, 1.0) for v in [*x, *y]) and set(w) == {1.0}
    p = stats.mcnemar([v == 1 for v in x], [v == 1 for v in y]) if binary and len(x) >= stats.MIN_MCNEMAR else None
    values = {"a": mean_x, "b": mean_y, "diff": gap.value, "low": low, "high": high, "p": p}
    return out | values | {"note": "; ".join(notes) or None}


def _exact_rows(a: Mapping, b: Mapping, method_a: str, method_b: str) -> list[dict]:
    one = next((s for s in a["summary"] if s["method"] == method_a), {})
    two = next((s for s in b["summary"] if s["method"] == method_b), {})
    out = []
    for key in EXACT:
        held = key in col.BYTE_KEYS
        x, y = (None if held and s.get("simulated") else s.get(key) for s in (one, two))
        if col.known(x) and col.known(y):
            head = dict.fromkeys(GROUP) | {"method_a": method_a, "method_b": method_b, "task": "memory", "metric": key}
            order = {k: head[k] for k in ("method_a", "method_b", *GROUP)}
            values = {"unit": "exact", "n": 1, "a": x, "b": y, "diff": y - x, "low": None, "high": None, "p": None}
            out.append(order | values | {"note": None})
    return out


def markdown(comparison: Mapping) -> str:
    """The comparison as a pipe table with what differs in the two configs above it."""
    rows = comparison["rows"]
    lines = [f"{r['key']}: {r['a']} -> {r['b']}" for r in comparison["config_diff"]]
    lines += [f"WARNING {w}" for w in comparison["warnings"]]
    pairs = dict.fromkeys((r["method_a"], r["method_b"]) for r in rows)
    head = ["task", "metric", "a", "b", "b - a [95% CI]", "p", "n", "unit", "note"]
    parts = ["".join(f"- {line}\n" for line in lines)]
    for pair in pairs:
        cells = [_cells(r) for r in rows if (r["method_a"], r["method_b"]) == pair]
        parts.append(f"a = {pair[0]}, b = {pair[1]}\n\n{table.grid_markdown(head, cells, left=2)}")
    return "\n".join(p for p in parts if p)


def _number(value: float, sign: str = "") -> str:
    return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.4g}"


def _cells(r: Row) -> list[str]:
    metric = r["metric"] + (f"@{r['chunk']}" if r.get("chunk") else "")
    gap = _number(r["diff"], "+") if col.known(r["diff"]) else col.NONE
    if col.known(r["low"]):
        gap += f" [{r['low']:+.4g}, {r['high']:+.4g}]"
    show = [_number(r[k]) if col.known(r[k]) else col.NONE for k in ("a", "b")]
    p = f"{r['p']:.3g}" if col.known(r["p"]) else col.NONE
    return [str(r["task"]), metric, *show, gap, p, str(r["n"]), r["unit"], r["note"] or ""]
