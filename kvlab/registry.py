"""Methods by name: a folder of YAML files, each naming its class and options. No table of objects, no `if name ==`.

    build("turboquant", bits_k=3)      build("snapkv+int4")      build({"snapkv": {"tokens": 128}, "int4": {}})
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvlab.compressor import Compressor
from kvlab.errors import ConfigError
from kvlab.names import config

def build(method: str | Mapping[str, Any] | None = None, **options: Any) -> Compressor:
    """A fresh Compressor. `method`: a name, a pipeline "a+b", {name: options} in order, or a config with `_target_`."""
    from kvlab.methods.composed import compose

    if method is None:
        method = "full"
    if isinstance(method, str):
        method = OmegaConf.merge(config(method), options) if "+" not in method or not options else _deny(method, options)
    elif options:
        raise ConfigError(f"options {', '.join(options)} need a method given by name")
    if "_target_" in method:
        return compose([instantiate(method)])
    return compose([instantiate(OmegaConf.merge(config(name), opts or {})) for name, opts in method.items()])


def _deny(method: str, options: Mapping[str, Any]) -> DictConfig:
    raise ConfigError(
        f"options {', '.join(options)} do not say which part of {method!r} they mean; "
        'use method={"snapkv": {"tokens": 128}, "int4": {}}'
    )


def instantiate(cfg: Mapping[str, Any]) -> Any:
    """Call the class named by `_target_` with the other keys; nested configs first. Only kvlab's own and imported code."""
    plain = OmegaConf.to_container(cfg, resolve=True) if isinstance(cfg, DictConfig) else dict(cfg)
    return _instantiate(plain)


def _instantiate(node: Any) -> Any:
    if isinstance(node, list):
        return [_instantiate(x) for x in node]
    if not isinstance(node, dict):
        return node
    values = {k: _instantiate(v) for k, v in node.items() if k != "_target_"}
    if "_target_" not in node:
        return values
    module, _, attr = node["_target_"].rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), attr)
    except (ImportError, AttributeError, ValueError) as err:
        raise ConfigError(f"_target_={node['_target_']!r} cannot be imported: {err}") from err
    try:
        return cls(**values)
    except TypeError as err:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(err))
        if unknown is None:
            raise
        known = [k for k in getattr(cls, "__dataclass_fields__", {})]
        near = difflib.get_close_matches(unknown[1], known, n=3)
        raise ConfigError(
            f"{attr} has no option {unknown[1]!r}{': did you mean ' + ' or '.join(near) + '?' if near else ''} "
            f"It takes {', '.join(known)}."
        ) from err
