"""Trackers: where numbers go while a run is on. `make(config)` builds the one object that a run talks to.

The config is a mapping from tracker name to its options, so that groups merge: `{wandb: {project: kvlab}}`. JSONL is
always among them. `configs/logger/*.yaml` may hold nothing (`none`, `jsonl`), one entry, or several (`many`).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from kvlab.errors import ConfigError
from kvlab.track.base import Run, Tracker, keyed
from kvlab.track.jsonl import Jsonl
from kvlab.track.many import Many
from kvlab.track.wandb import Wandb  # the class; the package of that name is imported when a run starts

__all__ = ["Run", "Tracker", "keyed", "make"]

TRACKERS = {"jsonl": Jsonl, "wandb": Wandb}


def make(config: Mapping[str, Any] | None = None) -> Many:
    """The tracker of a run. `config`: {name: options}; an entry set to null is off, except jsonl, which stays.

    Wrong names and options, and a package that is not installed, are errors now, before any weights load; failures
    during the run are not.
    """
    config = dict(config or {})
    built: list[Tracker] = [_build("jsonl", config.pop("jsonl", None) or {})]
    built += [_build(name, options) for name, options in config.items() if options is not None]
    return Many(built)


def _build(name: str, options: Mapping[str, Any]) -> Tracker:
    if name not in TRACKERS:
        near = difflib.get_close_matches(str(name), TRACKERS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"logger: unknown tracker {name!r}; known: {', '.join(TRACKERS)}.{hint}")
    known = list(inspect.signature(TRACKERS[name]).parameters)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"logger.{name}: unknown options {unknown}; known: {', '.join(known)}")
    return TRACKERS[name](**options)
