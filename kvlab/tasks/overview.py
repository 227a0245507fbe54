"""overview: fidelity, needle, speed and the ledger of one method, sized for a minute on two cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlab.tasks import fidelity, needle, speed
from kvlab.tasks.base import Bench, Outcome


def run(bench: Bench, task: Mapping[str, Any]) -> Outcome:
    """The parts' options stand under their names; the ledger columns are those of the speed part (a full batch)."""
    outcome = Outcome()
    for name, part in (("fidelity", fidelity.run), ("needle", needle.run), ("speed", speed.run)):
        outcome.add(part(bench, {"data": task.get("data"), **task[name]}))
    return outcome
