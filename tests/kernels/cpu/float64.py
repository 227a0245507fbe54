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
    if cache.fast:
        return fast_tolerance(cache, q, layer)
    if cache.operands != torch.float32:
        return ATOL_16[cache.operands] * math.prod(size)
    turned = cache.codec.page_format().turn is not None
    return ATOL * math.prod(size) * max(1.0, cache.geom.D / 128) ** 0.5 * (3**0.5 if turned else 1.0)


def fast_tolerance(cache: Cache, q: Tensor, layer: int = 0) -> float:
    """Five standard deviations of a logit's error, which is also what an output is off by in units of a value: a query
    is rounded to max|q| / 16383, a table's entry to its range / top (5.5 for unit normals), a weight to that of its
    split's largest, each by 1 / sqrt(12) of a step. A logit is a sum of D products over sqrt(D)."""
    top = min(16383, (2**31 - 1) // (16383 * cache.geom.D // 8), 8191)
    rms = [max(1.0, x.square().mean().sqrt().item()) for x in (q, cache.k[layer], cache.v[layer]) if x.numel()]
    largest = q.abs().max().item() if q.numel() else 0.0
    steps = largest / 16383 * math.prod(rms[1:]), 5.5 / top * math.prod(rms), 5.5 / top * rms[-1], 8 / 16383 * rms[-1]
    return 5 * sum(s**2 for s in steps) ** 0.5 / 12**0.5


def assert_exact(cache: Cache, rows: Rows, q: Tensor, got: tuple[Tensor, Tensor], layer: int = 0, atol=None) -> None:
    """Outputs and lse of every row; one that sees nothing is zeros and -inf."""
    (want, lse, _), atol = exact(cache, rows, q, layer), atol or tolerance(cache, q, layer)
    none = lse == -torch.inf
    assert (got[0][none] == 0).all() and (got[1][none] == -torch.inf).all(), "a row that sees nothing"
    for name, x, y in (("out", got[0], want), ("lse", got[1], lse)):
        error = (x.double() - y)[~none].abs().max().item() if not none.all() else 0.0
        assert error <= atol, f"{name} is off by {error:.2e} > {atol:.1e}"  # NaN fails too
