"""The ratios that the CPU work set out to reach, and what the rows say: python experiments/goals.py [FOLDER OF ROWS]

A ratio is peer / ours in wall time of a decode step, each at its best number of threads (attention and the parts of a
step: CPU time on one thread). Exit code 1 when a ratio was measured and is below its goal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import faster

TQ = {"who": "kvlab", "weights": "int8", "method": "turboquant"}  # in the exact arithmetic unless said
OWN = {512: 0.97, 2048: 1.1, 8000: 1.4}  # codes up to 5 bits against the full bf16 cache of the same step, by context
STATIC = {"side": "transformers StaticCache bf16"}
# (what, rows, peer's facts, ours, {(batch, context): at least}); a fact matches what begins like it, the fastest counts
STEPS = [
    ("transformers StaticCache bf16 / turboquant, int8 weights", "vs_transformers", STATIC, TQ,
     {(1, 512): 2.5, (1, 8000): 3.5, (8, 2048): 3.5}),
    ("transformers StaticCache bf16 / full bf16, bf16 weights", "vs_transformers", STATIC,
     {"who": "kvlab", "weights": "bf16", "cache": "full bfloat16"}, {(1, 512): 1.3}),
    ("llama.cpp, f16 cache / turboquant, int8 weights", "vs_llamacpp", {"who": "llama.cpp", "cache": "f16"}, TQ,
     {(1, 512): 0.85, (1, 2048): 1.1, (1, 8000): 1.7, (8, 512): 1.7, (8, 2048): 2.7}),
    ("llama.cpp, q4_0 cache / turboquant, int8 weights", "vs_llamacpp", {"who": "llama.cpp", "cache": "q4_0"}, TQ,
     {(1, 2048): 2.0, (8, 2048): 6.0}),
]  # fmt: skip
ATTENTION = [  # (codec, shape, context, at least) against the best contiguous bf16 form
    ("int4 g64", "SmolLM2-135M", 8192, 2.5), ("turboquant 4", "SmolLM2-135M", 8192, 2.5),
    ("int4 g64", "SmolLM2-135M", 32768, 2.2), ("turboquant 4", "SmolLM2-135M", 32768, 2.2),
    ("int4 g64 fast", "SmolLM2-135M", 8192, 3.5), ("turboquant 4 fast", "SmolLM2-135M", 8192, 3.5),
    ("int4 g64 fast", "SmolLM2-135M", 32768, 3.0), ("turboquant 4 fast", "SmolLM2-135M", 32768, 3.0),
    ("full bfloat16", "SmolLM2-135M", 32768, 1.0), ("full bfloat16", "Llama-3-8B", 32768, 0.8),
]  # fmt: skip
LOW_BITS = [("turboquant 2", 0.9), ("turboquant 3", 0.75), ("int2 g64", 0.9), ("int3 g64", 0.75)]  # against 4 bit
PREFILL, PRUNERS = {"codecs": 0.9, "pruners": 0.8}, ("snapkv", "h2o", "streaming_llm", "random")
REST_MS = 2.5  # of a step outside linears and attention

Goal = tuple[str, float | None, float]  # what, ratio (None: no rows), at least


def goals(folder: Path) -> Iterator[Goal]:
    for what, bench, peer, ours, cases in STEPS:
        data = faster.rows(bench, folder)
        for case, least in cases.items():
            for said, fast in (("", False), (", fast", True)):
                if fast and ours is not TQ:
                    continue
                pair = _fastest(data, case, peer), _fastest(data, case, ours, fast)
                yield f"{what}{said}, {case[0]} x {case[1]:,}", None if None in pair else pair[0] / pair[1], least
    for r in faster.rows("caches", folder):
        if r["codec"] not in ("full bf16", "fp8", "int8") and r["weights"] == "int8" and r["context"] in OWN:
            yield (
                f"own full bf16 cache / {r['codec']}, int8 weights, 1 x {r['context']:,}",
                r["x_full"],
                OWN[r["context"]],
            )
    yield from _attention(folder)
    for bench in ("prefill_llamacpp", "prefill"):
        for r in faster.rows(bench, folder):
            if r["side"].startswith("kvlab"):
                least = PREFILL["pruners" if any(p in r["side"] for p in PRUNERS) else "codecs"]
                yield f"{r.get('best_peer', r['peer'])} / {r['side']}, prompt of {r['context']:,}", r["ratio"], least
    for r in faster.rows("overhead", folder):
        if r["batch"] == 1:
            rest = max(r["ms_rest"], 0.01)  # a difference of medians
            yield f"{REST_MS} ms / {rest:.2f} ms outside linears and attention, {r['side']}", REST_MS / rest, 1.0


def _fastest(data: list[dict], case: tuple[int, int], want: dict, fast: bool = False) -> float | None:
    here = [r for r in data if (r["batch"], r["context"]) == case and r["cache"].endswith(" fast") == fast]
    return min((r["ms_wall"] for r in here if all(str(r[k]).startswith(v) for k, v in want.items())), default=None)


def _attention(folder: Path) -> Iterator[Goal]:
    data = faster.rows("decode_attention", folder)
    at = {(r["side"].removeprefix("kvlab "), r["shape"], r["context"]): r for r in data}
    for codec, shape, context, least in ATTENTION:
        row = at.get((codec, shape, context))
        what = f"attention, best contiguous bf16 / {codec}, {shape}, {context:,}"
        yield what, row and row["x_best_bf16"], least
    for codec, least in LOW_BITS:
        four = "turboquant 4" if codec.startswith("turbo") else "int4 g64"
        pair = [at.get((c, "SmolLM2-135M", 8192)) for c in (four, codec)]
        ratio = None if None in pair else pair[0]["ms_median"] / pair[1]["ms_median"]
        yield f"attention, {four} / {codec}, SmolLM2-135M, 8,192", ratio, least


def main() -> None:
    missed = 0
    for what, ratio, least in goals(Path(sys.argv[1]) if len(sys.argv) > 1 else faster.BENCH):
        missed += ratio is not None and ratio < least
        said = "no rows" if ratio is None else "yes" if ratio >= least else "NO"
        print(f"  {what:92s} {'' if ratio is None else format(ratio, '.2f'):>7s}   at least {least:4.2f}   {said}")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
