"""kvlab's kernels over packed pages on a GPU: decode attention codec by codec, and what writes and moves pages.

Every figure belongs to launches whose results were looked at first: attention against float64 over `decode`, written
bytes against `encode`, copies against their sources.

bytes   codes and metadata that one layer's attention reads. Queries, outputs, tables and partials are not counted
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpu_cache import Pages, accept
from gpu_clock import Machine
from gpu_run import Absent
from torch import Tensor

from kvlab.cache.arrays import Arrays
from kvlab.cache.layout import kv_regions


def decode(facts: dict, machine: Machine) -> Iterator[dict]:
    """One decoding row of each sequence, all layers."""
    pages = Pages.of(facts, machine)
    bound, view = pages.bind(machine)
    q, out, lse = pages.queries(machine)
    error = 0.0
    for layer in {0, pages.geom.L - 1}:
        bound.attend(layer, view, q, out.fill_(torch.nan), lse.fill_(torch.nan))
        want, want_lse = pages.expected(layer, q)
        error = max(error, accept(out, want, pages.dtype), accept(lse, want_lse, pages.dtype))
    calls = [lambda i=i: bound.attend(i, view, q, out, lse) for i in range(pages.geom.L)]
    yield {
        **_pages_facts(pages), "bytes": pages.bytes, "footprint": pages.bytes * pages.geom.L, "rel_error": error,
        "programs": _programs(pages), **machine.time(calls),
    }  # fmt: skip


def warm(facts: dict, machine: Machine) -> Iterator[dict]:
    """Compile what `decode` will launch for these cases: the kernels land in triton's cache on disk. Three layers have
    addresses of every alignment that there is."""
    done, why = 0, []
    for case in facts["cases"]:
        try:
            pages = Pages.of(case, machine, hollow=True)
            bound, view = pages.bind(machine)
            q, out, lse = pages.queries(machine)
            for layer in range(min(3, pages.geom.L)):
                bound.attend(layer, view, q, out, lse)
            machine.sync()
            done += 1
        except Exception as error:  # the measurement itself will tell
            why.append(f"{case['codec']}: {type(error).__name__}")
    yield {"cases": done, "why": ", ".join(sorted(set(why)))}


def write(facts: dict, machine: Machine) -> Iterator[dict]:
    """append: tokens of a step, one of each sequence (scattered) or a prompt's. seal: full blocks of an exact tail."""
    pages = Pages.of(facts, machine)
    bound, _ = pages.bind(machine)
    geom, a, L = pages.geom, pages.arrays, pages.geom.L
    itemsize, held = pages.dtype.itemsize, a.block_bytes / L  # bytes of a layer of a block
    head = torch.arange(geom.Hk, device=machine.device)
    gen = torch.Generator().manual_seed(2)
    if facts["what"] == "seal":
        blocks = torch.arange(1, 1 + facts["blocks"], device=machine.device)
        tail = Arrays(kv_regions(geom, pages.dtype), len(blocks) + 1, L, geom.Hk, a.block, machine.device)
        k, v = (torch.randn(1, geom.Hk, a.block, geom.D, generator=gen).to(pages.dtype) for _ in "kv")
        for name, x in (("k", k), ("v", v)):
            tail.data[name][1:] = x.to(machine.device)
        if not bound.seals:
            raise Absent(f"no kernel seals {facts['codec']}")
        n, exact = len(blocks) * geom.Hk, 2 * geom.D * a.block * itemsize

        src, rows = ([x.row(blocks[:, None], i * geom.Hk + head).flatten() for i in range(L)] for x in (tail, a))

        def call(i: int) -> bool:
            return bound.seal(i, tail.block_rows["k"], tail.block_rows["v"], src[i], rows[i])

        def got(name: str) -> Tensor:  # the last block of layer 0
            return a.block_rows[name][rows[0][-geom.Hk :]]

        moved = n * exact + len(blocks) * held
    else:
        if not bound.appends:
            raise Absent(f"no kernel appends {facts['codec']}")
        T = facts["tokens"]
        k, v = (torch.randn(geom.Hk, T, geom.D, generator=gen).to(machine.device, pages.dtype) for _ in "kv")
        token = torch.arange(T, device=machine.device)
        block, slot = (1 + token, token % a.block) if facts["scattered"] else (1 + token // a.block, token % a.block)
        rows = [(a.row(block, i * geom.Hk + head[:, None]) * a.block + slot).flatten() for i in range(L)]

        def call(i: int) -> bool:
            return bound.append(i, k, v, rows[i])

        def got(name: str) -> Tensor:
            return a.token_rows[name][rows[0]]

        moved = 2 * geom.Hk * T * geom.D * itemsize + T * held / a.block
    if not call(0):
        raise Absent("the kernels leave it to the reference")
    given = [x.cpu().reshape(1, geom.Hk, -1, geom.D) for x in (k, v)]
    for name, want in pages.codec.encode(0, *given).items():
        _accept_bytes(name, got(name).cpu(), want)
    yield {**_pages_facts(pages), "bytes": round(moved), **machine.time([lambda i=i: call(i) for i in range(L)])}


def mass(facts: dict, machine: Machine) -> Iterator[dict]:
    """Weights that each slot received from one row of each sequence: what a pruner sums up."""
    pages = Pages.of(facts, machine)
    bound, view = pages.bind(machine)
    q, out, lse = pages.queries(machine)
    bound.attend(0, view, q, out, lse)
    if not hasattr(bound, "mass"):
        raise Absent("no kernel")
    got = bound.mass(0, view, q, lse, pages.context)
    total = accept(got.sum(-1), torch.ones(got.shape[:-1], dtype=torch.float64), pages.dtype)
    keys = sum(r.bytes(pages.arrays.block) for n, r in pages.arrays.regions.items() if n.startswith("k"))
    moved = keys * pages.geom.Hk * pages.table.size + got.numel() * got.element_size()
    calls = [lambda i=i: bound.mass(i, view, q, lse, pages.context) for i in range(pages.geom.L)]
    yield {**_pages_facts(pages), "bytes": moved, "rel_error": total, **machine.time(calls)}


def copy(facts: dict, machine: Machine) -> Iterator[dict]:
    """Whole blocks from one place of the pool to another (copy-on-write, forks), and rows of tokens (compaction, which
    reads all before it writes: through a buffer). Bytes that must be read and written, the buffer not among them."""
    try:
        from kvlab.kernels.triton.move import copy_blocks, move_rows
    except ImportError as error:
        raise Absent(str(error)) from error
    pages = Pages.of(facts, machine)
    a = pages.arrays
    n = (a.n_blocks - 1) // 2
    ids = torch.randperm(a.n_blocks - 1, generator=torch.Generator().manual_seed(3)).add(1).to(machine.device)
    src, dst = ids[:n], ids[n : 2 * n]
    told = _pages_facts(pages) | {"blocks": n, "bytes": 2 * n * a.block_bytes}
    data = list(a.block_rows.values())
    place = torch.arange(a.layers * a.heads, device=machine.device)[:, None]
    read, written = (a.row(x, place).flatten() for x in (src, dst))

    def index() -> None:
        for t in data:
            t[written] = t[read]

    for side, move in ((told["side"], lambda: copy_blocks(data, read, written)), ("torch t[dst] = t[src]", index)):
        for t in data:
            t[written] = 0
        move()
        for t in data:
            assert torch.equal(t[written].view(torch.uint8), t[read].view(torch.uint8)), "a block is not its copy"
        yield told | {"side": side, **machine.time([move])}
    slots = torch.arange(a.block, device=machine.device)  # those of the first layer's first head move
    rows = [(x[: 1 + n // 8, None] * a.block + slots).flatten() for x in (src, dst)]
    moved = 2 * len(rows[0]) * sum(t.shape[1] * t.element_size() for t in a.token_rows.values())
    told |= {"what": "compaction of rows", "bytes": moved, "rows": len(rows[0])}
    yield told | machine.time([lambda: [move_rows(t, *rows) for t in a.token_rows.values()]])


def _pages_facts(pages: Pages) -> dict:
    return {
        "side": f"kvlab {pages.codec.label()}", "layers": pages.geom.L, "dtype": str(pages.dtype).split(".")[1],
        "block": pages.arrays.block, "bits_per_element": 8 * pages.bytes / _elements(pages),
    }  # fmt: skip


def _elements(pages: Pages) -> int:
    return 2 * pages.geom.Hk * pages.geom.D * pages.arrays.block * pages.table.size


def _programs(pages: Pages) -> int:
    """Programs of a launch: sequences x kv heads x splits."""
    from kvlab.kernels.triton.tiles import SPLIT

    return len(pages.table) * pages.geom.Hk * -(-pages.context // SPLIT)


def _accept_bytes(name: str, got: Tensor, want: Tensor) -> None:
    """Where a number is rounded, the last bit may differ: a sum in another order."""
    want = want.reshape(got.shape)
    if got.is_floating_point():
        same = torch.isclose(got.float(), want.to(got.dtype).float(), rtol=5e-3)
    else:
        same = got == want.to(got.dtype)
    if (part := float(same.double().mean())) < 0.99:
        raise ArithmeticError(f"wrong: {1 - part:.1%} of what was written to {name} is not what encode gives")
