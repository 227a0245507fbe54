"""Who shares a batch, how a prompt is cut into chunks, and a budget that keeps everything must not change a result.

Every file of kvlab/configs/method is run, so a new method enters these tests by itself; so do all pipelines.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from toys import RandomModel, dirty, score

from kvlab.cache.layout import Geom
from kvlab.codec import Codec
from kvlab.compressor import Compressor
from kvlab.engine.engine import Engine, EngineCfg
from kvlab.engine.sequence import Sampling
from kvlab.errors import ConfigError
from kvlab.families.pruner import Pruner
from kvlab.methods.composed import compose
from kvlab.methods.full import Full
from kvlab.models.geometry import geometry
from kvlab.models.seam import Runner
from kvlab.models.tiny import tiny_model
from kvlab.names import config, names
from kvlab.registry import instantiate

# Options that make a method act on prompts of a hundred tokens. A new option with one of these names is shrunk too.
SMALL = {"tokens": 24, "sinks": 2, "window": 8, "residual": 4, "every": 3}
LENGTHS = (3, 20, 25, 33, 40, 57, 64, 90)
_gen = torch.Generator().manual_seed(1)
PROMPTS = [torch.randint(0, 256, (n,), generator=_gen).tolist() for n in LENGTHS]


def part(name: str, **changes) -> Codec | Pruner:
    """A fresh object of a method file, shrunk."""
    cfg = config(name)
    values = {k: v for k, v in (SMALL | changes).items() if k in cfg and not isinstance(cfg[k], str)}
    if name == "h2o" or cfg.get("recent") is not None:
        values["recent"] = 8
    return instantiate({**cfg, **values})


METHODS = [name for name in names() if name != "composed"]  # composed has no stages of its own
PRUNERS = [name for name in METHODS if isinstance(part(name), Pruner)]
CODECS = [name for name in METHODS if isinstance(part(name), Codec) and name != "full"]


@cache
def runner(name: str, dtype: torch.dtype) -> tuple[Runner, Geom]:
    model = tiny_model(name, dtype=dtype, head_dim=64)  # wide enough for the groups that codecs have by default
    geom = geometry(model, name)
    return Runner(model), geom


def engine(comp: Compressor, model: str = "tiny_llama", dtype: torch.dtype = torch.float32, **cfg) -> Engine:
    run, geom = runner(model, dtype)
    cfg = {"block": 32, "max_seqs": 8, "max_len": 128, "max_batch_tokens": 512, "chunk": 512, "tile": 64, **cfg}
    return dirty(Engine(run.forward, comp, geom, EngineCfg(**cfg, check=True)))


def assert_batch_equals_singles(parts, prompts: list[list[int]], new: int, **cfg) -> None:
    together = compose(parts())
    seqs, logits = score(engine(together, **cfg), prompts, new)
    if together.pruner is not None:
        assert together.counters.evicted_slots > 0, "nothing was evicted: this test says nothing"
    if together.codec.family != "full":
        assert together.counters.encoded_blocks > 0, "nothing was encoded: this test says nothing"
    for prompt, seq, rows in zip(prompts, seqs, logits):
        ((alone,), (want,)) = score(engine(compose(parts()), **cfg), [prompt], new)
        assert seq.output == alone.output, f"prompt of {len(prompt)} tokens"
        # the same sums in the same order, joined at the same tiles: what is left is the last bit of an exp or a log
        error = (rows - want).abs().max()
        assert error <= 1e-5, f"prompt of {len(prompt)} tokens: logits differ by {error:.1e}"


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_of_eight_gives_what_eight_single_runs_give(name):
    """Fails when a sequence reads another one's pages, a budget is taken from the longest of the batch, padding rows
    vote, scores are summed over the batch, or unused memory (NaN here) reaches an output."""
    assert_batch_equals_singles(lambda: [part(name)], PROMPTS, new=12)


def test_the_bits_of_a_sequence_do_not_depend_on_who_shares_its_batch():
    """What EngineCfg.min_rows promises. Fails when a kernel takes another path for other shapes."""
    _, together = score(engine(compose([Full()])), PROMPTS, 12)
    for prompt, rows in zip(PROMPTS, together):
        _, (alone,) = score(engine(compose([Full()])), [prompt], 12)
        assert torch.equal(rows, alone), f"prompt of {len(prompt)}: bits differ by {(rows - alone).abs().max():.2e}"


@pytest.mark.parametrize("pruner, codec", list(product(PRUNERS, CODECS)))
def test_a_pipeline_gives_the_same_in_a_batch_or_says_why_it_cannot_work(pruner, codec):
    p, c = part(pruner), part(codec)
    if p.trigger == "step" and (c.scope == "block" or c.residual):
        with pytest.raises(ConfigError, match="evicts while decoding"):
            engine(compose([p, c]))
        return
    assert_batch_equals_singles(lambda: [part(pruner), part(codec)], [PROMPTS[i] for i in (1, 3, 7)], new=14)


@pytest.mark.parametrize("reads", ["encoded", "exact"])
@pytest.mark.parametrize("name", PRUNERS)
def test_a_batch_of_chunks_gives_what_single_runs_give(name, reads):
    """Prompts in chunks that end at different steps. Fails when a score or a window of queries is kept per step."""
    cfg = {"chunk": 32, "max_batch_tokens": 512, "prefill_reads": reads}
    assert_batch_equals_singles(lambda: [part(name)], [PROMPTS[i] for i in (1, 5, 7)], new=6, **cfg)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_gives_the_same_in_a_batch_over_sliding_layers_and_in_bfloat16(name):
    """Two classes of layers with tables of their own. Fails when masks have another type than the keys they mask, or
    when a pruner's hooks run on layers that it does not own."""
    cfg = {"model": "tiny_gemma", "dtype": torch.bfloat16, "chunk": 32}
    assert_batch_equals_singles(lambda: [part(name)], [PROMPTS[i] for i in (1, 5, 7)], new=8, **cfg)


@pytest.mark.parametrize("name", PRUNERS)
def test_a_budget_that_keeps_everything_does_not_change_a_bit(name):
    """Fails when the scorer runs or a block moves although nothing has to go."""
    want = score(engine(compose([Full()])), PROMPTS, 12)
    for budget in ({"tokens": 128}, {"tokens": None, "fraction": 1.0}):
        comp = compose([part(name, **budget)])
        if budget["tokens"] is None and comp.pruner.trigger == "step":
            continue  # a part of the context is less than the context and what follows
        seqs, logits = score(engine(comp), PROMPTS, 12)
        assert comp.counters.evicted_slots == 0
        assert [s.output for s in seqs] == [s.output for s in want[0]]
        assert all(torch.equal(a, b) for a, b in zip(logits, want[1]))


@pytest.mark.parametrize("name", ["full", *CODECS])
def test_preemption_changes_no_token(name):
    """What is recomputed reads the same stored forms as what was decoded. Fails when a resumed sequence seals other
    blocks, or attends to its own output exactly."""
    prompts = [PROMPTS[i] for i in (4, 5, 6, 7)]
    calm, _ = score(engine(compose([part(name)])), prompts, 24)
    e = engine(compose([part(name)]))
    for t in e.cache.classes:  # 90 + 24 tokens are 4 blocks of 32; all four sequences would take 13
        t.allocate(8, 8 if t.tail is not None else 0)
    seqs, _ = score(dirty(e), prompts, 24)
    assert e.scheduler.preemptions > 0
    assert [s.output for s in seqs] == [s.output for s in calm]


def stored(e: Engine, row: int) -> dict[tuple, torch.Tensor]:
    """Every region of a row, bytes [layers, heads, *] of sealed blocks and of single slots."""
    out = {}
    for t in e.cache.classes:
        B = t.block
        for source, table, arrays in (("body", t.body, t.arrays), ("tail", t.tail, t.tail_arrays)):
            if table is None:
                continue
            for name, data in arrays.data.items():
                per_slot = arrays.regions[name].scope == "token"
                for layer, li in t.layer_index.items():
                    for head in range(t.group_of.shape[1]):
                        g, (a, h) = t.group_of[li, head], divmod(t.place[li, head], t.heads_of_group)
                        blocks = [int(b) for b in table[row, g] if b]
                        x = data[blocks, a, h]
                        sealed = int(t.sealed[row, g])
                        slots = sealed if source == "body" else int(t.n_slots[row, g]) - sealed
                        x = x.flatten(0, 1)[:slots] if per_slot else x[: slots // B]
                        out[source, name, layer, head] = x.reshape(-1).view(torch.uint8).clone()
    return out


@pytest.mark.parametrize("name", ["full", *CODECS])
def test_the_codes_of_a_stream_do_not_depend_on_its_chunks(name):
    """The same k and v, written in pieces of any size, in company or alone, leave the same bytes. Fails when a scale is
    taken over a chunk, a block is sealed twice, or sealed from slots that are not its own."""
    geom, tokens = Geom(2, 4, 2, 64), PROMPTS[7]
    want = None
    for chunk, company in ((512, 0), (32, 0), (7, 2), (1, 1)):
        e = Engine(
            RandomModel(), compose([part(name)]), geom,
            EngineCfg(block=32, max_seqs=4, max_len=128, max_batch_tokens=512, chunk=chunk, tile=64, check=True),
        )  # fmt: skip
        dirty(e, seed=chunk)
        others = [e.add(PROMPTS[i + 2], Sampling(max_tokens=9)) for i in range(company)]
        got: dict[tuple, torch.Tensor] = {}
        e.add(tokens, Sampling(max_tokens=0), on_finish=lambda s, e=e, got=got: got.update(stored(e, s.row)))
        e.run()
        assert got and all(s.finish_reason == "length" for s in others)
        want = want or got
        assert want.keys() == got.keys()
        for key, x in want.items():
            assert torch.equal(x, got[key]), f"chunk {chunk}: {key}"
