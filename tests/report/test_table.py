"""Same rows, four formats: order, units, signs, and what a narrow terminal gives up."""

import re

import pytest

from kvlab.report import columns as col
from kvlab.report import table
from kvlab.report.result import read_rows


def test_full_comes_first_then_ascending_ratio_and_simulated_last(summary):
    summary[-1]["ratio"] = 1.5  # simulated: whatever it claims, it has no place among real bytes
    shuffled = summary[::-1]
    names = [r["method"] for r in col.order(shuffled)]
    ratios = [r["ratio"] for r in col.order(shuffled) if not r["simulated"]]
    assert names[0] == "full" and names[-1] == "kvquant k3 v3"
    assert ratios == sorted(ratios)


@pytest.mark.parametrize("width", [60, 72, 80, 100, 120, 200])
def test_the_terminal_table_keeps_its_width_and_names_what_it_left_out(summary, width):
    text = table.text(summary, width)
    assert max(map(len, text.splitlines())) <= width
    assert all(r["method"].split()[0] in text for r in summary)
    assert "ratio" in text
    _, lost = col.fit(summary, width)
    assert ("left out at this width" in text) == bool(lost)
    assert (width == 200) == (not lost) or width == 120


def test_hundred_columns_still_show_bytes_accuracy_loss_and_speed(summary):
    head = " ".join(table.text(summary, 100).splitlines()[:2])
    for word in ("ratio", "/elt", "/token", "kept", "acc [95% CI]", "ΔNLL", "KL", "tok/s"):
        assert word in head


def test_the_interval_of_a_difference_is_shown_where_there_is_room(summary):
    summary[4] |= {"acc_delta_low": -0.2, "acc_delta_high": -0.05}
    assert "-13.5 [-20.0, -5.0]" in table.text(summary, 200)
    narrow = table.text(summary, 110)
    assert "-13.5" in narrow and "-20.0" not in narrow


def test_long_names_fold_and_lose_no_letter(summary):
    summary[1]["method"] = "pyramidkv_with_a_very_long_name n256 + turboquant k3 v3 rht prod"
    text = table.text(summary, 100)
    assert max(map(len, text.splitlines())) <= 100
    folded = "".join(line[: col.NAME_WIDTH].replace(" ", "") for line in text.splitlines())
    assert summary[1]["method"].replace(" ", "") in folded


def test_numbers_read_in_human_units(summary):
    line = next(x for x in table.text(summary, 200).splitlines() if x.startswith("kivi k2"))
    assert re.split(r"\s{2,}", line.strip()) == [
        "kivi k2 v2 g32 r128", "4.20", "3.81", "5,490", "1.00", "74.0 [64.4, 81.7]", "-13.5", "+0.0874", "9.463",
        "0.0713", "0.856", "88.4", "812", "30.3", "11.7",
    ]  # fmt: skip


def test_missing_is_a_dash_zero_is_zero_and_tiny_keeps_its_digits():
    assert [col.number(v, 4) for v in (None, float("nan"), 0, 4.2e-5, 1234.5)] == [
        "-",
        "-",
        "0",
        "4.2e-5",
        "1,234.5000",
    ]
    assert col.number(-3e-6, 4, sign=True) == "-3.0e-6"
    assert col.mebibytes(1.5 * 2**20) == "1.5"


def test_a_simulated_row_has_a_tilde_and_no_bytes_even_if_it_brings_some(summary):
    row = next(r for r in summary if r["simulated"])
    row |= {"ratio": 5.3, "bytes_per_token": 4320, "peak_bytes": 2**20, "physical": 2**21}
    line = next(x for x in table.text(summary, 200).splitlines() if x.startswith("~kvquant"))
    cells = re.split(r"\s{2,}", line.strip())
    assert cells[:4] == ["~kvquant k3 v3", "-", "~3.25", "-"] and cells[-1] == "-"


def test_parentheses_where_the_full_cache_itself_fails(summary):
    text = table.text(summary, 200)
    assert "(" not in text.replace("(s)", "")
    for r in summary:
        r["acc"] /= 2
    text = table.text(summary, 200)
    full = next(x for x in text.splitlines() if x.startswith("full"))
    int4 = next(x for x in text.splitlines() if x.startswith("int4"))
    assert "(" not in full and "(39.6 [" in int4 and "(-8.3)" in int4
    assert "full cache itself scores 43.8 %" in text


def test_the_reference_is_implied_where_no_full_row_is_there(summary):
    rows = [r for r in summary if r["family"] != "full"]
    assert col.reference_accuracy(rows) == pytest.approx(84 / 96)


def test_bold_needs_an_interval_above_the_next_best(summary):
    assert col.best_accuracy(summary) is None and "**" not in table.markdown(summary)
    clear = [dict(r) for r in summary[:3]]
    clear[1] |= {"acc": 0.9, "acc_low": 0.85}
    clear[2] |= {"acc": 0.8, "acc_low": 0.75}
    assert col.best_accuracy(clear) == 1
    assert table.markdown(clear).count("**") == 2 and table.latex(clear).count(r"\textbf") == 1


def test_n_is_a_column_only_where_it_differs(summary):
    assert "n" not in [c.head for c in col.applicable(summary)]
    summary[3]["acc_n"] = 12
    assert "n" in [c.head for c in col.applicable(summary)]


def test_columns_without_any_value_are_not_there(summary):
    for r in summary:
        r |= dict.fromkeys(("acc", "acc_low", "acc_high", "acc_n", "acc_delta"))
    heads = [c.key for c in col.applicable(summary)]
    assert "acc" not in heads and "acc_delta" not in heads and "delta_nll" in heads


def test_markdown_is_a_pipe_table_with_equal_cells_per_line(summary):
    summary[1]["method"] = "int8 a|b"
    lines = [x for x in table.markdown(summary, "title").splitlines() if x.startswith("|")]
    cells = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
    assert len(lines) == len(summary) + 2 and len(cells) == 1
    assert r"int8 a\|b" in "\n".join(lines)
    assert r"\~kvquant" in lines[-1]


def test_latex_is_balanced_escaped_booktabs(summary):
    summary[3]["note"] = "50 % of {x} & y_z \\ #1 ^2 $"
    tex = table.latex(summary, "A_B")
    body = [x for x in tex.splitlines() if x.endswith(r"\\")]
    assert len(body) == len(summary) + 1
    assert len({len(re.findall(r"(?<!\\)&", line)) for line in body}) == 1
    bare = re.sub(r"\\[{}]", "", tex)
    assert bare.count("{") == bare.count("}")
    assert len(re.findall(r"(?<!\\)\$", tex)) % 2 == 0
    assert r"\toprule" in tex and r"\bottomrule" in tex and r"streaming\_llm" in tex and "$-$13.5" in tex
    assert r"50 \% of \{x\} \& y\_z \textbackslash{} \#1 \textasciicircum{}2 \$" in tex


def test_csv_holds_raw_values_in_table_order(summary, tmp_path):
    rows = read_rows(table.csv(summary[::-1], tmp_path / "summary.csv"))
    assert [r["method"] for r in rows] == [r["method"] for r in col.order(summary[::-1])]
    kivi = next(r for r in rows if r["method"] == "kivi k2 v2 g32 r128")
    assert kivi["bytes_per_token"] == 5490 and kivi["acc"] == 71 / 96 and kivi["simulated"] is False


def test_caption_and_last_line_name_what_was_measured(result):
    assert table.caption(result) == (
        "model SmolLM2-135M-Instruct  dtype float32  ref float16  task needle,ppl  protocol query_agnostic  "
        "length 512,1024,2048  chunk 64  n=96  seed 0,1"
    )
    line = table.provenance_line(result, "out/result.json")
    assert line == f"wrote out/result.json   (config {result['config_hash']}, commit 1a2b3c4, dirty)"


def test_show_prints_caption_table_and_path(result):
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    table.show(result, "x/result.json", Console(file=out, width=100))
    assert "model SmolLM2" in out.getvalue() and "wrote x/result.json" in out.getvalue()


def test_no_rows_is_no_crash():
    assert table.text([]).strip() == "no rows"
    assert table.markdown([]) == "no rows\n"
