"""README's section "Smaller and faster": tables and the picture, from the rows of `make bench`. Nothing is measured here.

python experiments/faster.py [FOLDER]   prints the ratios that the CPU work set out to reach, and what the rows say
"""

from __future__ import annotations

import json
import sys
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
    parts += _attention(folder) + _overhead(folder)
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
        lines.append(_line("llama.cpp, fastest with a q4_0 cache", "", data, [_best(data, c, peer, True) for c in cases]))
    else:
        lines += [_line(s, _weights(data, s), data, [at.get((s, *c)) for c in cases]) for s in peers]
    for side in _ours(data):
        lines.append(_line(side.split(",")[0], _weights(data, side), data, [at.get((side, *c)) for c in cases]))
    heads = "".join(f" {b} x {n:,} |" for b, n in cases)
    return [
        f"One decode step against {peer}, ms ({facts(data)}):", "",
        f"| | weights | MB |{heads}", "|:--|:--|--:|" + "--:|" * len(cases), *lines, "",
    ]  # fmt: skip


def _best(data: list[dict], case: tuple[int, int], peer: str, extra: bool = False) -> dict | None:
    found = [r for r in data if r["who"] == peer and (r["batch"], r["context"]) == case and r["extra"] == extra]
    return min(found, key=lambda r: r["ms_wall"], default=None)


def _ours(data: list[dict]) -> list[str]:
    """Sides of OURS that were measured, in that order."""
    order = {}
    for r in data:
        for i, (weights, method, cache) in enumerate(OURS):
            if r["who"] == "kvlab" and (r["weights"], r["method"]) == (weights, method) and r["cache"].startswith(cache):
                order[r["side"]] = i
    return sorted(order, key=order.get)


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
        f"{', '.join(kernels)}; median of {min(r['rounds'] for r in data)} rounds; other programs took up to {busy:.1f} "
        "cores; MB: the largest cache of the line"
    )


def _attention(folder: Path) -> list[str]:
    """Microseconds of a layer's attention, from decode_attention."""
    data = [r for r in rows("decode_attention", folder) if r["context"] in (8192, 32768)]
    if not data:
        return []
    lines = []
    for r in data:
        if r["side"].startswith("kvlab"):
            x = f"{r['x_best_bf16']:.2f}x | {r['x_best_f32']:.2f}x | {r['ratio']:.2f}x"
            lines.append(f"| {r['shape']} | {r['context']:,} | {r['side'][6:]} | {1000 * r['ms_median']:,.0f} | {x} |")
    return [
        "One decoding row's attention over a paged cache, one layer, one thread, and how many times faster it is than "
        "torch over a contiguous full cache (best form found in bf16, in fp32; SDPA as transformers calls it):", "",
        "| shape | context | codec | µs | x best bf16 | x best fp32 | x SDPA fp32 |", "|:--|--:|:--|--:|--:|--:|--:|",
        *lines, "",
    ]  # fmt: skip


def _overhead(folder: Path) -> list[str]:
    data = [r for r in rows("overhead", folder) if r["weights"] == "int8"]
    parts = ("linears", "attention", "small_ops", "engine", "total")
    lines = [
        f"| {r['batch']} x {r['context']} | {r['cache']} | " + " | ".join(f"{r[f'ms_{p}']:.1f}" for p in parts) + " |"
        for r in data
    ]
    if not lines:
        return []
    return [
        "Where a step goes, int8 weights, ms of CPU time on one thread:", "",
        "| | cache | linears | attention | small ops | engine | whole step |", "|:--|:--|--:|--:|--:|--:|--:|", *lines, "",
    ]  # fmt: skip


# -- goals -------------------------------------------------------------------------------------------------------
def _pick(data: list[dict], case: tuple[int, int], **want) -> float:
    """The least wall time of the rows of a case with these facts; KeyError when there is none."""
    found = [
        r["ms_wall"] for r in data
        if (r["batch"], r["context"]) == case and all(str(r[k]).startswith(str(v)) for k, v in want.items())
    ]  # fmt: skip
    if not found:
        raise KeyError(f"{case} {want}")
    return min(found)


def goals(folder: Path = BENCH) -> list[tuple[str, float | None, float]]:
    """(what, ratio measured or None, at least)."""
    hf, lc, att = (rows(n, folder) for n in ("vs_transformers", "vs_llamacpp", "decode_attention"))
    tq = {"who": "kvlab", "method": "turboquant"}
    out: list[tuple[str, float | None, float]] = []

    def goal(what: str, least: float, ratio) -> None:
        try:
            out.append((what, ratio(), least))
        except (KeyError, StopIteration):
            out.append((what, None, least))

    def attention(side: str, shape: str, context: int) -> float:
        return next(
            r["x_best_bf16"] for r in att
            if (r["side"], r["shape"], r["context"]) == (f"kvlab {side}", shape, context)
        )  # fmt: skip

    for context, least in ((8192, 2.5), (32768, 2.2)):
        for codec in ("int4 g64", "turboquant 4"):
            goal(f"{codec} attention / best contiguous bf16, {context:,}", least,
                 lambda c=codec, n=context: attention(c, "SmolLM2-135M", n))  # fmt: skip
    for shape, least in (("SmolLM2-135M", 1.0), ("Llama-3-8B", 0.8)):
        goal(f"paged bf16 / best contiguous bf16, {shape}, 32,768", least,
             lambda s=shape: attention("full bfloat16", s, 32768))  # fmt: skip
    for context, least in ((512, 0.97), (2048, 1.1), (8000, 1.4)):
        for method in ("int4", "turboquant", "kivi"):
            def own(case=(1, context), method=method) -> float:
                mine = {"who": "kvlab", "weights": "int8"}
                full = _pick(hf, case, **mine, cache="full bfloat16")
                return full / _pick(hf, case, **mine, method=method)

            goal(f"{method} / own full bf16 cache, int8 weights, 1 x {context:,}", least, own)
    for case, least in (((1, 512), 2.5), ((1, 8000), 3.5), ((8, 2048), 3.5)):
        goal(f"turboquant, int8 weights / transformers StaticCache bf16, {case[0]} x {case[1]:,}", least,
             lambda c=case: _pick(hf, c, side="transformers StaticCache bf16") / _pick(hf, c, weights="int8", **tq))
    goal("full bf16, bf16 weights / transformers StaticCache bf16, 1 x 512", 1.3,
         lambda: _pick(hf, (1, 512), side="transformers StaticCache bf16")
         / _pick(hf, (1, 512), who="kvlab", weights="bf16", cache="full bfloat16"))  # fmt: skip
    for case, least in (((1, 512), 0.85), ((1, 2048), 1.1), ((1, 8000), 1.7), ((8, 512), 1.7), ((8, 2048), 2.7)):
        goal(f"turboquant, int8 weights / llama.cpp best, f16 cache, {case[0]} x {case[1]:,}", least,
             lambda c=case: _pick(lc, c, who="llama.cpp", cache="f16") / _pick(lc, c, weights="int8", **tq))
    for case, least in (((1, 2048), 2.0), ((8, 2048), 6.0)):
        goal(f"turboquant, int8 weights / llama.cpp best, q4_0 cache, {case[0]} x {case[1]:,}", least,
             lambda c=case: _pick(lc, c, who="llama.cpp", cache="q4_0") / _pick(lc, c, weights="int8", **tq))
    for r in rows("prefill_llamacpp", folder):
        if r["side"].startswith("kvlab"):
            goal(f"prefill of {r['context']:,}, {r['side'][6:]} / llama.cpp best", 0.9, lambda r=r: r["ratio"])
    for r in rows("prefill", folder):
        if r["side"].startswith("kvlab"):
            goal(f"prefill of {r['context']:,}, {r['side'][6:]} / {r['peer']}, fp32", 0.9, lambda r=r: r["ratio"])
    for r in rows("overhead", folder):
        if r["batch"] == 1:
            rest = r["ms_small_ops"] + r["ms_engine"]
            goal(f"2.5 ms / a step outside linears and attention ({rest:.2f} ms), {r['side'][6:]}", 1.0,
                 lambda rest=rest: 2.5 / rest)  # fmt: skip
    return out


def main() -> None:
    for what, ratio, least in goals(Path(sys.argv[1]) if len(sys.argv) > 1 else BENCH):
        said = "no rows" if ratio is None else "yes" if ratio >= least else "NO"
        print(f"  {what:86s} {'' if ratio is None else format(ratio, '6.2f'):>7s}   at least {least:4.2f}   {said}")


if __name__ == "__main__":
    main()
