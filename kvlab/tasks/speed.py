"""speed: tokens per second of prefill and decode through the runtime, and the latencies in between.

prefill_tok_s   prompt tokens / wall time of the steps that held prompt tokens
ttft_ms         wall time from the first step to the first token of the last prompt
decode_tok_s    generated tokens / wall time of pure decode steps
itl_*_ms        time between tokens: p50, p95, max (the max shows compression bursts)

One short warm-up, then `repeats` runs: medians. Nothing else is measured in the same run. On a CPU a compressed cache
may be slower than the full one; the table shows the number regardless.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvlab.cache.ledger import sum_ledgers
from kvlab.engine.config import Stats
from kvlab.engine.sequence import Sampling
from kvlab.tasks import corpus
from kvlab.tasks.base import Bench, Outcome, ledger_columns, whole, wholes
from kvlab.tasks.progress import drive


def run(bench: Bench, task: Mapping[str, Any]) -> Outcome:
    texts = corpus.load(task.get("data"))
    outcome = Outcome()
    outcome.data = [{"task": "speed", "version": texts.source, "sha256": texts.sha256}]
    for batch in wholes(task, "batches"):
        for length in wholes(task, "lengths"):
            _one(bench, task, batch, length, texts, outcome)
    return outcome


def _one(bench: Bench, task: Mapping[str, Any], batch: int, length: int, texts, outcome: Outcome) -> None:
    new = whole(task, "new_tokens")
    lab = bench.lab(max_seqs=batch, max_len=length + new)
    docs = corpus.documents(texts, lab.tokenizer, batch, length)
    title = f"{lab.compressor.label()}: speed, batch {batch} x {length}"
    lab.engine.add(docs[0][: min(64, length)], Sampling(max_tokens=min(2, new)))
    drive(lab, bench.progress, f"{title}, warm-up", 66)
    runs: list[dict[str, float]] = []
    ledgers: list = []
    for _ in range(whole(task, "repeats")):
        lab.engine.stats = Stats()
        ledgers.clear()
        for tokens in docs:
            lab.engine.add(tokens, Sampling(max_tokens=new), on_finish=lambda s: ledgers.append(lab._measure([s])))
        drive(lab, bench.progress, title, batch * (length + new))
        runs.append(_figures(lab.stats))
    for metric in runs[0]:
        values = [r[metric] for r in runs]
        bounds = {"ci_low": min(values), "ci_high": max(values)} if len(values) > 1 else {}
        value = float(np.median(values))
        outcome.rows.append(bench.row("speed", f"{metric}@b{batch}", value, len(values), length=length, **bounds))
        if metric in ("prefill_tok_s", "decode_tok_s"):
            outcome.summary[metric] = value
    outcome.summary |= {"peak_bytes": lab.stats.peak_bytes} | ledger_columns(lab, sum_ledgers(ledgers))
    outcome.acted |= lab.compressor.counters.acted()


def _figures(s: Stats) -> dict[str, float]:
    ms = 1000 * np.array(s.itl or [np.nan])
    return {
        "prefill_tok_s": s.prefill_tokens / s.prefill_s,
        "ttft_ms": 1000 * s.prefill_s,
        "decode_tok_s": s.decode_tokens / s.decode_s if s.decode_s else float("nan"),
        "itl_p50_ms": float(np.percentile(ms, 50)),
        "itl_p95_ms": float(np.percentile(ms, 95)),
        "itl_max_ms": float(ms.max()),
    }
