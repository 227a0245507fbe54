"""Every YAML in every group: it composes, its comments and defaults are true, what it names exists."""

import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from kvlab import names, registry
from kvlab.cli import _prepare, check_words, choices, rewrite
from kvlab.engine.config import EngineCfg
from kvlab.errors import ConfigError
from kvlab.models import load, tiny
from kvlab.report.result import config_hash
from kvlab.session import TASKS, check_kinds

FOLDER = Path(names.__file__).parent / "configs"
FILES = sorted(p.relative_to(FOLDER).with_suffix("") for p in FOLDER.glob("*/*.yaml") if p.parent.name != "local")
METHODS = [name for name in names.names() if name != "composed"]


@pytest.fixture(scope="module", autouse=True)
def app():
    """The config folder of the real app, composed as the command line does."""
    OmegaConf.register_new_resolver("kvlab_name", names.folder_name, replace=True)
    with initialize_config_module("kvlab.configs", version_base="1.3"):
        yield


@cache
def composed(*argv: str) -> dict:
    """What `python -m kvlab ARGV` would run with. Shared: read it only."""
    args = rewrite(list(argv))
    check_words(args)
    _prepare(choices(args))
    return OmegaConf.to_container(compose("config", args), resolve=True)


def extra(group: str, name: str) -> list[str]:
    """What the user must give with a choice."""
    return ["model.path=somewhere"] if (group, name) in (("model", "local"), ("model", "hf")) else []


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_of_every_group_composes_by_its_name(file):
    group, name = file.parts
    cfg = composed(f"{group}={name}", *extra(group, name))
    own = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{file}.yaml"))
    for key, value in own.items():
        if value != "???":
            assert cfg[group][key] == value, f"{group}.{key} is lost in the composed config"
    check_kinds(cfg)


def test_the_walk_over_the_folder_sees_every_group():
    """Fails when a group is added whose files no test composes, or when one loses its files."""
    assert {f.parts[0] for f in FILES} >= {"method", "model", "runtime", "task", "protocol", "logger"}
    assert {p.name for p in FOLDER.iterdir() if p.is_dir()} - {"__pycache__", "local"} == {f.parts[0] for f in FILES}
    assert not list(FOLDER.glob("*.yml")), "Hydra reads .yaml only"


def test_both_spellings_of_a_method_compose_to_the_same_config():
    assert composed("method=int8") == composed("+method=int8") != composed()
    for argv in (["method=a,b"], ["-m", "method=a"], ["task=needle", "method=a+b"]):
        assert rewrite(argv) == [f"+{a}" if a.startswith("method=") else a for a in argv]
    kept = ["method.bits=3", "+method=x", "model=tiny_llama", "+method@method.stages.0=snapkv"]
    assert rewrite(kept) == kept, "only the choice of a method is rewritten"


def test_pipelines_compose_without_a_file_also_in_a_list_of_a_sweep():
    assert choices(rewrite(["-m", "method=full,snapkv+int4,kivi"])) == ["full", "snapkv+int4", "kivi"]
    cfg = composed("+method=snapkv+turboquant", "method.stages.1.bits_k=2")
    assert [s["_target_"].rpartition(".")[2] for s in cfg["method"]["stages"].values()] == ["SnapKV", "TurboQuant"]
    assert cfg["method"]["stages"]["1"]["bits_k"] == 2
    assert "snapkv+turboquant.yaml" in ConfigStore.instance().list("method")


def test_the_default_run_is_the_full_cache_on_the_overview():
    cfg = composed()
    assert cfg["method"] is None and cfg["task"]["name"] == "overview" and cfg["model"]["name"] == "smollm2"
    assert cfg["protocol"]["name"] == "query_agnostic", "the honest protocol is the default"


@pytest.mark.parametrize("name", METHODS)
def test_the_defaults_of_a_method_file_are_those_of_its_class(name):
    """Fails when a default is changed on one side only: the Python API and the command line would then differ."""
    cfg = OmegaConf.to_container(names.config(name))
    made = registry.instantiate(cfg)
    assert type(made).__name__.lower() == name.replace("_", "")
    for f in dataclasses.fields(made):
        if f.name not in cfg:
            continue
        assert f.default == cfg[f.name], f"{name}.{f.name}: {cfg[f.name]!r} in YAML, {f.default!r} in the class"


@pytest.mark.parametrize("name", names.names())
def test_a_method_file_says_what_it_is_how_to_run_it_and_what_every_key_means(name):
    path = FOLDER / "method" / f"{name}.yaml"
    lines = path.read_text("utf-8").splitlines()
    about, command = names.about(path)
    assert about and len(about.splitlines()[0]) > 20
    assert command.startswith("python -m kvlab +method="), f"{path}: the first comment must hold a command"
    bare = [line for line in lines if re.match(r"\w+:", line) and "#" not in line and "_target_" not in line]
    assert not bare, f"{path}: keys without a comment: {bare}"
    assert max(map(len, lines)) <= 140


@pytest.mark.parametrize("file", FILES, ids=str)
def test_the_command_in_the_first_comment_of_a_file_composes(file):
    _, command = names.about(FOLDER / f"{file}.yaml")
    if not command:
        return
    words = command.removeprefix("python -m kvlab ").replace("ORG/NAME", "org/name").replace("DIR", "folder").split()
    composed(*[w for w in words if w != "-m"])


def test_every_task_file_has_a_module_and_every_module_a_file():
    import importlib

    assert sorted(TASKS) == sorted(f.name for f in FILES if f.parts[0] == "task")
    for name in TASKS:
        assert callable(importlib.import_module(f"kvlab.tasks.{name}").run)
        assert composed(f"task={name}")["task"]["name"] == name


def test_every_model_file_names_a_model_that_the_loader_knows():
    for file in FILES:
        if file.parts[0] == "model":
            cfg = composed(f"model={file.name}", *extra(*file.parts))["model"]
            assert load.ModelCfg(**cfg).name == file.name
    assert {f.name for f in FILES if f.parts[0] == "model"} == {"smollm2", "local", "hf", *tiny.NAMES}


def test_the_runtime_file_holds_every_field_of_the_engine():
    """Fails when a field is added to EngineCfg that no config can reach."""
    cfg = composed()["runtime"]
    assert set(cfg) == {f.name for f in dataclasses.fields(EngineCfg)}
    registry.check_types(EngineCfg, {k: v for k, v in cfg.items() if v is not None}, "runtime.")


@pytest.mark.parametrize(
    "argv", [["task.chunk=3"], ["+method=int4", "method.bitz=3"], ["runtime.blok=8"], ["model.size=3"]]
)
def test_a_key_that_no_file_knows_does_not_compose(argv):
    with pytest.raises(ConfigCompositionException, match="Could not override"):
        composed(*argv)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (["out=elsewhere"], True),
        (["logger=wandb"], True),
        (["model.device=cuda"], True),
        (["method.bits_k=3"], False),
        (["method.seed=1"], False),
        (["seed=1"], False),
        (["runtime.block=64"], False),
        (["task.chunk=17"], False),
        (["protocol=query_aware"], False),
        (["model=tiny_llama"], False),
        (["threads=1"], False),  # reductions depend on the number of threads
    ],
    ids=lambda v: v[0] if isinstance(v, list) else "",
)
def test_the_config_hash_is_that_of_the_experiment(change, same):
    base = ["+method=turboquant", "task=fidelity"]
    assert (config_hash(composed(*base)) == config_hash(composed(*base, *change))) is same


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("+method=kivi,method.bits_k=4", "kivi,method.bits_k=4"),
        ("", "full"),
        ("+method=snapkv+int4,task.lengths=[1,2]", "snapkv+int4,task.lengths=_1,2_"),
        ("task.data=/a b/ü*?", "task.data=_a_b____"),
    ],
)
def test_a_run_folder_has_a_readable_name_without_odd_characters(text, name):
    assert names.folder_name(text) == name


def test_two_long_names_of_run_folders_stay_apart():
    """Fails when a long name is only cut: two runs of a sweep would share a folder."""
    one, two = (names.folder_name("a" * 200 + end) for end in ("x", "y"))
    assert one != two and max(len(one), len(two)) <= 100


def test_the_nearest_names_are_offered_and_a_part_of_a_pipeline_is_named():
    with pytest.raises(ConfigError, match=r"no method 'turbo_quant': did you mean turboquant"):
        names.config("turbo_quant")
    with pytest.raises(ConfigError, match=r"no method 'int5': did you mean int8 or int4|int4 or int8"):
        names.config("snapkv+int5")
