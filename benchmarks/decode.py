"""Decode steps through the paged runtime against transformers, SmolLM2 fp32, greedy.

peer  the model's forward with a DynamicCache, one token a step: what `generate` runs, without its own overhead
ours  Engine.step: scheduler, block tables, pages, attention, sampling, everything

Both start from the same prefilled context; steps are interleaved, so that a drift of the machine hits both.
"""

from __future__ import annotations

import copy
from functools import partial

import common


def main() -> None:
    args = common.arguments(__doc__.splitlines()[0])
    common.setup()
    import torch
    from transformers import DynamicCache

    from kvlab.models.load import ModelCfg, load

    loaded = load(ModelCfg())
    peer = copy.deepcopy(loaded.model)
    lone = {"min_rows": 1, "tile": 512}  # what one stream alone can afford: see EngineCfg.min_rows
    cases = [
        (8, 1000, {"full/16": {}, "full/64": {}, "int4/64": {}, "turboquant/64": {}}),
        (1, 2000, {"full/64": {}, "full/64/lone": lone}),
    ]
    if args.quick:
        cases = [(2, 100, {"full/16": {}, "int4/16": {}})]
    for batch, length, sides in cases:
        torch.manual_seed(0)
        ids = torch.randint(10, 49_000, (batch, length))
        runs = {"transformers DynamicCache": _peer(peer, ids, DynamicCache)}
        for side, options in sides.items():
            method, block, *_ = side.split("/")
            told = "".join(f", {k} {v}" for k, v in options.items())
            runs[f"kvlab {method} block {block}{told}"] = _ours(loaded, method, int(block), ids, options)
        steps = 2 if args.quick else 6
        figures = common.rounds({k: partial(_steps, r, steps) for k, r in runs.items()}, args.rounds)
        facts = {"batch": batch, "context": length, "model": loaded.id, "dtype": "float32"}
        common.report("decode", figures, "transformers DynamicCache", args.quick, **facts)


def _steps(run, n: int) -> float:
    """CPU seconds per step."""
    return common.cpu(lambda: [run() for _ in range(n)]) / n


def _peer(model, ids, make):
    import torch

    cache = make(config=model.config)
    with torch.inference_mode():
        token = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)[:, None]
    state = {"token": token}

    def step() -> None:
        with torch.inference_mode():
            out = model(state["token"], past_key_values=cache, use_cache=True, logits_to_keep=1)
            state["token"] = out.logits[:, -1].argmax(-1)[:, None]

    return step


def _ours(loaded, method: str, block: int, ids, options: dict):
    from kvlab import registry
    from kvlab.engine.config import EngineCfg
    from kvlab.engine.sequence import Sampling
    from kvlab.lab import Lab

    batch, length = ids.shape
    cfg = EngineCfg(block=block, max_seqs=batch, max_len=length + 512, **options)
    lab = Lab(loaded, registry.build(method), cfg)
    seqs = [lab.engine.add(row, Sampling(max_tokens=500)) for row in ids.tolist()]
    while any(s.missing > 1 or not s.output for s in seqs):
        lab.engine.step()
    return lab.engine.step


if __name__ == "__main__":
    main()
