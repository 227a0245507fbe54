"""One decoding row's attention over a paged cache, codec by codec, against torch on a contiguous full cache.

Microseconds per layer of one sequence, 1 thread. The cache of all layers together is larger than the last-level cache,
and blocks lie shuffled in the pool. Peers: SDPA as transformers calls it (enable_gqa), and the best contiguous form
found: query heads of a kv head folded onto the query axis, SDPA or two matrix products, float32 or bfloat16.
`bytes` are those a step reads of one layer: codes and scales.
"""

from __future__ import annotations

import time
from functools import partial

import common

SHAPES = {"SmolLM2-135M": (9, 3, 64), "Llama-3-8B": (32, 8, 128)}
CODECS = {
    "full float32": ("full", {}),
    "full bfloat16": ("full", {"dtype": "bfloat16"}),
    "full float16": ("full", {"dtype": "float16"}),
    "fp8 e4m3": ("fp8", {}),
    "int8": ("int8", {}),
    "int4 g64": ("int4", {}),
    "int3 g64": ("int4", {"bits": 3}),
    "int2 g64": ("int4", {"bits": 2}),
    "kivi 4": ("kivi", {"bits_k": 4, "bits_v": 4}),
    "kivi 2": ("kivi", {}),
    "turboquant 8": ("turboquant", {"bits_k": 8, "bits_v": 8}),
    "turboquant 5": ("turboquant", {"bits_k": 5, "bits_v": 5}),
    "turboquant 4": ("turboquant", {}),
    "turboquant 3": ("turboquant", {"bits_k": 3, "bits_v": 3}),
    "turboquant 2": ("turboquant", {"bits_k": 2, "bits_v": 2}),
    "turboquant 1": ("turboquant", {"bits_k": 1, "bits_v": 1}),
    "turboquant prod 4": ("turboquant", {"variant": "prod"}),
    "int4 g64 fast": ("int4", {}),
    "int2 g64 fast": ("int4", {"bits": 2}),
    "kivi 4 fast": ("kivi", {"bits_k": 4, "bits_v": 4}),
    "kivi 2 fast": ("kivi", {}),
    "turboquant 4 fast": ("turboquant", {}),
}
FOOTPRINT = 192_000_000  # bytes of float32 cache, all layers: more than a last-level cache holds


def main() -> None:
    args = common.arguments(
        __doc__.splitlines()[0], only="", shapes="SmolLM2-135M,Llama-3-8B", contexts="", blocks="32"
    )
    common.setup()
    contexts = [256] if args.quick else [int(c) for c in (args.contexts or "512,2048,8192,32768").split(",")]
    for shape in args.shapes.split(","):
        for context in contexts:
            if shape != "SmolLM2-135M" and not args.contexts and context not in (8192, 32768):
                continue
            for block in [int(b) for b in args.blocks.split(",")]:
                run(args, shape, context, block)


def run(args, shape: str, context: int, block: int) -> None:
    import torch

    H, Hk, D = SHAPES[shape]
    layers = max(2, min(48, -(-FOOTPRINT // (2 * Hk * D * 4 * context))))
    if args.quick:
        layers = 2
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(Hk, context, D, generator=gen) for _ in "kv")
    q = torch.randn(H, D, generator=gen)
    sides = _peers(q, k, v, layers)
    size = {name: 2 * k.numel() * (2 if "bf16" in name else 4) for name in sides}
    for name, (method, options) in CODECS.items():
        if args.only and not any(word in name for word in args.only.split(",")):
            continue
        fast = name.endswith(" fast")
        step, held, words = _ours(method, options, q, k, v, layers, block, fast)
        if words or not fast:  # else it is the exact arithmetic again
            sides[f"kvlab {name}"], size[f"kvlab {name}"] = step, held
    figures = common.rounds({n: partial(_each, f, layers) for n, f in sides.items()}, args.rounds)
    best = {
        d: min((n for n in sides if d in n and "folded" in n), key=lambda n: min(figures[n])) for d in ("f32", "bf16")
    }
    facts = {"shape": shape, "context": context, "block": block, "layers": layers}
    rows = common.report("decode_attention", figures, "torch f32 SDPA", True, **facts)
    for row in rows:
        row |= {"bytes": size[row["side"]], "clock": "process CPU time of one layer, 1 thread"}
        for d, name in best.items():
            row[f"x_best_{d}"] = next(r["ms_median"] for r in rows if r["side"] == name) / row["ms_median"]
    for row in rows:
        x = row["ratio"], row["x_best_f32"], row["x_best_bf16"]
        print(
            f"  {row['side']:28s} {1000 * row['ms_median']:9.1f} us {row['bytes'] / row['ms_median'] / 1e6:6.1f} GB/s"
            f"   x SDPA {x[0]:6.2f}   x best f32 {x[1]:5.2f}   x best bf16 {x[2]:5.2f}"
        )
    if not args.quick:
        common.write("decode_attention", rows)


def _each(step, layers: int) -> float:
    """CPU seconds per layer: all layers once, and again until 20 ms are over."""
    n, start, begun = 0, time.process_time(), time.perf_counter()
    while not n or time.perf_counter() - begun < 0.02:
        for layer in range(layers):
            step(layer)
        n += 1
    return (time.process_time() - start) / n / layers


def _peers(q, k, v, layers: int) -> dict:
    import torch
    import torch.nn.functional as F

    Hk, _, D = k.shape
    out = {}
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        cache = [(k.to(dtype)[None].clone(), v.to(dtype)[None].clone()) for _ in range(layers)]
        one, folded = q.to(dtype).view(1, -1, 1, D), q.to(dtype).view(1, Hk, -1, D)

        def sdpa(layer, cache=cache, one=one):
            return F.scaled_dot_product_attention(one, *cache[layer], enable_gqa=True)

        def fold(layer, cache=cache, folded=folded):
            return F.scaled_dot_product_attention(folded, *cache[layer])

        def matmul(layer, cache=cache, folded=folded):
            keys, values = cache[layer]
            return ((folded @ keys.mT).float() * D**-0.5).softmax(-1).to(values.dtype) @ values

        out |= {f"torch {name} SDPA": sdpa, f"torch {name} SDPA folded": fold, f"torch {name} matmul folded": matmul}
    return out


def _ours(method: str, options: dict, q, k, v, layers: int, block: int, fast: bool):
    """A pool of shuffled pages that all hold the same codes, and attention over one layer of it."""
    import numpy as np
    import torch

    from kvlab import registry
    from kvlab.cache.arrays import Arrays
    from kvlab.cache.layout import Geom
    from kvlab.kernels.cpu import lib
    from kvlab.kernels.cpu.attend import Layers, View

    Hk, n, D = k.shape
    H, G = len(q), len(q) // Hk
    codec = registry.build(method, **options).codec
    geom = Geom(layers, H, Hk, D)
    codec.setup(geom, block)
    count = n // block
    arrays = Arrays(codec.regions(geom, block), count + 1, layers, Hk, block, torch.device("cpu"))
    page = codec.encode(0, *(x.view(Hk, count, block, D).transpose(0, 1) for x in (k, v)))
    table = np.random.default_rng(0).permutation(count) + 1
    for name, value in page.items():
        arrays.data[name][torch.from_numpy(table)] = value.view(count, 1, *arrays.data[name].shape[2:])
    flat = {name: arrays.token_rows.get(name, rows) for name, rows in arrays.block_rows.items()}
    offset = arrays.row(0, np.arange(layers * Hk).reshape(layers, Hk))
    bound = Layers(
        lib.load("auto").library, codec.page_format(), flat, block, list(range(layers)), np.zeros((layers, Hk)), offset,
        1, count + 1, G, geom.scale, fast,
    )  # fmt: skip
    view = View.of(table[None, None], [[[0]]], [[[n]]], [0], [1])
    out, lse = torch.zeros(1, H, D), torch.zeros(1, H)

    def step(layer: int) -> None:
        bound.attend(layer, view, q.view(1, H, D), out, lse)

    return step, arrays.block_bytes // layers * count, bound.words


if __name__ == "__main__":
    main()
