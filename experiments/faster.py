"""README's section "Smaller and faster": tables and the picture, from the rows of `make bench`.

Nothing is measured here. A cell holds the wall time of a step at the best number of threads, and how many times as fast
that is as the peer's fastest full cache.
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "benchmarks" / "results"
PLOT = ROOT / "experiments" / "speed" / "steps"
CASES = ((1, 512), (1, 2048), (1, 8000), (8, 512), (8, 2048))  # batch, context
OURS = (  # weights, method, cache as the row names it
    ("fp32", "full", "full float32"), ("fp32", "turboquant", "turboquant"), ("bf16", "full", "full bfloat16"),
    ("bf16", "int4", "int4"), ("bf16", "turboquant", "turboquant"), ("bf16", "kivi", "kivi"),
    ("int8", "full", "full bfloat16"), ("int8", "int4", "int4"), ("int8", "turboquant", "turboquant"),
    ("int8", "kivi", "kivi"),
)  # fmt: skip


def rows(name: str, folder: Path = BENCH) -> list[dict]:
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def section(folder: Path = BENCH, plot: Path = PLOT) -> str:
    """The part between README's `faster` markers; writes the picture."""
    parts = []
    if rows("vs_transformers", folder) or rows("vs_llamacpp", folder):
        import picture

        picture.draw(folder, plot)
        shown = plot.relative_to(ROOT) if plot.is_relative_to(ROOT) else plot
        parts += [f"![milliseconds per decode step against context]({shown}.png)", ""]
    parts += _steps("vs_transformers", folder, "transformers") + _steps("vs_llamacpp", folder, "llama.cpp")
    parts += _caches(folder) + _attention(folder) + _overhead(folder)
    return "\n".join(parts or ["No rows yet: `make bench` measures them.", ""])


def _steps(bench: str, folder: Path, peer: str) -> list[str]:
    """Milliseconds of a step by case; ratios against the peer's fastest full cache."""
    data = rows(bench, folder)
    cases = [c for c in CASES if any((r["batch"], r["context"]) == c for r in data)]
    if not cases:
        return []
    at = {(r["side"], r["batch"], r["context"]): r for r in data}
    peers = dict.fromkeys(r["side"] for r in data if r["who"] == peer)
    lines = [_line(f"**{peer}, fastest full cache**", "", data, [_best(data, c, peer) for c in cases])]
    if peer == "llama.cpp":
        lines.append(_line("llama.cpp, fastest q4_0 cache", "", data, [_best(data, c, peer, True) for c in cases]))
    else:
        lines += [_line(s, _weights(data, s), data, [at.get((s, *c)) for c in cases]) for s in peers]
    for side in _ours(data):
        lines.append(_line(side.split(",")[0], _weights(data, side), data, [at.get((side, *c)) for c in cases]))
    heads = "".join(f" {b} x {n:,} |" for b, n in cases)
    return [
        f"One decode step, ms, and how many times as fast as the fastest full cache of {peer} ({facts(data)}):", "",
        f"| | weights | MB |{heads}", "|:--|:--|--:|" + "--:|" * len(cases), *lines, "",
    ]  # fmt: skip


def _best(data: list[dict], case: tuple[int, int], peer: str, extra: bool = False) -> dict | None:
    found = [r for r in data if r["who"] == peer and (r["batch"], r["context"]) == case and r["extra"] == extra]
    return min(found, key=lambda r: r["ms_wall"], default=None)


def _ours(data: list[dict]) -> list[str]:
    """Sides of OURS that were measured, in that order."""
    out = {}
    for weights, method, cache in OURS:
        for r in data:
            if (r["who"], r["weights"], r["method"]) == ("kvlab", weights, method) and r["cache"].startswith(cache):
                out[r["side"]] = None
    return list(out)


def _weights(data: list[dict], side: str) -> str:
    return next(r["weights"] for r in data if r["side"] == side)


def _line(name: str, weights: str, data: list[dict], cells: list[dict | None]) -> str:
    held = max((r for r in cells if r), key=lambda r: r["cache_bytes"], default=None)
    out = [name, weights, "" if held is None else f"{held['cache_bytes'] / 1e6:,.0f}"]
    for r in cells:
        if r is None:
            out.append("")
        elif name.startswith("**"):
            out.append(f"{r['ms_wall']:.1f}")
        else:
            out.append(f"{r['ms_wall']:.1f} ({r['x_best_peer']:.2f}x)")
    return "| " + " | ".join(out) + " |"


def facts(data: list[dict]) -> str:
    """What all figures of a table share."""
    one = data[0]
    kernels = sorted({r["kernels"] for r in data if "kernels" in r})
    busy = max(r["others"] for r in data)
    return (
        f"wall time, each side at its best number of threads; {one['model']}, {one['cpu']}, kernels "
        f"{', '.join(kernels)}; median of {min(r['rounds'] for r in data)} rounds; other programs took up to "
        f"{busy:.1f} cores; MB: the largest cache of the line"
    )


def _caches(folder: Path) -> list[str]:
    """Each codec against the full bf16 cache of the same step."""
    data = [r for r in rows("caches", folder) if r["weights"] == "int8"]
    if not data:
        return []
    cases = sorted({(r["batch"], r["context"]) for r in data})
    at = {(r["codec"], r["batch"], r["context"]): r for r in data}
    lines = []
    for codec in dict.fromkeys(r["codec"].removesuffix(" fast") for r in data):
        held = next(at[codec, *c] for c in reversed(cases) if (codec, *c) in at)["cache_bytes"] / 1e6
        lines.append(f"| {codec} | {held:,.0f} | " + " | ".join(_ratios(at, codec, c) for c in cases) + " |")
    heads = "".join(f" {b} x {n:,} |" for b, n in cases)
    return [
        "What a smaller cache does to a whole step: times as fast as the full bf16 cache, int8 weights, wall time on "
        f"all cores, median and quartiles over {min(r['rounds'] for r in data)} rounds, and after the stroke the "
        f"median with `runtime.arithmetic=fast` (MB: {cases[-1][1]:,} tokens; kivi's exact window is bf16 too):",
        "", f"| cache | MB |{heads}", "|:--|--:|" + "--:|" * len(cases), *lines, "",
    ]  # fmt: skip


def _ratios(at: dict[tuple, dict], codec: str, case: tuple[int, int]) -> str:
    exact, fast = at.get((codec, *case)), at.get((f"{codec} fast", *case))
    said = [f"{r['x_full']:.2f}x ({r['x_full_low']:.2f} to {r['x_full_high']:.2f})" for r in [exact] if r]
    return " / ".join(said + [f"{r['x_full']:.2f}x" for r in [fast] if r])


def _attention(folder: Path) -> list[str]:
    """Microseconds of a layer's attention, from decode_attention."""
    data = [r for r in rows("decode_attention", folder) if r["context"] == 8192]
    data.sort(key=lambda r: (r["shape"] != "SmolLM2-135M", r["side"]))
    if not data:
        return []
    lines = []
    for r in data:
        if r["side"].startswith("kvlab"):
            x = f"{r['x_best_bf16']:.2f}x | {r['x_best_f32']:.2f}x | {r['ratio']:.2f}x"
            lines.append(f"| {r['shape']} | {r['context']:,} | {r['side'][6:]} | {1000 * r['ms_median']:,.0f} | {x} |")
    return [
        "One decoding row's attention over a paged cache, one layer, one thread, and how many times faster it is than "
        "torch over a contiguous full cache (best form found in bf16, in fp32; SDPA as transformers calls it; torch's "
        "bf16 products take AVX512-BF16 where a CPU has it, kvlab's numbers are float32; "
        f"load average {min(r['load'] for r in data):.1f} to {max(r['load'] for r in data):.1f}; other contexts in "
        "`benchmarks/results/decode_attention.jsonl`):", "",
        "| shape | context | codec | µs | x best bf16 | x best fp32 | x SDPA fp32 |", "|:--|--:|:--|--:|--:|--:|--:|",
        *lines, "",
    ]  # fmt: skip


def _overhead(folder: Path) -> list[str]:
    data = [r for r in rows("overhead", folder) if r["weights"] == "int8" and r["batch"] == 1]
    parts = ("linears", "attention", "rest", "total")
    lines = [
        f"| {r['batch']} x {r['context']} | {r['cache']} | " + " | ".join(f"{r[f'ms_{p}']:.1f}" for p in parts) + " |"
        for r in data
    ]
    if not lines:
        return []
    return [
        "Where a step goes, int8 weights, ms of CPU time on one thread (the rest is a difference of medians):", "",
        "| | cache | linears | attention | rest | whole step |", "|:--|:--|--:|--:|--:|--:|",
        *lines, "",
    ]  # fmt: skip
