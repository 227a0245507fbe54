"""memory: bytes really held at several context lengths, by category, and the peak while getting there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlab.engine.sequence import Sampling
from kvlab.tasks import corpus
from kvlab.tasks.base import Bench, Outcome, ledger_columns, whole, wholes
from kvlab.tasks.progress import drive


def run(bench: Bench, task: Mapping[str, Any]) -> Outcome:
    texts = corpus.load(task.get("data"))
    outcome = Outcome()
    outcome.data = [{"task": "memory", "version": texts.source, "sha256": texts.sha256}]
    new = whole(task, "new_tokens")
    for length in sorted(wholes(task, "lengths")):
        lab = bench.lab(max_seqs=1, max_len=length + new)
        (tokens,) = corpus.documents(texts, lab.tokenizer, 1, length)
        ledgers: list = []
        lab.engine.add(
            tokens, Sampling(max_tokens=new), on_finish=lambda s, ls=ledgers, lab=lab: ls.append(lab._measure([s]))
        )
        drive(lab, bench.progress, f"{lab.compressor.label()}: memory at {length}", length + new)
        columns = ledger_columns(lab, ledgers[-1]) | {"peak_bytes": lab.stats.peak_bytes}
        outcome.rows += [bench.row("memory", m, v, 1, length=length) for m, v in columns.items()]
        outcome.summary |= columns
        outcome.acted |= lab.compressor.counters.acted()
    return outcome
