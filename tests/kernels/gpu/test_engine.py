"""The engine on Triton's kernels: the same logits as on the torch path, step by step or replayed from fixed inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvlab
from kvlab.engine.graphs import Graphs
from kvlab.errors import ConfigError
from kvlab.kernels import dispatch
from kvlab.kernels.meta import NonFinite
from kvlab.models.load import ModelCfg, load
from kvlab.models.tiny import tiny_model

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12] * 2 + [4], [3, 1, 4]]  # rows of two buckets in one step
RUNTIME = {"max_seqs": 2, "max_len": 32, "block": 16}
METHODS = {
    "kivi": {"group": 16, "residual": 0},
    "turboquant": {"bits_k": 3, "bits_v": 4, "share": "head"},
    "h2o": {"tokens": 12, "every": 1},
}


class Again:
    """Stands for CUDA graphs: a replay calls what was recorded, on the same memory, and says nothing of a step."""

    def record(self, run):
        run()  # as when a graph is warmed up
        out = run()

        def replay():
            return out.copy_(run())

        return replay


@pytest.fixture(scope="module")
def model():
    """As small as can be: the interpreter takes 30 ms for a program."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return replace(load(ModelCfg(name="tiny_llama")), model=tiny_model("tiny_llama", **shape))


def logits(model, method: str, kernels: str, graph: bool = False, walk: int = 2):
    """(float32 [rows, vocab] of each prompt, lab): the last `walk` tokens one a step, the rest at once."""
    lab = kvlab.load(model, method, runtime=RUNTIME | {"kernels": kernels}, **METHODS.get(method, {}))
    if graph:
        lab.engine.graphs = Graphs(lab.compressor, lab.engine.cache, Again())
    got = [[] for _ in PROMPTS]
    for i, tokens in enumerate(PROMPTS):
        whole = [*tokens[: len(tokens) - walk * (i == 0)], *range(20, 20 + walk)]
        lab.score(whole, lambda _, x, i=i: got[i].append(x.clone()), context=len(whole) - walk, chunk=1)
    lab.engine.run()
    lab.engine.cache.check({})
    return [torch.cat(g) for g in got], lab


@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_of_the_torch_path(method, model):
    """Fails for a row of one bucket that another one overwrites, a head that reads another's table, a slot that is
    written elsewhere, a block that is sealed too late, and a score that is not counted."""
    want, _ = logits(model, method, "off")
    got, lab = logits(model, method, "triton")
    assert lab.compressor.packed is not None and not lab.compressor.packed.warning
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-5)  # logits of some units: 30 ulp after two layers


@pytest.mark.parametrize("method", ["kivi", "turboquant"])
def test_a_replayed_step_is_the_step_itself(method, model):
    """Fails for an input that a recorded step keeps from the day it was recorded: a table, a position, a row to write,
    a block to seal (kivi: in the second of the replayed steps); and for padding rows that write."""
    want, plain = logits(model, method, "triton")
    got, lab = logits(model, method, "triton", graph=True)
    assert lab.engine.graphs.replayed == 2 and not lab.engine.graphs.warning
    assert lab.compressor.counters.encoded_blocks == plain.compressor.counters.encoded_blocks
    for x, y in zip(got, want):
        assert torch.equal(x, y)


def test_a_method_that_looks_at_every_layer_is_not_replayed(model):
    _, lab = logits(model, "h2o", "triton", graph=True, walk=1)
    assert lab.engine.graphs.replayed == 0


def test_a_recorder_that_fails_ends_in_plain_steps_and_a_warning(model):
    class Broken:
        def record(self, run):
            raise RuntimeError("operation not permitted when stream is capturing")

    lab = kvlab.load(model, "full", runtime=RUNTIME | {"kernels": "triton"})
    lab.engine.graphs = Graphs(lab.compressor, lab.engine.cache, Broken())
    want = kvlab.load(model, "full", runtime=RUNTIME).generate([1, 2, 3], max_tokens=2)
    assert lab.generate([1, 2, 3], max_tokens=2).tokens == want.tokens
    assert "not permitted" in lab.engine.graphs.warning


def test_a_number_that_cannot_be_stored_is_told_after_the_step_and_the_pool_is_whole(model):
    lab = kvlab.load(model, "turboquant", runtime=RUNTIME | {"kernels": "triton"})
    forward = lab.engine.forward

    def spoiled(tokens, positions, rows, compressor, pages):
        write = compressor.write
        compressor.write = lambda layer, k, v, p: write(layer, k * (float("nan") if layer == 1 else 1), v, p)
        try:
            return forward(tokens, positions, rows, compressor, pages)
        finally:
            del compressor.write

    lab.engine.forward = spoiled
    with pytest.raises(NonFinite, match=r"layers \[1\]"):
        lab.generate([1, 2, 3], max_tokens=2)
    lab.engine.cache.check({})
    lab.engine.forward = forward
    assert len(lab.generate([1, 2, 3], max_tokens=2).tokens) == 2


def test_what_the_kernels_cannot_hold_runs_in_torch_and_says_so(model):
    lab = kvlab.load(model, "turboquant", bits_k=6, runtime=RUNTIME | {"kernels": "triton"})
    assert len(lab.generate([1, 2, 3], max_tokens=1).tokens) == 1
    assert "6 bits" in lab.compressor.packed.warning


def test_kernels_of_another_device_are_refused():
    with pytest.raises(ConfigError, match="is the CPU's"):
        dispatch.variant("cuda:0", "avx2")
