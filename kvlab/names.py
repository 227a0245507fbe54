"""Method names and their YAML, without importing a method: the folder is the registry."""

from __future__ import annotations

import difflib
import hashlib
import re
from functools import lru_cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from kvlab.errors import ConfigError

FOLDER = Path(__file__).parent / "configs" / "method"


@lru_cache
def names() -> tuple[str, ...]:
    """Every method there is, from the folder."""
    return tuple(sorted(p.stem for p in FOLDER.glob("*.yaml")))


def config(name: str) -> DictConfig:
    """The YAML of a method, or of a pipeline `a+b`. ConfigError with the nearest names when there is no such method."""
    if "+" in name:
        parts = name.split("+")
        stages = {str(i): config(part) for i, part in enumerate(parts)}
        return OmegaConf.create({"_target_": "kvlab.methods.composed.composed", "stages": stages})
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"there is no method {name!r}: {hint}kvlab has {', '.join(names())}, and pipelines such as snapkv+int4")
    return OmegaConf.load(FOLDER / f"{name}.yaml")


def folder_name(override_dirname: str) -> str:
    """A run folder's name from Hydra's override string: readable, no odd characters, at most 100 of them."""
    text = re.sub(r"[^A-Za-z0-9_.=+,-]", "_", override_dirname.replace("+method=", "").replace("method=", "")) or "full"
    return text if len(text) <= 100 else f"{text[:90]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
