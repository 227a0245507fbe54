"""Trackers: what they write, that they never fail a run, and that a wrong config fails before one starts."""

import json
import logging
import math
import os
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from kvlab import track
from kvlab.errors import ConfigError
from kvlab.track import wandb as wandb_tracker
from kvlab.track.jsonl import Jsonl
from kvlab.track.many import Many

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    return track.Run(
        id="r1", folder=tmp_path / "out", method="kivi k2 v2", family="quantizer", task="needle", recipe="kivi_t3",
        protocol="query_agnostic", config_hash="3f2a91c4d0be", config={"seed": 0, "method": {"bits_k": 2}},
        provenance={"code": {"git_commit": None}},
    )  # fmt: skip


def lines(run, name="events.jsonl"):
    return [json.loads(x) for x in (run.folder / name).read_text().splitlines()]


def test_a_run_is_named_and_tagged_by_what_it_is(run):
    assert run.name == "kivi k2 v2-3f2a91c4"
    assert run.tags == ["quantizer", "needle", "query_agnostic"]


def test_jsonl_writes_every_event_in_order_and_at_once(run):
    tracker = Jsonl()
    tracker.start(run)
    tracker.log({"eval/ppl/nll": np.float32(2.5), "x": math.nan}, step=64)
    assert len(lines(run)) == 2  # readable before finish
    tracker.table("rows", [{"method": "m", "value": np.int64(3)}])
    tracker.artifact(run.folder / "result.json", "kvlab-result")
    tracker.finish()
    tracker.finish()  # twice is once
    events = lines(run)
    assert [e["event"] for e in events] == ["start", "log", "table", "artifact", "finish"]
    assert events[0]["config"] == {"seed": 0, "method": {"bits_k": 2}} and events[0]["group"] == "kivi_t3"
    assert events[1]["metrics"] == {"eval/ppl/nll": 2.5, "x": "nan"} and events[1]["step"] == 64
    assert events[2]["rows"] == [{"method": "m", "value": 3}]
    assert events[3]["path"] == "result.json"


def test_summary_rows_get_tracker_keys_without_nulls_and_words():
    summary = {
        "method": "m", "family": "full", "ratio": 4.0, "payload": 7, "acc": 0.5, "nll": None, "decode_tok_s": 9.0,
        "simulated": False, "tokens_seen": 10, "note": "x",
    }  # fmt: skip
    assert track.keyed(summary, "needle") == {
        "memory/ratio": 4.0, "memory/payload": 7, "eval/needle/acc": 0.5, "speed/decode_tok_s": 9.0,
    }  # fmt: skip


class Broken:
    def __init__(self, bad=("start", "log", "table", "artifact", "finish")):
        self.bad, self.calls = bad, []

    def __getattr__(self, verb):
        def call(*args):
            self.calls.append(verb)
            if verb in self.bad:
                raise OSError(f"no network for {verb}")

        return call


def use(tracker, run):
    tracker.start(run)
    for i in range(5):
        tracker.log({"x": i}, i)
    tracker.table("rows", [])
    tracker.artifact("a", "b")
    tracker.finish()


def test_a_failing_tracker_is_warned_about_once_and_the_others_go_on(run, caplog):
    broken = Broken(bad=("log", "table"))
    with caplog.at_level(logging.WARNING, "kvlab.track"):
        use(Many([broken, Jsonl()]), run)
    assert [r.getMessage() for r in caplog.records] == [
        "tracker broken: log failed (OSError: no network for log); the run goes on, its results are in the run's folder"
    ]
    assert broken.calls[-1] == "finish" and lines(run)[-1]["event"] == "finish"


def test_a_tracker_that_cannot_start_is_left_alone(run, caplog):
    broken = Broken()
    use(Many([broken, Jsonl()]), run)
    assert broken.calls == ["start"] and len(caplog.records) == 1


def test_ctrl_c_is_not_swallowed(run):
    broken = Broken()
    broken.start = lambda run: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        Many([broken]).start(run)


def test_an_unwritable_folder_does_not_fail_a_run(run, tmp_path, caplog):
    (tmp_path / "out").write_text("a file where the folder should be")
    use(track.make({}), run)
    assert "tracker jsonl: start failed" in caplog.text


def test_make_always_has_jsonl_and_refuses_unknown_names_and_options():
    for config in (None, {}, {"jsonl": None}, {"jsonl": {"file": "e.jsonl"}}):
        assert [type(t) for t in track.make(config).trackers] == [Jsonl]
    assert track.make({"jsonl": {"file": "e.jsonl"}}).trackers[0].file == "e.jsonl"
    with pytest.raises(ConfigError, match="Did you mean wandb"):
        track.make({"wandbb": {}})
    with pytest.raises(ConfigError, match=r"unknown options.*'projct'.*known: project"):
        track.make({"wandb": {"projct": "x"}})


def test_a_missing_wandb_is_an_error_with_the_extra_before_the_run(monkeypatch):
    monkeypatch.setattr(wandb_tracker.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install kvlab\[wandb\]"):
        track.make({"wandb": {}})


# ---- wandb, with a stand-in that records the calls


@pytest.fixture
def fake(monkeypatch):
    class Fake(types.ModuleType):
        def __init__(self):
            super().__init__("wandb")
            self.__spec__ = ModuleSpec("wandb", None)
            self.init_args, self.logged, self.artifacts, self.summary, self.defined = {}, [], [], {}, []
            self.finished = 0

        def init(self, **kwargs):
            self.init_args = kwargs
            return self

        def Settings(self, **kwargs):
            return kwargs

        def define_metric(self, *args, **kwargs):
            self.defined.append((args, kwargs))

        def log(self, values):
            self.logged.append(values)

        def Table(self, columns, data, allow_mixed_types):
            return {"columns": columns, "data": data}

        def Artifact(self, name, type, metadata):
            item = types.SimpleNamespace(name=name, type=type, files=[])
            item.add_file = item.add_dir = lambda path, name: item.files.append(name)
            return item

        def log_artifact(self, artifact, aliases):
            self.artifacts.append((artifact.name, artifact.type, artifact.files, aliases))

        def finish(self):
            self.finished += 1

    module = Fake()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return module


def test_wandb_gets_the_names_of_the_spec(fake, run):
    tracker = track.make({"wandb": {}})
    tracker.start(run)
    args = fake.init_args
    assert (args["project"], args["group"], args["job_type"], args["mode"]) == ("kvlab", "kivi_t3", "eval", "offline")
    assert args["name"] == "kivi k2 v2-3f2a91c4" and args["tags"] == ["quantizer", "needle", "query_agnostic"]
    assert args["config"]["method"] == {"bits_k": 2} and args["config"]["provenance"] == run.provenance
    assert args["dir"] == str(run.folder) and fake.defined == [(("*",), {"step_metric": "position"})]
    tracker.log({"eval/ppl/nll": 2.0}, step=64)
    tracker.log({"memory/ratio": 4.0})
    assert fake.logged == [{"eval/ppl/nll": 2.0, "position": 64}] and fake.summary == {"memory/ratio": 4.0}
    tracker.table("samples", [{"i": i, "text": "x" * 5000} for i in range(70)])
    table = fake.logged[-1]["samples"]
    assert len(table["data"]) == 50 and {len(r[1]) for r in table["data"]} == {2000}
    for name in ("result.json", "rows.csv"):
        (run.folder / name).write_text("x")
        tracker.artifact(run.folder / name, "kvlab-result")
    tracker.finish()
    assert fake.artifacts == [
        ("result-3f2a91c4d0be", "kvlab-result", ["result.json", "rows.csv"], ["latest", "kivi_t3"])
    ]
    assert fake.finished == 1


def test_the_key_decides_the_mode_and_the_config_overrides_it(fake, monkeypatch):
    assert wandb_tracker.Wandb().mode == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert wandb_tracker.Wandb().mode == "online" and wandb_tracker.Wandb(mode="offline").mode == "offline"
    with pytest.raises(ConfigError, match="offline, online, disabled"):
        wandb_tracker.Wandb(mode="ofline")


def test_the_run_is_finished_even_if_an_artifact_fails(fake, run, caplog):
    tracker = track.make({"wandb": {}})
    tracker.start(run)
    (run.folder / "a").write_text("x")
    tracker.artifact(run.folder / "a", "t")
    tracker.artifact(run.folder / "absent", "t")
    fake.log_artifact = lambda *a, **k: (_ for _ in ()).throw(OSError("disk"))
    tracker.finish()
    assert fake.finished == 1 and "absent" in caplog.text


OFFLINE = """
import pathlib, sys
from kvlab import track
out = pathlib.Path(sys.argv[1])
for method in ("full", "kivi"):  # two runs in one process, as a sweep does
    run = track.Run(id=method, folder=out / method, method=method, task="needle", config_hash="3f2a91c4d0be",
                    recipe="smoke", family="full", protocol="query_agnostic", config={"seed": 0})
    tracker = track.make({"wandb": {}})
    tracker.start(run)
    for step in (64, 128):
        tracker.log({"eval/ppl/nll": 2.0 / step}, step)
    tracker.log({"memory/ratio": 4.0})
    tracker.table("rows", [{"method": method, "value": 1.5, "n": None}, {"method": "x", "value": None, "n": 3}])
    (run.folder / "result.json").write_text("{}")
    tracker.artifact(run.folder / "result.json", "kvlab-result")
    tracker.finish()
    assert not tracker.failed, "a tracker failed"
"""


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_a_real_offline_run_needs_no_account_and_leaves_its_folder(tmp_path):
    """In a process of its own: wandb starts a service, and a blocked socket in this process must not matter."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    places = {f"WANDB_{k}_DIR": str(tmp_path / k.lower()) for k in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    env |= {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), **places}
    command = [sys.executable, "-c", OFFLINE, str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for method in ("full", "kivi"):
        folders = list((tmp_path / method / "wandb").glob("offline-run-*"))
        assert len(folders) == 1 and list(folders[0].glob("*.wandb")), folders
        assert list(folders[0].glob("files/media/table/rows*.json"))
