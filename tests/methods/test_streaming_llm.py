"""StreamingLLM: which slots stay, and that renumbered positions are those of the paper."""

import numpy as np
import pytest
import torch

from kvlab import registry
from kvlab.engine.config import EngineCfg
from kvlab.engine.sequence import Sampling
from kvlab.errors import ConfigError
from kvlab.kernels.rope import turn
from kvlab.lab import Lab, load
from kvlab.models.load import ModelCfg
from kvlab.models.load import load as load_model
from kvlab.models.tiny import tiny_model

PROMPT = np.random.default_rng(0).integers(3, 250, 90).tolist()


def one_layer_lab(method: dict, **cfg) -> tuple[Lab, torch.nn.Module]:
    """In one layer a key depends on its own token alone, so a cache of kept tokens equals a fresh pass over them."""
    import dataclasses

    loaded = load_model(ModelCfg(name="tiny_llama"))
    model = tiny_model("tiny_llama", num_hidden_layers=1)
    loaded = dataclasses.replace(loaded, model=model)
    reference = tiny_model("tiny_llama", num_hidden_layers=1)
    return Lab(loaded, registry.build(method), EngineCfg(block=16, max_len=256, **cfg)), reference


@pytest.mark.parametrize("chunk", [16, 40, 128])
@pytest.mark.parametrize("every", [1, 5])
def test_renumbered_positions_equal_a_fresh_pass_over_the_kept_tokens(chunk, every):
    """Fails when the sinks are turned the wrong way, by the wrong count, or from an already turned copy."""
    sinks, tokens = 4, 20
    lab, reference = one_layer_lab({"streaming_llm": {"tokens": tokens, "sinks": sinks, "every": every}}, chunk=chunk)
    got = {}
    steps = [5, 60, 7, 90, 33, 12, 200, 3, 77, 150, 9, 42]
    keep = lambda first, x: got.update({first + i: r for i, r in enumerate(x)})  # noqa: E731
    seq = lab.score(PROMPT + steps, keep, len(PROMPT), 1)
    held = list(range(len(PROMPT)))
    lab.engine.run()
    assert seq.computed == len(PROMPT) + len(steps)
    kept = held[:sinks] + held[-(tokens - sinks) :]
    for i in range(len(steps)):
        kept.append(len(PROMPT) + i)
        ids = torch.tensor([[(PROMPT + steps)[j] for j in kept]])
        want = reference(ids).logits[0, -1]  # positions 0, 1, 2, ... inside the cache
        torch.testing.assert_close(got[len(PROMPT) + i], want, rtol=0, atol=2e-5)
        if len(kept) >= tokens + every:
            kept = kept[:sinks] + kept[-(tokens - sinks) :]


def test_original_positions_do_not_move_and_differ_from_renumbered_ones():
    """Fails when `positions` is ignored."""
    outs = []
    for positions in ("rerotate", "original"):
        lab = load("tiny_llama", "streaming_llm", tokens=20, sinks=4, positions=positions)
        outs.append(lab.generate(PROMPT, max_tokens=16).tokens)
    assert outs[0] != outs[1]


def test_a_forked_sample_does_not_turn_the_sinks_of_its_sibling():
    """Fails when shared blocks are written in place: samples with one seed each must equal samples run alone."""
    lab = load("tiny_llama", "streaming_llm", tokens=24, sinks=4, every=3)
    both = lab.generate(PROMPT, max_tokens=20, n=3, temperature=1.0, seed=5)
    for i, sample in enumerate(both):
        alone = lab.generate(PROMPT, max_tokens=20, temperature=1.0, seed=5 + i)
        assert sample.tokens == alone.tokens


def test_turning_adds_up():
    """R(a) R(b) = R(a + b): 1e-5 is float32 rounding of unit-variance keys at angles up to 1e5 rad computed in
    float64."""
    inv_freq = 10_000.0 ** -(torch.arange(8) / 8)
    k = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))  # 16 rotary channels, 4 others
    a, b = torch.tensor(12_345), torch.tensor(-77)
    torch.testing.assert_close(turn(turn(k, a, inv_freq), b, inv_freq), turn(k, a + b, inv_freq), rtol=0, atol=1e-5)
    assert torch.equal(turn(k, a, inv_freq)[:, 16:], k[:, 16:])


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen3", "tiny_gemma"])
def test_turning_a_key_equals_rotating_it_at_the_other_position(model):
    """Fails for the wrong base, pairing or layer: the model's own RoPE is the reference."""
    from kvlab.models.geometry import geometry

    net = tiny_model(model)
    geom = geometry(net, model)
    seen = {}

    def keep(position):
        class Spy:
            def __call__(self, module, q, k, v, mask, **kwargs):
                seen[position, module.layer_idx] = k
                return torch.zeros_like(q).transpose(1, 2), None

        return Spy()

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for position in (3, 50):
        ALL_ATTENTION_FUNCTIONS.register("spy", keep(position))
        net.set_attn_implementation("spy")
        net(torch.tensor([[65]]), position_ids=torch.tensor([[position]]))
    for layer in range(geom.L):
        moved = turn(seen[3, layer], torch.tensor(47), torch.tensor(geom.inv_freq[layer]))
        torch.testing.assert_close(moved, seen[50, layer], rtol=0, atol=1e-5)


def test_a_model_without_plain_rope_is_refused_with_the_way_out():
    lab_geom = load("tiny_llama").geom
    import dataclasses

    with pytest.raises(ConfigError, match=r"method\.positions=original"):
        registry.build("streaming_llm").plan(dataclasses.replace(lab_geom, inv_freq=()), 16)


@pytest.mark.parametrize("codec", ["int8", "turboquant"])
def test_sinks_are_reencoded_from_their_exact_keys(codec):
    """Fails when codes are decoded, turned and encoded again: the error would grow with every cut."""
    options = {"int8": {"group": 16}, "turboquant": {}}[codec]
    lab = load("tiny_llama", {"streaming_llm": {"tokens": 24, "sinks": 4, "every": 1}, codec: options})
    seq = lab.engine.add(PROMPT, Sampling(max_tokens=120))
    while len(seq.output) < 100:
        lab.engine.step()
    t = lab.engine.cache.classes[0]
    by = torch.tensor(int(t.evicted[seq.row, 0]))
    exact = lab.engine.cache.state["sink_k"][seq.row, 1]
    want = turn(exact, by, torch.tensor(lab.geom.inv_freq[1]))
    page = {n: a[int(t.body[seq.row, 0, 0]), 1][None] for n, a in t.arrays.data.items()}
    k, _ = lab.compressor.codec.decode(1, page)
    want, _ = lab.compressor.codec.decode(1, lab.compressor.codec.encode(1, want[None], want[None]))
    torch.testing.assert_close(k[:, :, :4], want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("option", [{"sinks": -1}, {"every": 0}, {"recent": -3}])
def test_a_negative_count_is_refused_by_name(option):
    with pytest.raises(ConfigError, match=rf"streaming_llm: {next(iter(option))}="):
        registry.build("streaming_llm", **option)


def test_how_a_class_shares_its_budget_is_no_option():
    """Fails when `ragged` is a dataclass field: any text was accepted."""
    with pytest.raises(ConfigError, match="ragged"):
        registry.build("random", ragged="nonsense")
