"""Hashes are computed once per content, never once too seldom; folders appear whole."""

import hashlib
import json
import os
import time

import pytest

from kvlab.models import files


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_stamped_file_is_not_read_again(tmp_path):
    path, root = tmp_path / "w", tmp_path / "cache"
    path.write_bytes(b"abc")
    assert files.file_sha256(path, root, settle_s=0) == sha(b"abc")
    (stamp,) = (root / "sha256").glob("*.json")
    stamp.write_text(json.dumps(json.loads(stamp.read_text()) | {"sha256": "from the stamp"}))
    assert files.file_sha256(path, root, settle_s=0) == "from the stamp"


def test_a_change_that_keeps_size_and_mtime_is_seen(tmp_path):
    """Fails for a stamp of size and mtime only: `cp -p` of another file over this one keeps both."""
    path, root = tmp_path / "w", tmp_path / "cache"
    path.write_bytes(b"abc")
    before = path.stat()
    files.file_sha256(path, root, settle_s=0)
    time.sleep(0.02)  # one tick of the clock that stamps ctime
    path.write_bytes(b"abd")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert files.file_sha256(path, root, settle_s=0) == sha(b"abd")


def test_a_file_that_has_just_changed_is_hashed_but_not_stamped(tmp_path):
    path, root = tmp_path / "w", tmp_path / "cache"
    path.write_bytes(b"abc")
    assert files.file_sha256(path, root) == sha(b"abc")
    assert not list(root.glob("sha256/*"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"stat": 1}', "\x00"])
def test_a_damaged_stamp_is_ignored_and_replaced(tmp_path, content):
    path, root = tmp_path / "w", tmp_path / "cache"
    path.write_bytes(b"abc")
    files.file_sha256(path, root, settle_s=0)
    (stamp,) = (root / "sha256").glob("*.json")
    stamp.write_text(content)
    assert files.file_sha256(path, root, settle_s=0) == sha(b"abc")
    assert json.loads(stamp.read_text())["sha256"] == sha(b"abc")


def test_a_cache_that_cannot_be_written_costs_only_the_hash(tmp_path):
    path, root = tmp_path / "w", tmp_path / "cache"
    path.write_bytes(b"abc")
    root.write_text("a file where the folder should be")
    assert files.file_sha256(path, root, settle_s=0) == sha(b"abc")


def test_the_cache_folder_follows_the_xdg_standard(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert files.cache_root() == tmp_path / "x" / "kvlab"
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert files.cache_root() == tmp_path / ".cache" / "kvlab"


def good(folder):
    return (folder / "good").is_file()


def build(folder, content: str):
    built = files.build_folder(folder)
    (built / "good").write_text(content)
    return built


def left_beside(folder) -> set[str]:
    return {path.name for path in folder.parent.iterdir()}


def test_the_first_of_two_complete_folders_stays(tmp_path):
    folder = tmp_path / "m"
    first, second = build(folder, "first"), build(folder, "second")
    assert files.publish(first, folder, good) is True
    assert files.publish(second, folder, good) is False
    assert (folder / "good").read_text() == "first"
    assert left_beside(folder) == {"m"}


@pytest.mark.parametrize("make", ["folder", "empty", "file"])
def test_what_is_not_a_good_folder_is_replaced(tmp_path, make):
    folder = tmp_path / "m"
    folder.write_text("x") if make == "file" else folder.mkdir()
    if make == "folder":
        (folder / "half").write_text("x")
    assert files.publish(build(folder, "ours"), folder, good) is True
    assert (folder / "good").read_text() == "ours"
    assert left_beside(folder) == {"m"}


def test_building_removes_only_what_dead_processes_left(tmp_path):
    folder = tmp_path / "m"
    old, young = build(folder, "old"), build(folder, "young")
    day_ago = time.time() - files.STALE_S - 60
    os.utime(old, (day_ago, day_ago))
    files.build_folder(folder)
    assert not old.exists()
    assert young.exists()
