"""Figures: trade-off (Pareto), ledger bars, length x depth heat map. PNG, SVG and the CSV of the numbers drawn.

No pyplot, no global state, no GUI: a Figure with an Agg canvas per call. matplotlib is imported when a plot is made.
Each function returns the files it wrote, by suffix. `path` is the name without suffix (a known one is cut off).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvlab.errors import ConfigError
from kvlab.report import labels, points, style
from kvlab.report import pareto as front
from kvlab.report.result import LEDGER, write_rows

Row = Mapping
FAMILY_LABEL = {"full": "full cache"}
Y_LABEL = {
    "delta_nll": "ΔNLL, nats per token (lower is better)",
    "acc": "accuracy, % (higher is better)",
    "kl_mean": "KL to full cache, nats (lower is better)",
}


def pareto(summary: Sequence[Row], path, y: str | None = None, size=(6.8, 4.6), title: str = "") -> dict[str, Path]:
    """Loss or accuracy over bytes per token (log2; left is better), with the ratio on top.

    Filled markers are non-dominated and joined by the dashed staircase; open ones are beaten by another point. A thin
    line joins one method across its settings. The full cache is the grey line, in the accuracy plot the band of its
    95 % interval. Rows without bytes (simulated) or without y are not drawn; the CSV says so.
    """
    pts = points.tradeoff(summary, y)
    drawn = [p for p in pts if not p["left_out"]]
    if all(p["family"] == "full" for p in drawn):
        reasons = "; ".join(f"{p['method']}: {p['left_out']}" for p in pts if p["left_out"])
        raise ConfigError(f"pareto: no compressed method can be drawn ({reasons})")
    axis = drawn[0]["axis"]
    sign = points.AXES[axis][2]
    with _figure(size) as fig:
        ax = fig.subplots()
        ax.set_xscale("log", base=2)
        ax.set_ylabel(Y_LABEL[axis])
        _y_scale(ax, axis, [p["y"] for p in drawn])
        lines = _reference(ax, drawn) + _method_lines(ax, drawn)
        for p in drawn:
            hue, filled = style.color(p["method"]), p["front"] or p["family"] == "full"
            bounds = (p["low"], p["high"])
            if None not in bounds and p["family"] != "full":
                ax.plot([p["bytes_per_token"]] * 2, bounds, color=hue, alpha=0.35, lw=1.6, zorder=2)
                lines.append([(p["bytes_per_token"], bound) for bound in bounds])
            ax.plot(
                p["bytes_per_token"], p["y"], marker=style.MARKER.get(p["family"], "o"), ls="", zorder=4, mec=hue,
                mfc=hue if filled else "white", mew=1.3, ms=10 if p["family"] == "full" else 6,
            )  # fmt: skip
        stairs = [(a, sign * b) for a, b in front.staircase([(p["bytes_per_token"], sign * p["y"]) for p in drawn])]
        ax.plot(*zip(*stairs, strict=True), ls=(0, (4, 2)), color=style.GREY, lw=1.0, zorder=1)
        _tradeoff_axes(ax, drawn, title)
        _family_legend(ax, drawn)
        _name_points(fig, ax, drawn, [*lines, stairs])
        return _save(fig, path, pts)


def _y_scale(ax, axis: str, values: Sequence[float]) -> None:
    """Losses that spread over decades get a symmetric log axis, linear around 0; accuracy is always linear."""
    sizes = sorted(abs(v) for v in values if v)
    if axis == "acc" or not sizes or sizes[-1] < 30 * (small := sizes[len(sizes) // 4]):
        return
    from matplotlib.ticker import FuncFormatter, SymmetricalLogLocator

    linear = 10.0 ** round(math.log10(small))
    ax.set_yscale("symlog", linthresh=linear, linscale=0.7)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    ax.yaxis.set_minor_locator(SymmetricalLogLocator(base=10, linthresh=linear, subs=range(2, 10)))
    ax.set_ylabel(Y_LABEL[axis].replace("(", f"(log above {linear:g}; "))


def _reference(ax, drawn: Sequence[dict]) -> list:
    """The level of the full cache across the whole width."""
    full = next((p for p in drawn if p["family"] == "full"), None)
    if full is None:
        return []
    ax.axhline(full["y"], color=style.PALE, lw=1.4, zorder=0)
    if None not in (full["low"], full["high"]):
        ax.axhspan(full["low"], full["high"], color=style.PALE, alpha=0.3, lw=0, zorder=0)
    return [[(x * full["bytes_per_token"], full["y"]) for x in (2.0**-12, 2.0)]]


def _method_lines(ax, drawn: Sequence[dict]) -> list:
    """Join the points of one method, with its interval as a shade where every point has one."""
    lines = []
    for key in dict.fromkeys(p["line"] for p in drawn if p["family"] != "full"):
        mine = sorted((p for p in drawn if p["line"] == key), key=lambda p: p["bytes_per_token"])
        if len(mine) < 2:
            continue
        xs, ys, hue = [p["bytes_per_token"] for p in mine], [p["y"] for p in mine], style.color(mine[0]["method"])
        ax.plot(xs, ys, color=hue, lw=1.1, alpha=0.7, zorder=2)
        if all(None not in (p["low"], p["high"]) for p in mine):
            ax.fill_between(xs, [p["low"] for p in mine], [p["high"] for p in mine], color=hue, alpha=0.10, lw=0)
        lines.append(list(zip(xs, ys, strict=True)))
    return lines


def _tradeoff_axes(ax, drawn: Sequence[dict], title: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    xs = [p["bytes_per_token"] for p in drawn]
    ax.set_xlim(min(xs) / 1.35, max(xs) * 1.35)
    ax.margins(y=0.14)
    ax.xaxis.set_major_locator(LogLocator(base=2, subs=(1.0,) if max(xs) > 8 * min(xs) else (1.0, 1.5), numticks=20))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    ax.set_xlabel("KV cache bytes per token (log scale; left is better)")
    ax.grid(True, axis="both")
    known = [p for p in drawn if p["ratio"]]
    if known:  # full-cache bytes per token in the reference dtype: the same for every row
        full = known[0]["ratio"] * known[0]["bytes_per_token"]
        top = ax.secondary_xaxis("top")
        low, high = ax.get_xlim()
        ticks = [r for r in (2.0**k for k in range(-3, 12)) if low <= full / r <= high]
        top.set_xticks([full / r for r in ticks], [f"{r:g}×" for r in ticks])
        top.minorticks_off()
        top.set_xlabel("compression ratio (full cache in the reference dtype = 1×)")
    if title:
        ax.set_title(title)


def _family_legend(ax, drawn: Sequence[dict]) -> None:
    from matplotlib.lines import Line2D

    seen = dict.fromkeys(p["family"] for p in drawn)
    entries = [
        Line2D([], [], marker=m, ls="", color=style.GREY, ms=9 if f == "full" else 6, label=FAMILY_LABEL.get(f, f))
        for f, m in style.MARKER.items()
        if f in seen
    ]
    entries.append(Line2D([], [], ls=(0, (4, 2)), color=style.GREY, lw=1.0, label="non-dominated (filled)"))
    ax.legend(
        handles=entries, loc="upper center", bbox_to_anchor=(0.5, -0.135), ncols=len(entries), handletextpad=0.4,
        columnspacing=1.4,
    )  # fmt: skip


def _name_points(fig, ax, drawn: Sequence[dict], lines) -> None:
    """Label every point; a hair line leads from a label that had to go far."""
    fig.canvas.draw()  # fixes the layout, so that pixels mean something
    fig.set_layout_engine("none")
    renderer, to_px = fig.canvas.get_renderer(), ax.transData.transform
    texts = [
        ax.text(0, 0, name, fontsize=7.5, color=style.darker(style.color(name)), zorder=5, va="center", ha="center")
        for name in (p["method"] for p in drawn)
    ]
    sizes = [(b.width, b.height) for b in (t.get_window_extent(renderer) for t in texts)]
    anchors = to_px([(p["bytes_per_token"], p["y"]) for p in drawn])
    scale = fig.dpi / 72
    frame = ax.get_window_extent(renderer).extents
    boxes = labels.place(anchors, sizes, frame, 4 * scale, [to_px(line) for line in lines], 1.5 * scale)
    back = ax.transData.inverted().transform
    for p, text, anchor, box in zip(drawn, texts, anchors, boxes, strict=True):
        text.set_position(back((box[:2] + box[2:]) / 2))
        near = [min(max(anchor[0], box[0]), box[2]), min(max(anchor[1], box[1]), box[3])]
        if ((near - anchor) ** 2).sum() ** 0.5 > 13 * scale:
            ends = zip(back(anchor), back(near), strict=True)
            ax.plot(*ends, color=style.color(p["method"]), lw=0.6, alpha=0.6, zorder=3)


def ledger(summary: Sequence[Row], path, width: float = 6.8, title: str = "") -> dict[str, Path]:
    """Stacked bars: where the bytes of each method are. Bytes per token seen (MiB where tokens are unknown)."""
    bars, unit = points.ledger(summary)
    with _figure((width, 1.25 + 0.27 * len(bars))) as fig:
        ax = fig.subplots()
        left = [0.0] * len(bars)
        for key in LEDGER:
            values = [b[key] for b in bars]
            if any(values):
                ax.barh(range(len(bars)), values, left=left, height=0.68, color=style.LEDGER_COLOR[key], label=key)
            left = [a + b for a, b in zip(left, values, strict=True)]
        for i, bar in enumerate(bars):
            text = f"{bar['total']:,.0f}" if unit != "MiB" else f"{bar['total']:,.1f}"
            text += f"   {bar['ratio']:.2f}×" if bar["ratio"] else ""
            ax.annotate(text, (bar["total"], i), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7.5)
        ax.set_yticks(range(len(bars)), [b["method"] for b in bars])
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.set_xlim(0, max(left) * 1.22)
        ax.xaxis.set_major_formatter(lambda v, _: f"{v:,.0f}" if v >= 10 or v == 0 else f"{v:g}")
        ax.set_xlabel(f"KV cache held, {unit}")
        ax.grid(True, axis="x")
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(LEDGER), columnspacing=1.2, handlelength=1.2)
        if title:
            ax.set_title(title, pad=24)
        return _save(fig, path, [{**b, "unit": unit} for b in bars])


def heatmap(
    rows: Sequence[Row], path, metric: str | None = None, task: str | None = None, title: str = ""
) -> dict[str, Path]:
    """Score over context length and needle depth, one panel per method; the number is in the cell, in percent."""
    panels = points.grid(rows, metric, task)
    one = next(iter(panels.values()))
    nx, ny = len(one["lengths"]), len(one["depths"])
    columns = min(len(panels), max(1, int(11 / (0.9 + 0.42 * nx))))
    lines = -(-len(panels) // columns)
    columns = -(-len(panels) // lines)  # even rows
    wide, high = 0.42 * nx + 0.35, 0.23 * ny + 0.55
    with _figure((max(3.2, columns * wide + 1.5), lines * high + 0.6)) as fig:
        grid = fig.subplots(lines, columns, squeeze=False)
        image = None
        for ax in grid.flat[len(panels) :]:
            ax.remove()
        for i, (ax, (name, panel)) in enumerate(zip(grid.flat, panels.items(), strict=False)):
            cells = [[float("nan") if v is None else v for v in line] for line in panel["cells"]]
            ax.set_facecolor("#EEEEEE")
            image = ax.imshow(cells, vmin=0, vmax=100, cmap="viridis", aspect="auto")
            for j, line in enumerate(panel["cells"]):
                for k, v in enumerate(line):
                    dark = v is not None and v < 45  # viridis: white reads better below
                    ax.text(k, j, "–" if v is None else f"{v:.0f}", ha="center", va="center", fontsize=7,
                            color="white" if dark else "black")  # fmt: skip
            ax.set_title(textwrap.fill(name, max(14, int(13.5 * wide))), fontsize=8)
            lowest, first = i + columns >= len(panels), i % columns == 0
            ax.set_xticks(range(nx), [_short(x) for x in one["lengths"]])
            ax.set_yticks(range(ny), [f"{d:g}" for d in one["depths"]])
            ax.tick_params(length=0, labelbottom=lowest, labelleft=first)
            for side in ax.spines.values():
                side.set_visible(False)
        fig.supxlabel("context length, tokens", fontsize=9)
        fig.supylabel("needle depth, %", fontsize=9)
        bar = fig.colorbar(image, ax=list(grid.flat[: len(panels)]), fraction=0.05, pad=0.02, aspect=25 * lines)
        bar.outline.set_visible(False)
        bar.set_label("score, %")
        if title:
            fig.suptitle(title, fontsize=10)
        flat = [
            {"method": name, "length": x, "depth": d, "percent": v}
            for name, p in panels.items()
            for d, line in zip(p["depths"], p["cells"], strict=True)
            for x, v in zip(p["lengths"], line, strict=True)
        ]
        return _save(fig, path, flat)


def _short(tokens: int) -> str:
    """512, 1k, 1.5k, 128k: k is 1,024."""
    return f"{tokens / 1024:g}k" if tokens >= 1024 and tokens % 512 == 0 else f"{tokens:,}"


class _figure:
    """`with _figure(size) as fig`: a Figure on an Agg canvas, drawn under our rcParams and nobody else's."""

    def __init__(self, size):
        self.size = size

    def __enter__(self):
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        # the user's own matplotlibrc must not change our figures; rc_context would not restore the backend
        default = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith("backend")}
        self.context = matplotlib.rc_context({**default, **style.RC})
        self.context.__enter__()
        fig = Figure(figsize=self.size, layout="constrained")
        FigureCanvasAgg(fig)
        return fig

    def __exit__(self, *error):
        return self.context.__exit__(*error)


def _save(fig, path, data: Sequence[Row]) -> dict[str, Path]:
    path = Path(path)
    stem = path.with_suffix("") if path.suffix in (".png", ".svg", ".csv") else path
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = {kind: stem.parent / f"{stem.name}.{kind}" for kind in ("png", "svg", "csv")}
    fig.savefig(files["png"], metadata={"Software": "kvlab"})
    fig.savefig(files["svg"], metadata={"Date": None, "Creator": "kvlab"})  # same data, same bytes
    write_rows(data, files["csv"])
    return files
