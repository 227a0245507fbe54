"""The laws of sampling: exact distributions on numbers made by hand, seeds, samples, stops."""

import math

import pytest
import torch
from toys import VOCAB, Echo, next_token, quiet, with_blocks

from kvlab.engine.sampling import distribution, sample
from kvlab.engine.sequence import Sampling, Sequence
from kvlab.errors import ConfigError

HAND = torch.tensor([0.125, 0.5, 0.125, 0.25])  # sums of these are exact in float32, so edges can be tested
LOGITS = HAND.log()
EXACT = 4 * 2**-24  # a softmax of 4 values: exp, sum and quotient round by half an ulp below 1 each


def sequence(id_: int = 0, **options) -> Sequence:
    return Sequence(id_, [1], Sampling(**options), 1, 1, arrival=id_)


# -- greedy ----------------------------------------------------------------------------------------------------------
def test_greedy_takes_the_best_and_the_lowest_id_among_equals():
    """Fails for an argmax that returns the last maximum, or any of them."""
    rows = torch.zeros(5, 300)
    rows[0, [7, 200]] = 1.0
    rows[1, 299] = 1.0
    rows[2] = 3.0  # all equal
    rows[3, [0, 299]] = 2.0
    rows[4] = -torch.inf
    rows[4, [41, 40]] = -5.0
    assert sample(rows, [sequence()] * 5) == [7, 299, 0, 0, 40]


# -- distributions ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options, want",
    [
        ({}, [1 / 8, 1 / 2, 1 / 8, 1 / 4]),
        ({"temperature": 0.5}, [1 / 22, 16 / 22, 1 / 22, 4 / 22]),  # squares 1, 16, 1, 4 of 64
        ({"temperature": 2.0}, [math.sqrt(x) / (2 * math.sqrt(1 / 8) + math.sqrt(1 / 2) + 0.5) for x in HAND.tolist()]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_k": 3}, [1 / 7, 4 / 7, 0, 2 / 7]),  # a tie at the edge: the lower id stays
        ({"top_k": 4}, [1 / 8, 1 / 2, 1 / 8, 1 / 4]),
        ({"top_k": 400}, [1 / 8, 1 / 2, 1 / 8, 1 / 4]),
        ({"top_p": 0.5}, [0, 1, 0, 0]),  # reached exactly: nothing more is taken
        ({"top_p": 0.51}, [0, 2 / 3, 0, 1 / 3]),  # the token that crosses stays
        ({"top_p": 0.75}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.76}, [1 / 7, 4 / 7, 0, 2 / 7]),
        ({"top_p": 0.99}, [1 / 8, 1 / 2, 1 / 8, 1 / 4]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),  # never nothing
        ({"top_k": 3, "top_p": 0.58}, [0, 2 / 3, 0, 1 / 3]),  # top_p counts what top_k left: 4/7 < 0.58
        ({"temperature": 0.5, "top_p": 0.72}, [0, 1, 0, 0]),  # after the temperature: 16/22 = 0.727
    ],
)
def test_the_distribution_is_exactly_the_one_by_hand(options, want):
    """Fails when top_p drops the crossing token, is taken before temperature or top_k, or when nothing is
    renormalised."""
    p = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options}
    got = distribution(LOGITS, p["temperature"], p["top_k"], p["top_p"])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=0, atol=EXACT)
    assert ((got == 0) == (torch.tensor(want) == 0)).all()


def test_the_best_alone_is_greedy_also_among_equals():
    """top_k = 1 and a tiny top_p are greedy decoding: fails when a tie is broken by whatever topk returns first."""
    logits = torch.zeros(4096)
    logits[17::2] = 1.0
    for options in ({"top_k": 1}, {"top_p": 1e-9}):
        assert sample(logits[None], [sequence(temperature=1.0, **options)]) == [17]


def test_draws_follow_the_distribution():
    """4,000 draws: each frequency is within 5 standard errors, which goes wrong by chance once in 400,000 (4 tests)."""
    n, seq = 4000, sequence(temperature=1.0, seed=3)
    draws = torch.tensor(sample(LOGITS.expand(n, -1), [seq] * n))
    for token, p in enumerate(HAND.tolist()):
        share = (draws == token).double().mean().item()
        assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / n), f"token {token}: {share:.4f} instead of {p}"


def test_half_precision_logits_are_sampled_in_float32():
    torch.testing.assert_close(distribution(LOGITS.bfloat16(), 1.0, 0, 1.0), HAND, rtol=0.01, atol=0)  # log in bf16:
    2**-8


# -- seeds -----------------------------------------------------------------------------------------------------------
def flat(token: int, position: int) -> torch.Tensor:
    """Logits of a model that has no opinion."""
    return torch.zeros(VOCAB)


HOT = {"temperature": 1.0, "max_tokens": 12}


def outputs(e, seqs) -> list[list[int]]:
    e.run()
    return [s.output for s in seqs]


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_again():
    """Fails when samples draw from one shared generator: who else is there would change the text."""
    alone = []
    for i in range(4):
        e = quiet(logits=flat)
        alone += outputs(e, [e.add([i + 1], Sampling(**HOT, seed=i))])
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        e = quiet(logits=flat)
        batch = {i: e.add([i + 1], Sampling(**HOT, seed=i)) for i in order}
        outputs(e, batch.values())
        assert [batch[i].output for i in range(4)] == alone
    assert len({tuple(x) for x in alone}) == 4
    assert len(set(alone[0])) > 1, "a generator that starts anew for each token would repeat itself"


def test_the_global_random_state_is_neither_read_nor_moved():
    got_before = None
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        e = quiet(logits=flat)
        got = outputs(e, [e.add([1], Sampling(**HOT, seed=9))])
        assert torch.equal(torch.get_rng_state(), before)
        got_before = got if seed == 1 else got_before
        assert got == got_before


def test_preemption_changes_no_sampled_token():
    """The generator goes on where it was: fails when a resumed sequence draws its first numbers again."""

    def run(body):
        e = with_blocks(body=body, logits=flat)
        seqs = [e.add([i] * 14, Sampling(temperature=1.0, max_tokens=20, seed=i)) for i in (1, 2)]
        return outputs(e, seqs), e.scheduler.preemptions

    (calm, none), (tight, some) = run(40), run(9)
    assert none == 0 and some > 0
    assert calm == tight


def test_eight_samples_of_one_prompt_do_not_all_begin_with_the_same_token():
    """Fails when the first token is sampled once and copied to the forks (seen in other engines). Uniform over 499
    tokens,
    8 equal ones come by chance once in 499**7 = 8e18 runs; and two samples agree on 12 tokens once in 499**12."""
    e = quiet(logits=flat, max_seqs=8)
    first = e.add([1, 2, 3, 4, 5], Sampling(**HOT, n=8))
    seqs = [first]
    while e.busy:
        seqs += [s for s, _ in e.step() if all(s is not x for x in seqs)]
    assert len(seqs) == 8 and sorted(s.index for s in seqs) == list(range(8))
    assert len({s.output[0] for s in seqs}) > 1, "all forks got one token: sampled before the fork?"
    assert len({tuple(s.output) for s in seqs}) == 8
    assert all(len(s.output) == 12 for s in seqs)


def test_sample_i_of_n_is_what_seed_plus_i_gives_alone():
    e = quiet(logits=flat)
    seqs = [e.add([5, 6], Sampling(**HOT, n=3, seed=40))]
    while e.busy:
        seqs += [s for s, _ in e.step() if all(s is not x for x in seqs)]
    for s in seqs:
        e = quiet(logits=flat)
        assert outputs(e, [e.add([5, 6], Sampling(**HOT, seed=40 + s.index))]) == [s.output]


# -- stops -----------------------------------------------------------------------------------------------------------
def test_a_stop_token_ends_its_sequence_and_no_other():
    """Fails when the stop is looked for in the prompt, or checked one token late."""
    e = quiet()
    line = [3]
    for _ in range(8):
        line.append(next_token(line[-1], len(line) - 1))
    stop, free = line[4], line[1:9]
    a = e.add([3], Sampling(max_tokens=8, stop_tokens=(stop, 498)))
    b = e.add([3], Sampling(max_tokens=8))
    c = e.add([stop, 3], Sampling(max_tokens=2, stop_tokens=(stop,)))
    e.run()
    assert (a.output, a.finish_reason) == (free[: free.index(stop) + 1], "stop")
    assert (b.output, b.finish_reason) == (free, "length")
    assert c.finish_reason == "length" and len(c.output) == 2
    d = e.add([3], Sampling(max_tokens=4, stop_tokens=(stop,)))  # the last token allowed is the stop
    e.run()
    assert (len(d.output), d.finish_reason) == (4, "stop")


def test_a_stop_token_in_one_sample_leaves_the_other_samples_alone():
    e = quiet(codec=Echo("block", residual=3), logits=flat)
    ends = tuple(range(0, VOCAB, 4))
    seqs = [e.add([1] * 9, Sampling(max_tokens=25, temperature=1.0, n=4, stop_tokens=ends))]
    while e.busy:
        seqs += [s for s, _ in e.step() if all(s is not x for x in seqs)]
    for s in seqs:
        assert not set(s.output[:-1]) & set(ends)
        assert s.finish_reason == ("stop" if s.output[-1] in ends else "length")
    assert len({len(s.output) for s in seqs}) > 1


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": -1}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"n": 0}],
    ids=lambda d: next(iter(d)),
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"sampling: {name}={value}"):
        Sampling(**wrong)
