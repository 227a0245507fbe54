"""fidelity: how far a method's predictions are from the uncompressed model's, on the same teacher-forced walk.

`context` tokens are the prompt; a pruner that acts once acts at its end. Then `scored` tokens follow, `chunk` a step,
each predicted from the compressed cache of everything before. context == chunk is `ppl_stream@chunk`; chunk 1 is true
decoding (a larger chunk flatters methods with short exact windows, so it is part of the metric's name).

nll, ppl     mean negative log-likelihood (nats, float32 log-softmax) of the true next token, exp of it
delta_nll    nll - nll of the full cache: 0.01 is about 1 % of perplexity
kl           KL(full || method) over the whole vocabulary per position, nats: mean, p99, max
top1         share of positions with the same most likely token (ties: lowest id)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvlab.lab import Lab
from kvlab.report import stats
from kvlab.tasks import corpus
from kvlab.tasks.base import Bench, Outcome, ledger_columns, whole


@dataclass
class Walk:
    """Per position, in order: nll of the method and of the full cache, KL, same argmax."""

    nll: list[Tensor] = field(default_factory=list)
    nll_full: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    same: list[Tensor] = field(default_factory=list)

    def add(self, full: Tensor, ours: Tensor, targets: Tensor) -> None:
        """Logits float [rows, vocab] of both; targets int64 [rows or rows - 1] (the last token has no successor)."""
        a, b = torch.log_softmax(full.float(), -1), torch.log_softmax(ours.float(), -1)
        n = len(targets)
        self.nll_full.append(-a[:n].gather(1, targets[:, None])[:, 0])
        self.nll.append(-b[:n].gather(1, targets[:, None])[:, 0])
        self.kl.append((a.exp() * (a - b)).sum(-1).clamp_min(0))
        self.same.append(full.argmax(-1) == ours.argmax(-1))


def walk(ours: Lab, full: Lab | None, tokens: list[int], context: int, chunk: int, advance, at_end=None) -> Walk:
    """Both runtimes step by step together: no stream of logits is ever stored. full=None: ours is the reference."""
    got: dict[str, list[tuple[int, Tensor]]] = {"ours": [], "full": []}
    result = Walk()
    labs = {"ours": ours} if full is None else {"full": full, "ours": ours}
    for name, lab in labs.items():
        lab.score(
            tokens,
            lambda first, logits, name=name: got[name].append((first, logits)),
            context,
            chunk,
            logits_from=context,
            at_end=at_end if name == "ours" else None,
        )
    ids = torch.tensor(tokens)
    while any(lab.engine.busy for lab in labs.values()):
        for lab in labs.values():
            before = lab.stats.prefill_tokens + lab.stats.decode_tokens
            lab.engine.step()
            advance(lab.stats.prefill_tokens + lab.stats.decode_tokens - before)
        while all(got[name] for name in labs):
            first, logits = got["ours"].pop(0)
            reference = logits if full is None else got["full"].pop(0)[1]
            result.add(reference, logits, ids[first + 1 : first + 1 + len(logits)])
    return result


def run(bench: Bench, task: Mapping[str, Any]) -> Outcome:
    context, chunk, n = (whole(task, k) for k in ("context", "chunk", "documents"))
    scored = whole(task, "scored", least=2)  # the first is predicted from the context, the last predicts nothing
    texts = corpus.load(task.get("data"))
    length = context + scored
    ours = bench.lab(max_seqs=1, max_len=length)
    full = None if bench.is_full else bench.full(max_seqs=1, max_len=length)
    docs = corpus.documents(texts, ours.tokenizer, n, length)
    label = ours.compressor.label()
    bench.progress.start(f"{label}: fidelity", n * length * (1 if full is None else 2))
    ledgers: list = []
    walks = []
    for tokens in docs:
        walks.append(
            walk(
                ours, full, tokens, context, chunk, bench.progress.advance, lambda s: ledgers.append(ours._measure([s]))
            )
        )
    return _outcome(bench, ours, walks, ledgers, context, chunk, texts)


def _outcome(bench: Bench, ours: Lab, walks: list[Walk], ledgers: list, context: int, chunk: int, texts) -> Outcome:
    nll, nll_full, kl, same = (torch.cat([torch.cat(getattr(w, f)) for w in walks]) for f in _FIELDS)
    documents = [
        bench.document("fidelity", metric, i, value, count, length=context, chunk=chunk)
        for i, w in enumerate(walks)
        for metric, value, count in (
            ("nll", float(torch.cat(w.nll).double().sum()), sum(len(x) for x in w.nll)),
            ("kl", float(torch.cat(w.kl).double().sum()), sum(len(x) for x in w.kl)),
        )
    ]
    name = f"ppl_stream@{chunk}" if context == chunk else f"ppl_prefill{context}@{chunk}"
    mean, mean_full = float(nll.double().mean()), float(nll_full.double().mean())
    values = {
        "nll": mean,
        "delta_nll": mean - mean_full,
        "ppl": float(torch.tensor(mean, dtype=torch.float64).exp()),
        "kl_mean": float(kl.double().mean()),
        "kl_p99": float(torch.quantile(kl.double(), 0.99)),
        "kl_max": float(kl.max()),
        "top1": float(same.double().mean()),
    }
    interval = stats.perplexity([float(torch.cat(w.nll).sum()) for w in walks], [sum(map(len, w.nll)) for w in walks])
    rows = []
    for metric, value in values.items():
        bounds = {"ci_low": interval.low, "ci_high": interval.high} if metric == "ppl" else {}
        key = name if metric == "ppl" else metric
        rows.append(bench.row("fidelity", key, value, len(nll), length=context, chunk=chunk, **bounds))
    data = [{"task": "fidelity", "version": texts.source, "n": len(walks), "sha256": texts.sha256}]
    return Outcome(rows, values | ledger_columns(ours, ledgers[-1]), documents, data, ours.compressor.counters.acted())


_FIELDS = ("nll", "nll_full", "kl", "same")
