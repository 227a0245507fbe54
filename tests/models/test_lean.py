"""The lean step is the transformers forward: logits, greedy tokens, whatever the batch and the chunk; and what it is
not for falls back or is refused."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import pytest
import torch
from toys import dirty, score

from kvlab import registry
from kvlab.compressor import Compressor
from kvlab.engine.config import EngineCfg
from kvlab.engine.engine import Engine
from kvlab.errors import ConfigError
from kvlab.kernels.cpu import isa
from kvlab.lab import Lab
from kvlab.lab import load as load_lab
from kvlab.methods.full import Full
from kvlab.methods.kivi import Kivi
from kvlab.models import weights
from kvlab.models.geometry import geometry
from kvlab.models.lean import LeanRunner, runner, unsupported
from kvlab.models.load import ModelCfg, load
from kvlab.models.tiny import tiny_model

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 90)
NEW = 12
_gen = torch.Generator().manual_seed(2)
PROMPTS = [torch.randint(0, 256, (n,), generator=_gen).tolist() for n in LENGTHS]

KINDS_OF_LAYERS = ["full_attention", "sliding_attention", "sliding_attention"]
TWO_SLIDING = {"use_sliding_window": True, "sliding_window": 24, "layer_types": KINDS_OF_LAYERS}
WIDE = {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "head_dim": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("tiny_llama", {}),
    "mqa": ("tiny_mqa", {}),
    "mha, biases, a wide head": ("tiny_llama", WIDE),
    "tied head, odd widths": ("tiny_llama", {"tie_word_embeddings": True, "intermediate_size": 100}),
    "yarn scales cos and sin": ("tiny_llama", {"rope_parameters": YARN}),
    "qwen2": ("tiny_qwen2", {}),
    "qwen2 with windows": ("tiny_qwen2", TWO_SLIDING),
    "qwen3": ("tiny_qwen3", {}),
    "mistral with a window": ("tiny_mistral", {}),
    "mistral without": ("tiny_mistral", {"sliding_window": None}),
}  # fmt: skip


@cache
def model(name: str, dtype: torch.dtype = torch.float32):
    """One that nobody changes: the oracle."""
    base, changes = MODELS[name]
    return tiny_model(base, dtype=dtype, **changes)


@cache
def reference(name: str) -> list[tuple[list[int], torch.Tensor]]:
    """(greedy tokens, logits of all rows in one pass) of each prompt, by transformers alone."""
    out = []
    for p in PROMPTS:
        ids = torch.tensor([p])
        whole = model(name).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        out.append((whole[0, len(p) :].tolist(), model(name)(whole[:, :-1]).logits[0]))
    return out


VARIANTS = isa.runnable()
# (runtime.kernels, runtime.weights) that there are: torch, and the compiled step in every variant of this CPU
WAYS = [("off", "model"), ("off", "bf16"), *((v, k) for v in VARIANTS for k in weights.KINDS)]
EXACT = [way for way in WAYS if way[1] == "model"]
AUTO = ("auto", "model")


@cache
def lean(name: str, way: tuple[str, str] = AUTO, dtype: torch.dtype = torch.float32):
    base, changes = MODELS[name]
    own = tiny_model(base, dtype=dtype, **changes)
    return LeanRunner(own, kernels=way[0], weights=way[1]), geometry(own, name)


def build(run, geom, codec=None, **cfg) -> Engine:
    cfg = {"block": 16, "max_seqs": 8, "max_len": 128, "max_batch_tokens": 512, "chunk": 512, "tile": 64, **cfg}
    cfg.setdefault("kernels", run.facts["linear"].split()[0] if run.body.whole else "auto")  # the same on both sides
    return dirty(Engine(run.forward, Compressor(codec or Full()), geom, EngineCfg(**cfg, check=True)))


# -- equal to transformers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", EXACT)
@pytest.mark.parametrize("chunk", [1, 24, 512])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_are_those_of_transformers(name, chunk, way):
    """Fails for rope's sign or pairing, a norm's eps, heads in another order, a bias left out, gate and up exchanged, a
    window on the wrong layers."""
    seqs, logits = score(build(*lean(name, way), chunk=chunk), PROMPTS, NEW)
    for seq, got, (tokens, want) in zip(seqs, logits, reference(name)):
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 1e-4
        assert seq.output == tokens, f"prompt of {seq.prompt}"


@pytest.mark.parametrize("name", MODELS)
def test_joined_matrices_give_the_same_and_hold_nothing_twice(name, monkeypatch):
    """The form of half precision, GPUs and builds without oneDNN. The transformers model still gives its own logits:
    its parameters are views of the joined matrices. Fails when they are copies, or views in another order."""
    monkeypatch.setattr(weights, "_has_onednn", lambda: False)
    base, changes = MODELS[name]
    own = tiny_model(base, **changes)
    run = LeanRunner(own, kernels="off")
    assert run.facts["linear"] == "joined"
    _, logits = score(build(run, geometry(own, name)), PROMPTS, 0)
    for p, got in zip(PROMPTS, logits):
        want = model(name)(torch.tensor([p])).logits[0]
        assert (got - want).abs().max() <= 1e-4
        assert (own(torch.tensor([p])).logits[0] - want).abs().max() <= 1e-5
    a = own.model.layers[0].self_attn
    assert len({p.weight.untyped_storage().data_ptr() for p in (a.q_proj, a.k_proj, a.v_proj)}) == 1
    again = LeanRunner(own, kernels="off")
    ours = [r.body.layers[0].qkv.weight.data_ptr() for r in (run, again)]
    assert ours == [a.q_proj.weight.data_ptr()] * 2


def test_the_transformers_model_is_left_as_it_was():
    """A Runner made of the same model afterwards must not notice."""
    loaded = load(ModelCfg(name="tiny_qwen2"))
    before = {k: v.clone() for k, v in loaded.model.state_dict().items()}
    attention = loaded.model.config._attn_implementation
    for kernels, kind in [("off", "model"), ("off", "bf16"), *(("auto", k) for k in weights.KINDS)]:
        runner(loaded, weights=kind, kernels=kernels)
    assert loaded.model.config._attn_implementation == attention
    assert all(torch.equal(v, before[k]) for k, v in loaded.model.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_bfloat16_model_is_as_close_to_the_exact_result_as_transformers_is(name):
    """Neither may be further from the float32 run of the same (rounded) weights than the other by more than chance."""
    exact = model(name, torch.bfloat16).__class__(model(name).config).eval()
    exact.load_state_dict({k: v.float() for k, v in model(name, torch.bfloat16).state_dict().items()})
    run, geom = lean(name, dtype=torch.bfloat16)
    _, logits = score(build(run, geom, chunk=32), PROMPTS, 0)
    assert run.facts["linear"] == "joined" and logits[0].dtype == torch.bfloat16
    ours = theirs = 0.0
    for p, got in zip(PROMPTS, logits):
        want = exact(torch.tensor([p])).logits[0]
        ours += (got.float() - want).square().sum().item()
        theirs += (model(name, torch.bfloat16)(torch.tensor([p])).logits[0].float() - want).square().sum().item()
    assert 0 < ours <= 1.25**2 * theirs, f"rms error {ours**0.5:.4f}, transformers' is {theirs**0.5:.4f}"


# -- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Full, lambda: Kivi(group=16, residual=16)], ids=["full", "kivi"])
@pytest.mark.parametrize("way, dtype", [(w, torch.float32) for w in WAYS] + [(("off", "model"), torch.bfloat16)])
@pytest.mark.parametrize("name", ["llama", "tied head, odd widths", "qwen3"])
def test_the_bits_of_a_sequence_do_not_depend_on_who_shares_its_batch(name, way, dtype, codec):
    """Fails when a matrix product takes other code for few rows, when activations get one range for the whole batch, or
    when the last elements of an array are rounded otherwise (widths that are no multiple of a vector)."""
    _, together = score(build(*lean(name, way, dtype), codec(), block=32, chunk=32), PROMPTS, NEW)
    for prompt, rows in zip(PROMPTS, together):
        _, (alone,) = score(build(*lean(name, way, dtype), codec(), block=32, chunk=32), [prompt], NEW)
        assert torch.equal(rows, alone), f"prompt of {len(prompt)}: bits differ by {(rows - alone).abs().max():.2e}"


@pytest.mark.parametrize("kind", ["joined", "model", "bf16"])
@pytest.mark.parametrize("shape", [(64, 96), (100, 37), (576, 960), (1536, 576)])
def test_a_row_of_a_product_has_the_same_bits_among_any_number_of_rows(shape, kind, monkeypatch):
    if kind == "joined":
        monkeypatch.setattr(weights, "_has_onednn", lambda: False)
    torch.manual_seed(0)
    module = torch.nn.Linear(*shape)
    made = weights.Weights("model" if kind == "joined" else kind, module.weight).linear(module)
    x = torch.randn(130, shape[0])
    x[7] *= 1000  # a row that would widen a range shared by all
    with torch.inference_mode():
        want = made(x)
        for n in (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 33, 64, 129):
            assert torch.equal(made(x[:n]), want[:n]), f"{n} rows"


def test_rows_are_padded_up_to_where_their_bits_stop_changing_and_not_further():
    class Odd(weights.Linear):
        """Takes other code below `at` rows."""

        def __init__(self, at: int) -> None:
            self.at = at

        def product(self, x):
            return x + (len(x) < self.at)

    like = torch.zeros(3, 5)
    assert [weights.stable_rows(Odd(at), like, most=4) for at in (0, 1, 2, 3, 4, 9)] == [1, 1, 2, 3, 4, 4]
    assert weights.stable_rows(Odd(9), like, most=1) == 1, "runtime.min_rows=1: no padding, whatever the bits"
    padded = Odd(3)
    padded.rows = 3
    assert padded(torch.ones(1, 5)).shape == (1, 5) and (padded(torch.ones(1, 5)) == 1).all()


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_in_chunks_gives_what_it_gives_in_one_piece(way):
    """Chunks meet their tiles in another order: sums differ by rounding, which activations in bf16 (torch) or in 15
    bits (int8) turn into a step of theirs."""
    whole = score(build(*lean("llama", way)), PROMPTS, 0)[1]
    parts = score(build(*lean("llama", way), chunk=7), PROMPTS, 0)[1]
    bound = 0.02 if way == ("off", "bf16") else 1e-3 if way[1] == "int8" else 1e-4
    for a, b in zip(whole, parts):
        assert (a - b).norm() <= bound * a.norm()


# -- other weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mha, biases, a wide head", "qwen2", "qwen3", "mistral with a window"])
@pytest.mark.parametrize("way", [way for way in WAYS if way[1] != "model"])
def test_converted_weights_stay_close(name, way):
    """Relative error of one product, in the root mean square. bf16 rounds to 8 significant bits, 2**-9 each time: the
    weight, and in torch input and output as well. int8: the largest of some 64 normal weights is 3 sigma, so a step of
    127 is 3 / 127 sigma, its error that / sqrt(12) = 0.0068; activations in 15 bits add nothing to that. 13 products (3
    layers of 4, the head) add in quadrature, times 2 for what norms, softmax and silu make of it."""
    step = {"int8": 0.0068, "bf16": 2**-9 * (3**0.5 if way[0] == "off" else 1)}[way[1]]
    _, logits = score(build(*lean(name, way)), PROMPTS, 0)
    error = sum(
        float((got - model(name)(torch.tensor([p])).logits[0]).square().sum()) for p, got in zip(PROMPTS, logits)
    )
    size = sum(float(model(name)(torch.tensor([p])).logits[0].square().sum()) for p in PROMPTS)
    assert logits[0].dtype == torch.float32
    assert 0.2 * step < (error / size) ** 0.5 < 2 * 13**0.5 * step, f"relative error {(error / size) ** 0.5:.4f}"


def test_labs_of_one_model_share_its_converted_weights_and_copies_do_not():
    loaded = load(ModelCfg(name="tiny_llama"))
    one, two = (Lab(loaded, registry.build("full"), EngineCfg(max_len=64, weights="int8")) for _ in range(2))
    assert one.runner is two.runner
    other = dataclasses.replace(loaded, model=tiny_model("tiny_llama", seed=1))
    assert Lab(other, registry.build("full"), EngineCfg(max_len=64, weights="int8")).runner is not one.runner
    Lab(loaded, registry.build("full"), EngineCfg(max_len=64))
    assert len(loaded.lean) == 1, "the newest kind only: nobody pays for a second copy"


# -- what is not covered ----------------------------------------------------------------------------------------------


def changed(name: str, change, **config):
    own = tiny_model(name, **config)
    change(own)
    return own


def hook(own):
    own.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def other_norm(own):
    own.model.norm = torch.nn.RMSNorm(64)


class Adapter(torch.nn.Linear):
    pass


def adapt(own):
    old = own.model.layers[0].self_attn.q_proj
    own.model.layers[0].self_attn.q_proj = Adapter(old.in_features, old.out_features, bias=False)


def half(own):
    own.lm_head.half()


def own_forward(own):
    own.model.layers[0].forward = own.model.layers[0].forward


UNSUPPORTED = {
    "Gemma3ForCausalLM": lambda: tiny_model("tiny_gemma"),
    "activation is gelu": lambda: tiny_model("tiny_llama", hidden_act="gelu"),
    "has hooks": lambda: changed("tiny_llama", hook),
    "has hooks or a forward of its own": lambda: changed("tiny_llama", own_forward),
    "q_proj is a Adapter": lambda: changed("tiny_llama", adapt),
    "model.norm is a RMSNorm": lambda: changed("tiny_llama", other_norm),
    "several devices or dtypes": lambda: changed("tiny_llama", half),
    "window": lambda: tiny_model("tiny_llama", sliding_window=24),  # llama's forward does not look at it
}


@pytest.mark.parametrize("why", UNSUPPORTED)
def test_what_the_lean_step_does_not_cover_falls_back_under_auto_and_is_refused_under_lean(why):
    """Fails when a model is run without what makes it what it is."""
    loaded = dataclasses.replace(load(ModelCfg(name="tiny_llama")), model=UNSUPPORTED[why](), id="odd")
    assert why in unsupported(loaded.model)
    assert runner(loaded).facts == {"step": "hf", "weights": "model"}
    for asked in ({"step": "lean"}, {"weights": "int8"}, {"weights": "bf16"}):
        with pytest.raises(ConfigError, match=r"odd.*Ways out: runtime\.step=auto"):
            runner(loaded, **asked)
    with pytest.raises(ConfigError, match=r"Use runtime\.step=auto or hf"):
        LeanRunner(loaded.model)


def test_settings_that_there_are_not_are_refused():
    with pytest.raises(ConfigError, match=r"runtime\.step='fast' is not one of auto, lean, hf"):
        EngineCfg(step="fast")
    with pytest.raises(ConfigError, match=r"runtime\.weights=int8 needs the lean step.*runtime\.step=auto"):
        EngineCfg(step="hf", weights="int8")
    with pytest.raises(ConfigError, match=r"runtime\.weights='int4' is not one of model, bf16, int8"):
        runner(load(ModelCfg(name="tiny_llama")), weights="int4")


@pytest.mark.parametrize(
    "why, dtype, kernels", [("runtime.kernels=off", torch.float32, "off"), ("bfloat16", torch.bfloat16, "auto")]
)
def test_int8_without_kernels_says_what_to_use(why, dtype, kernels):
    with pytest.raises(ConfigError, match=f"runtime.weights=int8 needs.*{why}.*runtime.weights=bf16 or model"):
        LeanRunner(tiny_model("tiny_llama", dtype=dtype), "int8", kernels)


def test_the_step_follows_the_kernels_that_were_asked_for():
    loaded = load(ModelCfg(name="tiny_llama"))
    assert runner(loaded, kernels="off").facts["linear"] in ("joined", "blocked")
    assert runner(loaded, kernels="generic").facts["linear"] == "generic float32"
    assert runner(loaded, weights="bf16", kernels="generic").facts["linear"] == "generic bf16"


def test_a_run_says_in_its_row_which_step_and_weights_it_took(tmp_path):
    from front import run

    words = ["model=tiny_llama", "task=fidelity", "task.context=32", "task.scored=16", "task.documents=1", "threads=1"]
    ran = run(tmp_path, *words, "+method=int8", "method.group=16", "runtime.weights=int8")
    kernels = json.loads(ran.paths[0].read_text())["kernels"]
    assert (kernels["step"], kernels["weights"]) == ("lean", "int8") and kernels["linear"].endswith(" int8")
    assert "weights int8" in ran.out, "nobody should take this table for one of the model as it was loaded"


@pytest.mark.slow  # inductor takes seconds to compile
def test_a_compiled_step_is_the_same_step():
    """Fails for an operation that changes its meaning when it is fused, such as one in place on an input."""
    loaded = load(ModelCfg(name="tiny_qwen3"))
    outs = [
        load_lab(loaded, runtime={"kernels": "off", "compile": c, "max_len": 64}).generate([5, 6, 7] * 7, max_tokens=9)
        for c in (False, True)
    ]
    assert outs[0].tokens == outs[1].tokens


def test_compile_is_refused_where_nothing_is_left_to_compile():
    loaded = load(ModelCfg(name="tiny_llama"))
    with pytest.raises(ConfigError, match="nothing is left"):
        runner(loaded, kernels="generic", compiled=True)
    with pytest.raises(ConfigError, match=r"runtime\.compile=true"):
        runner(loaded, step="hf", compiled=True)
