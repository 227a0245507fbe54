"""Prefill of one prompt through the paged runtime against transformers' forward: CPU time on one thread.

Prompt queries read what decoding will read (encoded pages), so a method's encode and decode are part of its figure.
Every method runs with float32 weights, full and turboquant with bf16 and int8 weights too, and, where the CPU
multiplies bfloat16 numbers, beside a bf16 transformers.
"""

from __future__ import annotations

from dataclasses import replace

import common

METHODS = ("full", "fp8", "int8", "int4", "kivi", "turboquant", "snapkv", "h2o", "streaming_llm", "random")
FAST = ("full", "turboquant")  # with bf16 and int8 weights


def main() -> None:
    args = common.arguments(__doc__.splitlines()[0], length=2000)
    common.setup()
    import torch
    from peers import Peers
    from transformers import DynamicCache

    from kvlab.models.load import ModelCfg, load

    loaded = load(ModelCfg())
    peers = Peers(loaded.model)
    length = 200 if args.quick else args.length
    ids = torch.randint(10, 49_000, (1, length), generator=torch.Generator().manual_seed(0))

    def transformers(dtype: str) -> None:
        peers.forward(dtype, ids, DynamicCache(config=peers.model(dtype).config))

    sides = {"transformers DynamicCache": lambda: transformers("float32")}
    if common.has_bf16():
        sides["transformers DynamicCache bf16"] = lambda: transformers("bfloat16")
    kinds = {weights: replace(loaded) for weights in ("model", "bf16", "int8")}  # each keeps its converted weights
    tokens = ids[0].tolist()
    for m in METHODS[:2] if args.quick else METHODS:
        sides[f"kvlab {m}"] = _ours(kinds["model"], m, tokens, "model")
    for weights in ("bf16", "int8"):
        for m in FAST[:1] if args.quick else FAST:
            sides[f"kvlab {m}, {weights} weights"] = _ours(kinds[weights], m, tokens, weights)
    figures = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, run in sides.items():
            figures[name].append(common.cpu(run))
    facts = {"batch": 1, "context": length, "chunk": 512, "block": 32, "model": loaded.id, "dtype": "float32"}
    common.report("prefill", figures, "transformers DynamicCache", args.quick, **facts)


def _ours(loaded, method: str, tokens: list[int], weights: str):
    from kvlab import registry
    from kvlab.engine.config import EngineCfg
    from kvlab.engine.sequence import Sampling
    from kvlab.lab import Lab

    lab = Lab(loaded, registry.build(method), EngineCfg(max_seqs=1, max_len=len(tokens) + 1, weights=weights))

    def run(tokens=tokens) -> None:
        lab.engine.add(tokens, Sampling(max_tokens=1))
        lab.engine.run()

    run(tokens[:64])
    return run


if __name__ == "__main__":
    main()
