"""Decode steps by block size and runtime options, against transformers' DynamicCache: SmolLM2 fp32, 1 thread, CPU time.

peer  the model's forward and argmax, one token a step: what `generate` runs, without its own overhead
ours  Engine.step: scheduler, block tables, pages, attention, sampling, everything; `hf` runs transformers' forward
      through the pages instead of the lean step, `torch` leaves out the compiled kernels

Both hold random keys and values (ours.py, peers.py); steps are interleaved, so that a drift of the machine hits both.
"""

from __future__ import annotations

from functools import partial

import common
from ours import Ours, setting
from peers import Peers

PEER = "transformers DynamicCache"
OPTIONS = {"hf": {"step": "hf"}, "torch": {"kernels": "off"}, "hf torch": {"step": "hf", "kernels": "off"}}
CASES = [
    (8, 1000, ("full/16", "full/32", "full/64", "int4/32", "turboquant/16", "turboquant/32", "turboquant/64")),
    (1, 2000, ("full/32", "turboquant/32", "full/32/hf", "turboquant/32/hf", "full/32/torch", "full/32/hf torch")),
]


def main() -> None:
    args = common.arguments(__doc__.splitlines()[0])
    common.setup()
    from kvlab.models.load import ModelCfg, load

    loaded = load(ModelCfg())
    peers, ours = Peers(loaded.model), Ours(loaded)
    for batch, context, sides in [(2, 100, ("full/16", "int4/32"))] if args.quick else CASES:
        steps = 2 if args.quick else 4
        room = (steps + 1) * (args.rounds + 1) + 1
        runs = {PEER: peers.step("DynamicCache fp32", batch, context, room)[0]}
        for side in sides:
            method, block, *how = side.split("/")
            s = setting(method, runtime={"block": int(block)} | (OPTIONS[how[0]] if how else {}))
            told = "".join(f", {k} {v}" for k, v in s.runtime if k != "block")
            runs[f"kvlab {method} block {block}{told}"] = ours.step(ours.lab(s, batch, context, room))
        figures = common.rounds({k: partial(_steps, r, steps) for k, r in runs.items()}, args.rounds)
        facts = {"batch": batch, "context": context, "model": loaded.id, "dtype": "float32"}
        common.report("decode", figures, PEER, args.quick, **facts)


def _steps(run, n: int) -> float:
    """CPU seconds per step, after one that is not timed."""
    run()
    return common.cpu(lambda: [run() for _ in range(n)]) / n


if __name__ == "__main__":
    main()
