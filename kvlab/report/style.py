"""How our figures look: one colour per method name, one marker per family, fixed rcParams.

Colours agree across figures and papers because they hang on the name, never on the order of the rows. The palette is
Okabe and Ito (2008) without yellow, which is unreadable on white, then the darker half of Paul Tol's "muted" set;
both were made for colour-blind readers. There are more methods than tellable colours: within a family neighbours
differ, and every point is labelled anyway.
"""

from __future__ import annotations

import hashlib
import re

BLUE, ORANGE, GREEN, RED, PINK, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
INDIGO, WINE, FOREST, OLIVE, PURPLE, TEAL = "#332288", "#882255", "#117733", "#999933", "#AA4499", "#44AA99"
BLACK, GREY, PALE = "#000000", "#666666", "#BBBBBB"
PALETTE = (BLUE, RED, GREEN, ORANGE, PINK, SKY, INDIGO, WINE, FOREST, OLIVE, PURPLE, TEAL)

METHOD_COLOR = {
    "full": BLACK,
    # quantizers
    "fp8": TEAL, "int8": SKY, "int4": BLUE, "kivi": RED, "kvquant": PINK, "turboquant": GREEN, "qjl": ORANGE,
    "polarquant": WINE,
    # pruners
    "streaming_llm": OLIVE, "h2o": ORANGE, "scissorhands": PINK, "snapkv": INDIGO, "pyramidkv": SKY,
    "pyramidinfer": TEAL, "tova": WINE, "paged_eviction": PURPLE, "adakv": BLUE, "rkv": FOREST, "knorm": RED,
    "keydiff": GREEN, "expected_attention": OLIVE, "random": PALE, "recency": GREY, "triattention": RED,
    "attention_matching": PURPLE,
    # latents and sharing
    "mla": BLUE, "palu": GREEN, "joint_latent": TEAL, "mha2mla": SKY, "gqa": ORANGE, "mqa": RED,
    "learned_latent": FOREST, "kv_share": PINK, "cross_layer": PURPLE,
}  # fmt: skip
MARKER = {"full": "*", "quantizer": "o", "pruner": "s", "pipeline": "D"}
LEDGER_COLOR = {
    "payload": BLUE, "metadata": ORANGE, "residual": GREEN, "tables": PINK, "fragmentation": PALE,
}  # fmt: skip

RC = {
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 9, "legend.fontsize": 8,
    "xtick.labelsize": 8, "ytick.labelsize": 8, "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.8, "axes.axisbelow": True, "grid.color": "#E6E6E6", "grid.linewidth": 0.6,
    "lines.linewidth": 1.2, "lines.markersize": 6, "figure.dpi": 200, "savefig.dpi": "figure",
    "savefig.facecolor": "white", "svg.hashsalt": "kvlab", "svg.fonttype": "path", "legend.frameon": False,
}  # fmt: skip


def stages(label: str) -> list[str]:
    """Names in a label, without their settings: `snapkv n256 + kivi k2 v2` -> [snapkv, kivi]."""
    return [part.split()[0].lstrip("~") for part in re.split(r"\s*[+|>→]\s*", label) if part.split()]


def line_key(label: str) -> str:
    """What one line joins: names and worded options, without numbers. `turboquant prod k4` -> `turboquant prod`."""
    return " ".join(w for w in label.lstrip("~").split() if not re.search(r"\d", w) or w in METHOD_COLOR)


def color(label: str) -> str:
    """The colour of a method or, for unknown names and pipelines, a stable one derived from the names."""
    names = stages(label)
    if len(names) == 1 and names[0] in METHOD_COLOR:
        return METHOD_COLOR[names[0]]
    digest = hashlib.sha256("+".join(names).encode()).digest()
    return PALETTE[digest[0] % len(PALETTE)]


def darker(color: str, by: float = 0.3) -> str:
    """The same hue for text, which needs more contrast on white than an area does."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p * (1 - by)):02X}" for p in parts)
