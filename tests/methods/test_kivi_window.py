"""kivi's exact window in 16 bits, as in the paper, whatever the model computes in."""

from __future__ import annotations

import pytest
import torch
from toys import dirty, score

from kvlab.cache.layout import Geom
from kvlab.compressor import Compressor
from kvlab.engine.config import EngineCfg
from kvlab.engine.engine import Engine
from kvlab.engine.sequence import Sampling
from kvlab.errors import ConfigError
from kvlab.kernels.cpu.turn import Turn
from kvlab.kernels.meta import MetaOverflow
from kvlab.methods.full import Full
from kvlab.methods.kivi import Kivi
from kvlab.models.geometry import geometry
from kvlab.models.lean import LeanRunner
from kvlab.models.tiny import tiny_model

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
PROMPT = torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(3)).tolist()


class Strict(Kivi):
    def encode(self, layer, k, v):
        assert k.dtype == v.dtype == torch.float32, "a codec is given the model's type, whatever the window holds"
        return super().encode(layer, k, v)


def engine(codec, kernels: str, model=None) -> Engine:
    model = model or tiny_model("tiny_llama", head_dim=64)
    run = LeanRunner(model, kernels=kernels)
    cfg = EngineCfg(block=32, max_seqs=4, max_len=128, max_batch_tokens=512, chunk=512, kernels=kernels, check=True)
    return dirty(Engine(run.forward, Compressor(codec), geometry(model, "tiny"), cfg))


def stored(codec, kernels: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Layer 0 of the prompt's body and tail, {region: [blocks, heads, ...]}: its k and v depend on nothing stored."""
    run, found = engine(codec, kernels), []

    def look(seq):
        (t,) = run.cache.classes
        for table, arrays in ((t.body, t.arrays), (t.tail, t.tail_arrays)):
            ids = [] if table is None else table[seq.row, 0][table[seq.row, 0] > 0].tolist()
            found.append({n: x[ids, 0].clone() for n, x in arrays.data.items()} if ids else {})

    run.add(PROMPT, Sampling(max_tokens=1), on_finish=look)
    run.run()
    return tuple(found)


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("name", TYPES)
def test_the_window_holds_rounded_numbers_and_codes_are_made_of_them(name, kernels):
    """Fails when the window stays in the model's type, or a block is encoded from what the window no longer holds."""
    exact, _ = stored(Full(), kernels)  # three blocks
    codec = Strict(window_dtype=name, residual=32)
    body, tail = stored(codec, kernels)  # one sealed, two in the tail
    assert body["k"].shape[0] == 1 and {x.dtype for x in tail.values()} == {TYPES[name]}
    last = len(PROMPT) % 32
    for side in "kv":
        want = exact[side][1:].to(TYPES[name])
        assert torch.equal(tail[side][0], want[0]) and torch.equal(tail[side][1][:, :last], want[1][:, :last])
    rounded = (exact[side][:1].to(TYPES[name]).float() for side in "kv")
    for region, x in codec.encode(0, *rounded).items():
        assert torch.equal(body[region].flatten(), x.flatten()), region


@pytest.mark.parametrize("name", TYPES)
def test_kernels_and_torch_read_it_alike(name):
    """Rows that see nothing but the window: where both round alike they agree to float32, and a number that they round
    to different sides moves a logit by a fraction of 2**-9 of it. A window that is not read as stored fails either."""
    ways = ((name, "auto"), (name, "off"), ("model", "off"))
    runs = [score(engine(Kivi(window_dtype=n, residual=32), k), [PROMPT, PROMPT[:50]], 30) for n, k in ways]
    (seqs, fast), (want_seqs, want), (_, model) = runs
    assert [s.output for s in seqs] == [s.output for s in want_seqs]
    for a, b, c in zip(fast, want, model):
        assert (a[:32] - b[:32]).abs().max() < 2e-3
        assert 1e-5 < (b[:32] - c[:32]).abs().max() < 0.05


@pytest.mark.parametrize("name", TYPES)
def test_one_call_for_all_layers_seals_it_too(name, monkeypatch):
    """To the bit, and the call really ran in every step. Fails when it reads the window as another type."""
    by_layer, whole = (engine(Kivi(window_dtype=name, residual=32), "auto") for _ in "ab")
    monkeypatch.setattr(by_layer.compressor, "turn", lambda pages: None)
    _, want = score(by_layer, [PROMPT, PROMPT[:50]], 30)
    ran, plain = [], Turn.run
    monkeypatch.setattr(Turn, "run", lambda self, *args: ran.append(plain(self, *args)) or ran[-1])
    _, got = score(whole, [PROMPT, PROMPT[:50]], 30)
    assert all(ran) and len(ran) == whole.stats.steps and whole.compressor.counters.encoded_blocks > 0
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_it_takes_half_the_bytes_of_float32():
    geom = Geom(2, 6, 2, 64)
    size = {
        n: sum(r.bytes(32) for r in Compressor(Kivi(window_dtype=n)).plan(geom, 32).tail) for n in ("model", *TYPES)
    }
    assert size["model"] == 2 * 4 * 32 * 64 and size["float16"] == size["bfloat16"] == size["model"] // 2


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_a_number_that_float16_lacks_is_refused_and_nothing_is_kept(kernels):
    model = tiny_model("tiny_llama", head_dim=64)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1e8)
    run = engine(Kivi(window_dtype="float16"), kernels, model)
    run.add(PROMPT, Sampling(max_tokens=4))
    with pytest.raises(MetaOverflow, match=r"^kivi: layer 1 v.*method\.window_dtype=float32"):
        run.run()
    assert not run.busy and all(t.pool.used == t.tail_pool.used == 0 for t in run.cache.classes)
    wide = engine(Kivi(window_dtype="bfloat16", meta_dtype="float32"), kernels, model)
    wide.add(PROMPT, Sampling(max_tokens=4))
    wide.run()


def test_an_unknown_type_is_refused():
    with pytest.raises(ConfigError, match="window_dtype='fp16' is unknown"):
        Compressor(Kivi(window_dtype="fp16")).plan(Geom(2, 6, 2, 64), 32)
