"""Bytes counted from live storages: the table of evaluation.md 2 to the byte, through the real runtime, no weights.

The model has SmolLM2-135M's shape (30 layers, 9 query and 3 kv heads of 64 channels) and writes random keys and values.
"""

from __future__ import annotations

import pytest
import torch
from toys import Echo, Toy, assert_sums_to_the_pool, echo_geom, quiet

from kvlab.cache.layout import Geom
from kvlab.cache.ledger import Ledger, live_blocks_bytes, measure
from kvlab.compressor import Compressor
from kvlab.engine.engine import Engine, EngineCfg
from kvlab.engine.sequence import Sampling
from kvlab.methods.composed import compose
from kvlab.methods.fp8 import Fp8
from kvlab.methods.full import Full
from kvlab.methods.int4 import Int4
from kvlab.methods.int8 import Int8
from kvlab.methods.kivi import Kivi
from kvlab.methods.random import Random
from kvlab.methods.snapkv import SnapKV
from kvlab.methods.turboquant import TurboQuant

FULL = 23_040  # 2 (k and v) x 30 layers x 3 heads x 64 channels x 2 bytes


def smollm2(dtype: torch.dtype = torch.float16) -> Geom:
    return Geom(L=30, H=9, Hk=3, D=64, dtype=dtype)


def writes(ids, positions, rows, comp: Compressor, pages):
    """A forward function without a model: random k, v, nothing attends."""
    gen = torch.Generator().manual_seed(int(positions[0]))
    for layer in range(comp.geom.L):
        k, v = (torch.randn(1, 3, len(ids), 64, generator=gen).to(comp.geom.dtype) for _ in "kv")
        comp.write(layer, k, v, pages)
    return torch.zeros(len(rows), 4)


def ledger_of(parts, n: int, geom: Geom, **cfg) -> Ledger:
    """The ledger of one sequence of n tokens, while it is alive."""
    cfg = {"block": 32, "max_seqs": 1, "max_len": n, "max_batch_tokens": 1024, "chunk": 1024, "tile": 256, **cfg}
    e = Engine(writes, compose(parts), geom, EngineCfg(**cfg, check=True))
    out = []
    e.add([1] * n, Sampling(max_tokens=0), on_finish=lambda s: out.append(measure(e.cache, [s.row], {s.row: n})))
    e.run()
    return out[0]


def test_the_full_cache_of_513_tokens_to_the_byte():
    """33 pages of 16 tokens for 513: 15 slots of the last page are waste."""
    led = ledger_of([Full("float16")], 513, smollm2(), block=16, tile=256)
    assert led.physical - led.tables == 33 * 16 * FULL == 12_165_120
    assert led.logical == led.payload == 513 * FULL == 11_819_520
    assert led.fragmentation == 345_600
    assert round(100 * led.fragmentation / (led.physical - led.tables), 2) == 2.84
    assert (led.metadata, led.residual, led.shared) == (0, 0, 0)
    assert led.tables > 0 and led.ratio(FULL) < 1
    assert led.bits_per_element == 16


CASES = [
    # what a token costs, bits of an element, full fp16 cache / that
    (Int8(group=64), 11_880, 8.25, 1.939),
    (Int4(group=64), 6_480, 4.5, 3.556),
    (Fp8(), 12_240, 8.5, 1.882),
    (TurboQuant(bits_k=4, bits_v=4), 6_120, 4.25, 3.765),
    (TurboQuant(bits_k=3, bits_v=3), 4_680, 3.25, 4.923),
    (TurboQuant(bits_k=2, bits_v=2), 3_240, 2.25, 7.111),
    (TurboQuant(bits_k=4, bits_v=4, variant="prod"), 6_300, 4.375, 3.657),
    (TurboQuant(bits_k=3, bits_v=3, variant="prod"), 4_860, 3.375, 4.741),
    (Kivi(bits_k=2, bits_v=2, group=32, residual=0), 4_320, 3.0, 5.333),
    (Full("float16"), FULL, 16.0, 1.0),
    (Full("float32"), 2 * FULL, 32.0, 0.5),
]


@pytest.mark.parametrize("codec, per_token, bits, ratio", CASES)
def test_a_codec_costs_to_the_byte_what_its_layout_says(codec, per_token, bits, ratio):
    """64 tokens fill two blocks, so nothing is wasted. Fails when metadata is forgotten or counted twice, or when the
    model's dtype leaks into the stored bytes."""
    for dtype in (torch.float16, torch.float32):
        led = ledger_of([codec], 64, smollm2(dtype))
        assert led.physical - led.tables == led.logical == 64 * per_token
        assert led.fragmentation == led.residual == 0
        assert led.bits_per_element == bits
        assert round(FULL * 64 / led.logical, 3) == ratio
        assert led.kept_slots == 64 * 90 and led.elements == 64 * 11_520
        if codec.family == "full":
            assert led.metadata == 0


@pytest.mark.parametrize("dtype, per_token, ratio", [(torch.float16, 5_490, 4.197), (torch.float32, 6_930, 3.325)])
def test_kivi_with_its_exact_window_costs_to_the_byte_what_the_table_says(dtype, per_token, ratio):
    """2048 tokens: 1920 sealed at 4,320 bytes, 128 exact. Fails when the tail is counted as codes, or left out."""
    led = ledger_of([Kivi(bits_k=2, bits_v=2, group=32, residual=128)], 2048, smollm2(dtype))
    size = dtype.itemsize
    assert led.payload + led.metadata == 1920 * 4_320
    assert led.residual == 128 * 11_520 * size
    assert led.fragmentation == 0
    assert led.physical - led.tables == 2048 * per_token
    assert round(FULL / per_token, 3) == ratio
    assert led.bits_per_element == 3.0, "bits of the encoded slots, not of the exact window"


@pytest.mark.parametrize("pruner", [Random(tokens=256), SnapKV(tokens=256)], ids=["random", "snapkv"])
def test_an_eviction_to_256_of_2048_tokens_frees_seven_eighths_of_the_bytes(pruner):
    """Per token SEEN: 2,880 bytes, ratio 8. Fails when evicted slots are masked, when blocks stay, or when the window's
    queries are kept after the cut."""
    led = ledger_of([pruner, Full("float16")], 2048, smollm2(), block=16)
    assert led.physical - led.tables == led.payload == 256 * FULL == 2048 * 2_880
    assert led.fragmentation == led.metadata == 0
    assert led.kept_slots == 256 * 90 and led.tokens == 2048
    assert abs(led.bytes_per_token - 2_880 - led.tables / 2048) < 1e-9


def test_a_pipeline_costs_the_kept_slots_in_the_codes_of_its_codec():
    led = ledger_of([Random(tokens=256), Int4(group=64)], 1024, smollm2())
    assert led.logical == 256 * 6_480


def test_snapkv_pays_for_its_queries_until_it_has_acted():
    """9 heads x 32 queries x 64 channels x 30 layers in float16, listed as metadata, and gone after the cut."""
    e = Engine(
        writes, compose([SnapKV(tokens=64, window=32), Full("float16")]), smollm2(),
        EngineCfg(block=32, max_seqs=2, max_len=256, max_batch_tokens=64, chunk=64, tile=64),
    )  # fmt: skip
    seq = e.add([1] * 128, Sampling(max_tokens=4))
    e.step()
    assert measure(e.cache).metadata == 9 * 32 * 64 * 30 * 2
    e.step()
    assert seq.computed == 128
    assert measure(e.cache).metadata == 0
    e.abort(seq)


@pytest.mark.parametrize("codec", [Echo(), Echo("block"), Echo("block", residual=5)], ids=["token", "block", "tail"])
@pytest.mark.parametrize(
    "pruner", [None, Toy(tokens=8, spread="head"), Toy(tokens=8)], ids=["all", "ragged", "uniform"]
)
def test_shares_of_sequences_sum_to_the_pool_and_blocks_to_the_storages(pruner, codec):
    """At every step of a batch with forks. Fails when a shared block counts for each owner, when the open block's waste
    is lost, or when the null block is forgotten."""
    e = quiet(codec=codec, pruner=pruner, geom=echo_geom(L=2, Hk=2), chunk=8)
    e.add([1] * 18, Sampling(max_tokens=9, n=3, temperature=1.0))
    e.add([2] * 23, Sampling(max_tokens=5))
    shared = 0.0
    while e.busy:
        e.step()
        shared = max(shared, assert_sums_to_the_pool(e).shared)
    assert shared > 0
    assert sum(live_blocks_bytes(e.cache).values()) == measure(e.cache, []).reserved
    assert live_blocks_bytes(e.cache)["used"] == 0


def test_samples_of_one_prompt_share_its_blocks():
    """16 tokens in 4 blocks and 3 samples: each holds a third of them, and what it wrote itself."""
    e = quiet(max_batch_tokens=64, chunk=64)
    e.add([1] * 16, Sampling(max_tokens=9, n=3, temperature=1.0))
    e.step()
    block = e.cache.classes[0].arrays.block_bytes
    rows = [s.row for s in e.scheduler.running]
    for row in rows:
        led = measure(e.cache, [row])
        assert led.payload == pytest.approx(4 * block / 3) and led.shared == pytest.approx(4 * block / 3)
    e.step()  # each sample opens a block of its own with one of four slots used
    for row in rows:
        led = measure(e.cache, [row])
        assert led.payload == pytest.approx(4 * block / 3 + block / 4)
        assert led.fragmentation == pytest.approx(3 * block / 4)
        assert led.shared == pytest.approx(4 * block / 3)
    whole = assert_sums_to_the_pool(e)
    assert whole.physical - whole.tables == pytest.approx(7 * block)


def test_waste_goes_to_zero_with_the_length():
    """The ratio of `full` is below 1 (waste of the last page) and tends to 1: fails when pages are not counted."""
    ratios = []
    for n in (17, 100, 1000):
        led = ledger_of([Full("float16")], n, smollm2(), block=16)
        ratios.append(FULL * n / (led.physical - led.tables))
        waste = led.fragmentation / (led.physical - led.tables)
        assert abs(1 - ratios[-1] - waste) < 1e-12
    assert ratios[0] < ratios[1] < ratios[2] < 1 and ratios[2] > 0.99


def test_tables_are_the_bytes_of_the_rows_of_the_arrays():
    e = quiet(codec=Echo("block", residual=5), geom=echo_geom(L=2, windows=(5, None)))
    seq = e.add([1] * 9, Sampling(max_tokens=2))
    e.step()
    arrays = [a for t in e.cache.classes for a in (t.body, t.tail, t.n_slots, t.sealed, t.evicted)]
    assert measure(e.cache, [seq.row]).tables == sum(a[seq.row].nbytes for a in arrays) > 0
