"""What gpu.py measures, in the order of what it is worth, and how long each part is expected to take."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_run import Task

CODECS = (
    "full float16", "int4", "turboquant 4", "int2", "int8", "fp8 e4m3", "full bfloat16", "kivi 2", "kivi 4",
    "turboquant 2", "turboquant 3",
)  # fmt: skip
CORE = [("Llama-3-8B", 64, 8192), ("Llama-3-8B", 8, 32768)]
MORE = [("Llama-3-8B", *c) for c in ((1, 32768), (8, 131072), (64, 2048), (1, 8192), (8, 8192))]
SMALL = [("SmolLM2-135M", *c) for c in ((64, 8192), (8, 32768), (1, 8192), (64, 2048), (8, 131072), (1, 2048))]
LAST = [("Llama-3-8B", *c) for c in ((64, 32768), (1, 2048), (8, 2048), (1, 131072), (64, 131072))]
LAST += [("SmolLM2-135M", *c) for c in ((8, 8192), (8, 2048), (1, 32768), (64, 32768), (1, 131072), (64, 131072))]
DRY = [("tiny", 2, 32)]

METHODS = ("full", "int4", "kivi", "turboquant")
STEPS_CORE = [("SmolLM2-135M", 8, 2000), ("Llama-3-8B", 8, 8000)]
STEPS_MORE = [
    ("Llama-3-8B", 1, 8000), ("Llama-3-8B", 64, 8000), ("Llama-3-8B", 8, 32000), ("SmolLM2-135M", 64, 2000),
    ("SmolLM2-135M", 1, 2000), ("SmolLM2-135M", 8, 8000),
]  # fmt: skip
PEERS = ("StaticCache, graph", "StaticCache", "DynamicCache")


def plan(dry: bool) -> Iterator[Task]:
    """Tasks, those that matter most first. `environment` and `tests` come before them all."""
    if dry:
        yield from _decode(DRY)
        yield Task("decode", _facts(DRY[0], codec="int4", products="float32"), 3)
        yield from _sdpa(DRY)
        yield Task("flex", _facts(("tiny", 1, 128)), 5)
        yield Task("packages", _facts(DRY[0]), 1)
        yield from _steps("tiny", 1, 40, short=True)
        case = {"model": "tiny", "batch": 1, "context": 40}
        yield Task("theirs", case | {"how": "generate"}, 4)
        yield Task("ours", case | {"method": "full", "runtime": {"kernels": "off"}}, 4)
        pages = [t for t in _pages(("tiny", 4, 64), ("tiny", 1, 32), 12) if t.facts["codec"] in ("int4", "kivi 2")]
        yield from pages[::-1]
        return
    yield from _decode(CORE)
    yield from _pages(("Llama-3-8B", 8, 8192), ("Llama-3-8B", 64, 8192), 8192)
    yield from _sdpa(CORE)
    yield Task("packages", _facts(CORE[0]), 2)
    for case in STEPS_CORE:
        yield from _steps(*case)
    for model, batch, context in STEPS_CORE:
        for method in ("full", "int4"):
            facts = {"model": model, "batch": batch, "context": context, "method": method}
            yield Task("ours", facts | {"runtime": {"kernels": "triton", "graph": "auto", "compile": True}}, 25, 90)
    for part in (MORE[:3], MORE[3:]):
        yield from _decode(part)
        yield from _sdpa(part)
    yield from _decode(SMALL[:3])
    yield from _sdpa(SMALL[:3])
    yield from _flex(CORE[0])
    for case in STEPS_MORE:
        yield from _steps(*case, short=True)
    for case in CORE:
        for codec in ("full float16", "int4", "turboquant 4"):
            yield Task("decode", _facts(case, codec=codec, products="float32"), 5)
    yield from _flex(CORE[1])
    for part in (SMALL[3:], LAST):
        yield from _decode(part)
        yield from _sdpa(part)
    for model, batch, context in STEPS_CORE:
        case = {"model": model, "batch": batch, "context": context}
        for how in ("generate", "StaticCache, compiled"):
            yield Task("theirs", case | {"how": how}, 15 if how == "generate" else 60, 120)


def _facts(case: tuple[str, int, int], **facts) -> dict:
    return dict(zip(("shape", "batch", "context"), case)) | facts


def _decode(cases: list) -> Iterator[Task]:
    for case in cases:
        for codec in CODECS:
            yield Task("decode", _facts(case, codec=codec), 1.2)


def _sdpa(cases: list) -> Iterator[Task]:
    for case in cases:
        yield Task("sdpa", _facts(case, expanded=case in CORE + DRY), 5)


def _flex(case: tuple) -> Iterator[Task]:
    yield Task("flex", _facts(case), 45, 120)


def _pages(small: tuple, large: tuple, prompt: int) -> Iterator[Task]:
    """small: of pools with many layers."""
    for codec in ("full float16", "int4"):
        yield Task("copy", _facts(small, codec=codec, what="copy of blocks", layers=32), 2)
    for codec in ("int4", "full float16", "turboquant 4", "int8", "fp8 e4m3"):
        for tokens, scattered in ((8 if prompt < 64 else 64, True), (prompt, False)):
            what = f"append of {tokens} {'single tokens' if scattered else 'tokens of a prompt'}"
            facts = _facts(small, codec=codec, tokens=tokens, scattered=scattered, what=what)
            yield Task("write", facts, 2)
    for codec in ("kivi 2", "kivi 4"):
        yield Task("write", _facts(small, codec=codec, blocks=prompt // 32 or 2, what="seal"), 2)
    for codec in ("full float16", "int4"):
        yield Task("mass", _facts(large, codec=codec, what="mass"), 2)


def _steps(model: str, batch: int, context: int, short: bool = False) -> Iterator[Task]:
    case = {"model": model, "batch": batch, "context": context}
    seconds = {"Llama-3-8B": 6.0}.get(model, 4.0)
    for method in METHODS:
        for graph in ("auto", "off"):
            if graph == "auto" or method == "full" or not short:
                runtime = {"kernels": "triton", "graph": graph}
                yield Task("ours", case | {"method": method, "runtime": runtime}, seconds, 90)
    for how in PEERS[: 1 if short else None]:
        yield Task("theirs", case | {"how": how}, seconds, 90)
    if model != "Llama-3-8B" and not short:
        yield Task("ours", case | {"method": "full", "runtime": {"kernels": "off"}}, 2 * seconds, 90)
