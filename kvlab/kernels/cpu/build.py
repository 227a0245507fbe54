"""kv.cpp, step.cpp and headers -> a shared library in the user cache, made once by the machine's own C++ compiler.

Place    `<cache>/kernels/kv-<variant>-<key>.so`. The key hashes every byte of the sources, the flags, the compiler (its
         command and the first line of `--version`) and the architecture: what fits is found, nothing is ever stale.
Build    in a folder beside it, by a process group of its own with a time limit; checked in a child process (check.py);
         renamed. Readers see no library or a whole one, and of processes that race the last one replaces an equal file.
Trust    a library is used only if it and its folder belong to this user and nobody else may write them.
Failure  no compiler, one that fails or hangs, a bad library: a reason in words, never an exception; nothing is left.

Never -ffast-math (check.py says why), never -march=native: a home folder may be shared by unequal machines.
Not covered: Windows (the reason says so).

python -m kvlab.kernels.cpu.build [VARIANT ...]     compile now; the best variant of this CPU when none is named
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvlab.errors import ConfigError
from kvlab.host import cache_root
from kvlab.kernels.cpu import check
from kvlab.kernels.cpu.isa import VARIANTS, runnable

FLAGS = (
    "-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC", "-shared",
    "-fno-ipa-cp",  # gcc's copies of functions for one caller made the fast arithmetic 4 % slower
)  # fmt: skip
OPENMP = "-fopenmp"  # tried first, left out where the compiler has none
TIMEOUT_S = 300.0
ANSWER_S = 30.0  # for `--version`, and for loading a library
STALE_S = 24 * 3600  # a build folder this old belongs to a process that was killed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """A library; or path None and the reason. seconds: of compiling, 0 when it lay in the cache."""

    path: Path | None
    reason: str = ""
    seconds: float = 0.0


class CannotBuild(Exception):
    """Internal: carries a reason to `compile`."""


def compile(
    variant: str,
    *,
    source: Path | None = None,
    root: Path | None = None,
    extra: Iterable[str] = (),
    timeout: float = TIMEOUT_S,
    say: Callable[[str], None] = log.info,
) -> Built:
    """The library of a variant, from the cache or compiled now.

    source: folder with kv.cpp, the package's own when None. root: cache folder, `cache_root()` when None. extra: more
    compiler flags. timeout: seconds for all compiler runs together. say: told in one line when a compilation begins.
    Raises ConfigError for a variant that does not exist, and nothing else.
    """
    if variant not in VARIANTS:
        raise ConfigError(f"no kernel variant {variant!r}: there are {', '.join(VARIANTS)}")
    try:
        return _compile(variant, source_folder() if source is None else source, root, tuple(extra), timeout, say)
    except CannotBuild as error:
        return Built(None, str(error))
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        return Built(None, f"the library cannot be stored ({error}); XDG_CACHE_HOME=DIR names another cache folder")


def _compile(
    variant: str, source: Path, root: Path | None, extra: tuple[str, ...], timeout: float, say: Callable[[str], None]
) -> Built:
    if os.name != "posix":
        raise CannotBuild(f"kernels are not compiled on {platform.system()}")
    command, sources = compiler(), source_hash(source)
    flags = (*FLAGS, *VARIANTS[variant], f'-DKV_SOURCE_HASH="{sources}"', *extra)
    key = "\0".join([sources, OPENMP, *flags, *command, identity(command, min(ANSWER_S, timeout)), platform.machine()])
    folder = _folder(root)
    library = folder / f"kv-{variant}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if os.path.lexists(library):
        _trust(library)
        return Built(library)
    say(f"compiling CPU kernels ({variant}) once, about 20 s")
    began = time.perf_counter()
    work = Path(tempfile.mkdtemp(dir=folder, prefix=".build-"))
    try:
        made = work / library.name
        _call(command, flags, sorted(source.glob("*.cpp")), made, timeout)
        if source_hash(source) != sources:
            raise CannotBuild(f"the sources in {source} changed while they were compiled; start again")
        made.chmod(0o700)
        _check(made, sources, sanitizer_env(command) if any("-fsanitize" in flag for flag in extra) else {})
        with open(made, "rb") as file:
            os.fsync(file.fileno())
        os.replace(made, library)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    seconds = time.perf_counter() - began
    log.info("compiled %s in %.1f s", library, seconds)
    return Built(library, seconds=seconds)


def source_folder() -> Path:
    """Where the package keeps kv.cpp, and libraries that came with the wheel."""
    return Path(__file__).parent


def source_hash(source: Path) -> str:
    """SHA-256 (hex) over the names and bytes of all C++ files of a folder. Raises CannotBuild without a kv.cpp."""
    files = sorted(path for path in source.glob("*") if path.suffix in (".cpp", ".h"))
    if source / "kv.cpp" not in files:
        raise CannotBuild(f"{source} holds no kv.cpp")
    digest = hashlib.sha256()
    for path in files:
        data = path.read_bytes()
        digest.update(f"{path.name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def compiler() -> list[str]:
    """The C++ compiler's command: $CXX if it is set, else c++, g++ or clang++. Raises CannotBuild."""
    asked = os.environ.get("CXX", "").strip()
    try:
        commands = [shlex.split(asked)] if asked else [["c++"], ["g++"], ["clang++"]]
    except ValueError as error:
        raise CannotBuild(f"CXX={asked!r} is no command ({error})") from error
    for command in commands:
        if found := shutil.which(command[0]):
            return [found, *command[1:]]
    what = f"CXX={asked!r} is not an executable" if asked else "no C++ compiler was found (c++, g++, clang++)"
    raise CannotBuild(what)


def identity(command: list[str], timeout: float = ANSWER_S) -> str:
    """The first line of `--version`. Raises CannotBuild."""
    code, output = _run([*command, "--version"], timeout)
    if code:
        raise CannotBuild(f"`{shlex.join(command)} --version` ended with exit code {code}: {_first_error(output)}")
    return output.strip().partition("\n")[0]


def sanitizer_env(command: list[str]) -> dict[str, str]:
    """What a Python process needs that loads a library built with GCC's -fsanitize=address. Raises CannotBuild.

    libasan must come before everything else, and libstdc++ beside it, or it misses the exceptions that torch throws.
    Python's leaks are not ours; its own allocator would hide overruns from it.
    """
    found = []
    for name in ("libasan.so", "libstdc++.so"):
        code, output = _run([*command, f"-print-file-name={name}"], ANSWER_S)
        if code or not os.path.isabs(output.strip()):
            raise CannotBuild(f"{shlex.join(command)} has no {name}: AddressSanitizer needs GCC with its libraries")
        found.append(output.strip())
    return {"LD_PRELOAD": ":".join(found), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}


def _folder(root: Path | None) -> Path:
    """The cache folder of the libraries, created and trusted; folders that killed builds left are removed."""
    folder = (cache_root() if root is None else root) / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _trust(folder)
    for left in folder.glob(".build-*"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left, ignore_errors=True)
    return folder


def _trust(path: Path) -> None:
    """Whoever can write a library runs code as this user. Raises CannotBuild."""
    info, me, why = path.lstat(), os.geteuid(), ""
    if stat.S_ISLNK(info.st_mode):
        why = "is a symbolic link"
    elif info.st_uid != me:
        why = f"belongs to user {info.st_uid}, not to user {me} who runs this"
    elif info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"may be written by others (mode {stat.S_IMODE(info.st_mode):o})"
    if why:
        raise CannotBuild(f"{path} {why}, so nothing is loaded from it; delete it to have it made again")


def _call(command: list[str], flags: tuple[str, ...], sources: list[Path], made: Path, timeout: float) -> None:
    """Compile with OpenMP, or else without. Raises CannotBuild."""
    deadline = time.monotonic() + timeout
    for openmp in ([OPENMP], []):
        argv = [*command, *flags, *openmp, *map(str, sources), "-o", str(made)]
        code, output = _run(argv, deadline - time.monotonic(), {"TMPDIR": str(made.parent)})
        if code == 0:
            return
        log.info("%s\nexit code %d\n%s", shlex.join(argv), code, output[-4000:])
    raise CannotBuild(f"{shlex.join(command)} ended with exit code {code}: {_first_error(output)}")


def _check(made: Path, sources: str, env: dict[str, str]) -> None:
    """Load it in a process of its own. Raises CannotBuild."""
    if not sys.executable:  # Python inside another program: the check after loading must do
        return
    code, output = _run([sys.executable, "-I", check.__file__, str(made), sources], ANSWER_S, env)
    if code:
        why = f"crashes while it is loaded (signal {-code})" if code < 0 else _first_error(output)
        raise CannotBuild(f"the compiled library {why}")


def _run(argv: list[str], timeout: float, env: dict[str, str] | None = None) -> tuple[int, str]:
    """(exit code, output) of a process group of its own, which is killed when the time is up. Raises CannotBuild.

    Output goes to a file: a pipe would be held open by whatever a hanging compiler has started.
    """
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "LC_ALL": "C", **(env or {})},
            )  # fmt: skip
        except OSError as error:
            raise CannotBuild(f"{argv[0]} does not start ({error})") from error
        try:
            code = process.wait(max(timeout, 0))
        except BaseException as error:  # Ctrl-C too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise CannotBuild(f"{argv[0]} did not finish within {timeout:.0f} s and was stopped") from error
            raise
        output.seek(0)
        return code, output.read().decode("utf-8", "replace")


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no message"]
    return next((line for line in lines if "error" in line.lower()), lines[-1])[:300]


def main(argv: list[str] | None = None) -> int:
    """Compile what is named, print each library's path. -> exit code 1 when one cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.kernels.cpu.build", description="compile the CPU kernels")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"{', '.join(VARIANTS)}; else this CPU's best")
    failed = 0
    for variant in parser.parse_args(argv).variants or runnable()[:1]:
        built = compile(variant, say=lambda text: print(text, file=sys.stderr, flush=True))
        if built.path is None:
            print(f"{variant}: {built.reason}", file=sys.stderr)
            failed = 1
        else:
            print(built.path)
    return failed


if __name__ == "__main__":
    sys.exit(main())
