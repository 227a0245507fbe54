"""How kv.cpp becomes a library: cached, safe under races, and a reason in words for whatever goes wrong."""

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from front import environment

from kvlab.engine.config import EngineCfg
from kvlab.errors import ConfigError
from kvlab.kernels.cpu import build, check, isa, lib

SOURCE = """
#include "part.h"
#define KV_API extern "C" __attribute__((visibility("default")))
KV_API int kv_abi() { return ABI; }
KV_API const char* kv_source_hash() { return KV_SOURCE_HASH; }
"""
FLUSH = """
#include <xmmintrin.h>
__attribute__((constructor)) static void flush() { _mm_setcsr(_mm_getcsr() | 0x8040); }
"""
VERSION = 'if [ "$1" = --version ]; then echo "fake 1.0"; exit 0; fi\n'
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
)
needs_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="MXCSR belongs to x86")


@pytest.fixture
def source(tmp_path) -> Path:
    """A folder with a tiny kv.cpp and a header: what is tested here is not the kernels."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "kv.cpp").write_text(SOURCE)
    (folder / "part.h").write_text(f"#define ABI {check.ABI}\n")
    return folder


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """fake(script): $CXX is a shell script from now on, which answers --version first."""

    def install(script: str, version: str = VERSION) -> Path:
        path = tmp_path / "fake-c++"
        path.write_text(f"#!/bin/sh\n{version}{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return install


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The machine's own compiler, and nothing remembered from the test before."""
    monkeypatch.delenv("CXX", raising=False)
    lib._load.cache_clear()


def real() -> str:
    """The machine's compiler, for a fake one to call."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))


def left(root: Path) -> list[str]:
    folder = root / "kernels"
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def dies(pid: int) -> bool:
    """Is it dead, or a zombie that nobody has waited for, within 5 s?"""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path("/proc").exists() and "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


@needs_compiler
def test_the_second_call_compiles_nothing_and_starts_no_compiler_but_for_its_version(source, root, fake, tmp_path):
    calls = tmp_path / "calls"
    fake(f'echo compile >> "{calls}"\nexec {real()} "$@"')
    first = build.compile("generic", source=source, root=root)
    assert first.path and first.path.is_file() and first.seconds > 0, first.reason
    compiled = calls.read_text()
    second = build.compile("generic", source=source, root=root)
    assert (second.path, second.seconds) == (first.path, 0.0)
    assert calls.read_text() == compiled
    assert left(root) == [first.path.name]
    assert (root / "kernels").stat().st_mode & 0o777 == 0o700


@needs_compiler
@pytest.mark.parametrize("change", ["header", "flags", "compiler"])
def test_a_change_of_any_source_flag_or_compiler_is_another_library(source, root, fake, change):
    """Fails when only kv.cpp is hashed: most of the code is in headers."""
    script = f'exec {real()} "$@"'
    fake(script)
    first = build.compile("generic", source=source, root=root).path
    if change == "header":
        (source / "part.h").write_text(f"#define ABI {check.ABI}\n\n")
    elif change == "compiler":
        fake(script, VERSION.replace("1.0", "1.1"))
    second = build.compile("generic", source=source, root=root, extra=["-DX"] if change == "flags" else []).path
    assert first and second and first != second


@needs_compiler
def test_three_processes_that_race_leave_one_good_library(source, root, fake, tmp_path):
    """The compiler waits until three of it run: each process has then found the cache empty."""
    here = tmp_path / "here"
    here.mkdir()
    fake(f'touch "{here}/$$"\nwhile [ $(ls "{here}" | wc -l) -lt 3 ]; do sleep 0.05; done\nexec {real()} "$@"')
    code = (
        "import sys; from pathlib import Path; from kvlab.kernels.cpu import build\n"
        "built = build.compile('generic', source=Path(sys.argv[1]), root=Path(sys.argv[2]), timeout=60)\n"
        "print(built.path or built.reason, built.seconds > 0)"
    )
    argv = [sys.executable, "-c", code, str(source), str(root)]
    racers = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment()) for _ in range(3)]
    answers = {racer.communicate(timeout=120)[0].strip() for racer in racers}
    (library,) = left(root)
    assert answers == {f"{root / 'kernels' / library} True"}
    assert lib.load("generic", source=source, root=root).library.kv_abi() == check.ABI


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'kv.cpp:1: error: no such luck'; exit 1", "exit code 1: kv.cpp:1: error: no such luck"),
        ("exit 3", "exit code 3: no message"),
        ('for made; do :; done; echo no ELF file > "$made"', "cannot be loaded"),
        ("kill -9 $$", "exit code -9"),
    ],
)
def test_a_compiler_that_fails_ends_in_torch_with_one_notice_and_leaves_nothing(
    source, root, fake, capfd, script, says
):
    fake(script)
    loaded = lib.load("generic", source=source, root=root)
    assert (loaded.variant, loaded.library) == ("torch", None)
    assert says in loaded.reason
    assert left(root) == []
    assert lib.load("generic", source=source, root=root) is loaded
    err = capfd.readouterr().err
    assert err.count("note:") == 1 and says in err and "runtime.kernels=off" in err


def test_a_compiler_that_hangs_is_killed_with_all_it_started(source, root, fake, tmp_path):
    pid = tmp_path / "pid"
    fake(f'sleep 600 & echo $! > "{pid}"; wait')
    began = time.monotonic()
    loaded = lib.load("generic", source=source, root=root, timeout=1.0)
    assert time.monotonic() - began < 20
    assert loaded.variant == "torch" and "did not finish within 1 s" in loaded.reason
    assert left(root) == []
    assert dies(int(pid.read_text())), "a child of the compiler outlived it"


def test_ctrl_c_stops_the_compiler_too(source, root, fake, tmp_path):
    """It runs in a session of its own, so the terminal does not tell it."""
    pid = tmp_path / "pid"
    fake(f'sleep 600 & echo $! > "{pid}.new"; mv "{pid}.new" "{pid}"; wait')

    def interrupt(*_):
        if pid.exists():
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 0.1)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            build.compile("generic", source=source, root=root, timeout=30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert left(root) == [] and dies(int(pid.read_text()))


def test_a_compiler_that_hangs_when_asked_for_its_version_is_killed_too(source, root, fake):
    fake("", version="sleep 600\n")
    built = build.compile("generic", source=source, root=root, timeout=0.5)
    assert built.path is None and "did not finish" in built.reason


@pytest.mark.parametrize("cxx", ["/nowhere/c++", "unbalanced '", ""])
def test_a_machine_without_a_compiler_gets_a_reason(source, root, monkeypatch, tmp_path, cxx):
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("PATH", str(tmp_path))
    built = build.compile("generic", source=source, root=root)
    assert built.path is None and ("no C++ compiler was found" if not cxx else "CXX=") in built.reason


def test_a_folder_without_sources_and_a_cache_that_cannot_be_written_give_a_reason(source, tmp_path):
    assert "holds no kv.cpp" in build.compile("generic", source=tmp_path, root=tmp_path / "cache").reason
    (tmp_path / "file").write_text("")
    assert "cannot be stored" in build.compile("generic", source=source, root=tmp_path / "file").reason


@needs_compiler
@pytest.mark.parametrize("place", ["library", "folder"])
@pytest.mark.parametrize("how", ["group", "world", "owner", "link"])
def test_a_library_that_others_may_have_written_is_refused(source, root, monkeypatch, tmp_path, place, how):
    library = build.compile("generic", source=source, root=root).path
    victim = library if place == "library" else library.parent
    if how == "owner":
        me = os.geteuid()
        if me == 0:
            os.chown(victim, 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    elif how == "link":
        victim.rename(tmp_path / "moved")
        victim.symlink_to(tmp_path / "moved")
    else:
        victim.chmod(0o720 if how == "group" else 0o702)
    loaded = lib.load("generic", source=source, root=root)
    says = {"owner": "belongs to user", "link": "is a symbolic link"}.get(how, "may be written by others")
    assert loaded.library is None and says in loaded.reason


@needs_compiler
def test_a_library_that_was_damaged_in_the_cache_is_named(source, root):
    library = build.compile("generic", source=source, root=root).path
    library.write_bytes(b"not ELF")
    loaded = lib.load("generic", source=source, root=root)
    assert loaded.library is None and str(library) in loaded.reason and "cannot be loaded" in loaded.reason


def test_a_build_folder_of_a_killed_process_is_removed_a_day_later(source, root, fake):
    fake("exit 1")
    for name, age in (("old", 2 * build.STALE_S), ("new", 60)):
        folder = root / "kernels" / f".build-{name}"
        folder.mkdir(parents=True)
        (folder / "kv.so").write_bytes(b"half")
        os.utime(folder, (time.time() - age,) * 2)
    (root / "kernels").chmod(0o700)
    build.compile("generic", source=source, root=root)
    assert left(root) == [".build-new"]


@needs_compiler
def test_every_variant_that_this_cpu_runs_loads_and_auto_is_the_best(source, root):
    for variant in isa.runnable():
        loaded = lib.load(variant, source=source, root=root)
        assert loaded.variant == variant and loaded.library.kv_abi() == check.ABI, loaded.reason
    assert lib.load("auto", source=source, root=root) is lib.load(isa.runnable()[0], source=source, root=root)


def test_off_is_the_torch_path_and_touches_nothing(source, root, fake, capfd):
    fake("exit 1")
    loaded = lib.load("off", source=source, root=root)
    assert (loaded.variant, loaded.library) == ("torch", None)
    assert not root.exists() and capfd.readouterr().err == ""


def test_a_name_that_is_no_variant_is_an_error_everywhere(source, root):
    for call in (lambda: lib.load("avx1024"), lambda: EngineCfg(kernels="avx1024")):
        with pytest.raises(ConfigError, match=r"runtime.kernels='avx1024' is not one of auto, avx512, avx2"):
            call()
    for name in ("avx1024", "auto", "off"):
        with pytest.raises(ConfigError, match="no kernel variant"):
            build.compile(name, source=source, root=root)


def test_a_variant_that_the_cpu_lacks_is_refused_with_the_ways_out(source, root, monkeypatch):
    monkeypatch.setattr(isa, "cpu_flags", lambda: frozenset({"sse2", "avx2", "fma", "f16c", "avx512f"}))
    with pytest.raises(ConfigError, match=r"this CPU has no avx512bw, avx512vl, avx512dq, .*auto \(here: avx2\)"):
        lib.load("avx512", source=source, root=root)
    monkeypatch.setattr(isa, "cpu_flags", frozenset)
    assert isa.runnable() == ["generic"]
    with pytest.raises(ConfigError, match="this CPU has no avx2, fma, f16c"):
        lib.load("avx2", source=source, root=root)


@pytest.mark.parametrize(
    ("text", "best"),
    [
        (
            "processor\t: 0\nflags\t\t: fpu avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512vbmi avx512_vnni\n",
            "avx512",
        ),
        ("flags\t\t: fpu avx2 fma f16c avx512f avx512bw avx512vl avx512dq\n", "avx2"),  # Skylake: no vbmi, no vnni
        ("flags\t\t: fpu avx2 fma f16c avx512f avx512dq\n", "avx2"),  # Knights Landing: no bw, no vl
        ("flags\t\t: fpu avx f16c\n", "generic"),
        ("processor\t: 0\nFeatures\t: fp asimd\n", "generic"),  # aarch64
        (None, "generic"),  # no /proc
    ],
)
def test_the_best_variant_is_read_from_what_linux_says_about_the_cpu(tmp_path, text, best):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    assert isa.runnable(isa.cpu_flags(path))[0] == best


@needs_compiler
def test_denormal_numbers_survive_loading_and_the_process_has_one_openmp(source, root):
    (source / "kv.cpp").write_text(
        SOURCE + "#include <omp.h>\nKV_API int threads() { return omp_get_max_threads(); }\n"
    )
    loaded = lib.load("generic", source=source, root=root)
    assert loaded.library is not None, loaded.reason
    if not hasattr(loaded.library, "threads"):
        pytest.skip("this compiler has no OpenMP")
    assert check.keeps_denormals()
    assert (torch.tensor([1e-40]) * 1.0).item() > 0
    with contextlib.suppress(FileNotFoundError):
        maps = Path("/proc/self/maps").read_text().splitlines()
        assert len({line.split()[-1] for line in maps if "libgomp" in line}) == 1, "two pools would fight for the cores"
    assert loaded.library.threads() == torch.get_num_threads()


@needs_compiler
@needs_x86
def test_a_library_that_sets_flush_to_zero_is_never_published_and_does_no_harm(source, root):
    (source / "kv.cpp").write_text(SOURCE + FLUSH)
    assert "sets flush-to-zero" in build.compile("generic", source=source, root=root).reason
    assert left(root) == []
    bad = root / "bad.so"
    subprocess.run(
        [*build.compiler(), "-shared", "-fPIC", '-DKV_SOURCE_HASH=""', source / "kv.cpp", "-o", bad], check=True
    )
    with pytest.raises(check.BadLibrary, match="flush-to-zero"):
        lib.open_library(bad)
    assert check.keeps_denormals(), "the mode must be put back"


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "return ABI;",
            "return ABI + 1;",
            rf"has ABI {check.ABI + 1}, and this version of kvlab calls ABI {check.ABI}",
        ),
        ("return KV_SOURCE_HASH;", 'return "0123456789abcdef";', "compiled from other sources (0123456789ab"),
        ("kv_source_hash", "something_else", "is not a kernel library"),
        ("return ABI;", "__builtin_trap();", "crashes while it is loaded (signal"),
    ],
)
def test_a_library_that_fails_the_check_is_never_published(source, root, old, new, says):
    (source / "kv.cpp").write_text(SOURCE.replace(old, new))
    built = build.compile("generic", source=source, root=root)
    assert built.path is None and says in built.reason
    assert left(root) == []


@needs_compiler
def test_a_prebuilt_library_is_preferred_but_only_if_it_was_made_from_these_sources(
    source, root, tmp_path, monkeypatch
):
    built = build.compile("generic", source=source, root=tmp_path / "wheel").path
    prebuilt = source / "_kv_generic.so"
    shutil.copy(built, prebuilt)
    with monkeypatch.context() as without:
        without.setenv("CXX", "/nowhere/c++")
        loaded = lib.load("generic", source=source, root=root)
        assert loaded.path == prebuilt and not root.exists(), loaded.reason
    lib._load.cache_clear()
    (source / "part.h").write_text(f"#define ABI {check.ABI}  // edited after the wheel was made\n")
    loaded = lib.load("generic", source=source, root=root)
    assert loaded.variant == "generic" and loaded.path.parent == root / "kernels"


@needs_compiler
def test_a_compiler_without_openmp_still_makes_a_library(source, root, fake):
    fake(f'case "$*" in *-fopenmp*) echo "error: no OpenMP"; exit 1;; esac\nexec {real()} "$@"')
    loaded = lib.load("generic", source=source, root=root)
    assert loaded.variant == "generic", loaded.reason
    assert build.compile("generic", source=source, root=root).seconds == 0, "the attempt is not repeated on every start"


@needs_compiler
def test_sources_edited_during_the_compilation_give_no_library_under_the_old_hash(source, root, fake):
    fake(f'echo "// edited" >> "{source}/part.h"\nexec {real()} "$@"')
    built = build.compile("generic", source=source, root=root)
    assert built.path is None and "changed while they were compiled" in built.reason
    assert left(root) == []


@needs_compiler
def test_the_first_compilation_says_so_in_one_line(source, root, capfd):
    lib.load("generic", source=source, root=root)
    lib.load("generic", source=source, root=root)
    assert capfd.readouterr().err == "compiling CPU kernels (generic) once, about 20 s\n"


def test_no_flag_may_change_what_a_float_is():
    flags = {*build.FLAGS, build.OPENMP, *(flag for variant in isa.VARIANTS.values() for flag in variant)}
    assert not flags & {"-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-march=native"}
    assert "-ffp-contract=off" in flags
