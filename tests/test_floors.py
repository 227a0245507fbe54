"""The floors hold, the contract that holds them sees every folder, and nothing of ours shadows another distribution."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from front import ROOT

from kvlab import names

pytest.importorskip("importlinter", reason="needs import-linter: pip install kvlab[dev]")
LINT = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"


def lint(folder: Path) -> subprocess.CompletedProcess:
    """`lint-imports` in a folder with a pyproject.toml and a package kvlab. It reads sources, it imports nothing."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([sys.executable, "-c", LINT], cwd=folder, env=env, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path) -> Path:
    """The sources alone, to plant something in."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(
        ROOT / "kvlab", tmp_path / "kvlab", ignore=shutil.ignore_patterns("__pycache__", "*.yaml", "*.json")
    )
    return tmp_path


def test_every_file_imports_from_its_own_floor_or_from_below():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/affine.py", "from kvlab.cache.layout import Geom"),  # no __init__.py: invisible unless it is a root
        ("kernels/cpu/build.py", "import kvlab.codec"),  # a folder in it, without one either
        ("cache/tiles.py", "from kvlab.methods.int8 import Int8"),
        ("cache/pool.py", "def hidden():\n    import kvlab.methods.kivi"),  # inside a function it is still an import
        ("engine/engine.py", "import kvlab.methods.full"),
        ("engine/scheduler.py", "from kvlab.models.seam import Runner"),
        ("families/pruner.py", "from kvlab.engine.sequence import Sequence"),
        ("methods/int8.py", "from kvlab.models.load import Loaded"),
        ("methods/snapkv.py", "from kvlab.engine.scheduler import Scheduler"),
        ("models/tiny.py", "import kvlab.methods.full"),
        ("report/table.py", "import kvlab.lab"),
        ("tasks/needle.py", "from kvlab.session import Session"),
        ("codec.py", "from kvlab.compressor import Compressor"),
        ("extra.py", '"""A new file that no floor names."""'),
    ],
)
def test_a_planted_import_of_a_higher_floor_breaks_the_contract(copy, file, line):
    """Fails when a folder is invisible to the linter: it then keeps every contract whatever the folder imports."""
    path = copy / "kvlab" / file
    path.write_text((path.read_text("utf-8") if path.exists() else "") + f"\n\n{line}\n", encoding="utf-8")
    done = lint(copy)
    assert done.returncode == 1, done.stdout[-2000:]
    assert f"kvlab.{file.removesuffix('.py').replace('/', '.')}" in done.stdout or "extra" in done.stdout


def test_the_runtime_never_writes_the_name_of_a_method():
    """`if name == "snapkv"` in the cache or the engine: an import contract cannot see a string."""
    own = [n for n in names.names() if n not in ("full", "random", "composed")]  # those are words of the language too
    pattern = re.compile(rf"(?<![.\w])({'|'.join(own)})(?![.\w])", re.I)  # np.int8 is a type
    found = []
    for path in [p for folder in ("cache", "engine") for p in sorted((ROOT / "kvlab" / folder).rglob("*.py"))]:
        code = re.sub(r'""".*?"""|#[^\n]*', "", path.read_text("utf-8"), flags=re.S)  # comments may cite a method
        found += [f"{path.name}: {m[0]}" for m in pattern.finditer(code)]
    assert not found, found


@pytest.mark.parametrize("folder", ["kernels", "methods", "configs"])
def test_the_folders_at_the_top_are_links_into_the_package(folder):
    link = ROOT / folder
    if not (ROOT / ".git").exists():
        pytest.skip("an installed copy has no links")
    assert link.is_symlink() and os.readlink(link) == f"kvlab/{folder}", "relative, or a clone points into nowhere"


@pytest.mark.parametrize("folder", ["kernels", "methods"])
def test_a_bare_import_finds_the_distribution_of_that_name_and_not_our_folder(tmp_path, folder):
    """transformers imports a distribution `kernels`. Fails as soon as somebody adds an __init__.py to ours."""
    assert not (ROOT / "kvlab" / folder / "__init__.py").exists()
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "__init__.py").write_text("who = 'the distribution'\n")
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; import {folder}; print({folder}.who)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "the distribution", done.stderr
