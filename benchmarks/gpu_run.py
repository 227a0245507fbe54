"""The machinery of gpu.py: what is to be measured in which order, a budget of time, a process that measures.

Measurements run in a worker process of their own, one after the other. A kernel that hangs or that ruins its context
takes the worker with it, not the run: the worker is started again behind the task that did it. Rows are written as they
come.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

GPU = Path(__file__).with_name("gpu.py")
MEASURED, LEFT_OUT, ABSENT, REFUSED, FAILED = "measured", "left out", "absent", "refused", "failed"
START = 60.0  # seconds that a worker may take beforehand


class LeftOut(Exception):
    """Raised by a measurement that cannot be made here, in words: memory, a package, a setting."""


class Absent(LeftOut):
    """Something is not installed, or not there yet."""


@dataclass(frozen=True)
class Task:
    """section: who measures it (gpu.MEASURE). facts: what its rows are about; plain values, they travel as JSON.

    seconds: what it is expected to take. limit: after that many it hangs.
    """

    section: str
    facts: dict
    seconds: float
    limit: float = 60.0


@dataclass
class Budget:
    """Time that is left, and by how much a section's tasks miss their estimates."""

    minutes: float
    reserve: float = 6.0  # seconds for the summary
    clock: object = time.monotonic
    begin: float = field(init=False)
    _paces: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.begin = self.clock()

    @property
    def left(self) -> float:
        return 60 * self.minutes - self.reserve - (self.clock() - self.begin)

    def expects(self, section: str, seconds: float) -> float:
        return seconds * self._paces.get(section, 1.0)

    def allows(self, section: str, seconds: float) -> bool:
        return self.expects(section, seconds) <= self.left

    def took(self, section: str, expected: float, seconds: float) -> None:
        """A moving mean: half of it is the newest task. One slow task does not end a section, many do."""
        pace = min(4.0, max(0.25, seconds / expected))
        self._paces[section] = (self._paces.get(section, 1.0) + pace) / 2


class Rows:
    """<folder>/<name>.jsonl, a line a row, flushed. A new run replaces the rows of the sections that it measures."""

    def __init__(self, path: Path, sections: Iterable[str], stamp: dict) -> None:
        self.path, self.stamp, self.failed = path, stamp, 0
        sections = set(sections)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = [r for r in read(path) if r["section"] not in sections]
        path.write_text("".join(json.dumps(r) + "\n" for r in self.rows))

    def add(self, task: Task, result: dict) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        row = {"bench": "gpu", "section": task.section, **task.facts, **result, **self.stamp, "time": now}
        self.failed += row["status"] == FAILED
        self.rows.append(row)
        with self.path.open("a") as f:
            f.write(json.dumps(row) + "\n")
            f.flush()
            os.fsync(f.fileno())


def read(path: Path) -> list[dict]:
    """Rows of a file; a last line that a kill has cut is dropped."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


class Worker:
    """A process that measures tasks: `gpu.py --worker`. Its own prints go to `log`."""

    def __init__(self, log: Path, dry: bool) -> None:
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        if dry:  # triton's own variable: kernels run in its interpreter, on CPU tensors
            env["TRITON_INTERPRET"] = "1"
        command = [sys.executable, str(GPU), "--worker", *(["--dry"] if dry else [])]
        with log.open("a") as err:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True, env=env,
                start_new_session=True,
            )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.fresh = True
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, task: Task, limit: float) -> Iterator[dict]:
        """Rows of a task as they come. TimeoutError or BrokenPipeError: the worker is of no use any more."""
        end = time.monotonic() + limit
        try:
            self.process.stdin.write(json.dumps({"section": task.section, "facts": task.facts}) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise BrokenPipeError("the worker is gone") from None
        while True:
            try:
                line = self.lines.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no answer in {limit:.0f} s") from None
            if line is None:
                self.process.wait()
                raise BrokenPipeError(f"the worker ended with status {self.process.returncode}, see its log")
            said = json.loads(line)
            self.fresh = False
            if "end" in said:
                return
            yield said

    def close(self) -> None:
        """Ends the process and what it started."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
                self.process.wait(5)
        with contextlib.suppress(OSError):
            self.process.stdin.close()


class Measuring:
    """Tasks one after the other, in a worker that is replaced when it breaks, as long as the budget lasts."""

    def __init__(self, rows: Rows, budget: Budget, log: Path, dry: bool) -> None:
        self.rows, self.budget, self.log, self.dry = rows, budget, log, dry
        self.worker: Worker | None = None
        self.copy: float | None = None  # GB/s, once it was measured: bandwidths are shares of it

    def run(self, task: Task) -> None:
        if not self.budget.allows(task.section, task.seconds):
            need, left = self.budget.expects(task.section, task.seconds), self.budget.left
            self._add(task, {"status": LEFT_OUT, "why": f"time: about {need:.0f} s, {max(0, left):.0f} s were left"})
            return
        begin, rows, sick = time.monotonic(), 0, False
        self.worker = self.worker or Worker(self.log, self.dry)
        fresh = self.worker.fresh
        most = task.limit + (START if fresh else 0)
        limit = max(1.0, min(most, self.budget.left))
        try:
            for row in self.worker.ask(task, limit):
                sick = row.pop("sick", False) or sick
                rows += 1
                self._add(task, row)
        except TimeoutError as error:
            sick = True
            row = {"status": FAILED, "why": str(error)}
            if limit < most:
                row = {"status": LEFT_OUT, "why": f"time: the run ended {limit:.0f} s into it"}
            self._add(task, row)
        except BrokenPipeError as error:
            sick = True
            self._add(task, {"status": FAILED, "why": str(error)})
        if sick:
            self.close()
        if not fresh:
            self.budget.took(task.section, task.seconds, time.monotonic() - begin)

    def _add(self, task: Task, row: dict) -> None:
        self.copy = row.get("copy_gb_per_s", self.copy)
        if row.get("bytes") and row.get("ms_median"):
            row["gb_per_s"] = row["bytes"] / row["ms_median"] / 1e6
            row["share"] = share(row["gb_per_s"], self.copy)
        self.rows.add(task, row)
        print(told(task.facts | row), flush=True)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def share(gb_per_s: float, copy_gb_per_s: float | None) -> float | None:
    """Of the measured copy bandwidth (bytes read plus bytes written)."""
    return gb_per_s / copy_gb_per_s if copy_gb_per_s else None


def told(row: dict) -> str:
    """A row as a line."""
    side = next((row[k] for k in ("side", "codec", "method", "how") if k in row), "")
    words = (row.get("shape", row.get("model", "")), side, *(row.get(k, "") for k in ("what", "products")))
    case = " ".join(w for w in words if w) + (f" {row['batch']} x {row['context']:,}" if "context" in row else "")
    if row["status"] != MEASURED:
        return f"  {row['status']:9s} {case}: {row.get('why', '')}"
    parts = [f"{row['ms_median']:.4g} ms"] if "ms_median" in row else []
    parts += [f"{row['gb_per_s']:.0f} GB/s"] if "gb_per_s" in row else []
    parts += [f"{100 * row['share']:.0f} % of copy"] if row.get("share") else []
    parts += [f"copy {row['copy_gb_per_s']:.0f} GB/s"] if "copy_gb_per_s" in row else []
    return f"  {case}: {', '.join(parts)}".replace("  :", "  ")


def serve(measure, sick) -> None:
    """The worker's loop. measure(section, facts) yields rows; sick(error): whether the device survived it.

    What libraries print must not reach the pipe: file descriptor 1 becomes the log's.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(row: dict) -> None:
        answers.write(json.dumps(row) + "\n")
        answers.flush()

    for line in sys.stdin:
        task = json.loads(line)
        try:
            for row in measure(task["section"], task["facts"]):
                say({"status": MEASURED, **row})
        except Exception as error:
            say(failure(error) | {"sick": sick(error)})
        say({"end": True})


def failure(error: Exception, refusals: tuple[type, ...] = ()) -> dict:
    """A row's status and why. refusals: errors with which another's library says no. One that is none of these is told
    in full in the worker's log."""
    import traceback

    status = ABSENT if isinstance(error, Absent) else LEFT_OUT if isinstance(error, LeftOut) else FAILED
    if type(error).__name__ == "OutOfMemoryError":
        status = LEFT_OUT
    if status == FAILED and isinstance(error, refusals):
        status = REFUSED
    if status == FAILED:
        traceback.print_exc()
        sys.stderr.flush()
    text = " ".join(str(error).split())[:300]
    return {"status": status, "why": f"{type(error).__name__}: {text}" if status in (FAILED, REFUSED) else text}
