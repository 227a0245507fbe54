"""Time and bandwidth on a GPU; in a dry run the same on a CPU, where the figures mean nothing.

calls   a list of launches over different memory (layers), the unit of a replay
replay  all of them in one CUDA graph, between two events: what a launch costs the host is not in it
flush   256 MB are written between replays, so that nothing is left in the L2 cache
figure  the median of 20 replays or more, per call; the 20th and 80th percentile beside it
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles

import torch

FLUSH = 256 * 2**20  # bytes, several times an L2 cache
FOOTPRINT = 512 * 2**20  # bytes that the calls of a replay read together, if LAYERS allows
LAYERS = 32  # calls of a replay, at most
REPLAYS, MOST, SECONDS = 20, 50, 0.4

Calls = Sequence[Callable[[], object]]


class Machine:
    """Where measurements run: a GPU, or (dry) the CPU with as little work as there can be."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self._flush: torch.Tensor | None = None

    def layers(self, bytes_of_one: int, wanted: int | None = None) -> int:
        """How many layers a cache of the benchmark has: as many as are wanted, else enough for a footprint."""
        return 2 if self.dry else wanted or max(1, min(LAYERS, -(-FOOTPRINT // max(1, bytes_of_one))))

    def room(self) -> float:
        """Bytes that may be allocated."""
        return 2e9 if self.dry else torch.cuda.mem_get_info()[0] - 2e9

    def sync(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def clean(self) -> None:
        """After a measurement: what it held is free again."""
        import gc

        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()

    def time(self, calls: Calls, graph: bool = True) -> dict:
        """ms_median and its neighbours, of one call."""
        if self.dry:
            return summary(_host(calls[:1], 1), 1, "CPU, dry")
        clock = "CUDA events around replays of a graph, L2 flushed between them"
        run, why = lambda: [c() for c in calls], ""
        if graph:
            try:
                run = _graphed(calls)
            except Exception as error:
                if broken(error):
                    raise
                why = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
                graph = False
        if not graph:
            run()
            clock = "CUDA events around launches, L2 flushed between them"
        out = summary(self._events(run), len(calls), clock)
        return out | ({"no_graph": why} if why else {})

    def _events(self, run: Callable[[], object]) -> list[float]:
        """ms of each replay."""
        if self._flush is None:
            self._flush = torch.empty(FLUSH // 4, dtype=torch.int32, device=self.device)
        first = self._replays(run, 2)[-1]
        return self._replays(run, int(max(REPLAYS, min(MOST, 1000 * SECONDS / max(first, 1e-3)))))

    def _replays(self, run: Callable[[], object], n: int) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
        for i, (start, end) in enumerate(pairs):
            self._flush.fill_(i)
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def environment(self) -> dict:
        """The machine in numbers, and how fast its memory is: GB/s, read plus written bytes."""
        import sys

        import transformers
        import triton

        facts = {
            "torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__,
            "python": sys.version.split()[0], "cuda": torch.version.cuda,
        }  # fmt: skip
        size = (1 << 22 if self.dry else 1 << 30) // 4
        if not self.dry:
            p = torch.cuda.get_device_properties(0)
            facts |= {
                "gpu": p.name, "sms": p.multi_processor_count, "memory_gb": p.total_memory / 1e9,
                "capability": f"{p.major}.{p.minor}", "l2_mb": getattr(p, "L2_cache_size", 0) / 1e6,
                "driver": _smi("driver_version"), "clocks_mhz": _smi("clocks.sm,clocks.mem,clocks.max.sm"),
            }  # fmt: skip
        a, b = (torch.randint(0, 1000, (size,), dtype=torch.int32, device=self.device) for _ in range(2))
        copy = self.time([lambda: a.copy_(b)], graph=False)
        x = b.view(torch.float32)
        read = self.time([x.sum], graph=False)
        bytes_ = 4 * size
        return facts | {
            "copy_bytes": 2 * bytes_, "copy_gb_per_s": 2 * bytes_ / copy["ms_median"] / 1e6,
            "copy_gb_per_s_low": 2 * bytes_ / copy["ms_p80"] / 1e6,
            "copy_gb_per_s_high": 2 * bytes_ / copy["ms_p20"] / 1e6,
            "read_gb_per_s": bytes_ / read["ms_median"] / 1e6, "clock": copy["clock"], "reps": copy["reps"],
        }  # fmt: skip


def summary(ms: list[float], calls: int, clock: str) -> dict:
    """Figures of one call from the ms of each replay."""
    each = sorted(x / calls for x in ms)
    fifths = quantiles(each, n=5, method="inclusive") if len(each) > 1 else each * 4
    return {
        "ms_median": median(each), "ms_p20": fifths[0], "ms_p80": fifths[3], "ms_min": each[0], "ms_max": each[-1],
        "reps": len(each), "calls": calls, "clock": clock,
    }  # fmt: skip


def _host(calls: Calls, reps: int) -> list[float]:
    out = []
    for _ in range(reps):
        begin = time.perf_counter()
        for call in calls:
            call()
        out.append(1000 * (time.perf_counter() - begin))
    return out


def _graphed(calls: Calls) -> Callable[[], None]:
    """Everything is run once before it is captured: compiled, and its handles made."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def broken(error: Exception) -> bool:
    """Whether the device's context is lost with this error: every later call of the process would fail too."""
    words = ("illegal memory", "misaligned address", "illegal instruction", "launch failure", "device-side assert",
             "unspecified", "hardware stack", "uncorrectable", "launch timed out")  # fmt: skip
    if any(w in str(error).lower() for w in words):
        return True
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except Exception:
            return True
    return False


def _smi(query: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split("\n")[0]
    return None
