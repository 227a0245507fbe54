"""What a summary column is called, how its number reads, and which columns fit a width.

One definition for every format: terminal, Markdown and LaTeX print the same strings, CSV the raw values. Printed
units: shares x100; bytes per token with thousands separators; MiB; nats. `-` means: does not apply.
A simulated row (masking or quantize-dequantize without freeing) has `~` before its name and no bytes at all.
Accuracies stand in parentheses where the reference itself is below 50 %: there the task is out of the model's reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

Row = Mapping
CEILING = 0.5
NONE = "-"
NAME_WIDTH = 30  # longer method names fold in the terminal


@dataclass(frozen=True)
class Column:
    """`head` may hold one line break, used where width is scarce. `show(row, reference_acc) -> str`."""

    key: str
    head: str
    show: Callable[[Row, float | None], str]

    @property
    def title(self) -> str:
        """The head on one line."""
        return self.head.replace("\n/", "/").replace("\n", " ")


def known(value) -> bool:
    """Whether a cell has a number to print: neither None nor NaN."""
    return value is not None and value == value


def number(value, digits: int = 2, sign: bool = False) -> str:
    """Fixed digits with thousands separators; a number too small for them keeps two significant digits."""
    if not known(value):
        return NONE
    if value == 0:
        return "0"
    if math.isfinite(value) and abs(value) < 0.5 * 10**-digits:
        return f"{value:{'+' if sign else ''}.1e}".replace("e-0", "e-")
    return f"{value:{'+' if sign else ''},.{digits}f}"


def rate(value) -> str:
    """Tokens per second: three significant digits are honest on a shared machine."""
    return number(value, 0 if known(value) and abs(value) >= 100 else 1)


def mebibytes(value) -> str:
    return NONE if not known(value) else number(value / 2**20, 1 if value < 1000 * 2**20 else 0)


def _plain(key: str, digits: int, sign: bool = False) -> Callable:
    return lambda row, ref: number(row.get(key), digits, sign)


def _held(key: str, show: Callable) -> Callable:
    """Bytes and what follows from them: a simulated row holds none."""
    return lambda row, ref: NONE if row.get("simulated") else show(row.get(key))


def _percent(value, sign: bool = False) -> str:
    return NONE if not known(value) else f"{100 * value:{'+' if sign else ''}.1f}"


def _interval(low, high, sign: bool = False, digits: int = 1) -> str:
    if not known(low) or not known(high):
        return ""
    sign_ = "+" if sign else ""
    return f"[{100 * low:{sign_}.{digits}f}, {100 * high:{sign_}.{digits}f}]"


def _bracketed(text: str, row: Row, ref: float | None) -> str:
    hidden = ref is not None and ref < CEILING and row.get("family") != "full" and text != NONE
    return f"({text})" if hidden else text


def _acc(row: Row, ref: float | None, digits: int = 1) -> str:
    text = f"{_percent(row.get('acc'))} {_interval(row.get('acc_low'), row.get('acc_high'), digits=digits)}".strip()
    return _bracketed(text, row, ref)


def _delta(row: Row, ref: float | None, interval: bool = True) -> str:
    if row.get("family") == "full" and not row.get("acc_delta"):
        return NONE
    text = _percent(row.get("acc_delta"), sign=True)
    if interval:
        text = f"{text} {_interval(row.get('acc_delta_low'), row.get('acc_delta_high'), sign=True)}".strip()
    return _bracketed(text, row, ref)


def _bits(row: Row, ref: float | None) -> str:
    text = number(row.get("bits_per_element"), 2)
    return f"~{text}" if row.get("simulated") and text != NONE else text


def name(row: Row) -> str:
    return f"~{row['method']}" if row.get("simulated") else str(row["method"])


COLUMNS = (
    Column("method", "method", lambda row, ref: name(row)),
    Column("ratio", "ratio", _held("ratio", lambda v: number(v, 2))),
    Column("bits_per_element", "bits\n/elt", _bits),
    Column("bytes_per_token", "B\n/token", _held("bytes_per_token", lambda v: number(v, 0))),
    Column("kept", "kept", _plain("kept", 2)),
    Column("acc", "acc [95% CI]", _acc),
    Column("acc_n", "n", lambda row, ref: f"{row['acc_n']:,}" if known(row.get("acc_n")) else NONE),
    Column("acc_delta", "Δ vs\nfull", _delta),
    Column("delta_nll", "ΔNLL", _plain("delta_nll", 4, sign=True)),
    Column("ppl", "ppl", _plain("ppl", 3)),
    Column("kl_mean", "KL", _plain("kl_mean", 4)),
    Column("kl_p99", "KL\np99", _plain("kl_p99", 3)),
    Column("top1", "top1", lambda row, ref: _percent(row.get("top1"))),
    Column("prefill_tok_s", "prefill\ntok/s", lambda row, ref: rate(row.get("prefill_tok_s"))),
    Column("decode_tok_s", "decode\ntok/s", lambda row, ref: rate(row.get("decode_tok_s"))),
    Column("peak_bytes", "peak\nMiB", _held("peak_bytes", mebibytes)),
)
BYTE_KEYS = {"ratio", "bytes_per_token", "peak_bytes"}
# What a narrow terminal gives up, first to last. Folding (a shorter form of the same column) comes before losing.
FOLDS = {
    "acc_delta": lambda row, ref: _delta(row, ref, interval=False),
    "acc": lambda row, ref: _acc(row, ref, digits=0).replace(", ", ","),
}
GIVE_UP = (
    "prefill_tok_s", "kl_p99", "fold:acc_delta", "ppl", "peak_bytes", "fold:acc", "kept:constant", "acc_n", "top1",
    "kl_mean", "decode_tok_s", "kept", "bits_per_element", "delta_nll", "acc_delta", "bytes_per_token",
)  # fmt: skip


def order(summary: Sequence[Row]) -> list[Row]:
    """`full` rows first, then by ratio; rows without a byte count (simulated, unknown) last. Stable."""

    def rank(row: Row):
        ratio = None if row.get("simulated") else row.get("ratio")
        return (row.get("family") != "full", not known(ratio), ratio if known(ratio) else 0.0)

    return sorted(summary, key=rank)


def reference_accuracy(summary: Sequence[Row]) -> float | None:
    """Accuracy of the first `full` row; without one, what accuracy minus difference implies; else None."""
    for row in order(summary):
        if row.get("family") == "full" and known(row.get("acc")):
            return row["acc"]
    for row in summary:
        if known(row.get("acc")) and known(row.get("acc_delta")):
            return row["acc"] - row["acc_delta"]
    return None


def applicable(summary: Sequence[Row]) -> list[Column]:
    """Columns with at least one value; n only where it is not the same for all (else it belongs in the caption)."""
    used = [c for c in COLUMNS if any(known(r.get(c.key)) for r in summary)]
    shown = [c for c in used if any(c.show(r, None) != NONE for r in summary)]
    same_n = len({r.get("acc_n") for r in summary if known(r.get("acc"))}) <= 1
    return [c for c in shown if not (c.key == "acc_n" and same_n)]


def fit(summary: Sequence[Row], width: int, gap: int = 2) -> tuple[list[Column], list[str]]:
    """Columns that fit `width` characters, and the heads of those that had to go."""
    from rich.cells import cell_len

    columns, lost = applicable(summary), []
    ref = reference_accuracy(summary)

    def wide(column: Column) -> int:
        cells = [cell_len(column.show(r, ref)) for r in summary]
        longest = max([cell_len(part) for part in column.head.split("\n")] + cells)
        return min(longest, NAME_WIDTH) if column.key == "method" else longest

    for step in GIVE_UP:
        if sum(map(wide, columns)) + gap * (len(columns) - 1) <= width:
            break
        verb, _, fold = step.rpartition(":")
        if verb == "fold":
            columns = [replace(c, show=FOLDS[fold]) if c.key == fold else c for c in columns]
            continue
        key = verb or step
        if verb and len({r.get(key) for r in summary} - {None}) > 1:
            continue  # `kept` says something as long as it differs between rows
        lost += [c.title for c in columns if c.key == key]
        columns = [c for c in columns if c.key != key]
    return columns, lost


def best_accuracy(summary: Sequence[Row]) -> int | None:
    """Index of the method whose accuracy interval lies above the next best method's accuracy, if there is one."""
    scored = [(r["acc"], i) for i, r in enumerate(summary) if known(r.get("acc")) and r.get("family") != "full"]
    scored.sort(key=lambda s: (-s[0], s[1]))
    if len(scored) < 2 or not known(low := summary[scored[0][1]].get("acc_low")):
        return None
    return scored[0][1] if low > scored[1][0] else None
