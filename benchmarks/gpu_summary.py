"""One page from the rows of gpu.py: benchmarks/results/gpu.md. Nothing is measured here.

A goal is met when every case that it speaks of reaches it: contexts of 8K and more, 264 programs and more (two for
each multiprocessor of an H200), products of 16 bits. In between stands what the lowest and the highest case reached.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from gpu_run import FAILED, LEFT_OUT, MEASURED, read

GOALS = {  # share of the measured copy bandwidth
    "full float16": 0.80, "full bfloat16": 0.80, "fp8 e4m3": 0.70, "int8": 0.70, "int4": 0.55, "turboquant 4": 0.45,
    "int2": 0.40,
}  # fmt: skip
COPY_GOAL = 0.85
FASTER = {"int4": 2.0, "int2": 2.2}  # times as fast as float16 at 32K
LARGE, LONG, FAR = 264, 8192, 32768
BASE = "full float16"


def page(rows: list[dict]) -> str:
    """Markdown."""
    lines = ["# Kernels on a GPU", ""]
    if any(r.get("dry") for r in rows):
        lines += ["**DRY: tiny sizes on a CPU, in Triton's interpreter. No figure here means anything.**", ""]
    for part in (_machine, _tests, _goals, _times, _peers, _pages, _steps, _rest):
        lines += part(rows)
    return "\n".join(lines).rstrip() + "\n"


def _of(rows: list[dict], section: str) -> list[dict]:
    return [r for r in rows if r["section"] == section and r["status"] == MEASURED]


def _table(head: list[str], body: list[list[str]]) -> list[str]:
    if not body:
        return []
    rule = "|" + "|".join(":--" if i == 0 else "--:" for i in range(len(head))) + "|"
    return ["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(line) + " |" for line in body), ""]


def _machine(rows: list[dict]) -> list[str]:
    env = _of(rows, "environment")
    if not env:
        return ["The machine was not measured: no share of its bandwidth can be told.", ""]
    e = env[-1]
    gpu = f"{e['gpu']}, {e['sms']} SMs, driver {e['driver']}, CUDA {e['cuda']}" if "gpu" in e else "no GPU"
    size = f"{e['copy_bytes'] / 2**31:.3g} GiB"
    clock = (
        "Kernels: CUDA events around replays of a graph, L2 flushed between them, median of 20 or more: what a launch "
        "costs the host is not in these times."
    )
    commits = sorted({f"{r.get('commit') or 'unknown'}{' (dirty)' if r.get('dirty') else ''}" for r in rows})
    return [
        f"{gpu}; torch {e['torch']}, triton {e['triton']}, transformers {e['transformers']}, Python {e['python']}.",
        f"Copy bandwidth ({size}, bytes read plus written) {e['copy_gb_per_s']:,.0f} GB/s, 20th to 80th percentile "
        f"{e['copy_gb_per_s_low']:,.0f} to {e['copy_gb_per_s_high']:,.0f}; reading (a sum) {e['read_gb_per_s']:,.0f}.",
        f"{e['time'][:10]}, code {', '.join(commits)}. {clock if 'gpu' in e else ''}".rstrip(),
        "",
    ]


def _tests(rows: list[dict]) -> list[str]:
    found = [r for r in rows if r["section"] == "tests"]
    if not found or "passed" not in found[-1]:
        return [f"Kernel tests: {found[-1].get('why', '') if found else 'not run'}.", ""]
    t = found[-1]
    counts = ", ".join(f"{t[k]} {k}" for k in ("passed", "failed", "error", "skipped") if t[k])
    names = "".join(f"\n- {n}" for n in t["failures"])
    return [f"Kernel tests on the device: {counts or 'none'}. {t['why']}".rstrip() + names, ""]


def large(row: dict) -> bool:
    """Whether a goal speaks of this case."""
    return (
        row["context"] >= LONG and row.get("programs", 0) >= LARGE and row.get("products") != "float32"
        and row["shape"] != "tiny"
    )  # fmt: skip


def reached(values: list[float], goal: float) -> str:
    """In a word, from what each case reached."""
    if not values:
        return "not measured"
    return "yes" if min(values) >= goal else "in part" if max(values) >= goal else "no"


def ratios(rows: list[dict], codec: str, context: int) -> list[float]:
    """float16's time / the codec's, in each case of this context that has both."""
    base = {_case(r): r["ms_median"] for r in _of(rows, "decode") if r["codec"] == BASE and large(r)}
    mine = [r for r in _of(rows, "decode") if r["codec"] == codec and r["context"] == context and large(r)]
    return [base[_case(r)] / r["ms_median"] for r in mine if _case(r) in base]


def _case(row: dict) -> tuple:
    return row["shape"], row["batch"], row["context"]


def _goals(rows: list[dict]) -> list[str]:
    body = []
    for codec, goal in GOALS.items():
        got = [r["share"] for r in _of(rows, "decode") if r["codec"] == codec and large(r) and r.get("share")]
        body.append(
            [f"{codec}, decode attention, share of copy bandwidth", f"{goal:.0%}", *_span(got, 100, " %", goal)]
        )
    copies = [r for r in _of(rows, "copy") if r["what"].startswith("copy") and r["side"].startswith("kvlab")]
    got = [r["share"] for r in copies if r["shape"] != "tiny" and r.get("share")]
    body.append(["block copy, share of copy bandwidth", f"{COPY_GOAL:.0%}", *_span(got, 100, " %", COPY_GOAL)])
    for codec, goal in FASTER.items():
        got = ratios(rows, codec, FAR)
        body.append([f"{codec}, times as fast as float16 at 32K", f"{goal}x", *_span(got, 1, "x", goal)])
    head = ["goal: contexts from 8K, large grids", "at least", "lowest", "median", "highest", "cases", "met"]
    return ["## Goals", "", *_table(head, body)]


def _span(values: list[float], unit: float, name: str, goal: float) -> list[str]:
    digits = 0 if unit == 100 else 2
    shown = [f"{unit * f(values):.{digits}f}{name}" if values else "-" for f in (min, median, max)]
    return [*shown, str(len(values)), reached(values, goal)]


def _times(rows: list[dict]) -> list[str]:
    """Microseconds and shares by case, a column a codec would be too wide: a row a codec, a column a case."""
    out = []
    found = _of(rows, "decode")
    for shape in dict.fromkeys(r["shape"] for r in found):
        mine = [r for r in found if r["shape"] == shape and r.get("products") != "float32"]
        cases = sorted({(r["batch"], r["context"]) for r in mine}, key=lambda c: (c[1], c[0]))
        body = []
        for codec in dict.fromkeys(r["codec"] for r in mine):
            at = {(r["batch"], r["context"]): r for r in mine if r["codec"] == codec}
            body.append([codec, *(_cell(at.get(c)) for c in cases)])
        best = [_fastest(rows, shape, *c) for c in cases]
        body.append(["fastest peer", *(f"{1000 * r['ms_median']:.0f}" if r else "-" for r in best)])
        head = ["us a layer (share of copy)", *(f"{b} x {c // 1024}K" if c >= 1024 else f"{b} x {c}" for b, c in cases)]
        out += [f"## Decode attention, {shape}", "", *_table(head, body)]
    return out


def _cell(row: dict | None) -> str:
    if row is None:
        return "-"
    return f"{1000 * row['ms_median']:.0f}" + (f" ({100 * row['share']:.0f} %)" if row.get("share") else "")


def _fastest(rows: list[dict], shape: str, batch: int, context: int) -> dict | None:
    found = [r for s in ("sdpa", "flex", "packages") for r in _of(rows, s) if _case(r) == (shape, batch, context)]
    return min((r for r in found if "ms_median" in r), key=lambda r: r["ms_median"], default=None)


def _peers(rows: list[dict]) -> list[str]:
    """The fastest of the others in each case, and how many times as fast kvlab's float16, int4 and turboquant are."""
    ours = {(r["codec"], _case(r)): r for r in _of(rows, "decode") if r.get("products") != "float32"}
    cases = sorted({_case(r) for r in _of(rows, "decode")}, key=lambda c: (c[0], c[2], c[1]))
    body = []
    for case in cases:
        if (best := _fastest(rows, *case)) is None:
            continue
        mine = [ours.get((c, case)) for c in (BASE, "int4", "turboquant 4")]
        times = [f"{best['ms_median'] / r['ms_median']:.2f}x" if r else "-" for r in mine]
        body.append([f"{case[0]}, {case[1]} x {case[2]:,}", best["side"], f"{1000 * best['ms_median']:.0f}", *times])
    head = ["case", "fastest peer (float16 cache)", "us", "kvlab float16", "int4", "turboquant 4"]
    absent = sorted({r["side"] for r in rows if r["section"] == "packages" and r["status"] == "absent"})
    told = [f"Not installed there: {', '.join(absent)}.", ""] if absent else []
    return ["## Against others", "", *_table(head, body), *told] if body or told else []


def _pages(rows: list[dict]) -> list[str]:
    body = []
    for section in ("copy", "write", "mass"):
        for r in _of(rows, section):
            share = f"{100 * r['share']:.0f} %" if r.get("share") else "-"
            case = f"{r['shape']}, {r['what']}"
            body.append([r["side"], case, f"{1000 * r['ms_median']:.1f}", f"{r['gb_per_s']:,.0f}", share])
    return ["## Pages", "", *_table(["side", "what", "us", "GB/s", "share of copy"], body)] if body else []


def _steps(rows: list[dict]) -> list[str]:
    out, found = [], _of(rows, "ours") + _of(rows, "theirs")
    for case in dict.fromkeys((r["model"], r["batch"], r["context"]) for r in found):
        mine = [r for r in found if (r["model"], r["batch"], r["context"]) == case]
        theirs = [r for r in mine if r["who"] == "transformers"]
        best = min(theirs, key=lambda r: r["ms_median"], default=None)
        body = []
        for r in sorted(mine, key=lambda r: r["ms_median"]):
            ratio = f"{best['ms_median'] / r['ms_median']:.2f}x" if best else "-"
            held = f"{r['cache_bytes'] / 1e6:,.0f}" if r.get("cache_bytes") else "-"
            body.append([r["side"], f"{r['ms_median']:.2f}", f"{r['tokens_per_s']:,.0f}", held, ratio])
        head = ["side", "ms a step", "tokens/s", "cache MB", "x fastest of transformers"]
        out += [f"**{case[0]}, {case[1]} x {case[2]:,}**", "", *_table(head, body)]
    return ["## Whole decode steps", "", *out] if out else []


def _rest(rows: list[dict]) -> list[str]:
    out = []
    for status in (FAILED, "refused", LEFT_OUT, "absent"):
        found: dict[str, int] = {}
        for r in rows:
            if r["status"] == status and r["section"] not in ("packages", "tests"):
                names = [str(r[k]) for k in ("codec", "method", "how", "side", "what") if r.get(k)]
                text = f"{r['section']} {names[0] if names else ''}: {r.get('why', '')[:140]}"
                text = text if status != LEFT_OUT or "time:" not in text else f"{r['section']}: time was over"
                found[text] = found.get(text, 0) + 1
        if found:
            each = [f"- {text}{f' ({n} rows)' if n > 1 else ''}" for text, n in list(found.items())[:12]]
            more = [f"- and {len(found) - 12} more kinds"] if len(found) > 12 else []
            out += [f"**{status}**", "", *each, *more, ""]
    return ["## Not measured", "", *out] if out else []


def write(rows: Path, to: Path) -> None:
    to.write_text(page(read(rows)))
