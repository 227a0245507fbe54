"""The kernel tests on the device, in a process of their own: how many passed, which failed."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from gpu_run import ABSENT, FAILED, LEFT_OUT, MEASURED

ROOT = Path(__file__).parents[1]
PATHS = ("tests/kernels/gpu", "tests/kernels/test_backends.py")
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
DRY = 3  # tests of a dry run
_LINE = re.compile(r"^(?:\[gw\d+\] .*?)?(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S+::.*?)\s*$")
_SERIAL = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_NAMES = {"XFAIL": "xfailed", "XPASS": "xpassed"}


def run(log: Path, limit: float, dry: bool) -> dict:
    """A row. What a test printed is in `log`; a limit that ends the run leaves what was counted until then."""
    paths = [p for p in PATHS if (ROOT / p).exists()]
    if not paths:
        return {"status": ABSENT, "why": f"no {' or '.join(PATHS)}"}
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if dry:
        env["TRITON_INTERPRET"] = "1"
        paths = _some(paths, env) or paths
    workers = [] if dry or importlib.util.find_spec("xdist") is None else ["-n", str(min(8, os.cpu_count() or 1))]
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-m", "not slow"]
    command += [*workers, *paths]
    begin = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status, cut = process.wait(limit), False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status, cut = process.wait(), True
    text = log.read_text(errors="replace")
    counts, late = count(text), f"ended after {limit:.0f} s, not all ran; " if cut and not ended(text) else ""
    bad = counts["failed"] + counts["error"]
    ran = counts["passed"] + bad
    outcome = LEFT_OUT if late and not ran else MEASURED if ran and not bad and (cut or status == 0) else FAILED
    row = counts | {"status": outcome, "pytest_status": status}
    why = late + (f"{bad} of {ran} failed, see {log.name}" if bad else "" if ran else f"none ran, see {log.name}")
    return row | {"why": why, "seconds": round(time.monotonic() - begin, 1)}


def _some(paths: list[str], env: dict) -> list[str]:
    """A few tests from all over the paths."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow", *paths]
    try:
        out = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False).stdout
    except subprocess.TimeoutExpired:
        return []
    names = [line for line in out.splitlines() if "::" in line and " " not in line.split("[")[0]]
    return names[:: max(1, len(names) // DRY)][:DRY]


def ended(log: str) -> bool:
    """Whether pytest came to its last line, however long its process took to end."""
    return re.search(r"^=+ .*\bin [\d.]+s.* =+$", log, re.M) is not None


def count(log: str) -> dict:
    """{outcome: tests, "failures": names} from the output of `pytest -v`, whole or cut off, with or without xdist."""
    seen: dict[str, str] = {}
    for line in log.splitlines():
        if m := _LINE.match(line):
            outcome, name = m[1], m[2]
        elif m := _SERIAL.match(line):
            name, outcome = m[1], m[2]
        else:
            continue
        name = name.split(" - ")[0]
        worse = seen.get(name) in ("FAILED", "ERROR")  # an error at the end of a test follows its PASSED
        seen[name] = seen[name] if worse else outcome
    each = [_NAMES.get(o, o.lower()) for o in seen.values()]
    failures = [n for n, o in seen.items() if o in ("FAILED", "ERROR")]
    return {o: each.count(o) for o in OUTCOMES} | {"failures": failures[:20]}
