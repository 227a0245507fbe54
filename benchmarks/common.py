"""Shared by the benchmarks: rounds that interleave the sides, medians, rows with provenance.

One torch thread and process CPU time: two threads on a busy machine wait for each other and measure the neighbours.
Ratios are against the peer of the same run; absolute times depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

RESULTS = Path(__file__).parent / "results"


def arguments(description: str, **defaults) -> argparse.Namespace:
    """--rounds, --quick and what the script adds; `--quick` is for trying the script, its rows are not written."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round, nothing written")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def setup() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def rounds(sides: dict[str, Callable[[], float]], n: int) -> dict[str, list[float]]:
    """Run every side once per round, in turn; each returns its own figure (seconds). A first round is thrown away."""
    out: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(n + 1):
        for name, run in sides.items():
            value = run()
            if i:
                out[name].append(value)
    return out


def cpu(run: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def report(bench: str, figures: dict[str, list[float]], peer: str, quick: bool, **facts) -> list[dict]:
    """Print a table with ratios against `peer` and append rows to results/<bench>.jsonl (same key: replaced)."""
    base = median(figures[peer])
    print(f"\n{bench}  {facts}  load {os.getloadavg()[0]:.1f}")
    rows = []
    for name, values in figures.items():
        ratio = base / median(values)
        print(f"  {name:34s} {1000 * median(values):10.1f} ms   {ratio:5.2f} x {peer}")
        rows.append(
            {
                "bench": bench, "side": name, "peer": peer, **facts, "ms_median": 1000 * median(values),
                "ms_min": 1000 * min(values), "ms_max": 1000 * max(values), "rounds": len(values), "ratio": ratio,
                "clock": "process CPU time, 1 thread", "load": os.getloadavg()[0],
            }
        )  # fmt: skip
    if not quick:
        write(bench, rows)
    return rows


def write(bench: str, rows: list[dict]) -> None:
    from kvlab.report.provenance import provenance

    facts = provenance()
    stamp = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": facts["host"]["cpu"],
        "commit": facts["code"]["git_commit"],
        "dirty": facts["code"]["dirty"],
        "packages": {k: facts["packages"][k] for k in ("python", "torch", "transformers")},
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{bench}.jsonl"
    old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    merged = {_key(r): r for r in old} | {_key(r): r | stamp for r in rows}
    path.write_text("".join(json.dumps(r) + "\n" for r in merged.values()))


MEASURED = {"ms_median", "ms_min", "ms_max", "ratio", "load", "time", "cpu", "commit", "dirty", "packages", "rounds"}


def _key(row: dict) -> str:
    return json.dumps({k: v for k, v in row.items() if k not in MEASURED}, sort_keys=True)
