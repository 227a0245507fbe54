"""The command line inside the test's own process: its exit code, what it printed, the results it wrote.

Starting a process that imports torch takes seconds, so nearly every test calls `kvlab.cli.main` directly.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

import kvlab
from kvlab.cli import main

ROOT = Path(kvlab.__file__).resolve().parents[1]
TINY = ("model=tiny_llama", "threads=1")
FIDELITY = (*TINY, "task=fidelity", "task.documents=1", "task.context=48", "task.scored=16", "task.chunk=8")


@dataclass
class Ran:
    """`results`: result.json files under `out`, in the order of the jobs."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def results(self) -> list[dict]:
        return [json.loads(p.read_text("utf-8")) for p in self.paths]

    @property
    def paths(self) -> list[Path]:
        return sorted(self.folder.rglob("result.json"), key=lambda p: int(p.parent.name.split("-")[0]))

    @property
    def result(self) -> dict:
        (only,) = self.results
        return only

    @property
    def words(self) -> str:
        """Everything printed, white space squeezed: lines may be wrapped anywhere."""
        return " ".join(f"{self.out} {self.err}".split())


def run(out: Path, *argv: str) -> Ran:
    """`python -m kvlab ARGV out=OUT`, here."""
    return command(*argv, f"out='{out}'", folder=out)


def command(*argv: str, folder: Path = Path()) -> Ran:
    """`python -m kvlab ARGV`, here. Hydra's log handlers do not outlive it."""
    out, err = StringIO(), StringIO()
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main(list(argv))
    except SystemExit as stop:
        code = stop.code
    else:
        raise AssertionError("main must end with SystemExit")
    finally:
        for handler in set(root.handlers) - set(before):
            handler.close()
        root.handlers[:], root.level = before, level
    assert isinstance(code, int), f"exit code {code!r} is no number"
    return Ran(code, out.getvalue(), err.getvalue(), folder)


def environment(**changes: str) -> dict[str, str]:
    """For another Python process that imports this kvlab, from wherever it is started."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "100", "OMP_NUM_THREADS": "1", **changes}


def process(*argv: str, cwd: Path, flags: tuple[str, ...] = ()) -> subprocess.Popen:
    """`python FLAGS -m kvlab ARGV` as a process of its own, which takes Ctrl-C also where the tests ignore it (as a job
    in the background does)."""
    return subprocess.Popen(
        [sys.executable, *flags, "-m", "kvlab", *argv],
        cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def no_plots(monkeypatch) -> None:
    """Pictures take most of the time of a tiny run: empty files instead."""
    from kvlab.report import plots

    def draw(rows, to, *rest) -> dict[str, Path]:
        files = {kind: Path(f"{to}.{kind}") for kind in ("png", "svg")}
        for path in files.values():
            path.write_bytes(b"")
        return files

    for name in ("pareto", "ledger"):
        monkeypatch.setattr(plots, name, draw)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, request):
    """Wide lines, a cache folder of its own, no pictures except where a test asks for them."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("KVLAB_PROGRESS", "plain")
    if "pictures" not in request.fixturenames:
        no_plots(monkeypatch)


@pytest.fixture
def pictures():
    """The test wants the real ones."""
