"""Every kernel that ships compiles for GPUs that are not here, keeps the laws of kernels/triton/aot.py, and is no worse
than the record. Compiling happens in a process of its own: this one may run triton's interpreter."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from threading import Timer

import cases
import pytest

from kvlab.kernels.triton import aot, measure

REWRITE = "If that is meant, say why in the pull request; `make aot` rewrites the record (tests/kernels/aot/record.py)."
HANGS_S = 300.0
COMPILER = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not COMPILER, reason="needs triton: pip install triton")


class Server:
    """record.py --serve: a case in, its numbers out."""

    def __init__(self) -> None:
        root = Path(__file__).parents[3]
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        env["PYTHONPATH"] = os.pathsep.join([str(root), *env.get("PYTHONPATH", "").split(os.pathsep)])
        args = [sys.executable, str(Path(__file__).with_name("record.py")), "--serve"]
        self.process = subprocess.Popen(args, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.versions = self._line()["versions"]

    def _line(self) -> dict:
        timer = Timer(HANGS_S, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        assert line, (
            f"the compiling process ended (or was ended after {HANGS_S:.0f} s), exit code {self.process.wait()}"
        )
        return json.loads(line)

    def __call__(self, case: cases.Case, target: str) -> dict:
        print(json.dumps([*astuple(case), target]), file=self.process.stdin, flush=True)
        return self._line()


@pytest.fixture(scope="module")
def server():
    s = Server()
    yield s
    s.process.stdin.close()
    s.process.wait(30)


def same_compiler(versions: dict, target: str) -> str:
    """Why numbers cannot be compared with the record's; "" if they can."""
    was = aot.load()["versions"]
    keys = ("triton", f"ptxas {target}")
    return "".join(
        f"{k} {versions.get(k)} here, {was.get(k)} in the record. " for k in keys if versions.get(k) != was.get(k)
    )


def check(server: Server, case: cases.Case, target: str) -> None:
    got = server(case, target)
    if "skip" in got:
        pytest.skip(got["skip"])
    assert "error" not in got, f"{case} does not compile for {target}:\n{got['error']}"
    known = cases.known(case, target)
    if got["broken"] and known:
        pytest.xfail(f"{known}: {'; '.join(got['broken'])}")
    assert not got["broken"], f"{case}, {target}:\n" + "\n".join(got["broken"])
    assert not known, f"{case}, {target} keeps every law now: drop its line from cases.KNOWN"
    if not same_compiler(server.versions, target):
        name, was = str(case), aot.load()["cases"].get(target, {})
        worse, other = aot.changes({n: x for n, x in was.items() if n == name}, {name: got["numbers"]})
        assert not worse, "\n".join([f"{target}, against {aot.RECORD.name}:", *worse, *other, REWRITE])


def parameters(chosen):
    return [pytest.param(c, t, id=f"{c} {t}".replace(" ", "-")) for c, t in chosen]


COVERING = cases.covering()


@needs_triton
@pytest.mark.parametrize(("case", "target"), parameters(COVERING))
def test_a_kernel_keeps_the_laws_and_is_no_worse_than_the_record(server, case, target):
    check(server, case, target)


REST = [x for x in itertools.product(cases.grid(), cases.TARGETS) if x not in set(COVERING)]


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(("case", "target"), parameters(REST))
def test_so_does_the_rest_of_the_grid(server, case, target):
    check(server, case, target)


@needs_triton
@pytest.mark.parametrize("target", cases.TARGETS)
def test_the_record_is_of_this_compiler(server, target):
    if why := same_compiler(server.versions, target):
        pytest.skip(f"{target}: {why}Laws are checked, numbers are not compared.")


def test_the_record_holds_what_ci_compares_and_nothing_that_does_not_ship():
    """What it holds of the rest of the grid is compared too, by the slow run."""
    ships = {str(c) for c in cases.grid()}
    for target in cases.TARGETS:
        held, asked = set(aot.load()["cases"].get(target, {})), {str(c) for c, t in COVERING if t == target}
        wrong = [
            f"{len(x)} {what}, {min(x)} first" for x, what in ((asked - held, "lost"), (held - ships, "gone")) if x
        ]
        assert not wrong, f"{target}: {'; '.join(wrong)}. {REWRITE}"


def test_the_cases_of_ci_meet_every_pair_of_values():
    """Fails when a codec, a block or a form is left to the slow run alone for some target."""
    met = {(v, w) for c, t in COVERING for v, w in itertools.permutations((c.codec, c.D, c.B, t), 2)}
    ships = itertools.product(cases.grid(), cases.TARGETS)
    assert met == {(v, w) for c, t in ships for v, w in itertools.permutations((c.codec, c.D, c.B, t), 2)}
    assert {(c.kernel, c.form, t) for c, t in COVERING} == {
        (c.kernel, c.form, t) for c, t in itertools.product(cases.grid(), cases.TARGETS)
    }


# -- counting ----------------------------------------------------------------------------------------------------
SASS = """
.text.k:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_0:
        /*0010*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0020*/              @!P0 LDGSTS.E.BYPASS.LTC128B.128 [R12], desc[UR8][R4.64] ;
        /*0030*/                   LDG.E.U16.CONSTANT R8, desc[UR8][R4.64] ;
        /*0040*/                   PRMT R8, R8, 0x5410, RZ ;
        /*0050*/                   HADD2 R8, R8, -1032 ;
        /*0060*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0070*/               @P1 BRA `(.L_x_2) ;
        /*0080*/                   FMUL R4, R4, R5 ;
.L_x_2:
        /*0090*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*00a0*/                   IADD3 R2, R2, 0x40, RZ ;
        /*00b0*/              @!P2 BRA `(.L_x_1) ;
        /*00c0*/               @P3 BRA `(.L_x_0) ;
        /*00d0*/                   STL.64 [R1], R4 ;
.L_x_3:
        /*00e0*/                   BRA `(.L_x_3);
"""
PTX = """
$L__BB0_1:
\tmma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %r1 }, { %r2 };
\t@%p1 bra \t$L__BB0_1;
"""


def test_the_main_loop_is_the_inner_one_with_the_products():
    """Fails when an outer loop, the dead loop behind the code, or one side of a branch only is counted."""
    counts = measure.loop_counts(SASS)
    assert counts == {"HMMA": 2, "BRA": 2, "LDGSTS": 1, "LDG": 1, "PRMT": 1, "HADD2": 1, "FMUL": 1, "IADD3": 1}
    loop = measure.main_loop(SASS)
    assert measure.classes(loop) == {"mma": 2, "unpack": 2, "memory": 2, "float": 1, "control": 2, "integer": 1}
    assert measure.load_widths(loop) == {2: 1, 16: 1}
    assert measure.spilled(measure.whole(SASS)) == 8 and measure.spilled(loop) == 0


def test_a_loop_that_was_unrolled_counts_for_several_turns():
    assert measure.turns(SASS, PTX) == 2


def test_a_kernel_without_such_a_loop_is_counted_whole():
    sass = SASS.replace("HMMA", "FFMA")
    assert measure.main_loop(sass) == measure.whole(sass) and len(measure.whole(sass)) == 15


AMD = """
\tv_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], a[0:3]
\tv_add_f32 v0, v0, v1
    .agpr_count:     4
    .private_segment_fixed_size: 16
    .sgpr_spill_count: 9
    .vgpr_count:     132
    .vgpr_spill_count: 3
"""


def test_amd_registers_include_accumulators_and_scalar_spills_are_none():
    assert measure.amd(AMD) == {"regs": 132, "spills": 3, "stack": 16, "mma": 1}


def test_a_launch_is_recorded_once_and_the_kernel_is_itself_again():
    class Kernel:
        def run(self, *args, grid, warmup, **options):
            return "launched"

    kernel, args = Kernel(), {"grid": (1,), "warmup": False, "BN": 32}
    with aot.launches(kernel) as found:
        kernel.run(1, 2, **args)
    assert [(x.kernel, x.args, x.options) for x in found] == [(kernel, (1, 2), {"BN": 32})]
    assert kernel.run(1, 2, **args) == "launched"


FINE = {
    "regs": 64,
    "spills": 0,
    "stack": 0,
    "shared": 1024,
    "warps": 4,
    "mma": 8,
    "loads": {"2": 2, "16": 4},
    "width": 16,
}


def job(**changes) -> aot.Job:
    return aot.Job(None, (4096, 4096), **changes)


@pytest.mark.parametrize(
    ("wrong", "target", "word"),
    [
        ({"spills": 4}, "sm_90", "spills 4"),
        ({"stack": 8}, "sm_90", "local memory"),
        ({"regs": 200, "warps": 8}, "sm_90", "registers"),
        ({"regs": 257}, "gfx942", "registers"),
        ({"shared": 82 * 1024}, "sm_80", "shared"),
        ({"shared": 114 * 1024}, "sm_90", "shared"),
        ({"shared": 33 * 1024}, "gfx942", "shared"),
        ({"mma": 0}, "sm_90", "matrix"),
        ({"loads": {"2": 64, "16": 2}}, "sm_90", "4096 of 8192"),  # half of a tile, the other half by 2 bytes
    ],
)
def test_each_law_can_be_broken(wrong, target, word):
    assert aot.broken(FINE, job(), target) == []
    (said,) = aot.broken(FINE | wrong, job(), target)
    assert word in said


def test_a_small_tile_may_be_read_with_narrow_loads():
    """512 bytes for 128 lanes: 4 bytes each."""
    small = FINE | {"loads": {"4": 1}}
    assert aot.broken(small, aot.Job(None, (512,)), "sm_90") == []
    assert aot.broken(small | {"loads": {"2": 2}}, aot.Job(None, (512,)), "sm_90")


@pytest.mark.parametrize(
    ("now", "word"),
    [
        ({"regs": 81}, "registers rose from 64 to 81"),
        ({"spills": 4}, "spills rose from 0 to 4"),
        ({"width": 8}, "narrowed from 16 to 8"),
        ({"mma": 0}, "matrix"),
    ],
)
def test_a_change_for_the_worse_is_named(now, word):
    (said,), _ = aot.changes({"k": FINE}, {"k": FINE | now})
    assert word in said


def test_other_changes_are_told_and_fail_nothing():
    worse, other = aot.changes({"k": FINE | {"ops": 4.0}}, {"k": FINE | {"regs": 80, "shared": 512, "ops": 3.5}})
    assert worse == []
    assert other == ["k: ops fell from 4.0 to 3.5", "k: regs rose from 64 to 80", "k: shared fell from 1024 to 512"]
    assert aot.changes({}, {"k": FINE})[0] == ["k: not in the record"]


def test_a_record_is_read_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "versions", lambda: {"triton": "1"})
    made = {"sm_90": {"a": FINE, "b": FINE}, "sm_80": {"a": FINE}}
    aot.save(made, tmp_path / "aot.json")
    assert aot.load(tmp_path / "aot.json") == {"versions": {"triton": "1"}, "cases": made}


def test_the_table_shows_the_budget(capsys):
    from rich.console import Console

    found = {"sm_90": {"attend decode int4": FINE | {"ops": 10.5, "unpack": 3.0, "bytes": 0.5625}}}
    Console(width=120).print(aot.table(found))
    line = capsys.readouterr().out.splitlines()[-2]
    assert all(x in line for x in ("int4", "sm_90", "10.5", "3.0", "3.9")), line
