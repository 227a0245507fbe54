"""Whole steps of several sides in turn, on one thread and on all: wall time and process CPU time.

turn    one step that is not timed (it warms what the other sides pushed out of the caches), then as many as fit into
        `budget` seconds, 1 to 8; a figure is the mean of a turn
round   a turn of every side on each number of threads; every second round runs backwards
figure  the median over rounds

"wall" is each side's wall time at its best number of threads, "CPU" its process CPU time on one thread. A side that
fails is reported and left out, the others go on. `others` is what the rest of the machine took meanwhile, in cores:
two-thread wall times mean little when it is not near 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import common

Turn = Callable[[int, int], tuple[float, float]]  # (threads, steps) -> wall and CPU seconds of a step
CASES = ((1, 512), (1, 2048), (1, 8000), (8, 512), (8, 2048))  # (batch, context)
MOST = 8  # steps of a turn
BUDGET, QUICK = 0.2, 0.05  # seconds of a turn
PAUSE = 0.02  # seconds between turns: threads of the side before stop spinning
QUIET = 0.25  # cores that others may take


@dataclass
class Times:
    wall: dict[int, list[float]] = field(default_factory=dict)  # threads -> seconds a step, by round
    cpu: dict[int, list[float]] = field(default_factory=dict)
    steps: int = 0

    @property
    def threads(self) -> int:
        """The number of threads at which this side is fastest."""
        return min(self.wall, key=lambda t: median(self.wall[t]))

    def row(self) -> dict:
        """Milliseconds of a step."""
        wall = self.wall[self.threads]
        return {
            "threads": self.threads,
            "ms_wall": 1000 * median(wall),
            "ms_wall_min": 1000 * min(wall),
            "ms_wall_max": 1000 * max(wall),
            "ms_wall_by_threads": {str(t): 1000 * median(v) for t, v in self.wall.items()},
            "ms_cpu_1": 1000 * median(self.cpu[1]),
            "rounds": len(wall),
            "steps": self.steps,
        }


def cases(args) -> list[tuple[int, int]]:
    """--cases 1x512,8x2048, else all; --quick has one of its own."""
    if args.quick:
        return [(2, 100)]
    return [tuple(map(int, c.split("x"))) for c in args.cases.split(",") if c] or list(CASES)


def room(rounds: int, threads: int = 2) -> int:
    """Tokens that a side may append in `run`: what its cache needs beyond the context."""
    return (rounds * (MOST + 1) + 2) * threads


def turns(step: Callable[[], object]) -> Turn:
    """The turn of a side in this process."""
    import torch

    def turn(threads: int, steps: int) -> tuple[float, float]:
        torch.set_num_threads(threads)
        step()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps

    return turn


def run(sides: dict[str, Turn], rounds: int, threads: tuple[int, ...], budget: float, most: int = MOST) -> dict:
    """{side: Times} of every side that ran to the end. most: steps of a turn."""
    out: dict[str, Times] = {}
    for name, turn in sides.items():
        if (first := _try(name, turn, threads[-1], 1)) is not None:
            out[name] = Times(steps=max(1, min(most, round(budget / first[0]))))
    for i in range(rounds):
        for t in threads:
            for name in list(out)[:: 1 if i % 2 else -1]:
                if (got := _try(name, sides[name], t, out[name].steps)) is None:
                    del out[name]
                    continue
                out[name].wall.setdefault(t, []).append(got[0])
                out[name].cpu.setdefault(t, []).append(got[1])
    return out


def _try(name: str, turn: Turn, threads: int, steps: int) -> tuple[float, float] | None:
    time.sleep(PAUSE)
    try:
        return turn(threads, steps)
    except Exception as error:
        print(f"  left out: {name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None


class Watch:
    """`with Watch(pids) as w: ...; w.facts`: load average, and the cores that processes other than these kept busy."""

    def __init__(self, pids: tuple[int, ...] = ()) -> None:
        self.pids = (os.getpid(), *pids)

    def __enter__(self) -> Watch:
        self.begin = time.perf_counter(), _busy() - _own(self.pids)
        return self

    def __exit__(self, *_) -> None:
        seconds = time.perf_counter() - self.begin[0]
        others = max(0.0, (_busy() - _own(self.pids) - self.begin[1]) / seconds)
        self.facts = {"load": os.getloadavg()[0], "others": round(others, 2)}
        if others > QUIET:
            print(f"  other processes kept {others:.1f} cores busy: these wall times are not to be relied on")


def _busy() -> float:
    """Seconds that all cores together have worked since boot, for us or for others (steal)."""
    try:
        values = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    return (sum(values) - values[3] - values[4]) / os.sysconf("SC_CLK_TCK")


def _own(pids: tuple[int, ...]) -> float:
    total = 0
    for pid in pids:
        try:
            values = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(values[11]) + int(values[12])
        except (OSError, ValueError, IndexError):
            pass
    return total / os.sysconf("SC_CLK_TCK")


def report(bench: str, rows: list[dict], peer: str, quick: bool, **facts) -> None:
    """Print the rows of one case, the fastest first, with ratios against its fastest `peer` row; write them.

    rows: {"side", "who", "extra", ...} with the figures of `Times.row`; peers that are extra are shown, not compared
    with. Adds x_best_peer (wall) and x_best_peer_cpu.
    """
    peers = [r for r in rows if r["who"] == peer and not r["extra"]]
    kernels = sorted({r["kernels"] for r in rows if "kernels" in r})
    print(f"\n{bench}  {facts}  kvlab's kernels: {', '.join(kernels)}")
    if peers:
        best, best_cpu = (min(peers, key=lambda r: r[k]) for k in ("ms_wall", "ms_cpu_1"))
        for r in rows:
            r |= {"best_peer": best["side"], "x_best_peer": best["ms_wall"] / r["ms_wall"]}
            r |= {"x_best_peer_cpu": best_cpu["ms_cpu_1"] / r["ms_cpu_1"]}
        print(f"  ratios against the fastest of {peer}: {best['side']} (wall), {best_cpu['side']} (CPU)")
    print(f"  {'side':52s} {'wall ms':>9s} thr  {'ratio':>6s} {'1-thread CPU ms':>16s}  {'ratio':>6s} {'MB':>7s}")
    for r in sorted(rows, key=lambda r: r["ms_wall"]):
        print(
            f"  {r['side']:52s} {r['ms_wall']:9.2f} {r['threads']:3d}  {_x(r.get('x_best_peer')):>6s}"
            f" {r['ms_cpu_1']:16.2f}  {_x(r.get('x_best_peer_cpu')):>6s} {r.get('cache_bytes', 0) / 1e6:7.1f}"
        )
    rows = [{"bench": bench, **r, **facts} for r in rows]
    if rows and not quick:
        common.write(bench, rows, ("batch", "context"))


def _x(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
