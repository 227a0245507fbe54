"""The command line. `python -m kvlab [overrides]` runs methods; `kvlab methods|tasks|report|compare|verify` are small.

Exit codes: 0 ok, 2 bad input, 3 a method never acted, 4 verification failed, 5 something cannot be had offline.
Torch is imported inside the run, so that wrong words fail at once and the first line does not wait for it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kvlab.errors import KvlabError

COMMANDS = ("methods", "tasks", "report", "compare", "verify", "version")


def main(argv: list[str] | None = None) -> None:
    """Entry of `kvlab` and `python -m kvlab`."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in COMMANDS:
        from kvlab.commands import app

        _guard(lambda: app(args, standalone_mode=False))
    else:
        sys.exit(hydra_app(args))


def _guard(call) -> None:
    import click

    try:
        code = call()
    except KvlabError as err:
        complain(err)
        sys.exit(err.exit_code)
    except click.exceptions.Exit as err:
        sys.exit(err.exit_code)
    except click.ClickException as err:
        err.show()
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


def complain(err: KvlabError) -> None:
    from rich.console import Console

    Console(stderr=True).print(f"[bold red]error[/] {_escape(str(err))}", highlight=False, soft_wrap=True)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def rewrite(args: list[str]) -> list[str]:
    """`method=x` becomes `+method=x` (the group is not in the defaults list, so that both spellings can work)."""
    return [f"+{a}" if re.fullmatch(r"method=.*", a) else a for a in args]


def choices(args: list[str]) -> list[str]:
    """Method names asked for: `+method=a,b+c` -> ["a", "b+c"]."""
    return [name for a in args if a.startswith("+method=") for name in a.partition("=")[2].split(",") if name]


def hydra_app(args: list[str]) -> int:
    """Compose the config, run each job in this process, combine a sweep. Returns the exit code."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    from kvlab import names as methods_index
    from kvlab.session import Session
    from kvlab.tasks.progress import Progress

    args = rewrite(args)
    state = {"code": 0, "jobs": 0, "sweep": None}
    try:
        for name in choices(args):
            cfg = methods_index.config(name)
            if "+" in name:  # a pipeline is a config that has no file
                ConfigStore.instance().store(group="method", name=name, node=cfg)
    except KvlabError as err:
        complain(err)
        return err.exit_code
    OmegaConf.register_new_resolver("kvlab_name", methods_index.folder_name, replace=True)

    with Progress() as progress:
        session = Session(progress)

        @hydra.main(version_base="1.3", config_path="pkg://kvlab.configs", config_name="config")
        def job(cfg: DictConfig) -> None:
            state["jobs"] += 1
            info = HydraConfig.get()
            folder = Path(info.runtime.output_dir)
            if info.mode.name == "MULTIRUN":
                state["sweep"] = folder.parent
            config = OmegaConf.to_container(cfg, resolve=True)
            try:
                body = session.run(config, folder, list(info.overrides.task))
                if state["sweep"] is None:
                    _show(body, folder)
            except KvlabError as err:
                complain(err)
                state["code"] = state["code"] or err.exit_code

        old = sys.argv
        sys.argv = [old[0], *args]
        try:
            job()
        except SystemExit as stop:  # Hydra has printed what is wrong with the words
            if stop.code and not state["jobs"]:
                return 2
            if stop.code:
                raise
        finally:
            sys.argv = old
    if state["sweep"] is not None and session.folders:
        _combine(session.folders, state["sweep"])
    return state["code"]


def _show(body: dict, folder: Path) -> None:
    from kvlab.report import table

    table.show(body, folder / "result.json")


def _combine(folders: list[Path], into: Path) -> None:
    """One table and one plot over all jobs of a sweep."""
    from rich.console import Console

    from kvlab.report import combine, table

    results, notes = combine.load(folders)
    combined = combine.combine(results)
    combine.write(combined, into)
    console = Console()
    console.print(table.text(combined.summary, width=console.width, title=combined.caption), end="", markup=False, highlight=False)
    for note in [*notes, *combined.warnings]:
        console.print(f"note: {note}", markup=False)
    console.print(f"wrote {into / 'summary.md'}, pareto.png, ledger.png", markup=False, highlight=False)
