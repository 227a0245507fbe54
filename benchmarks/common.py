"""Shared by the benchmarks: rounds that interleave the sides, medians, rows with provenance.

One torch thread and process CPU time: two threads on a busy machine wait for each other and measure the neighbours.
Ratios are against the peer of the same run; absolute times depend on the machine. The whole-step benchmarks measure
wall time on both cores too: clocks.py.
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
_place = {"results": RESULTS}  # --results


def arguments(description: str, **defaults) -> argparse.Namespace:
    """--rounds, --quick and what the script adds; `--quick` is for trying the script, its rows are not written."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round, nothing written")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
    _place["results"] = args.results
    return args


def setup() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def thread_counts() -> tuple[int, ...]:
    """1 and as many as there are cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return (1, cores) if cores > 1 else (1,)


def has_bf16() -> bool:
    """Does this CPU multiply bfloat16 numbers? Else torch emulates it: a prompt takes 5 times as long as in float32."""
    import torch

    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return True
    print("this CPU has no bfloat16 products: transformers' prompts in bfloat16 are left out")
    return False


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
        write(bench, rows, ("batch", "context"))
    return rows


def write(bench: str, rows: list[dict], case: tuple[str, ...] = ()) -> None:
    """Append rows to <bench>.jsonl; a row of the same key is replaced. case: names of facts that all rows share; older
    rows that share them too go, so that no two runs stand side by side."""
    from kvlab.report.provenance import provenance

    facts = provenance()
    stamp = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": facts["host"]["cpu"],
        "commit": facts["code"]["git_commit"],
        "dirty": facts["code"]["dirty"],
        "packages": {k: facts["packages"][k] for k in ("python", "torch", "transformers")},
    }
    path = _place["results"] / f"{bench}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if case:
        old = [r for r in old if any(r.get(k) != rows[0][k] for k in case)]
    merged = {_key(r): r for r in old} | {_key(r): r | stamp for r in rows}
    path.write_text("".join(json.dumps(r) + "\n" for r in merged.values()))


# What a row is about; the rest was measured, or says how.
KEY = ("bench", "side", "peer", "model", "dtype", "shape", "batch", "context", "block", "chunk")


def _key(row: dict) -> str:
    return json.dumps([row.get(k) for k in KEY])
