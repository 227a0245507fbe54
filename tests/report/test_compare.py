"""Paired differences: documents where there are any, cells else; nothing incomparable is paired in silence."""

import json
import random

import pytest

from kvlab.errors import ConfigError, CorruptFile
from kvlab.report import compare as cmp


def find(comparison, metric, **more):
    rows = [r for r in comparison["rows"] if r["metric"] == metric and all(r[k] == v for k, v in more.items())]
    assert len(rows) == 1, rows
    return rows[0]


def docs(method, scores, metric="string_match", task="needle", **more):
    return [
        {"method": method, "task": task, "metric": metric, "doc": i, "value": v, "seed": 0, **more}
        for i, v in enumerate(scores)
    ]


def test_a_result_against_itself_differs_by_zero(result):
    out = cmp.compare(result, result)
    assert all(r["diff"] == 0 for r in out["rows"]) and not out["config_diff"] and not out["warnings"]
    assert find(out, "string_match")["n"] == 44 and find(out, "string_match")["low"] == 0


def test_cells_are_paired_and_weighted_by_their_documents(make):
    a, b = make(), make(run_id="run-b", shift=0.05)
    row = find(cmp.compare(a, b), "string_match")
    assert row["unit"] == "cells" and row["n"] == 44
    assert row["diff"] == pytest.approx(-0.05) and row["low"] == pytest.approx(-0.05)
    # the loss has one cell: a difference, no interval
    loss = find(cmp.compare(a, b), "nll")
    assert loss["diff"] == pytest.approx(0.05) and loss["low"] is None and "too few" in loss["note"]
    assert loss["chunk"] == 64


def test_documents_are_preferred_and_bring_interval_and_mcnemar(result):
    rng = random.Random(0)
    base = [float(rng.random() < 0.8) for _ in range(96)]
    worse = [v if rng.random() < 0.8 else 0.0 for v in base]
    name = "kivi k2 v2 g32 r128"
    out = cmp.compare(result, result, docs(name, base), docs(name, worse)[::-1])  # order must not matter
    row = find(out, "string_match", unit="documents")
    assert row["n"] == 96 and row["diff"] == pytest.approx((sum(worse) - sum(base)) / 96)
    assert row["low"] < row["diff"] < row["high"] < 0 and row["p"] < 1e-3


def test_documents_of_a_loss_weigh_by_tokens_and_have_no_mcnemar(result):
    name = "kivi k2 v2 g32 r128"
    one = [{**d, "count": 100 * (d["doc"] + 1)} for d in docs(name, [2.0] * 10, "nll", "ppl", chunk=64)]
    two = [{**d, "value": 2.0 + d["doc"]} for d in one]
    row = find(cmp.compare(result, result, one, two), "nll")
    weights = [100 * (i + 1) for i in range(10)]
    assert row["diff"] == pytest.approx(sum(i * w for i, w in enumerate(weights)) / sum(weights)) and row["p"] is None


def test_cells_have_no_mcnemar_even_when_all_are_right_or_wrong(make):
    a = make()
    a["rows"] = [{**r, "value": float(i % 2), "n": 1, "seed": s} for i, r in enumerate(a["rows"]) for s in (0, 1, 2, 3)]
    a["rows"] = list({tuple(r[k] for k in ("method", *cmp.CELL)): r for r in a["rows"]}.values())
    row = find(cmp.compare(a, a), "string_match")
    assert row["n"] >= 50 and row["p"] is None


def test_what_only_one_side_has_is_counted_not_guessed(make):
    a, b = make(), make()
    b["rows"] = [r for r in b["rows"] if r["depth"] != 50]
    row = find(cmp.compare(a, b), "string_match")
    assert row["n"] == 40 and row["note"] == "4 only in a"


def test_other_chunk_sizes_are_never_paired(make):
    a, b = make(), make()
    for r in b["rows"]:
        if r["chunk"]:
            r["chunk"] = 16
    rows = [r for r in cmp.compare(a, b)["rows"] if r["metric"] == "nll"]
    assert [(r["chunk"], r["n"], r["diff"]) for r in rows] == [(64, 0, None), (16, 0, None)]
    assert all("no pairs" in r["note"] for r in rows)


def test_bytes_are_exact_and_simulated_bytes_are_none(make):
    a, b = make(["full", "int4 g64"]), make(["full", "kvquant k3 v3"])
    row = find(cmp.compare(make(["full", "int8 g64"]), a, methods=("int8 g64", "int4 g64")), "bytes_per_token")
    assert row["diff"] == 6480 - 11880 and row["low"] is None and row["unit"] == "exact"
    metrics = {r["metric"] for r in cmp.compare(a, b)["rows"]}
    assert "bytes_per_token" not in metrics and "kept" in metrics


def test_methods_are_paired_by_label_else_one_with_one(make):
    assert cmp.pair_methods(make(["full", "fp8"]), make(["full", "int8 g64"])) == [("fp8", "int8 g64")]
    assert cmp.pair_methods(make(["full", "fp8", "int4 g64"]), make(["full", "fp8"])) == [("fp8", "fp8")]
    assert cmp.pair_methods(make(["full"]), make(["full", "fp8"])) == [("full", "fp8")]
    with pytest.raises(ConfigError, match="more than one to choose from"):
        cmp.pair_methods(make(["fp8", "int4 g64"]), make(["int8 g64"]))


def test_differences_besides_the_method_are_warned_about(make):
    a, b = make(bits=2), make(bits=3)
    b["model"] |= {"weights_sha256": "00"}
    b["data"][0]["sha256"] = "cc"
    b["code"] |= {"git_commit": "other"}
    out = cmp.compare(a, b)
    assert out["config_diff"] == [{"key": "method.bits_k", "a": 2, "b": 3}]
    assert [w.split(" differ")[0] for w in out["warnings"]] == ["model weights", "code commit", "data of needle"]


def test_duplicate_rows_are_refused(result):
    result["rows"].append(dict(result["rows"][-1]))
    with pytest.raises(ConfigError, match="two values"):
        cmp.compare(result, result)


def test_documents_come_from_the_file_next_to_the_result(result, tmp_path):
    assert cmp.documents(result, tmp_path) is None
    records = [*docs("full", [1.0, 0.0]), {"summary": "not a document"}]
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    result["per_request"] = "requests.jsonl"
    assert cmp.documents(result, tmp_path) == records[:2]
    result["per_request"] = {"file": "requests.jsonl", "sha256": None, "n": 2}
    assert len(cmp.documents(result, tmp_path)) == 2
    (tmp_path / "requests.jsonl").write_text("{")
    with pytest.raises(CorruptFile, match="JSON object a line"):
        cmp.documents(result, tmp_path)


def test_the_text_shows_intervals_config_and_warnings(make):
    a, b = make(bits=2), make(bits=3, shift=0.05)
    b["model"] |= {"dtype": "float16"}
    text = cmp.markdown(cmp.compare(a, b))
    assert "- method.bits_k: 2 -> 3" in text and "WARNING model dtype differ" in text
    assert "-0.05 [-0.05, -0.05]" in text and "nll@64" in text
