"""Kernels compiled for GPUs that need not be there, what came out, and the laws that it must keep.

`launches` records what a caller would launch, `build` compiles it for a target as triton would there, `numbers` reads
registers, spills, shared memory, loads and instructions from the assembly (measure.py says how they are counted).

    spills   none to memory (scalar registers of AMD are kept in vector registers)
    limits   two programs fit a multiprocessor: registers, shared memory
    loads    a page tile is read min(16, its bytes / threads) bytes at a time; scales, tables, block ids may be narrow
    mma      products run on matrix units

aot.json is the record of what ships; `python -m kvlab.kernels.triton.aot` prints its instruction table. No driver is
needed, TRITON_INTERPRET must not be set. Not covered: load widths and instruction counts of AMD targets.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from kvlab.kernels.triton import measure

RECORD = Path(__file__).with_name("aot.json")
MORE_REGS = 16  # a rise beyond it needs a reason, and a new record
WIDEST = 16  # bytes of a load
BALANCE = 33.5 / 4.8  # lane-ops an H200 issues per byte of memory traffic: 16,896 lanes at 1.98 GHz, 4.8 TB/s


class Target(NamedTuple):
    """lanes of a warp; what one of two programs on a multiprocessor has: bytes of shared memory, registers of lanes."""

    backend: str
    arch: int | str
    lanes: int
    shared: int
    regs: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 81 * 1024, 65536 // 2),  # 164 KB, of which the driver takes 1 per program
    "sm_90": Target("cuda", 90, 32, 113 * 1024, 65536 // 2),  # 228 KB
    "gfx942": Target("hip", "gfx942", 64, 32 * 1024, 4 * 512 * 64 // 2),  # 64 KB, four units of 512 registers
}


@dataclass(frozen=True, eq=False)
class Launch:
    kernel: object  # triton.JITFunction
    args: tuple
    options: dict


@dataclass(frozen=True, eq=False)
class Job:
    """A launch, and what its code is held to.

    tiles      bytes of each page tile that is read at once: in the main loop, or (loop False) anywhere
    elements   of K and V that a turn of the main loop takes; 0: its instructions are not counted per element
    bytes      of pages for one of them
    mma        its products belong on matrix units
    """

    launch: Launch
    tiles: tuple[int, ...] = ()
    loop: bool = True
    elements: int = 0
    bytes: float = 0.0
    mma: bool = True


@contextmanager
def launches(*kernels) -> Iterator[list[Launch]]:
    """What these kernels are launched with inside is recorded instead. Tensors may be on the device "meta"."""
    found: list[Launch] = []
    for k in kernels:
        k.run = lambda *args, grid, warmup, k=k, **options: found.append(Launch(k, args, options))
    try:
        yield found
    finally:
        for k in kernels:
            del k.run


def build(launch: Launch, target: str):
    """triton.CompiledKernel with the types, alignments and constants that triton finds in the arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    to, fn = GPUTarget(*TARGETS[target][:3]), launch.kernel
    backend = make_backend(to)
    bind = create_function_from_signature(fn.signature, fn.params, backend)
    bound, special, options = bind(*launch.args, **launch.options)
    _, signature, constants, attrs = fn._pack_args(backend, options, bound, special, None)
    return triton.compile(ASTSource(fn, signature, constants, attrs), target=to, options=options)


# -- reading -----------------------------------------------------------------------------------------------------
def tool(name: str) -> Path | None:
    """nvdisasm, cuobjdump: triton's NVIDIA backend brings them."""
    from triton.backends import backends

    if "nvidia" not in backends:
        return None
    from triton.backends import nvidia

    path = Path(nvidia.__file__).parent / "bin" / name
    return path if path.exists() else None


def missing(target: str) -> str:
    """Why a target cannot be compiled and read here; "" if it can."""
    from triton.backends import backends

    name = {"cuda": "nvidia", "hip": "amd"}[TARGETS[target].backend]
    if name not in backends:
        return f"this triton has no backend {name}"
    lost = [t for t in ("nvdisasm", "cuobjdump") if name == "nvidia" and tool(t) is None]
    return f"this triton brings no {', '.join(lost)}" if lost else ""


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Of triton, and of the assembler of each target that has one."""
    import triton

    found = {"triton": triton.__version__}
    for name, t in TARGETS.items():
        if t.backend == "cuda" and not missing(name):
            from triton.backends.nvidia.compiler import get_ptxas_version

            m = re.search(r"V([\d.]+)", get_ptxas_version(t.arch))
            found[f"ptxas {name}"] = m[1] if m else "unknown"
    return found


def disassemble(cubin: bytes) -> tuple[str, str]:
    """(SASS, resource usage)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "k.cubin"
        path.write_bytes(cubin)
        calls = ([tool("nvdisasm"), "-c", path], [tool("cuobjdump"), "-res-usage", path])
        sass, usage = (subprocess.run(c, capture_output=True, text=True, check=True).stdout for c in calls)
        return sass, usage


def numbers(job: Job, target: str) -> dict:
    return read(job, build(job.launch, target), target)


def read(job: Job, k, target: str) -> dict:
    """Of a compiled job: regs of a lane; spills, stack (local memory), shared in bytes; mma: products in the main
    loop."""
    found = measure.amd(k.asm["amdgcn"]) if TARGETS[target].backend == "hip" else _cuda(job, k)
    return {"warps": k.metadata.num_warps, "shared": k.metadata.shared, **found}


def _cuda(job: Job, k) -> dict:
    """inner: bytes of local memory that the main loop moves; loads {bytes of a lane: loads of a turn}; width: loads at
    least that wide carry all page bytes. With elements, of a turn: classes, its instructions; ops, all of them, and
    unpack, those of that class, as lane-ops per element; bytes of one."""
    sass, usage = disassemble(k.asm["cubin"])
    loop, turns = measure.main_loop(sass), measure.turns(sass, k.asm["ptx"])
    loads = measure.load_widths(loop if job.loop else measure.whole(sass))
    counts = measure.classes(loop)
    lanes = 32 * k.metadata.num_warps
    out = {
        "regs": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": measure.spilled(measure.whole(sass)),
        "inner": measure.spilled(loop, ("STL", "LDL")),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "mma": counts["mma"],
        "loads": {str(w): _short(n / turns) for w, n in loads.items()},
        "width": _width(loads, lanes / turns, job.tiles),
    }
    if job.elements:
        per = lanes / turns / job.elements
        out |= {"classes": {c: _short(n / turns) for c, n in counts.items()}, "ops": round(len(loop) * per, 2),
                "unpack": round(counts["unpack"] * per, 2), "bytes": job.bytes}  # fmt: skip
    return out


def _short(x: float) -> float | int:
    return int(x) if x == int(x) else round(x, 2)


def _carry(loads: dict, lanes: float, width: int) -> float:
    """Bytes that loads of at least that width bring."""
    return sum(int(w) * n * lanes for w, n in loads.items() if int(w) >= width)


def _width(loads: dict, lanes: float, tiles: tuple[int, ...]) -> int:
    """The widest load such that loads at least as wide carry all tiles; 0 without tiles."""
    return next((w for w in (16, 8, 4, 2, 1) if tiles and _carry(loads, lanes, w) >= sum(tiles)), 0)


# -- laws --------------------------------------------------------------------------------------------------------
def broken(found: dict, job: Job, target: str) -> list[str]:
    """What a kernel's numbers break, in words. Nothing here depends on a record."""
    t, said = TARGETS[target], []
    lanes = t.lanes * found["warps"]
    if found["spills"] or found["stack"]:
        said.append(f"spills {found['spills']} (registers on AMD, else bytes), {found['stack']} bytes of local memory, "
                    f"{found.get('inner', 'unknown')} moved in a turn of the main loop")  # fmt: skip
    if found["regs"] * lanes > t.regs:
        said.append(f"{found['regs']} registers x {lanes} lanes: two programs have {t.regs} each")
    if found["shared"] > t.shared:
        said.append(f"{found['shared']} bytes of shared memory: two programs have {t.shared} each")
    if job.mma and not found["mma"]:
        said.append("no product in the main loop is on a matrix unit")
    for width in sorted({_wanted(b, lanes) for b in job.tiles}, reverse=True) if "loads" in found else ():
        need = sum(b for b in job.tiles if _wanted(b, lanes) >= width)
        have = _carry(found["loads"], lanes, width)
        if have < need:
            said.append(f"loads of {width} bytes or more bring {have:.0f} of {need} bytes of pages: {found['loads']}")
    return said


def _wanted(tile: int, lanes: int) -> int:
    """min(16, bytes per thread), a width that exists."""
    return min(WIDEST, 1 << max(0, (tile // lanes).bit_length() - 1))


def changes(was: dict[str, dict], now: dict[str, dict]) -> tuple[list[str], list[str]]:
    """(worse, other) of two {case: numbers}, each in words. Worse: more than MORE_REGS registers, any spill, a narrower
    load, no products where there were some, a case that only one of them has."""
    worse = [f"{name}: not in the record" for name in now if name not in was]
    other = []
    for name in now.keys() & was.keys():
        a, b = was[name], now[name]
        if b["regs"] - a["regs"] > MORE_REGS:
            worse.append(f"{name}: registers rose from {a['regs']} to {b['regs']}")
        for key, what in (("spills", "spills rose"), ("stack", "local memory rose")):
            if b[key] > a[key]:
                worse.append(f"{name}: {what} from {a[key]} to {b[key]}")
        if b.get("width", 0) < a.get("width", 0):
            worse.append(f"{name}: page loads narrowed from {a['width']} to {b['width']} bytes")
        if a["mma"] and not b["mma"]:
            worse.append(f"{name}: no products on matrix units any more")
        other += [f"{name}: {key} {'rose' if b[key] > a[key] else 'fell'} from {a[key]} to {b[key]}"
                  for key in ("regs", "shared", "ops", "unpack") if a.get(key, 0) != b.get(key, 0)]  # fmt: skip
    return sorted(worse), sorted(other)


# -- record ------------------------------------------------------------------------------------------------------
def load(path: Path = RECORD) -> dict:
    """{"versions": {...}, "cases": {target: {case: numbers}}}, empty where there is none."""
    return json.loads(path.read_text("utf-8")) if path.exists() else {"versions": {}, "cases": {}}


def save(cases: dict[str, dict[str, dict]], path: Path = RECORD) -> None:
    """One line a case: a diff shows which moved."""
    blocks = []
    for target, found in cases.items():
        lines = ",\n".join(f"    {json.dumps(n)}: {json.dumps(x)}" for n, x in sorted(found.items()))
        blocks.append(f"  {json.dumps(target)}: {{\n{lines}\n  }}")
    body = ",\n".join(blocks)
    path.write_text(f'{{\n"versions": {json.dumps(versions())},\n"cases": {{\n{body}\n}}\n}}\n', "utf-8")


def table(cases: dict[str, dict[str, dict]]) -> Table:
    """Lane-ops per element against what the memory of an H200 leaves time for."""
    out = Table(title="Instructions of the main loop, lane-ops per element of K and V")
    for head in ("case", "target", "regs", "spills", "shared", "load", "all", "unpack", "budget"):
        out.add_column(head, justify="left" if head in ("case", "target") else "right")
    for target, found in cases.items():
        for name, x in found.items():
            if "ops" in x:
                budget = f"{BALANCE * x['bytes']:.1f}"
                cells = (x["regs"], x["spills"], x["shared"], x["width"], x["ops"], x["unpack"], budget)
                out.add_row(name, target, *map(str, cells))
    return out


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(f"This prints the record. To compile: python tests/kernels/aot/record.py {' '.join(sys.argv[1:])}")
    Console(width=120).print(table(load()["cases"]))
