"""The default model through the paged runtime is the default model: logits and greedy tokens of transformers."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from kvlab import registry
from kvlab.engine.config import EngineCfg
from kvlab.engine.sequence import Sampling
from kvlab.lab import Lab

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "1, 2, 3, 4, 5,",
    "To whom it may concern: I am writing to you about the state of the roads in our town, which " * 4,
    "Q: What is the largest planet?\nA:",
    "The quick brown fox jumps over the lazy dog. " * 9,
)
NEW = 8
CLOSE = 1e-3  # a greedy choice whose two best logits are closer than this is rounding, not a difference


@pytest.fixture(scope="module")
def pair(smollm2_loaded):
    """(reference model with its own attention, what a Lab is made of)."""
    return copy.deepcopy(smollm2_loaded.model), dataclasses.replace(
        smollm2_loaded, model=copy.deepcopy(smollm2_loaded.model)
    )


@pytest.mark.parametrize("chunk, step", [(16, "lean"), (512, "lean"), (512, "hf")])
def test_eight_prompts_in_one_batch_give_the_logits_and_greedy_tokens_of_transformers(pair, chunk, step):
    """Fails for a wrong position, scale, rope or mask on real weights; 1e-4 + 1e-5 max|logit| is rounding."""
    reference, loaded = pair
    cfg = EngineCfg(block=16, max_len=256, chunk=chunk, max_batch_tokens=512, step=step)
    lab = Lab(loaded, registry.build("full"), cfg)
    prompts = [lab.encode(text) for text in TEXTS]
    assert len({len(p) for p in prompts}) > 5, "prompts of different lengths"
    seqs = [lab.engine.add(p, Sampling(max_tokens=NEW)) for p in prompts]
    lab.engine.run()
    worst: list[tuple[float, float]] = []
    for prompt, seq in zip(prompts, seqs):
        whole = torch.tensor([prompt + seq.output])
        with torch.inference_mode():
            want = reference(whole).logits[0]
        got: list[torch.Tensor] = []
        lab.score(whole[0].tolist(), lambda first, logits, got=got: got.append(logits.clone()))
        lab.engine.run()
        error = float((torch.cat(got) - want).abs().max())
        worst.append((error, 1e-4 + 1e-5 * float(want.abs().max())))
        for i, token in enumerate(seq.output):  # teacher-forced: the first difference is a difference of `generate` too
            best = want[len(prompt) - 1 + i].topk(2)
            margin = float(best.values[0] - best.values[1])
            assert token == int(best.indices[0]) or margin < CLOSE, f"token {i}: margin {margin}"
    assert all(error <= allowed for error, allowed in worst), worst
