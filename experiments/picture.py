"""Milliseconds of a decode step against context, batch 1, from the rows of `make bench`: png, svg and numbers (csv).

python experiments/picture.py [FOLDER OF ROWS] [NAME OF THE PICTURE]

Left against transformers, right against llama.cpp; both axes logarithmic, lower is better. Peers are grey, kvlab's
lines have the colours of their methods everywhere else in this repo. Solid: int8 weights; dashed: bf16 weights.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import faster

from kvlab.report import style

GREYS = ("#444444", "#777777", "#AAAAAA")
DASHED = (0, (4, 2))


def lines(folder: Path) -> dict[str, list[tuple]]:
    """{panel: [(name, colour, dash, marker, [(context, ms)])]}"""
    hf, lc = ([r for r in faster.rows(n, folder) if r["batch"] == 1] for n in ("vs_transformers", "vs_llamacpp"))
    return {
        "against transformers": [*_transformers(hf), *_ours(hf)],
        "against llama.cpp": [
            _line("llama.cpp, f16 cache, fastest setting", GREYS[0], "-", lc, who="llama.cpp", cache="f16"),
            _line("llama.cpp, q4_0 cache, fastest setting", GREYS[2], "-", lc, who="llama.cpp", cache="q4_0"),
            *_ours(lc),
        ],
    }


def _transformers(data: list[dict]) -> list[tuple]:
    full = {"who": "transformers", "method": "full", "extra": False}
    small = [r for r in data if r["who"] == "transformers" and r["method"] in ("quanto", "hqq")]
    return [
        _line("transformers, best full cache in bf16", GREYS[0], DASHED, data, **full, weights="bf16"),
        _line("transformers, best full cache in fp32", GREYS[1], ":", data, **full, weights="fp32"),
        _line("transformers, best 4-bit cache (fp32 weights)", GREYS[2], ":", small),
    ]


def _ours(data: list[dict]) -> list[tuple]:
    ours = [r for r in data if r["who"] == "kvlab" and not r["cache"].endswith(("full float32", " fast"))]
    out = []
    for weights, dash in (("bf16", DASHED), ("int8", "-")):
        for method in ("full", "int4", "turboquant") if weights == "int8" else ("full", "turboquant"):
            name = {"full": "full bf16 cache", "int4": "int4", "turboquant": "turboquant 4 bit"}[method]
            name = f"kvlab {name}, {weights} weights"
            out.append(_line(name, style.color(method), dash, ours, method=method, weights=weights))
    return out


def _line(name: str, color: str, dash, data: list[dict], **want) -> tuple:
    """The fastest row of each context."""
    best: dict[int, float] = {}
    for r in data:
        if all(r.get(k) == v for k, v in want.items()):
            best[r["context"]] = min(r["ms_wall"], best.get(r["context"], float("inf")))
    return name, color, dash, "o" if name.startswith("kvlab") else "s", sorted(best.items())


def draw(folder: Path, path: Path) -> list[Path]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {k: [line for line in v if line[-1]] for k, v in lines(folder).items()}
    panels = {k: v for k, v in panels.items() if v}
    one = next(r for n in ("vs_transformers", "vs_llamacpp") for r in faster.rows(n, folder))
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(style.RC):
        fig = Figure(figsize=(4.6 * len(panels), 5.4), layout="constrained")
        FigureCanvasAgg(fig)
        axes = fig.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for ax, (title, drawn) in zip(axes, panels.items()):
            _panel(ax, title, drawn)
        axes[0].set_ylabel("ms per decode step, log scale (lower is better)")
        fig.suptitle(f"{one['model']}, batch 1, {one['cpu']}, wall time at the best thread count", fontsize=9)
        out = [path.with_name(path.name + s) for s in (".png", ".svg")]
        for file in out:
            fig.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return [*out, _table(panels, path.with_name(path.name + ".csv"))]


def _panel(ax, title: str, drawn: list[tuple]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=10)
    for name, color, dash, marker, points in drawn:
        ax.plot(*zip(*points), color=color, ls=dash, marker=marker, ms=4, lw=1.4, label=name)
    ticks = sorted({x for *_, points in drawn for x, _ in points})
    ax.set_xticks(ticks, [f"{x:,}" for x in ticks])
    ax.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("tokens in the cache (log scale)")
    ax.set_title(title)
    ax.grid(True, axis="both")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1, handlelength=3)


def _table(panels: dict[str, list[tuple]], path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["panel", "line", "context", "ms"])
        for title, drawn in panels.items():
            out.writerows([title, name, x, f"{y:.3f}"] for name, *_, points in drawn for x, y in points)
    return path


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else faster.BENCH
    print(*draw(folder, Path(sys.argv[2]) if len(sys.argv) > 2 else faster.PLOT), sep="\n")
