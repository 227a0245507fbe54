"""Whole decode steps on a GPU: kvlab's engine with and without its CUDA graph, and transformers' caches, same weights.

kvlab         Engine.step: scheduler, block tables, pages, attention, sampling (ours.py fills the cache)
transformers  forward and argmax with StaticCache as it comes, captured in a CUDA graph by hand, and compiled;
              DynamicCache; `generate` (its time for 33 tokens minus that for 1, by 32)

Wall time of a step that begins and ends with an idle device, since a sampled token is what ends a step; the median of
24. Weights are those of SmolLM2 where its package is installed, else random ones of the same shape; the 8B model's are
always random. What a step costs depends on neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import peers
import torch
from gpu_clock import Machine, summary
from gpu_run import LeftOut
from ours import Ours, setting

STEPS, WARM = 24, 4
CONFIGS = {
    "SmolLM2-135M": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "Llama-3-8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 257, "tie_word_embeddings": True,
        "max_position_embeddings": 512,
    },
}  # fmt: skip
_held: dict[str, Ours] = {}  # the newest model


def loaded(name: str, machine: Machine, dtype: torch.dtype) -> Ours:
    """The model on the machine, kept until another is asked for."""
    if name not in _held:
        _held.clear()
        machine.clean()
        _held[name] = Ours(_load(name, machine, dtype))
    return _held[name]


def _load(name: str, machine: Machine, dtype: torch.dtype):
    from kvlab.models.load import ModelCfg, load

    if name == "SmolLM2-135M":
        try:
            return load(ModelCfg(dtype=str(dtype).split(".")[1], device=str(machine.device)))
        except Exception as error:  # its package is not there: random weights
            print(f"{name}: random weights, since {type(error).__name__}: {error}", flush=True)
    return random_model(name, machine.device, dtype)


def random_model(name: str, device: torch.device, dtype: torch.dtype):
    """A llama of CONFIGS with random weights, made where it will run."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from kvlab.models.load import Loaded
    from kvlab.models.tiny import ByteTokenizer

    config = LlamaConfig(**CONFIGS[name], bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    return Loaded(
        model=model.to(device), tokenizer=ByteTokenizer(), id=f"{name}, random weights", source="random weights",
        dtype=dtype, weights_sha256="", tokenizer_sha256="", chat_template_sha256=None,
        max_length=config.max_position_embeddings, eos_ids=(),
    )  # fmt: skip


def _dtype(machine: Machine) -> torch.dtype:
    return torch.float32 if machine.dry else torch.bfloat16  # triton's interpreter multiplies no bfloat16


# -- kvlab -----------------------------------------------------------------------------------------------------------
def ours(facts: dict, machine: Machine) -> Iterator[dict]:
    """facts: model, method, batch, context, runtime: kernels, graph ("auto", "off"), compile (see EngineCfg)."""
    from kvlab.errors import ConfigError

    store = loaded(facts["model"], machine, _dtype(machine))
    steps = 1 if machine.dry else STEPS
    runtime = facts["runtime"]
    s = setting(facts["method"], runtime=runtime)
    try:
        lab = store.lab(s, facts["batch"], facts["context"], steps + WARM + 2)
    except ConfigError as error:
        raise LeftOut(str(error)) from error
    prefill = lab.engine.stats.steps
    ms = timed(lab.engine.step, machine, steps)
    row = store.row(lab, s)
    told = {k: row[k] for k in ("weights", "cache", "kernels", "arithmetic", "block", "cache_bytes")}
    assert lab.engine.stats.steps == prefill + steps + (1 if machine.dry else WARM), "a step was not a step"
    graphs = getattr(lab.engine, "graphs", None)
    told |= {"replayed": getattr(graphs, "replayed", 0), "no_graph": getattr(graphs, "warning", "")}
    how = "torch path" if runtime["kernels"] == "off" else "graph" if told["replayed"] >= steps else "no graph"
    side = f"kvlab {row['cache']}, {how}{', compiled' if runtime.get('compile') else ''}"
    yield {"side": side, "who": "kvlab", "weights_are": store.loaded.source, **told, **_speed(ms, facts["batch"])}


# -- transformers ----------------------------------------------------------------------------------------------------
def theirs(facts: dict, machine: Machine) -> Iterator[dict]:
    """facts: model, how, batch, context."""
    store, batch, context = loaded(facts["model"], machine, _dtype(machine)), facts["batch"], facts["context"]
    model, how = store.loaded.model, facts["how"]
    steps = 1 if machine.dry else STEPS
    told = {"side": f"transformers {how}", "who": "transformers", "weights_are": store.loaded.source}
    if how == "generate":
        yield told | _speed(_generate(model, machine, batch, context, steps), batch)
        return
    cache = peers.made("dynamic" if how == "DynamicCache" else "static", model.config, context + 3 * steps + 16)
    _random(cache, model, batch, context)
    token = torch.full((batch, 1), 5, device=machine.device)
    forward = model
    if how == "StaticCache, compiled":
        if machine.dry:
            raise LeftOut("nothing is compiled in a dry run")
        forward = torch.compile(model.forward, mode="reduce-overhead")

    def step() -> None:
        with torch.inference_mode(how != "StaticCache, compiled"):
            token.copy_(peers.logits(forward, token, cache).argmax(-1)[:, None])

    run: Callable[[], object] = step
    if how == "StaticCache, graph":
        run = _captured(step, machine)
    held = peers.held(cache)
    yield told | {"cache_bytes": held} | _speed(timed(run, machine, steps), batch)


def _random(cache, model, batch: int, context: int) -> None:
    """Fill a cache with random keys and values."""
    c = model.config
    shape = batch, c.num_key_value_heads, context, c.head_dim
    gen = torch.Generator(model.device).manual_seed(0)
    for layer in range(c.num_hidden_layers):
        k, v = (torch.empty(shape, dtype=model.dtype, device=model.device).normal_(generator=gen) for _ in "kv")
        cache.update(k, v, layer)


def _captured(step: Callable[[], None], machine: Machine) -> Callable[[], None]:
    if machine.dry:
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _generate(model, machine: Machine, batch: int, context: int, steps: int) -> list[float]:
    """ms a step, from runs that end after one token and after steps + 1."""
    ids = torch.randint(5, 200, (batch, context), generator=torch.Generator().manual_seed(0)).to(model.device)
    out = []
    for _ in range(2 if machine.dry else 4):
        took = []
        for n in (1, steps + 1):
            machine.sync()
            begin = time.perf_counter()
            with torch.inference_mode():
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n, do_sample=False,
                    pad_token_id=0,
                )  # fmt: skip
            machine.sync()
            took.append(time.perf_counter() - begin)
        out.append(1000 * (took[1] - took[0]) / steps)
    return out[1:]


# -- clock -----------------------------------------------------------------------------------------------------------
def timed(step: Callable[[], object], machine: Machine, steps: int) -> list[float]:
    """ms of each step, after a few that are not timed."""
    for _ in range(1 if machine.dry else WARM):
        step()
    out = []
    for _ in range(steps):
        machine.sync()
        begin = time.perf_counter()
        step()
        machine.sync()
        out.append(1000 * (time.perf_counter() - begin))
    return out


def _speed(ms: list[float], batch: int) -> dict:
    figures = summary(ms, 1, "wall time of a step, device idle before and after")
    return figures | {"tokens_per_s": 1000 * batch / figures["ms_median"]}
