"""Which code a number came from: changes of code count, measured rows do not."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from kvlab.report.provenance import code


@pytest.fixture
def checkout(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("no git")
    for name in ("kvlab/a.py", "benchmarks/results/x.jsonl", "configs/b.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    for args in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "first")):
        subprocess.run(["git", "-C", str(tmp_path), *args], check=True)
    return tmp_path


def test_rows_that_were_just_measured_do_not_make_the_code_dirty(checkout):
    folder = checkout / "kvlab"
    assert code(folder)["dirty"] is False
    (checkout / "benchmarks/results/x.jsonl").write_text("2\n")
    assert code(folder)["dirty"] is False


@pytest.mark.parametrize("name", ["kvlab/a.py", "kvlab/new.py", "configs/b.yaml"])
def test_changed_and_new_code_does(checkout, name):
    (checkout / name).write_text("2\n")
    facts = code(checkout / "kvlab")
    assert facts["dirty"] is True and facts["diff_sha256"]


def test_a_folder_that_is_not_tracked_has_no_commit(checkout):
    (checkout / "other").mkdir()
    assert code(checkout / "other")["git_commit"] is None
