"""The small commands, trackers, and the command line in processes of their own."""

import importlib.util
import io
import json
import re
import signal
import sys

import front
import pytest
from front import FIDELITY, TINY, command, pictures, run, surroundings  # noqa: F401

from kvlab import names
from kvlab.cli import main
from kvlab.report import result as results

INT8 = ("+method=int8", "method.group=16")


# -- small commands ------------------------------------------------------------------------------------------------


def test_methods_lists_every_method_with_a_command(tmp_path):
    ran = command("methods")
    assert ran.code == 0
    for name in names.names():
        assert re.search(rf"^{name} ", ran.out, re.M), name
        assert f"python -m kvlab +method={name}" in ran.words or name == "composed"


def test_tasks_lists_every_task_with_its_options():
    ran = command("tasks")
    assert ran.code == 0
    for name, option in (
        ("fidelity", "chunk: 16"),
        ("needle", "depths: 10"),
        ("memory", "new_tokens"),
        ("overview", ""),
    ):
        assert re.search(rf"^{name} ", ran.out, re.M) and option in ran.out


def test_version_is_the_one_of_the_package():
    from kvlab import __version__

    assert command("version").out.strip() == __version__


def test_help_and_cfg_run_nothing(tmp_path):
    helped = run(tmp_path, "--help")
    assert helped.code == 0 and "turboquant" in helped.out and "task" in helped.out
    assert "report PATHS | compare A B | verify RESULT" in helped.out and "3 the method never acted" in helped.out
    config = run(tmp_path, "--cfg", "job", "+method=kivi")
    assert config.code == 0 and "bits_k: 2" in config.out
    assert not list(tmp_path.rglob("result.json"))


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Results of int8 at two group sizes on 9 documents: enough for intervals."""
    monkeypatch = pytest.MonkeyPatch()
    front.no_plots(monkeypatch)
    folder = tmp_path_factory.mktemp("two")
    argv = (*FIDELITY, "task.documents=9", "task.context=24", "task.scored=8")
    ran = [run(folder / g, *argv, "+method=int8", f"method.group={g}") for g in ("16", "8")]
    monkeypatch.undo()
    assert [r.code for r in ran] == [0, 0]
    return [r.paths[0] for r in ran]


def test_compare_pairs_documents_and_names_what_differs(two_runs):
    ran = command("compare", *map(str, two_runs))
    assert ran.code == 0, ran.words
    assert "method.group: 16 -> 8" in ran.out
    assert "a = int8 g16, b = int8 g8" in ran.out
    kl = next(line for line in ran.out.splitlines() if "| kl@8" in line)
    assert "documents" in kl and "  9 |" in kl, kl
    assert "[" in kl, "9 documents give an interval"


def test_report_makes_one_table_of_many_results(two_runs, tmp_path):
    ran = command(
        "report", *map(str, two_runs), "--out", str(tmp_path / "r"), "--format", "md,csv,tex", "--plot", "ledger"
    )
    assert ran.code == 0, ran.words
    assert {"summary.md", "summary.csv", "summary.tex", "rows.csv", "ledger.png"} <= {
        p.name for p in (tmp_path / "r").iterdir()
    }
    assert [r["method"] for r in results.read_rows(tmp_path / "r" / "summary.csv")] == ["full", "int8 g8", "int8 g16"]


def test_report_names_a_broken_file_and_a_folder_without_results(two_runs, tmp_path):
    (tmp_path / "result.json").write_text("{")
    broken = command("report", str(two_runs[0]), str(tmp_path))
    assert broken.code == 2 and f"{tmp_path}/result.json: not JSON" in broken.words
    (tmp_path / "empty").mkdir()
    assert "no result.json under" in command("report", str(tmp_path / "empty")).words


def test_verify_reproduces_a_run_from_its_result_alone(two_runs):
    ran = command("verify", str(two_runs[0].parent))
    assert ran.code == 0, ran.words
    assert re.search(r"verified: \d\d+ values reproduce", ran.out)


@pytest.mark.parametrize("what", ["a loss", "a byte", "the config"])
def test_verify_ends_with_code_4_and_names_the_field_of_a_doctored_result(two_runs, tmp_path, what):
    body = json.loads(two_runs[0].read_text())
    ours = body["summary"][1]
    if what == "a loss":
        ours["nll"] *= 1.001
        field = "summary[int8 g16].nll"
    elif what == "a byte":
        ours["payload"] += 1
        field = "summary[int8 g16].payload"
    else:  # the numbers of another setting
        body["config"]["method"]["group"] = 8
        field = "config_hash"
    (tmp_path / "result.json").write_text(json.dumps(body))
    ran = command("verify", str(tmp_path / "result.json"))
    assert ran.code == 4, ran.words
    assert f"{field}: stored" in ran.words
    assert "Traceback" not in ran.err


def test_verify_does_not_run_code_that_a_result_names(two_runs, tmp_path):
    """A result file may come from anybody. `os.system` takes a keyword `command`: calling it would run a shell."""
    body = json.loads(two_runs[0].read_text())
    body["config"]["method"] = {"_target_": "os.system", "command": f"touch {tmp_path}/ran"}
    (tmp_path / "result.json").write_text(json.dumps(body))
    ran = command("verify", str(tmp_path))
    assert ran.code == 2 and "_target_='os.system' is no method" in ran.words
    assert not (tmp_path / "ran").exists()


# -- trackers ------------------------------------------------------------------------------------------------------


def test_the_jsonl_tracker_always_writes_the_numbers_of_the_row(tmp_path):
    ran = run(tmp_path, *FIDELITY, *INT8)
    (events,) = ran.paths[0].parent.glob("*events*.jsonl") or [None]
    text = events.read_text()
    assert "eval/fidelity/kl_mean" in text and "memory/ratio" in text


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb: pip install kvlab[wandb]")
def test_a_wandb_run_without_an_account_stays_in_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    ran = run(tmp_path / "wandb", *FIDELITY, *INT8, "logger=wandb")
    assert ran.code == 0, ran.words
    (folder,) = ran.paths[0].parent.glob("wandb/offline-run-*")
    assert any(folder.iterdir())
    plain = run(tmp_path / "plain", *FIDELITY, *INT8)
    assert ran.results[0]["config_hash"] == plain.result["config_hash"], "a logger is no part of an experiment"


# -- processes of their own ----------------------------------------------------------------------------------------


def test_a_real_process_from_another_folder_writes_into_a_folder_with_a_space(tmp_path):
    away = tmp_path / "elsewhere"
    away.mkdir()
    argv = (*TINY, "task=memory", "task.lengths=[40]", "task.new_tokens=2", *INT8, "out=my results")
    proc = front.process(*argv, cwd=away)
    out, err = proc.communicate(timeout=300)
    assert proc.returncode == 0, err
    (path,) = (away / "my results").rglob("result.json")
    assert "int8 g16" in out and "ratio" in out, "the table goes to stdout, where a pipe finds it"
    assert out.rstrip().splitlines()[-1].startswith("wrote my results/")
    assert err.splitlines()[0] == "starting: tiny_llama, task memory"
    assert results.read(path)["overrides"][-1] == "out=my results"


def test_a_reader_that_goes_away_gets_no_traceback(tmp_path):
    """`kvlab methods | head -1`"""
    proc = front.process("methods", cwd=tmp_path)
    proc.stdout.close()
    assert proc.stderr.read() == "" and proc.wait(timeout=60) == 1


def test_a_terminal_without_greek_letters_gets_question_marks_and_no_traceback(monkeypatch):
    """The table is printed when everything has been measured: a bad moment to fail."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit):
        main(["version"])
    print("ΔNLL", file=out, flush=True)
    assert out.buffer.getvalue().endswith(b"?NLL\n")


def test_ctrl_c_in_a_real_process_ends_with_code_130_and_no_traceback(tmp_path):
    argv = (*TINY, "task=memory", "task.lengths=[4000]", "task.new_tokens=90", "runtime.chunk=4")
    proc = front.process(*argv, f"out='{tmp_path}'", cwd=tmp_path)
    seen = []
    for line in proc.stderr:
        seen.append(line)
        if "memory at 4000" in line:
            break
    proc.send_signal(signal.SIGINT)
    _, err = proc.communicate(timeout=120)
    assert proc.returncode == 130, "".join(seen) + err
    assert "Traceback" not in err and "interrupted" in err
    assert not list(tmp_path.rglob("result.json"))
