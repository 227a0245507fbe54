"""benchmarks/gpu.py where no GPU is needed: its budget, its rows, the processes it survives, and what its page claims.

`make gpu-dry` runs the script itself.
"""

import json
import sys
from itertools import pairwise

import pytest
from front import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu
import gpu_plan
import gpu_run
import gpu_summary
import gpu_tests
from gpu_run import Budget, Measuring, Rows, Task, share


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


# -- budget --------------------------------------------------------------------------------------------------------
def test_a_task_that_does_not_fit_into_what_is_left_is_not_begun(clock):
    budget = Budget(1, reserve=10, clock=clock)
    assert budget.allows("a", 50) and not budget.allows("a", 51)
    clock.now = 45
    assert budget.left == 5 and budget.allows("a", 5) and not budget.allows("a", 6)


def test_estimates_follow_the_pace_of_their_own_section(clock):
    """Fails when a section of slow tasks makes the others look slow, or one odd task ends a section for good."""
    budget = Budget(1, reserve=0, clock=clock)
    budget.took("slow", expected=1, seconds=3)
    assert budget.expects("slow", 10) == pytest.approx(20) and budget.expects("other", 10) == 10
    budget.took("slow", expected=1, seconds=1e6)  # it hung: at most four times, halfway
    assert budget.expects("slow", 1) == pytest.approx(3)
    for _ in range(20):
        budget.took("slow", expected=1, seconds=1)
    assert budget.expects("slow", 1) == pytest.approx(1, abs=1e-3)


def test_the_plan_begins_with_what_the_goals_are_about():
    """A run that is cut short must have judged every goal."""
    first = list(gpu_plan.plan(dry=False))[:60]
    for codec in gpu_summary.GOALS:
        assert any(t.section == "decode" and t.facts["codec"] == codec for t in first), codec
    assert {"decode", "copy", "sdpa", "ours", "theirs"} <= {t.section for t in first}
    for task in gpu_plan.plan(dry=False):
        assert task.seconds <= task.limit and json.loads(json.dumps(task.facts)) == task.facts


def test_the_plan_measures_every_codec_shape_context_and_batch_once():
    tasks = [json.dumps([t.section, t.facts], sort_keys=True) for t in gpu_plan.plan(dry=False)]
    assert len(tasks) == len(set(tasks))
    cases = [t.facts for t in gpu_plan.plan(dry=False) if t.section == "decode" and "products" not in t.facts]
    assert len(cases) == len(gpu_plan.CODECS) * 2 * 4 * 3


# -- rows ----------------------------------------------------------------------------------------------------------
def test_a_run_replaces_the_rows_of_its_sections_and_keeps_the_others(tmp_path):
    path = tmp_path / "gpu.jsonl"
    first = Rows(path, ["decode", "sdpa"], {"commit": "old"})
    first.add(Task("decode", {"codec": "int4"}, 1), {"status": "measured"})
    first.add(Task("sdpa", {}, 1), {"status": "failed", "why": "x"})
    assert first.failed == 1
    second = Rows(path, ["decode"], {"commit": "new"})
    assert [r["section"] for r in gpu_run.read(path)] == ["sdpa"]
    second.add(Task("decode", {"codec": "int2"}, 1), {"status": "measured"})
    assert [(r["section"], r["commit"]) for r in gpu_run.read(path)] == [("sdpa", "old"), ("decode", "new")]


def test_a_line_that_a_kill_has_cut_costs_only_itself(tmp_path):
    path = tmp_path / "gpu.jsonl"
    rows = Rows(path, [], {})
    for i in range(3):
        rows.add(Task("decode", {"i": i}, 1), {"status": "measured"})
    path.write_text(path.read_text()[:-20])
    assert [r["i"] for r in gpu_run.read(path)] == [0, 1]


def test_a_share_needs_a_measured_bandwidth():
    assert share(2000.0, 4000.0) == 0.5
    assert share(2000.0, None) is None


# -- the worker ----------------------------------------------------------------------------------------------------
FAKE = """
import os, sys, time
sys.path.insert(0, {folder!r})
from gpu_run import Absent, LeftOut, serve

def measure(section, facts):
    print("a library prints to stdout")
    yield {{"pid": os.getpid(), "bytes": 4 * 10**6, "ms_median": 2.0}}
    what = facts.get("what")
    if what == "dies":
        os._exit(7)
    if what == "hangs":
        time.sleep(60)
    if what == "raises":
        raise TypeError("of ours")
    if what == "sick":
        raise RuntimeError("illegal memory access")
    if what == "absent":
        raise Absent("no such kernel")
    if what == "memory":
        raise LeftOut("too little")

serve(measure, lambda error: "illegal" in str(error))
"""


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """measured(what of each task) -> the rows of each task."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE.format(folder=str(ROOT / "benchmarks")))
    monkeypatch.setattr(gpu_run, "GPU", script)
    monkeypatch.setattr(gpu_run, "START", 20.0)

    def run(*whats: str, limit: float = 30.0, copy: float | None = None) -> list[list[dict]]:
        rows = Rows(tmp_path / "gpu.jsonl", ["x"], {})
        measuring = Measuring(rows, Budget(5), tmp_path / "log", dry=False)
        measuring.copy, out = copy, []
        try:
            for what in whats:
                before = len(rows.rows)
                measuring.run(Task("x", {"what": what}, 1, limit))
                out.append(rows.rows[before:])
        finally:
            measuring.close()
        assert gpu_run.read(tmp_path / "gpu.jsonl") == rows.rows
        return out

    return run


def test_what_was_measured_before_a_worker_died_is_kept_and_the_next_task_runs(measured):
    good, dead, after = measured("good", "dies", "good")
    assert [r["status"] for r in good] == ["measured"]
    assert [r["status"] for r in dead] == ["measured", "failed"] and "status 7" in dead[1]["why"]
    assert after[0]["status"] == "measured" and after[0]["pid"] != good[0]["pid"] == dead[0]["pid"]


def test_a_task_that_hangs_is_ended_and_the_next_one_runs(measured, monkeypatch):
    good, hung, after = measured("good", "hangs", "good", limit=1.0)
    assert [r["status"] for r in hung] == ["measured", "failed"] and "no answer in 1 s" in hung[1]["why"]
    assert after[0]["pid"] != good[0]["pid"]


def test_an_error_is_a_row_and_only_a_lost_device_costs_the_worker(measured):
    raised, absent, memory, sick, after = measured("raises", "absent", "memory", "sick", "good")
    for rows, status in ((raised, "failed"), (absent, "absent"), (memory, "left out"), (sick, "failed")):
        assert [r["status"] for r in rows] == ["measured", status]
    assert raised[1]["why"] == "TypeError: of ours" and absent[1]["why"] == "no such kernel"
    pids = [r[0]["pid"] for r in (raised, absent, memory, sick, after)]
    assert len(set(pids[:4])) == 1 and pids[4] != pids[0]
    assert not any("sick" in r for r in sick)


def test_a_row_of_bytes_and_time_gets_its_share_of_the_copy_bandwidth(measured):
    ((row,),) = measured("good", copy=8.0)
    assert row["gb_per_s"] == pytest.approx(2.0) and row["share"] == pytest.approx(0.25)


# -- tests in a log ------------------------------------------------------------------------------------------------
def test_outcomes_are_counted_with_xdist_without_it_and_when_the_log_ends_early():
    log = """
[gw1] [  3%] PASSED tests/a.py::test_one[triton-int4 bits 3]
[gw0] [  6%] FAILED tests/a.py::test_two
tests/b.py::test_three[x y] PASSED                     [ 50%]
tests/b.py::test_four SKIPPED (no GPU)                 [ 75%]
tests/b.py::test_three[x y] ERROR                      [ 75%]
tests/b.py::test_five """
    counts = gpu_tests.count(log)
    assert counts["failures"] == ["tests/a.py::test_two", "tests/b.py::test_three[x y]"]
    assert [counts[k] for k in ("passed", "failed", "error", "skipped")] == [1, 1, 1, 1]
    assert not gpu_tests.ended(log) and gpu_tests.ended(log + "\n==== 1 passed, 2 failed in 61.30s (0:01:01) ====\n")


def test_the_short_summary_at_the_end_counts_nothing_twice():
    log = "tests/a.py::test_one FAILED [100%]\nFAILED tests/a.py::test_one - AssertionError: x\n1 failed in 1.0s\n"
    counts = gpu_tests.count(log)
    assert counts["failed"] == 1 and counts["failures"] == ["tests/a.py::test_one"]


# -- the page ------------------------------------------------------------------------------------------------------
def decode(codec: str, ms: float, share: float | None = None, batch: int = 64, context: int = 8192, **facts) -> dict:
    row = {
        "section": "decode", "status": "measured", "shape": "Llama-3-8B", "codec": codec, "batch": batch,
        "context": context, "ms_median": ms, "share": share, "programs": 8 * batch * -(-context // 512),
    }  # fmt: skip
    return row | facts


@pytest.mark.parametrize(
    ("values", "told"), [([], "not measured"), ([0.8, 0.9], "yes"), ([0.7, 0.9], "in part"), ([0.1, 0.79], "no")]
)
def test_a_goal_is_met_only_if_every_case_meets_it(values, told):
    assert gpu_summary.reached(values, 0.8) == told


def test_goals_speak_of_large_grids_long_contexts_and_16_bit_products():
    assert gpu_summary.large(decode("int4", 1.0))
    assert not gpu_summary.large(decode("int4", 1.0, context=2048))
    assert not gpu_summary.large(decode("int4", 1.0, batch=1))
    assert not gpu_summary.large(decode("int4", 1.0, products="float32"))
    assert not gpu_summary.large(decode("int4", 1.0, shape="tiny"))


def test_times_are_compared_within_a_case():
    rows = [decode("full float16", 9.0, batch=64, context=32768), decode("int4", 3.0, batch=64, context=32768),
            decode("full float16", 4.0, batch=8, context=32768), decode("int4", 2.0, batch=8, context=32768),
            decode("int4", 0.1, batch=16, context=32768), decode("int4", 0.1)]  # fmt: skip
    assert sorted(gpu_summary.ratios(rows, "int4", 32768)) == [2.0, 3.0]


def line(page: str, begin: str) -> list[str]:
    (found,) = [x for x in page.splitlines() if x.startswith(f"| {begin}")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_the_page_shows_the_lowest_case_and_claims_nothing_that_was_not_measured():
    rows = [decode("full float16", 1.0, 0.9), decode("full float16", 1.0, 0.7, batch=8, context=32768),
            decode("int4", 1.0, 0.99, batch=1)]  # fmt: skip
    page = gpu_summary.page(rows)
    assert line(page, "full float16, decode")[1:] == ["80%", "70 %", "80 %", "90 %", "2", "in part"]
    assert line(page, "int4, decode")[1:] == ["55%", "-", "-", "-", "0", "not measured"]
    assert line(page, "block copy")[-1] == "not measured"
    assert "not measured: no share" in page and "Kernel tests: not run" in page
    assert "DRY" not in page


def test_a_page_of_a_dry_run_says_so_on_top():
    lines = gpu_summary.page([decode("int4", 1.0, 0.5, dry=True)]).splitlines()
    assert "DRY" in lines[2]


def test_what_was_left_out_and_what_failed_is_on_the_page():
    rows = [{"section": "sdpa", "status": "left out", "why": "time: about 5 s, 0 s were left"}] * 3
    rows += [{"section": "decode", "status": "failed", "codec": "kivi 2", "why": "ArithmeticError: wrong"}]
    page = gpu_summary.page(rows)
    assert "- sdpa: time was over (3 rows)" in page and "- decode kivi 2: ArithmeticError: wrong" in page
    order = [page.index(s) for s in ("# Kernels", "## Goals", "## Not measured")]
    assert all(a < b for a, b in pairwise(order))


def test_a_dry_run_may_not_write_where_results_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry", "--results", str(gpu.RESULTS)])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "do not belong" in capsys.readouterr().err
