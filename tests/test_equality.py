"""`full` is transformers: same logits, same greedy tokens, for every architecture, chunk, block, batch and preemption.

References are computed on models of their own, since a Runner changes how its model attends.
"""

from __future__ import annotations

import inspect
from functools import cache

import pytest
import torch
from toys import dirty, score
from transformers import DynamicCache

from kvlab.codec import Codec
from kvlab.compressor import Compressor
from kvlab.engine.engine import Engine, EngineCfg
from kvlab.methods.fp8 import Fp8
from kvlab.methods.full import Full
from kvlab.methods.int8 import Int8
from kvlab.models.geometry import geometry
from kvlab.models.seam import Runner
from kvlab.models.tiny import NAMES, tiny_model

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 90)  # one token, around a block, around a window of 24, several blocks
NEW = 12
_gen = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(0, 256, (n,), generator=_gen).tolist() for n in LENGTHS]


@cache
def reference(name: str, dtype: torch.dtype = torch.float32) -> list[tuple[list[int], torch.Tensor]]:
    """(greedy tokens, logits [len + NEW - 1, vocab] of all rows in one pass) of each prompt, by transformers alone."""
    model, out = tiny_model(name, dtype=dtype), []
    for p in PROMPTS:
        ids = torch.tensor([p])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        out.append((whole[0, len(p) :].tolist(), model(whole[:, :-1]).logits[0].float()))
    return out


@cache
def runner(name: str, dtype: torch.dtype = torch.float32) -> tuple[Runner, object]:
    model = tiny_model(name, dtype=dtype)
    geom = geometry(model, name)
    return Runner(model), geom


def build(name: str, codec: Codec, dtype: torch.dtype = torch.float32, **cfg) -> Engine:
    run, geom = runner(name, dtype)
    cfg = {"block": 16, "max_seqs": 8, "max_len": 128, "max_batch_tokens": 512, "chunk": 512, "tile": 64, **cfg}
    return dirty(Engine(run.forward, Compressor(codec), geom, EngineCfg(**cfg, check=True)))


def assert_equal_to_transformers(name: str, e: Engine) -> None:
    seqs, logits = score(e, PROMPTS, NEW)
    for seq, got, (tokens, want) in zip(seqs, logits, reference(name)):
        # float32, 3-4 layers, sums of 64-128 products: some hundred roundings of 2**-24 relative to the largest
        bound = 1e-4 + 1e-5 * want.abs().max()
        assert got.shape == want.shape
        assert (got - want).abs().max() <= bound, (
            f"prompt of {seq.prompt}: {(got - want).abs().max():.2e} > {bound:.2e}"
        )
        assert seq.output == tokens, f"prompt of {seq.prompt}"


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("chunk", [1, 16, 64, 512])
@pytest.mark.parametrize("name", NAMES)
def test_full_equals_transformers_whatever_the_chunk_and_the_block(name, chunk, block):
    """Fails for a wrong mask at a chunk's edge, positions renumbered, a window off by one, heads of GQA mixed up."""
    assert_equal_to_transformers(name, build(name, Full(), chunk=chunk, block=block))


@pytest.mark.parametrize("name", NAMES)
def test_full_equals_transformers_when_prompt_rows_read_their_own_chunk_exactly(name):
    assert_equal_to_transformers(name, build(name, Full(), chunk=24, prefill_reads="exact"))


@pytest.mark.parametrize("name", NAMES)
def test_full_equals_transformers_when_sequences_are_preempted(name):
    """Fails when a resumed sequence starts at a wrong position, or reads pages that others wrote meanwhile."""
    e = build(name, Full(), chunk=32)
    for t in e.cache.classes:
        t.allocate(10, 0)  # 9 blocks, of which the longest sequence takes 7
    dirty(e)
    assert_equal_to_transformers(name, e)
    assert e.scheduler.preemptions > 0


class Stored(DynamicCache):
    """transformers' own cache, holding what a codec would give back."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self.codec = codec

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        k, v = self.codec.decode(layer_idx, self.codec.encode(layer_idx, key_states, value_states))
        return super().update(k.to(key_states.dtype), v.to(value_states.dtype), layer_idx, *args, **kwargs)


CODECS = [Full("bfloat16"), Full("float16"), Fp8(), Int8(group=16)]


@pytest.mark.parametrize(("kernels", "share"), [("off", 0.99), ("auto", 0.7)])
@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.label() + getattr(c, "dtype", ""))
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gemma"])
def test_a_stored_type_changes_the_logits_as_rounding_k_and_v_in_transformers_does(name, codec, kernels, share):
    """A query sees the stored form of everything, itself included (prefill_reads=encoded). Fails when the newest token
    or the chunk is read exactly, or when a stored value is rounded twice.

    The two runs see keys that differ in the last bit of float32 (2**-24), which moves a code across a rounding boundary
    once in 2**24 / 2**8 values; such a step is worth 2**-9 of a key, so at most a few rows differ by more than 1e-4.
    The torch path shares transformers' attention kernel and most of its bits; the CPU kernels add in an order of their
    own, so that every key of a deeper layer differs in its last bits and more of them move."""
    model = tiny_model(name)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    geom = geometry(model, name)
    codec.setup(geom, 16)
    seqs, logits = score(build(name, codec, chunk=32, kernels=kernels), PROMPTS, NEW)
    exact = total = 0
    for seq, got in zip(seqs, logits):
        want = model(torch.tensor([seq.tokens[:-1]]), **{keyword: Stored(codec)}).logits[0]
        error = (got - want).abs().amax(-1)
        exact, total = exact + int((error <= 1e-4 + 1e-5 * want.abs().max()).sum()), total + len(error)
        assert error.max() < 0.02 * want.abs().max()
    assert exact >= share * total, f"{total - exact} of {total} rows differ"
    plain = max((got[: len(want)] - want).abs().max() for got, (_, want) in zip(logits, reference(name)))
    assert plain > 1e-3, "the codec did nothing: this test says nothing"


@pytest.mark.parametrize("name", NAMES)
def test_a_bfloat16_model_is_as_close_to_the_exact_result_as_transformers_is(name):
    """Both round at every layer, in another order; neither may be further from the float32 run of the same (rounded)
    weights than the other by more than chance: 1.25 in the root mean square over 20,000 logits."""
    half, exact = tiny_model(name, dtype=torch.bfloat16), tiny_model(name, dtype=torch.bfloat16).float()
    e = build(name, Full(), dtype=torch.bfloat16, chunk=32)
    _, logits = score(e, PROMPTS, 0)
    ours = theirs = 0.0
    for p, got in zip(PROMPTS, logits):
        want = exact(torch.tensor([p])).logits[0]
        ours += (got - want).square().sum().item()
        theirs += (half(torch.tensor([p])).logits[0].float() - want).square().sum().item()
    assert 0 < ours <= 1.25**2 * theirs, f"rms error {ours**0.5:.4f}, transformers' is {theirs**0.5:.4f}"
