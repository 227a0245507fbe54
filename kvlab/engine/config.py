"""How an engine is built, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlab.errors import ConfigError
from kvlab.kernels.dispatch import CHOICES

ARITHMETIC = ("exact", "fast")
STEPS = ("auto", "lean", "hf")
GRAPHS = ("auto", "off")


@dataclass(frozen=True)
class EngineCfg:
    """block: tokens a block. chunk: prompt tokens of one sequence per step. prefill_reads: what prompt queries see of
    earlier tokens, "encoded" (the same as decoding sees) or "exact" within their own chunk. kernels: the variant of
    the CPU kernels, or "off" for the torch path. arithmetic: of decoding rows over codes, "exact" (float32) or
    "fast" (products of bytes, exact sums; kernels/cpu/fast.h). step: who runs the model, kvlab's lean step for
    llama-like models or transformers ("auto": lean where it covers the model). weights: what the lean step's
    matrices are made of, as loaded or converted (models/weights.py names the kinds). graph: decode steps replayed
    as CUDA graphs ("auto": on a GPU, with Triton's kernels) or "off". compile: torch.compile for what the lean step
    does in torch. See CacheSize for the rest."""

    block: int = 32
    max_seqs: int = 8
    max_len: int = 2048
    max_batch_tokens: int = 512
    chunk: int = 512
    pool_bytes: int | None = None
    tile: int = 256
    prefill_reads: str = "encoded"
    min_rows: int = 4  # pad a step (lean: a product that needs it) to this many rows, so that bits ignore the batch
    kernels: str = "auto"
    arithmetic: str = "exact"
    step: str = "auto"
    weights: str = "model"
    graph: str = "auto"
    compile: bool = False
    check: bool = False  # check the cache's invariants after every step

    def __post_init__(self) -> None:
        if self.prefill_reads not in ("encoded", "exact"):
            raise ConfigError(f"runtime.prefill_reads={self.prefill_reads!r} is not one of encoded, exact")
        if self.kernels not in CHOICES:
            raise ConfigError(f"runtime.kernels={self.kernels!r} is not one of {', '.join(CHOICES)}")
        if self.arithmetic not in ARITHMETIC:
            raise ConfigError(f"runtime.arithmetic={self.arithmetic!r} is not one of {', '.join(ARITHMETIC)}")
        if self.arithmetic == "fast" and self.kernels == "off":
            raise ConfigError(
                "runtime.arithmetic=fast is the CPU kernels': with runtime.kernels=off nothing would be fast. Use "
                "runtime.kernels=auto, or runtime.arithmetic=exact."
            )
        if self.graph not in GRAPHS:
            raise ConfigError(f"runtime.graph={self.graph!r} is not one of {', '.join(GRAPHS)}")
        if self.step not in STEPS:
            raise ConfigError(f"runtime.step={self.step!r} is not one of {', '.join(STEPS)}")
        if self.step == "hf" and self.weights != "model":
            raise ConfigError(
                f"runtime.weights={self.weights} needs the lean step: transformers' forward takes the weights as they "
                "were loaded. Use runtime.step=auto, or load the model in another type (model.dtype=bfloat16)."
            )
        for name in ("block", "max_seqs", "max_len", "max_batch_tokens", "chunk", "tile", "min_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"runtime.{name}={getattr(self, name)} must be at least 1")
        if self.tile % self.block:
            raise ConfigError(f"runtime.tile={self.tile} must be a multiple of runtime.block={self.block}")
        if self.max_batch_tokens < self.max_seqs:
            raise ConfigError(
                f"runtime.max_batch_tokens={self.max_batch_tokens} is below runtime.max_seqs={self.max_seqs}: "
                "not every sequence could decode in a step"
            )


@dataclass
class Stats:
    """What a run did. Seconds are wall time inside steps; peak_bytes: blocks in use at the fullest moment."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    peak_bytes: int = 0
    itl: list[float] = field(default_factory=list, repr=False)  # seconds of each pure decode step
