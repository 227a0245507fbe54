"""needle, passkey: can the model still find one fact after its cache was compressed?

protocol query_agnostic: a pruner that acts once acts at the end of the TEXT, before the question is seen (the hard and
honest case). query_aware: at the end of the whole prompt, question included. The two differ widely; rows carry which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvlab.engine.sequence import Sampling
from kvlab.errors import ConfigError
from kvlab.report import stats
from kvlab.tasks import corpus, needle_docs
from kvlab.tasks.base import Bench, Outcome, whole, wholes
from kvlab.tasks.progress import drive


def run(bench: Bench, task: Mapping[str, Any], kind: str = "needle") -> Outcome:
    lengths, max_new = wholes(task, "lengths"), whole({"max_new": 16, **task}, "max_new")
    depths = _depths(task)
    texts = corpus.load(task.get("data"))
    lab = bench.lab(max_len=max(lengths))
    hay = texts.stretch(corpus.MOST_CHARS * max(lengths))
    docs = [
        doc
        for length in lengths
        for doc in needle_docs.make(kind, hay, lab.tokenizer, length, depths, bench.seed, max_new)
    ]
    seqs = []
    for doc in docs:
        context = doc.context if bench.protocol == "query_agnostic" else len(doc.tokens)
        sampling = Sampling(max_tokens=max_new, stop_tokens=tuple(lab.loaded.eos_ids))
        seqs.append(lab.engine.add(doc.tokens, sampling, context))
    drive(lab, bench.progress, f"{lab.compressor.label()}: {kind}", sum(len(d.tokens) + max_new for d in docs))
    hits = [needle_docs.right(kind, d.answer, lab.tokenizer.decode(s.output)) for d, s in zip(docs, seqs)]
    share = stats.wilson(sum(hits), len(hits))
    summary = {"acc": share.value, "acc_low": share.low, "acc_high": share.high, "acc_n": len(hits)}
    outcome = Outcome(summary=summary, acted=lab.compressor.counters.acted())
    outcome.data = [{"task": kind, "version": texts.source, "n": len(docs), "sha256": texts.sha256}]
    cells = Counter((d.length, d.depth) for d in docs)
    for (length, depth), n in cells.items():
        got = sum(h for h, d in zip(hits, docs) if (d.length, d.depth) == (length, depth))
        outcome.rows.append(bench.row(kind, "accuracy", got / n, n, length=length, depth=depth))
    outcome.rows.append(bench.row(kind, "accuracy_all", share.value, share.n, ci_low=share.low, ci_high=share.high))
    outcome.documents = [
        bench.document(kind, "accuracy", i, float(h), 1, length=d.length, depth=d.depth)
        for i, (h, d) in enumerate(zip(hits, docs))
    ]
    return outcome


def _depths(task: Mapping[str, Any]) -> list[float]:
    """`depths` as a list of 0..1, or a number of equally spaced ones: n -> (j + 0.5) / n."""
    given = task.get("depths", 5)
    if isinstance(given, int):
        n = whole({"depths": given}, "depths")
        return [round((j + 0.5) / n, 4) for j in range(n)]
    depths = [float(d) for d in given]
    if not depths or not all(0 <= d <= 1 for d in depths):
        raise ConfigError(f"task.depths={depths} must be a number of depths, or a list of parts of the text in 0..1")
    return depths
