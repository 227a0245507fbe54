"""The numbers behind each picture, as plain dicts: what a test compares and what the CSV next to a figure holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvlab.errors import ConfigError
from kvlab.report import columns as col
from kvlab.report import pareto, style
from kvlab.report.result import LEDGER

Row = Mapping
# y of the trade-off plot: key -> (interval keys, factor, sign that makes "lower is better")
AXES = {
    "delta_nll": (("delta_nll_low", "delta_nll_high"), 1.0, 1),
    "acc": (("acc_low", "acc_high"), 100.0, -1),
    "kl_mean": (("kl_mean_low", "kl_mean_high"), 1.0, 1),
}


def pick_y(summary: Sequence[Row], y: str | None = None) -> str:
    """The asked axis, else the first of delta_nll, acc, kl_mean that a compressed method has a value for."""
    if y is not None and y not in AXES:
        raise ConfigError(f"pareto: y={y!r} is not one of {', '.join(AXES)}")
    for key in [y] if y else AXES:
        if any(col.known(r.get(key)) for r in summary if r.get("family") != "full"):
            return key
    raise ConfigError(
        f"pareto: no compressed method has {y or ' or '.join(AXES)}. "
        f"Run task=fidelity (delta_nll) or task=needle (acc)."
    )


def tradeoff(summary: Sequence[Row], y: str | None = None) -> list[dict]:
    """One dict per summary row, in table order.

    bytes_per_token, ratio; y in nats or percent with low and high where known; front: non-dominated among the rows
    drawn (fewer bytes, and less loss or more accuracy); left_out: why a row is not drawn, else "".
    The full cache has delta_nll = kl_mean = 0 by definition when its row leaves it open.
    """
    key = pick_y(summary, y)
    (low, high), factor, sign = AXES[key]
    points = []
    for r in col.order(summary):
        value = r.get(key)
        if value is None and r.get("family") == "full" and key != "acc":
            value = 0.0
        held_bytes = r.get("bytes_per_token") or None  # 0 has no place on a log axis
        missing = [k for k, v in (("bytes_per_token", held_bytes), (key, value)) if not col.known(v)]
        why = "simulated: holds no bytes" if r.get("simulated") else f"no {missing[0]}" if missing else ""
        parts = {"y": value, "low": r.get(low), "high": r.get(high)}
        scaled = {n: v * factor if col.known(v) else None for n, v in parts.items()}
        held = {k: None if r.get("simulated") else r.get(k) for k in ("bytes_per_token", "ratio")}
        head = {"method": r["method"], "family": r.get("family"), "line": style.line_key(r["method"])}
        points.append({**head, **held, "axis": key, **scaled, "front": False, "left_out": why})
    drawn = [p for p in points if not p["left_out"]]
    for i in pareto.front([(p["bytes_per_token"], sign * p["y"]) for p in drawn]):
        drawn[i]["front"] = True
    return points


def ledger(summary: Sequence[Row]) -> tuple[list[dict], str]:
    """Bars (method, ratio, one value per category, total) in table order, and their unit.

    The unit is bytes per token seen; MiB where a row does not know its tokens. Simulated rows hold nothing.
    """
    rows = [r for r in col.order(summary) if not r.get("simulated") and any(col.known(r.get(k)) for k in LEDGER)]
    if not rows:
        raise ConfigError("ledger plot: no row has ledger categories (payload, metadata, residual, ...)")
    per_token = all(r.get("tokens_seen") for r in rows)
    bars = []
    for r in rows:
        scale = r["tokens_seen"] if per_token else 2**20
        parts = {k: (r.get(k) or 0) / scale for k in LEDGER}
        bars.append({"method": r["method"], "ratio": r.get("ratio"), **parts, "total": sum(parts.values())})
    return bars, "bytes per token" if per_token else "MiB"


def grid(rows: Sequence[Row], metric: str | None = None, task: str | None = None) -> dict[str, dict]:
    """method -> {lengths, depths, cells[depth][length], n}: percent, mean over seeds weighted by n; None if missing.

    Rows without a length and a depth are ignored. The axes are common to all methods; n is documents per method.
    """
    placed = [r for r in rows if r.get("length") is not None and r.get("depth") is not None]
    placed = [r for r in placed if metric in (None, r["metric"]) and task in (None, r["task"])]
    placed = [r for r in placed if col.known(r.get("value"))]
    kinds = sorted({(r["task"], r["metric"], r.get("protocol") or "") for r in placed})
    if len(kinds) != 1:
        have = "; ".join(f"task={t} metric={m} protocol={p or '-'}" for t, m, p in kinds)
        have = have or "no row with length and depth"
        raise ConfigError(f"heat map: needs rows of exactly one task, metric and protocol, got: {have}")
    if not all(0 <= r["value"] <= 1 for r in placed):
        raise ConfigError(f"heat map: {kinds[0][1]} is no score in 0..1")
    lengths, depths = (sorted({r[k] for r in placed}) for k in ("length", "depth"))
    out: dict[str, dict] = {}
    for method in dict.fromkeys(r["method"] for r in placed):
        mine = [r for r in placed if r["method"] == method]
        cells = [[_mean([r for r in mine if (r["length"], r["depth"]) == (x, d)]) for x in lengths] for d in depths]
        name = col.name({"method": method, "simulated": any(r.get("simulated") for r in mine)})
        out[name] = {"lengths": lengths, "depths": depths, "cells": cells, "n": sum(r.get("n") or 1 for r in mine)}
    return out


def _mean(rows: Sequence[Row]) -> float | None:
    weights = [r.get("n") or 1 for r in rows]
    return 100 * sum(w * r["value"] for w, r in zip(weights, rows, strict=True)) / sum(weights) if rows else None
