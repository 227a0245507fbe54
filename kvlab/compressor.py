"""THE interface: what the runtime calls, and the standard Compressor made of a codec and, optionally, a pruner.

Three heights of entry, from least to most work:
  Pruner      write `score`: who stays              families/pruner.py
  Codec       write `encode` and `decode`           codec.py
  Compressor  override plan, write, attend, evict   here

One step of the runtime, per layer: `write` (exact post-RoPE k, v go to pages; complete blocks are sealed NOW), then
`attend` (reads pages through block tables only). Once after the forward pass, for the whole batch: `evict`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache.compact import compact
from kvlab.cache.layout import CachePlan, Geom, Group, kv_regions, window_groups
from kvlab.cache.packed import Packed
from kvlab.cache.paged import StepPages
from kvlab.cache.pages import Pages
from kvlab.cache.step import PREFILL_LAST, Bucket
from kvlab.cache.tiles import Tile
from kvlab.codec import Codec
from kvlab.errors import ConfigError
from kvlab.families.pruner import Evictable, Pruner
from kvlab.kernels import meta
from kvlab.kernels.attention import Partial, mass, merge, partial
from kvlab.kernels.backend import Backend
from kvlab.kernels.cpu.turn import Turn
from kvlab.kernels.format import exact


@dataclass(frozen=True)
class Caps:
    """What the runtime may do with a method.

    prefix_cacheable  stored bytes are a pure function of the prefix tokens: blocks may be shared across requests
    recompute_safe    dropping the cache and prefilling again gives the same cache: preemption is allowed
    hit_exact         a prefix hit gives what a cold run gives
    """

    prefix_cacheable: bool = True
    recompute_safe: bool = True
    hit_exact: bool = True


class Counters:
    """What a method really did in a run: the no-op guard reads it."""

    def __init__(self) -> None:
        self.encoded_blocks = 0
        self.evicted_slots = 0

    def acted(self) -> bool:
        return self.encoded_blocks > 0 or self.evicted_slots > 0


class Compressor:
    """A codec stores, a pruner (or none) decides who stays. Everything is batched over the sequences of a step."""

    def __init__(self, codec: Codec, pruner: Pruner | None = None) -> None:
        self.codec, self.pruner = codec, pruner
        self.counters = Counters()
        self.kernels: Backend | None = None  # None = the torch path
        self.fast = False  # products of fewer bits in decoding rows, where the kernels have them
        self.packed: Packed | None = None  # attention on packed pages, None = the torch path

    @property
    def caps(self) -> Caps:
        pure = self.pruner is None
        return Caps(prefix_cacheable=pure, recompute_safe=pure, hit_exact=pure and not self.codec.residual)

    @property
    def family(self) -> str:
        if self.pruner is None:
            return self.codec.family
        return "pruner" if self.codec.family == "full" else "pipeline"

    def label(self) -> str:
        if self.pruner is None:
            return self.codec.label()
        return self.pruner.label() if self.codec.family == "full" else f"{self.pruner.label()} + {self.codec.label()}"

    # -- plan ----------------------------------------------------------------------------------------------------
    def plan(self, geom: Geom, block: int) -> CachePlan:
        """Checks that the parts fit each other and the model, and lays out the cache. ConfigError says why not."""
        self.geom, self.block = geom, block
        self.codec.setup(geom, block)
        self.packed, fmt = None, self.codec.page_format()
        self.tail_dtype = self.codec.tail_dtype()
        tail = exact(self.tail_dtype, geom.D)
        if self.kernels is not None and fmt is not None and tail is not None:
            self.packed = Packed(self.kernels, self.label(), geom, fmt, tail, self.fast)
        regions = self.codec.regions(geom, block)
        self.names = tuple(r.name for r in regions)  # what a tile of encoded slots is made of
        has_tail = self.codec.scope == "block" or self.codec.residual > 0
        extra, state, stage = (), (), "none"
        groups = window_groups(geom, regions)
        if self.pruner is not None:
            self.pruner.setup(geom, block)
            if has_tail and self.pruner.trigger == "step":
                raise ConfigError(
                    f"{self.pruner.label()} evicts while decoding, but {self.codec.label()} seals blocks of {block} "
                    "tokens that share scales or keeps an exact window: survivors cannot move between them. Use a "
                    "codec that stores each token alone (int8, int4, fp8, turboquant), or a pruner that acts once "
                    "(snapkv)."
                )
            if has_tail and any(w is not None for w in geom.windows):
                raise ConfigError(
                    f"{self.pruner.label()} + {self.codec.label()}: {geom.model} has sliding-window layers, and a "
                    "staged prompt cannot drop blocks that left the window. Use a codec that stores each token alone."
                )
            extra = self.pruner.regions(geom)
            state, stage = self.pruner.state(geom), "prompt" if has_tail else "none"
            groups = self._pruned_groups(geom, regions, extra)
        tail = (*kv_regions(geom, self.tail_dtype), *extra) if has_tail else ()
        print_ = self.codec.fingerprint() + (self.pruner.fingerprint() if self.pruner else "")
        return CachePlan(geom, block, groups, tail, self.codec.residual, stage, state, print_)

    def _pruned_groups(self, geom: Geom, regions: tuple, extra: tuple) -> tuple[Group, ...]:
        """Full-attention layers get the pruner's groups and regions; sliding layers drop what they can't see."""
        full = [layer for layer, w in enumerate(geom.windows) if w is None]
        if not full:
            raise ConfigError(
                f"{self.pruner.label()}: every layer of {geom.model} has a sliding window, there is nothing to evict."
            )
        heads = tuple(range(geom.Hk))
        every = (*regions, *extra)
        if self.pruner.ragged == "layer":
            groups = [Group((layer,), heads, every) for layer in full]
        elif self.pruner.ragged == "head":
            groups = [Group((layer,), (h,), every) for layer in full for h in heads]
        else:
            groups = [Group(tuple(full), heads, every)]
        return (*groups, *(g for g in window_groups(geom, regions) if g.window is not None))

    def peak_slots(self, prompt: int, context: int, max_new: int, chunk: int) -> tuple[int, int]:
        """(body, tail) slots that one sequence may hold at once: what admission reserves. `context` tokens of the
        prompt are seen before a "prefill_end" pruner acts."""
        total = prompt + max_new
        has_tail = self.codec.scope == "block" or self.codec.residual > 0
        body = total if self.pruner is None else min(total, self.pruner.peak_slots(prompt, context, max_new, chunk))
        if not has_tail:
            return body, 0
        if self.pruner is not None:  # staged: the context is exact until cut, then what is kept until it is sealed
            waits = max(self.pruner.kept_slots(context), self.codec.residual + self.block - 1)
            return body, max(context, min(body, waits + max(1, min(chunk, prompt - context))))
        return total, min(total, self.codec.residual + self.block + chunk)

    def turn(self, pages: StepPages) -> Turn | None:
        """`write` and `attend` of all layers in one call of the kernels; None: both are called layer by layer."""
        if self.packed is None or not self.packed.backend.whole or not self.kernels_do(pages):
            return None
        return self.packed.turn(pages, encodes=self.codec.family != "full")

    def kernels_do(self, pages: StepPages) -> bool:
        """Whether kernels do everything between the model and its pages in this step: nothing of the method's own
        looks at a layer, and neither `write` nor `attend` was replaced."""
        if self.packed is None or type(self) is not Compressor or {"write", "attend"} & vars(self).keys():
            return False
        buckets, pruner = pages.step.buckets, self.pruner
        if pruner is not None and (type(pruner).wrote is not Pruner.wrote or any(map(pruner.watches, buckets))):
            return False
        return self.packed.all_of(pages)

    # -- inside a layer ------------------------------------------------------------------------------------------
    def write(self, layer: int, k: Tensor, v: Tensor, pages: StepPages) -> None:
        """k, v [1, Hk, T, D] exact, post-RoPE. Encodes them in place, or into the tail, and seals full blocks."""
        p = pages.layer(layer)
        has_tail = p.t.tail is not None
        if self.packed is None or not self.packed.append(layer, k, v, p):
            p.scatter(layer, self._exact(layer, k, v) if has_tail else self.codec.encode(layer, k, v))
        self.counters.encoded_blocks += not has_tail and self.codec.family != "full"
        if self.pruner is not None and p.t.window is None:
            self.pruner.wrote(layer, p, k, v, pages)  # before sealing: what a slot carries is sealed with it
        if p.t.tail is not None:
            self._seal(layer, p)

    def _exact(self, layer: int, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """k, v as the exact tail holds them."""
        return meta.stored(type(self.codec).__name__.lower(), layer, "window_dtype", self.tail_dtype, k=k, v=v)

    def _seal(self, layer: int, p: Pages) -> None:
        """Exact blocks older than the residual window become encoded ones, before anything attends."""
        rows = p.seal_rows(layer)
        if rows is None:
            return
        src, dst, real = rows
        tail, body = p.t.tail_arrays, p.t.arrays
        if real is None and self.packed is not None and self.packed.seal(layer, p, src, dst):
            self.counters.encoded_blocks += len(dst)
            return
        Hk, B, D = self.geom.Hk, self.block, self.geom.D
        k, v = (tail.block_rows[n].index_select(0, src).view(-1, Hk, B, D).to(self.geom.dtype) for n in ("k", "v"))
        values = self.codec.encode(layer, k, v)
        for name in tail.data:  # what a pruner keeps per slot moves along
            if name not in ("k", "v"):
                values[name] = tail.block_rows[name].index_select(0, src)
        for name, value in values.items():
            flat = body.block_rows[name]
            value = value.reshape(len(dst), flat.shape[1]).to(flat.dtype)
            flat.index_copy_(0, dst if real is None else dst[real], value if real is None else value[real])
        self.counters.encoded_blocks += len(dst)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pages: StepPages) -> Tensor:
        """q [1, H, T, D], k, v [1, Hk, T, D] of this step (exact). Returns [1, T, H, D]."""
        p = pages.layer(layer)
        G, H, D = self.geom.G, self.geom.H, self.geom.D
        rows_q = q[0].transpose(0, 1)  # [T, H, D]
        out = torch.empty((1, p.step.T, H, D), dtype=q.dtype, device=q.device)
        for bucket in p.step.buckets:
            watched = self.pruner is not None and p.t.window is None and self.pruner.watches(bucket)
            if not watched and self._packed(p, bucket) and self.kernels.takes(q.dtype):
                self.packed.attend_rows(layer, rows_q, out[0], p, bucket)
                continue
            n, r = len(bucket.members), bucket.rows
            folded = rows_q.index_select(0, bucket.take).view(n, r, H // G, G, D)
            folded = folded.permute(0, 2, 3, 1, 4).reshape(n, H // G, G * r, D)
            o, lse = self.attend_bucket(layer, folded, k, v, p, bucket)
            if watched:
                self.pruner.attended(layer, self, p, bucket, folded, lse, pages)
            o = o.view(n, H // G, G, r, D).permute(0, 3, 1, 2, 4).reshape(n * r, H, D)
            if bucket.keep is not None:
                o = o.index_select(0, bucket.keep)
            out[0].index_copy_(0, bucket.target, o.to(out.dtype))
        return out

    def attend_bucket(self, layer: int, q: Tensor, k: Tensor, v: Tensor, p: Pages, bucket: Bucket) -> Partial:
        """q [Nb, Hk, G*rows, D] -> (out, lse) over everything these rows may see."""
        if self._packed(p, bucket):
            return self.packed.attend(layer, q, p, bucket)
        joined: dict[bool, Partial | None] = {True: None, False: None}
        inner = self.codec.query(layer, q)
        for tile in p.tiles(bucket, layer):
            encoded = tile.source == "body"
            tk, tv = self.read(layer, p, tile, bucket, k, v)
            rows = self._rows(inner if encoded else q, tile, bucket)
            part = partial(rows, tk, tv, self.geom.scale, tile.mask, tile.empty)
            joined[encoded] = self._join(joined[encoded], part, tile, bucket)
        if joined[True] is None:
            return joined[False]
        body = (self.codec.output(layer, joined[True][0]), joined[True][1])
        return body if joined[False] is None else merge(body, joined[False])

    def _packed(self, p: Pages, bucket: Bucket) -> bool:
        return self.packed is not None and self.packed.reads(p, bucket)

    def _rows(self, q: Tensor, tile: Tile, bucket: Bucket) -> Tensor:
        """The rows of q [Nb, Hk, G*rows, W] that see something of the tile."""
        if tile.last - tile.first == bucket.rows:
            return q
        wide = q.view(*q.shape[:2], self.geom.G, bucket.rows, q.shape[-1])
        return wide[:, :, :, tile.first : tile.last].flatten(2, 3)

    def _join(self, all_: Partial | None, part: Partial, tile: Tile, bucket: Bucket) -> Partial:
        if tile.last - tile.first == bucket.rows:
            return merge(all_, part)
        N, Hk, _, W = part[0].shape
        G, R = self.geom.G, bucket.rows
        if all_ is None:
            all_ = part[0].new_zeros(N, Hk, G * R, W), part[1].new_full((N, Hk, G * R), -torch.inf)
        out, lse = all_[0].view(N, Hk, G, R, W), all_[1].view(N, Hk, G, R)
        span = slice(tile.first, tile.last)
        part = part[0].view(N, Hk, G, -1, W), part[1].view(N, Hk, G, -1)
        out[:, :, :, span], lse[..., span] = merge((out[:, :, :, span], lse[..., span]), part)
        return all_

    def read(self, layer: int, p: Pages, tile: Tile, bucket: Bucket, k: Tensor | None, v: Tensor | None):
        """Keys and values of a tile, [Nb, Hk, width, D]; body tiles in the codec's own basis. Junk slots are zero."""
        if tile.source == "chunk":
            return self._chunk(tile, bucket, k), self._chunk(tile, bucket, v)
        if tile.source == "body":
            tk, tv = self.codec.read(layer, p.gather(tile, layer, self.names), p.scratch)
        else:
            tk, tv = p.gather(tile, layer, ("k", "v")).values()
            if tk.dtype != self.geom.dtype:
                wide = (p.scratch.get(f"tail.{n}", tuple(tk.shape), self.geom.dtype) for n in "kv")
                tk, tv = (to.copy_(x) for to, x in zip(wide, (tk, tv)))
        if tile.junk is not None:
            for x in (tk, tv):
                x.view(-1, x.shape[-1]).index_fill_(0, tile.junk, 0)
        return tk, tv

    def _chunk(self, tile: Tile, bucket: Bucket, x: Tensor) -> Tensor:
        """This step's own k or v as a tile: [1, Hk, T, D] -> [Nb, Hk, width, D], zeros beyond the bucket's rows."""
        n = len(bucket.members)
        rows = (
            x[0]
            .index_select(1, bucket.take)
            .view(x.shape[1], n, bucket.rows, -1)[:, :, tile.start :][:, :, : tile.width]
        )
        out = torch.zeros((n, x.shape[1], tile.width, x.shape[-1]), dtype=x.dtype, device=x.device)
        out[:, :, : rows.shape[2]] = rows.transpose(0, 1)
        return out

    def received(self, layer: int, q: Tensor, lse: Tensor, p: Pages, bucket: Bucket) -> list[tuple[Tile, Tensor]]:
        """Attention weight that each slot got from these rows: [(tile, float32 [Nb, Hk, G, width])]. lse +inf =
        no vote.

        Slots are read as they are stored, those of this step too (also when the rows attended to them as they came)."""
        p = p.stored()
        if self._packed(p, bucket):
            return self.packed.received(layer, q, lse, p, bucket)
        inner = self.codec.query(layer, q)
        out = []
        for tile in p.tiles(bucket, layer):
            tk, _ = self.read(layer, p, tile, bucket, None, None)
            rows = self._rows(inner if tile.source == "body" else q, tile, bucket)
            seen = self._rows(lse.unsqueeze(-1), tile, bucket).squeeze(-1)
            w = mass(rows, tk, self.geom.scale, seen, tile.mask, tile.empty, self.geom.G)
            out.append((tile, w))
        return out

    # -- after the forward pass ----------------------------------------------------------------------------------
    def settle(self) -> None:
        """Raises NonFinite for a number that kernels could not store in this step; nothing else waits for them."""
        if self.packed is not None:
            self.packed.settle()

    def evict(self, pages: StepPages) -> None:
        """Let the pruner choose, then compact. The whole batch at once."""
        if self.pruner is None:
            return
        for p in pages.by_class:
            if p.t.window is not None:
                continue
            who = self.pruner.due(pages.step, p)
            if not len(who):
                continue
            keep, n_keep = self.pruner.select(Evictable(self, p, who, pages))
            before = p.t.n_slots[pages.step.cache_rows[who]]
            compact(p.t, pages.step.cache_rows[who], keep, n_keep)
            self.pruner.cut(self, p, pages.step.cache_rows[who], pages)
            self.counters.evicted_slots += int((before - n_keep).sum()) * p.t.places
        if self.pruner.trigger == "prefill_end":
            pages.cache.release_state(pages.step.cache_rows[pages.step.phase == PREFILL_LAST])
