"""What README and docs say works: their methods are added and tested as written, their commands compose or run."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from front import FIDELITY, ROOT, environment

from kvlab.cli import COMMANDS, _prepare, check_words, choices, rewrite
from kvlab.names import names

PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if p.is_file()]
RECIPE = ROOT / "docs" / "add_a_method.md"
pytestmark = pytest.mark.skipif(not RECIPE.is_file(), reason="an installed copy has no docs")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, as written."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


def commands(page: Path) -> list[str]:
    """Every `python -m kvlab ...` of a page: in bash blocks, and between back-quotes."""
    text = page.read_text("utf-8")
    lines = [line for b in blocks(page, "bash") for line in b.splitlines()]
    lines += re.findall(r"`(python -m kvlab[^`]*)`", re.sub(r"```.*?```", "", text, flags=re.S))
    found = [re.search(r"python -m kvlab\b[^#]*", line) for line in lines]
    return list(dict.fromkeys(m[0].strip() for m in found if m))


def files() -> dict[str, str]:
    """path -> text of the blocks of the recipe whose first line is a comment that names a file."""
    out = {}
    for block in [*blocks(RECIPE, "python"), *blocks(RECIPE, "yaml")]:
        name = re.match(r"# ([\w./-]+\.(?:py|yaml))\b", block)
        if name:
            out[name[1]] = block
    return out


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The package with the recipe's files in it."""
    root = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "kvlab", root / "kvlab", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in files().items():
        path = root / name
        assert not path.exists(), f"{name} is a real file of the package: the toy would hide it"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


RUN = """
import json, os, runpy, sys, tempfile, traceback
import torch
torch.set_num_threads(1)
import pytest
from kvlab.cli import main
from kvlab.report import combine
combine.write.__defaults__ = (("md", "csv"), ())  # pictures take most of the time of a tiny run
job = json.loads(sys.stdin.read())
assert __import__("kvlab").__file__.startswith(os.getcwd()), "another kvlab was imported"
told = {"tests": int(pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *job["tests"]])), "commands": {}}
for command, argv in job["commands"].items():
    try:
        main(argv)
    except SystemExit as stop:
        told["commands"][command] = stop.code
for script in job["scripts"]:
    exec(compile(script, "docs", "exec"), {})
print("TOLD " + json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(clone) -> dict:
    """One process in the clone runs the tests, the commands on a tiny model, and the loose Python blocks."""
    tests = [name for name in files() if name.startswith("tests/")]
    argvs = {}
    for command in commands(RECIPE):
        argv = shlex.split(command)[3:]
        if argv[0] not in COMMANDS:
            argvs[command] = tiny(argv)
    scripts = [b for b in blocks(RECIPE, "python") if not b.startswith("# ")]
    job = {"tests": tests, "commands": argvs, "scripts": scripts}
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=clone, input=json.dumps(job), capture_output=True, text=True,
        env=environment() | {"PYTHONPATH": str(clone)},
    )  # fmt: skip
    assert done.returncode == 0 and "TOLD" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("TOLD ")[2]) | {"out": done.stdout, "err": done.stderr, "jobs": argvs}


def tiny(argv: list[str]) -> list[str]:
    """The same command on a tiny model and a text of 64 tokens: budgets below it, groups that fit its head of 16."""
    argv = [re.sub(r"tokens=64,128", "tokens=36,40", a) for a in argv if not a.startswith("task=")]
    argv = [re.sub(r"(tokens=)(64|128)$", r"\g<1>40", a) for a in argv]
    more = [a for a in FIDELITY if not a.startswith("model=")]
    if any(a.endswith("+int8") for a in argv):
        more.append("method.stages.1.group=16")
    if any(a.endswith("shortkeys+int8") for a in argv) and not any("stages.0" in a for a in argv):
        more.append("method.stages.0.tokens=40")
    return [*argv, "model=tiny_llama", *more]


def test_the_recipe_holds_three_methods_each_with_a_yaml_and_a_test():
    """Fails when a block loses its file name: it would be shown and not run."""
    names_ = {Path(f).stem.removeprefix("test_") for f in files()}
    assert names_ == {"shortkeys", "onebit", "exact_first"}
    assert len(files()) == 9
    whole = RECIPE.read_text("utf-8")
    assert whole.count("```python") == len(blocks(RECIPE, "python")) and whole.count("```yaml") == 3


def test_the_methods_of_the_recipe_pass_their_own_tests(told):
    assert told["tests"] == 0, told["out"]
    assert re.search(r"\b8 passed", told["out"]), told["out"]


def test_the_commands_of_the_recipe_run(told):
    assert len(told["jobs"]) >= 5
    failed = {c: code for c, code in told["commands"].items() if code}
    assert not failed, (failed, told["err"][-2000:])


def test_the_scorer_is_as_short_as_the_recipe_says():
    def code(name: str) -> int:
        text = re.sub(r'"""(?:.|\n)*?"""', "", files()[name], count=1)
        return sum(bool(line.strip()) and not line.startswith("#") for line in text.splitlines())

    assert code("kvlab/methods/shortkeys.py") <= 15
    assert code("kvlab/methods/onebit.py") <= 40


@pytest.mark.parametrize("file", [f for f in files() if f.endswith(".py")] if RECIPE.is_file() else [])
def test_the_code_of_the_recipe_is_formatted_as_ours(file, tmp_path):
    """What is copied from a page should pass `make check`."""
    ruff = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))
    if not Path(ruff).exists():
        pytest.skip("needs ruff")
    path = tmp_path / Path(file).name
    path.write_text(files()[file], encoding="utf-8")
    config = ["--config", str(ROOT / "pyproject.toml")]
    for verb in (
        ["format", "--check", "--diff"],
        ["check", "--ignore", "I001"],
    ):  # no package around it: imports differ
        done = subprocess.run([ruff, *verb, *config, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def filled(word: str) -> str:
    """A place holder as a value."""
    return word.replace("ORG/NAME", "org/name").replace("=DIR", "=folder").replace("=FILE", "=file.txt").rstrip(",")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_on_a_page_composes(page):
    """`--cfg job` of each, without torch. Fails when an option is renamed and a page is not."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    from kvlab.names import folder_name

    OmegaConf.register_new_resolver("kvlab_name", folder_name, replace=True)
    toys = {Path(f).stem for f in files()} - set(names())
    for command in commands(page):
        argv = [filled(word) for word in shlex.split(command)[3:]]
        if argv and argv[0] in COMMANDS:
            continue  # the next test
        if any(toy in word for word in argv for toy in toys):
            assert page == RECIPE, f"{page.name} uses a toy: {command}"
            continue  # run by the recipe's own test
        args = rewrite([a for a in argv if a != "-m"])
        check_words(args)
        asked = choices(args)
        _prepare(asked)
        single = [[a for a in args if not a.startswith("+method=")]]
        if asked:
            single = [[f"+method={name}", *single[0]] for name in asked]
        with initialize_config_module("kvlab.configs", version_base="1.3"):
            for words in single:
                first = [re.sub(r"^([^=\[]*=[^,\[]*),.*", r"\1", w) for w in words]
                compose("config", first)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_small_command_on_a_page_has_the_words_that_it_takes(page):
    from typer.main import get_command

    from kvlab.commands import app

    group = get_command(app)
    for command in commands(page):
        argv = shlex.split(command)[3:]
        if argv and argv[0] in COMMANDS:
            group.commands[argv[0]].make_context(argv[0], argv[1:])  # raises for a word that it does not take


def test_no_page_points_at_a_file_that_is_not_there():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} points at {target}"
