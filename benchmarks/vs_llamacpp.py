"""Whole decode steps of SmolLM2 against a native llama.cpp at its best setting, and prefill of 2,048 tokens.

peer   llama_decode of one token per sequence (no sampler), swept over its weights {the file as shipped (Q4_1), Q8_0,
       Q4_0} x flash attention x threads with a float16 cache, and with a q4_0 cache, which needs flash attention. Its
       best of each cache is what ratios are against
ours   Engine.step (scheduler, pages, attention, greedy sampling) with int8 and bf16 weights: the full bf16 cache, int4
       and turboquant, these with the fast arithmetic too (int8 weights)

Two processes take turns (llamacpp.py; turns, rounds and figures: clocks.py). Weights differ (8, 16 and 4 bits), so
these are ratios of systems, not of caches. llama.cpp's caches come from a real prompt, ours hold random keys and
values. At 8,000 tokens the q4_0 cache is left out: filling it takes minutes.
Prefill is wall time on all cores: llama.cpp's two fastest settings of a sweep at 512 tokens against our prompts.
"""

from __future__ import annotations

import gc
import time
from statistics import median

import clocks
import common
from llamacpp import Absent, Worker
from ours import Ours, named

WEIGHTS = "int8,bf16"
METHODS = {"full": {"dtype": "bfloat16"}, "int4": {}, "turboquant": {}, "int4 fast": {}, "turboquant fast": {}}
BITS = {"f16": 16, "q4_0": 4.5}
Q4_UP_TO = 2048


def main() -> None:
    args = common.arguments(__doc__.splitlines()[0], cases="", weights=WEIGHTS, prefill=2048)
    common.setup()
    try:
        worker = Worker()
    except Absent as why:
        print(f"vs_llamacpp is skipped: {why}")
        return
    from kvlab.models.load import ModelCfg, load
    from kvlab.models.smollm2 import find_gguf

    files = worker.models(find_gguf())
    print(f"llama-cpp-python {worker.info['version']}: {worker.info['system']}")
    loaded = load(ModelCfg())
    ours = Ours(loaded)
    for batch, context in clocks.cases(args):
        decode(args, worker, files, ours, batch, context)
    if args.prefill:
        prefill(args, worker, files, loaded, 64 if args.quick else args.prefill)
    worker.end()


def settings(files: dict, context: int) -> list[tuple[str, str, bool]]:
    """(weights, cache, flash attention). First those whose prompts run fastest: others get copies of their cache."""
    kinds = list(files)[::-1]
    f16 = [(w, "f16", flash) for flash in (False, True) for w in kinds]
    return f16 + [(w, "q4_0", True) for w in kinds if context <= Q4_UP_TO]


def decode(args, worker: Worker, files: dict, ours: Ours, batch: int, context: int) -> None:
    room, threads = clocks.room(args.rounds), common.thread_counts()
    sides, facts = {}, {}
    gc.collect()  # the case before
    for weights, cache, flash in settings(files, context):
        row = peer_row(worker, files, weights, cache, flash)
        row["cache_bytes"] = int(_elements(ours.loaded) * batch * context * BITS[cache] / 8)
        try:
            where = {"batch": batch, "context": context, "room": room, "threads": threads[-1]}
            worker.call("open", id=row["side"], weights=weights, cache=cache, flash=flash, **where)
        except RuntimeError as error:
            print(f"  left out: {row['side']}: {error}")
            continue
        sides[row["side"]], facts[row["side"]] = _turn(worker, row["side"]), row
    for weights in args.weights.split(","):
        for method, options in METHODS.items():
            try:
                if method.endswith(" fast") and weights != "int8":
                    continue
                s = named(method, weights, options)
                lab = ours.lab(s, batch, context, room)
                row = ours.row(lab, s)
            except Exception as error:
                print(f"  left out: kvlab {method}, {weights} weights: {type(error).__name__}: {error}")
                continue
            sides[row["side"]], facts[row["side"]] = clocks.turns(ours.step(lab)), row
    with clocks.Watch((worker.pid,)) as watch:
        times = clocks.run(sides, args.rounds, threads, clocks.QUICK if args.quick else clocks.BUDGET)
    rows = [facts[n] | t.row() | {"extra": facts[n]["cache"] == "q4_0"} | watch.facts for n, t in times.items()]
    if small := [r for r in rows if r["cache"] == "q4_0"]:
        best, best_cpu = (min(small, key=lambda r: r[k]) for k in ("ms_wall", "ms_cpu_1"))
        for r in rows:
            r |= {"best_q4_0": best["side"], "x_best_q4_0": best["ms_wall"] / r["ms_wall"]}
            r["x_best_q4_0_cpu"] = best_cpu["ms_cpu_1"] / r["ms_cpu_1"]
    told = {"batch": batch, "context": context, "model": ours.loaded.id, "clock": "wall at best threads; CPU on 1"}
    part = args.weights != WEIGHTS  # rows of two runs would stand side by side
    clocks.report("vs_llamacpp", rows, "llama.cpp", args.quick or part, **told)
    worker.call("close")


def peer_row(worker: Worker, files: dict, weights: str, cache: str, flash: bool) -> dict:
    return {
        "side": f"llama.cpp {weights}, {cache} cache, flash attention {'on' if flash else 'off'}", "who": "llama.cpp",
        "method": cache, "cache": cache, "weights": weights, "flash": flash, "file": files[weights].name,
        "llama_cpp": worker.info,
    }  # fmt: skip


def _elements(loaded) -> int:
    """Scalars of K and V per token."""
    c = loaded.model.config
    return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim


def _turn(worker: Worker, id: str):
    return lambda threads, steps: worker.call("turn", id=id, threads=threads, steps=steps)


def prefill(args, worker: Worker, files: dict, loaded, length: int) -> None:
    import torch

    threads, probe = common.thread_counts()[-1], min(512, length)
    swept = {}
    for weights, cache, flash in settings(files, Q4_UP_TO + 1):
        name = f"llama.cpp {weights}, f16 cache, flash attention {'on' if flash else 'off'}"
        where = {"batch": 1, "context": 64, "room": length, "threads": threads}
        worker.call("open", id=name, weights=weights, cache=cache, flash=flash, **where)
        swept[name] = min(worker.call("prompt", id=name, tokens=probe, threads=threads)[0] for _ in range(2))
    print(f"\nprefill sweep, {probe} tokens: " + ", ".join(f"{n} {probe / s:.0f} tok/s" for n, s in swept.items()))
    best = sorted(swept, key=swept.get)[:2]
    sides = {n: (lambda n=n: worker.call("prompt", id=n, tokens=length, threads=threads)[0]) for n in best}
    for method, weights in (("full", "int8"), ("turboquant", "int8"), ("turboquant", "model"), ("turboquant", "bf16")):
        sides[f"kvlab {method}, {weights} weights"] = _prompt(loaded, method, weights, length)
    torch.set_num_threads(threads)
    figures: dict[str, list[float]] = {n: [] for n in sides}
    with clocks.Watch((worker.pid,)) as watch:
        for _ in range(min(args.rounds, 2)):
            for name, run in sides.items():
                time.sleep(clocks.PAUSE)
                figures[name].append(run())
    peer = min(best, key=lambda n: median(figures[n]))
    told = {"batch": 1, "context": length, "model": loaded.id, "clock": f"wall, {threads} threads"}
    rows = common.report("prefill_llamacpp", figures, peer, True, **told)
    rows = [r | watch.facts | {"clock": told["clock"], "peer": "llama.cpp", "best_peer": peer} for r in rows]
    if not args.quick:
        common.write("prefill_llamacpp", rows, ("batch", "context"))
    worker.call("close")


def _prompt(loaded, method: str, weights: str, length: int):
    from dataclasses import replace

    from kvlab import registry
    from kvlab.engine.config import EngineCfg
    from kvlab.engine.sequence import Sampling
    from kvlab.lab import Lab

    cfg = EngineCfg(max_seqs=1, max_len=length + 1, weights=weights)
    lab = Lab(replace(loaded), registry.build(method), cfg)
    tokens = [100 + i % 40_000 for i in range(0, 7 * length, 7)]

    def run() -> float:
        start = time.perf_counter()
        lab.engine.add(tokens, Sampling(max_tokens=1))
        lab.engine.run()
        return time.perf_counter() - start

    lab.engine.add(tokens[:64], Sampling(max_tokens=1))
    lab.engine.run()
    return run


if __name__ == "__main__":
    main()
