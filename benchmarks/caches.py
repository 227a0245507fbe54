"""Whole decode steps of SmolLM2 with each codec against kvlab's own full bf16 cache: what a smaller cache brings.

Same weights (int8, where the cache's share is largest), same step, batch 1, turns as in clocks.py but many short
rounds, since these ratios are near 1. The full cache has a turn before and after every few codecs, and a ratio is taken
with the mean of the two around it, so that a drift of the machine cancels: the median over rounds, and its quartiles.
Wall time on all cores and CPU time on one.
"""

from __future__ import annotations

import gc
from statistics import fmean, median, quantiles

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
EVERY = 4  # codecs between two turns of the peer
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
    codecs = list(CODECS)
    peers = [f"{PEER} {i}" for i in range(-(-len(codecs) // EVERY) + 1)]  # each grows as the codecs' caches do
    sides, facts = {}, {}
    for i, peer in enumerate(peers):
        for name in [peer, *codecs[i * EVERY : (i + 1) * EVERY]]:
            method, options = CODECS.get(name, ("full", {"dtype": "bfloat16"}))
            s = named(f"{method} fast" if name.endswith(" fast") else method, args.weights, options)
            try:
                lab = ours.lab(s, batch, context, room)
                facts[name] = ours.row(lab, s)
            except Exception as error:
                print(f"  left out: {name}: {type(error).__name__}: {error}")
                continue
            sides[name] = clocks.turns(ours.step(lab))
    with clocks.Watch() as watch:
        times = clocks.run(sides, rounds, threads, clocks.QUICK if args.quick else BUDGET, most=STEPS)
    print(f"\ncaches  batch {batch}, context {context}, {args.weights} weights, ratios against {PEER}")
    print(
        f"  {'cache':20s} {'wall ms':>8s} {'ratio (quartiles)':>22s} {'1-thread CPU ms':>16s} {'ratio':>6s} {'MB':>7s}"
    )
    rows, most = [], threads[-1]
    for i, name in [(0, peers[0]), *enumerate(codecs)]:
        around = [times[p] for p in peers[i // EVERY : i // EVERY + 2] if p in times]
        if name not in times or not around:
            continue
        t = times[name]
        around = [t] if name in peers else around
        wall = _ratios([x.wall[most] for x in around], t.wall[most])
        cpu = _ratios([x.cpu[1] for x in around], t.cpu[1])
        row = facts[name] | {"codec": PEER if name in peers else name} | t.row() | watch.facts
        row |= {"x_full": wall[1], "x_full_low": wall[0], "x_full_high": wall[2], "x_full_cpu": cpu[1]}
        row |= {"bench": "caches", "batch": batch, "context": context, "model": ours.loaded.id}
        rows.append(row | {"clock": f"wall on {most} threads; CPU on 1"})
        print(
            f"  {row['codec']:20s} {1000 * median(t.wall[most]):8.2f} {wall[1]:8.2f} ({wall[0]:.2f} to {wall[2]:.2f})"
            f" {row['ms_cpu_1']:16.2f} {cpu[1]:6.2f} {row['cache_bytes'] / 1e6:7.1f}"
        )
    if rows and not args.quick:
        common.write("caches", rows, ("batch", "context", "weights"))


def _ratios(around: list[list[float]], side: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile of peer / side, round by round; the peer: the mean of its turns around."""
    each = [fmean(peer) / b for *peer, b in zip(*around, side)]
    return quantiles(each, n=4) if len(each) > 1 else each * 3


if __name__ == "__main__":
    main()
