"""Where a number came from: machine, package versions, code version (evaluation.md 12).

Everything is read, nothing is guessed: what cannot be known is None. Package versions come from the installed
metadata, so no package is imported; the GPU is named only when torch is loaded already.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]  # the kvlab package folder
MEASURED = ("benchmarks/results", "experiments/overview", "experiments/speed")
PACKAGES = ("torch", "triton", "transformers", "lm_eval", "hydra-core", "numpy", "safetensors", "tokenizers")


def provenance(folder: Path | str = PACKAGE) -> dict:
    """{host, packages, code}: the three keys as result.json holds them. `folder`: the code whose version is asked."""
    return {"host": host(), "packages": packages(), "code": code(Path(folder))}


def host() -> dict:
    """cpu (name), cores (usable by this process), ram (bytes), gpu (name, or None), os."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": _cpu(), "cores": usable, "ram": _ram(), "gpu": _gpu(), "os": platform.platform(terse=True)}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _ram() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _gpu() -> str | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name()


def packages() -> dict[str, str | None]:
    """Installed versions; None where a package is absent."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def code(folder: Path = PACKAGE) -> dict:
    """kvlab_version, git_commit, dirty, diff_sha256; the last three are None outside a checkout of this code.

    An installed copy inside somebody else's repository is not a checkout of this code: the folder must be tracked.
    Dirty counts edits to tracked files and new files next to the code (a new method is a change of the code), but not
    rows that were just measured and what is drawn from them.
    """
    version = _version("kvlab")
    unknown = {"kvlab_version": version, "git_commit": None, "dirty": None, "diff_sha256": None}
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or not _git(folder, "ls-files", "."):
        return unknown
    digest = hashlib.sha256()
    not_code = [f":(top,exclude){path}" for path in MEASURED]
    changes = _git(folder, "diff", "--no-ext-diff", "--binary", "HEAD", "--", ":(top)", *not_code) or b""
    digest.update(changes)
    new = sorted((_git(folder, "ls-files", "--others", "--exclude-standard", "-z", ".") or b"").split(b"\0"))
    for name in filter(None, new):
        path = folder / os.fsdecode(name)
        digest.update(b"\0" + name + b"\0" + (path.read_bytes() if path.is_file() else b""))
    dirty = bool(changes) or any(new)
    return {
        "kvlab_version": version,
        "git_commit": commit.decode().strip(),
        "dirty": dirty,
        "diff_sha256": digest.hexdigest() if dirty else None,
    }


def _git(folder: Path, *args: str) -> bytes | None:
    """Output of a read-only git command, or None when git is absent, slow or says no."""
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, timeout=30, env=env, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
