"""transformers' side of the whole-step benchmarks: a model and a cache that holds `context` random tokens.

A step is the model's forward of one token per sequence and the greedy choice: what `generate` runs, without its own
overhead. bfloat16 models are copies of the float32 one. The quantized caches keep the newest 128 tokens exact and are
not quantized again within a run.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

CACHES: dict[str, tuple[str, str]] = {  # side -> cache, dtype of model and cache
    "DynamicCache fp32": ("dynamic", "float32"),
    "StaticCache fp32": ("static", "float32"),
    "StaticCache bf16": ("static", "bfloat16"),
    "DynamicCache bf16 (known slow path)": ("dynamic", "bfloat16"),
    "QuantizedCache quanto 4 bit, fp32": ("quanto", "float32"),
    "QuantizedCache hqq 4 bit, fp32": ("hqq", "float32"),
    "QuantizedCache fp8, fp32": ("fp8", "float32"),
}


class Peers:
    def __init__(self, model) -> None:
        self.models = {"float32": copy.deepcopy(model)}

    def model(self, dtype: str):
        import torch

        if dtype not in self.models:
            self.models[dtype] = copy.deepcopy(self.models["float32"]).to(getattr(torch, dtype))
        return self.models[dtype]

    def forward(self, dtype: str, ids, cache):
        """Logits of the last position."""
        import torch

        with torch.inference_mode():
            return logits(self.model(dtype), ids, cache)

    def step(self, name: str, batch: int, context: int, room: int) -> tuple[Callable[[], None], dict]:
        """A side and the facts of its row. Raises what transformers raises when a backend is absent."""
        import torch

        kind, dtype = CACHES[name]
        model = self.model(dtype)
        cache = made(kind, model.config, context + room)
        gen = torch.Generator().manual_seed(0)
        for layer in range(model.config.num_hidden_layers):
            shape = batch, model.config.num_key_value_heads, context, model.config.head_dim
            k, v = (torch.randn(shape, generator=gen).to(model.dtype) for _ in "kv")
            cache.update(k, v, layer)
        state = {"token": torch.full((batch, 1), 5)}

        def step() -> None:
            state["token"] = self.forward(dtype, state["token"], cache).argmax(-1)[:, None]

        full = kind in ("dynamic", "static")
        return step, {
            "side": f"transformers {name}", "who": "transformers", "method": "full" if full else kind,
            "cache": name, "weights": {"float32": "fp32", "bfloat16": "bf16"}[dtype], "cache_bytes": held(cache),
        }  # fmt: skip


def logits(model, ids, cache):
    """Logits of the last position. model: or its forward, compiled."""
    forward = getattr(model, "forward", model)
    keyword = "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
    return model(ids, use_cache=True, logits_to_keep=1, **{keyword: cache}).logits[:, -1]


def made(kind: str, config, length: int):
    from transformers import DynamicCache, QuantizedCache, StaticCache

    if kind == "dynamic":
        return DynamicCache(config=config)
    if kind == "static":
        return StaticCache(config=config, max_cache_len=length)
    options = {"quanto": {"nbits": 4}, "hqq": {"nbits": 4, "axis_key": 1, "axis_value": 1}, "fp8": {}}[kind]
    return QuantizedCache(kind, config, **options)


def held(cache) -> int:
    """Bytes of the tensors that a cache holds, found by walking it: indicative for the quantized ones."""
    import torch

    seen: set[int] = set()

    def walk(x, depth: int = 0) -> int:
        if depth > 12 or id(x) in seen:
            return 0
        seen.add(id(x))
        if hasattr(x, "_data") and hasattr(x, "_scale"):  # quanto: the tensor itself claims its float size
            return sum(walk(part, depth + 1) for part in (x._data, x._scale, x._shift))
        if torch.is_tensor(x) and not hasattr(x, "_data"):
            return x.numel() * x.element_size()
        if isinstance(x, dict):
            return sum(walk(v, depth + 1) for v in x.values())
        if isinstance(x, list | tuple):
            return sum(walk(v, depth + 1) for v in x)
        return walk(vars(x), depth + 1) if hasattr(x, "__dict__") else 0

    return walk(cache)
