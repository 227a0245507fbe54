"""Toys that many tests share: a codec that stores the token itself, a pruner with known scores, a model of random
vectors.

`Echo` keeps (code, position) of every token as integers, so that a page can be read back and compared with a plain
list: one wrong block, slot, layer or head is a wrong integer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.layout import Geom, Region
from kvlab.cache.ledger import Ledger, live_blocks_bytes, measure
from kvlab.cache.paged import PagedCache, StepPages
from kvlab.cache.pages import Pages
from kvlab.codec import Codec, Page
from kvlab.compressor import Compressor
from kvlab.engine.engine import Engine, EngineCfg
from kvlab.engine.sequence import Sampling, Sequence
from kvlab.families.pruner import Pruner, Scoring

VOCAB = 499


def dirty(engine_or_cache, seed: int = 7):
    """Fill every page of a cache with random bytes and NaN, as memory that was used before."""
    cache = engine_or_cache if isinstance(engine_or_cache, PagedCache) else engine_or_cache.cache
    for i, t in enumerate(cache.classes):
        t.arrays.fill_garbage(seed + 2 * i)
        if t.tail is not None:
            t.tail_arrays.fill_garbage(seed + 2 * i + 1)
    return engine_or_cache


def code(token, layer: int, head: int):
    """A number that names token, layer and head; exact in float32."""
    return token * 64 + layer * 8 + head + 1


def echo_geom(L: int = 1, Hk: int = 1, windows: tuple = ()) -> Geom:
    return Geom(L=L, H=Hk, Hk=Hk, D=2, windows=windows)


class Echo(Codec):
    """k = v = (code, position). scope "block": the codes of a block are stored relative to its smallest one."""

    family = "quantizer"

    def __init__(self, scope: str = "token", residual: int = 0) -> None:
        self.scope, self.residual = scope, residual

    def regions(self, geom: Geom, block: int) -> tuple[Region, ...]:
        per_block = (Region("base", torch.int32, (), "block", "metadata"),) if self.scope == "block" else ()
        return (Region("tok", torch.int32, ()), Region("pos", torch.int32, ()), *per_block)

    def encode(self, layer: int, k: Tensor, v: Tensor) -> Page:
        assert torch.equal(k, v), "k and v came from different tokens"
        tok, pos = k[..., 0].to(torch.int32), k[..., 1].to(torch.int32)
        if self.scope == "token":
            return {"tok": tok, "pos": pos}
        assert k.shape[2] == self.block, "a block codec must get whole blocks"
        base = tok.amin(-1)
        return {"tok": tok - base[..., None], "pos": pos, "base": base}

    def decode(self, layer: int, page: Page) -> tuple[Tensor, Tensor]:
        tok = page["tok"]
        if self.scope == "block":
            tok = tok + page["base"].repeat_interleave(self.block, -1)
        x = torch.stack([tok, page["pos"]], -1).float()
        return x, x.clone()


def toy_score(code_, pos):
    """Small integers, many ties; numpy, torch or plain ints."""
    return (code_ * 31 + pos * 17) % 11


@dataclass
class Toy(Pruner):
    """Scores known from outside. Every slot carries its position (`mark`), which must travel with it."""

    when: str = "prefill_end"
    chunks: bool = False
    spread: str | None = None  # ragged: None, "layer" or "head"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.trigger, self.cut_chunks, self.ragged = self.when, self.chunks, self.spread

    def regions(self, geom: Geom) -> tuple[Region, ...]:
        return (Region("mark", torch.int32, (), role="metadata"),)

    def wrote(self, layer: int, p: Pages, k: Tensor, v: Tensor, pages: StepPages) -> None:
        arrays = p.t.arrays if p.t.tail is None else p.t.tail_arrays
        rows = p.write_rows(layer)
        marks = torch.from_numpy(p.step.positions).to(torch.int32).repeat(self.geom.Hk)
        arrays.token_rows["mark"].index_copy_(0, rows, marks[:, None])

    def score(self, s: Scoring) -> Tensor:
        return toy_score(s.k[..., 0], s.value("mark")).float()

    def sizes(self, C: int, groups: int) -> np.ndarray:
        """The budget of each group: C on average."""
        d = np.resize([1, -1], groups) * (0 if self.spread is None else min(2, C - 1))
        if groups % 2:
            d[-1] = 0
        return C + d

    def budgets(self, context: np.ndarray, n: np.ndarray, scores: Tensor) -> np.ndarray:
        return np.stack([self.sizes(int(C), n.shape[1]) for C in self.budget(context)])


def slow_keep(score: list, n: int, budget: int, sinks: int, recent: int) -> list[int]:
    """Which slots stay, by sorting: the definition."""
    protected = [i for i in range(n) if i < sinks or i >= n - recent]
    rest = sorted((i for i in range(n) if i not in protected), key=lambda i: (-score[i], i))
    first = sorted(protected, key=lambda i: (-score[i], i))
    return sorted((first + rest)[:budget])


def read_back(cache: PagedCache, layer: int, head: int, row: int) -> list[tuple[int, int]]:
    """(code, position) of every slot, walking the tables by hand: no tile, no gather."""
    t = cache.classes[cache.class_of[layer]]
    li, B = t.layer_index[layer], cache.plan.block
    g, (a, h) = int(t.group_of[li, head]), divmod(int(t.place[li, head]), t.heads_of_group)
    n, sealed = int(t.n_slots[row, g]), int(t.sealed[row, g])
    out = []
    for b in range(-(-n // B)):
        span = slice(0, min(B, n - b * B))
        if t.tail is None or b * B < sealed:
            data = {k: v[int(t.body[row, g, b]), a, h].numpy() for k, v in t.arrays.data.items()}
            base = data.get("base", 0)
            got = np.stack([data["tok"] + base, data["pos"]], -1)
        else:
            data = {k: v[int(t.tail[row, g, b]), a, h].numpy() for k, v in t.tail_arrays.data.items()}
            got = data["k"]
            assert (data["k"][span] == data["v"][span]).all()
        if "mark" in data:
            assert (data["mark"][span] == got[span, 1]).all(), "what a slot carries did not move with it"
        out.extend((int(c), int(p)) for c, p in got[span].tolist())
    return out


class RandomModel:
    """A forward function with H heads and random q, k, v that depend on (layer, token, position) alone. No weights.

    `scale` spreads the queries, so that attention is far from uniform. Logits: random too, from (token, position).
    """

    def __init__(self, seed: int = 0, vocab: int = VOCAB, max_len: int = 512, scale: float = 2.0) -> None:
        self.seed, self.vocab, self.scale = seed, vocab, scale
        self.layers: dict[int, Tensor] = {}
        self.seen: list[tuple[Tensor, Tensor]] = []

    def rows(self, kind: int, ids: Tensor, positions: Tensor, shape: tuple[int, ...]) -> Tensor:
        """[T, *shape]: the same numbers for the same token at the same position."""
        out = []
        for t, p in zip(ids.tolist(), positions.tolist()):
            gen = torch.Generator().manual_seed(((self.seed * 131 + kind) * 4099 + t) * 8209 + p)
            out.append(torch.randn(shape, generator=gen))
        return torch.stack(out)

    def qkv(self, layer: int, geom: Geom, ids: Tensor, positions: Tensor) -> list[Tensor]:
        """q [T, H, D], k, v [T, Hk, D]"""
        wide = self.rows(layer + 1, ids, positions, (geom.H + 2 * geom.Hk, geom.D))
        q, k, v = wide.split([geom.H, geom.Hk, geom.Hk], 1)
        return [(q * self.scale).to(geom.dtype), k.to(geom.dtype), v.to(geom.dtype)]

    def __call__(self, ids: Tensor, positions: Tensor, rows: Tensor, comp: Compressor, pages) -> Tensor:
        for layer in range(comp.geom.L):
            q, k, v = (x.transpose(0, 1)[None].contiguous() for x in self.qkv(layer, comp.geom, ids, positions))
            comp.write(layer, k, v, pages)
            out = comp.attend(layer, q, k, v, pages)
            assert torch.isfinite(out).all(), f"layer {layer}: junk reached an output"
            self.attended(layer, out[0], pages)
        if not len(rows):
            return torch.empty(0, self.vocab)
        return self.rows(0, ids[rows], positions[rows], (self.vocab,))

    def attended(self, layer: int, out: Tensor, pages) -> None:
        """Hook: out [T, H, D] of a layer."""


def engine(parts, geom: Geom, forward=None, clean: bool = False, **cfg) -> Engine:
    """An engine over dirty pages that checks itself after every step. parts: a codec, a pruner, or a list of both."""
    from kvlab.methods.composed import compose

    parts = parts if isinstance(parts, (list, tuple)) else [parts]
    made = parts[0] if isinstance(parts[0], Compressor) else compose(parts)
    out = Engine(forward or RandomModel(), made, geom, EngineCfg(**{"check": True, **cfg}))
    return out if clean else dirty(out)


def assert_pool_is_fresh(e: Engine) -> None:
    """Every block is back, every row is free, no counter is left."""
    e.cache.check({})
    for t in e.cache.classes:
        for pool in (t.pool, t.tail_pool):
            if pool is not None:
                assert pool.used == 0 and pool.available == pool.n_blocks - 1
                assert not any(pool.ref) and not any(pool.pin)
        for array in (t.body, t.tail, t.n_slots, t.sealed, t.evicted):
            assert array is None or not array.any()
    assert sorted(e.cache.free_rows) == list(range(e.cache.size.max_seqs))
    assert not e.scheduler.running and not e.scheduler.waiting


def assert_sums_to_the_pool(e: Engine) -> Ledger:
    """The shares of all sequences are the used blocks, and all blocks are the storages."""
    cache = e.cache
    used = sum(
        p.used * a.block_bytes
        for t in cache.classes
        for p, a in ((t.pool, t.arrays), (t.tail_pool, t.tail_arrays))
        if p is not None
    )
    live = [s.row for s in e.scheduler.running]
    whole, parts = measure(cache, live), [measure(cache, [r]) for r in live]
    for name in ("payload", "metadata", "residual", "fragmentation", "shared", "tables", "kept_slots"):
        assert abs(sum(getattr(p, name) for p in parts) - getattr(whole, name)) < 1e-6, name
    assert abs(whole.physical - whole.tables - used) < 1e-6
    storages = sum(
        x.untyped_storage().nbytes()
        for t in cache.classes
        for a in (t.arrays, t.tail_arrays)
        if a is not None
        for x in a.data.values()
    )
    assert sum(live_blocks_bytes(cache).values()) == storages == whole.reserved
    assert live_blocks_bytes(cache)["used"] == used
    return whole


class Quiet:
    """A forward function that only stores codes, and remembers what each step ran: [(sequence id, first, tokens)].

    `logits(token, position)` -> [VOCAB]; default: the next token is (7 token + 13 position + 5) mod VOCAB, for certain.
    """

    def __init__(self, logits=None) -> None:
        self.logits = logits or (lambda t, p: torch.nn.functional.one_hot(torch.tensor(next_token(t, p)), VOCAB) * 50.0)
        self.steps: list[list[tuple[int, int, int]]] = []
        self.engine: Engine | None = None

    def __call__(self, ids: Tensor, positions: Tensor, rows: Tensor, comp: Compressor, pages) -> Tensor:
        if self.engine is not None:
            step, by_row = pages.step, {s.row: s.id for s in self.engine.scheduler.running}
            who = [by_row[r] for r in step.cache_rows.tolist()]
            self.steps.append(list(zip(who, step.start.tolist(), step.q_len.tolist())))
        for layer in range(comp.geom.L):
            heads = [torch.stack([code(ids, layer, h), positions], -1) for h in range(comp.geom.Hk)]
            k = torch.stack(heads)[None].float()
            comp.write(layer, k, k.clone(), pages)
        out = [self.logits(int(ids[r]), int(positions[r])) for r in rows.tolist()]
        return torch.stack(out).float() if out else torch.empty(0, VOCAB)


def next_token(token: int, position: int) -> int:
    """What greedy decoding of `Quiet` gives."""
    return (token * 7 + position * 13 + 5) % VOCAB


def quiet(
    codec: Codec | None = None, pruner: Pruner | None = None, geom: Geom | None = None, logits=None, **cfg
) -> Engine:
    """An engine over dirty pages whose model is `Quiet` (e.forward)."""
    cfg = {"block": 4, "max_seqs": 4, "max_len": 128, "max_batch_tokens": 16, "chunk": 16, "tile": 16, **cfg}
    made = Compressor(codec or Echo(), pruner)
    forward = Quiet(logits)
    forward.engine = dirty(Engine(forward, made, geom or echo_geom(), EngineCfg(**{"check": True, **cfg})))
    return forward.engine


def with_blocks(body: int, tail: int = 0, **args) -> Engine:
    """`quiet` with exactly this many usable blocks in each pool."""
    e = quiet(**args)
    for t in e.cache.classes:
        t.allocate(body + 1, tail + 1 if t.tail is not None else 0)
    return dirty(e)


def greedy(tokens: list[int], new: int) -> list[int]:
    out = list(tokens)
    for _ in range(new):
        out.append(next_token(out[-1], len(out) - 1))
    return out[len(tokens) :]


def snapshot(e) -> list:
    """All books of the cache, as plain values."""
    out = [list(e.cache.free_rows)]
    for t in e.cache.classes:
        for pool in (t.pool, t.tail_pool):
            if pool is not None:
                out.append([list(pool.ref), list(pool.state), pool.walk("free"), pool.walk("lru")])
        out += [a.tolist() for a in (t.body, t.tail, t.n_slots, t.sealed, t.evicted) if a is not None]
    return out


def score(e: Engine, prompts: list[list[int]], new: int) -> tuple[list[Sequence], list[torch.Tensor]]:
    """Run a batch: its sequences, and the logits of every row of each, in order (a preempted sequence hands the
    same rows out again)."""
    rows: list[dict[int, torch.Tensor]] = [{} for _ in prompts]

    def keep(i):
        return lambda first, logits: rows[i].update({first + j: x for j, x in enumerate(logits.clone())})

    seqs = [e.add(p, Sampling(max_tokens=new), on_logits=keep(i)) for i, p in enumerate(prompts)]
    e.run()
    return seqs, [torch.stack([r[j] for j in range(len(r))]) for r in rows]
