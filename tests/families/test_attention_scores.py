"""SnapKV, H2O, StreamingLLM and random slots: numbers worked out by hand, and whole attention matrices in float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from toys import RandomModel, assert_pool_is_fresh, engine, slow_keep

from kvlab.cache.layout import Geom
from kvlab.engine.sequence import Sampling
from kvlab.errors import ConfigError
from kvlab.methods.h2o import H2O
from kvlab.methods.int8 import Int8
from kvlab.methods.kivi import Kivi
from kvlab.methods.random import Random
from kvlab.methods.snapkv import SnapKV
from kvlab.methods.streaming_llm import StreamingLLM

CFG = {"block": 16, "max_seqs": 4, "max_len": 160, "max_batch_tokens": 512, "chunk": 512, "tile": 32}
GEOM = Geom(L=2, H=4, Hk=2, D=16)


class Weights:
    """One head in which a token weighs `weights[token]`: every query gives key j w_j / (sum of what it sees)."""

    geom = Geom(L=1, H=1, Hk=1, D=2, scale=1.0)

    def __init__(self, weights: list[float]) -> None:
        self.log = torch.tensor(weights, dtype=torch.float32).log()

    def __call__(self, ids, positions, rows, comp, pages):
        T = len(ids)
        k = torch.stack([self.log[ids], torch.zeros(T)], -1)[None, None]
        q = torch.stack([torch.ones(T), torch.zeros(T)], -1)[None, None]
        v = torch.stack([positions.float(), ids.float()], -1)[None, None]
        comp.write(0, k, v, pages)
        comp.attend(0, q, k, v, pages)
        return torch.zeros(len(rows), 8)


def held(e, seq) -> tuple[list[int], np.ndarray]:
    """(positions, scores) of the one head of `Weights`."""
    t = e.cache.classes[0]
    n = int(t.n_slots[seq.row, 0])
    blocks = t.body[seq.row, 0, : -(-n // 16)].tolist()
    read = lambda name: t.arrays.data[name][blocks, 0, 0].flatten(0, 1)[:n]  # noqa: E731
    return [int(p) for p in read("v")[:, 0]], read("score").double().numpy() if "score" in t.arrays.data else None


# -- SnapKV ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options, want",
    [
        # Votes of the queries 6 and 7 are w_j (1/18 + 1/19): in the order of the weights 4 1 8 1 1 2 | 1 1.
        ({"tokens": 5, "kernel": 1}, [0, 2, 5, 6, 7]),
        ({"tokens": 6, "kernel": 1}, [0, 1, 2, 5, 6, 7]),  # 1, 3 and 4 tie: the lowest slot
        # avg of 3, the zeros outside count: 5 13 10 10 4 3 (thirds)
        ({"tokens": 4, "kernel": 3}, [1, 2, 6, 7]),  # 2 and 3 tie
        ({"tokens": 5, "kernel": 3}, [1, 2, 3, 6, 7]),
        (
            {"tokens": 6, "kernel": 3},
            [0, 1, 2, 3, 6, 7],
        ),  # fails where the edge is divided by 2: 7.5 passes nobody here
        # avg of 5: 13 14 15 13 12 4 (fifths)
        ({"tokens": 5, "kernel": 5}, [0, 1, 2, 6, 7]),  # 0 and 3 tie at 13
        # max of 3: 4 8 8 8 2 2
        ({"tokens": 4, "kernel": 3, "pooling": "max"}, [1, 2, 6, 7]),
        ({"tokens": 7, "kernel": 3, "pooling": "max"}, [0, 1, 2, 3, 4, 6, 7]),  # 4 and 5 tie
        ({"tokens": 5, "kernel": 1, "sinks": 2}, [0, 1, 2, 6, 7]),
    ],
)
def test_snapkv_keeps_what_the_numbers_by_hand_say(options, want):
    """Fails when window slots get votes or smooth their neighbours, when the pooling divides by what is there instead
    of by its width, or when equal votes keep the higher slot."""
    e = engine([SnapKV(window=2, **options)], Weights.geom, Weights([4, 1, 8, 1, 1, 2, 1, 1]), **CFG)
    seen = []
    e.add(list(range(8)), Sampling(max_tokens=0), on_finish=lambda s: seen.append(held(e, s)[0]))
    e.run()
    assert seen == [want]


def full_attention(model: RandomModel, tokens: list[int], layer: int, keys=None) -> np.ndarray:
    """float64 [H, n, n] causal attention matrix of a layer; keys(k) may replace the keys by their stored form."""
    ids = torch.tensor(tokens)
    q, k, _ = model.qkv(layer, GEOM, ids, torch.arange(len(tokens)))
    k = k if keys is None else keys(k)
    logits = torch.einsum("ihd,jhd->hij", q.double(), k.double().repeat_interleave(GEOM.G, 1)) * GEOM.scale
    ahead = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    return torch.softmax(logits.masked_fill(ahead, -torch.inf), -1).numpy()


def kept(e, model: RandomModel, seq) -> list[list[int]]:
    """Positions held by each (layer, head), recognised by their keys: those are all different."""
    t, out = e.cache.classes[0], []
    k_name = (t.tail_arrays if t.tail is not None else t.arrays).data["k"]
    table = t.tail if t.tail is not None else t.body
    ids, n = torch.tensor(seq.tokens[: seq.computed]), int(t.n_slots[seq.row, 0])
    for layer in range(GEOM.L):
        _, k, _ = model.qkv(layer, GEOM, ids, torch.arange(len(ids)))
        for h in range(GEOM.Hk):
            stored = k_name[table[seq.row, 0, : -(-n // 16)].tolist(), layer, h].flatten(0, 1)[:n]
            same = (stored[:, None] == k[None, :, h]).all(-1)
            assert (same.sum(1) == 1).all()
            out.append(same.int().argmax(1).tolist())
    return out


def snapkv_reference(model, tokens: list[int], C: int, W: int, kernel: int, pooling: str, gqa: str) -> list[list[int]]:
    n, out = len(tokens), []
    for layer in range(GEOM.L):
        votes = full_attention(model, tokens, layer)[:, n - W :].sum(1)[:, : n - W].reshape(GEOM.Hk, GEOM.G, n - W)
        votes = getattr(votes, gqa)(1)
        for h in range(GEOM.Hk):
            padded = np.pad(votes[h], kernel // 2, constant_values=0.0 if pooling == "avg" else -np.inf)
            windows = np.lib.stride_tricks.sliding_window_view(padded, kernel)
            pooled = windows.mean(1) if pooling == "avg" else windows.max(1)
            out.append(slow_keep([*pooled, *[0.0] * W], n, C, 0, W))
    return out


TOKENS = [(i * 41) % 300 for i in range(75)]


@pytest.mark.parametrize("gqa", ["mean", "max", "sum"])
@pytest.mark.parametrize("kernel, pooling", [(1, "avg"), (5, "avg"), (7, "max")])
def test_snapkv_keeps_what_the_whole_attention_matrix_says(kernel, pooling, gqa):
    """Every head its own set. Fails when heads of a group are aggregated after pooling (max), when the window's causal
    mask is wrong, or when votes are taken from the wrong query heads."""
    model = RandomModel()
    e = engine([SnapKV(tokens=30, window=6, kernel=kernel, pooling=pooling, gqa=gqa)], GEOM, model, **CFG)
    seen = []
    e.add(TOKENS, Sampling(max_tokens=0), on_finish=lambda s: seen.append(kept(e, model, s)))
    e.run()
    want = snapkv_reference(model, TOKENS, 30, 6, kernel, pooling, gqa)
    assert seen == [want]
    assert len({tuple(x) for x in want}) == 4, "heads agree: this test says nothing about them"


@pytest.mark.parametrize("reads", ["encoded", "exact"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 32, 70])
def test_snapkv_remembers_its_queries_across_chunks(chunk, reads):
    """The window of 6 may lie in one chunk or in several, and other sequences run beside it. Fails when the queries of
    the last chunk alone vote, or when the ring of queries is not cleared for the next sequence on the same row."""
    model = RandomModel()
    cfg = {**CFG, "chunk": chunk, "max_seqs": 2, "prefill_reads": reads}
    e = engine([SnapKV(tokens=30, window=6)], GEOM, model, **cfg)
    prompts = [TOKENS, TOKENS[20:70], TOKENS[5:41], [7] * 75]
    seen = {}
    for i, p in enumerate(prompts):
        e.add(p, Sampling(max_tokens=0), on_finish=lambda s, i=i: seen.update({i: kept(e, model, s)}))
    e.run()
    for i, p in enumerate(prompts):
        assert seen[i] == snapkv_reference(model, p, 30, 6, 5, "avg", "mean"), f"prompt {i}"
    assert_pool_is_fresh(e)


@pytest.mark.parametrize("codec", [Kivi(group=16, residual=20), Kivi(group=16, residual=0)], ids=["residual", "block"])
@pytest.mark.parametrize("chunk", [16, 100])
def test_snapkv_votes_on_exact_keys_while_the_prompt_is_staged(chunk, codec):
    """A codec of blocks: the prompt is exact until the pruner has acted. Fails when it is sealed before."""
    model = RandomModel()
    e = engine([SnapKV(tokens=30, window=6), codec], GEOM, model, **{**CFG, "chunk": chunk})
    seen = []
    e.add(TOKENS, Sampling(max_tokens=0), on_finish=lambda s: seen.append(kept(e, model, s)))
    e.run()
    assert seen == [snapkv_reference(model, TOKENS, 30, 6, 5, "avg", "mean")]


def test_snapkv_with_a_quantizer_votes_on_what_decoding_will_read():
    """int8 stores a token when it comes, so votes see its decoded form: the reference decodes too."""
    model, codec = RandomModel(), Int8(group=16)
    e = engine([SnapKV(tokens=30, window=6, kernel=1), codec], GEOM, model, **CFG)
    votes = {}
    score = e.compressor.pruner.score
    e.compressor.pruner.score = lambda s: votes.update({s.layer: s.votes().clone()}) or score(s)
    e.add(TOKENS, Sampling(max_tokens=0))
    e.run()

    def stored(k):
        return codec.decode(0, codec.encode(0, k.transpose(0, 1)[None], k.transpose(0, 1)[None]))[0][0].transpose(0, 1)

    for layer in range(GEOM.L):
        want = full_attention(model, TOKENS, layer, stored)[:, 69:].sum(1).reshape(2, 2, 75)
        got = votes[layer][0, ..., :75].double().numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=6e-5)  # 1e-5 for each of 6 rows
        plain = full_attention(model, TOKENS, layer)[:, 69:].sum(1).reshape(2, 2, 75)
        assert np.abs(plain - want).max() > 1e-3, "decoding changes nothing here: this test says nothing"


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"kernel": 4}, "kernel=4 must be odd"),
        ({"window": 0}, "leaves no query to vote"),
        ({"pooling": "median"}, "pooling='median' is not one of avg, max"),
        ({"gqa": "first"}, "gqa='first' is not one of mean, max, sum"),
        ({"tokens": 16, "window": 32}, "window 32 = 32 slots are always kept"),
    ],
)
def test_snapkv_refuses_what_cannot_work(wrong, says):
    with pytest.raises(ConfigError, match=says):
        SnapKV(**wrong)


# -- H2O -------------------------------------------------------------------------------------------------------------
def test_h2o_keeps_what_the_numbers_by_hand_say():
    """Weights 1 1 6 2 | 1 31 1. The prompt's matrix: 1 | 1/2 1/2 | 1/8 1/8 6/8 | .1 .1 .6 .2, so its column sums are
    1.725 .725 1.35 .2; C = 3 with the newest slot protected keeps 0, 2, 3. Then, each step over what is left:
    token 4: 1 6 2 1 of 10 -> 1.825 1.95 .4 .1      keeps 0, 2 and 4
    token 5: 1 6 1 31 of 39 -> +.0256 +.1538 +.0256 .7949      keeps 0, 2 and 5
    token 6: 1 6 31 1 of 39 -> slot 5 has 1.5897, less than 0 and 2: it goes
    Fails when A counts future queries, when evicted slots keep a share, or when the newest is not protected."""
    e = engine([H2O(tokens=3, recent=1, every=1)], Weights.geom, Weights([1, 1, 6, 2, 1, 31, 1]), **CFG)
    seq = e.add(list(range(7)), Sampling(max_tokens=1), context=4, chunk_after=1)
    want = [
        ([0, 2, 3], [1.725, 1.35, 0.2]),
        ([0, 2, 4], [1.825, 1.95, 0.1]),
        ([0, 2, 5], [1.825 + 1 / 39, 1.95 + 6 / 39, 31 / 39]),
    ]
    for positions, scores in want:
        e.step()
        got, a = held(e, seq)
        assert got == positions
        np.testing.assert_allclose(a, scores, rtol=0, atol=1e-5)
    e.abort(seq)
    e = engine([H2O(tokens=3, recent=1, every=1)], Weights.geom, Weights([1, 1, 6, 2, 1, 31, 1, 1]), **CFG)
    seq = e.add(list(range(8)), Sampling(max_tokens=1), context=4, chunk_after=1)
    for _ in range(4):
        e.step()
    got, a = held(e, seq)
    assert got == [0, 2, 6]
    np.testing.assert_allclose(a, [1.825 + 2 / 39, 1.95 + 12 / 39, 1 / 39], rtol=0, atol=1e-5)


def h2o_reference(model, tokens, context, C, recent, every, chunk, gqa, heads=None):
    """[(positions, scores)] of each (layer, head) after all tokens were fed: context at once, then `chunk` a step."""
    out = []
    for layer in range(GEOM.L):
        q, k, _ = model.qkv(layer, GEOM, torch.tensor(tokens), torch.arange(len(tokens)))
        q, k = q.double().numpy(), k.double().numpy()
        for h in range(GEOM.Hk):
            slots, A = [], []
            bounds = [0, *range(context, len(tokens), chunk), len(tokens)]
            for lo, hi in pairwise(bounds):
                slots, A = [*slots, *range(lo, hi)], [*A, *[0.0] * (hi - lo)]
                for i in range(lo, hi):
                    seen = [s for s, j in enumerate(slots) if j <= i]
                    shares = []
                    for head in range(h * GEOM.G, (h + 1) * GEOM.G):
                        w = np.exp(q[i, head] @ k[[slots[s] for s in seen], h].T * GEOM.scale)
                        shares.append(w / w.sum())
                    got = np.mean(shares, 0) if gqa == "mean" else np.sum(shares, 0)
                    for s, x in zip(seen, got):
                        A[s] += x
                if (hi == context and len(slots) > C) or (lo >= context and len(slots) >= C + every):
                    stay = slow_keep(A, len(slots), C, 0, recent)
                    slots, A = [slots[s] for s in stay], [A[s] for s in stay]
            out.append((slots, A))
    return out


@pytest.mark.parametrize("reads", ["encoded", "exact"])
@pytest.mark.parametrize(
    "chunk, after, every, gqa", [(512, 1, 1, "mean"), (16, 1, 5, "sum"), (7, 4, 3, "mean"), (1, 1, 4, "mean")]
)
def test_h2o_accumulates_what_the_whole_attention_matrix_says(chunk, after, every, gqa, reads):
    """Scores and sets, per head, through prefill in chunks, teacher-forced rows and cuts. Fails when padding rows vote,
    when weights within a chunk are lost (prefill_reads=exact: all scores were 0), when a score does not move with its
    slot, or when a slot that is reused keeps the old score."""
    model = RandomModel()
    e = engine(
        [H2O(tokens=30, recent=10, every=every, gqa=gqa)],
        GEOM,
        model,
        **{**CFG, "chunk": chunk, "prefill_reads": reads},
    )
    tokens, context = TOKENS, 50
    seen = {}

    def look(s, i):
        t = e.cache.classes[0]
        n = int(t.n_slots[s.row, 0])
        blocks = t.body[s.row, 0, : -(-n // 16)].tolist()
        scores = [
            t.arrays.data["score"][blocks, layer, h].flatten()[:n].tolist() for layer in range(2) for h in range(2)
        ]
        seen[i] = list(zip(kept(e, model, s), scores))

    prompts = [tokens, tokens[3:60]]
    for i, p in enumerate(prompts):
        e.add(p, Sampling(max_tokens=0), context=context, chunk_after=after, on_finish=lambda s, i=i: look(s, i))
    e.run()
    for i, p in enumerate(prompts):
        want = h2o_reference(model, p, context, 30, 10, every, min(after, chunk), gqa)
        for (slots, scores), (want_slots, want_scores) in zip(seen[i], want):
            assert slots == want_slots
            np.testing.assert_allclose(scores, want_scores, rtol=0, atol=75 * 1e-5)  # 1e-5 per unit of weight, 75 rows


def test_h2o_samples_of_one_prompt_do_not_write_into_each_others_scores():
    """Slots carry values that later steps change, so a fork copies. Fails when forks share blocks."""
    model = RandomModel()
    e = engine([H2O(tokens=30, recent=10, every=4)], GEOM, model, **CFG)
    seen = {}

    def look(s):
        t = e.cache.classes[0]
        n = int(t.n_slots[s.row, 0])
        blocks = t.body[s.row, 0, : -(-n // 16)].tolist()
        seen[tuple(s.tokens)] = [
            t.arrays.data["score"][blocks, a, h].flatten()[:n].tolist() for a in (0, 1) for h in (0, 1)
        ]

    e.add(TOKENS[:50], Sampling(max_tokens=12, n=3, temperature=1.0), on_finish=look)
    e.run()
    assert len(seen) == 3
    for tokens, scores in seen.items():
        want = h2o_reference(model, list(tokens[:-1]), 50, 30, 10, 4, 1, "mean")
        for got, (_, a) in zip(scores, want):
            np.testing.assert_allclose(got, a, rtol=0, atol=75 * 1e-5)


def test_h2o_halves_its_budget_by_default_and_says_what_it_cannot_do():
    assert H2O(tokens=50).recent == 25
    with pytest.raises(ConfigError, match="recent window must be a number"):
        H2O(tokens=None, fraction=0.5)
    with pytest.raises(ConfigError, match="a maximum cannot be accumulated"):
        H2O(gqa="max")


# -- StreamingLLM and random slots -----------------------------------------------------------------------------------
@pytest.mark.parametrize("chunk", [1, 5, 16, 512])
@pytest.mark.parametrize("every", [1, 6])
def test_streaming_llm_keeps_the_sinks_and_the_newest(every, chunk):
    """Fails when the sinks count as recent, or when the window is one short."""
    model = RandomModel()
    pruner = StreamingLLM(tokens=20, sinks=3, every=every, positions="original")
    e = engine([pruner], GEOM, model, **{**CFG, "chunk": chunk})
    seq = e.add(TOKENS[:40], Sampling(max_tokens=30))
    while True:
        e.step()
        if not e.busy:
            break
        n = int(e.cache.classes[0].n_slots[seq.row, 0])
        first = seq.computed - (n - 3) if n > 3 else 3
        assert kept(e, model, seq) == [[*range(min(3, n)), *range(first, seq.computed)]] * 4
        assert n < 20 + every or seq.computed < 40
    assert seq.computed == 69
    assert_pool_is_fresh(e)


def test_random_slots_depend_on_the_seed_the_layer_and_the_head_alone():
    """Fails when a draw depends on the batch, the length of the longest sequence, or the text."""
    model = RandomModel()

    def run(prompts, seed=0):
        e = engine([Random(tokens=20, sinks=2, recent=5, seed=seed)], GEOM, model, **CFG)
        seen = {}
        for i, p in enumerate(prompts):
            e.add(p, Sampling(max_tokens=0), on_finish=lambda s, i=i: seen.update({i: kept(e, model, s)}))
        e.run()
        return [seen[i] for i in range(len(prompts))]

    short, long = TOKENS[:40], TOKENS
    ((alone,), (beside, _), (text,), (other,)) = (
        run([short]), run([short, long]), run([[x + 1 for x in short]]), run([short], seed=1)
    )  # fmt: skip
    assert alone == beside == text != other
    assert len({tuple(x) for x in alone}) == 4, "heads and layers draw apart"
    for x in alone:
        assert len(x) == 20 and x[:2] == [0, 1] and x[-5:] == [35, 36, 37, 38, 39]
