"""Kept angles are the model's own, to the bit, whatever was asked before."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvlab.models.rope import Rope
from kvlab.models.tiny import tiny_config

LONG = {"rope_theta": 1e4, "original_max_position_embeddings": 64}
KINDS = {
    "default": {"rope_theta": 1e4},
    "linear": {"rope_theta": 1e4, "factor": 2.0},
    "llama3": LONG | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": LONG | {"factor": 4.0},
    "dynamic": {"rope_theta": 1e4, "factor": 2.0},
    "longrope": LONG | {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8},
}
ASKED = ([0], [5, 3, 300], [64, 63], [1], [5000, 2], [7])  # short, beyond what is kept, and short again


def module(kind: str) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(tiny_config("tiny_llama", rope_parameters={"rope_type": kind, **KINDS[kind]}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_angles_are_those_of_the_models_module(kind, dtype):
    """Fails for a table that is too short, of another type, or kept where the longest prompt changes every angle."""
    rope, own, like = Rope(module(kind)), module(kind), torch.empty(0, dtype=dtype)
    assert rope.kept == (kind not in ("dynamic", "longrope"))
    for positions in map(torch.tensor, ASKED):
        cos, sin = own(like, positions[None])
        half = cos.shape[-1] // 2
        assert torch.equal(cos[0, :, :half], cos[0, :, half:])
        got = rope(like, positions)
        assert got.dtype == dtype and torch.equal(got, torch.cat([cos[0, :, :half], sin[0, :, :half]], 1))


def test_one_rope_serves_two_types():
    rope, at = Rope(module("default")), torch.tensor([3])
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        assert rope(torch.empty(0, dtype=dtype), at).dtype == dtype
