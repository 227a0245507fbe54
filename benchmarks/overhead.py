"""Where a decode step of SmolLM2 goes: CPU time on one thread, context 512, by method, weights and batch.

linears     the matrix products alone, one call each, on the same weights
attention   what a step's calls for pages take (encode, append, seal, attend), timed in a step that goes layer by layer
rest        total - linears - attention: norms, rope, gate, residual, embedding, scheduler, block tables, sampling
total       a step as it is, without any stopwatch
"""

from __future__ import annotations

import os
import time
from statistics import median

import common
from ours import Ours, setting

METHODS = ("full", "int4", "turboquant", "kivi")
STEPS = 5  # of a turn, after one that is not timed
TIMES = 3  # rounds for each of --rounds: what is left of a difference of three times is as noisy as all of them
PARTS = ("linears", "attention", "rest", "total")
PAGES = ("kv_append", "kv_seal", "kv_attend")


class Timed:
    """A kernel library whose calls for pages add up their CPU seconds."""

    def __init__(self, lib) -> None:
        self.lib, self.spent = lib, 0.0

    def __getattr__(self, name: str):
        call = getattr(self.lib, name)
        return self._timed(call) if name in PAGES else call

    def _timed(self, call):
        def timed(*args):
            start = time.process_time()
            out = call(*args)
            self.spent += time.process_time() - start
            return out

        return timed


def attention(lab) -> float:
    """CPU seconds of the page kernels in a step."""
    layers = [x for bound in lab.compressor.packed._bound.values() for x in bound.values()]
    timed, plain = Timed(layers[0].lib), layers[0].lib
    lab.compressor.turn = lambda pages: None
    for x in layers:
        x.lib = timed
    try:
        for _ in range(STEPS):
            lab.engine.step()
    finally:
        del lab.compressor.turn
        for x in layers:
            x.lib = plain
    return timed.spent / STEPS


def linears(lab, batch: int):
    """A call that makes all products of a decode step, alone."""
    import torch

    step = lab.runner.body.step
    parts = [m for p in step.parts for m in (p.qkv, p.o, p.gate_up, p.down)] + [step.head_matrix]
    calls, kept = [], []
    for m in parts:
        width = -(-m.outputs // 32) * 32
        x, out = torch.randn(batch, m.inputs), torch.empty(batch, width)
        work = torch.empty(step.lib.kv_matrix_bytes(m.struct, batch), dtype=torch.uint8)
        kept += [x, out, work]
        calls.append(
            (m.struct, None, 0.0, x.data_ptr(), m.inputs, batch, out.data_ptr(), width, work.data_ptr(), len(work), 1)
        )

    def run(kept=kept) -> None:
        for args in calls:
            step.lib.kv_head(*args)

    return run


def measure(lab, products) -> dict[str, float]:
    """Seconds of each part of a step."""
    step = Ours.step(lab)
    step()
    total = common.cpu(lambda: [step() for _ in range(STEPS)]) / STEPS
    pages = attention(lab)
    alone = common.cpu(lambda: [products() for _ in range(STEPS)]) / STEPS
    return {"linears": alone, "attention": pages, "rest": total - alone - pages, "total": total}


def main() -> None:
    args = common.arguments(__doc__.splitlines()[0], context=512, weights="model,int8")
    common.setup()
    from kvlab.models.load import ModelCfg, load

    loaded = load(ModelCfg())
    ours, context = Ours(loaded), 64 if args.quick else args.context
    rounds = 1 if args.quick else TIMES * args.rounds
    room = (rounds + 1) * (2 * STEPS + 1) + 1
    for batch in (1,) if args.quick else (1, 8):
        labs = {}
        for weights in args.weights.split(","):
            for method in METHODS:
                s = setting(method, weights)
                lab = ours.lab(s, batch, context, room)
                row = ours.row(lab, s)
                if not hasattr(lab.runner, "body") or not hasattr(lab.runner.body, "step"):
                    print(f"  left out: {method}, {weights} weights: the compiled step does not run here")
                    continue
                labs[row["side"]] = lab, row, linears(lab, batch)
        if labs:
            runs = {n: (lambda lab=lab, p=p: measure(lab, p)) for n, (lab, _, p) in labs.items()}
            figures = common.rounds(runs, rounds)
            report(args, figures, {n: r for n, (_, r, _) in labs.items()}, batch, context, loaded.id)


def report(args, figures: dict, rows: dict, batch: int, context: int, model: str) -> None:
    load = os.getloadavg()[0]
    print(f"\noverhead  batch {batch}, context {context}, {model}, ms of CPU time on 1 thread, load {load:.1f}")
    print(f"  {'side':46s}" + "".join(f"{p:>11s}" for p in PARTS))
    out = []
    for name, values in figures.items():
        ms = {part: 1000 * median(v[part] for v in values) for part in PARTS}
        print(f"  {name:46s}" + "".join(f"{v:11.2f}" for v in ms.values()))
        figure = {f"ms_{part}": v for part, v in ms.items()}
        facts = {"batch": batch, "context": context, "model": model, "clock": "process CPU time, 1 thread"}
        out.append({"bench": "overhead", **rows[name], **facts, **figure, "rounds": len(values), "load": load})
    if out and not args.quick:
        common.write("overhead", out, ("batch", "context"))


if __name__ == "__main__":
    main()
