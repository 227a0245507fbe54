"""The Python API: generate, stream, samples, stop strings, the ledger; what becomes of wrong or early-ended calls."""

import itertools

import numpy as np
import pytest
import torch
from toys import assert_pool_is_fresh

import kvlab
from kvlab.engine.text import TextStream
from kvlab.errors import CacheTooSmall, ConfigError
from kvlab.lab import Lab
from kvlab.models.load import ModelCfg, load
from kvlab.models.tiny import ByteTokenizer

PROMPTS = ["One", "A longer prompt than the first", "Zwei: für 日本 🎉", "x" * 70]
RUNTIME = {"block": 16, "max_seqs": 4, "max_len": 256, "check": True}


@pytest.fixture(scope="module")
def tiny():
    return load(ModelCfg(name="tiny_llama"))


@pytest.fixture
def lab(tiny) -> Lab:
    return kvlab.load(tiny, method="int8", group=16, runtime=RUNTIME)


def collect(deltas) -> dict[tuple[int, int], list]:
    out: dict[tuple[int, int], list] = {}
    for d in deltas:
        out.setdefault((d.index, d.sample), []).append(d)
    return out


# -- generate ----


def test_the_three_lines_of_the_readme_work():
    lab = kvlab.load("tiny_llama", method="turboquant", bits_k=4, bits_v=4)
    done = lab.generate("The capital of France is", max_tokens=20)
    assert len(done.tokens) == 20 and done.text and done.finish_reason == "length"
    assert [d.index for d in lab.stream(["One", "Two"], max_tokens=1)] == [0, 1]
    assert "turboquant k4 v4" in repr(lab) and "bytes" in str(lab.ledger())


def test_one_prompt_gives_one_completion_and_a_list_gives_a_list_in_order(lab):
    """Fails when completions come in the order in which they end, or are paired with another prompt's text."""
    alone = [lab.generate(p, max_tokens=9 - 2 * i) for i, p in enumerate(PROMPTS)]
    assert isinstance(lab.generate(PROMPTS[:1], max_tokens=2), list)
    together = lab.generate(PROMPTS, max_tokens=9)
    assert [c.index for c in together] == [0, 1, 2, 3]
    for one, many, prompt in zip(alone, together, PROMPTS):
        assert many.tokens[: len(one.tokens)] == one.tokens
        assert many.prompt_tokens == len(prompt.encode())
    assert_pool_is_fresh(lab.engine)


def test_more_prompts_than_rows_wait_their_turn(lab):
    many = lab.generate([f"prompt {i}" for i in range(11)], max_tokens=3)
    assert [c.index for c in many] == list(range(11))
    assert many[10].tokens == lab.generate("prompt 10", max_tokens=3).tokens


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor], ids=["list", "tuple", "numpy", "torch"])
def test_token_ids_of_any_kind_are_a_prompt(lab, kind):
    """Fails when a tuple or an array of ids is taken for several prompts."""
    ids = list(b"hello")
    want = lab.generate("hello", max_tokens=4)
    got = lab.generate(kind(ids), max_tokens=4)
    assert got.tokens == want.tokens and got.prompt_tokens == 5
    both = lab.generate([kind(ids), "hello"], max_tokens=4)
    assert [c.tokens for c in both] == [want.tokens] * 2


def test_greedy_equals_the_full_cache_of_the_same_weights_where_nothing_is_lost(tiny):
    """full in the model's dtype loses nothing; another lab on the same weights must not disturb it."""
    one, other = kvlab.load(tiny, runtime=RUNTIME), kvlab.load(tiny, method="int4", group=16, runtime=RUNTIME)
    first = one.generate(PROMPTS, max_tokens=6)
    other.generate(PROMPTS, max_tokens=6)
    assert [c.tokens for c in one.generate(PROMPTS, max_tokens=6)] == [c.tokens for c in first]


def test_zero_new_tokens_only_run_the_prompt(lab):
    done = lab.generate("hello", max_tokens=0)
    assert (done.text, done.tokens, done.finish_reason) == ("", [], "length")
    assert done.ledger.tokens == 5, "the prompt is in the cache when it ends"


def test_samples_of_one_prompt_share_its_blocks_and_differ_by_their_seed(lab):
    """Fails when all samples draw from one generator (equal texts), or when the second sample is paired with sample 0.

    257 tokens, near uniform logits of a random model: equal texts of 8 tokens have a chance below 1e-9.
    """
    got = lab.generate("y" * 40, n=3, temperature=1.0, seed=5, max_tokens=8)
    assert [(c.index, c.sample) for c in got] == [(0, 0), (0, 1), (0, 2)]
    assert len({tuple(c.tokens) for c in got}) == 3
    for i, c in enumerate(got):  # sample i of n draws as the seed + i alone
        assert c.tokens == lab.generate("y" * 40, temperature=1.0, seed=5 + i, max_tokens=8).tokens
    two = lab.generate(["y" * 40, "z"], n=2, temperature=1.0, max_tokens=2)
    assert [(c.index, c.sample) for c in two] == [(0, 0), (0, 1), (1, 0), (1, 1)]


# -- streams and text ----


@pytest.mark.parametrize("stop", [(), ("a",), ("\x00", "zz")])
def test_the_pieces_of_a_stream_make_the_text_of_generate(lab, stop):
    """Random bytes: characters of several tokens, broken ones, control characters. Fails when half a character is
    handed out, which then changes, or when a piece comes twice."""
    options = {"max_tokens": 40, "temperature": 1.0, "seed": 3, "stop": stop}
    want = lab.generate(PROMPTS, **options)
    got = collect(lab.stream(PROMPTS, **options))
    for c in want:
        pieces = got[c.index, 0]
        assert "".join(d.delta for d in pieces) == c.text
        assert [d.finish_reason for d in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == c.finish_reason


def test_streams_of_several_prompts_are_interleaved(lab):
    order = [d.index for d in lab.stream(["aa", "bb"], max_tokens=30, temperature=1.0)]
    assert order != sorted(order), "the second prompt must not wait for the end of the first"


def stream_of(text: str, stop: tuple[str, ...]) -> tuple[list[str], str, bool]:
    """(pieces, whole text, stopped) of a byte a token."""
    s, pieces = TextStream(ByteTokenizer(), stop), []
    for token in text.encode():
        done = s.push(token)
        if done:
            pieces.append(s.flush())
            return pieces, s.full(), True
        pieces.append(s.take())
    return [*pieces, s.flush()], s.full(), False


@pytest.mark.parametrize(
    ("text", "stop", "want"),
    [
        ("The end. Next", ("end.",), "The "),
        ("abcabd", ("abd",), "abc"),  # the first three letters begin like the stop
        ("ab", ("abc",), "ab"),  # what might have become the stop is handed out at the end
        ("aXbYc", ("Y", "X"), "a"),  # the first in the text wins, not the first in the list
        ("xab", ("b", "ab"), "x"),  # two are complete at once: the one that began first
        ("naïve 日本!", ("日本",), "naïve "),  # six tokens of two characters: the first must wait for all of the second
        ("🎉 ok", ("k",), "🎉 o"),
        ("", ("x",), ""),
    ],
)
def test_a_stop_string_that_spans_tokens_cuts_the_text_and_no_part_of_it_is_streamed(text, stop, want):
    pieces, full, stopped = stream_of(text, stop)
    assert full == want and "".join(pieces) == want
    assert stopped == any(s in text for s in stop)


def test_no_prefix_of_a_stream_is_ever_taken_back():
    """Every text and stop over two letters: what was handed out must stay a prefix of the final text."""
    for text in map("".join, itertools.product("ab", repeat=6)):
        for stop in ("b", "ab", "aab", "bba", "abab"):
            pieces, full, _ = stream_of(text, (stop,))
            assert "".join(pieces) == full == text.partition(stop)[0], (text, stop)


def test_a_stop_string_ends_the_sequence_and_says_so(lab):
    free = lab.generate("hello", max_tokens=30, temperature=1.0, seed=2)
    stop = free.text[4:7]
    done = lab.generate("hello", max_tokens=30, temperature=1.0, seed=2, stop=stop)
    assert done.finish_reason == "stop" and done.text == free.text.partition(stop)[0]
    assert len(done.tokens) < len(free.tokens)
    last = len(done.tokens)  # the stop is complete with the very last token that is allowed
    assert lab.generate("hello", max_tokens=last, temperature=1.0, seed=2, stop=stop).finish_reason == "stop"
    assert_pool_is_fresh(lab.engine)


def test_a_stop_token_ends_the_sequence_and_is_no_part_of_the_output(lab):
    free = lab.generate("hello", max_tokens=12, temperature=1.0, seed=2)
    cut = next(i for i in range(3, 12) if free.tokens[i] not in free.tokens[:i])
    done = lab.generate("hello", max_tokens=12, temperature=1.0, seed=2, stop_tokens=free.tokens[cut])
    assert done.tokens == free.tokens[:cut] and done.finish_reason == "stop"
    streamed = list(lab.stream("hello", max_tokens=12, temperature=1.0, seed=2, stop_tokens=[free.tokens[cut]]))
    assert "".join(d.delta for d in streamed) == done.text and streamed[-1].finish_reason == "stop"


@pytest.mark.parametrize("method", ["int8", "kivi", "snapkv", "h2o"])
def test_a_consumer_that_stops_early_frees_everything(tiny, method):
    """Fails when only the sequence of the last piece is aborted: waiting and forked ones keep their rows."""
    options = {"int8": {"group": 16}, "kivi": {"group": 16}, "snapkv": {"tokens": 40}, "h2o": {"tokens": 16}}[method]
    lab = kvlab.load(tiny, method={method: options}, runtime=RUNTIME)
    for deltas in range(1, 6):
        stream = lab.stream(["a" * 60] * 6, max_tokens=20, n=2, temperature=1.0)
        for _ in itertools.islice(stream, deltas):
            pass
        assert lab.engine.busy
        stream.close()
        assert_pool_is_fresh(lab.engine)
    assert lab.generate("a", max_tokens=2).tokens, "the lab still works"


def test_an_abandoned_stream_is_told_apart_from_a_new_call(lab):
    """Fails when the new call collects the old one's tokens: it returned 20 tokens where 3 were asked for."""
    stream = lab.stream(["abc", "def"], max_tokens=20)
    next(stream)
    with pytest.raises(ConfigError, match=r"still at work on another stream.*close\(\)"):
        lab.generate("zzz", max_tokens=3)
    rest = collect(stream)
    assert {k[0] for k in rest} == {0, 1}, "the refused call must not disturb the stream"
    assert len(lab.generate("zzz", max_tokens=3).tokens) == 3


def test_an_error_in_the_model_frees_everything_and_the_lab_goes_on(lab, monkeypatch):
    calls = itertools.count()
    forward = lab.engine.forward

    def broken(*args):
        if next(calls) == 3:
            raise RuntimeError("a bug in a layer")
        return forward(*args)

    monkeypatch.setattr(lab.engine, "forward", broken)
    with pytest.raises(RuntimeError, match="a bug in a layer"):
        lab.generate(PROMPTS * 3, max_tokens=8)
    assert_pool_is_fresh(lab.engine)
    assert lab.generate("One", max_tokens=2).tokens


# -- the ledger ----

TOKEN = 3 * 2 * 2 * (16 + 2)  # int8 on tiny_llama: layers x kv heads x sides x (16 codes and one fp16 step)


def test_the_ledger_has_each_sequence_and_their_sum(lab):
    done = lab.generate(PROMPTS, max_tokens=5)
    report = lab.ledger()
    assert len(report.sequences) == 4
    seen = [c.prompt_tokens + 4 for c in done]  # the last new token is never written
    assert sorted(s.tokens for s in report.sequences) == sorted(seen)
    assert report.total.tokens == sum(seen)
    assert report.total.payload + report.total.metadata == sum(seen) * TOKEN
    assert report.total.physical == pytest.approx(sum(s.physical for s in report.sequences))
    blocks = sum(-(-n // 16) for n in seen)
    assert report.total.physical - report.total.tables == blocks * 16 * TOKEN
    assert report.ratio == pytest.approx(sum(seen) * 3 * 2 * 2 * 16 * 2 / report.total.physical)
    for c in done:
        assert c.ledger.tokens == c.prompt_tokens + 4


def test_the_ledger_of_a_running_stream_is_that_moment(lab):
    stream = lab.stream("q" * 40, max_tokens=30)
    next(stream)
    early = lab.ledger().total.tokens
    for _ in itertools.islice(stream, 5):
        pass
    assert 40 <= early < lab.ledger().total.tokens < 70
    stream.close()


def test_samples_that_share_blocks_count_them_once(tiny):
    """Fails when each of three samples is charged the whole prompt: the total would be three prompts."""
    lab = kvlab.load(tiny, method="int8", group=16, runtime=RUNTIME)
    totals = []
    for _ in lab.stream("s" * 64, n=3, temperature=1.0, max_tokens=12):
        if len(lab.engine.scheduler.running) == 3:
            totals.append(lab.ledger().total)
    used = totals[0]
    assert used.shared > 0
    assert used.physical - used.tables <= (4 + 3) * 16 * TOKEN, "4 blocks of prompt, an own block each"


def test_the_ledger_of_a_lab_that_did_nothing_is_empty(lab):
    assert lab.ledger().total.physical == 0 and lab.ledger().ratio == 0.0
    assert "0 tokens in 0 sequences" in str(lab.ledger())


# -- wrong calls ----


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ("", {}, "an empty prompt has no next token"),
        (["fine", ""], {}, "an empty prompt has no next token"),
        ("x", {"max_tokens": 10**9}, "needs 1000000001 positions, the runtime was built for 256"),
        ("x" * 300, {"max_tokens": 1}, "Raise runtime.max_len"),
        ("x", {"max_tokens": -1}, "max_tokens=-1 must be >= 0"),
        ("x", {"max_tokens": 4.5}, "max_tokens=4.5 must be a whole number"),
        ("x", {"max_tokens": "4"}, "max_tokens='4' must be a whole number"),
        ("x", {"n": True}, "n=True must be a whole number"),
        ("x", {"n": 9}, "n=9 samples need runtime.max_seqs >= 9"),
        ("x", {"temperature": -0.5}, "temperature=-0.5 must be >= 0"),
        ("x", {"temperature": float("nan")}, "temperature=nan must be >= 0"),
        ("x", {"top_p": 0}, r"top_p=0 must be in \(0, 1\]"),
        ("x", {"seed": "lucky"}, "seed='lucky' must be a whole number"),
        ("x", {"max_token": 3}, "unknown sampling option max_token; there are max_tokens"),
        ("x", {"stop": ""}, "must be a text that is not empty"),
        ("x", {"stop": ["a", 5]}, "must be a text that is not empty"),
        ("x", {"stop_tokens": "a"}, "must be a token id"),
        ([1, 2, 257], {}, r"token id 257 is outside the vocabulary of tiny_llama: 0\.\.256"),
        ([1, -1], {}, "token id -1 is outside"),
        ("half \ud800", {}, "cannot be encoded as text"),
        (None, {}, "got NoneType"),
        ([None], {}, "a prompt is a text or a list of token ids, got NoneType"),
        ([[1.5]], {}, "a prompt is a text or a list of token ids, got list"),
        (torch.zeros(2, 2), {}, "a prompt is a text or a list"),
    ],
    ids=lambda v: repr(v)[:30],
)
@pytest.mark.parametrize("verb", ["generate", "stream"])
def test_a_wrong_call_is_refused_with_its_reason_and_leaves_nothing_behind(lab, verb, prompts, options, words):
    with pytest.raises((ConfigError, CacheTooSmall), match=words):
        result = getattr(lab, verb)(prompts, **options)
        list(result)
    assert_pool_is_fresh(lab.engine)
    assert lab.generate("ok", max_tokens=1).tokens


def test_no_prompts_give_no_completions(lab):
    assert lab.generate([]) == [] and list(lab.stream([])) == []


def test_none_means_the_default_of_an_option(lab):
    assert lab.generate("x", max_tokens=2, stop=None, stop_tokens=None, top_k=None).tokens


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "turbo"}, "no method 'turbo'"),
        ({"method": "int4", "bitz": 3}, "Int4 has no option 'bitz': did you mean bits"),
        ({"method": "int4", "bits": "four"}, "int4: bits='four' must be a whole number"),
        ({"method": "int4"}, "int4: group=64 does not divide head_dim 16"),
        ({"method": "snapkv", "tokens": 64.5}, "snapkv: tokens=64.5 must be a whole number or null"),
        ({"method": "snapkv+int4", "tokens": 64}, "do not say which part"),
        ({"method": {"snapkv": 64}}, "options are a mapping"),
        ({"method": 5}, 'must be a name, a pipeline "a\\+b"'),
        ({"method": {"_target_": "subprocess.run", "args": "true"}}, "is no method"),
        ({"runtime": {"blok": 8}}, "unknown runtime option blok; there are .*block"),
        ({"runtime": {"block": "8"}}, "runtime.block='8' must be a whole number"),
        ({"runtime": {"max_len": 5000}}, "max_len=5000 is longer than tiny_llama was built for"),
        ({"runtime": {"pool_bytes": 1000}}, r"pool_bytes=1,000 cannot hold.*49,152 bytes are needed"),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_a_lab_that_cannot_work_is_not_built(tiny, options, words):
    with pytest.raises((ConfigError, CacheTooSmall), match=words):
        kvlab.load(tiny, **options)


def test_pipelines_are_given_by_a_mapping_in_order(tiny):
    lab = kvlab.load(tiny, method={"snapkv": {"tokens": 40}, "int4": {"group": 16}}, runtime=RUNTIME)
    assert lab.compressor.label() == "snapkv 40 + int4 g16"
    done = lab.generate("p" * 100, max_tokens=5)
    # 40 kept of the prompt and 4 of the output, of 104 seen, in 6 layer-head pairs
    assert done.ledger.kept_slots == 44 * 6 and done.ledger.tokens == 104


def test_a_prompt_that_no_pool_can_hold_names_both_byte_counts(tiny):
    lab = kvlab.load(tiny, runtime=RUNTIME | {"pool_bytes": 4 * 16 * 768})
    with pytest.raises(CacheTooSmall, match=r"a sequence of 200 \+ 10 tokens needs 172,032 bytes.*the pool has 49,152"):
        lab.generate("x" * 200, max_tokens=10)
    assert lab.generate("x" * 40, max_tokens=3).tokens
