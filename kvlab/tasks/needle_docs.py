"""Needle documents: one short fact in a long text, asked for at the end. Pure functions of their arguments.

needle    "The special magic number for {k} is: {v}." with a 7-digit v       (RULER's wording)
passkey   "The pass key is {v}. Remember it. {v} is the pass key." with a 5-digit v

The haystack is prose, cut at sentence ends; the fact stands between two sentences at relative depth d. The prompt is
rendered through the tokenizer's chat template and the answer is started for the model: without a started answer small
models explain the question, which measures obedience and not the cache.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.errors import ConfigError

WORDS = ("orchid", "harbor", "lantern", "granite", "velvet", "compass", "meadow", "copper")
INTRO = "Read the text below and answer the question after it.\n\n"


@dataclass(frozen=True)
class Doc:
    """tokens: the whole prompt. context: how many of them come before the question (protocol query_agnostic)."""

    id: int
    tokens: list[int]
    context: int
    answer: str
    depth: float
    length: int


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?]) ", re.sub(r"\s+", " ", text).strip())


def make(kind: str, text: str, tokenizer, length: int, depths: Sequence[float], seed: int, max_new: int) -> list[Doc]:
    """One Doc per depth; prompt + max_new <= length tokens. ConfigError when not even the question fits."""
    rng = random.Random(seed)
    hay = sentences(text)
    facts = []
    for _ in depths:
        value = str(rng.randint(1_000_000, 9_999_999)) if kind == "needle" else str(rng.randint(10_000, 99_999))
        facts.append((value, rng.choice(WORDS)))
    room = length - max_new
    count = _fitting(kind, hay, tokenizer, room, max(depths), facts[0])
    if count == len(hay):
        n = len(_render(kind, hay, tokenizer, max(depths), *facts[0])[0])
        raise ConfigError(
            f"{kind}: the whole text makes a prompt of {n} tokens, task.lengths asks for {length}. Shorten "
            "task.lengths, or give task.data=FILE with more text."
        )
    docs = []
    for i, (depth, (value, word)) in enumerate(zip(depths, facts)):
        for n in range(count, -1, -1):  # another value may take a token more
            tokens, context = _render(kind, hay[:n], tokenizer, depth, value, word)
            if len(tokens) <= room:
                break
        else:
            raise _too_short(kind, len(tokens), length, max_new)
        docs.append(Doc(i, tokens, context, value, depth, length))
    return docs


def _too_short(kind: str, least: int, length: int, max_new: int) -> ConfigError:
    return ConfigError(
        f"{kind}: the question alone takes {least} tokens and the answer {max_new}, task.lengths allows {length}. "
        f"Use task.lengths=[{least + max_new}] or more."
    )


def _fitting(kind: str, hay: list[str], tokenizer, room: int, depth: float, fact: tuple[str, str]) -> int:
    """How many sentences fit, by bisection."""
    low, high = 0, len(hay)
    while low < high:
        middle = (low + high + 1) // 2
        if len(_render(kind, hay[:middle], tokenizer, depth, *fact)[0]) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def _render(kind: str, hay: list[str], tokenizer, depth: float, value: str, word: str) -> tuple[list[int], int]:
    if kind == "needle":
        fact = f"The special magic number for {word} is: {value}."
        question = f"What is the special magic number for {word} mentioned in the text above?"
        start = f"The special magic number for {word} mentioned in the text above is:"
    else:
        fact = f"The pass key is {value}. Remember it. {value} is the pass key."
        question = "What is the pass key mentioned in the text above?"
        start = "The pass key is"
    at = round(depth * len(hay))
    body = " ".join([*hay[:at], fact, *hay[at:]])
    user = f"{INTRO}{body}\n\n{question}"
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": user}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + start
    else:
        prompt = f"{user}\n{start}"
    cut = prompt.index(body) + len(body)
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoded["input_ids"]
        context = next((i for i, (_, end) in enumerate(encoded["offset_mapping"]) if end > cut), len(ids))
    else:
        ids = tokenizer.encode(prompt)
        context = len(tokenizer.encode(prompt[:cut]))
    return ids, context


def right(kind: str, answer: str, output: str) -> bool:
    """needle: the value is a substring. passkey: the key is the first run of digits."""
    if kind == "needle":
        return answer in output
    digits = re.search(r"\d+", output)
    return digits is not None and digits[0] == answer
