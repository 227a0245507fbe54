"""Prefill of one prompt through the paged runtime against transformers' forward, same dtype.

Prompt queries read what decoding will read (encoded pages), so a method's encode and decode are part of its figure.
"""

from __future__ import annotations

import copy

import common

METHODS = ("full", "fp8", "int8", "int4", "kivi", "turboquant", "snapkv", "h2o", "streaming_llm", "random")


def main() -> None:
    args = common.arguments(__doc__.splitlines()[0], length=2000)
    common.setup()
    import torch
    from transformers import DynamicCache

    from kvlab.models.load import ModelCfg, load

    loaded = load(ModelCfg())
    peer = copy.deepcopy(loaded.model)
    length = 200 if args.quick else args.length
    ids = torch.randint(10, 49_000, (1, length), generator=torch.Generator().manual_seed(0))

    def transformers() -> None:
        with torch.inference_mode():
            peer(ids, past_key_values=DynamicCache(config=peer.config), use_cache=True, logits_to_keep=1)

    sides = {"transformers DynamicCache": transformers}
    sides |= {f"kvlab {m}": _ours(loaded, m, ids[0].tolist()) for m in (METHODS[:2] if args.quick else METHODS)}
    runs = 1 if args.quick else args.rounds
    figures = common.rounds({k: (lambda run=run: common.cpu(run)) for k, run in sides.items()}, runs)
    facts = {"batch": 1, "context": length, "chunk": 512, "block": 32, "model": loaded.id, "dtype": "float32"}
    common.report("prefill", figures, "transformers DynamicCache", args.quick, **facts)


def _ours(loaded, method: str, tokens: list[int]):
    from kvlab import registry
    from kvlab.engine.config import EngineCfg
    from kvlab.engine.sequence import Sampling
    from kvlab.lab import Lab

    lab = Lab(loaded, registry.build(method), EngineCfg(max_seqs=1, max_len=len(tokens) + 1))

    def run() -> None:
        lab.engine.add(tokens, Sampling(max_tokens=1))
        lab.engine.run()

    return run


if __name__ == "__main__":
    main()
