"""fidelity: the walk is the model's own prediction; a distance is 0 where nothing was lost and grows with the loss."""

import math
from itertools import pairwise

import pytest
import torch

from kvlab.errors import ConfigError
from kvlab.models.load import ModelCfg, load
from kvlab.models.tiny import tiny_model
from kvlab.tasks import corpus, fidelity
from kvlab.tasks.fidelity import Walk, walk

TASK = {"data": None, "documents": 2, "context": 64, "scored": 64, "chunk": 16}


def tokens_of(loaded, length: int) -> list[int]:
    (tokens,) = corpus.documents(corpus.load(), loaded.tokenizer, 1, length)
    return tokens


def log_probs(model, tokens: list[int]) -> torch.Tensor:
    """float32 [n, vocab] of one plain forward pass, no cache."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), -1)


def true_nll(model, tokens: list[int], context: int) -> torch.Tensor:
    """Of tokens[context + 1:], each from everything before it: what rows context .. n - 2 predict."""
    got = log_probs(model, tokens)[context:-1]
    return -got.gather(1, torch.tensor(tokens[context + 1 :])[:, None])[:, 0]


def nll(lab, tokens: list[int], context: int, chunk: int) -> torch.Tensor:
    return torch.cat(walk(lab, None, tokens, context, chunk, lambda n: None).nll)


# -- the walk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["tiny_llama", "tiny_gemma"]
)  # full attention; sliding windows of 24 and two rope bases
@pytest.mark.parametrize(("context", "chunk"), [(1, 1), (16, 16), (64, 64), (100, 7)])
def test_the_nll_of_the_full_cache_is_that_of_a_plain_forward_pass(benches, name, context, chunk):
    """Fails when targets are shifted by two, when a chunk sees its own future, or when positions start again at 0.

    1e-4: two orders of float32 sums over 160 keys and 3 layers; a shift changes single values by nats.
    """
    loaded = load(ModelCfg(name=name))
    tokens = tokens_of(loaded, 160)
    want = true_nll(tiny_model(name), tokens, context)
    got = nll(benches.lab(loaded), tokens, context, chunk)
    assert len(got) == 160 - context - 1
    assert want.std() > 0.5, "the values must differ from each other, or a shift would not be seen"
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_the_chunk_size_does_not_matter_to_the_full_cache(benches, tiny):
    """c in {1, 16, 64, all} within 1e-3 in every log-probability (evaluation.md 3.1)."""
    tokens = tokens_of(tiny, 150)
    walks = [nll(benches.lab(tiny), tokens, 8, chunk) for chunk in (1, 16, 64, 150)]
    for other in walks[1:]:
        torch.testing.assert_close(other, walks[0], rtol=0, atol=1e-3)


def test_real_weights_give_the_nll_of_a_plain_forward_pass(benches, smollm2_loaded):
    """1e-4 relative to values of 0.01 to 10 nats: 30 layers in float32."""
    tokens = tokens_of(smollm2_loaded, 160)
    got = nll(benches.lab(smollm2_loaded), tokens, 96, 16)
    smollm2_loaded.model.set_attn_implementation("sdpa")
    try:
        want = true_nll(smollm2_loaded.model, tokens, 96)
    finally:
        smollm2_loaded.model.set_attn_implementation("kvlab")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert 0.5 < want.mean() < 5, "a real model predicts prose"


# -- distances -----------------------------------------------------------------------------------------------------


def test_the_distance_of_the_full_cache_to_itself_is_zero(benches, tiny):
    full = benches.lab(tiny), benches.lab(tiny)
    got = walk(*full, tokens_of(tiny, 128), 64, 16, lambda n: None)
    kl = torch.cat(got.kl)
    assert len(kl) == 64 and float(kl.min()) >= 0 and float(kl.max()) < 1e-6
    assert torch.cat(got.same).all()
    assert torch.equal(torch.cat(got.nll), torch.cat(got.nll_full))


def test_kl_and_nll_are_those_of_their_definition_in_float64():
    """Fails when KL is taken in the other direction, or from probabilities in half precision."""
    gen = torch.Generator().manual_seed(0)
    full, ours = (3 * torch.randn(9, 50, generator=gen) for _ in range(2))
    targets = torch.randint(0, 50, (8,), generator=gen)  # the ninth row predicts nothing that is known
    got = Walk()
    got.add(full, ours, targets)
    a, b = torch.log_softmax(full.double(), -1), torch.log_softmax(ours.double(), -1)
    kl = (a.exp() * (a - b)).sum(-1)
    torch.testing.assert_close(got.kl[0].double(), kl, rtol=1e-5, atol=0)
    assert ((b.exp() * (b - a)).sum(-1) - kl).abs().min() > 1e-2, "the two directions must differ here"
    torch.testing.assert_close(got.nll[0].double(), -b[range(8), targets], rtol=1e-5, atol=0)
    torch.testing.assert_close(got.nll_full[0].double(), -a[range(8), targets], rtol=1e-5, atol=0)
    assert torch.equal(got.same[0], full.argmax(-1) == ours.argmax(-1))


def test_equal_logits_tie_to_the_lowest_id_in_both():
    got = Walk()
    got.add(torch.zeros(2, 7), torch.tensor([[0.0] * 7, [0.0, 1, 0, 0, 0, 0, 0]]), torch.tensor([1, 2]))
    assert got.same[0].tolist() == [True, False]


SEQUENCES = {
    "turboquant": [{"bits_k": b, "bits_v": b} for b in (2, 3, 4, 8)],
    "kivi": [{"bits_k": b, "bits_v": b, "group": 16, "residual": 0} for b in (2, 3, 4, 8)],
    "int": [("int4", {"bits": 2, "group": 16}), ("int4", {"bits": 3, "group": 16}), ("int4", {"group": 16}),
            ("int8", {"group": 16})],
}  # fmt: skip


@pytest.mark.parametrize("family", SEQUENCES)
def test_the_distance_falls_with_every_bit(benches, tiny, family):
    """A bit more halves the step: noise power and KL fall about 4 times, half of that is asked for.

    Fails when a width is ignored, or when codes of one width are read as another.
    """
    steps = [s if isinstance(s, tuple) else (family, s) for s in SEQUENCES[family]]
    kls = []
    for method, options in steps:
        out = fidelity.run(benches(tiny, method, **options), TASK)
        kls.append(out.summary["kl_mean"])
        assert out.acted and out.summary["kl_p99"] <= out.summary["kl_max"]
    for few, many in pairwise(kls):
        assert 0 < 2 * many < few, f"KL by bits 2, 3, 4, 8: {kls}"
    assert kls[-1] < 1e-3


# -- the task ------------------------------------------------------------------------------------------------------


def test_the_task_gives_the_reference_row_zeros_and_names_the_chunk_in_the_metric(benches, tiny):
    out = fidelity.run(benches(tiny), TASK)
    assert out.summary["delta_nll"] == 0 and out.summary["kl_max"] == 0 and out.summary["top1"] == 1
    assert not out.acted, "the full cache encodes nothing"
    rows = {r["metric"]: r for r in out.rows}
    assert "ppl_prefill64@16" in rows and rows["nll"]["n"] == 2 * 63
    assert rows["ppl_prefill64@16"]["value"] == pytest.approx(math.exp(rows["nll"]["value"]))
    stream = fidelity.run(benches(tiny), TASK | {"context": 16, "scored": 16, "documents": 1})
    assert "ppl_stream@16" in {r["metric"] for r in stream.rows}, "context = chunk is the streaming perplexity"
    assert out.data[0]["sha256"] == corpus.load().sha256


def test_documents_of_two_methods_pair_and_sum_up_to_the_rows(benches, tiny):
    full = fidelity.run(benches(tiny), TASK)
    ours = fidelity.run(benches(tiny, "turboquant", bits_k=3, bits_v=3), TASK)
    keys = [{k: v for k, v in d.items() if k not in ("value", "method")} for d in full.documents]
    assert keys == [{k: v for k, v in d.items() if k not in ("value", "method")} for d in ours.documents]
    nll_ = [d for d in ours.documents if d["metric"] == "nll"]
    assert sum(d["value"] for d in nll_) / sum(d["count"] for d in nll_) == pytest.approx(ours.summary["nll"], rel=1e-6)
    assert ours.summary["delta_nll"] == pytest.approx(ours.summary["nll"] - full.summary["nll"], abs=1e-5)


def test_a_pruner_that_acts_once_acts_at_the_end_of_the_context(benches, tiny):
    """kept = (C + scored) / seen: fails when the scored tokens are taken for a part of the prompt."""
    out = fidelity.run(benches(tiny, "snapkv", tokens=40, window=8), TASK)
    assert out.summary["kept"] == pytest.approx((40 + 64) / 128)
    assert out.summary["kl_mean"] > 0


def test_too_little_to_score_is_refused(benches, tiny):
    with pytest.raises(ConfigError, match=r"task\.scored=1 must be 2 or more"):
        fidelity.run(benches(tiny), TASK | {"scored": 1})
