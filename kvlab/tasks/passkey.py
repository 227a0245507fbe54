"""passkey: a five-digit key repeated once in prose; see needle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlab.tasks import needle
from kvlab.tasks.base import Bench, Outcome


def run(bench: Bench, task: Mapping[str, Any]) -> Outcome:
    return needle.run(bench, task, kind="passkey")
