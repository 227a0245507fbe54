"""The command line. `python -m kvlab [overrides]` runs methods; `kvlab methods|tasks|report|compare|verify` are small.

Exit codes: 0 ok, 1 our bug (with a traceback), 2 bad input, 3 a method never acted, 4 verification failed, 5 something
cannot be had offline, 130 stopped by Ctrl-C. A sweep goes on after a failed job and ends with the first failure's code.
Torch is imported inside the run, so that wrong words fail at once and the first line does not wait for it.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import ConfigError, KvlabError

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger("kvlab")

COMMANDS = ("methods", "tasks", "report", "compare", "verify", "version")
INTERRUPTED = 130  # 128 + SIGINT, as shells count


def main(argv: list[str] | None = None) -> None:
    """Entry of `kvlab` and `python -m kvlab`; ends with SystemExit."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Greek letters gets "?", not a traceback
    try:
        sys.exit(small(args) if args and args[0] in COMMANDS else hydra_app(args))
    except KvlabError as err:
        complain(err)
        sys.exit(err.exit_code)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # who read our output has gone (`kvlab methods | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
        sys.exit(1)


def small(args: list[str]) -> int:
    """One of COMMANDS. Typer prints its own complaints about words."""
    from kvlab.commands import app

    try:
        app(args, prog_name="kvlab")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def complain(err: object) -> None:
    """One error in words, on stderr."""
    from rich.console import Console

    console = Console(stderr=True)
    console.print("[bold red]error[/] ", end="")
    console.print(str(err), markup=False, highlight=False, soft_wrap=True)


def rewrite(args: list[str]) -> list[str]:
    """`method=x` becomes `+method=x` (the group is not in the defaults list, so that both spellings can work)."""
    return [f"+{a}" if a.startswith("method=") else a for a in args]


def choices(args: list[str]) -> list[str]:
    """Method names asked for: `+method=a,b+c` -> ["a", "b+c"]."""
    return [name for a in args if a.startswith("+method=") for name in a.partition("=")[2].split(",") if name]


def check_words(args: list[str]) -> None:
    """ConfigError for a first word that is neither a command nor KEY=VALUE nor an option."""
    from kvlab import names

    word = args[0] if args else "-"
    if word.startswith(("-", "~")) or "=" in word:
        return
    ways = [f"kvlab {c}" for c in difflib.get_close_matches(word, COMMANDS, n=1)]
    ways += [f"+method={m}" for m in difflib.get_close_matches(word, names.names(), n=1)]
    hint = f"did you mean {' or '.join(ways)}? " if ways else ""
    raise ConfigError(
        f"kvlab has no command {word!r}: {hint}Commands: {', '.join(COMMANDS)}. Everything else is KEY=VALUE, "
        "e.g. +method=turboquant method.bits_k=3; --help lists the keys."
    )


def hydra_app(args: list[str]) -> int:
    """Compose the config, run each job in this process, combine a sweep. Returns the exit code."""
    check_words(args)
    args = rewrite(args)
    _prepare(choices(args))
    from kvlab.session import Session
    from kvlab.tasks.progress import Progress

    with Progress() as progress:
        run = Jobs(Session(progress))
        try:
            run.all(args)
        except KeyboardInterrupt:
            progress.say("interrupted")
            run.code = INTERRUPTED
    run.end()
    return run.code


def _prepare(methods: list[str]) -> None:
    """Unknown names fail here; a pipeline is a config that has no file."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from kvlab import names

    for name in methods:
        cfg = names.config(name)
        if "+" in name:
            ConfigStore.instance().store(group="method", name=name, node=cfg)
    OmegaConf.register_new_resolver("kvlab_name", names.folder_name, replace=True)


class Jobs:
    """The jobs of one command: a failed one does not take the others along."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.code = self.count = 0
        self.failed: list[str] = []
        self.sweep: Path | None = None
        self.done: tuple[dict, Path] | None = None  # of a single run

    def all(self, args: list[str]) -> None:
        import hydra

        app = hydra.main(version_base="1.3", config_path="pkg://kvlab.configs", config_name="config")(self._job(args))
        argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
        sys.argv = ["kvlab", *args]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come as exceptions: we say what is wrong, in our words
        try:
            app()
        except SystemExit as stop:  # --help and the like, or an unknown option
            self.code = self.code or (stop.code if isinstance(stop.code, int) else 0)
        except hydra.errors.HydraException as err:
            complain(explain(err, args))
            self.code = self.code or 2
        except BrokenPipeError:
            raise
        except OSError as err:
            complain(f"the run folder cannot be made: {err}. Use out=DIR with a folder that can be written.")
            self.code = self.code or 2
        finally:
            sys.argv = argv
            if full_error is None:
                del os.environ["HYDRA_FULL_ERROR"]
            else:
                os.environ["HYDRA_FULL_ERROR"] = full_error

    def _job(self, args: list[str]) -> Callable[[DictConfig], None]:
        def job(cfg: DictConfig) -> None:  # hydra.main reads the annotations of a plain function
            from hydra.core.hydra_config import HydraConfig

            self.count += 1
            info = HydraConfig.get()
            folder = Path(info.runtime.output_dir)
            if info.mode.name == "MULTIRUN":
                self.sweep = folder.parent
            overrides = list(info.overrides.task)
            swept = [o for o in overrides if o not in args] or overrides  # what is not the same in every job
            name = " ".join(swept) if self.sweep else ""
            try:
                self.done = self.session.run(_plain(cfg), folder, overrides), folder
            except KvlabError as err:
                self._failed(name, str(err), err.exit_code)
            except Exception as err:  # ours, or that of a method under construction
                traceback.print_exc()
                log.exception("%s failed", name or "the run")
                self._failed(name, f"{type(err).__name__}: {err}", 1)

        return job

    def _failed(self, name: str, why: str, code: int) -> None:
        complain(f"{name}: {why}" if name else why)
        self.code = self.code or code
        self.failed.append(name)

    def end(self) -> None:
        """The table, when no progress bar is in the way: of the run, or of all jobs of a sweep and what it lacks."""
        if self.sweep is None:
            if self.done is not None:
                _show(*self.done)
            return
        if self.session.folders:
            _combine(self.session.folders, self.sweep)
        for name in self.failed:
            print(f"failed: {name}")


def _plain(cfg: DictConfig) -> dict:
    from omegaconf import OmegaConf

    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError(f"{' and '.join(missing)} must be given: {' '.join(f'{key}=...' for key in missing)}")
    return OmegaConf.to_container(cfg, resolve=True)


def explain(err: Exception, args: list[str]) -> str:
    """Hydra's complaint; where a key is unknown, the keys there are."""
    from hydra import compose, initialize_config_module

    from kvlab import names

    text = str(err).strip()
    key = re.search(r"Could not override '([\w.@/]+)'", text)
    if key is None:
        return text
    groups = [a.partition(",")[0] for a in args if re.match(r"(task|model|runtime|protocol|logger)=", a)]
    with initialize_config_module("kvlab.configs", version_base="1.3"):
        cfg = compose("config", groups)
    return f"there is no key {key[1]!r}. {names.near_keys(cfg, key[1], choices(args))}"


def _show(body: dict, folder: Path) -> None:
    from kvlab.report import table

    table.show(body, _near(folder / "result.json"))


def _near(path: Path) -> Path:
    """Relative, where it lies below the current folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _combine(folders: list[Path], into: Path) -> None:
    """One table and one plot over all jobs of a sweep."""
    from rich.console import Console

    from kvlab.report import combine, table

    results, notes = combine.load(folders)
    combined = combine.combine(results)
    files = combine.write(combined, into)
    console = Console()
    console.print(
        table.text(combined.summary, width=console.width, title=combined.caption), end="", markup=False, highlight=False
    )
    for note in [*notes, *combined.warnings]:
        console.print(f"note: {note}", markup=False, highlight=False)
    names = sorted(p.name for p in files.values() if p.suffix in (".md", ".csv", ".png"))
    console.print(f"wrote {_near(into)}: {', '.join(names)}", markup=False, highlight=False, soft_wrap=True)
