"""Many results become one table: duplicates fold, settings that look alike are told apart, bad files are named."""

import json

import pytest

from kvlab.errors import ConfigError, CorruptFile
from kvlab.report import combine as comb
from kvlab.report import result as res


def sweep(make, tmp_path, labels, **more):
    """One folder per method, each with its own measurement of the full cache, as a sweep leaves them."""
    for i, label in enumerate(labels):
        res.write(make(["full", label], run_id=f"run-{i}", **more), tmp_path / str(i))
    return tmp_path


def test_a_sweep_becomes_one_table_with_one_full_row(make, tmp_path):
    loaded, bad = comb.load([sweep(make, tmp_path, ["int8 g64", "fp8", "snapkv n256"])])
    out = comb.combine(loaded)
    assert [s["method"] for s in out.summary] == ["full", "fp8", "int8 g64", "snapkv n256"]
    assert not bad and not out.warnings
    in_order = [s["method"] for s in out.summary]
    assert list(dict.fromkeys(r["method"] for r in out.rows)) == in_order == list(out.sources)
    assert out.sources["fp8"].endswith("1/result.json")
    assert "n=96" in out.caption and "SmolLM2" in out.caption


def test_rows_of_the_full_cache_are_not_repeated_per_run(make, tmp_path):
    loaded, _ = comb.load([sweep(make, tmp_path, ["int8 g64", "fp8"])])
    full = [r for r in comb.combine(loaded).rows if r["method"] == "full"]
    assert len(full) == 45


def test_a_repeated_run_replaces_its_older_self(make):
    old, new = make(run_id="old"), make(run_id="new")
    new["finished"] = "2026-02-01T00:00:00+00:00"
    new["summary"][1]["acc"] = 0.5
    out = comb.combine([("new", new), ("old", old)])
    assert [s["method"] for s in out.summary] == ["full", "kivi k2 v2 g32 r128"]
    assert out.summary[1]["acc"] == 0.5 and out.sources["kivi k2 v2 g32 r128"] == "new"


def test_equal_labels_with_other_settings_are_told_apart(make):
    a, b = make(bits=2), make(bits=3)
    b["summary"][1] |= {"acc": 0.5}
    out = comb.combine([("a", a), ("b", b)])
    assert [s["method"] for s in out.summary] == [
        "full", "kivi k2 v2 g32 r128 (bits_k=2)", "kivi k2 v2 g32 r128 (bits_k=3)",
    ]  # fmt: skip
    assert {r["method"] for r in out.rows} == {s["method"] for s in out.summary}


def test_full_rows_that_differ_are_named_by_what_differs_besides_the_method(make):
    a, b = make(["full", "fp8"]), make(["full", "int8 g64"])
    b["config"]["runtime"]["page_size"] = 64
    b["config_hash"] = res.config_hash(b["config"])
    b["summary"][0]["ratio"] = 0.9
    names = [s["method"] for s in comb.combine([("a", a), ("b", b)]).summary]
    assert names[:2] == ["full (page_size=64)", "full (page_size=None)"]


def test_speed_alone_does_not_make_another_full_cache(make):
    a, b = make(["full", "fp8"]), make(["full", "int8 g64"])
    b["summary"][0]["decode_tok_s"] = 1.0
    assert [s["method"] for s in comb.combine([("a", a), ("b", b)]).summary].count("full") == 1


def test_a_mix_of_models_or_protocols_is_warned_about(make):
    a, b = make(["full", "fp8"]), make(["full", "int8 g64"])
    b["model"] |= {"id": "tiny", "weights_sha256": "00"}
    b["protocol"] = "query_aware"
    warnings = comb.combine([("a", a), ("b", b)]).warnings
    assert any("models: SmolLM2-135M-Instruct, tiny" in w for w in warnings) and any("protocols" in w for w in warnings)


def test_bad_files_are_all_named_or_skipped_on_request(make, tmp_path):
    sweep(make, tmp_path, ["fp8"])
    for name, text in {"cut": "{", "old": json.dumps({"schema": 1})}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(text)
    with pytest.raises(CorruptFile) as error:
        comb.load([tmp_path])
    assert "2 of 3 files" in str(error.value) and "cut/result.json" in str(error.value)
    loaded, bad = comb.load([tmp_path], strict=False)
    assert len(loaded) == 1 and len(bad) == 2


def test_nothing_found_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"no result\.json under"):
        comb.load([tmp_path])
    with pytest.raises(CorruptFile, match="no such result file"):
        comb.load([tmp_path / "absent.json"])


def test_the_report_folder_holds_tables_and_pictures(make, tmp_path):
    loaded, _ = comb.load([sweep(make, tmp_path / "runs", ["int8 g64", "fp8", "snapkv n256"])])
    files = comb.write(
        comb.combine(loaded), tmp_path / "report", formats=("md", "csv", "tex"), draw=("pareto", "ledger", "heatmap")
    )
    kinds = ["pareto", "pareto_acc", "ledger", "heatmap"]
    expected = {f"{k}.{e}" for k in kinds for e in ("png", "svg", "csv")}
    assert set(files) == expected | {"rows.csv", "summary.md", "summary.csv", "summary.tex"}
    assert all(p.is_file() for p in files.values())
    text = files["summary.md"].read_text()
    assert "![pareto_acc](pareto_acc.png)" in text and "- fp8: `../runs/1/result.json`" in text


def test_a_plot_without_data_is_a_warning_not_a_failure(make, tmp_path):
    one = make(["full", "kvquant k3 v3"])
    one["summary"] = one["summary"][1:]  # simulated only: no bytes
    out = comb.combine([("a", one)])
    files = comb.write(out, tmp_path)
    assert "summary.md" in files and "ledger.png" not in files
    assert any(w.startswith("ledger not drawn") for w in out.warnings)


def test_unknown_formats_and_plots_list_the_known_ones(make, tmp_path):
    out = comb.combine([("a", make())])
    with pytest.raises(ConfigError, match="md, csv, tex"):
        comb.write(out, tmp_path, formats=["html"])
    with pytest.raises(ConfigError, match="pareto, ledger, heatmap"):
        comb.write(out, tmp_path, draw=["pie"])
