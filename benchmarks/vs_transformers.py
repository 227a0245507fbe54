"""Whole decode steps of SmolLM2 against transformers' caches: wall time at the best thread count, CPU time on one.

peers  forward + argmax with DynamicCache and StaticCache (fp32; bf16 weights and cache), and QuantizedCache where its
       backend is installed (`make peers`). The bf16 DynamicCache is shown and never compared with: torch's attention
       takes a slow path there
ours   Engine.step (scheduler, pages, attention, sampling): the lean step with fp32, bf16 and int8 weights, times the
       full cache (in bf16; with fp32 weights in fp32 too), int4, turboquant and kivi

Caches hold random keys and values (ours.py, peers.py); turns, rounds and figures: clocks.py. Ratios are against the
fastest transformers side of the case, whatever its weights; rows name the weights of each.
"""

from __future__ import annotations

import gc

import clocks
import common
from ours import Ours, Setting, named
from peers import CACHES, Peers

WEIGHTS = "model,bf16,int8"
METHODS = {
    "full": {"dtype": "float32"}, "full bf16": {"dtype": "bfloat16"}, "int4": {}, "turboquant": {}, "kivi": {},
    "int4 fast": {}, "turboquant fast": {},
}  # fmt: skip


def main() -> None:
    args = common.arguments(__doc__.splitlines()[0], cases="", weights=WEIGHTS, only="")
    common.setup()
    from kvlab.models.load import ModelCfg, load

    loaded = load(ModelCfg())
    peers, ours = Peers(loaded.model), Ours(loaded)
    for batch, context in clocks.cases(args):
        case(args, loaded, peers, ours, batch, context)


def case(args, loaded, peers: Peers, ours: Ours, batch: int, context: int) -> None:
    room = clocks.room(args.rounds)
    if context + room > loaded.max_length:
        raise SystemExit(f"context {context} and {room} steps do not fit into {loaded.max_length}: fewer --rounds")
    sides, facts = {}, {}
    gc.collect()  # the case before

    def add(name: str, make) -> None:
        """make() -> (step, facts); a side that cannot be made is reported and left out."""
        if args.only and not any(word in name for word in args.only.split(",")):
            return
        try:
            step, row = make()
        except ImportError:
            print(f"  left out: {name}: its package is not installed (`make peers`)")
            return
        except Exception as error:
            print(f"  left out: {name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return
        sides[row["side"]], facts[row["side"]] = clocks.turns(step), row

    def lab(s: Setting):
        made = ours.lab(s, batch, context, room)
        return ours.step(made), ours.row(made, s)

    for name in CACHES:
        add(f"transformers {name}", lambda name=name: peers.step(name, batch, context, room))
    for weights in args.weights.split(","):
        for name, options in METHODS.items():
            if weights != {"full": "model"}.get(name, "int8" if name.endswith(" fast") else weights):
                continue
            s = named(name, weights, options)
            add(f"kvlab {name} {weights}", lambda s=s: lab(s))
    threads = common.thread_counts()
    with clocks.Watch() as watch:
        times = clocks.run(sides, args.rounds, threads, clocks.QUICK if args.quick else clocks.BUDGET)
    rows = [facts[n] | t.row() | {"extra": "known slow" in n} | watch.facts for n, t in times.items()]
    told = {"batch": batch, "context": context, "model": loaded.id, "clock": "wall at best threads; CPU on 1"}
    part = bool(args.only) or args.weights != WEIGHTS  # rows of two runs would stand side by side
    clocks.report("vs_transformers", rows, "transformers", args.quick or part, **told)


if __name__ == "__main__":
    main()
