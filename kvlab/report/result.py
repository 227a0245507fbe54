"""result.json and rows.csv: one run, enough to print every table, draw every plot and run it again.

`rows`     one flat dict per (method, task, metric, length, depth, seed); keys in ROW
`summary`  one flat dict per method; keys in SUMMARY. null means "does not apply" and is printed as `-`
The format is result.schema.json (schema version 1); unknown keys at the top level are errors. Files are replaced
atomically: a killed run leaves the old file or the new one, never half of one.

Units: acc, kept and top1 are shares in 0..1; nll, delta_nll, kl_* are nats; bytes_per_token is bytes held divided by
tokens seen; ratio is full-cache bytes in the reference dtype divided by physical bytes; everything else named after
a ledger category is bytes.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from kvlab.errors import ConfigError, CorruptFile
from kvlab.report.provenance import provenance

__all__ = ["config_hash", "provenance", "read", "read_rows", "row", "summary_row", "validate", "write", "write_rows"]

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("result.schema.json")
ROW = (
    "method", "family", "task", "metric", "value", "n", "ci_low", "ci_high", "length", "depth", "seed", "chunk",
    "protocol", "simulated",
)  # fmt: skip
LEDGER = ("payload", "metadata", "residual", "tables", "fragmentation")  # they add up to `physical`
SUMMARY = (
    "method", "family", "ratio", "bits_per_element", "bytes_per_token", "kept",
    "acc", "acc_low", "acc_high", "acc_n", "acc_delta",
    "nll", "delta_nll", "ppl", "kl_mean", "kl_p99", "kl_max", "top1",
    "prefill_tok_s", "decode_tok_s", "peak_bytes", "physical", *LEDGER, "temporary_peak", "static", "shared",
    "tokens_seen", "simulated", "note",
)  # fmt: skip
# intervals of differences: tables and plots show them where a row carries them
SUMMARY_OPTIONAL = ("acc_delta_low", "acc_delta_high", "delta_nll_low", "delta_nll_high", "kl_mean_low", "kl_mean_high")


def row(**values: Any) -> dict:
    """A `rows` entry with every key present; a misspelt key is an error."""
    return _fill("row", ROW, (), values)


def summary_row(**values: Any) -> dict:
    """A `summary` entry with every key present; a misspelt key is an error."""
    return _fill("summary_row", SUMMARY, SUMMARY_OPTIONAL, values)


def _fill(what: str, keys: Sequence[str], optional: Sequence[str], values: dict) -> dict:
    unknown = sorted(set(values) - set(keys) - set(optional))
    if unknown:
        raise ConfigError(f"{what}: unknown keys {unknown}; known: {', '.join([*keys, *optional])}")
    return {key: values.get(key) for key in keys} | {"simulated": bool(values.get("simulated"))} | values


# ---- config hash --------------------------------------------------------------------------------------------------

_DROPPED_TOP = {"hydra", "paths", "logger", "loggers"}
_DROPPED = re.compile(r"hydra|devices?|device_name|out|(.*_)?dir")
_LOCATION = re.compile(r"(.*_)?(path|file|folder|source)s?")
_ABSOLUTE = re.compile(r"/|~|[A-Za-z]:[\\/]")


def config_hash(config: Mapping) -> str:
    """12 hex digits of the sha256 of the canonical JSON of a resolved config (mapping or OmegaConf node).

    Left out: hydra, paths and logger(s) at the top; device(s), device_name and folders to write to (out, dir, *_dir)
    at any depth. An absolute location under *path, *file, *folder or *source counts by its last part only: the same
    text in two home folders is the same experiment, another text is not.
    """
    kept = {str(k): config[k] for k in config if str(k) not in _DROPPED_TOP}
    text = json.dumps(_canonical(kept), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _canonical(node: Any, key: str = "") -> Any:
    if isinstance(node, Mapping):
        return {str(k): _canonical(node[k], str(k)) for k in node if not _DROPPED.fullmatch(str(k))}
    if isinstance(node, Enum):
        return node.name
    if isinstance(node, float) and not math.isfinite(node):
        return repr(node)  # .inf is a legal value in YAML and none in JSON
    if node is None or isinstance(node, bool | int | float):
        return node
    if isinstance(node, str | os.PathLike):
        text = os.fspath(node)
        absolute = _LOCATION.fullmatch(key) and _ABSOLUTE.match(text)
        return re.split(r"[\\/]", text.rstrip("\\/"))[-1] if absolute else text
    if isinstance(node, Sequence | set | frozenset):
        items = [_canonical(v, key) for v in node]
        return sorted(items, key=repr) if isinstance(node, set | frozenset) else items
    raise ConfigError(f"config_hash: {key or 'config'} is a {type(node).__name__}, which has no canonical JSON form")


# ---- files --------------------------------------------------------------------------------------------------------


def write(result: Mapping, folder: Path | str) -> dict[str, Path]:
    """Validate, then write result.json and rows.csv into `folder`. Returns both paths under their file names."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plain = to_json(result)
    validate(plain)
    text = json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(folder / "result.json", text + "\n")
    write_rows(plain["rows"], folder / "rows.csv", ROW)
    return {name: folder / name for name in ("result.json", "rows.csv")}


def read(path: Path | str) -> dict:
    """The validated content of a result.json, or of the one in a folder."""
    path = Path(path)
    path = path / "result.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such result file. Give a result.json or a folder that holds one.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{path}: not JSON ({error}). The file was cut or edited; run again to rebuild it.") from None
    validate(data, str(path))
    return data


def validate(result: Any, name: str = "result") -> None:
    """Raise CorruptFile with every violation of the schema (at most 10 are listed), each with its place."""
    found = result.get("schema") if isinstance(result, Mapping) else None
    if isinstance(found, int) and found > SCHEMA_VERSION:
        raise CorruptFile(
            f"{name}: schema version {found}, this kvlab reads up to {SCHEMA_VERSION}. Use a newer kvlab to read it."
        )
    errors = sorted(_validator().iter_errors(result), key=lambda e: [str(p) for p in e.absolute_path])
    if errors:
        places = [f"  {'.'.join(map(str, e.absolute_path)) or '(top)'}: {e.message[:200]}" for e in errors[:10]]
        more = [f"  ... and {len(errors) - 10} more"] if len(errors) > 10 else []
        raise CorruptFile("\n".join([f"{name}: not a valid result (schema {SCHEMA_VERSION}):", *places, *more]))


@cache
def _validator():
    import jsonschema

    return jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))


def to_json(result: Mapping) -> dict:
    """A copy with plain Python values. NaN and infinity, which JSON lacks, become null and a line in `warnings`."""
    odd: list[str] = []
    plain = _plain(result, "", odd)
    if odd:
        plain["warnings"] = [*(plain.get("warnings") or []), *(f"not finite, stored as null: {o}" for o in odd)]
    return plain


def _plain(node: Any, place: str, odd: list[str]) -> Any:
    if isinstance(node, Mapping):
        return {str(k): _plain(node[k], f"{place}.{k}" if place else str(k), odd) for k in node}
    if node is None or isinstance(node, str | bool | int):
        return node
    if isinstance(node, float):
        if math.isfinite(node):
            return float(node)
        odd.append(f"{place} = {node}")
        return None
    if isinstance(node, os.PathLike):
        return os.fspath(node)
    if isinstance(node, Enum):
        return node.name
    if hasattr(node, "tolist"):  # numpy and torch scalars and arrays
        return _plain(node.tolist(), place, odd)
    if isinstance(node, Sequence | set | frozenset):
        return [_plain(v, f"{place}[{i}]", odd) for i, v in enumerate(node)]
    raise ConfigError(f"result: {place} is a {type(node).__name__}; a result holds numbers, strings, lists and dicts")


def write_rows(rows: Sequence[Mapping], path: Path | str, keys: Sequence[str] = ()) -> Path:
    """CSV with a header; columns are `keys`, then any other key in order of appearance. None is an empty cell."""
    columns = list(dict.fromkeys([*keys, *(key for r in rows for key in r)]))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for r in rows:
        writer.writerow(["" if r.get(c) is None else r[c] for c in columns])
    return write_text(Path(path), out.getvalue())


def read_rows(path: Path | str) -> list[dict]:
    """The rows of a CSV written by `write_rows`: empty cells are None, numbers and booleans have their type back."""
    with open(path, newline="", encoding="utf-8") as file:
        return [{key: _cell(text) for key, text in r.items()} for r in csv.DictReader(file)]


def _cell(text: str) -> Any:
    if text in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def write_text(path: Path, text: str) -> Path:
    """Replace `path` by `text` in one step, from a temporary file in the same folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes 0600: a shared results folder must stay readable
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
