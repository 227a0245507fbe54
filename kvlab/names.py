"""Method names and their YAML, without importing a method: the folder is the registry."""

from __future__ import annotations

import difflib
import hashlib
import itertools
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
        raise ConfigError(
            f"there is no method {name!r}: {hint}kvlab has {', '.join(names())}, and pipelines such as snapkv+int4"
        )
    return OmegaConf.load(FOLDER / f"{name}.yaml")


def about(path: Path) -> tuple[str, str]:
    """(what it is, a command that runs it) from the comment at the top of a YAML file."""
    head = list(itertools.takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines()))
    commands = [m[1] for m in (re.search(r"(python -m kvlab [^#]*)", line) for line in head) if m]
    command = re.split(r" {3}", commands[0])[0].strip() if commands else ""
    return "\n".join(line.lstrip("# ") for line in head if "python -m kvlab" not in line), command


def near_keys(cfg: DictConfig, key: str, methods: list[str]) -> str:
    """What there is where the unknown `key` was looked for. `methods`: the chosen ones, absent from cfg."""
    who = ""
    if key.startswith("method."):
        if not methods:
            return f"No method is chosen: add +method=NAME, one of {', '.join(names())}."
        lacks = [m for m in methods if not _holds(OmegaConf.create({"method": config(m)}), key)]
        method = (lacks or methods)[0]
        who, cfg = f"method {method}", OmegaConf.create({"method": config(method)})
    parent, _, name = key.rpartition(".")
    while parent and not isinstance(OmegaConf.select(cfg, parent), DictConfig):
        parent, _, name = parent.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    known = [str(k) for k in node if k not in ("_target_", "name")]
    near = [f"{parent}.{n}".lstrip(".") for n in difflib.get_close_matches(name, known, n=2)]
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    where = who if parent == "method" and who else parent or "the config"
    return f"{hint}Keys of {where}: {', '.join(known)}."


def _holds(cfg: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, parent)
    return isinstance(node, DictConfig) and name in node


def folder_name(override_dirname: str) -> str:
    """A run folder's name from Hydra's override string: readable, no odd characters, at most 100 of them."""
    text = re.sub(r"[^A-Za-z0-9_.=+,-]", "_", override_dirname.replace("+method=", "").replace("method=", "")) or "full"
    return text if len(text) <= 100 else f"{text[:90]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
