"""Every way to end, abort and failure included, gives everything back."""

import numpy as np
import pytest
import torch
from toys import Echo, Toy, assert_pool_is_fresh, echo_geom, greedy, quiet, read_back, snapshot, with_blocks

from kvlab.cache.compact import compact
from kvlab.cache.step import DECODE, Step
from kvlab.engine.sequence import Sampling, Status
from kvlab.errors import NoBlocks


# -- abort -----------------------------------------------------------------------------------------------------------
def state_waiting(e):
    return e.add([1] * 30, Sampling(max_tokens=5))


def state_prefill(e):
    seq = e.add([1] * 30, Sampling(max_tokens=5))
    e.step()
    assert 0 < seq.computed < 30
    return seq


def state_decoding(e):
    seq = e.add([1] * 30, Sampling(max_tokens=9))
    for _ in range(5):
        e.step()
    assert seq.output
    return seq


def state_forked_parent(e):
    seq = e.add([1] * 10, Sampling(max_tokens=9, n=3, temperature=1.0))
    for _ in range(3):
        e.step()
    assert [s.parent for s in e.scheduler.running[-2:]] == [seq.id] * 2
    return seq


def state_child(e):
    state_forked_parent(e)
    return e.scheduler.running[-1]


def state_preempted(e):
    seq = state_decoding(e)
    e.scheduler.preempt(seq)
    assert seq.output and seq.status is Status.WAITING
    return seq


def state_finished(e):
    seq = e.add([1] * 3, Sampling(max_tokens=1))
    e.step()
    assert seq.finish_reason == "length"
    return seq


STATES = [
    state_waiting,
    state_prefill,
    state_decoding,
    state_forked_parent,
    state_child,
    state_preempted,
    state_finished,
]


@pytest.mark.parametrize("codec", [Echo(), Echo("block", residual=5)], ids=["token", "tail"])
@pytest.mark.parametrize("state", STATES, ids=lambda f: f.__name__[6:])
def test_an_abort_gives_everything_back_in_every_state(state, codec):
    """And leaves the others alone: their pages still hold their tokens."""
    e = quiet(codec=codec)
    other = e.add([9] * 7, Sampling(max_tokens=30))
    e.step()
    seq = state(e)
    reason = seq.finish_reason
    e.abort(seq)
    assert seq.status is Status.FINISHED and seq.row == -1
    assert seq.finish_reason == ("abort" if reason is None else reason)
    e.abort(seq)  # again: nothing happens
    e.cache.check({s.row: s.computed for s in e.scheduler.running})
    assert [p for _, p in read_back(e.cache, 0, 0, other.row)] == list(range(other.computed))
    e.run()
    assert other.output == greedy([9] * 7, 30)
    assert_pool_is_fresh(e)


@pytest.mark.parametrize("n", [1, 3])
def test_a_hook_may_abort_its_sequence_in_the_middle_of_a_step(n):
    """Fails when the aborted sequence is sampled all the same: its forks would share whatever the last row holds."""
    e = quiet(max_batch_tokens=64, chunk=64)
    other = e.add([5] * 7, Sampling(max_tokens=9))
    seq = e.add([1] * 9, Sampling(max_tokens=5, n=n, temperature=1.0))
    seq.on_logits = lambda first, logits: e.abort(seq)
    assert e.step() == [(other, greedy([5] * 7, 1)[0])]
    assert (seq.finish_reason, seq.output) == ("abort", [])
    e.run()
    assert other.output == greedy([5] * 7, 9)
    assert_pool_is_fresh(e)


def test_the_end_of_one_sample_may_abort_the_others():
    """Best of n: fails when a sample that was aborted a moment ago still gets the token of this step."""
    e = quiet(max_batch_tokens=64, chunk=64)

    def first_wins(seq):
        for s in list(e.scheduler.running):
            if s is not seq:
                e.abort(s)

    e.add([1] * 9, Sampling(max_tokens=4, n=3, temperature=1.0), on_finish=first_wins)
    seqs = {}
    while e.busy:
        seqs |= {s.id: s for s, _ in e.step()}
    assert sorted(s.finish_reason for s in seqs.values()) == ["abort", "abort", "length"]
    assert sorted(len(s.output) for s in seqs.values()) == [3, 3, 4]
    assert_pool_is_fresh(e)


# -- failures --------------------------------------------------------------------------------------------------------
def test_a_step_that_does_not_fit_changes_nothing():
    """I13: fails when the first class has grown before the second one is asked."""
    e = with_blocks(body=4, codec=Echo("block", residual=5), tail=4, geom=echo_geom(L=2, windows=(5, None)))
    seq = e.add([1] * 6, Sampling(max_tokens=2))
    e.step()
    e.cache.classes[1].tail_pool.alloc(e.cache.classes[1].tail_pool.available)  # the second class is full
    before = snapshot(e)
    rows, one = np.array([seq.row]), np.ones(1, np.int64)
    step = Step(rows, one * 9, one * 6, np.array([DECODE], np.int8), one * 6)
    with pytest.raises(NoBlocks, match="a step of 9 tokens"):
        e.cache.begin(step, e.cache.growth(step.cache_rows, step.q_len, np.ones(1, bool)))
    assert snapshot(e) == before


def test_a_fork_that_does_not_fit_changes_nothing():
    e = with_blocks(body=5)
    seq = e.add([1] * 11, Sampling(max_tokens=2))
    e.step()
    before = snapshot(e)
    with pytest.raises(NoBlocks, match=r"copying 3 \+ 0 blocks"):
        e.cache.fork_row(seq.row, share=False)
    assert snapshot(e) == before
    rows = [e.cache.add_row() for _ in range(3)]
    full = snapshot(e)
    for call in (e.cache.add_row, lambda: e.cache.fork_row(seq.row)):
        with pytest.raises(NoBlocks, match="all 4 sequence rows are taken"):
            call()
    assert snapshot(e) == full
    for row in rows:
        e.cache.free_row(row)


def test_an_eviction_that_does_not_fit_changes_nothing():
    e = with_blocks(body=4)
    seq = e.add([1] * 11, Sampling(max_tokens=2))
    e.step()
    t = e.cache.classes[0]
    other = e.cache.fork_row(seq.row)  # 3 blocks, each shared
    before = snapshot(e)
    keep = torch.arange(8).view(1, 1, 1, 8)
    with pytest.raises(NoBlocks, match="must copy 2 shared blocks, 1 are available"):
        compact(t, np.array([other]), keep, np.array([[8]]))
    assert snapshot(e) == before
    e.cache.free_row(other)


class Boom(BaseException):
    """Not an Exception: Ctrl-C must give the blocks back as well."""


def boom(*args, **kwargs):
    raise Boom


def broken_forward(e, monkeypatch):
    monkeypatch.setattr(e, "forward", boom)


def broken_second_layer(e, monkeypatch):
    write, calls = e.compressor.write, []

    def fails(layer, *args):
        return boom() if layer == 1 and calls.append(0) is None else write(layer, *args)

    monkeypatch.setattr(e.compressor, "write", fails)


def broken_pruner(e, monkeypatch):
    monkeypatch.setattr(e.compressor.pruner, "score", boom)


def broken_sampling(e, monkeypatch):
    monkeypatch.setattr("kvlab.engine.engine.sample", boom)


def broken_hook(e, monkeypatch):
    monkeypatch.setattr(next(s for s in [*e.scheduler.running, *e.scheduler.waiting]), "on_logits", boom)


def broken_end(e, monkeypatch):
    for s in [*e.scheduler.running, *e.scheduler.waiting]:
        monkeypatch.setattr(s, "on_finish", boom)


@pytest.mark.parametrize("fork", [1, 3])
@pytest.mark.parametrize(
    "fault",
    [broken_forward, broken_second_layer, broken_pruner, broken_sampling, broken_hook, broken_end],
    ids=lambda f: f.__name__[7:],
)
def test_an_exception_anywhere_in_a_step_leaves_a_fresh_pool_and_a_usable_engine(fault, fork, monkeypatch):
    """Fails when only the model is guarded: a sequence without a missing token would then stay, and `run` never
    ends."""
    e = quiet(geom=echo_geom(L=2), pruner=Toy(tokens=8))
    seqs = [
        e.add([1] * 12, Sampling(max_tokens=1, n=fork, temperature=1.0)),
        e.add([2] * 4, Sampling(max_tokens=0)),
    ]
    with monkeypatch.context() as patch, pytest.raises(Boom):
        fault(e, patch)
        e.run()
    assert seqs[0].status is Status.FINISHED
    assert len(e.scheduler.running) <= 1
    for s in [*e.scheduler.waiting, *e.scheduler.running]:
        e.abort(s)
    assert_pool_is_fresh(e)
    again = e.add([3] * 12, Sampling(max_tokens=4))
    e.run()
    assert again.output == greedy([3] * 12, 4)
    assert_pool_is_fresh(e)


def test_a_failing_step_spares_the_sequences_that_were_not_in_it(monkeypatch):
    e = quiet(max_seqs=3, max_batch_tokens=4, chunk=4)
    a = e.add([1] * 12, Sampling(max_tokens=1))
    b = e.add([2] * 3, Sampling(max_tokens=2))
    e.step()
    assert (a.status, b.status) == (Status.RUNNING, Status.WAITING)
    with monkeypatch.context() as patch, pytest.raises(Boom):
        patch.setattr(e, "forward", boom)
        e.step()
    assert (a.finish_reason, b.finish_reason) == ("error", None)
    e.run()
    assert b.output == greedy([2] * 3, 2)
    assert_pool_is_fresh(e)


def test_a_prompt_that_wants_no_token_only_runs():
    e = quiet()
    got = []
    seq = e.add(list(range(1, 22)), Sampling(max_tokens=0), on_logits=lambda first, x: got.append((first, len(x))))
    ended = []
    seq.on_finish = lambda s: ended.append(e.cache.classes[0].n_slots[s.row, 0])  # blocks are still there
    e.run()
    assert (seq.output, seq.finish_reason) == ([], "length")
    assert got == [(0, 16), (16, 5)] and ended == [21]
    assert_pool_is_fresh(e)


def test_the_books_say_what_ran():
    e = quiet(geom=echo_geom(L=2))
    a, b = e.add([1] * 10, Sampling(max_tokens=4)), e.add([2] * 6, Sampling(max_tokens=4))
    e.run()
    s = e.stats
    assert (s.prefill_tokens, s.decode_tokens, s.steps) == (16, 6, 4)
    assert len(s.itl) == 3
    assert s.peak_bytes == (4 + 3) * e.cache.classes[0].arrays.block_bytes  # 13 and 9 tokens in blocks of 4
    assert a.output == greedy([1] * 10, 4) and b.output == greedy([2] * 6, 4)
