"""Compile what ships, ahead of time, without a GPU.

cd tests/kernels/aot
python record.py --write                              rewrite kvlab/kernels/triton/aot.json (make aot; an hour)
python record.py --write attend --only int4           rewrite the lines of one kernel, of one codec
python record.py --write --ci                         rewrite the lines that CI compares (minutes)
python record.py attend --only int4 --target sm_90    look, write nothing
python record.py --serve                              answer a test: a case a line in, numbers out
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import cases
import jobs

from kvlab.kernels.triton import aot, measure


def answer(case: cases.Case, target: str) -> dict:
    """{"numbers", "broken"}, or {"skip": reason}, or {"error": what the compiler said}."""
    warnings.simplefilter("ignore")
    if why := aot.missing(target):
        return {"skip": why}
    try:
        job = jobs.of(case, target)
        found = aot.numbers(job, target)
        return {"numbers": found, "broken": aot.broken(found, job, target)}
    except Exception:
        return {"error": traceback.format_exc(limit=-4)}


def serve() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # a compiler may print
    print(json.dumps({"versions": aot.versions()}), file=out, flush=True)
    for line in sys.stdin:
        *case, target = json.loads(line)
        print(json.dumps(answer(cases.Case(*case), target)), file=out, flush=True)


def look(case: cases.Case, target: str, sass: bool) -> None:
    """Prints what there is to know about one case."""
    job = jobs.of(case, target)
    k = aot.build(job.launch, target)
    found = aot.read(job, k, target)
    print(f"{case} {target}: ", *(f"{key}={x}" for key, x in found.items()))
    if job.elements and "bytes" in found:
        print(f"    lane-ops an element: {found['ops']}, of these unpack {found['unpack']}; "
              f"the budget is {aot.BALANCE * found['bytes']:.1f}")  # fmt: skip
    if aot.TARGETS[target].backend == "cuda":
        text = aot.disassemble(k.asm["cubin"])[0]
        print("    main loop:", *(f"{op} {n}" for op, n in measure.loop_counts(text).items()))
        for i in measure.main_loop(text) if sass else ():
            print(f"        {i.op:32}{i.rest.strip()}")
    for law in aot.broken(found, job, target):
        print("    BROKEN:", law)
    sys.stdout.flush()


def write(todo: list[tuple[cases.Case, str]], processes: int) -> int:
    """Compiles them in several processes and rewrites their lines. Exit code 1 if something is wrong with any."""
    held = {} if len(todo) == len(cases.TARGETS) * len([*cases.grid()]) else aot.load()["cases"]
    if held and aot.load()["versions"] != aot.versions():
        sys.exit(f"{aot.RECORD.name} is of {aot.load()['versions']}, here is {aot.versions()}: rewrite all of it")
    ships, bad = {str(c) for c in cases.grid()}, 0
    found = {t: {n: x for n, x in held.get(t, {}).items() if n in ships} for t in cases.TARGETS}
    with ProcessPoolExecutor(processes or None, mp_context=get_context("spawn")) as pool:
        for n, ((case, target), got) in enumerate(zip(todo, pool.map(answer, *zip(*todo))), 1):
            said = [got[k] for k in ("error", "skip") if k in got] + got.get("broken", [])
            bad += bool(said) and not cases.known(case, target)
            print(f"{n}/{len(todo)} {case} {target}", *(f"\n    {x}" for x in said), flush=True)
            if "numbers" in got:
                found[target][str(case)] = got["numbers"]
    aot.save(found)
    print(f"{aot.RECORD}: {sum(map(len, found.values()))} cases, {bad} to look at")
    return bool(bad)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kernel", nargs="?", help=f"one of {', '.join(cases.KERNELS)}")
    p.add_argument("--only", default="", help=f"codecs: {','.join(cases.CODECS)}")
    p.add_argument("--target", choices=cases.TARGETS)
    p.add_argument("--form", help="decode, chunk, ...: see cases.KERNELS")
    p.add_argument("-D", type=int)
    p.add_argument("-B", type=int)
    p.add_argument("--sass", action="store_true", help="print the main loop")
    p.add_argument("--write", action="store_true", help="rewrite the record")
    p.add_argument("--ci", action="store_true", help="with --write: what CI compares, whatever else is asked for")
    p.add_argument("--processes", type=int, default=0, help="of --write (0: one for each CPU)")
    p.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    warnings.simplefilter("ignore")
    if a.serve:
        return serve()
    wanted = {"kernel": a.kernel, "form": a.form, "D": a.D, "B": a.B}
    chosen = [c for c in cases.grid() if all(v in (None, getattr(c, k)) for k, v in wanted.items())]
    chosen = [c for c in chosen if not a.only or c.codec in a.only.split(",")]
    if a.write:
        targets = [a.target] if a.target else cases.TARGETS
        return write(cases.covering() if a.ci else [(c, t) for t in targets for c in chosen], a.processes)
    for c in chosen:
        look(c, a.target or "sm_90", a.sass)
    return 0


if __name__ == "__main__":
    sys.exit(main())
