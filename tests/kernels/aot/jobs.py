"""Launches of the cases, from the code that launches them, over pools that are not there (tensors on "meta")."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import torch
from cases import CODECS, Case

from kvlab import registry
from kvlab.cache.layout import Geom
from kvlab.codec import Codec
from kvlab.kernels.triton import move, sides
from kvlab.kernels.triton.aot import TARGETS, Job, Launch, launches
from kvlab.kernels.triton.attend import attend
from kvlab.kernels.triton.encode import append, seal
from kvlab.kernels.triton.layers import Layers, View
from kvlab.kernels.triton.mass import mass, mass_kernel
from kvlab.kernels.triton.writer import Writer

HK, G = 8, 4
STRIDE = 30 * HK  # rows of a block: layers x heads. Only one layer is set up
TOKENS = 47  # rows of a chunk: odd, since an even number could be compiled better
SLOTS = 4096  # of a sequence; 512 in the form "short", whose rows are not split
BLOCKS = 2**20  # of a pool: its regions pass 2 GB


def of(case: Case, target: str) -> Job:
    to = TARGETS[target]
    with patch.object(sides, "capability", lambda device: to.arch if to.backend == "cuda" else 0):
        return JOBS[case.kernel](case)


def _codec(case: Case) -> tuple[Codec, Geom, dict[str, torch.Tensor], float]:
    """(codec, geometry, arrays of the pool, bytes of a token and kv head)."""
    method, options = CODECS[case.codec]
    codec = registry.build(method, **{k: case.D if v == "D" else v for k, v in options.items()}).codec
    geom = Geom(1, HK * G, HK, case.D, _dtype(case))
    codec.setup(geom, case.B)
    regions = codec.regions(geom, case.B)
    arrays = {
        r.name: _meta(BLOCKS * STRIDE * (case.B if r.scope == "token" else 1), *r.shape, dtype=r.dtype) for r in regions
    }
    return codec, geom, arrays, sum(r.bytes(case.B) for r in regions) / case.B


def _dtype(case: Case) -> torch.dtype:
    """The model's."""
    if "exact" in case.form:
        return torch.float32
    return getattr(torch, case.codec) if case.codec in ("bfloat16", "float32") else torch.float16


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _layers(case: Case) -> tuple[Layers, float]:
    codec, geom, arrays, size = _codec(case)
    heads = np.arange(HK)[None]
    made = Layers(
        codec.page_format(), arrays, case.B, [0], heads * 0, heads, STRIDE, BLOCKS, G, geom.scale,
        exact="exact" in case.form,
    )  # fmt: skip
    return made, size


def _rows(case: Case) -> tuple[View, torch.Tensor, torch.Tensor]:
    """(what the rows of two sequences see, their queries, their log-sum-exps)."""

    def ints(*shape: int) -> torch.Tensor:
        return _meta(*shape, dtype=torch.int32)

    tokens = TOKENS if "chunk" in case.form else 1
    blocks = (512 if case.form == "short" else SLOTS) // case.B
    view = View(ints(2, 1, blocks), ints(2, 1, tokens), ints(2, 1, tokens), ints(2), ints(2), tokens)
    return view, _meta(2 * tokens, HK * G, case.D, dtype=_dtype(case)), _meta(2 * tokens, HK * G)


def _tiles(launch: Launch, *sides) -> tuple[int, ...]:
    """Bytes of the page tiles of (Spec, Ptrs): a packed row of BN tokens each, or a plane of it."""
    out: list[int] = []
    for s, p in sides:
        row = [s.narrow_at, s.narrow_cols] if s.narrow else [s.row * p.codes.dtype.itemsize]
        out += [launch.options["BN"] * n for n in row] * s.rows
    return tuple(out)


def _attend(case: Case) -> Job:
    layers, size = _layers(case)
    view, q, lse = _rows(case)
    with launches(attend) as found:
        layers._attend(0, view, layers._turned(0, q), torch.empty_like(q), lse, False)
    (launch,) = found
    tiles = _tiles(launch, *zip(layers.K, layers.k), (layers.V, layers.v))
    elements = launch.options["BN"] * 2 * case.D if case.form == "decode" else 0  # the budget is that of decoding
    return Job(launch, tiles, elements=elements, bytes=size / (2 * case.D), mma=launch.options["IP"] != "ieee")


def _mass(case: Case) -> Job:
    layers, _ = _layers(case)
    view, q, lse = _rows(case)
    with launches(mass_kernel) as found:
        mass(layers, 0, view, q, lse, SLOTS)
    (launch,) = found
    return Job(launch, _tiles(launch, *zip(layers.K, layers.k)), loop=False, mma=launch.options["IP"] != "ieee")


def _writer(case: Case) -> Writer:
    codec, _, arrays, _ = _codec(case)
    made = Writer(codec.page_format(), arrays, case.B, [0], STRIDE * BLOCKS)
    assert made.seals, made.refused
    return made


def _append(case: Case) -> Job:
    k = _meta(TOKENS, HK, case.D, dtype=_dtype(case)).transpose(0, 1)  # as a model has it
    with launches(append) as found:
        _writer(case).append(0, k, k, _meta(HK * TOKENS, dtype=torch.int64))
    (launch,) = found
    return Job(launch, mma=False)


def _seal(case: Case) -> Job:
    k, rows = _meta(64, case.B * case.D, dtype=_dtype(case)), _meta(8, dtype=torch.int64)
    with launches(seal) as found:
        _writer(case).seal(0, k, k, rows, rows)
    (launch,) = found
    return Job(launch, mma=False)


def _move(case: Case) -> Job:
    """Of the array of keys: a token's row, or a block of all layers and heads."""
    codec, _, arrays, _ = _codec(case)
    x, rows = arrays[codec.page_format().k[0].codes], _meta(100, dtype=torch.int64)
    with launches(move.copy_rows) as found:
        if case.form == "rows":
            move.move_rows(x, rows, rows)
        else:
            move.copy_blocks([x.view(BLOCKS, -1)], rows, rows)
    words, o = found[0].args[0], found[0].options
    tile = o["ROWS"] * o["COLS"] * words.dtype.itemsize
    return Job(found[0], (tile,) if case.form == "blocks" else (), loop=False, mma=False)


JOBS = {"attend": _attend, "mass": _mass, "append": _append, "seal": _seal, "move": _move}
