"""Random formats, views and layers against float64, for a minute: python fuzz.py LIBRARY VARIANT [SECONDS] [FIRST_SEED]

For a library with AddressSanitizer (sanitize.py): every array has exactly the bytes that its shape says, the last token
of the pool is read and written, and views that lie are handed over too, which the kernels must refuse. Each case is a
seed; the last one printed is the one that failed.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pages
import torch
from pages import Cache, Rows

from kvlab.cache.layout import Geom
from kvlab.kernels.cpu import dense, lib
from kvlab.kernels.cpu.attend import Layers, View
from kvlab.kernels.cpu.structs import Refused, prototypes

SECONDS = 60.0
FAR = 1.5  # the tolerances are of a test's few cases; here the worst of thousands of cases counts


def options(r: random.Random, D: int, block: int) -> tuple[str, dict]:
    """Any codec, any of its options."""
    meta, b = r.choice(("float16", "bfloat16", "float32")), lambda: r.randint(1, 8)
    group = r.choice([g for g in (8, 16, 24, 32, 40, 48, 64, D) if D % g == 0])
    shared = [g for g in (16, 32, 64) if D % g == 0 and block % g == 0] or [16]
    return r.choice([
        ("full", {"dtype": r.choice(("float32", "bfloat16", "float16"))}),
        ("fp8", {"format": r.choice(("e4m3", "e5m2"))}),
        ("int8", {"group": group, "meta_dtype": meta}),
        ("int4", {"group": group, "meta_dtype": meta, "bits": r.randint(2, 4)}),
        ("kivi", {"group": r.choice(shared), "meta_dtype": meta, "bits_k": b(), "bits_v": b()}),
        ("turboquant", {"bits_k": b(), "bits_v": b(), "norm_dtype": meta, "variant": r.choice(("mse", "prod")),
                        "share": r.choice(("all", "layer", "head"))}),
    ])  # fmt: skip


def case(seed: int, library) -> str:
    """Make one cache, attend to it in several ways. -> what was done; AssertionError when a number is wrong."""
    r = random.Random(seed)
    torch.set_num_threads(r.choice((1, 1, 2)))
    torch.manual_seed(seed)
    D, block, Hk = (
        r.choice((16, 32, 48, 64, 80, 96, 112, 128, 144, 256)),
        r.choice((16, 32, 48, 64, 128)),
        r.randint(1, 3),
    )
    G, N = r.randint(1, 9), r.randint(1, 4)
    method, opts = options(r, D, block)
    lengths = [r.choice((1, 15, 16, 17, 63, 64, 65, 255, 256, 257, r.randint(1, 400))) for _ in range(N)]
    geom, ragged = Geom(1, Hk * G, Hk, D), r.random() < 0.3
    cache = pages.build(method, geom, block, lengths, seed, ragged, **opts)
    fast = r.random() < 0.4
    try:
        layers = cache.layers(library, fast=fast)
    except Refused as why:
        return f"refused: {str(why)[:20]}"
    count = [min(n, r.choice((0, 1, 1, 2, 3, r.randint(2, 60)))) for n in lengths]
    rows = Rows.last(count, lengths, r.choice((None, None, r.randint(1, 300))), cache.table.shape[1])
    if r.random() < 0.3:  # the end of the table, so that the last block of the pool is read to its last byte
        for n, c in enumerate(count):
            rows.hi[n, :, max(c - 1, 0)] = cache.table.shape[2] * block
    cache.spoil(rows, seed)
    q = pages.queries(cache, rows, seed)
    got = pages.attend(cache, layers, rows, q)
    pages.assert_exact(cache, rows, q, got, far=FAR)
    first, second = pages.halves(rows, np.full(rows.hi.shape, r.randrange(max(lengths) + 1)))
    want = pages.attend(cache, layers, second, q, into=pages.attend(cache, layers, first, q))
    assert all(torch.equal(a, b) for a, b in zip(pages.attend_all(cache, layers, [first, second], q), want)), "together"
    columns = r.choice((cache.table.shape[2] * block, max(lengths), 1, 77))
    mass = layers.mass(0, rows.view(cache.table), q.float(), got[1], columns)
    assert not mass.isnan().any(), "mass"
    if not ragged:
        holes(r, cache, library, rows, q)
    before = [x.clone() for x in got]
    lies(r, cache, layers, rows, q, got)
    assert all(torch.equal(a, b) for a, b in zip(before, got)), "a refused call wrote"
    writes(r, cache, layers)
    return f"{method} ok"


def holes(r: random.Random, cache: Cache, library, rows: Rows, q: torch.Tensor) -> None:
    """The same with slots that are not there, one in two or nearly all or none, and garbage in them."""
    a, table = cache.arrays, torch.from_numpy(cache.table[:, 0]).long()
    hole = torch.rand(len(table), table.shape[1] * cache.block) < r.choice((0.0, 0.5, 0.97))
    valid = torch.ones(a.n_blocks, a.layers, a.heads, cache.block, dtype=torch.uint8)
    n, slot = hole.nonzero().T
    at = table[n, slot // cache.block], slice(None), slice(None), slot % cache.block
    valid[at] = 0
    for name, t in a.data.items():
        if a.regions[name].scope == "token":
            t[at] = float("nan") if t.is_floating_point() else 255 if t.dtype == torch.uint8 else -1
    fmt = replace(cache.codec.page_format(), valid="valid")
    layers = cache.layers(library, fast=cache.fast, fmt=fmt, arrays={**cache.flat, "valid": pages.flat_mask(valid)})
    cache.holes = hole
    got = pages.attend(cache, layers, rows, q)
    pages.assert_exact(cache, rows, q, got, far=FAR)
    mass = layers.mass(0, rows.view(cache.table), q.float(), got[1], hole.shape[1])
    assert not mass.isnan().any() and (mass.sum((1, 2)) * hole == 0).all(), "mass in a hole"


def writes(r: random.Random, cache: Cache, layers: Layers) -> None:
    """Tokens and blocks anywhere, the pool's last ones included; numbers that are none must be noticed."""
    a, D, B = cache.arrays, cache.geom.D, cache.block
    blocks = a.n_blocks * a.layers * a.heads
    bad = r.choice((None, None, float("nan"), float("inf")))
    if layers.appends:
        T = r.choice((1, 2, 7, 33))
        at = torch.randperm(blocks * B)[: cache.geom.Hk * T]
        at[-1] = blocks * B - 1
        k, v = torch.randn(2, cache.geom.Hk, T, D)
        v = v * 10 ** r.uniform(-9, 4)
        v = v / (v.norm(dim=-1).max() / 30000).clamp(min=1)  # a token's norm fits float16
        if len(at) == cache.geom.Hk * T:
            if bad is not None:
                v[-1, -1, r.randrange(D)] = bad
            ok = layers.append(0, k, v, at)
            assert ok == (bad is None) or cache.codec.family == "full", "a number that is none was written"
    if layers.seals:
        shape, dtype = (r.randint(3, 9), B * D), r.choice((torch.float32, torch.bfloat16, torch.float16))
        exact = [torch.randn(shape).to(dtype) for _ in "kv"]
        src = torch.randint(0, len(exact[0]), (r.randint(1, min(4, blocks)),))
        src[-1] = len(exact[0]) - 1
        dst = torch.randperm(blocks)[: len(src)]
        dst[0] = blocks - 1 if blocks - 1 not in dst else dst[0]
        assert layers.seal(0, *exact, src, dst)


def lies(r: random.Random, cache: Cache, layers: Layers, rows: Rows, q: torch.Tensor, into: tuple) -> None:
    """Views that point outside of what they were given."""
    if not rows.total:
        return
    n = r.choice([i for i, c in enumerate(rows.count) if c])
    at, far = (n, r.randrange(cache.table.shape[1])), r.choice((2**31 - 1, 10**6))
    for _ in range(3):
        table, lo, hi, count = cache.table.copy(), rows.lo.copy(), rows.hi.copy(), np.array(rows.count)
        what, past = r.choice(("id", "lo", "hi", "more", "less")), cache.table.shape[2] * cache.block + 1
        if what == "id":
            table[(*at, r.randrange(table.shape[2]))] = r.choice((-1, cache.arrays.n_blocks, far))
        elif what == "lo":
            lo[(*at, 0)] = r.choice((-1, -far))
        elif what == "hi":
            hi[(*at, 0)] = r.choice((past, far))
        else:
            count[n] = -r.choice((1, 1000)) if what == "less" else rows.lo.shape[2] + r.choice((1, 1000))
        view = View.of(table, lo, hi, rows.first, count)
        try:
            layers.attend(0, view, q.float(), *into)
        except ValueError:
            continue
        raise AssertionError("a view that lies was not refused")


def layer(seed: int, library) -> str:
    """A model's layer and head of any size, on rows of which some are not finite; exactly the scratch that is asked."""
    r = random.Random(seed)
    torch.set_num_threads(r.choice((1, 2)))
    kind, H, Hk, D = r.choice(tuple(dense.KINDS)), r.randint(1, 4), r.randint(1, 3), r.choice((2, 16, 48, 64, 80))
    E, wide, vocab, T = r.choice((1, 31, 32, 100, 144)), r.choice((1, 17, 64, 100)), r.randint(1, 80), r.randint(0, 15)
    make = lambda n, m: dense.Matrix(kind, torch.randn(n, m), r.choice((None, torch.randn(n))))  # noqa: E731
    gate = dense.interleaved(torch.randn(wide, E), torch.randn(wide, E))
    parts = dense.LayerParts(
        qkv=make((H + 2 * Hk) * D, E), o=make(E, H * D), down=make(E, wide), gate_up=dense.Matrix(kind, gate, None),
        norm=torch.randn(E), mlp_norm=torch.randn(E), qk_norm=r.choice((None, torch.randn(H + Hk, D))), eps=1e-5,
        qk_eps=1e-6, turned=H + Hk, dim=D,
    )  # fmt: skip
    step = dense.Step(library, [parts], torch.randn(E), 1e-5, make(vocab, E))
    x = torch.zeros(T, dense.padded(E))
    x[:, :E] = torch.randn(T, E) * 10 ** r.uniform(-30, 20)
    spoiled = T > 0 and r.random() < 0.3
    if spoiled:
        x[r.randrange(T), r.randrange(E)] = r.choice((float("nan"), float("inf"), -float("inf")))
    angle = torch.randn(T, D // 2)
    logits, qkv = step.head(x), step.front(0, x, torch.cat([angle.cos(), angle.sin()], 1))
    step.back(0, torch.randn(T, H * D), x)
    assert logits.shape == (T, vocab) and qkv.shape == (T, (H + 2 * Hk) * D)
    assert spoiled or (logits.isfinite().all() and qkv.isfinite().all()), "a number that is none"
    return f"layer {kind}"


def main(path: str, variant: str, seconds: float = SECONDS, seed: int = 0) -> int:
    library = prototypes(lib.open_library(Path(path)))
    assert pages.isa_of(library) == variant, f"{path} is {pages.isa_of(library)}, not {variant}"
    done, began = Counter(), time.monotonic()
    while time.monotonic() - began < seconds:
        print(f"\rseed {seed} ", end="", flush=True)
        done[case(seed, library)] += 1
        done[layer(seed, library)] += 1
        seed += 1
    print(f"\r{variant}: {sum(done.values())} cases in {time.monotonic() - began:.0f} s: {dict(done)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], *map(float, sys.argv[3:4]), *map(int, sys.argv[4:5])))
