"""The whole runtime against plain lists: random adds, forks, steps, aborts, failures, preemptions and evictions.

The model is a function that writes (token, position) into every page and looks at what its rows may read; no weights.
After every step each live sequence is read back through its block tables and must hold exactly its retained tokens, in
order (I14); the books must balance (I1-I9, I13), and at the end every block is back.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import currently_in_test_context as in_hypothesis
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from toys import (
    VOCAB,
    Echo,
    Toy,
    assert_pool_is_fresh,
    assert_sums_to_the_pool,
    code,
    dirty,
    echo_geom,
    next_token,
    read_back,
    slow_keep,
    toy_score,
)

from kvlab.cache.pool import OPEN
from kvlab.compressor import Compressor
from kvlab.engine.engine import Engine, EngineCfg
from kvlab.engine.sequence import Sampling, Sequence, Status
from kvlab.errors import CacheTooSmall, ConfigError

Pair = tuple[int, int]  # (layer, head)
STEPS: Counter[str] = Counter()  # what the walks have met


EVENTS = (
    "preempted", "forked", "failed", "refused", "aborted", "sealed", "dropped", "shared", "ragged tables",
    "evicted: prefill_end", "evicted: step", "evicted: ragged None", "evicted: ragged layer", "evicted: ragged head",
    "evicted: staged prompt", "evicted: shared blocks",
)  # fmt: skip


class Boom(RuntimeError):
    pass


@dataclass
class Held:
    """What one live sequence must hold: per (layer, head) its (code, position) in order."""

    slots: dict[Pair, list[tuple[int, int]]]


class Model:
    """The forward function and the reference model in one."""

    def __init__(self, plan, pruner: Toy | None, exact: bool) -> None:
        self.geom, self.plan, self.pruner, self.exact = plan.geom, plan, pruner, exact
        self.pairs = [(layer, h) for layer in range(self.geom.L) for h in range(self.geom.Hk)]
        self.held: dict[int, Held] = {}  # by id of the sequence
        self.fail_at: int | None = None
        self.last: list[tuple[int, int, int, int]] = []  # (id, start, tokens, context) of the last step
        self.new: list[list[int]] = []

    # -- the model's forward -------------------------------------------------------------------------------------
    def __call__(self, ids, positions, rows, comp: Compressor, pages) -> torch.Tensor:
        step, running = pages.step, {s.row: s for s in self.engine.scheduler.running}
        seqs = [running[row] for row in step.cache_rows.tolist()]
        self.last = list(zip([s.id for s in seqs], step.start.tolist(), step.q_len.tolist(), step.context.tolist()))
        self.new = [ids[a:b].tolist() for a, b in zip(step.cu, step.cu[1:])]
        assert positions.tolist() == [
            s + i for _, s, n, _ in self.last for i in range(n)
        ]  # tokens SEEN, never renumbered
        self.shared = any(
            r > 1
            for t in self.engine.cache.classes
            for r in (*t.pool.ref, *(t.tail_pool.ref if t.tail is not None else ()))
        )
        for seq in seqs:  # what admission reserved is never exceeded, also at the fullest moment of a step
            for t, peak in zip(self.engine.cache.classes, seq.peak):
                held = [len(x) for x in t.blocks(seq.row)]
                assert held[0] <= peak[0] and held[1] <= peak[1], f"{seq} holds {held} blocks, its peak is {peak}"
        for layer in range(self.geom.L):
            if self.fail_at == layer:
                raise Boom(f"layer {layer}")
            k = torch.stack(
                [torch.stack([code(ids, layer, h), positions], -1) for h in range(self.geom.Hk)]
            )[None].float()  # fmt: skip
            q = torch.zeros(1, self.geom.H, len(ids), 2)
            comp.write(layer, k, k.clone(), pages)
            self.check_writes(layer, pages)
            out = comp.attend(layer, q, k, k.clone(), pages)
            self.check_reads(layer, pages, k, out[0])
        flat = torch.zeros(len(rows), VOCAB)
        for i, r in enumerate(rows.tolist()):
            flat[i, next_token(int(ids[r]), int(positions[r]))] = 1.0
        return flat

    def check_writes(self, layer: int, pages) -> None:
        """I6, I8: distinct slots, in OPEN blocks that one sequence owns."""
        p = pages.layer(layer)
        rows = p.write_rows(layer)
        assert len(rows.unique()) == len(rows)
        t = p.t
        pool, arrays = (t.pool, t.arrays) if t.tail is None else (t.tail_pool, t.tail_arrays)
        blocks = arrays.block_of(rows // t.block).unique().tolist()
        assert all(pool.ref[b] == 1 and pool.state[b] == OPEN for b in blocks), "a shared block was written"

    def check_reads(self, layer: int, pages, k: torch.Tensor, out: torch.Tensor) -> None:
        """Each row sees exactly its own past, encoded as far as the plan says; uniform attention gives its mean."""
        p, window = pages.layer(layer), self.geom.windows[layer]
        comp = self.engine.compressor
        for bucket in p.step.buckets:
            Nb, Hk, R = len(bucket.members), self.geom.Hk, bucket.rows
            seen = [[[] for _ in range(Hk)] for _ in range(Nb)]  # (source, mask [rows, width], values [width, 2])
            for tile in p.tiles(bucket, layer):
                tk, _ = comp.read(layer, p, tile, bucket, k, k)
                values = tk.numpy().copy()
                assert np.isfinite(values).all(), "junk in a tile"
                part = (Nb, 1, tile.last - tile.first, tile.width)  # the rows that the tile is for
                some = np.ones(part, bool) if tile.mask is None else (tile.mask == 0).numpy()
                if tile.empty is not None:
                    some = some & ~tile.empty.numpy()[..., None]
                ok = np.zeros((Nb, some.shape[1], R, tile.width), bool)
                ok[:, :, tile.first : tile.last] = some
                for n in range(Nb):
                    for h in range(Hk):
                        seen[n][h].append((tile.source, ok[n, h if ok.shape[1] > 1 else 0], values[n, h]))
            for n, m in enumerate(bucket.members.tolist()):
                row, start, count, _ = self.last[m]
                for h in range(Hk):
                    old = self.held[row].slots[layer, h] if row in self.held else []
                    mine = [(code(t, layer, h), start + i) for i, t in enumerate(self.new[m])]
                    whole = [*old, *mine]
                    for r in range(count):
                        at = len(old) + r  # slot of the row itself
                        first = 0 if window is None else max(at + 1 - window, 0)
                        want = whole[first : at + 1]
                        got, encoded = [], 0
                        for source, ok, values in seen[n][h]:
                            part = values[ok[r]].astype(np.int64).tolist()
                            got += [tuple(x) for x in part]
                            encoded += len(part) if source == "body" else 0
                        assert got == want, f"layer {layer} head {h} row {row}+{r} reads {got}, must read {want}"
                        if self.pruner is None and window is None:
                            assert encoded == self.encoded(start, start + r, bucket.prefill)
                        mean = np.mean(np.array(want, np.float64), 0)
                        # a uniform softmax over n values: n roundings of the sum and a few of the weights
                        error = np.abs(out[p.step.cu[m] + r, h].numpy() - mean).max()
                        assert error <= 2**-23 * (len(want) + 8) * np.abs(mean).max() + 1e-6

    def encoded(self, start: int, t: int, prefill: bool) -> int:
        """How many keys row t of a step that begins at `start` reads decoded (runtime.md 4, tail boundary)."""
        B, R = self.plan.block, self.plan.residual
        if not self.plan.tail:
            return start if self.exact and prefill else t + 1
        return B * (max((start if self.exact else t + 1) - R, 0) // B)

    # -- what must be held afterwards ----------------------------------------------------------------------------
    def commit(self) -> None:
        """A step went through: its tokens are held, then windows and the pruner take away."""
        for (id_, start, n, context), new in zip(self.last, self.new):
            held = self.held.setdefault(id_, Held({p: [] for p in self.pairs}))
            for layer, h in self.pairs:
                held.slots[layer, h] += [(code(t, layer, h), start + i) for i, t in enumerate(new)]
            self.evict(held, start, n, context)
        self.last = []

    def drop_window(self, held: list, window: int) -> list:
        """Slots in whole blocks that the next query cannot see, and that are encoded."""
        B = self.plan.block
        first = held[0][1]  # slots of a sliding layer are contiguous, and blocks are aligned
        sealed = len(held) if not self.plan.tail else B * max(0, (len(held) + first - self.plan.residual) // B) - first
        k = min(max(len(held) - window + 1, 0) // B, max(sealed, 0) // B)
        STEPS["dropped"] += k
        return held[k * B :]

    def evict(self, held: Held, start: int, n: int, context: int) -> None:
        for layer, h in self.pairs:
            if self.geom.windows[layer] is not None:
                held.slots[layer, h] = self.drop_window(held.slots[layer, h], self.geom.windows[layer])
        if self.pruner is None:
            return
        full = [p for p in self.pairs if self.geom.windows[p[0]] is None]
        pr, C = self.pruner, int(self.pruner.budget(np.array([context]))[0])
        longest = max(len(held.slots[p]) for p in full)
        decoding, ends = start >= context, start < context <= start + n
        due = ends and longest > C
        if pr.when == "step":
            due = due or (decoding and longest >= C + pr.every)
            due = due or (pr.chunks and not decoding and longest > C)
        if not due:
            return
        STEPS[f"evicted: {pr.when}"] += 1
        STEPS[f"evicted: ragged {pr.spread}"] += 1
        STEPS["evicted: staged prompt"] += bool(self.plan.tail)
        STEPS["evicted: shared blocks"] += self.shared
        layers = sorted({layer for layer, _ in full})
        groups = {None: 1, "layer": len(layers), "head": len(full)}[pr.spread]
        sizes = pr.sizes(C, groups)
        for i, p in enumerate(full):
            g = {None: 0, "layer": layers.index(p[0]), "head": i}[pr.spread]
            now = held.slots[p]
            score = [toy_score(c, pos) for c, pos in now]
            stay = slow_keep(score, len(now), min(int(sizes[g]), len(now)), pr.sinks, pr.recent)
            held.slots[p] = [now[j] for j in stay]


def setup(r: random.Random):
    """(geom, codec, pruner, EngineCfg without a pool bound); what the plan refuses is not drawn.

    Drawn by `random`, from a seed that hypothesis gives: its own draws keep coming back to the first choices.
    """
    L, Hk = r.choice([(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)])
    windows = tuple(r.choice([None, None, 5, 9]) for _ in range(L))
    block = r.choice([2, 4])
    scope, residual = r.choice([("token", 0), ("token", 0), ("token", 3), ("block", 0), ("block", 5)])
    pruner = None
    if r.random() < 0.6 and None in windows:
        has_tail = scope == "block" or residual > 0
        if has_tail:
            windows = (None,) * L
        when = "prefill_end" if has_tail else r.choice(["prefill_end", "step"])
        size = r.choice([{"tokens": 6}, {"tokens": 11}, {"fraction": 0.5}])
        sinks, recent = r.choice([(0, 0), (1, 2), (2, 0)])
        pruner = Toy(
            **size, sinks=sinks, recent=recent, when=when, chunks=when == "step" and r.random() < 0.5,
            every=r.choice([1, 3]), spread=r.choice([None, "layer", "head"]),
        )  # fmt: skip
    cfg = {
        "block": block, "max_seqs": 4, "max_len": 40, "max_batch_tokens": r.choice([4, 9, 24]),
        "chunk": r.choice([1, 4, 7, 24]), "tile": block * r.choice([1, 2, 8]),
        "prefill_reads": r.choice(["encoded", "exact"]),
    }  # fmt: skip
    return echo_geom(L, Hk, windows), Echo(scope, residual), pruner, cfg


SEED = st.integers(0, 2**40)


class Runtime(RuleBasedStateMachine):
    @initialize(seed=SEED)
    def build(self, seed):
        r = random.Random(seed)
        geom, codec, pruner, cfg = setup(r)
        comp = Compressor(codec, pruner)
        plan = comp.plan(geom, cfg["block"])
        self.model = Model(plan, pruner, cfg["prefill_reads"] == "exact")
        pool_bytes = None
        if r.random() < 0.75:  # about one or two sequences of some length: others wait, are preempted or refused
            tails = [len(g.layers) * len(g.heads) * sum(r.bytes(plan.block) for r in plan.tail) for g in plan.groups]
            each = sum(g.block_bytes(plan.block) for g in plan.groups) + sum(tails)
            pool_bytes = max(int(r.choice([1.0, 1.3, 2.0]) * -(-r.randint(8, 40) // plan.block) * each), 2 * each)
        self.engine = self.model.engine = dirty(Engine(self.model, comp, geom, EngineCfg(**cfg, pool_bytes=pool_bytes)))
        self.all: list[Sequence] = []
        self.note(f"{geom=} {codec.scope=} {codec.residual=} {pruner=} {cfg=} {pool_bytes=}")

    def note(self, text: str) -> None:
        if in_hypothesis():
            note(text)

    # -- rules ---------------------------------------------------------------------------------------------------
    @rule(seed=SEED, count=st.integers(1, 3))
    def add(self, seed, count):
        r = random.Random(seed)
        for _ in range(count):
            self.add_one(r)

    def add_one(self, r: random.Random) -> None:
        serial, length, n = len(self.all) + 1, r.randint(1, 24), r.choice([1, 1, 1, 2, 3])
        tokens = [(serial * 37 + i * 11) % VOCAB for i in range(length)]
        context, options = r.choice([length, length, max(length // 2, 1)]), {"chunk_after": r.choice([None, None, 3])}
        sampling = Sampling(max_tokens=r.randint(0, 15), n=n)
        if n > 1:  # samples go apart, and some end early
            ends = tuple(range(0, VOCAB, 15))
            sampling = replace(sampling, temperature=1.0, seed=serial, stop_tokens=ends)
        elif r.random() < 0.5:
            options["on_logits"] = lambda first, logits: self.scored(seq, first, logits)
        self.note(f"{length=} {context=} {options=} {sampling=}")
        waiting = list(self.engine.scheduler.waiting)
        try:
            seq = self.engine.add(tokens, sampling, context=context, **options)
        except CacheTooSmall as e:
            STEPS["refused"] += 1
            assert "bytes" in str(e)
            assert list(self.engine.scheduler.waiting) == waiting
            return
        self.all.append(seq)

    def scored(self, seq: Sequence, first: int, logits: torch.Tensor) -> None:
        want = [next_token(t, first + i) for i, t in enumerate(seq.tokens[first : first + len(logits)])]
        assert len(logits) and logits.argmax(-1).tolist() == want

    @rule(times=st.integers(1, 5))
    def step(self, times):
        for _ in range(times):
            self.one_step()

    @precondition(lambda self: self.engine.busy)
    @rule(layer=st.integers(0, 2))
    def fail(self, layer):
        """An exception in the model ends the sequences of that step and nobody else."""
        self.model.fail_at = layer % self.model.geom.L
        try:
            self.engine.step()
        except Boom:
            STEPS["failed"] += 1
            assert all(s.finish_reason == "error" for s in self.all if s.id in {x[0] for x in self.model.last})
        self.model.fail_at, self.model.last = None, []
        self.verify()

    @precondition(lambda self: self.all)
    @rule(which=st.integers(0, 50))
    def abort(self, which):
        live = [s for s in self.all if s.status is not Status.FINISHED] or self.all
        seq = live[which % len(live)]
        STEPS["aborted"] += seq.status is not Status.FINISHED
        self.engine.abort(seq)
        self.verify()

    # -- one step ------------------------------------------------------------------------------------------------
    def one_step(self) -> None:
        engine, model = self.engine, self.model
        known, preempted = {s.id for s in self.all}, engine.scheduler.preemptions
        engine.step()
        STEPS["engine"] += 1
        STEPS["preempted"] += engine.scheduler.preemptions - preempted
        model.commit()
        for seq in engine.scheduler.running:
            if seq.id not in known:  # forked in this step: holds what its parent holds
                STEPS["forked"] += 1
                self.all.append(seq)
                model.held[seq.id] = Held({p: list(x) for p, x in model.held[seq.parent].slots.items()})
        self.verify()

    def verify(self) -> None:
        scheduler, cache = self.engine.scheduler, self.engine.cache
        running = {s.id: s for s in scheduler.running}
        self.model.held = {i: h for i, h in self.model.held.items() if i in running}
        cache.check({s.row: s.computed for s in running.values()})
        assert sorted([*cache.free_rows, *(s.row for s in running.values())]) == list(range(cache.size.max_seqs))
        assert [s.arrival for s in scheduler.running] == sorted(s.arrival for s in scheduler.running), "oldest first"
        assert_sums_to_the_pool(self.engine)
        for seq in scheduler.waiting:
            assert (seq.row, seq.computed, seq.status) == (-1, 0, Status.WAITING)
        for seq in running.values():
            assert seq.status is Status.RUNNING
            if seq.computed:
                for (layer, h), want in self.model.held[seq.id].slots.items():
                    got = read_back(cache, layer, h, seq.row)
                    assert got == want, f"layer {layer} head {h}: holds {got}, must hold {want}"
        for t in cache.classes:
            STEPS["sealed"] += int((t.sealed > 0).any()) if t.tail is not None else 0
            STEPS["shared"] += any(r > 1 for r in t.pool.ref)
            STEPS["ragged tables"] += (
                len(t.groups) > 1 and len(set(t.n_slots[list({s.row for s in running.values()})[:1]].ravel())) > 1
            )

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.busy:
                break
            self.one_step()
        assert not self.engine.busy, "the scheduler makes no progress"
        STEPS["walks"] += 1
        assert_pool_is_fresh(self.engine)
        for seq in self.all:
            assert seq.status is Status.FINISHED
            if seq.finish_reason in ("abort", "error") or seq.sampling.n > 1:
                continue
            assert seq.finish_reason == "length" and len(seq.output) == seq.sampling.max_tokens
            for i in range(seq.prompt, len(seq.tokens)):
                assert seq.tokens[i] == next_token(seq.tokens[i - 1], i - 1)


class TestRuntime(Runtime.TestCase):
    """Hypothesis drives, and shrinks what it finds."""

    settings = settings(max_examples=40, stateful_step_count=12)


def walk(seed: int, rules: int) -> None:
    """The same machine driven by `random`: every plan comes as often as any other. The seed is the whole story."""
    r = random.Random(seed)
    machine = Runtime()
    machine.build(seed)
    for _ in range(rules):
        kind = r.choice(["add", "step", "step", "step", "step", "fail", "abort"])
        if kind == "add":
            machine.add(r.randrange(2**40), r.randint(1, 3))
        elif kind == "step":
            machine.step(r.randint(1, 5))
        elif kind == "fail" and machine.engine.busy and r.random() < 0.3:
            machine.fail(r.randrange(3))
        elif kind == "abort" and machine.all:
            machine.abort(r.randrange(50))
    machine.teardown()


def walks(seeds: range, rules: int) -> None:
    for seed in seeds:
        try:
            walk(seed, rules)
        except BaseException as e:
            e.add_note(f"walk({seed=}, {rules=})")
            raise


def test_random_walks_hold_exactly_the_retained_tokens_after_every_step_and_go_everywhere():
    """A walk that never preempts proves nothing about preemption, so the events are counted too."""
    STEPS.clear()
    walks(range(110), rules=16)
    assert STEPS["engine"] >= 2000, STEPS
    rare = {k: STEPS[k] for k in EVENTS if STEPS[k] < 10}
    assert not rare, f"hardly met: {rare}"


@pytest.mark.slow
class TestRuntimeForLong(Runtime.TestCase):
    settings = settings(max_examples=400, stateful_step_count=30, derandomize=False)


@pytest.mark.slow
def test_long_random_walks_hold_exactly_the_retained_tokens_after_every_step():
    start = random.randrange(2**30)  # other walks every time; a failure names its seed
    walks(range(start, start + 1500), rules=40)


def test_a_plan_that_cannot_work_is_refused_before_anything_is_built():
    for codec in (Echo("block"), Echo("token", residual=3)):
        with pytest.raises(ConfigError, match="evicts while decoding"):
            Compressor(codec, Toy(tokens=6, when="step")).plan(echo_geom(), 4)
        with pytest.raises(ConfigError, match="sliding"):
            Compressor(codec, Toy(tokens=6)).plan(echo_geom(L=2, windows=(None, 5)), 4)
    with pytest.raises(ConfigError, match="nothing to evict"):
        Compressor(Echo(), Toy(tokens=6)).plan(echo_geom(L=2, windows=(9, 5)), 4)
