"""needle and passkey through the runtime: protocols, scores, rows."""

from dataclasses import replace

import pytest

from kvlab.models.tiny import ByteTokenizer
from kvlab.tasks import needle, passkey

TASK = {"data": None, "lengths": [420], "depths": 3, "max_new": 8}


@pytest.fixture
def watched(benches, monkeypatch):
    from kvlab.engine.engine import Engine

    benches.queued = []
    add = Engine.add

    def spy(self, tokens, sampling=None, context=None, **options):
        benches.queued.append((list(tokens), context))
        return add(self, tokens, sampling, context, **options)

    monkeypatch.setattr(Engine, "add", spy)
    return benches


def test_both_protocols_see_the_same_tokens_and_differ_in_the_context_alone(watched, tiny):
    """Fails when the question is encoded apart for one of them: merged tokens then differ, and so do the answers."""
    agnostic = needle.run(watched(tiny, protocol="query_agnostic"), TASK)
    first = list(watched.queued)
    watched.queued.clear()
    aware = needle.run(watched(tiny, protocol="query_aware"), TASK)
    assert [t for t, _ in first] == [t for t, _ in watched.queued]
    for (tokens, before), (_, whole) in zip(first, watched.queued):
        assert whole == len(tokens)
        assert ByteTokenizer().decode(tokens[before:]).startswith("\n\nWhat is")
    assert {r["protocol"] for r in agnostic.rows} == {"query_agnostic"}
    assert {r["protocol"] for r in aware.rows} == {"query_aware"}


def test_a_pruner_is_cut_at_the_context_of_its_protocol(benches, tiny):
    """What is held at the end: C + everything after the context. Fails when the protocol does not reach the engine."""
    for protocol in ("query_agnostic", "query_aware"):
        bench, held = benches(tiny, "snapkv", protocol=protocol, tokens=64, window=8), []

        def lab(bench=bench, held=held, **least):
            made = bench.lab(**least)
            remove, slots = made.engine.scheduler.remove, made.engine.cache.classes[0].n_slots
            made.engine.scheduler.remove = lambda s: (held.append((int(slots[s.row, 0]), s)), remove(s))
            return made

        needle.run(replace(bench, lab=lab), TASK)
        assert len(held) == 3
        for slots, seq in held:
            assert slots == 64 + seq.computed - seq.context, protocol
            assert (seq.context == seq.prompt) == (protocol == "query_aware")


def test_rows_are_one_a_cell_and_documents_one_a_prompt(benches, tiny):
    out = needle.run(benches(tiny), TASK | {"lengths": [420, 500], "depths": [0.25, 0.75]})
    cells = [(r["length"], r["depth"]) for r in out.rows if r["metric"] == "accuracy"]
    assert cells == [(420, 0.25), (420, 0.75), (500, 0.25), (500, 0.75)]
    assert [d["doc"] for d in out.documents] == [0, 1, 2, 3]
    assert out.summary["acc_n"] == 4 and 0 <= out.summary["acc_low"] <= out.summary["acc"] <= out.summary["acc_high"]


def test_a_right_answer_scores_and_a_wrong_one_does_not(benches, tiny, monkeypatch):
    """The tiny model knows nothing: the answers are put into its mouth. Fails when prompt and output are mixed up, as
    the prompt holds the value, or when documents and answers are paired in the wrong order."""
    said = iter(["right", "wrong", "right"])

    def drive(lab, progress, title, total):
        for seq in [*lab.engine.scheduler.waiting]:
            prompt = lab.tokenizer.decode(seq.tokens)
            value = prompt.partition("is: ")[2][:7] if next(said) == "right" else "0000000"
            seq.tokens = seq.tokens + lab.tokenizer.encode(f" {value}.")
            lab.engine.abort(seq)

    monkeypatch.setattr(needle, "drive", drive)
    out = needle.run(benches(tiny), TASK)
    assert [d["value"] for d in out.documents] == [1.0, 0.0, 1.0]
    assert out.summary["acc"] == pytest.approx(2 / 3)


def test_depths_as_a_number_are_equally_spaced_in_the_middle_of_their_parts():
    assert needle._depths({"depths": 4}) == [0.125, 0.375, 0.625, 0.875]
    assert needle._depths({"depths": [0, 0.5, 1]}) == [0.0, 0.5, 1.0]


def test_passkey_rows_carry_their_own_name(benches, tiny):
    out = passkey.run(benches(tiny), TASK)
    assert {r["task"] for r in out.rows} == {"passkey"} and out.data[0]["task"] == "passkey"


# -- real weights --------------------------------------------------------------------------------------------------


def test_a_cache_of_twenty_slots_is_blind_to_the_needle_and_the_full_one_is_not(benches, smollm2_loaded):
    """Blindness: a method that forgets nearly everything must lose. Fails when attention reads what was evicted."""
    task = {"data": None, "lengths": [320], "depths": [0.2, 0.6], "max_new": 8}
    full = needle.run(benches(smollm2_loaded), task)
    blind = needle.run(benches(smollm2_loaded, "streaming_llm", tokens=20, sinks=4, every=1), task)
    assert full.summary["acc"] == 1.0, "the model itself must find it, or the test says nothing"
    assert blind.summary["acc"] == 0.0
    assert blind.acted


def test_a_cache_of_twenty_slots_predicts_worse_and_the_full_one_as_itself(benches, smollm2_loaded):
    """ppl_stream@16 on 304 tokens. Sinks and 60 newest tokens cost KL 0.05 on this model (evaluation.md 3.1): 20 slots
    cost more than that, and a blind method is told from a broken one by staying far below a uniform guess (10.8)."""
    from kvlab.tasks import fidelity

    task = {"data": None, "documents": 1, "context": 16, "scored": 288, "chunk": 16}
    out = fidelity.run(benches(smollm2_loaded, "streaming_llm", tokens=20, sinks=4, every=1), task)
    assert out.summary["delta_nll"] > 0.05
    assert out.summary["kl_mean"] > 0.05
    assert out.summary["nll"] < 6
    assert out.summary["kept"] == pytest.approx(20 / 304)
