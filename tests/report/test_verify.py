"""verify: exact for counts, bytes and generations; 1e-4 for losses; machine times are not compared."""

import copy

import pytest

from kvlab.report.verify import SKIPPED, VerificationFailed, verify


def again(result, **changes):
    """A rerun that returns `result` with dotted keys changed."""

    def rerun(config):
        assert config == result["config"]
        out = copy.deepcopy(result)
        for path, value in changes.items():
            node = out
            *parents, last = [int(p) if p.isdigit() else p for p in path.split("__")]
            for part in parents:
                node = node[part]
            node[last] = value(node[last]) if callable(value) else value
        return out

    return rerun


def fields(error):
    return [d["field"] for d in error.value.differences]


def test_equal_runs_verify(result):
    report = verify(result, again(result))
    assert report["checked"] > 100 and report["notes"] == []
    assert report["skipped"] == ["decode_tok_s", "prefill_tok_s"]


def test_times_may_differ_and_losses_move_a_little(result):
    verify(result, again(result, summary__0__decode_tok_s=1.0, rows__44__value=lambda v: v * (1 + 9e-5)))
    verify(result, again(result, summary__1__kl_mean=lambda v: v * (1 + 9e-5), summary__1__ppl=lambda v: v * 1.0004))


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("rows__44__value", lambda v: v * (1 + 2e-4), "metric=nll"),
        ("rows__0__value", lambda v: v - 0.25, "metric=string_match length=512 depth=0 seed=0"),
        ("rows__0__n", 5, ".n"),
        ("rows__0__simulated", True, ".simulated"),
        ("summary__1__physical", lambda v: v + 1, "summary[kivi k2 v2 g32 r128].physical"),
        ("summary__1__kl_mean", lambda v: v * 1.001, "kl_mean"),
        ("summary__1__acc", lambda v: v + 1 / 96, "acc"),
        ("summary__1__method", "kivi k3", "summary[kivi k2 v2 g32 r128]"),
        ("ledger__physical", 1, "ledger.physical"),
        ("config_hash", "0" * 12, "config_hash"),
        ("model__weights_sha256", "00", "model.weights_sha256"),
        ("data__0__sha256", "00", "data.needle.sha256"),
        ("rows__3__value", None, "value"),
    ],
)
def test_a_change_is_found_and_named(result, path, value, field):
    with pytest.raises(VerificationFailed) as error:
        verify(result, again(result, **{path: value}))
    assert any(field in f for f in fields(error)), fields(error)
    assert field.strip(".") in str(error.value) and error.value.exit_code == 4


def test_generated_samples_are_compared_by_their_hash(result):
    result["samples"] = {"file": "samples.jsonl", "sha256": "aa", "n": 3}
    verify(result, again(result))
    with pytest.raises(VerificationFailed) as error:
        verify(result, again(result, samples={"file": "samples.jsonl", "sha256": "bb", "n": 3}))
    assert fields(error) == ["samples.sha256"]


def test_missing_and_extra_rows_are_differences(result):
    def rerun(config):
        out = copy.deepcopy(result)
        out["rows"][0]["depth"] = 5
        return out

    with pytest.raises(VerificationFailed) as error:
        verify(result, rerun)
    assert len(fields(error)) == 2


def test_kl_of_a_good_method_may_be_noise(result):
    result["summary"][1]["kl_mean"] = 2e-8
    verify(result, again(result, summary__1__kl_mean=5e-8))


def test_one_byte_of_terabytes_is_still_a_difference(result):
    result["ledger"]["physical"] = 2**45
    with pytest.raises(VerificationFailed):
        verify(result, again(result, ledger__physical=2**45 + 1))


def test_other_code_is_a_note_that_explains_a_failure(result):
    changed = {"code__git_commit": "f" * 40, "packages__torch": "2.14.0", "threads": 4}
    assert len(verify(result, again(result, **changed))["notes"]) == 3
    with pytest.raises(VerificationFailed, match=r"torch: 2\.13\.0 then, 2\.14\.0 now"):
        verify(result, again(result, **changed, rows__0__n=5))


def test_metrics_with_intervals_take_the_tolerance_of_their_name(result):
    result["metrics"] = {"nll": {"value": 2.0, "n": 8, "ci_low": 1.9, "ci_high": 2.1}, "ttft_ms": 5.0}
    verify(result, again(result, metrics__nll__value=2.0001, metrics__ttft_ms=9.0))
    with pytest.raises(VerificationFailed):
        verify(result, again(result, metrics__nll__n=9))


def test_only_machine_times_are_skipped():
    names = ["decode_tok_s", "itl_p95_ms", "ttft_ms", "compress_ms_total", "wall_s", "process_peak"]
    assert all(SKIPPED.fullmatch(n) for n in names)
    kept = ["peak_bytes", "temporary_peak", "acc", "top1", "nll", "sentiment", "greedy_match_len", "static"]
    assert not any(SKIPPED.fullmatch(n) for n in kept)
