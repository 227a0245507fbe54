"""What every pruner gets from its family: budgets, protection, ties, when it acts, what is freed, which positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import (
    Echo,
    RandomModel,
    Toy,
    assert_pool_is_fresh,
    code,
    dirty,
    echo_geom,
    engine,
    quiet,
    read_back,
    slow_keep,
    toy_score,
)

from kvlab.cache.layout import Geom
from kvlab.engine.sequence import Sampling
from kvlab.errors import ConfigError
from kvlab.families.pruner import Scoring
from kvlab.methods.full import Full
from kvlab.methods.int8 import Int8
from kvlab.methods.kivi import Kivi
from kvlab.methods.snapkv import SnapKV
from kvlab.methods.streaming_llm import StreamingLLM


def at_end(e, tokens: list[int], look, **options):
    """Run a prompt; what `look(sequence)` sees while its blocks are still there."""
    seen = []
    e.add(tokens, Sampling(max_tokens=options.pop("new", 0)), on_finish=lambda s: seen.append(look(s)), **options)
    e.run()
    assert_pool_is_fresh(e)
    return seen[0]


def positions(e, seq) -> list[list[int]]:
    """Positions held, one list for each (layer, head)."""
    geom = e.compressor.geom
    return [[p for _, p in read_back(e.cache, layer, h, seq.row)] for layer in range(geom.L) for h in range(geom.Hk)]


# -- settings --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "wrong, says",
    [
        ({}, "exactly one budget"),
        ({"tokens": 8, "fraction": 0.5}, "exactly one budget"),
        ({"fraction": 0.0}, r"fraction=0.0 must lie in \(0, 1\]"),
        ({"fraction": 1.5}, r"fraction=1.5 must lie in \(0, 1\]"),
        ({"tokens": 8, "sinks": 5, "recent": 4}, "sinks 5 \\+ window 4 = 9 slots are always kept"),
        ({"tokens": 8, "every": 0}, "every=0 must be at least 1"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused_with_the_reason(wrong, says):
    with pytest.raises(ConfigError, match=says):
        Toy(**wrong)


@pytest.mark.parametrize(
    "fraction, context, want",
    [(0.9, 1000, 900), (0.1, 10, 1), (0.1, 9, 1), (0.29, 100, 29), (0.5, 7, 3), (1.0, 13, 13), (0.07, 100, 7)],
)
def test_a_fraction_is_rounded_down_once_and_not_by_floating_point(fraction, context, want):
    """int(n * (1 - ratio)) gives 99 for 1000 and 0.9, and int(100 * 0.29) is 28. At least one slot stays."""
    assert Toy(fraction=fraction).budget(np.array([context])).tolist() == [want]


def test_a_fraction_never_drops_below_what_is_protected():
    assert Toy(fraction=0.1, sinks=3, recent=4).budget(np.array([20, 200])).tolist() == [7, 20]


@pytest.mark.parametrize("codec", [Kivi(group=4, residual=0), Kivi(group=4, residual=4)], ids=["block", "residual"])
def test_a_codec_that_seals_blocks_refuses_a_pruner_that_evicts_while_decoding(codec):
    """With the reason and the ways out; a pruner that acts once is welcome."""
    geom = Geom(1, 1, 1, 4)
    with pytest.raises(
        ConfigError, match=r"streaming_llm 8.*evicts while decoding.*kivi.*Use a codec.*or a pruner that"
    ):
        engine([StreamingLLM(tokens=8, positions="original"), codec], geom, block=4, tile=16)
    engine([SnapKV(tokens=8, window=2), codec], geom, block=4, tile=16)


# -- who stays -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("codec", [Echo(), Echo("block"), Echo("block", residual=3)], ids=["token", "block", "tail"])
@pytest.mark.parametrize("sinks, recent", [(0, 0), (2, 0), (0, 3), (3, 4)])
def test_each_head_keeps_its_own_best_slots_and_all_protected_ones(sinks, recent, codec):
    """Scores from outside, with many ties. Fails when heads or layers share a set, when a tie goes to the higher slot,
    when the best `C` and the protected ones are united to more than C."""
    e = quiet(codec=codec, pruner=Toy(tokens=11, sinks=sinks, recent=recent), geom=echo_geom(L=2, Hk=2))
    tokens = [(i * 37) % 400 for i in range(30)]
    got = at_end(e, tokens, lambda s: positions(e, s))
    want = []
    for layer in range(2):
        for h in range(2):
            score = [toy_score(code(t, layer, h), p) for p, t in enumerate(tokens)]
            want.append(slow_keep(score, 30, 11, sinks, recent))
    assert got == want
    assert len({tuple(x) for x in got}) > 1, "all heads alike: this test says nothing"
    for kept in got:
        assert set(range(sinks)) | set(range(30 - recent, 30)) <= set(kept)


@pytest.mark.parametrize("chunk", [1, 3, 4, 16, 64])
@pytest.mark.parametrize("reads", ["encoded", "exact"])
def test_a_prompt_in_chunks_keeps_what_it_keeps_in_one_piece(chunk, reads):
    e = quiet(pruner=Toy(tokens=9, recent=2), chunk=chunk, max_batch_tokens=64, prefill_reads=reads)
    whole = quiet(pruner=Toy(tokens=9, recent=2), chunk=64, max_batch_tokens=64)
    tokens = [(i * 31) % 400 for i in range(41)]
    assert at_end(e, tokens, lambda s: positions(e, s)) == at_end(whole, tokens, lambda s: positions(whole, s))


def test_the_same_sequence_keeps_the_same_slots_in_any_batch():
    """Fails when a budget or a score is taken over the batch: lengths differ, so do fractions of them."""
    prompts = [[(i * (7 + j)) % 400 for i in range(n)] for j, n in enumerate((9, 30, 17, 40))]

    def run(which):
        e, out = quiet(pruner=Toy(fraction=0.5, sinks=1), max_batch_tokens=128, chunk=128), {}
        for j in which:
            hook = lambda s, j=j: out.update({j: positions(e, s)})  # noqa: E731
            e.add(prompts[j], Sampling(max_tokens=3), on_finish=hook)
        e.run()
        return out

    together = run(range(4))
    assert [len(together[j][0]) for j in range(4)] == [len(prompts[j]) // 2 + 2 for j in range(4)]
    for j in range(4):
        assert run([j])[j] == together[j]


# -- when ------------------------------------------------------------------------------------------------------------
def test_nothing_is_scored_when_everything_fits():
    """C >= n must not run the scorer or touch a block. Fails when an eviction of nothing counts as acting."""
    e = quiet(pruner=Toy(tokens=12))
    e.compressor.pruner.score = None  # would raise
    got = at_end(e, list(range(12)), lambda s: (positions(e, s), s.row))
    assert got[0] == [list(range(12))]
    assert e.compressor.counters.evicted_slots == 0


def test_a_pruner_that_acts_once_sees_the_context_and_not_the_question():
    e = quiet(pruner=Toy(tokens=6, recent=2), max_batch_tokens=64)
    tokens = [(i * 29) % 400 for i in range(30)]
    kept = at_end(e, tokens, lambda s: positions(e, s)[0], context=20)
    score = [toy_score(code(t, 0, 0), p) for p, t in enumerate(tokens[:20])]
    assert kept == [*slow_keep(score, 20, 6, 0, 2), *range(20, 30)]
    assert e.compressor.counters.evicted_slots == 14


@pytest.mark.parametrize("every", [1, 3, 5])
def test_a_decoding_sequence_is_cut_when_it_holds_every_slots_more(every):
    """Fails when it is cut one step late, down to another size, or at every step."""
    e = quiet(pruner=Toy(tokens=8, when="step", every=every))
    seq = e.add(list(range(20)), Sampling(max_tokens=25))
    held = []
    while True:
        e.step()
        if not e.busy:
            break
        held.append(int(e.cache.classes[0].n_slots[seq.row, 0]))
    assert held[0] == 16, "the first chunk of the prompt is not cut"
    decoding = held[1:]
    assert decoding[0] == 8, "the prompt is cut when it is complete"
    assert decoding == [8 + i % every for i in range(len(decoding))]


def test_chunks_are_cut_only_where_the_method_asks_for_it():
    sizes = {}
    for chunks in (False, True):
        e = quiet(pruner=Toy(tokens=8, when="step", chunks=chunks), chunk=8, max_batch_tokens=8)
        seq = e.add(list(range(32)), Sampling(max_tokens=2))
        sizes[chunks] = []
        for _ in range(4):
            e.step()
            sizes[chunks].append(int(e.cache.classes[0].n_slots[seq.row, 0]))
    assert sizes == {False: [8, 16, 24, 8], True: [8, 8, 8, 8]}


def test_positions_go_on_at_the_tokens_seen_and_are_never_renumbered():
    """Fails when the next position is the number of slots held (seen in other runtimes: incoherent long outputs)."""
    e = quiet(pruner=Toy(tokens=6, when="step", chunks=True))
    seq = e.add(list(range(1, 31)), Sampling(max_tokens=8))
    e.run()
    starts = [(start, n) for step in e.forward.steps for _, start, n in step]
    assert starts == [(0, 16), (16, 14), *((30 + i, 1) for i in range(7))]
    assert seq.computed == 37


# -- what is freed ---------------------------------------------------------------------------------------------------
def test_budgets_that_differ_per_head_really_free_blocks_per_head():
    """Fails when a head's slots are masked and its blocks stay: used blocks must be the sum over heads."""
    geom = echo_geom(L=2, Hk=2)
    pruner = Toy(tokens=6, spread="head")
    e = quiet(pruner=pruner, geom=geom, max_batch_tokens=64, chunk=64)
    assert pruner.sizes(6, 4).tolist() == [8, 4, 8, 4]
    t = e.cache.classes[0]
    seq = e.add([(i * 29) % 400 for i in range(30)], Sampling(max_tokens=9))
    e.step()
    assert len(t.groups) == 4
    assert t.n_slots[seq.row].tolist() == [8, 4, 8, 4]
    assert t.pool.used == 2 + 1 + 2 + 1
    assert [len(x) for x in positions(e, seq)] == [8, 4, 8, 4]
    before = [set(x) for x in positions(e, seq)]
    e.step()
    for held, old in zip(positions(e, seq), before):
        assert held == [*sorted(old), 30], "the next token goes behind every head's own slots"
    e.abort(seq)
    assert_pool_is_fresh(e)


def test_budgets_that_differ_per_layer_share_a_table_in_each_layer():
    pruner = Toy(tokens=6, spread="layer")
    e = quiet(pruner=pruner, geom=echo_geom(L=3, Hk=2), max_batch_tokens=64, chunk=64)
    seq = e.add([(i * 29) % 400 for i in range(30)], Sampling(max_tokens=9))
    e.step()
    t = e.cache.classes[0]
    assert t.n_slots[seq.row].tolist() == [8, 4, 6] and t.pool.used == 2 + 1 + 2
    assert [len(x) for x in positions(e, seq)] == [8, 8, 4, 4, 6, 6]


def test_sliding_layers_are_left_alone():
    """They drop what they cannot see, and nothing else."""
    e = quiet(pruner=Toy(tokens=6, sinks=1), geom=echo_geom(L=2, windows=(9, None)), max_batch_tokens=64, chunk=64)
    kept = at_end(e, [(i * 29) % 400 for i in range(30)], lambda s: positions(e, s))
    assert kept[0] == list(range(20, 30))  # the query at 30 sees 22..29; blocks of 4: 20 is the first one's start
    assert len(kept[1]) == 6 and kept[1][0] == 0


def test_an_eviction_copies_what_is_shared_and_leaves_the_other_owner_alone():
    e = quiet(pruner=Toy(tokens=8, when="step", every=4), max_batch_tokens=64, chunk=64)
    parent = e.add([(i * 29) % 400 for i in range(8)], Sampling(max_tokens=9, n=2, temperature=1.0))
    e.step()
    child = e.scheduler.running[1]
    shared = read_back(e.cache, 0, 0, child.row)
    blocks = e.cache.classes[0].blocks(child.row)[0]
    assert blocks == e.cache.classes[0].blocks(parent.row)[0]
    e.abort(child)
    keeper = e.cache.fork_row(parent.row)  # an owner that never runs
    for _ in range(6):
        e.step()
    assert e.compressor.counters.evicted_slots > 0
    assert e.cache.classes[0].blocks(keeper)[0] == blocks
    assert read_back(e.cache, 0, 0, keeper) == shared
    e.cache.free_row(keeper)
    e.run()
    assert_pool_is_fresh(e)


@pytest.mark.parametrize("spread", [None, "layer", "head"])
def test_samples_that_are_cut_together_keep_their_own_tokens(spread):
    """They share blocks, and get fresh ones which another layer or sample gave back in the same cut. Fails when such a
    block is written before its old owner was read (seen with a table per layer)."""
    geom = echo_geom(L=3, Hk=2)
    e = quiet(pruner=Toy(tokens=10, when="step", every=4, spread=spread), geom=geom, max_batch_tokens=64, chunk=64)
    e.add([(i * 29) % 400 for i in range(12)], Sampling(max_tokens=20, n=4, temperature=1.0))
    shared = 0
    while e.busy:
        evicted, sharing = e.compressor.counters.evicted_slots, any(r > 1 for r in e.cache.classes[0].pool.ref)
        e.step()
        shared += sharing and e.compressor.counters.evicted_slots > evicted
        for seq in e.scheduler.running:
            for layer in range(3):
                for h in range(2):
                    held = read_back(e.cache, layer, h, seq.row)
                    assert held == [(code(seq.tokens[p], layer, h), p) for _, p in held]
    assert shared, "no cut met shared blocks"
    assert_pool_is_fresh(e)


def test_budgets_that_differ_in_a_batch_fit_into_tables_shorter_than_a_tile():
    """Entries beyond a budget mean nothing: fails when they are followed into a table (an index out of range here)."""
    e = quiet(pruner=Toy(fraction=0.5), max_len=44, tile=64, max_batch_tokens=64, chunk=64)
    seqs = [e.add([i + 1] * n, Sampling(max_tokens=3)) for i, n in enumerate((10, 40))]
    e.step()
    assert [int(e.cache.classes[0].n_slots[s.row, 0]) for s in seqs] == [5, 20]
    e.run()
    assert_pool_is_fresh(e)


def test_a_new_sequence_starts_with_a_clean_state():
    """Queries and sums of whoever had the row before are gone. Fails when state is left for the pruner to overwrite."""
    e = engine([SnapKV(tokens=8, window=2), Full()], Geom(2, 4, 2, 16), block=4, tile=16, max_len=64)
    row = e.cache.add_row()
    e.cache.state["q_window"][row] = 7.0
    fork = e.cache.fork_row(row)
    assert (e.cache.state["q_window"][fork] == 7.0).all()
    e.cache.free_row(fork)
    e.cache.free_row(row)
    for _ in range(e.cache.size.max_seqs):
        assert (e.cache.state["q_window"][e.cache.add_row()] == 0).all()


@settings(max_examples=120)
@given(
    prompt=st.integers(1, 40), cut=st.integers(0, 40), new=st.integers(0, 12), chunk=st.integers(1, 20),
    C=st.integers(3, 20), every=st.integers(1, 9), kind=st.sampled_from(["prefill_end", "step", "chunks"]),
    codec=st.sampled_from([("token", 0), ("block", 0), ("block", 5), ("block", 30)]),
    spread=st.sampled_from([None, "layer", "head"]),
)  # fmt: skip
def test_the_peak_that_admission_reserves_is_never_exceeded(prompt, cut, new, chunk, C, every, kind, codec, spread):
    """Measured inside every step, where it is fullest. Fails for each term of peak_slots that is left out."""
    if codec[0] == "block":
        kind = "prefill_end"
    pruner = Toy(tokens=C, when=kind.replace("chunks", "step"), chunks=kind == "chunks", every=every, spread=spread)
    e = quiet(codec=Echo(*codec), pruner=pruner, geom=echo_geom(L=2, Hk=2), chunk=chunk, max_batch_tokens=20)
    seq = e.add([i % 400 for i in range(prompt)], Sampling(max_tokens=new), context=max(prompt - cut, 1))
    forward, most = e.forward, [0, 0]

    def watched(*args):
        for i, blocks in enumerate(e.cache.classes[0].blocks(seq.row)):
            most[i] = max(most[i], len(blocks))
        return forward(*args)

    e.forward = watched
    e.run()
    assert most[0] <= seq.peak[0][0] and most[1] <= seq.peak[0][1], f"held {most}, reserved {seq.peak[0]}"


# -- what a scorer sees ----------------------------------------------------------------------------------------------
class Spy(SnapKV):
    """Keeps what it was shown."""

    def score(self, s: Scoring):
        seen = {"k": s.k.clone(), "v": s.v.clone(), "votes": s.votes().clone(), "n": s.n.clone(), "context": s.context}
        self.__dict__.setdefault("seen", {})[s.layer] = seen
        return super().score(s)


@pytest.mark.parametrize("codec", [Full(), Int8(group=16), Kivi(group=16, residual=0)], ids=["full", "int8", "kivi"])
@pytest.mark.parametrize("chunk", [16, 128])
def test_a_scorer_sees_the_stored_keys_the_votes_and_nothing_beyond_the_last_slot(chunk, codec):
    """Memory holds NaN wherever no token was written: fails when junk reaches k, v or a vote, when a sequence sees
    another's, when the votes of a row do not sum to 1, or when a key is not what decoding will read."""
    geom, forward = Geom(2, 4, 2, 16), RandomModel()
    e = engine(
        [Spy(tokens=16, window=5), codec], geom, forward, block=16, tile=32, chunk=chunk, max_len=128,
        max_batch_tokens=512,
    )  # fmt: skip
    prompts = [[(i * 5 + j) % 300 for i in range(n)] for j, n in enumerate((37, 70))]
    for p in prompts:
        e.add(p, Sampling(max_tokens=0))
    e.run()
    for layer, seen in e.compressor.pruner.seen.items():
        assert seen["n"].tolist()[-1] == [70, 70] if chunk == 16 else seen["n"].tolist() == [[37, 37], [70, 70]]
        for i, n in enumerate(seen["n"][:, 0].tolist()):
            ids = torch.tensor(prompts[0] if n == 37 else prompts[1])
            _, k, v = forward.qkv(layer, geom, ids, torch.arange(n))
            for name, x in (("k", k), ("v", v)):
                got, want = seen[name][i], x.transpose(0, 1)
                assert got.shape[1] % 32 == 0 and (got[:, n:] == 0).all()
                # int8 of unit-variance values: half a step of max/127 is below 0.02; a staged prompt (kivi) is exact
                bound = 0.02 if isinstance(codec, Int8) else 0
                assert (got[:, :n] - want).abs().max() <= bound
            votes = seen["votes"][i]
            assert (votes[..., n:] == 0).all()
            torch.testing.assert_close(votes.sum(-1), torch.full((2, 2), 5.0), rtol=0, atol=5e-5)  # 1e-5 for each row


def test_dirty_memory_is_really_dirty():
    """What the tests above stand on."""
    e = dirty(quiet(codec=Echo("block", residual=3)))
    for t in e.cache.classes:
        assert t.tail_arrays.data["k"][1:].isnan().any() and (t.tail_arrays.data["k"][0] == 0).all()
        assert t.arrays.data["tok"][1:].unique().numel() > 100
