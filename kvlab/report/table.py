"""The comparison table: terminal, Markdown, CSV and LaTeX booktabs from the same summary rows (evaluation.md 10, 11).

Every function is pure: summary rows in, text out. `full` first, then by ratio, the ratio being full-cache bytes in
the reference dtype over bytes held. A bold accuracy is one whose 95 % interval excludes the next best method.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence

from kvlab.report import columns as col
from kvlab.report.result import SUMMARY, write_rows

Row = Mapping


def caption(result: Mapping) -> str:
    """One line: what was measured. Model, dtypes, task, protocol, n, seeds, as the result knows them."""
    rows, model, config = result.get("rows") or [], result.get("model") or {}, result.get("config") or {}

    def seen(key: str, source: Sequence[Row] = rows) -> str:
        return ",".join(dict.fromkeys(f"{r[key]}" for r in source if r.get(key) is not None))

    chunks = seen("chunk", [r for r in rows if str(r.get("metric", "")).startswith(("ppl", "nll", "kl", "delta"))])
    reference = config.get("reference_dtype") or (config.get("runtime") or {}).get("reference_dtype") or "float16"
    kernels = result.get("kernels") or {}
    weights, arithmetic = kernels.get("weights"), kernels.get("arithmetic")
    parts = {
        "model": model.get("id"),
        "dtype": model.get("dtype"),
        "weights": weights if weights != "model" else None,
        "arithmetic": arithmetic if arithmetic != "exact" else None,
        "ref": reference,
        "task": seen("task"),
        "protocol": result.get("protocol") or seen("protocol"),
        "length": seen("length"),
        "chunk": chunks,
    }
    n, seeds = seen("acc_n", result.get("summary") or []), seen("seed")
    text = "  ".join(f"{key} {value}" for key, value in parts.items() if value)
    return "  ".join([text, *([f"n={n}"] if n else []), *([f"seed {seeds}"] if seeds else [])])


def provenance_line(result: Mapping, path: object = None) -> str:
    """`wrote PATH   (config 3f2a91c4d0be, commit 1a2b3c4, dirty)`."""
    code = result.get("code") or {}
    commit = (code.get("git_commit") or "")[:7]
    version = f"commit {commit}" if commit else f"kvlab {code.get('kvlab_version') or 'of unknown version'}"
    facts = [f"config {result.get('config_hash')}", version, *(["dirty"] if code.get("dirty") else [])]
    return f"{'wrote ' + str(path) + '   ' if path else ''}({', '.join(facts)})"


def footnotes(summary: Sequence[Row], lost: Sequence[str] = ()) -> list[str]:
    """The signs the table uses, only those it does use; then the notes of the rows."""
    lines = []
    if any(r.get("simulated") for r in summary):
        lines.append("~ simulated: nothing was freed, so there are no bytes to count")
    ref = col.reference_accuracy(summary)
    if ref is not None and ref < col.CEILING and any(r.get("family") != "full" for r in summary):
        lines.append(f"( ) the full cache itself scores {100 * ref:.1f} %: below 50 % the task says little")
    notes: dict[str, list[str]] = {}
    for r in col.order(summary):
        if r.get("note"):
            notes.setdefault(str(r["note"]), []).append(col.name(r))
    lines += [f"{', '.join(names)}: {note}" for note, names in notes.items()]
    if lost:
        lines.append(f"left out at this width: {', '.join(lost)}")
    return lines


def build(summary: Sequence[Row], width: int = 100):
    """A rich renderable (table and footnotes) that is at most `width` characters wide."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = col.order(summary)
    if not rows:
        return Text("no rows")
    shown, lost = col.fit(rows, width)
    ref, best = col.reference_accuracy(rows), col.best_accuracy(rows)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    for c in shown:
        named = c.key == "method"  # a long name may fold onto a second line; numbers are never cut
        table.add_column(
            c.head, justify="left" if named else "right", no_wrap=not named, overflow="fold",
            max_width=col.NAME_WIDTH if named else None,
        )  # fmt: skip
    for i, r in enumerate(rows):
        cells = [Text(c.show(r, ref), style="bold" if i == best and c.key == "acc" else "") for c in shown]
        table.add_row(*cells, style="dim" if r.get("simulated") else None)
    return Group(table, *(Text(line, style="dim") for line in footnotes(rows, lost)))


def text(summary: Sequence[Row], width: int = 100, title: str | None = None) -> str:
    """The terminal table as plain text, for logs, pipes and tests."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    if title:
        console.print(title, markup=False, highlight=False, soft_wrap=False)
    console.print(build(summary, width), markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def show(result: Mapping, path: object = None, console=None) -> None:
    """Print caption, table and where the result was written, as the end of a run does."""
    from rich.console import Console

    console = console or Console()
    console.print(caption(result), markup=False, highlight=False)
    console.print(build(result["summary"], console.width), markup=False, highlight=False)
    console.print(provenance_line(result, path), markup=False, highlight=False, soft_wrap=True)


def _grid(summary: Sequence[Row]) -> tuple[list[col.Column], list[list[str]], list[Row], int | None]:
    rows = col.order(summary)
    shown, ref = col.applicable(rows), col.reference_accuracy(rows)
    return shown, [[c.show(r, ref) for c in shown] for r in rows], rows, col.best_accuracy(rows)


def grid_markdown(head: Sequence[str], cells: Sequence[Sequence[str]], left: int = 1) -> str:
    """A GitHub pipe table with aligned source; the first `left` columns are text, the others numbers."""
    body = [[str(c).replace("|", "\\|").replace("\n", " ") for c in line] for line in [head, *cells]]
    wide = [max(3, *(len(line[i]) for line in body)) for i in range(len(head))]
    rule = [":" + "-" * (w - 1) if i < left else "-" * (w - 1) + ":" for i, w in enumerate(wide)]

    def line(parts: Sequence[str]) -> str:
        padded = (p.ljust(w) if i < left else p.rjust(w) for i, (p, w) in enumerate(zip(parts, wide, strict=True)))
        return "| " + " | ".join(padded) + " |"

    return "\n".join([line(body[0]), line(rule), *map(line, body[1:])]) + "\n"


def markdown(summary: Sequence[Row], title: str | None = None) -> str:
    """GitHub pipe table with every applicable column, the caption above and footnotes below."""
    if not summary:
        return "no rows\n"
    shown, cells, rows, best = _grid(summary)
    for line, i in [(cells[best], i) for i, c in enumerate(shown) if c.key == "acc" and best is not None]:
        line[i] = f"**{line[i]}**"
    # ~a and ~b in one line would be struck through
    cells = [[c.replace("~", "\\~") for c in line] for line in cells]
    table = grid_markdown([c.title for c in shown], cells)
    notes = "".join(f"\n{note.replace('~', chr(92) + '~')}\n" for note in footnotes(rows))
    return f"{title}\n\n{table}{notes}" if title else table + notes


def csv(summary: Sequence[Row], path) -> object:
    """Raw values, all keys, in table order. Bytes of simulated rows are left empty. Returns the path."""
    held = {*col.BYTE_KEYS, "physical", "payload", "metadata", "residual", "tables", "fragmentation", "shared"}
    rows = [{k: None if r.get("simulated") and k in held else v for k, v in r.items()} for r in col.order(summary)]
    return write_rows(rows, path, SUMMARY)


_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"$\sim$", "^": r"\textasciicircum{}", "Δ": r"$\Delta$", "→": r"$\to$", "<": r"$<$", ">": r"$>$",
}  # fmt: skip


def tex_escape(value: object) -> str:
    """Text that LaTeX prints as it is; minus signs of numbers become real ones."""
    plain = re.sub(r"[\\&%$#_{}~^Δ→<>]", lambda m: _TEX[m[0]], str(value))
    return re.sub(r"(?<![\w.])-(?=\d)", "$-$", plain)


def latex(summary: Sequence[Row], title: str | None = None, label: str = "tab:kvlab") -> str:
    """A booktabs table (needs \\usepackage{booktabs}); a rule separates the full cache from the methods."""
    if not summary:
        return "% no rows\n"
    shown, cells, rows, best = _grid(summary)
    lines = [r"\begin{table}[t]", r"\centering", r"\small", rf"\begin{{tabular}}{{l{'r' * (len(shown) - 1)}}}"]
    lines += [r"\toprule", " & ".join(tex_escape(c.title) for c in shown) + r" \\", r"\midrule"]
    for i, (r, line) in enumerate(zip(rows, cells, strict=True)):
        if i and rows[i - 1].get("family") == "full" and r.get("family") != "full":
            lines.append(r"\midrule")
        parts = [tex_escape(c) if c != col.NONE else "--" for c in line]
        if i == best:
            parts = [rf"\textbf{{{p}}}" if c.key == "acc" else p for c, p in zip(shown, parts, strict=True)]
        lines.append(" & ".join(parts) + r" \\")
    words = [*([title] if title else []), *footnotes(rows)]
    lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{tex_escape('. '.join(words))}}}"]
    return "\n".join([*lines, rf"\label{{{label}}}", r"\end{table}"]) + "\n"
