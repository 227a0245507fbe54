"""File hashes that are not computed twice, and folders that appear whole or not at all.

Stamp    `<cache>/sha256/<key of the path>.json` holds a file's digest and what stat said about it then: device, inode,
         size, mtime, ctime. While all five stand, the digest stands. ctime is the sound part: programs put size and
         mtime back (`cp -p`, `rsync -t`); the kernel sets ctime at every write, and no call sets it otherwise.
Settled  a file that changed less than 2 s ago is hashed but not stamped: a second write within one tick of the file
         system's clock would leave the same ctime (git calls such files racy).
Publish  a folder is written beside its place under another name, then renamed. Readers see no folder or a whole one; of
         two processes that build the same folder the first one wins.

Not covered: bits that rot on the disk below the file system (nothing but reading every byte on every start would tell).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvlab.host import cache_root

SETTLE_S = 2.0  # the coarsest clock of a common file system (FAT) ticks every 2 s
STALE_S = 24 * 3600  # a build folder this old belongs to a process that was killed


def hash_file(path: Path) -> str:
    """SHA-256 (hex) of the file's bytes, read now. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stat_key(path: Path) -> list[int]:
    info = os.stat(path)
    return [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]


def _stamp_path(path: Path, root: Path) -> Path:
    return root / "sha256" / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"


def remember_sha256(path: Path, digest: str, root: Path) -> None:
    """Stamp `path`; the caller vouches that `digest` belongs to its bytes and that nobody else writes it.

    A cache folder that cannot be written costs a hash next time and is no error.
    """
    stamp = _stamp_path(path, root)
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=stamp.parent, suffix=".tmp", delete=False) as file:
            json.dump({"path": str(path.resolve()), "stat": _stat_key(path), "sha256": digest}, file)
        os.replace(file.name, stamp)
    except OSError:
        return


def file_sha256(path: Path, root: Path | None = None, settle_s: float = SETTLE_S) -> str:
    """`hash_file`, but read from the stamp while the file has not been touched since.

    root: cache folder, `cache_root()` when None. Raises OSError when the file cannot be read.
    """
    root = cache_root() if root is None else root
    before, started = _stat_key(path), time.time_ns()
    try:
        stamp = json.loads(_stamp_path(path, root).read_text())
        if stamp["stat"] == before:
            return str(stamp["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no stamp, or a damaged one: hash
    digest = hash_file(path)
    if _stat_key(path) == before and started - max(before[3:]) >= settle_s * 1e9:
        remember_sha256(path, digest, root)
    return digest


def build_folder(folder: Path) -> Path:
    """An empty folder beside `folder` to build it in; removes what killed processes left there. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}.*"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))


def sync_files(folder: Path) -> None:
    """Force the files of `folder` to the disk, so that a rename never outlives its content in a power cut."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def publish(built: Path, folder: Path, is_good: Callable[[Path], bool]) -> bool:
    """Give the complete folder `built` its name. -> True when ours is now in place, False when a good one was there.

    A bad folder in the way is moved aside first, then deleted: who has its files open keeps them.
    """
    for attempt in range(1, 101):
        try:
            os.rename(built, folder)
            return True
        except OSError:
            if not folder.exists() and (attempt == 100 or not built.exists()):
                raise  # not a race: the parent is gone, or may not be written
        if not folder.exists():
            continue
        if is_good(folder):
            shutil.rmtree(built, ignore_errors=True)
            return False
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        with contextlib.suppress(FileNotFoundError):  # another process moved it first
            os.rename(folder, aside / "damaged")
        shutil.rmtree(aside, ignore_errors=True)
    raise OSError(f"{folder}: cannot be put in place, other processes keep replacing it by damaged ones")
