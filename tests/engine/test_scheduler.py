"""Who runs in a step, who waits, who is preempted."""

import pytest
from toys import Echo, Toy, assert_pool_is_fresh, echo_geom, greedy, quiet, with_blocks

from kvlab.engine.engine import EngineCfg
from kvlab.engine.sequence import Sampling, Status
from kvlab.errors import CacheTooSmall, ConfigError


# -- order -----------------------------------------------------------------------------------------------------------
def test_a_long_prompt_never_stalls_the_sequences_that_decode():
    """Running first: fails when a waiting prompt takes the budget before the decoding rows."""
    e = quiet(max_batch_tokens=8, chunk=8)
    a, b = (e.add([i] * 3, Sampling(max_tokens=12)) for i in (1, 2))
    e.step()
    long = e.add([3] * 40, Sampling(max_tokens=1))
    for _ in range(6):
        e.step()
    for step in e.forward.steps[1:6]:
        assert [(s, n) for s, _, n in step] == [(a.id, 1), (b.id, 1), (long.id, 4)]  # 6 are left, 4 end a block


def test_sequences_are_admitted_in_the_order_of_their_arrival_and_nobody_overtakes():
    """Fails when a small request slips past a large one that does not fit yet."""
    e = with_blocks(body=8, max_batch_tokens=64, chunk=64)
    first = e.add([1] * 15, Sampling(max_tokens=5))  # 4 blocks, 5 in the end
    large = e.add([2] * 18, Sampling(max_tokens=2))  # 5 blocks: waits
    small = e.add([3], Sampling(max_tokens=1))  # would fit
    e.step()
    assert [s.status for s in (first, large, small)] == [Status.RUNNING, Status.WAITING, Status.WAITING]
    e.run()
    started = [
        next(i for i, step in enumerate(e.forward.steps) if s.id in [x[0] for x in step]) for s in (first, large, small)
    ]
    assert started[0] < started[1] <= started[2]
    assert_pool_is_fresh(e)


@pytest.mark.parametrize("chunk, want", [(16, [16, 5]), (7, [4, 4, 4, 4, 5]), (3, [3, 1, 3, 1, 3, 1, 3, 1, 3, 2])])
def test_a_chunk_ends_at_a_block_unless_it_is_the_last(chunk, want):
    """So that seals happen inside one step. A chunk below a block cannot; it must not stall either."""
    e = quiet(chunk=chunk)
    e.add(list(range(1, 22)), Sampling(max_tokens=0))
    e.run()
    assert [n for step in e.forward.steps for _, _, n in step] == want


def test_a_chunk_ends_where_the_context_ends_and_the_question_follows():
    """A pruner must see the context complete before any token of the question is computed."""
    e = quiet(pruner=Toy(tokens=6))
    seq = e.add(list(range(1, 31)), Sampling(max_tokens=0), context=21, chunk_after=4)
    e.run()
    assert [(start, n) for step in e.forward.steps for _, start, n in step] == [
        (0, 16),
        (16, 5),
        (21, 4),
        (25, 4),
        (29, 1),
    ]
    assert seq.finish_reason == "length" and seq.output == []


def test_the_step_never_exceeds_its_token_budget():
    e = quiet(max_batch_tokens=6, chunk=4)
    for i in range(5):
        e.add([i + 1] * 9, Sampling(max_tokens=6))
    e.run()
    assert max(sum(n for _, _, n in step) for step in e.forward.steps) <= 6
    assert max(n for step in e.forward.steps for _, _, n in step) <= 4


# -- admission -------------------------------------------------------------------------------------------------------
def test_a_sequence_that_can_never_fit_is_refused_with_needed_and_available_bytes():
    """Fails when it waits forever instead, or when the message counts tokens."""
    e = with_blocks(body=5)
    each = e.cache.classes[0].arrays.block_bytes
    assert each == 4 * 8  # 4 tokens of two int32
    with pytest.raises(CacheTooSmall, match=f"needs {6 * each} bytes of cache, the pool has {5 * each}"):
        e.add([1] * 15, Sampling(max_tokens=6))
    assert not e.busy
    seq = e.add([1] * 15, Sampling(max_tokens=5))
    e.run()
    assert seq.output == greedy([1] * 15, 5)
    assert_pool_is_fresh(e)


def test_a_sequence_longer_than_the_tables_is_refused():
    e = quiet(max_len=32)
    with pytest.raises(CacheTooSmall, match=r"prompt of 20 \+ max_tokens 13 needs 33 positions.*built for 32"):
        e.add([1] * 20, Sampling(max_tokens=13))
    e.add([1] * 20, Sampling(max_tokens=12))
    e.run()
    assert_pool_is_fresh(e)


def test_a_pool_that_cannot_hold_two_blocks_of_every_group_is_refused_at_construction():
    with pytest.raises(CacheTooSmall, match=r"pool_bytes=63 cannot hold.*64 bytes are needed"):
        quiet(pool_bytes=63)
    assert [t.pool.n_blocks for t in quiet(pool_bytes=64).cache.classes] == [3]


@pytest.mark.parametrize("codec", [Echo(), Echo("block"), Echo("block", residual=5)], ids=["token", "block", "tail"])
@pytest.mark.parametrize("budget", [1200, 1201, 2345, 4000, 10**9])
def test_the_storages_stay_within_the_given_bytes_and_one_null_block_each(codec, budget):
    """I12: fails when the smallest sizes are raised to two blocks after the rest was scaled to fill the budget."""
    e = quiet(codec=codec, geom=echo_geom(L=3, Hk=2, windows=(5, None, None)), pool_bytes=budget, max_batch_tokens=8)
    held, null = 0, 0
    for t in e.cache.classes:
        for arrays in (t.arrays, t.tail_arrays):
            if arrays is not None:
                held, null = held + arrays.nbytes(), null + arrays.block_bytes
    assert held - null <= budget


@pytest.mark.parametrize(
    "args, options, says",
    [
        (([],), {}, "empty prompt"),
        (([1, 2],), {"context": 3}, r"context=3 must lie in 1..2"),
        (([1, 2],), {"context": 0}, r"context=0 must lie in 1..2"),
        (([1, 2],), {"chunk_after": 0}, "chunk_after=0 rows a step would never end"),
        (([1], Sampling(n=5)), {}, r"n=5 samples need runtime.max_seqs >= 5, it is 4"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_leaves_nothing(args, options, says):
    e = quiet()
    with pytest.raises(ConfigError, match=says):
        e.add(*args, **options)
    assert not e.busy


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"prefill_reads": "both"}, "prefill_reads"),
        ({"block": 0}, "runtime.block=0"),
        ({"tile": 17}, "tile=17 must be a multiple of runtime.block=4"),
        ({"max_batch_tokens": 3}, "not every sequence could decode"),
    ],
)
def test_a_runtime_that_cannot_work_is_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        EngineCfg(**{"block": 4, "max_seqs": 4, "tile": 16, **wrong})


def test_samples_of_one_prompt_are_admitted_only_when_all_rows_are_free():
    """Fails when the fork finds no row left: the prompt was admitted on the row that its sample needs."""
    e = quiet(max_seqs=4)
    alone = [e.add([i] * 5, Sampling(max_tokens=9)) for i in (1, 2)]
    four = e.add([3] * 5, Sampling(max_tokens=3, n=3, temperature=1.0))
    e.step()
    assert [s.status for s in alone] == [Status.RUNNING] * 2 and four.status is Status.WAITING
    e.run()
    assert_pool_is_fresh(e)


# -- preemption ------------------------------------------------------------------------------------------------------
def test_the_newest_sequence_is_preempted_and_loses_no_token():
    """Fails when the oldest is the victim (no progress), when output is lost, or when the victim keeps blocks."""
    e = with_blocks(body=9)
    old, new = (e.add([i] * 14, Sampling(max_tokens=20)) for i in (1, 2))
    seen = []
    while e.busy:
        e.step()
        if new.status is Status.WAITING and not seen:
            seen = list(new.output)
            assert (new.row, new.computed) == (-1, 0) and new.recomputed > 14
            assert e.scheduler.waiting[0] is new
    assert seen, "the pool was never short"
    assert old.recomputed == 0
    assert old.output == greedy([1] * 14, 20)
    assert new.output == greedy([2] * 14, 20) and new.output[: len(seen)] == seen
    assert e.scheduler.preemptions >= 1
    assert_pool_is_fresh(e)


def test_nobody_is_admitted_in_a_step_that_preempts():
    """Fails when the freed blocks go to a newcomer in the same step: the two would preempt each other forever."""
    e = with_blocks(body=8)
    for i in (1, 2, 3):
        e.add([i] * 10, Sampling(max_tokens=18))
    before, count = set(), 0
    while e.busy:
        running = {s.id for s in e.scheduler.running}
        e.step()
        if e.scheduler.preemptions > count:
            count = e.scheduler.preemptions
            assert {s.id for s in e.scheduler.running} <= running
        before |= running
    assert count
    assert_pool_is_fresh(e)


def test_samples_are_as_old_as_their_prompt():
    """Fails when a fork is appended behind younger requests: it would be preempted for them."""
    e = with_blocks(body=12, max_seqs=4, max_batch_tokens=32, chunk=32)
    a = e.add([1] * 6, Sampling(max_tokens=14, n=2, temperature=1.0))
    b = e.add([2] * 6, Sampling(max_tokens=14))
    while e.busy:
        e.step()
        assert [s.arrival for s in e.scheduler.running] == sorted(s.arrival for s in e.scheduler.running)
        for s in e.scheduler.running:
            assert s.recomputed == 0 or s is b
    assert a.recomputed == 0 and b.recomputed > 0, "the pool must be short for this test to say something"


@pytest.mark.parametrize("pruner", [Toy(tokens=8), Toy(tokens=8, when="step", every=3)], ids=["once", "steps"])
def test_what_cannot_be_recomputed_is_never_preempted(pruner):
    """Its peak is reserved at admission: fails when a sequence is admitted on what is free right now."""
    e = with_blocks(body=13, pruner=pruner)
    seqs = [e.add([i] * 20, Sampling(max_tokens=15)) for i in (1, 2, 3, 4)]
    most = 0
    while e.busy:
        e.step()
        most = max(most, len(e.scheduler.running))
    assert e.scheduler.preemptions == 0
    assert 1 < most < 4, "some must have waited"
    assert [s.output for s in seqs] == [greedy([i] * 20, 15) for i in (1, 2, 3, 4)]
    assert_pool_is_fresh(e)


# Each of these once ended in "the reserved peak does not hold" or "NoBlocks" in the middle of a run.
def test_samples_that_share_an_open_block_need_no_more_blocks_than_they_end_with():
    """The last owner writes in place: fails when n samples take n copies of the block they share."""
    e = with_blocks(body=4, max_seqs=4, pruner=Toy(tokens=8))
    e.add([1, 2], Sampling(max_tokens=2, n=4, temperature=1.0))
    e.run()
    assert_pool_is_fresh(e)


def test_samples_that_are_cut_in_the_same_step_fit_in_what_they_reserved():
    """Fails when compaction takes fresh blocks for shared ones before it gives the old ones back."""
    e = with_blocks(body=4 * 5, pruner=Toy(tokens=16, when="step", every=4), chunk=4, max_batch_tokens=16)
    e.add(list(range(16)), Sampling(max_tokens=12, n=4, temperature=1.0))
    e.run()
    assert_pool_is_fresh(e)


def test_a_pruner_does_not_shrink_what_sliding_layers_reserve():
    """Fails when the peak of the pruned layers is taken for the others: 9 slots, where the window holds up to 23."""
    geom = echo_geom(L=2, windows=(17, None))
    e = with_blocks(body=9, geom=geom, pruner=Toy(tokens=5, when="step", chunks=True), chunk=4, max_batch_tokens=8)
    for i in range(4):
        e.add([i + 1] * 20, Sampling(max_tokens=20))
    e.run()
    assert_pool_is_fresh(e)


def test_a_question_after_the_context_is_part_of_the_reserved_peak():
    """Fails when only `every` decoded tokens are reserved beyond the budget: a question comes in whole chunks."""
    pruner = Toy(tokens=8, when="step", chunks=True, every=12)
    e = quiet(pruner=pruner, chunk=8, max_batch_tokens=8)
    seq = e.add([1] * 60, Sampling(max_tokens=3), context=20)
    forward, held = e.forward, []

    def watched(*args):  # a step is fullest while it runs
        held.append(len(e.cache.classes[0].blocks(seq.row)[0]))
        return forward(*args)

    e.forward = watched
    e.run()
    assert max(held) == 6 <= seq.peak[0][0]  # 8 kept, 8 of the question, and 8 more before 8 + 12 are reached


def test_an_exact_window_longer_than_the_prompt_is_part_of_the_reserved_peak():
    """Fails when the tail of a staged prompt is reserved for the prompt alone: decoding fills the residual window."""
    e = with_blocks(body=30, tail=9, codec=Echo("block", residual=24), pruner=Toy(tokens=8))
    for i in (1, 2):
        e.add([i] * 10, Sampling(max_tokens=60))
    e.run()
    assert_pool_is_fresh(e)


def test_budgets_that_differ_per_head_reserve_their_last_block_too():
    """Fails when the mean budget is rounded up once: 3 + 5 slots take 1 + 2 blocks of 4, two times 4 slots take 2."""
    geom = echo_geom(L=1, Hk=2)
    pruner = Toy(tokens=4, when="step", chunks=True, spread="head")
    e = with_blocks(body=10, geom=geom, pruner=pruner, chunk=4, max_batch_tokens=8)
    for i in (1, 2, 3):
        e.add([i] * 12, Sampling(max_tokens=12))
    e.run()
    assert_pool_is_fresh(e)
