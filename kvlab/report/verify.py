"""Run a result again from its own config and compare: exact where it must be, 1e-4 where floats may move.

Exact      bytes, counts, accuracies (they count generations), the hash of the generated samples, config hash,
           weights and data hashes
Relative   1e-4 for NLL, KL and what is computed from them; a difference of two NLL and a perplexity inherit their
           error, hence the wider entries in TOLERANCE
Skipped    times, rates and process memory: they are measurements of the machine
Not covered: per-layer diagnostics files and plots.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from kvlab.errors import KvlabError

ROW_KEY = ("method", "task", "metric", "length", "depth", "seed", "chunk", "protocol")
SKIPPED = re.compile(
    r".*tok_s.*|.*_ms(_.*)?|ttft.*|itl.*|(.*_)?(wall|elapsed|seconds|time)(_s)?|process_.*|peak_over_weights|max_memory_.*"
)
# first match decides; (pattern of the metric name, relative, absolute in the unit of the metric)
TOLERANCE = (
    (re.compile(r"delta_nll.*"), 0.0, 5e-4),  # two NLL of about 2.5 nats, 1e-4 each
    (re.compile(r"ppl.*|perplexity.*"), 5e-4, 0.0),  # exp of an NLL that is 1e-4 off
    (re.compile(r"nll.*|bits_per_byte.*|loglikelihood.*"), 1e-4, 1e-7),
    (re.compile(r"kl_.*|kl|ref_top1_prob_drop"), 1e-4, 1e-6),  # absolute: KL of a good method is rounding noise
    (re.compile(r".*(rel_err|bias|variance|mass|gap|error).*"), 1e-4, 1e-6),
)
EXACT = 1e-12  # relative; sums of equal shares in another order


class VerificationFailed(KvlabError):
    """The run did not reproduce. `differences`: [{field, stored, rerun, allowed}]."""

    exit_code = 4

    def __init__(self, message: str, differences: list[dict]):
        super().__init__(message)
        self.differences = differences


def verify(result: Mapping, rerun: Callable[[dict], dict]) -> dict:
    """Call `rerun(config)`, compare its result with `result`, and return {checked, skipped, notes}.

    Raises VerificationFailed naming every field that differs. A different commit, thread count or package version is
    a note: it explains a failure, it is none.
    """
    again = rerun(result["config"])
    found, skipped, checked = [], set(), 0
    for field, metric, stored, new in _fields(result, again):
        if SKIPPED.fullmatch(metric):
            skipped.add(metric)
            continue
        checked += 1
        allowed = _allowed(metric, stored, new)
        if allowed is not None:
            found.append({"field": field, "stored": stored, "rerun": new, "allowed": allowed})
    notes = _notes(result, again)
    if found:
        name = result.get("run_id", "result")
        line = "  {field}: stored {stored}, now {rerun} (allowed: {allowed})"
        lines = [line.format(**d) for d in found[:20]]
        more = [f"  ... and {len(found) - 20} more"] if len(found) > 20 else []
        context = [f"  note: {n}" for n in notes]
        head = f"{name}: {len(found)} of {checked} fields differ from the stored result:"
        raise VerificationFailed("\n".join([head, *lines, *more, *context]), found)
    return {"checked": checked, "skipped": sorted(skipped), "notes": notes}


def _allowed(metric: str, stored: Any, new: Any) -> str | None:
    """None when the two values agree, else the rule they broke."""
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (stored, new))
    if not numeric:
        return None if stored == new else "equal"
    if stored == new:
        return None
    for pattern, relative, absolute in TOLERANCE:
        if pattern.fullmatch(metric):
            limit = max(absolute, relative * abs(stored))
            return None if abs(new - stored) <= limit else f"{relative:g} relative or {absolute:g}"
    if isinstance(stored, int) and isinstance(new, int):
        return "equal"
    return None if abs(new - stored) <= EXACT * max(abs(stored), abs(new)) else "equal"


def _fields(old: Mapping, new: Mapping):
    """(field, metric name that decides the tolerance, stored, rerun) for everything compared."""
    yield "config_hash", "config_hash", old.get("config_hash"), new.get("config_hash")
    for key in ("weights_sha256", "tokenizer_sha256"):
        yield f"model.{key}", key, (old.get("model") or {}).get(key), (new.get("model") or {}).get(key)
    hashes = [{d["task"]: d.get("sha256") for d in r.get("data") or []} for r in (old, new)]
    for task in dict.fromkeys([*hashes[0], *hashes[1]]):
        yield f"data.{task}.sha256", "sha256", hashes[0].get(task), hashes[1].get(task)
    samples = [r.get("samples") if isinstance(r.get("samples"), Mapping) else {} for r in (old, new)]
    if samples[0].get("sha256"):
        yield "samples.sha256", "sha256", samples[0]["sha256"], samples[1].get("sha256")
    yield from _rows(old, new)
    one, two = ({s["method"]: s for s in r.get("summary") or []} for r in (old, new))
    for method in dict.fromkeys([*one, *two]):
        a, b = one.get(method), two.get(method)
        if a is None or b is None:
            yield f"summary[{method}]", "method", a and method, b and method
            continue
        for key in dict.fromkeys([*a, *b]):
            if key != "note":
                yield f"summary[{method}].{key}", key, a.get(key), b.get(key)
    for part in ("ledger", "metrics"):
        flat = [dict(_leaves(r.get(part) or {}, part)) for r in (old, new)]
        for name in dict.fromkeys([*flat[0], *flat[1]]):
            words = name.split(".")
            metric = words[-2] if words[-1] in ("value", "ci_low", "ci_high", "n") and len(words) > 2 else words[-1]
            yield name, metric, flat[0].get(name), flat[1].get(name)


def _rows(old: Mapping, new: Mapping):
    one, two = ({tuple(r.get(k) for k in ROW_KEY): r for r in x.get("rows") or []} for x in (old, new))
    for key in dict.fromkeys([*one, *two]):
        name = "rows[" + " ".join(f"{k}={v}" for k, v in zip(ROW_KEY, key, strict=True) if v is not None) + "]"
        a, b = one.get(key), two.get(key)
        if a is None or b is None:
            yield name, "row", "present" if a else None, "present" if b else None
            continue
        metric = str(a["metric"])
        for part in ("value", "ci_low", "ci_high"):
            yield f"{name}.{part}", metric, a.get(part), b.get(part)
        for part in ("n", "simulated"):
            skip = metric if SKIPPED.fullmatch(metric) else part
            yield f"{name}.{part}", skip, a.get(part), b.get(part)


def _leaves(node: Any, name: str):
    if isinstance(node, Mapping):
        for key in node:
            yield from _leaves(node[key], f"{name}.{key}")
    elif isinstance(node, list):
        for i, item in enumerate(node):
            yield from _leaves(item, f"{name}[{i}]")
    else:
        yield name, node


def _notes(old: Mapping, new: Mapping) -> list[str]:
    notes = []
    for part in ("git_commit", "diff_sha256"):
        a, b = ((r.get("code") or {}).get(part) for r in (old, new))
        if a != b:
            notes.append(f"code {part}: {a} then, {b} now")
    if old.get("threads") != new.get("threads"):
        notes.append(f"threads: {old.get('threads')} then, {new.get('threads')} now")
    a, b = ((r.get("packages") or {}) for r in (old, new))
    notes += [f"{p}: {a.get(p)} then, {b.get(p)} now" for p in dict.fromkeys([*a, *b]) if a.get(p) != b.get(p)]
    a, b = ((r.get("kernels") or {}) for r in (old, new))
    notes += [f"kernel {k}: {a.get(k)} then, {b.get(k)} now" for k in dict.fromkeys([*a, *b]) if a.get(k) != b.get(k)]
    return notes
