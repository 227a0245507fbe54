"""Everything that only a GPU can tell, in one run of eight minutes: results/gpu.jsonl, and a page, results/gpu.md.

    python benchmarks/gpu.py                     on a machine with an NVIDIA GPU
    python benchmarks/gpu.py --dry               without one: tiny sizes, Triton's interpreter, nothing kept
    python benchmarks/gpu.py --only decode,sdpa  some sections; rows of the others stay
    python benchmarks/gpu.py --summary           the page again, from the rows

environment            the machine and its copy bandwidth         gpu_clock.py
tests                  the kernel tests, on the device            gpu_tests.py
decode                 decode attention of every codec            gpu_kernels.py, gpu_cache.py
copy, write, mass      block copies, append and seal, weights     gpu_kernels.py
sdpa, flex, packages   the same attention by others               gpu_peers.py
ours, theirs           whole decode steps                         gpu_steps.py

Tasks come in the order of what they are worth (gpu_plan.py); before each one the time that is left is compared with
what it is expected to take, and a row says what was left out. Measuring happens in a process of its own, and every row
is on disk before the next task begins (gpu_run.py). The page is made of rows alone (gpu_summary.py).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # a worker may be started from elsewhere
sys.path.insert(0, str(Path(__file__).parents[1]))

import gpu_summary
import gpu_tests
from gpu_plan import plan
from gpu_run import MEASURED, Budget, Measuring, Rows, Task, Worker, serve

RESULTS = Path(__file__).parent / "results"
TESTS, TESTS_DRY = 120.0, 25.0  # seconds that they may take
WARMERS = 6  # processes that compile kernels while the tests run


# -- the worker --------------------------------------------------------------------------------------------------------
def work(dry: bool) -> None:
    import torch
    import transformers

    torch.set_grad_enabled(False)
    if dry:
        torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    import gpu_kernels
    import gpu_peers
    import gpu_steps
    from gpu_clock import Machine, broken

    machine = Machine(dry)
    sections = {
        "warm": gpu_kernels.warm, "decode": gpu_kernels.decode, "copy": gpu_kernels.copy, "write": gpu_kernels.write,
        "mass": gpu_kernels.mass, "sdpa": gpu_peers.sdpa, "flex": gpu_peers.flex, "packages": gpu_peers.packages,
        "ours": gpu_steps.ours, "theirs": gpu_steps.theirs,
    }  # fmt: skip

    def measure(section: str, facts: dict) -> Iterator[dict]:
        try:
            if section == "environment":
                yield machine.environment()
            else:
                yield from sections[section](facts, machine)
        finally:
            machine.clean()

    serve(measure, broken)


# -- the run -----------------------------------------------------------------------------------------------------------
def tests(rows: Rows, budget: Budget, folder: Path, dry: bool, cases: list[dict]) -> None:
    """The kernel tests, and beside them processes that compile what will be measured: both keep the CPUs busy, and
    neither is timed."""
    limit = min(TESTS_DRY if dry else TESTS, budget.left)
    n = 1 if dry else min(WARMERS, max(1, (os.cpu_count() or 1) // 2))
    told: list[dict] = []

    def warm(mine: list[dict]) -> None:
        worker = Worker(folder / "gpu_worker.log", dry)
        try:
            told.extend(worker.ask(Task("warm", {"cases": mine}, limit), limit))
        except (TimeoutError, BrokenPipeError) as error:
            told.append({"status": "left out", "cases": 0, "why": str(error)})
        finally:
            worker.close()

    threads = [threading.Thread(target=warm, args=(cases[i::n],)) for i in range(n) if cases[i::n]]
    for thread in threads:
        thread.start()
    row = gpu_tests.run(folder / "gpu_tests.log", limit, dry)
    rows.add(Task("tests", {}, limit), row)
    print(f"  {row['status']}: {row.get('passed', 0)} passed, {row.get('failed', 0)} failed. {row['why']}", flush=True)
    for thread in threads:
        thread.join()
    done, why = sum(r.get("cases", 0) for r in told), ", ".join(sorted({r["why"] for r in told if r.get("why")}))
    rows.add(Task("warm", {}, limit), {"status": MEASURED, "compiled": done, "of": len(cases), "why": why})
    print(f"  compiled beforehand: {done} of {len(cases)} cases. {why}", flush=True)


def run(args: argparse.Namespace) -> int:
    from kvlab.report.provenance import provenance

    budget = Budget(args.minutes)
    facts = provenance()
    commit = (facts["code"]["git_commit"] or "")[:12] or None
    stamp = {"dry": args.dry, "commit": commit, "dirty": facts["code"]["dirty"], "cpu": facts["host"]["cpu"]}
    tasks = list(plan(args.dry))
    everything = {"environment", "tests", "warm", *(t.section for t in tasks)}
    only = set(args.only.split(",")) - {""} or everything
    if wrong := only - everything:
        sys.exit(f"--only: {', '.join(sorted(wrong))} is none of {', '.join(sorted(everything))}")
    only |= {"environment"} | ({"warm"} if "tests" in only else set())
    tasks = [t for t in tasks if t.section in only]
    rows = Rows(args.results / "gpu.jsonl", only, stamp)
    measuring = Measuring(rows, budget, args.results / "gpu_worker.log", args.dry)
    try:
        print("environment", flush=True)
        measuring.run(Task("environment", {}, 5))
        if not args.dry and measuring.copy is None:
            print("no CUDA device can be measured here: gpu_worker.log says why. --dry tries the script without one.")
            return 2
        if "tests" in only:
            print("tests", flush=True)
            cases = [t.facts for t in tasks if t.section == "decode" and "products" not in t.facts]
            tests(rows, budget, args.results, args.dry, cases[:1] if args.dry else cases)
            _summarize(args.results)
        section = None
        for task in tasks:
            if task.section != section:
                section = task.section
                print(f"{section}  ({budget.left:.0f} s left)", flush=True)
                _summarize(args.results)
            measuring.run(task)
    finally:
        measuring.close()
        _summarize(args.results)
    left = sum(r["status"] == "left out" for r in rows.rows)
    seconds = 60 * args.minutes - budget.reserve - budget.left
    print(f"\n{len(rows.rows)} rows, {rows.failed} failed, {left} left out; {seconds:.0f} s; {args.results / 'gpu.md'}")
    return 1 if rows.failed else 0


def _summarize(folder: Path) -> None:
    gpu_summary.write(folder / "gpu.jsonl", folder / "gpu.md")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="of the whole run; default 8, dry 2.8")
    parser.add_argument("--dry", action="store_true", help="without a GPU: tiny sizes; rows go to a temporary folder")
    parser.add_argument("--results", type=Path, help="folder of rows, page and logs; default benchmarks/results")
    parser.add_argument("--only", default="", help="sections to measure, with commas")
    parser.add_argument("--summary", action="store_true", help="write the page again from the rows, and end")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.dry)
        return 0
    args.minutes = args.minutes or (2.8 if args.dry else 8.0)
    args.results = args.results or (Path(tempfile.mkdtemp(prefix="kvlab-gpu-dry-")) if args.dry else RESULTS)
    if args.dry and args.results.resolve() == RESULTS.resolve():
        parser.error("a dry run measures nothing: its rows do not belong into benchmarks/results")
    args.results.mkdir(parents=True, exist_ok=True)
    if args.summary:
        _summarize(args.results)
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
