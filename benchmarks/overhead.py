"""Where a decode step of SmolLM2 goes: CPU time on one thread, context 512, by method, weights and batch.

linears     the lean step's products (models/weights.Linear), padding and conversions included
attention   Compressor.write (encode, append, seal) and Compressor.attend
small ops   the rest of the model's forward: embedding, norms, rope, activation, residual
engine      the rest of Engine.step: scheduler, block tables, sampling, books
total       the same step in another turn, without any stopwatch; the parts should add up to it

Stopwatches exist only during a watched turn; their own cost, measured on an empty function, is taken off the parts.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from statistics import median

import common
from ours import Ours, setting

METHODS = ("full", "int4", "turboquant", "kivi")
STEPS = 5  # of a turn, after one that is not timed
PARTS = ("linears", "attention", "small ops", "engine")


class Stopwatch:
    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def wrap(self, name: str, call):
        def timed(*args, **kwargs):
            start = time.process_time()
            out = call(*args, **kwargs)
            self.spent[name] += time.process_time() - start
            self.calls[name] += 1
            return out

        return timed

    @contextmanager
    def on(self, lab):
        """Around linears, attention and the model's forward of one Lab."""
        from kvlab.models.weights import Linear

        plain = Linear.__call__
        Linear.__call__ = self.wrap("linears", plain)
        c, e, forward = lab.compressor, lab.engine, lab.engine.forward
        c.write, c.attend = self.wrap("attention", c.write), self.wrap("attention", c.attend)
        e.forward = self.wrap("model", forward)
        try:
            yield
        finally:
            Linear.__call__, e.forward = plain, forward
            del c.write, c.attend


def own_cost(n: int = 20_000) -> tuple[float, float]:
    """Seconds that a stopwatch adds to what it measures, and to what is around it."""
    watch = Stopwatch()
    empty, timed = (lambda: None), watch.wrap("x", lambda: None)
    bare = common.cpu(lambda: [empty() for _ in range(n)])
    whole = common.cpu(lambda: [timed() for _ in range(n)])
    inside = watch.spent["x"] / n
    return inside, max((whole - bare) / n - inside, 0.0)


def measure(lab, cost: tuple[float, float]) -> dict[str, float]:
    """Seconds of each part in one step: a turn without stopwatches, then one with them."""
    step = lab.engine.step
    step()
    total = common.cpu(lambda: [step() for _ in range(STEPS)]) / STEPS
    watch, (inside, around) = Stopwatch(), cost
    with watch.on(lab):
        watched = common.cpu(lambda: [step() for _ in range(STEPS)]) / STEPS
    part = {k: (v - watch.calls[k] * inside) / STEPS for k, v in watch.spent.items()}
    inner = watch.calls["linears"] + watch.calls["attention"]
    model = part["model"] - inner * (inside + around) / STEPS
    engine = watched - part["model"] - (inside + around) * watch.calls["model"] / STEPS
    small = model - part["linears"] - part["attention"]
    return {
        "linears": part["linears"], "attention": part["attention"], "small ops": small, "engine": engine,
        "total": total,
    }  # fmt: skip


def main() -> None:
    args = common.arguments(__doc__.splitlines()[0], context=512, weights="model,int8")
    common.setup()
    from kvlab.models.load import ModelCfg, load

    loaded = load(ModelCfg())
    ours, context = Ours(loaded), 64 if args.quick else args.context
    room = (args.rounds + 1) * (2 * STEPS + 1) + 1
    cost = own_cost()
    for batch in (1,) if args.quick else (1, 8):
        labs = {}
        for weights in args.weights.split(","):
            for method in METHODS:
                s = setting(method, weights)
                try:
                    lab = ours.lab(s, batch, context, room)
                    row = ours.row(lab, s)
                    assert row["step"]["step"] == "lean", "stopwatches know the lean step only"
                except Exception as error:
                    print(f"  left out: {method}, {weights} weights: {type(error).__name__}: {error}")
                    continue
                labs[row["side"]] = lab, row
        figures = common.rounds({n: (lambda lab=lab: measure(lab, cost)) for n, (lab, _) in labs.items()}, args.rounds)
        report(args, figures, {n: r for n, (_, r) in labs.items()}, batch, context, loaded.id)


def report(args, figures: dict, rows: dict, batch: int, context: int, model: str) -> None:
    load = os.getloadavg()[0]
    print(f"\noverhead  batch {batch}, context {context}, {model}, ms of CPU time on 1 thread, load {load:.1f}")
    print(f"  {'side':46s}" + "".join(f"{p:>11s}" for p in (*PARTS, "total")))
    out = []
    for name, values in figures.items():
        ms = {part: 1000 * median(v[part] for v in values) for part in (*PARTS, "total")}
        print(f"  {name:46s}" + "".join(f"{v:11.2f}" for v in ms.values()))
        figure = {f"ms_{part.replace(' ', '_')}": v for part, v in ms.items()}
        facts = {"batch": batch, "context": context, "model": model, "clock": "process CPU time, 1 thread"}
        out.append({"bench": "overhead", **rows[name], **facts, **figure, "rounds": len(values), "load": load})
    if out and not args.quick:
        common.write("overhead", out, ("batch", "context"))


if __name__ == "__main__":
    main()
