"""One sequence: its tokens, where it stands, and how it is sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from kvlab.errors import ConfigError


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token, and when to stop.

    max_tokens    new tokens at most; 0 = only run the prompt
    temperature   0 = greedy (ties: lowest id)     top_p, top_k   nucleus and rank cut, 1.0 and 0 = off
    seed          of this sequence; sample i of `n` uses seed + i
    stop          texts that end the output (cut before the first one); stop_tokens: ids that end it (dropped)
    n             parallel samples of one prompt, by fork
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    n: int = 1

    def __post_init__(self) -> None:
        for name, ok, want in (
            ("max_tokens", self.max_tokens >= 0, ">= 0"),
            ("temperature", self.temperature >= 0, ">= 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, ">= 0 (0 = off)"),
            ("n", self.n >= 1, ">= 1"),
        ):
            if not ok:
                raise ConfigError(f"sampling: {name}={getattr(self, name)} must be {want}")


@dataclass
class Sequence:
    """`tokens` = prompt + output. `computed` of them have K, V in the cache; `context` of them are seen before a
    pruner that acts once does. `chunk_after`: rows per step beyond the context (teacher-forced scoring).
    `on_logits(first, logits)` gets the logits of every row from position `logits_from` on, chunk by chunk; `first` is
    the position of the first row."""

    id: int
    tokens: list[int]
    sampling: Sampling
    context: int
    prompt: int
    arrival: int
    parent: int | None = None
    index: int = 0  # which of the n samples
    status: Status = Status.WAITING
    computed: int = 0
    row: int = -1
    finish_reason: str | None = None
    chunk_after: int | None = None
    on_logits: Callable[[int, Tensor], None] | None = None
    logits_from: int = 0
    on_finish: Callable[[Sequence], None] | None = None
    peak: tuple[tuple[int, int], ...] = ()  # reserved (body, tail) blocks per class
    generator: torch.Generator | None = field(default=None, repr=False)
    recomputed: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]

    @property
    def missing(self) -> int:
        """Tokens whose K, V are not in the cache yet; the newest sampled token is one of them."""
        return len(self.tokens) - self.computed

    def next_chunk(self, limit: int, block: int) -> int:
        """Tokens to run next, at most `limit`: a chunk ends at the context's end, else at a block boundary."""
        end = len(self.tokens)
        if self.computed < self.context:
            end = min(end, self.context)
        elif self.chunk_after is not None:
            end = min(end, self.computed + self.chunk_after)
        n = min(end - self.computed, limit)
        if self.computed + n < end and self.computed < self.context:
            n = max((self.computed + n) // block * block - self.computed, 0) or n
        return n
