"""Several trackers as one, none of which can fail a run: the first error of each is a warning, later ones are silent.

A tracker whose `start` failed is not called again. Only Exception is caught: Ctrl-C still stops the run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.track.base import Run, Tracker

log = logging.getLogger("kvlab.track")


class Many:
    def __init__(self, trackers: Sequence[Tracker]):
        self.trackers = list(trackers)
        self.failed: set[int] = set()  # id of trackers that have been warned about

    def start(self, run: Run) -> None:
        self.trackers = [t for t in self.trackers if self._call(t, "start", run)]

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._all("log", metrics, step)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._all("table", name, rows)

    def artifact(self, path: Path | str, type: str) -> None:
        self._all("artifact", path, type)

    def finish(self) -> None:
        self._all("finish")

    def _all(self, verb: str, *args: Any) -> None:
        for tracker in self.trackers:
            self._call(tracker, verb, *args)

    def _call(self, tracker: Tracker, verb: str, *args: Any) -> bool:
        try:
            getattr(tracker, verb)(*args)
            return True
        except Exception as error:  # a listener must not break what it listens to
            if id(tracker) not in self.failed:
                self.failed.add(id(tracker))
                name, kind = type(tracker).__name__.lower(), type(error).__name__
                log.warning("tracker %s: %s failed (%s: %s); the run goes on, its results are in the run's folder",
                            name, verb, kind, error)  # fmt: skip
            return False
