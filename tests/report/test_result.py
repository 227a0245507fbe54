"""result.json: what is written is what is read; the hash sees settings and nothing else; provenance never guesses."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab.errors import ConfigError, CorruptFile
from kvlab.report import provenance
from kvlab.report import result as res

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # shared machines stall


def test_a_written_result_reads_back_equal(result, tmp_path):
    files = res.write(result, tmp_path)
    assert res.read(tmp_path) == result == res.read(files["result.json"])
    assert res.read_rows(files["rows.csv"]) == [dict(r) for r in result["rows"]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["result.json", "rows.csv"]  # no temporary left


def test_numpy_values_become_plain_and_nan_becomes_null_with_a_warning(result, tmp_path):
    result["summary"][0] |= {"acc": np.float64(0.5), "acc_n": np.int64(96), "kl_mean": np.float32("nan")}
    result["rows"][0]["value"] = float("inf")
    res.write(result, tmp_path)
    back = res.read(tmp_path)
    assert back["summary"][0]["acc_n"] == 96 and back["summary"][0]["kl_mean"] is None
    assert back["rows"][0]["value"] is None
    assert sorted(back["warnings"]) == [
        "not finite, stored as null: rows[0].value = inf",
        "not finite, stored as null: summary[0].kl_mean = nan",
    ]


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("surprise",), 1, "surprise"),
        (("schema",), 0, "schema"),
        (("rows", 3, "depth"), 101, "rows.3.depth"),
        (("summary", 0, "acc"), 87.5, "summary.0.acc"),  # percent where a share belongs
        (("summary", 0, "family"), "other", "summary.0.family"),
        (("config_hash",), "XYZ", "config_hash"),
        (("rows", 0, "value"), [1], "rows.0.value"),
    ],
)
def test_a_violation_is_named_with_its_place(result, path, value, named):
    node = result
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    with pytest.raises(CorruptFile, match="not a valid result") as error:
        res.validate(result)
    assert named in str(error.value)


def test_a_missing_key_and_a_newer_schema_are_refused(result):
    newer = {**result, "schema": 2}
    with pytest.raises(CorruptFile, match="newer kvlab"):
        res.validate(newer)
    del result["model"]
    with pytest.raises(CorruptFile, match="'model' is a required property"):
        res.validate(result)


def test_every_key_of_the_contract_is_in_the_schema():
    schema = json.loads(res.SCHEMA_FILE.read_text())
    assert set(schema["$defs"]["row"]["properties"]) == set(res.ROW)
    assert set(schema["$defs"]["summary"]["properties"]) == set(res.SUMMARY)
    assert set(schema["required"]) <= set(schema["properties"]) and schema["additionalProperties"] is False


def test_unreadable_files_say_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="no such result file"):
        res.read(tmp_path)
    (tmp_path / "result.json").write_text('{"schema": 1, ')
    with pytest.raises(CorruptFile, match="not JSON"):
        res.read(tmp_path)


def test_a_failed_write_leaves_the_old_file(result, tmp_path, monkeypatch):
    res.write(result, tmp_path)
    before = (tmp_path / "result.json").read_bytes()
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        res.write({**result, "run_id": "other"}, tmp_path)
    assert (tmp_path / "result.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["result.json", "rows.csv"]


def test_an_invalid_result_is_not_written(result, tmp_path):
    with pytest.raises(CorruptFile):
        res.write({**result, "typo": 1}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_row_builders_fill_with_none_and_refuse_typos():
    assert list(res.row(method="m", value=1.0))[: len(res.ROW)] == list(res.ROW)
    assert res.summary_row(method="m")["simulated"] is False
    with pytest.raises(ConfigError, match="valeu"):
        res.row(valeu=1)


# ---- config hash


def test_the_hash_sees_settings_and_not_places():
    base = {
        "method": {"bits_k": 2, "bits_v": 2}, "threads": 2, "model": {"source": "/home/a/models/tiny"},
        "data": {"path": "/home/a/text.txt"}, "paths": {"out": "/x"}, "logger": {"wandb": {"project": "p"}},
        "hydra": {"job": 1}, "runtime": {"device": "cpu", "tiers": {"disk": {"spill_dir": "/tmp/1"}}},
    }  # fmt: skip
    one = res.config_hash(base)
    assert len(one) == 12 and set(one) <= set("0123456789abcdef")
    same = [
        base | {"paths": {"out": "/y"}},
        base | {"logger": None},
        base | {"hydra": {}},
        base | {"runtime": {"device": "cuda:1", "tiers": {"disk": {"spill_dir": "/tmp/2"}}}},
        base | {"model": {"source": "/mnt/b/models/tiny/"}, "data": {"path": "~/text.txt"}},
        dict(reversed(base.items())),
    ]
    assert {res.config_hash(c) for c in same} == {one}
    other = [
        base | {"method": {"bits_k": 3, "bits_v": 2}},
        base | {"method": {"bits_k": 2}},
        base | {"threads": 1},
        base | {"data": {"path": "/home/a/other.txt"}},
        base | {"model": {"source": "/home/a/models/large"}},
    ]
    assert len({one, *(res.config_hash(c) for c in other)}) == len(other) + 1


def test_the_hash_is_pinned():
    """It names folders and joins results of different months: it may not drift."""
    import hashlib

    text = b'{"a":1,"b":[true,null,0.5,"x"],"c":{"d":"inf"}}'
    assert res.config_hash({"c": {"d": float("inf")}, "b": [True, None, 0.5, "x"], "a": 1}) == "120dbadf90cc"
    assert hashlib.sha256(text).hexdigest()[:12] == "120dbadf90cc"


def test_an_omegaconf_node_hashes_like_its_plain_form():
    omegaconf = pytest.importorskip("omegaconf")
    node = omegaconf.OmegaConf.create({"seed": 3, "method": {"seed": "${seed}", "bits": [2, 4]}})
    assert res.config_hash(node) == res.config_hash({"seed": 3, "method": {"seed": 3, "bits": [2, 4]}})


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["", "x", "/a/b", "é"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=8,
)


@CALM
@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), values, max_size=4))
def test_any_config_hashes_the_same_after_a_round_trip_through_json(config):
    assert res.config_hash(config) == res.config_hash(json.loads(json.dumps(config)) if _finite(config) else config)


def _finite(node):
    try:
        json.dumps(node, allow_nan=False)
        return True
    except ValueError:
        return False


def test_what_has_no_canonical_form_is_refused():
    with pytest.raises(ConfigError, match="object"):
        res.config_hash({"x": object()})


# ---- provenance


def test_provenance_fits_the_schema_and_names_this_machine(result):
    found = res.provenance()
    assert found["host"]["cores"] >= 1 and found["packages"]["python"]
    res.validate(result | found)


def git(folder, *args):
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(["git", *who, "-C", str(folder), *args], check=True, capture_output=True, env=env, text=True)


@pytest.fixture
def checkout(tmp_path) -> Path:
    code = tmp_path / "repo" / "kvlab"
    code.mkdir(parents=True)
    (code / "a.py").write_text("x = 1\n")
    git(code.parent, "init", "-q")
    git(code.parent, "add", ".")
    git(code.parent, "commit", "-q", "-m", "one")
    return code


def test_code_version_follows_edits_and_new_files(checkout):
    clean = provenance.code(checkout)
    assert len(clean["git_commit"]) == 40 and clean["dirty"] is False and clean["diff_sha256"] is None
    (checkout / "a.py").write_text("x = 2\n")
    edited = provenance.code(checkout)
    (checkout / "new_method.py").write_text("y = 1\n")
    added = provenance.code(checkout)
    (checkout / "new_method.py").write_text("y = 2\n")
    changed = provenance.code(checkout)
    assert all(c["dirty"] for c in (edited, added, changed))
    assert len({c["diff_sha256"] for c in (edited, added, changed)}) == 3


def test_no_checkout_no_version(tmp_path, checkout):
    unknown = {"git_commit": None, "dirty": None, "diff_sha256": None}
    assert unknown.items() <= provenance.code(tmp_path).items()
    # installed below somebody else's repository: its commit is not our version
    site = checkout.parent / ".venv" / "kvlab"
    site.mkdir(parents=True)
    (checkout.parent / ".gitignore").write_text(".venv\n")
    assert unknown.items() <= provenance.code(site).items()


def test_a_machine_without_git_is_no_error(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.code()["git_commit"] is None
