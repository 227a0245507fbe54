"""Pruners: who stays. A method writes `score`; budgets, protection, ties, compaction and freeing are the family's.

A pruner acts once when the context is complete (trigger "prefill_end") or whenever the budget is exceeded ("step").
Positions are never renumbered: keys stay rotated where they were, the next token's position is the number
of tokens SEEN.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from kvlab.cache.layout import Geom, Region
from kvlab.cache.paged import StepPages
from kvlab.cache.pages import Pages
from kvlab.cache.step import DECODE, PREFILL, PREFILL_LAST, Bucket, Step
from kvlab.cache.tables import Growth
from kvlab.cache.tiles import TileBuilder
from kvlab.errors import ConfigError
from kvlab.kernels.select import keep_top

if TYPE_CHECKING:
    from kvlab.compressor import Compressor


@dataclass
class Pruner:
    """Base class. Exactly one of `tokens` and `fraction` is the budget per (layer, kv head), protected slots included.

    tokens    C, slots kept           fraction  of the context length, rounded down
    sinks     first slots always kept            recent  newest slots always kept
    every     a decoding sequence is cut when it holds `every` slots more than C (1 = each step); the peak is C + every
    """

    tokens: int | None = None
    fraction: float | None = None
    sinks: int = 0
    recent: int = 0
    every: int = 1

    name: ClassVar[str] = ""  # the class's, in small letters
    trigger = "prefill_end"  # or "step"
    cut_chunks = False  # act at the end of every prefill chunk too (trigger "step")
    window = 0  # prompt queries to remember, for `Scoring.votes`
    ragged: ClassVar[Literal[None, "layer", "head"]] = None  # budgets differ per layer, or per (layer, head)
    mutable = False  # slots carry values that later steps change: a fork copies instead of sharing

    # -- to override ---------------------------------------------------------------------------------------------
    def score(self, s: Scoring) -> Tensor:
        """float32 [N, Hk, n], higher stays, for one layer. See `Scoring` for what there is to look at."""
        raise NotImplementedError(f"{type(self).__name__} must define score")

    def budgets(self, context: np.ndarray, n: np.ndarray, scores: Tensor) -> np.ndarray:
        """int64 [N, groups] slots to keep; context [N] tokens, n [N, groups] slots held, scores [Lc, N, Hk, slots].
        Their mean over groups may not exceed `budget`: that is what admission reserves."""
        return np.broadcast_to(self.budget(context)[:, None], n.shape)

    def regions(self, geom: Geom) -> tuple[Region, ...]:
        """What each slot carries beside its key and value."""
        return ()

    def wrote(self, layer: int, p: Pages, k: Tensor, v: Tensor, pages: StepPages) -> None:
        """New tokens k, v [1, Hk, T, D] were written: initialise what `regions` and `state` declared."""

    def cut(self, comp: Compressor, p: Pages, rows: np.ndarray, pages: StepPages) -> None:
        """These cache rows were just compacted: fix what depends on how many tokens are gone."""

    @property
    def title(self) -> str:
        """The method's name in labels and messages."""
        return self.name or type(self).__name__.lower()

    def label(self) -> str:
        return f"{self.title} {self.tokens if self.tokens is not None else format(self.fraction, 'g')}"

    # -- the family's part ---------------------------------------------------------------------------------------
    def __post_init__(self) -> None:
        name = self.title
        if (self.tokens is None) == (self.fraction is None):
            raise ConfigError(
                f"{name}: exactly one budget is needed, got tokens={self.tokens} and fraction={self.fraction}. "
                "Set method.tokens=N method.fraction=null, or method.fraction=X method.tokens=null."
            )
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ConfigError(
                f"{name}: fraction={self.fraction} must lie in (0, 1]: it is the part of the context kept"
            )
        protected = self.sinks + max(self.recent, self.window)
        if self.tokens is not None and protected > self.tokens:
            raise ConfigError(
                f"{name}: sinks {self.sinks} + window {max(self.recent, self.window)} = {protected} slots are always "
                f"kept, but the budget is tokens={self.tokens}. Raise method.tokens, or lower the window."
            )
        for option, least in (("every", 1), ("sinks", 0), ("recent", 0), ("window", 0)):
            if getattr(self, option) < least:
                raise ConfigError(f"{name}: {option}={getattr(self, option)} must be at least {least}")

    def setup(self, geom: Geom, block: int) -> None:
        self.geom, self.block = geom, block

    def fingerprint(self) -> str:
        opts = {f.name: getattr(self, f.name) for f in fields(self)}
        return f"{type(self).__name__}({','.join(f'{k}={v}' for k, v in sorted(opts.items()))})"

    def budget(self, context: np.ndarray) -> np.ndarray:
        """C for each context length, integer arithmetic, at least the protected slots and 1."""
        least = max(1, self.sinks + max(self.recent, self.window))
        if self.tokens is not None:
            return np.full(len(context), max(self.tokens, least), np.int64)
        return np.maximum(np.floor(context * self.fraction + 1e-9).astype(np.int64), least)

    def kept_slots(self, context: int) -> int:
        """Slots right after the cut. Ragged: the mean over groups, each of which rounds up to whole blocks."""
        return min(context, int(self.budget(np.array([context]))[0])) + (self.block - 1 if self.ragged else 0)

    def peak_slots(self, prompt: int, context: int, max_new: int, chunk: int) -> int:
        """Slots held at most, at any moment of any step: tokens come first and are cut after the step."""
        rest = prompt - context
        if self.trigger == "prefill_end":
            return max(context, self.kept_slots(context) + rest + max_new)
        C = int(self.budget(np.array([context]))[0]) + (self.block - 1 if self.ragged else 0)
        prefill = min(context, C + chunk) if self.cut_chunks else context
        return max(prefill, C + self.every, min(prompt, C + self.every - 1 + min(chunk, rest)))

    def state(self, geom: Geom) -> tuple[Region, ...]:
        """Per sequence and layer: the newest `window` queries of the context."""
        if not self.window:
            return ()
        return (Region("q_window", geom.dtype, (geom.H, self.window, geom.D), role="metadata"),)

    def watches(self, bucket: Bucket) -> bool:
        """Whether `attended` has something to do for these rows."""
        return self.window > 0 and bucket.prefill

    def attended(
        self, layer: int, comp: Compressor, p: Pages, bucket: Bucket, q: Tensor, lse: Tensor, pages: StepPages
    ) -> None:
        """After the attention of a bucket that it watches: q [Nb, Hk, G*rows, D], lse [Nb, Hk, G*rows]."""
        step, m, W = p.step, bucket.members, self.window
        at = np.arange(bucket.rows)[None]
        slot = step.start[m][:, None] + at - (step.context[m][:, None] - W)
        n, r = np.nonzero((at < step.q_len[m][:, None]) & (slot >= 0) & (slot < W))
        if not len(n):
            return
        Hk, G, D = self.geom.Hk, self.geom.G, self.geom.D
        rows = q.view(len(m), Hk * G, bucket.rows, D)
        store = pages.state("q_window")
        where = (step.tensor(step.cache_rows[m][n]), layer, slice(None), step.tensor(slot[n, r]))
        store[where] = rows[step.tensor(n), :, step.tensor(r)].to(store.dtype)

    def due(self, step: Step, p: Pages) -> np.ndarray:
        """Sequences of the step that must be cut now."""
        C = self.budget(step.context)
        n = p.t.n_slots[step.cache_rows].max(1)
        end = step.phase == PREFILL_LAST
        if self.trigger == "prefill_end":
            return np.nonzero(end & (n > C))[0]
        cut = (step.phase != DECODE) if self.cut_chunks else end
        return np.nonzero((cut & (n > C)) | ((step.phase == DECODE) & (n >= C + self.every)))[0]

    def select(self, ev: Evictable) -> tuple[Tensor, np.ndarray]:
        """(keep int64 [Lc, N, Hk, k] ascending, n_keep int64 [N, groups]) for every layer of the class."""
        t = ev.p.t
        scores = torch.stack([self.score(ev.scoring(layer)).float() for layer in t.layers])
        n = t.n_slots[ev.rows]
        n_keep = np.minimum(self.budgets(ev.context, n, scores), n)
        budget, held = (torch.from_numpy(x[:, t.group_of].transpose(1, 0, 2).copy()) for x in (n_keep, n))
        recent = max(self.recent, self.window)
        keep = keep_top(scores, held.to(scores.device), budget.to(scores.device), self.sinks, recent)
        return keep, n_keep


class Evictable:
    """The sequences that must be cut, as a small step of their own whose queries are the remembered window."""

    def __init__(self, comp: Compressor, p: Pages, who: np.ndarray, pages: StepPages) -> None:
        self.comp, self.pages, self.who = comp, pages, who
        old = p.step
        self.rows, self.context = old.cache_rows[who], old.context[who]
        n = p.t.n_slots[self.rows]
        rows = max(comp.pruner.window, 1)
        zero = np.zeros(len(who), np.int64)
        q_len = zero + rows
        self.step = Step(self.rows, q_len, zero, np.full(len(who), PREFILL, np.int8), self.context, old.device)
        sealed = p.t.sealed[self.rows]
        growth = Growth(n - rows, n, sealed, (sealed, sealed), (sealed, sealed), [])
        width = pages.cache.size.tile
        builder = TileBuilder(p.t, self.step, growth, width, False, comp.geom.G, comp.geom.dtype)
        self.p = Pages(p.t, self.step, growth, builder, p.scratch)
        (self.bucket,) = self.step.buckets
        self.width = width * -(-int(n.max()) // width)

    def scoring(self, layer: int) -> Scoring:
        return Scoring(self, layer)


class Scoring:
    """What a scorer may look at in one layer, for the N sequences that must be cut. Slots beyond `n` hold zeros.

    k, v          float32 [N, Hk, slots, D]  as decode gives them (post-RoPE)
    votes()       float32 [N, Hk, G, slots]  attention weight received from the remembered window queries, summed
    value(name)   [N, Hk, slots, *shape]     what the slots carry (Pruner.regions)
    n             int64 [N, Hk]              slots held
    context       int64 [N]                  tokens of the context
    """

    def __init__(self, ev: Evictable, layer: int) -> None:
        self.ev, self.layer = ev, layer
        self.n = torch.from_numpy(ev.p.t.n_slots[ev.rows][:, ev.p.t.group_of[ev.p.t.layer_index[layer]]])
        self.context = torch.from_numpy(ev.context)
        self._kv: tuple[Tensor, Tensor] | None = None

    @property
    def slots(self) -> int:
        return self.ev.width

    @property
    def k(self) -> Tensor:
        return self._decoded()[0]

    @property
    def v(self) -> Tensor:
        return self._decoded()[1]

    def zeros(self) -> Tensor:
        """A score that prefers nobody: [N, Hk, slots]."""
        return torch.zeros((*self.n.shape, self.slots), device=self.ev.step.device)

    def _decoded(self) -> tuple[Tensor, Tensor]:
        if self._kv is None:
            comp, p, (N, Hk) = self.ev.comp, self.ev.p, self.n.shape
            both = [torch.zeros((N, Hk, self.slots, comp.geom.D), device=self.ev.step.device) for _ in "kv"]
            for tile in p.tiles(self.ev.bucket, self.layer):
                if tile.source == "body":
                    kv = comp.codec.decode(self.layer, p.gather(tile, self.layer, comp.names))
                else:
                    kv = p.gather(tile, self.layer, ("k", "v")).values()
                for whole, part in zip(both, kv):
                    if tile.junk is not None:
                        part = part.reshape(-1, part.shape[-1]).index_fill(0, tile.junk, 0).view(part.shape)
                    whole[:, :, tile.start : tile.start + tile.width] = part
            self._kv = tuple(both)
        return self._kv

    def value(self, name: str) -> Tensor:
        p, out = self.ev.p, None
        for tile in p.tiles(self.ev.bucket, self.layer):
            part = p.gather(tile, self.layer, [name])[name]
            if out is None:  # as wide as every layer's: one with fewer slots has fewer tiles
                out = part.new_zeros(*part.shape[:2], self.slots, *part.shape[3:])
            out[:, :, tile.start : tile.start + tile.width] = part
        return out

    def votes(self) -> Tensor:
        comp, p, bucket = self.ev.comp, self.ev.p, self.ev.bucket
        g, W = comp.geom, comp.pruner.window
        q = self.ev.pages.state("q_window")[torch.from_numpy(self.ev.rows).to(self.ev.step.device), self.layer]
        folded = torch.zeros((*self.n.shape, g.G, bucket.rows, g.D), dtype=q.dtype, device=q.device)
        folded[..., :W, :] = q.view(-1, g.Hk, g.G, W, g.D)
        folded = folded.flatten(2, 3)
        _, lse = comp.attend_bucket(self.layer, folded, None, None, p, bucket)
        lse = lse.view(*self.n.shape, g.G, bucket.rows).index_fill(
            3, torch.arange(W, bucket.rows, device=q.device), torch.inf
        )
        parts = comp.received(self.layer, folded, lse.flatten(2), p, bucket)
        out = torch.zeros((*self.n.shape, g.G, self.slots), device=q.device)
        for tile, w in parts:
            out[..., tile.start : tile.start + tile.width] = w
        return out
