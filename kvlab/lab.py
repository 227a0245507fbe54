"""The Python API of a researcher: load a model with a method, generate, score, look at the bytes.

lab = kvlab.load("smollm2", method="turboquant", bits_k=4, bits_v=4)
print(lab.generate("The capital of France is", max_tokens=20).text)
for r in lab.stream(["One", "Two"]): print(r.index, r.delta)
print(lab.ledger())
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlab import registry
from kvlab.cache.ledger import Ledger, LedgerReport, measure, reference_dtype, sum_ledgers
from kvlab.compressor import Compressor
from kvlab.engine.config import EngineCfg, Stats
from kvlab.engine.engine import Engine
from kvlab.engine.sequence import Sampling, Sequence
from kvlab.engine.text import TextStream
from kvlab.errors import ConfigError
from kvlab.models.geometry import geometry
from kvlab.models.lean import runner
from kvlab.models.load import Loaded, ModelCfg
from kvlab.models.load import load as load_model

Prompt = str | list[int]


@dataclass(frozen=True)
class Completion:
    """What one sample of one prompt became. `ledger`: bytes it held when it ended."""

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    index: int = 0
    sample: int = 0
    ledger: Ledger | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Delta:
    """A piece of streamed output of prompt `index`, sample `sample`."""

    index: int
    sample: int
    delta: str
    token: int | None
    finish_reason: str | None = None


class Lab:
    """One model, one method, one runtime. Cheap to make when the model is already loaded."""

    def __init__(self, loaded: Loaded, compressor: Compressor, cfg: EngineCfg) -> None:
        self.loaded, self.compressor, self.cfg = loaded, compressor, cfg
        self.tokenizer = loaded.tokenizer
        self.geom = geometry(loaded.model, loaded.id)
        if cfg.max_len > loaded.max_length:
            raise ConfigError(
                f"runtime.max_len={cfg.max_len} is longer than {loaded.id} was built for ({loaded.max_length}). "
                f"Use runtime.max_len={loaded.max_length} or less."
            )
        self.runner = runner(loaded, cfg.step, cfg.weights, cfg.kernels, cfg.min_rows, cfg.compile)
        self.vocab = loaded.model.get_input_embeddings().num_embeddings
        device = str(next(loaded.model.parameters()).device)
        self.engine = Engine(self.runner.forward, compressor, self.geom, cfg, device)
        self._finished: list[tuple[Sequence, Ledger]] = []

    def __repr__(self) -> str:
        c = self.cfg
        return (
            f"Lab({self.loaded.id}, {self.compressor.label()}, block {c.block}, {c.max_seqs} x {c.max_len} positions)"
        )

    # -- text ----------------------------------------------------------------------------------------------------
    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, without a BOS unless the tokenizer adds one. Ids (list, array, tensor) pass, checked."""
        if isinstance(prompt, str):
            try:
                return self.tokenizer.encode(prompt)
            except (UnicodeError, TypeError) as err:  # a lone surrogate: half a character
                raise ConfigError(f"a prompt cannot be encoded as text: {err}") from err
        ids = _ids(prompt)
        if ids is None:
            raise ConfigError(f"a prompt is a text or a list of token ids, got {type(prompt).__name__}")
        wrong = next((i for i in ids if not 0 <= i < self.vocab), None)
        if wrong is not None:
            raise ConfigError(f"token id {wrong} is outside the vocabulary of {self.loaded.id}: 0..{self.vocab - 1}")
        return ids

    def _prompts(self, prompts: Prompt | Seq[Prompt]) -> tuple[bool, list[list[int]]]:
        """(is it a single prompt, token ids of each)."""
        if isinstance(prompts, str) or (_ids(prompts) and len(prompts)):
            return True, [self.encode(prompts)]
        if not isinstance(prompts, Iterable):
            raise ConfigError(
                f"prompts are a text, a list of token ids, or a list of these; got {type(prompts).__name__}"
            )
        return False, [self.encode(p) for p in prompts]

    def generate(self, prompts: Prompt | Seq[Prompt], **sampling: Any) -> Completion | list[Completion]:
        """One Completion for one prompt; a list for a list of prompts or n > 1 (n samples each, in order).

        Options: max_tokens, temperature, top_p, top_k, seed, stop, stop_tokens, n (see Sampling).
        """
        single, ids = self._prompts(prompts)
        done: dict[tuple[int, int], Completion] = {}
        for index, stream, seq, reason, _ in self._events(ids, self._sampling(sampling)):
            if reason is None:
                continue
            done[(index, seq.index)] = self._completion(index, stream, seq)
        out = [done[key] for key in sorted(done)]
        return out[0] if single and len(out) == 1 else out

    def stream(self, prompts: Prompt | Seq[Prompt], **sampling: Any) -> Iterator[Delta]:
        """Text as it comes, from all prompts interleaved; the last Delta of a sample carries its finish_reason.

        A consumer that stops early aborts what is left.
        """
        return self._deltas(self._prompts(prompts)[1], self._sampling(sampling))

    def _deltas(self, ids: list[list[int]], params: Sampling) -> Iterator[Delta]:
        for index, stream, seq, reason, token in self._events(ids, params):
            text = stream.flush() if reason else stream.take()
            if text or reason:
                yield Delta(index, seq.index, text, token, reason)

    def _events(self, ids: list[list[int]], params: Sampling) -> Iterator[tuple]:
        """(prompt index, its text, sequence, finish reason or None, token) for every new token, and once at the end."""
        if self.engine.busy:
            raise ConfigError(
                "this lab is still at work on another stream. Read that to its end or close() it first, or use a "
                "second lab: kvlab.load(lab.loaded, method=...) shares the weights."
            )
        self._finished = []
        texts: dict[int, TextStream] = {}
        which: dict[int, int] = {}
        seqs = []
        try:
            for i, tokens in enumerate(ids):
                seq = self.engine.add(tokens, params, on_finish=self._record)
                which[seq.id] = i
                seqs.append(seq)
            live = {s.id: s for s in seqs}
            while self.engine.busy:
                for seq, token in self.engine.step():
                    live.setdefault(seq.id, seq)
                    which.setdefault(seq.id, which.get(seq.parent, 0))
                    text = texts.setdefault(seq.id, TextStream(self.tokenizer, params.stop))
                    ended = token in params.stop_tokens
                    if not ended and text.push(token):
                        self.engine.abort(seq, "stop")
                        seq.finish_reason = "stop"  # also where this token was the last one allowed
                    reason = seq.finish_reason
                    yield which[seq.id], text, seq, reason, None if ended else token
                for seq in [s for s in live.values() if s.finish_reason and s.id not in texts]:
                    texts[seq.id] = TextStream(self.tokenizer, ())
                    yield which[seq.id], texts[seq.id], seq, seq.finish_reason, None
        finally:
            for seq in [*self.engine.scheduler.running, *self.engine.scheduler.waiting]:
                self.engine.abort(seq)

    def _sampling(self, options: Mapping[str, Any]) -> Sampling:
        known = {f.name for f in fields(Sampling)}
        wrong = sorted(set(options) - known)
        if wrong:
            raise ConfigError(f"unknown sampling option {', '.join(wrong)}; there are {', '.join(sorted(known))}")
        values = {k: v for k, v in options.items() if v is not None}
        plain = {k: v for k, v in values.items() if k not in ("stop", "stop_tokens")}
        registry.check_types(Sampling, plain, "sampling: ")
        stop, ends = values.get("stop", ()), values.get("stop_tokens", self.loaded.eos_ids)
        stop = (stop,) if isinstance(stop, str) else stop
        ends = (ends,) if isinstance(ends, numbers.Integral) else ends
        if not isinstance(stop, Iterable) or not all(isinstance(s, str) and s for s in stop):
            raise ConfigError(f"sampling: stop={stop!r} must be a text that is not empty, or a list of such texts")
        if not isinstance(ends, Iterable) or not all(isinstance(t, numbers.Integral) for t in ends):
            raise ConfigError(f"sampling: stop_tokens={ends!r} must be a token id, or a list of them")
        return Sampling(**values | {"stop": tuple(stop), "stop_tokens": tuple(int(t) for t in ends)})

    def _completion(self, index: int, text: TextStream, seq: Sequence) -> Completion:
        output = [t for t in seq.output if t not in seq.sampling.stop_tokens]
        ledger = next((led for s, led in self._finished if s is seq), None)
        return Completion(text.full(), output, seq.finish_reason, seq.prompt, index, seq.index, ledger)

    def _record(self, seq: Sequence) -> None:
        self._finished.append((seq, self._measure([seq])))

    # -- bytes and scores ----------------------------------------------------------------------------------------
    def _measure(self, seqs: list[Sequence]) -> Ledger:
        static = sum(t.untyped_storage().nbytes() for t in self.compressor.codec.static().values())
        return measure(self.engine.cache, [s.row for s in seqs], {s.row: s.computed for s in seqs}, static)

    def ledger(self) -> LedgerReport:
        """Bytes by category, per sequence and in total: of the live sequences, or, when none is live, of those that the
        last `generate` or `stream` finished, each as it was when it ended."""
        live = self.engine.scheduler.running
        if live:
            return LedgerReport([self._measure([s]) for s in live], self._measure(live), self.reference_bytes)
        each = [led for _, led in self._finished]
        return LedgerReport(each, sum_ledgers(each), self.reference_bytes)

    @property
    def reference_bytes(self) -> int:
        """Bytes per token of the full cache in the reference dtype (float16)."""
        return self.geom.bytes_per_token(reference_dtype())

    @property
    def stats(self) -> Stats:
        return self.engine.stats

    def score(
        self,
        tokens: list[int],
        on_logits: Callable[[int, Tensor], None],
        context: int | None = None,
        chunk: int | None = None,
        logits_from: int = 0,
        at_end: Callable[[Sequence], None] | None = None,
    ) -> Sequence:
        """Queue a teacher-forced walk; drive it with `engine.step()`.

        `context` tokens are the prompt, the rest follow `chunk` rows a step, each seeing the compressed cache of
        everything before. on_logits(position, float [rows, vocab]) gets every row from `logits_from` on.
        """
        return self.engine.add(
            tokens,
            Sampling(max_tokens=0),
            context,
            chunk_after=chunk,
            on_logits=on_logits,
            logits_from=logits_from,
            on_finish=at_end,
        )


def _ids(prompt: Any) -> list[int] | None:
    """Token ids as plain ints; None when it is something else."""
    if isinstance(prompt, Tensor | np.ndarray):
        prompt = prompt.tolist() if prompt.ndim == 1 else [None]
    if not isinstance(prompt, Seq) or isinstance(prompt, str | bytes):
        return None
    whole = all(isinstance(t, numbers.Integral) and not isinstance(t, bool) for t in prompt)
    return [int(t) for t in prompt] if whole else None


def load(
    model: str | Loaded = "smollm2",
    method: str | Mapping[str, Any] | Compressor | None = None,
    *,
    path: str | None = None,
    dtype: str = "float32",
    runtime: Mapping[str, Any] | EngineCfg | None = None,
    **options: Any,
) -> Lab:
    """A Lab: `model` by name (smollm2, local + path, hf + path, tiny_*) or loaded, `method` by name with its options.

    runtime: fields of EngineCfg (block, max_seqs, max_len, chunk, pool_bytes, ...). ConfigError says what cannot work.
    `dtype` is the model's; a method's option of the same name goes as method={"full": {"dtype": "float16"}}.
    """
    compressor = method if isinstance(method, Compressor) else registry.build(method, **options)
    loaded = model if isinstance(model, Loaded) else load_model(ModelCfg(name=model, path=path, dtype=dtype))
    cfg = runtime if isinstance(runtime, EngineCfg) else engine_cfg(runtime or {}, loaded.max_length)
    torch.set_grad_enabled(False)
    return Lab(loaded, compressor, cfg)


def engine_cfg(values: Mapping[str, Any], longest: int) -> EngineCfg:
    """EngineCfg from plain keys; max_len defaults to 2048 or what the model can do."""
    known = {f.name for f in fields(EngineCfg)}
    wrong = sorted(set(values) - known)
    if wrong:
        raise ConfigError(f"unknown runtime option {', '.join(wrong)}; there are {', '.join(sorted(known))}")
    values = {k: v for k, v in values.items() if v is not None}
    values.setdefault("max_len", min(2048, longest))
    registry.check_types(EngineCfg, values, "runtime.")
    return EngineCfg(**values)
