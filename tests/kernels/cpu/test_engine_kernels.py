"""The engine gives the same tokens on the CPU kernels as on the torch path: every method, pipeline, kind of prefill,
models with sliding windows. (tests/test_batch_invariance.py runs the laws of batches on whatever `auto` means here.)
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pages
import pytest
import torch
from pages import VARIANTS
from test_batch_invariance import CODECS, METHODS, PROMPTS, PRUNERS, engine, part
from toys import score

from kvlab.kernels.cpu import isa
from kvlab.kernels.cpu.attend import Layers
from kvlab.methods.composed import compose
from kvlab.methods.full import Full

BEST = isa.runnable()[0]
NEW = 8
MIXED = {"chunk": 24, "max_batch_tokens": 64}  # decoding rows and rows of several chunks in one step


@pytest.fixture
def calls(monkeypatch) -> dict[str, int]:
    """How often the kernels ran."""
    count = {"attend": 0, "mass": 0}
    for name in count:
        plain = getattr(Layers, name)

        def counted(self, *args, _name=name, _plain=plain, **kwargs):
            count[_name] += 1
            return _plain(self, *args, **kwargs)

        monkeypatch.setattr(Layers, name, counted)
    return count


@cache
def torch_path(names: tuple[str, ...], options: tuple, cfg: tuple) -> tuple[list[list[int]], list[torch.Tensor]]:
    e = engine(compose([part(n, **dict(options)) for n in names]), kernels="off", **dict(cfg))
    seqs, logits = score(e, PROMPTS, NEW)
    return [s.output for s in seqs], logits


def assert_tokens_of_the_torch_path(
    names: tuple, variant: str, calls: dict, options: dict | None = None, **cfg
) -> None:
    pages.library(variant)
    options = options or {}
    want, slow = torch_path(names, tuple(options.items()), tuple(cfg.items()))
    assert calls["attend"] == 0, "the torch path called a kernel"
    comp = compose([part(n, **options) for n in names])
    got, fast = score(engine(comp, kernels=variant, **cfg), PROMPTS, NEW)
    assert calls["attend"] > 0, "the kernels did not run: this test says nothing"
    assert comp.pruner is None or comp.counters.evicted_slots > 0, "nothing was evicted"
    for prompt, output, seq, x, y in zip(PROMPTS, want, got, slow, fast):
        error = (x - y).abs().max().item()
        assert output == seq.output, f"prompt of {len(prompt)} tokens: logits are {error:.1e} apart"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("name", "reads"), list(product(METHODS, ("encoded", "exact"))))
def test_every_method_gives_the_tokens_of_the_torch_path(name, reads, variant, calls):
    """Fails when a tail is not joined, a window cuts elsewhere, or a chunk sees what it must not."""
    assert_tokens_of_the_torch_path((name,), variant, calls, prefill_reads=reads, **MIXED)


@pytest.mark.parametrize("pruner, codec", list(product(PRUNERS, CODECS)))
def test_every_pipeline_gives_the_tokens_of_the_torch_path(pruner, codec, calls):
    p, c = part(pruner), part(codec)
    if p.trigger == "step" and (c.scope == "block" or c.residual):
        pytest.skip("cannot be composed")
    assert_tokens_of_the_torch_path((pruner, codec), BEST, calls, **MIXED)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("model", ["tiny_gemma", "tiny_mistral"])
def test_sliding_windows_give_the_tokens_of_the_torch_path(name, model, calls):
    """Tables whose oldest blocks are gone, and classes of layers with tables of their own."""
    if name in PRUNERS and model == "tiny_mistral":
        pytest.skip("nothing to evict where every layer has a window")
    assert_tokens_of_the_torch_path((name,), BEST, calls, model=model, **MIXED)


@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_scores_come_from_the_kernels_where_attention_does(name, calls):
    score(engine(compose([part(name)]), kernels="auto", **MIXED), PROMPTS, 4)
    assert calls["mass"] > 0


@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("name", CODECS)
def test_every_block_size_gives_the_tokens_of_the_torch_path(name, block, calls):
    changes = {"group": 16} if name == "kivi" else {}
    assert_tokens_of_the_torch_path((name,), BEST, calls, changes, **MIXED, block=block, tile=128)


@pytest.mark.parametrize("name", ["full", *CODECS])
def test_long_prompts_give_the_tokens_of_the_torch_path(name, calls):
    """Several splits and tiles of 64, while another sequence is short."""
    prompts, cfg = [PROMPTS[7] * 7, PROMPTS[1]], {"max_len": 1024, "chunk": 128, "kernels": "off"}
    want, slow = score(engine(compose([part(name)]), **cfg), prompts, 6)
    got, fast = score(engine(compose([part(name)]), **{**cfg, "kernels": BEST}), prompts, 6)
    assert calls["attend"] > 0
    assert [s.output for s in got] == [s.output for s in want], (
        f"{max((x - y).abs().max() for x, y in zip(slow, fast))}"
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_full_logits_are_the_torch_paths_but_for_rounding(variant):
    """Nothing is encoded here, so no code can fall on the other side of a rounding: what differs are the last bits of
    three layers of float32 sums."""
    pages.library(variant)
    (_, slow), (_, fast) = (
        score(engine(compose([Full()]), kernels=k, **MIXED), PROMPTS, NEW) for k in ("off", variant)
    )
    for x, y in zip(slow, fast):
        assert (x - y).abs().max() <= 1e-5 * max(1.0, x.abs().max().item())


def test_a_head_dim_that_the_kernels_cannot_hold_runs_on_torch_with_a_reason(calls, caplog):
    from kvlab.engine.engine import Engine, EngineCfg
    from kvlab.models.geometry import geometry
    from kvlab.models.seam import Runner
    from kvlab.models.tiny import tiny_model

    model = tiny_model("tiny_llama", head_dim=24)
    geom = geometry(model, "tiny_llama")
    runner = Runner(model)
    cfg = EngineCfg(block=16, max_len=64, tile=64, check=True)
    with torch.inference_mode():
        score(Engine(runner.forward, compose([Full()]), geom, cfg), [[1, 2, 3]], 3)
    assert calls["attend"] == 0 and "24 channels are not a multiple of 16" in caplog.text
