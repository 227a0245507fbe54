"""Figures: the data behind them, the files they leave, and that no label lies on another. No pixels are compared."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import ConfigError
from kvlab.report import labels, plots, points, style
from kvlab.report.result import LEDGER, read_rows, row


def by_name(pts):
    return {p["method"]: p for p in pts}


def test_tradeoff_points_hold_bytes_loss_and_who_is_not_dominated(summary):
    pts = by_name(points.tradeoff(summary))
    front = {n for n, p in pts.items() if p["front"]}
    assert front == {
        "full", "int8 g64", "kivi k4 v4 g32 r128", "turboquant k4 v4", "turboquant k3 v3", "turboquant k2 v2",
        "snapkv n256", "snapkv n256 + kivi k2 v2",
    }  # fmt: skip
    assert pts["kivi k2 v2 g32 r128"]["bytes_per_token"] == 5490 and pts["kivi k2 v2 g32 r128"]["y"] == 0.0874


def test_accuracy_is_maximised_in_percent_with_its_interval(summary):
    pts = by_name(points.tradeoff(summary, "acc"))
    assert pts["int8 g64"]["front"] and not pts["full"]["front"]  # equal accuracy at half the bytes
    assert pts["int8 g64"]["y"] == pytest.approx(87.5)
    assert pts["int8 g64"]["low"] == pytest.approx(100 * summary[1]["acc_low"])


def test_simulated_rows_and_rows_without_bytes_stay_out_and_say_why(summary):
    summary[-1] |= {"bytes_per_token": 10, "ratio": 2304.0}
    summary[3]["delta_nll"] = float("nan")
    summary[4]["bytes_per_token"] = None
    pts = by_name(points.tradeoff(summary))
    assert pts["kvquant k3 v3"]["left_out"].startswith("simulated") and pts["kvquant k3 v3"]["bytes_per_token"] is None
    assert pts["int4 g64"]["left_out"] == "no delta_nll"
    assert pts["kivi k2 v2 g32 r128"]["left_out"] == "no bytes_per_token"
    assert not any(pts[n]["front"] for n in ("kvquant k3 v3", "int4 g64", "kivi k2 v2 g32 r128"))


def test_the_axis_is_chosen_by_what_the_methods_have(summary):
    assert points.pick_y(summary) == "delta_nll"
    for r in summary[1:]:
        r["delta_nll"] = None
    assert points.pick_y(summary) == "acc"
    with pytest.raises(ConfigError, match="bleu"):
        points.pick_y(summary, "bleu")
    with pytest.raises(ConfigError, match="task=fidelity"):
        points.pick_y([{"method": "full", "family": "full", "delta_nll": 0.0}])


@pytest.mark.parametrize("y", ["delta_nll", "acc"])
def test_pareto_writes_png_svg_and_the_points(summary, tmp_path, y):
    files = plots.pareto(summary, tmp_path / "fig" / "pareto_f0.25", y)
    assert sorted(p.name for p in files.values()) == ["pareto_f0.25.csv", "pareto_f0.25.png", "pareto_f0.25.svg"]
    assert files["png"].read_bytes()[:4] == b"\x89PNG" and b"<svg" in files["svg"].read_bytes()
    rows = read_rows(files["csv"])
    assert {r["method"] for r in rows} == {s["method"] for s in summary}
    assert [r["front"] for r in rows] == [p["front"] for p in points.tradeoff(summary, y)]


def test_the_same_data_gives_the_same_svg(summary, tmp_path):
    a = plots.pareto(summary, tmp_path / "a.svg")["svg"].read_bytes()
    assert a == plots.pareto(summary, tmp_path / "b.svg")["svg"].read_bytes()


@pytest.mark.parametrize("keep", [[0], [0, 1], [3], [0, -1, 5]])
def test_a_plot_of_few_points_is_still_a_plot(summary, tmp_path, keep):
    rows = [summary[i] for i in keep]
    if keep == [0]:
        with pytest.raises(ConfigError, match="no compressed method"):
            plots.pareto(rows, tmp_path / "p")
    else:
        assert plots.pareto(rows, tmp_path / "p")["png"].stat().st_size > 1000


def test_a_figure_leaves_no_global_state_and_no_gui(tmp_path):
    code = (
        "import sys, matplotlib; before = matplotlib.rcParams.copy()\n"
        "from kvlab.report import plots\n"
        "plots.ledger([dict(method='m', family='full', simulated=False, ratio=1.0, payload=9, tokens_seen=3)], 'x')\n"
        "assert matplotlib.rcParams.copy() == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'tkinter' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=_env())
    assert done.returncode == 0, done.stderr


def test_importing_the_packages_loads_no_heavy_library():
    folder = Path(plots.__file__).parent
    modules = sorted(p.stem for p in folder.glob("*.py") if p.stem != "__init__")
    heavy = {"matplotlib", "scipy", "wandb", "torch", "rich", "jsonschema", "pandas"}
    code = f"import sys, kvlab.track; from kvlab.report import {', '.join(modules)}\n"
    code += f"found = {heavy} & set(sys.modules); assert not found, found"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_env())
    assert done.returncode == 0, done.stderr


def _env():
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_ledger_bars_add_up_to_physical_bytes_per_token(summary, tmp_path):
    bars, unit = points.ledger(summary)
    assert unit == "bytes per token" and "kvquant k3 v3" not in {b["method"] for b in bars}
    for bar in bars:
        source = next(s for s in summary if s["method"] == bar["method"])
        assert bar["total"] == pytest.approx(source["physical"] / source["tokens_seen"])
    rows = read_rows(plots.ledger(summary, tmp_path / "ledger")["csv"])
    assert [r["payload"] for r in rows] == pytest.approx([b["payload"] for b in bars])


def test_ledger_falls_back_to_mebibytes_where_tokens_are_unknown(summary):
    summary[2]["tokens_seen"] = None
    bars, unit = points.ledger(summary)
    assert unit == "MiB"
    assert bars[0]["total"] == pytest.approx(sum(summary[0][k] for k in LEDGER) / 2**20)


def test_heatmap_cells_are_means_over_seeds_in_percent(tmp_path):
    rows = [
        row(method="m", family="pruner", task="needle", metric="s", value=v, n=n, length=x, depth=d, seed=s)
        for (v, n, x, d, s) in [(1.0, 1, 512, 0, 0), (0.0, 3, 512, 0, 1), (0.5, 1, 512, 50, 0), (0.25, 1, 1024, 0, 0)]
    ]
    panel = points.grid(rows)["m"]
    assert (panel["lengths"], panel["depths"]) == ([512, 1024], [0, 50])
    assert panel["cells"] == [[25.0, 25.0], [50.0, None]]  # rows: depth
    data = read_rows(plots.heatmap(rows, tmp_path / "h", title="t")["csv"])
    assert [r["percent"] for r in data] == [25, 25, 50, None]


def test_heatmap_draws_many_methods_and_refuses_a_mix_of_metrics(make, tmp_path):
    rows = make(["full", "int8 g64", "fp8", "int4 g64", "h2o f0.25", "snapkv n256", "turboquant k2 v2"])["rows"]
    assert plots.heatmap(rows, tmp_path / "h", metric="string_match")["png"].stat().st_size > 1000
    other = [{**r, "metric": "exact"} for r in rows]
    with pytest.raises(ConfigError, match="task=needle metric=exact"):
        points.grid(rows + other)
    with pytest.raises(ConfigError, match="no row with length and depth"):
        points.grid([])


def test_colours_hang_on_names_not_on_order_or_settings():
    assert style.color("kivi k2 v2") == style.color("kivi k4 v4 g32") == style.color("~kivi")
    assert style.color("never seen 3") == style.color("never 7")
    assert style.stages("snapkv n256 + kivi k2 v2") == ["snapkv", "kivi"]
    assert style.line_key("turboquant prod k4 v4") == "turboquant prod"
    assert style.line_key("int8 g64") == "int8" and style.line_key("h2o f0.25") == "h2o"


def test_neighbours_in_a_family_are_told_apart():
    quantizers = ["fp8", "int8", "int4", "kivi", "kvquant", "turboquant", "qjl", "polarquant"]
    assert len({style.color(q) for q in quantizers}) == len(quantizers)


# ---- labels: the layout is data, too


def check_layout(anchors, sizes, frame, boxes):
    clash = labels.overlap(boxes, boxes)
    np.fill_diagonal(clash, 0)
    assert clash.max(initial=0) == 0, "two labels lie on each other"
    assert (boxes[:, :2] >= frame[:2]).all() and (boxes[:, 2:] <= frame[2:]).all(), "a label leaves the frame"
    inside = (anchors[None] > boxes[:, None, :2]) & (anchors[None] < boxes[:, None, 2:])
    assert not inside.all(-1).any(), "a label hides a point"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([40.0, 120.0, 500.0]))
def test_a_dozen_labels_never_overlap_even_when_points_crowd(seed, n, spread):
    rng = np.random.default_rng(seed)
    frame = np.array([0.0, 0.0, 1200.0, 650.0])
    anchors = rng.uniform(-spread / 2, spread / 2, (n, 2)) * [1.0, 0.5] + [600, 325]
    sizes = np.stack([rng.uniform(60, 220, n), np.full(n, 21.0)], 1)
    check_layout(anchors, sizes, frame, labels.place(anchors, sizes, frame, 11.0))


def test_labels_at_the_edge_stay_in_the_frame():
    frame = np.array([0.0, 0.0, 600.0, 400.0])
    anchors = np.array([[5.0, 5.0], [595.0, 395.0], [595.0, 5.0], [5.0, 395.0]])
    sizes = np.tile([180.0, 20.0], (4, 1))
    check_layout(anchors, sizes, frame, labels.place(anchors, sizes, frame, 8.0))


def test_no_labels_is_no_crash():
    assert labels.place([], [], (0, 0, 1, 1)).shape == (0, 4)
