"""One call for all layers is what the same kernels give layer by layer, to the bit; and it steps aside for whatever it
does not do."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from test_batch_invariance import METHODS, PROMPTS, PRUNERS, part
from toys import dirty, score

from kvlab.compressor import Compressor
from kvlab.engine.config import EngineCfg
from kvlab.engine.engine import Engine
from kvlab.engine.sequence import Sampling
from kvlab.errors import KvlabError
from kvlab.kernels.cpu import isa
from kvlab.kernels.cpu.turn import Turn
from kvlab.methods.composed import compose
from kvlab.methods.turboquant import TurboQuant
from kvlab.models.geometry import geometry
from kvlab.models.lean import LeanRunner
from kvlab.models.tiny import tiny_model

NEW = 8
MIXED = {"chunk": 24, "max_batch_tokens": 64}  # decoding rows and rows of several chunks in one step
BY_LAYER = ("h2o", "streaming_llm")  # one scores every step, the other remembers what was written
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 24,
    "layer_types": ["full_attention", *["sliding_attention"] * 2],
}


@cache
def lean(variant: str = "auto", name: str = "tiny_llama", weights: str = "model"):
    model = tiny_model(name, head_dim=64, **(SLIDING if name == "tiny_qwen2" else {}))
    return LeanRunner(model, weights, kernels=variant), geometry(model, name)


def engine(comp: Compressor, run, geom, variant: str = "auto", **cfg) -> Engine:
    cfg = {"block": 32, "max_seqs": 8, "max_len": 128, "max_batch_tokens": 512, "chunk": 512, "tile": 64, **cfg}
    return dirty(Engine(run.forward, comp, geom, EngineCfg(**cfg, kernels=variant, check=True)))


@pytest.fixture
def ran(monkeypatch) -> list[int]:
    """The encoded counts of the turns that ran."""
    seen, plain = [], Turn.run

    def counted(self, *args):
        done = plain(self, *args)
        if done:
            seen.append(self.encoded)
        return done

    monkeypatch.setattr(Turn, "run", counted)
    return seen


def both(parts: tuple, monkeypatch, ran: list[int], variant: str = "auto", name: str = "tiny_llama", **cfg):
    """Scores of the same prompts layer by layer and in one call, and the two compressors."""
    run, geom = lean(variant, name, cfg.get("weights", "model"))
    slow, fast = (compose([part(p) if isinstance(p, str) else p() for p in parts]) for _ in "ab")
    with monkeypatch.context() as m:
        m.setattr(slow, "turn", lambda pages: None)
        want = score(engine(slow, run, geom, variant, **cfg), PROMPTS, NEW)
    assert not ran
    return want, score(engine(fast, run, geom, variant, **cfg), PROMPTS, NEW), slow, fast


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("variant", isa.runnable())
def test_every_method_gives_the_bits_that_it_gives_layer_by_layer(name, variant, monkeypatch, ran):
    (seqs, want), (got_seqs, got), slow, fast = both((name,), monkeypatch, ran, variant, **MIXED)
    assert bool(ran) == (name not in BY_LAYER), "else this test says nothing, or a hook saw nothing"
    for a, b, x, y in zip(seqs, got_seqs, want, got):
        assert a.output == b.output and torch.equal(x, y)
    assert vars(slow.counters) == vars(fast.counters)


def test_keys_of_two_parts_too(monkeypatch, ran):
    prod = lambda: TurboQuant(bits_k=3, bits_v=3, variant="prod")  # noqa: E731
    (_, want), (_, got), slow, fast = both((prod,), monkeypatch, ran, **MIXED)
    assert ran and vars(slow.counters) == vars(fast.counters)
    assert all(torch.equal(x, y) for x, y in zip(want, got))


@pytest.mark.parametrize("pruner", PRUNERS)
def test_every_pipeline_gives_the_bits_that_it_gives_layer_by_layer(pruner, monkeypatch, ran):
    (seqs, want), (got_seqs, got), slow, fast = both((pruner, "int4"), monkeypatch, ran, **MIXED)
    for a, b, x, y in zip(seqs, got_seqs, want, got):
        assert a.output == b.output and torch.equal(x, y)
    assert vars(slow.counters) == vars(fast.counters) and fast.counters.evicted_slots > 0
    assert bool(ran) == (pruner not in BY_LAYER)


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("arithmetic", ["exact", "fast"])
def test_weights_and_arithmetic_are_those_of_the_layers(weights, arithmetic, monkeypatch, ran):
    args = {"weights": weights, "arithmetic": arithmetic}
    (_, want), (_, got), *_ = both(("int4",), monkeypatch, ran, **args, **MIXED)
    assert ran and all(torch.equal(x, y) for x, y in zip(want, got))


def test_pages_and_model_of_different_libraries_go_layer_by_layer(ran):
    run, geom = lean("generic")
    best = isa.runnable()[0]
    score(engine(compose([part("int4")]), run, geom, best), PROMPTS[:2], 2)
    assert bool(ran) == (best == "generic")


@pytest.mark.parametrize("method", ["full", "int4", "kivi"])
def test_classes_of_layers_with_windows_of_their_own_read_their_own_pages(method, monkeypatch, ran):
    (_, want), (_, got), *_ = both((method,), monkeypatch, ran, name="tiny_qwen2", **MIXED)
    assert ran
    assert all(torch.equal(x, y) for x, y in zip(want, got))


def test_prompts_that_read_their_own_chunk_exactly_go_layer_by_layer(monkeypatch, ran):
    (_, want), (_, got), *_ = both(("int4",), monkeypatch, ran, prefill_reads="exact", **MIXED)
    assert 0 < len(ran) <= NEW, "the steps that only decode"
    assert all(torch.equal(x, y) for x, y in zip(want, got))


def test_a_compressor_of_ones_own_is_called_layer_by_layer(ran):
    class Own(Compressor):
        writes = 0

        def write(self, layer, k, v, pages):
            Own.writes += 1
            super().write(layer, k, v, pages)

    run, geom = lean()
    score(engine(Own(part("int4")), run, geom), PROMPTS[:2], 2)
    assert Own.writes > 0 and not ran


@pytest.mark.parametrize("method", ["int4", "turboquant"])
def test_a_key_that_cannot_be_stored_is_refused_in_words_and_leaves_the_pool_whole(method, monkeypatch, ran):
    """Fails when the one call goes on with garbage, or reports no more than a number."""
    model = tiny_model("tiny_llama", head_dim=64)
    model.model.layers[1].self_attn.k_proj.weight.data[3, 5] = torch.nan
    e = engine(compose([part(method)]), LeanRunner(model), geometry(model, "tiny_llama"))
    e.add(PROMPTS[0], Sampling(max_tokens=4))
    with pytest.raises(KvlabError, match="layer 1"):
        e.run()
    assert not ran
    e.cache.check({})
    assert all(t.pool.used == 0 for t in e.cache.classes)
