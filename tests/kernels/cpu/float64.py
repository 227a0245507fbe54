"""Attention as it is meant, in float64, and how far float32 kernels may be from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.codec import Codec
from kvlab.kernels import packing
from kvlab.methods.turboquant import TurboQuant

if TYPE_CHECKING:
    from pages import Cache, Rows

# What a kernel may differ from float64 by, for queries, keys and values of unit variance (runtime.md 9.2): a logit is D
# float32 products times D**-0.5. Partial sums grow like sqrt(i) and each is rounded by at most 2**-24 of itself, so the
# logit is off by 2**-24 sqrt(D / 6) in the root mean square: 2.8e-7 at D = 128, seven sigma of it 2e-6 (a case has
# up to 10**6 logits). An lse or an output is a weighted mean of those; what its own sums add is smaller.
ATOL = 2e-6

# With operands of 16 bits (9.2: 2e-3). A number rounded to m bits is off by at most 2**-m of itself, and by 2**-m
# sqrt(0.54 / 3) in the root mean square (0.54: mean of 1 / mantissa**2, mantissas uniform in the logarithm): 2.1e-4 for
# float16. In a logit this happens to the query and to a table's entry (or to a query times a channel's scale), in an
# output to a weight and to an entry: four independent errors, together 4.1e-4, five sigma of which are the bound.
ATOL_16 = {torch.float16: 2e-3, torch.bfloat16: 8 * 2e-3}
RMS_16 = {torch.float16: 5e-4, torch.bfloat16: 8 * 5e-4}  # of all outputs together, relative to their own


def decode(codec: Codec, layer: int, page: dict[str, Tensor]) -> list[Tensor]:
    """`codec.decode` in float64: where it multiplies matrices, float32 would add errors of its own."""
    if not isinstance(codec, TurboQuant):
        return [x.double() for x in codec.decode(layer, page)]
    out, D = [], codec.geom.D
    for role, pi in zip("kv", codec.pi.double()):
        bits, z = codec.bits[role], 0.0
        if bits:
            z = codec.centroids[role].double()[packing.unpack(page[role], D, bits).long()]
        if codec.variant == "prod" and role == "k":
            signs = packing.unpack(page["k_sign"], D, 1).double() * 2 - 1
            z = z + codec.factor * page["k_gamma"].double()[..., None] * (
                signs @ codec.sketch.double()[_row(codec, layer)]
            )
        out.append(z * page[f"{role}_norm"].double()[..., None] @ pi[_row(codec, layer)])
    return out


def _row(codec: TurboQuant, layer: int) -> int:
    return 0 if codec.share == "all" else layer


def exact(cache: Cache, rows: Rows, q: Tensor, layer: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """float64 out [rows, H, D], lse [rows, H], and of each sequence the weights [rows, Hk, G, slots]."""
    out, lse, weights = [], [], []
    slot = torch.arange(cache.k.shape[3])
    for n, (first, count) in enumerate(zip(rows.first, rows.count)):
        K, V = cache.k[layer, n], cache.v[layer, n]
        lo, hi = (torch.from_numpy(x[n][cache.group_of[layer], :count]).T[:, :, None, None] for x in (rows.lo, rows.hi))
        seen = (slot >= lo) & (slot < hi)  # [rows, Hk, 1, slots]
        if cache.holes is not None:
            seen = seen & ~cache.holes[n]
        heads = q[first : first + count].unflatten(1, (cache.geom.Hk, cache.geom.G))
        logits = torch.einsum("rhgd,hsd->rhgs", heads, K) * cache.geom.scale
        logits = logits.masked_fill(~seen, -torch.inf)
        z = logits.logsumexp(-1)
        w = (logits - z[..., None]).exp().nan_to_num(0.0)
        out.append(torch.einsum("rhgs,hsd->rhgd", w, V).flatten(1, 2))
        lse.append(z.flatten(1, 2))
        weights.append(w)
    return torch.cat(out), torch.cat(lse), weights


def tolerance(cache: Cache, q: Tensor, layer: int = 0) -> float:
    """ATOL, scaled to how large these queries, keys and values are. A codec with a basis of its own multiplies by
    matrices twice more: three sums of D products instead of one."""
    size = [max(1.0, x.square().mean().sqrt().item()) for x in (q, cache.k[layer], cache.v[layer]) if x.numel()]
    if cache.operands != torch.float32:
        return ATOL_16[cache.operands] * math.prod(size)
    turned = cache.codec.page_format().turn is not None
    return ATOL * math.prod(size) * max(1.0, cache.geom.D / 128) ** 0.5 * (3**0.5 if turned else 1.0)


def fast_tolerance(cache: Cache, q: Tensor, weights: list[Tensor], layer: int = 0) -> tuple[Tensor, float]:
    """How far the fast arithmetic (kernels/cpu/fast.h) may be off: outputs [rows, H, 1], and an lse. Five standard
    deviations of independent errors, each uniform within a step (step / sqrt(12)), or of a weight that is rounded
    up or down (step / 2).

    A logit is D products over sqrt(D): a query's step is its largest channel / 127, a key table's its range / 127,
    and a codec's own basis may make channels larger (4.5 sigma) or, with scales per channel, steps differ. What all
    channels of a key (or all keys) have in common does not count, it goes with the zeros; nor does what all values
    have in common, weights keep their sum. An output is off by a logit's error times a value, by the step of a
    value's table (range / 254), and by the weights': of 32 tokens their sum / (32767 / top - 32), at least the
    largest / 254."""
    fmt, k, v = cache.codec.page_format(), cache.k[layer], cache.v[layer]
    k = k - k.mean(-2 if fmt.k[0].axis == "block" else -1, keepdim=True) if fmt.k[0].table is None else k
    parts = (q, k, v - v.mean(-2, keepdim=True))
    rms = [max(1.0, x.square().mean().sqrt().item()) for x in parts if x.numel()]
    range_of = lambda s: 0.0 if s.table is None else (s.table.max() - s.table.min()).item() * cache.geom.D**0.5  # noqa: E731
    tables = [max(map(range_of, fmt.k)), range_of(fmt.v)]  # in standard deviations of a coordinate
    largest = max(q.abs().max().item(), 4.5 * rms[0] if fmt.turn is not None else 0.0) if q.numel() else 0.0
    if fmt.k[0].axis == "block":
        largest *= 2.0  # a channel's scale is up to twice the typical one
    logit = (largest / 127 * rms[1]) ** 2 + (tables[0] / 127 * rms[0] * rms[1]) ** 2
    scale = max(1.0, v.square().mean().sqrt().item() / rms[-1]) if v.numel() else 1.0
    top = 2**fmt.v.bits - 1 if fmt.v.bits and not tables[1] else 127
    out = []
    for w in weights:
        w = torch.nn.functional.pad(w, (0, -w.shape[-1] % 32)).unflatten(-1, (-1, 32))
        step = torch.maximum(w.amax(-1) / 254, w.sum(-1) / (32767 // top - 32))
        out.append((step.square() * (w > 0).sum(-1)).sum(-1).flatten(1, 2) / 4)
    spread = torch.cat(out)[..., None] + (logit + (tables[1] / 254 * scale) ** 2) / 12
    return 5 * rms[-1] * spread.sqrt(), 5 * (logit / 12) ** 0.5


def assert_exact(
    cache: Cache, rows: Rows, q: Tensor, got: tuple[Tensor, Tensor], layer: int = 0, atol=None, far=1.0
) -> None:
    """Outputs and lse of every row; one that sees nothing is zeros and -inf. far: times the tolerance."""
    want, lse, weights = exact(cache, rows, q, layer)
    bounds = (atol or tolerance(cache, q, layer),) * 2
    if cache.fast and not atol:
        bounds = fast_tolerance(cache, q, weights, layer)
    none = lse == -torch.inf
    assert (got[0][none] == 0).all() and (got[1][none] == -torch.inf).all(), "a row that sees nothing"
    for name, x, y, bound in (("out", got[0], want, bounds[0]), ("lse", got[1], lse, bounds[1])):
        error = ((x.double() - y) / far / bound)[~none].abs().max().item() if not none.all() else 0.0
        assert error <= 1, f"{name} is off by {error:.2f} times what it may be"  # NaN fails too
