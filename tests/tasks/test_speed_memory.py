"""speed and memory: which rows there are, and that they are what was counted."""

import math

import pytest

from kvlab.engine.config import Stats
from kvlab.errors import ConfigError
from kvlab.tasks import memory, overview, speed
from kvlab.tasks.base import Outcome

SPEED = {"data": None, "batches": [1, 2], "lengths": [40, 70], "new_tokens": 4, "repeats": 3}
MEMORY = {"data": None, "lengths": [100, 40], "new_tokens": 4}
# tiny_llama: 2 sides x 3 layers x 2 kv heads x 16 channels x 4 bytes a token, blocks of 16
TOKEN = 2 * 3 * 2 * 16 * 4


def test_speed_has_a_row_for_every_figure_batch_and_length(benches, tiny):
    out = speed.run(benches(tiny), SPEED)
    names = {"prefill_tok_s", "ttft_ms", "decode_tok_s", "itl_p50_ms", "itl_p95_ms", "itl_max_ms"}
    assert {(r["metric"], r["length"]) for r in out.rows} == {
        (f"{n}@b{b}", x) for n in names for b in (1, 2) for x in (40, 70)
    }
    for r in out.rows:
        assert r["n"] == 3 and r["ci_low"] <= r["value"] <= r["ci_high"], r
    assert out.summary["prefill_tok_s"] > 0 and out.summary["decode_tok_s"] > 0
    assert out.summary["tokens_seen"] == 2 * (70 + 3), "the ledger of the last run, both sequences"


def test_speed_figures_are_tokens_over_the_time_of_their_own_steps():
    """Fails when decode time holds prefill, or the other way round."""
    s = Stats(prefill_tokens=1000, decode_tokens=60, prefill_s=2.0, decode_s=3.0, itl=[0.5, 1.0, 1.5])
    assert speed._figures(s) == {
        "prefill_tok_s": 500.0, "ttft_ms": 2000.0, "decode_tok_s": 20.0, "itl_p50_ms": 1000.0,
        "itl_p95_ms": pytest.approx(1450.0), "itl_max_ms": 1500.0,
    }  # fmt: skip


def test_a_warm_up_is_no_part_of_what_is_measured(benches, tiny):
    bench = benches(tiny)
    speed.run(bench, SPEED | {"batches": [2], "lengths": [70], "repeats": 1})
    stats = benches.labs[-1].stats
    assert stats.prefill_tokens == 140, "64 tokens of warm-up would make it 204"
    assert stats.decode_tokens == 2 * 3


def test_one_new_token_has_no_time_between_tokens_and_no_crash(benches, tiny):
    out = speed.run(benches(tiny), SPEED | {"new_tokens": 1, "batches": [1], "lengths": [20], "repeats": 1})
    assert math.isnan(out.summary["decode_tok_s"]) and out.summary["prefill_tok_s"] > 0


def test_memory_is_what_the_blocks_hold_at_each_length(benches, tiny):
    """103 tokens are written (the last new one is not): 7 blocks of 16. Fails when the smaller length is shown last."""
    out = memory.run(benches(tiny), MEMORY)
    rows = {(r["metric"], r["length"]): r["value"] for r in out.rows}
    for length, blocks in ((40, 3), (100, 7)):
        seen = length + 3
        assert rows["payload", length] == seen * TOKEN
        assert rows["fragmentation", length] == (16 * blocks - seen) * TOKEN
        assert rows["peak_bytes", length] == 16 * blocks * TOKEN
        assert rows["physical", length] == 16 * blocks * TOKEN + rows["tables", length]
    assert out.summary["payload"] == 103 * TOKEN, "the row of the table is the longest length"


def test_the_peak_of_a_pruner_is_the_whole_context_and_not_what_is_left_of_it(benches, tiny):
    """snapkv holds 100 exact tokens until it acts. Fails when the peak is read at the end."""
    out = memory.run(benches(tiny, "snapkv", tokens=32, window=8), MEMORY | {"lengths": [100]})
    assert out.summary["kept"] == pytest.approx((32 + 3) / 103)
    assert out.summary["peak_bytes"] == 7 * 16 * TOKEN
    assert out.acted


@pytest.mark.parametrize(
    ("task", "run", "key"),
    [(SPEED | {"repeats": 0}, speed.run, "repeats"), (SPEED | {"batches": [0]}, speed.run, "batches"),
     (SPEED | {"new_tokens": 0}, speed.run, "new_tokens"), (MEMORY | {"lengths": [-5]}, memory.run, "lengths")],
)  # fmt: skip
def test_a_count_below_one_is_refused_by_its_key(benches, tiny, task, run, key):
    with pytest.raises(ConfigError, match=rf"task\.{key}=.*1 or more"):
        run(benches(tiny), task)


def test_an_overview_is_its_parts_with_the_ledger_of_the_speed_part(benches, tiny):
    task = {
        "data": None,
        "fidelity": {"documents": 1, "context": 48, "scored": 8, "chunk": 8},
        "needle": {"lengths": [420], "depths": 1, "max_new": 2},
        "speed": {"batches": [2], "lengths": [33], "new_tokens": 3, "repeats": 1},
    }
    out = overview.run(benches(tiny, "int8", group=16), task)
    assert {r["task"] for r in out.rows} == {"fidelity", "needle", "speed"}
    assert [d["task"] for d in out.data] == ["fidelity", "needle", "speed"]
    assert {"kl_mean", "acc", "decode_tok_s", "ratio"} <= set(out.summary)
    assert out.summary["tokens_seen"] == 2 * (33 + 2)
    assert out.acted


def test_a_part_without_a_figure_does_not_erase_that_of_another():
    both = Outcome(summary={"acc": 0.5, "nll": 1.0})
    both.add(Outcome(summary={"acc": None, "ratio": 2.0}, acted=True))
    assert both.summary == {"acc": 0.5, "nll": 1.0, "ratio": 2.0} and both.acted
