"""Whole decode steps of SmolLM2 with each codec against kvlab's own full bf16 cache: what a smaller cache brings.

Same weights (int8, where the cache's share is largest), same step, batch 1, turns as in clocks.py but many short
rounds, since these ratios are near 1. A ratio is taken within a round, so that a drift of the machine cancels: the
median over rounds, and its quartiles. Wall time on all cores and CPU time on one.
"""

from __future__ import annotations

import gc
from statistics import median, quantiles

import clocks
import common
from ours import Ours, named

WINDOW = {"window_dtype": "bfloat16"}  # the exact part in the type of the cache that it is compared with
CODECS = {
    **{f"int{b}": ("int4", {"bits": b}) for b in (4, 3, 2)},
    **{f"kivi {b}": ("kivi", {"bits_k": b, "bits_v": b, **WINDOW}) for b in (4, 3, 2)},
    **{f"turboquant {b}": ("turboquant", {"bits_k": b, "bits_v": b}) for b in (5, 4, 3, 2)},
    "turboquant prod": ("turboquant", {"variant": "prod"}),
}
CODECS = {"fp8": ("fp8", {}), "int8": ("int8", {}), **CODECS, **{f"{name} fast": c for name, c in CODECS.items()}}
PEER = "full bf16"
BUDGET, STEPS = 0.08, 2  # seconds of a turn, and steps at most
TIMES = 5  # short rounds for each of --rounds


def main() -> None:
    args = common.arguments(__doc__.splitlines()[0], cases="1x512,1x2048,1x8000", weights="int8")
    common.setup()
    from kvlab.models.load import ModelCfg, load

    ours = Ours(load(ModelCfg()))
    for batch, context in clocks.cases(args):
        case(args, ours, batch, context)


def case(args, ours: Ours, batch: int, context: int) -> None:
    rounds = 1 if args.quick else TIMES * args.rounds
    threads = common.thread_counts()
    room = (rounds * (STEPS + 1) + 4) * len(threads)
    gc.collect()  # the case before
    sides, facts = {}, {}
    for name, (method, options) in {PEER: ("full", {"dtype": "bfloat16"}), **CODECS}.items():
        s = named(f"{method} fast" if name.endswith(" fast") else method, args.weights, options)
        try:
            lab = ours.lab(s, batch, context, room)
            facts[name] = ours.row(lab, s)
        except Exception as error:
            print(f"  left out: {name}: {type(error).__name__}: {error}")
            continue
        sides[name] = clocks.turns(lab.engine.step)
    with clocks.Watch() as watch:
        times = clocks.run(sides, rounds, threads, clocks.QUICK if args.quick else BUDGET, most=STEPS)
    if PEER not in times:
        print(f"caches, {batch} x {context}: nothing to compare with")
        return
    print(f"\ncaches  batch {batch}, context {context}, {args.weights} weights, ratios against {PEER}")
    print(
        f"  {'cache':16s} {'wall ms':>8s} {'ratio (quartiles)':>22s} {'1-thread CPU ms':>16s} {'ratio':>6s} {'MB':>7s}"
    )
    rows = []
    for name, t in times.items():
        wall = _ratios(times[PEER].wall[threads[-1]], t.wall[threads[-1]])
        cpu = _ratios(times[PEER].cpu[1], t.cpu[1])
        row = facts[name] | {"codec": name} | t.row() | watch.facts
        row |= {"x_full": wall[1], "x_full_low": wall[0], "x_full_high": wall[2], "x_full_cpu": cpu[1]}
        row |= {"bench": "caches", "batch": batch, "context": context, "model": ours.loaded.id}
        rows.append(row | {"clock": f"wall on {threads[-1]} threads; CPU on 1"})
        print(
            f"  {name:16s} {1000 * median(t.wall[threads[-1]]):8.2f} {wall[1]:8.2f} ({wall[0]:.2f} to {wall[2]:.2f})"
            f" {row['ms_cpu_1']:16.2f} {cpu[1]:6.2f} {row['cache_bytes'] / 1e6:7.1f}"
        )
    if rows and not args.quick:
        common.write("caches", rows, ("batch", "context", "weights"))


def _ratios(full: list[float], side: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile of full / side, round by round."""
    each = [a / b for a, b in zip(full, side)]
    return quantiles(each, n=4) if len(each) > 1 else each * 3


if __name__ == "__main__":
    main()
