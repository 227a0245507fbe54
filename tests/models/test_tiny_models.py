"""Tiny models have the shapes they promise, behave like language models, and are the same everywhere."""

import pytest
import torch

from kvlab.errors import ConfigError
from kvlab.models.tiny import EOS, NAMES, VOCAB, WINDOW, ByteTokenizer, tiny_config, tiny_model

IDS = torch.randint(0, 256, (1, 60), generator=torch.Generator().manual_seed(0))


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_model_is_causal_and_its_logits_tell_positions_apart(name):
    model = tiny_model(name)
    whole = logits(model)
    assert whole.shape == (1, 60, VOCAB)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(logits(model, IDS[:, :40]), whole[:, :40], rtol=0, atol=1e-4)
    assert whole.std(dim=1).mean() > 0.3, "every position says the same: a wrong cache would pass tests"
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_attention_is_far_from_uniform(name):
    """Fails for weights at the usual 0.02: the mean of V would then pass for attention."""
    model = tiny_model(name, attn_implementation="eager")
    with torch.no_grad():
        weights = model(IDS, output_attentions=True).attentions
    spread = torch.stack([layer[0, :, -1].max(-1).values for layer in weights])
    assert spread.mean() > 3 / 60


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_names_the_weights_and_the_global_random_state_is_left_alone(name):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, other = tiny_model(name), tiny_model(name, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    again = tiny_model(name)
    for (path, a), b, c in zip(one.named_parameters(), again.parameters(), other.parameters()):
        assert torch.equal(a, b), path
        assert not torch.equal(a, c), path


def projections(model):
    layer = model.model.layers[0].self_attn
    return layer, layer.q_proj.weight.shape[0], layer.k_proj.weight.shape[0]


@pytest.mark.parametrize(
    "name, q, k",
    [("tiny_llama", 64, 32), ("tiny_mqa", 64, 16), ("tiny_qwen2", 64, 32), ("tiny_qwen3", 64, 32),
     ("tiny_mistral", 64, 32), ("tiny_gemma", 128, 64)],
)  # fmt: skip
def test_heads_are_as_in_the_table(name, q, k):
    assert projections(tiny_model(name))[1:] == (q, k)


def test_qwen2_has_key_biases_that_matter():
    layer, _, _ = projections(tiny_model("tiny_qwen2"))
    assert layer.k_proj.bias.abs().mean() > 0.2
    assert layer.o_proj.bias is None


def test_qwen3_and_gemma_normalise_queries_and_keys():
    for name in ("tiny_qwen3", "tiny_gemma"):
        layer, _, _ = projections(tiny_model(name))
        assert layer.k_norm.weight.shape == (layer.head_dim,)


def reach(model) -> int:
    """How many tokens back the last position can see: the farthest one whose change moves its logits."""
    changed = IDS.repeat(IDS.shape[1], 1)
    diagonal = torch.arange(IDS.shape[1])
    changed[diagonal, diagonal] ^= 1
    moved = (logits(model, changed)[:, -1] - logits(model)[:, -1]).abs().amax(-1) > 1e-6
    return IDS.shape[1] - int(moved.nonzero().min())


def test_a_sliding_window_limits_what_a_layer_sees():
    """One layer sees exactly the window; three of them three windows, minus the two tokens counted twice."""
    assert reach(tiny_model("tiny_mistral", num_hidden_layers=1)) == WINDOW
    assert reach(tiny_model("tiny_mistral", num_hidden_layers=2)) == 2 * WINDOW - 1
    assert reach(tiny_model("tiny_llama", num_hidden_layers=1)) == IDS.shape[1]


def test_gemma_mixes_windows_full_layers_and_two_rope_bases():
    config = tiny_config("tiny_gemma")
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert config.sliding_window == WINDOW
    model = tiny_model("tiny_gemma")
    assert reach(model) == IDS.shape[1]
    frequencies = [b for n, b in model.named_buffers() if n.endswith("inv_freq") and "original" not in n]
    assert len(frequencies) == 2
    assert not torch.equal(*frequencies)


def test_fields_can_be_changed_and_unknown_names_are_refused():
    assert tiny_config("tiny_llama", num_hidden_layers=7).num_hidden_layers == 7
    assert type(tiny_config("tiny_qwen")) is type(tiny_config("tiny_qwen2"))
    with pytest.raises(ConfigError, match="there are tiny_llama, tiny_mqa"):
        tiny_config("tiny_gpt")


def test_generation_with_the_bytes_tokenizer_works_end_to_end():
    tokenizer, model = ByteTokenizer(), tiny_model("tiny_llama")
    ids = torch.tensor([tokenizer.encode("hello")])
    out = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert 1 <= len(out) <= 8
    assert isinstance(tokenizer.decode(out, skip_special_tokens=True), str)


@pytest.mark.parametrize("text", ["", "plain", "naïve 猫 🙂", "\x00\x01\n", "<eos>"])
def test_bytes_tokenizer_round_trips_any_text(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(torch.tensor(ids, dtype=torch.long)) == text
    assert EOS not in ids, "no text may end itself"
    assert all(0 <= i < len(tokenizer) for i in ids)


def test_bytes_tokenizer_decodes_what_a_model_may_say():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([104, 105, EOS]) == "hi<eos>"
    assert tokenizer.decode([104, 105, EOS], skip_special_tokens=True) == "hi"
    assert tokenizer.decode([0xE7, 0x8C]) == "�"
    assert tokenizer.decode(65) == "A"
    with pytest.raises(ValueError, match="outside"):
        tokenizer.decode([257])
