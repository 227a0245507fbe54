"""Methods by name: a folder of YAML files, each naming its class and options. No table of objects, no `if name ==`.

build("turboquant", bits_k=3)      build("snapkv+int4")      build({"snapkv": {"tokens": 128}, "int4": {}})
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import numbers
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvlab.codec import Codec
from kvlab.compressor import Compressor
from kvlab.errors import ConfigError
from kvlab.families.pruner import Pruner
from kvlab.names import config


def build(method: str | Mapping[str, Any] | None = None, **options: Any) -> Compressor:
    """A fresh Compressor. `method`: a name, a pipeline "a+b", {name: options} in order, or a config with `_target_`."""
    from kvlab.methods.composed import compose

    if method is None:
        method = "full"
    if not isinstance(method, str | Mapping | DictConfig):
        raise ConfigError(f'method={method!r} must be a name, a pipeline "a+b", or {{name: options}}')
    if isinstance(method, str):
        method = (
            OmegaConf.merge(config(method), options) if "+" not in method or not options else _deny(method, options)
        )
    elif options:
        raise ConfigError(f"options {', '.join(options)} need a method given by name")
    if "_target_" in method:
        return compose([instantiate(method)])
    for name, opts in method.items():
        if not isinstance(opts, Mapping | DictConfig | None):
            raise ConfigError(
                f'method={{{name!r}: {opts!r}}}: options are a mapping, e.g. {{{name!r}: {{"tokens": 128}}}}'
            )
    return compose([instantiate(OmegaConf.merge(config(name), opts or {})) for name, opts in method.items()])


def _deny(method: str, options: Mapping[str, Any]) -> DictConfig:
    raise ConfigError(
        f"options {', '.join(options)} do not say which part of {method!r} they mean; "
        'use method={"snapkv": {"tokens": 128}, "int4": {}}'
    )


def instantiate(cfg: Mapping[str, Any]) -> Any:
    """Call what `_target_` names with the other keys; nested configs first.

    Only methods are called: a Codec, a Pruner or a Compressor, or a function of kvlab.methods. Configs come from result
    files too, which anybody may have written.
    """
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
    cls = _target(str(node["_target_"]))
    known = {f.name: f for f in fields(cls) if f.init} if is_dataclass(cls) else {}
    for key in values if known else ():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ConfigError(f"{cls.__name__} has no option {key!r}: {hint}It takes {', '.join(known)}.")
    if known:
        check_types(cls, values, f"{cls.__name__.lower()}: ")
    return cls(**values)


def _target(name: str) -> Any:
    module, _, attr = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attr)
    except (ImportError, AttributeError, ValueError) as err:
        raise ConfigError(f"_target_={name!r} cannot be imported: {err}") from err
    is_class = isinstance(found, type) and issubclass(found, Codec | Pruner | Compressor)
    if not is_class and not (inspect.isfunction(found) and found.__module__.startswith("kvlab.methods.")):
        raise ConfigError(f"_target_={name!r} is no method: a Codec, a Pruner or a Compressor is wanted")
    return found


def check_types(cls: type, values: Mapping[str, Any], who: str) -> None:
    """ConfigError for the first value that is not what the dataclass says; `who` starts the message."""
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # an annotation that exists for type checkers only
        return
    for f in fields(cls):
        if f.name in values and not _fits(values[f.name], hints[f.name]):
            raise ConfigError(f"{who}{f.name}={values[f.name]!r} must be {_words(f.type)}")


def _fits(value: Any, hint: Any) -> bool:
    """Is a value from a config what the annotation says? Only plain types are judged."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, h) for h in typing.get_args(hint))
    if hint is types.NoneType:
        return value is None
    if hint in (int, float):
        return isinstance(value, numbers.Integral if hint is int else numbers.Real) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (str, bool) else True


def _words(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    names = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "None": "null"}
    return " or ".join(names.get(part.strip(), part.strip()) for part in text.split("|"))
