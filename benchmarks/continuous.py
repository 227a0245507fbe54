"""Decode steps against transformers' continuous batching (`generate_batch`), SmolLM2 fp32, greedy, 8 prompts of 256.

A step of the peer is the time between two token timestamps of its requests, after the last request's first token (so
that no prompt is still being prefilled); ours is the wall time of Engine.step over the same range. Wall time on one
thread, since the peer stamps wall time from a thread of its own: run it on a quiet machine. The peer's pool holds what
the prompts need, 512 tokens a step at most, like ours.
"""

from __future__ import annotations

import copy
import time
from itertools import pairwise
from statistics import median

import common

PEER = "transformers generate_batch"
METHODS = ("full", "turboquant")
PAGE = 256  # tokens: the peer's default


def main() -> None:
    args = common.arguments(__doc__.splitlines()[0], length=256, new=16)
    common.setup()
    import torch
    from transformers import GenerationConfig

    from kvlab.models.load import ModelCfg, load

    loaded = load(ModelCfg())
    peer = copy.deepcopy(loaded.model)
    batch, length, new = (2, 100, 8) if args.quick else (8, args.length, args.new)
    ids = torch.randint(10, 49_000, (batch, length), generator=torch.Generator().manual_seed(0)).tolist()
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    figures: dict[str, list[float]] = {PEER: [], **{f"kvlab {m}": [] for m in METHODS}}
    equal = None
    for _ in range(min(args.rounds, 2)):  # a round takes a minute
        step, outputs = _peer(peer, ids, config)
        figures[PEER].append(step)
        for method in METHODS:
            step, ours = _ours(loaded, method, ids, new)
            figures[f"kvlab {method}"].append(step)
            if method == "full":
                equal = sum(a == b for a, b in zip(outputs, ours))
    facts = {"batch": batch, "context": length, "model": loaded.id, "dtype": "float32", "equal_outputs": equal}
    rows = common.report("continuous", figures, PEER, True, **facts)
    for row in rows:
        row["clock"] = "wall, 1 thread"
    if not args.quick:
        common.write("continuous", rows, ("batch", "context"))


def _peer(model, ids: list[list[int]], config) -> tuple[float, list[list[int]]]:
    from transformers import ContinuousBatchingConfig

    model.set_attn_implementation("sdpa")
    blocks = len(ids) * (-(-(len(ids[0]) + config.max_new_tokens) // PAGE) + 1)  # else: 9/10 of the memory
    pages = ContinuousBatchingConfig(page_size=PAGE, num_blocks=blocks, max_batch_tokens=512)
    out = model.generate_batch(
        ids, generation_config=config, continuous_batching_config=pages, record_timestamps=True, warmup=False
    )
    stamps = [r.timestamps for r in out.values()]
    begin = max(s[0] for s in stamps)
    gaps = []
    for s in stamps:
        later = [t for t in s if t >= begin]
        gaps += [b - a for a, b in pairwise(later)]
    order = sorted(out, key=lambda k: ids.index(list(out[k].prompt_ids)))
    return median(gaps), [list(out[k].generated_tokens) for k in order]


def _ours(loaded, method: str, ids: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
    from kvlab import registry
    from kvlab.engine.config import EngineCfg
    from kvlab.engine.sequence import Sampling
    from kvlab.lab import Lab

    lab = Lab(loaded, registry.build(method), EngineCfg(max_seqs=len(ids), max_len=len(ids[0]) + new))
    seqs = [lab.engine.add(row, Sampling(max_tokens=new)) for row in ids]
    while not all(s.output for s in seqs):
        lab.engine.step()
    times = []
    while all(s.finish_reason is None for s in seqs):
        start = time.perf_counter()
        lab.engine.step()
        times.append(time.perf_counter() - start)
    lab.engine.run()
    return median(times), [s.output for s in seqs]


if __name__ == "__main__":
    main()
