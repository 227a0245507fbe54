"""One progress bar with live tok/s and ratio; plain lines every 10 s without a terminal, or if KVLAB_PROGRESS=plain."""

from __future__ import annotations

import os
import time
from types import TracebackType

from rich.console import Console


class Progress:
    """`with Progress() as p: p.start("full: needle", total_tokens); p.advance(512, ratio=3.7)`."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True)
        self.quiet = quiet
        self._bar = None
        self._task = None
        self._title, self._total, self._done, self._began, self._said = "", 0, 0, 0.0, 0.0
        self._ratio: float | None = None

    def __enter__(self) -> Progress:
        if not self.quiet and self.console.is_terminal and os.environ.get("KVLAB_PROGRESS") != "plain":
            from rich import progress as rp

            self._bar = rp.Progress(
                rp.TextColumn("{task.description:38s}"),
                rp.BarColumn(24),
                rp.TaskProgressColumn(),
                rp.TextColumn("{task.fields[live]}"),
                rp.TimeElapsedColumn(),
                console=self.console,
                transient=True,
                refresh_per_second=4,  # drawing takes time from what is measured
            )
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """One plain line, above the bar."""
        if not self.quiet:
            self.console.print(text, highlight=False)

    def start(self, title: str, total: int) -> None:
        """Begin a stretch of `total` tokens."""
        self._title, self._total, self._done, self._ratio = title, max(total, 1), 0, None
        self._began = time.perf_counter()
        if self._bar is None:
            self.say(f"{title} ...")
            self._said = time.perf_counter()
        else:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(title, total=self._total, live="")

    def advance(self, tokens: int, ratio: float | None = None) -> None:
        self._done += tokens
        self._ratio = ratio if ratio is not None else self._ratio
        now = time.perf_counter()
        if self._bar is not None:
            self._bar.update(self._task, advance=tokens, live=self._live(now))
        elif now - self._said > 10:
            self._said = now
            self.say(f"{self._title}: {100 * self._done / self._total:.0f} %  {self._live(now)}")

    def _live(self, now: float) -> str:
        text = f"{self._done / max(now - self._began, 1e-9):,.0f} tok/s"
        return text + (f"  {self._ratio:.2f}x" if self._ratio else "")


def drive(lab, progress: Progress, title: str, total: int) -> None:
    """Step a lab's engine until it is idle, with progress in tokens."""
    progress.start(title, total)
    engine, seen = lab.engine, lab.stats.prefill_tokens + lab.stats.decode_tokens
    looked, ratio = 0.0, None
    while engine.busy:
        engine.step()
        now = time.perf_counter()
        if now - looked > 0.5 and engine.scheduler.running:
            looked, ratio = now, lab.ledger().ratio
        done = lab.stats.prefill_tokens + lab.stats.decode_tokens
        progress.advance(done - seen, ratio)
        seen = done
