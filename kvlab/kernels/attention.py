"""Attention partials: softmax(scale q.k) v over some keys, with the log-sum-exp that joins them to other keys.

A partial is `(out, lse)`: out float32 [N, Hk, R, D] normalised, lse float32 [N, Hk, R] natural log of the sum of
exp(logits). No visible key: out is zeros and lse is -inf. Joining two partials is exact, so splits, tails and sinks
are just partials. Query heads of a kv head are folded into the row axis (R = G * rows), so each K/V value is read
once for all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
Partial = tuple[Tensor, Tensor]


def partial(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, empty: Tensor | None) -> Partial:
    """q [N, Hk, R, D], k, v [N, Hk, n, D], mask 0/-inf in k's dtype, broadcastable to [N, Hk, R, n] or None.

    empty: bool broadcastable to [N, Hk, R], rows that see none of these keys. Their mask row must be all 0, and k, v
    must be finite everywhere (kernels/sanitize by the caller): what they compute is thrown away.
    """
    q = q.to(k.dtype)
    if q.device.type == "cpu":
        out, lse = _flash_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    else:
        logits = torch.matmul(q, k.transpose(-1, -2)).float() * scale
        if mask is not None:
            logits = logits + mask
        lse = torch.logsumexp(logits, -1)
        out = torch.matmul(torch.exp(logits - lse[..., None]).to(v.dtype), v)
    out = out.float()
    if empty is not None:
        lse = lse.masked_fill(empty, -torch.inf)
        out = out.masked_fill(empty[..., None], 0)
    return out, lse


def merge(a: Partial | None, b: Partial) -> Partial:
    """Join two partials over disjoint keys."""
    if a is None:
        return b
    # exp, log and division only: torch's sigmoid and logaddexp round the last elements of an array differently from the
    # others, so that a row's bits would depend on how many rows are joined
    top = torch.maximum(a[1], b[1]).clamp_min_(torch.finfo(torch.float32).min)  # finite where both are empty
    wa, wb = (a[1] - top).exp_(), (b[1] - top).exp_()
    total = wa + wb  # 0 where both are empty, else in [1, 2]
    share = wb.div_(total.clamp_min(1.0))
    return torch.lerp(a[0], b[0], share.unsqueeze(-1)), total.log_().add_(top)


def mass(q: Tensor, k: Tensor, scale: float, lse: Tensor, mask: Tensor | None, empty: Tensor | None, G: int) -> Tensor:
    """Attention weight each key received: sum over rows of exp(scale q.k - lse), float32 [N, Hk, G, n].

    q [N, Hk, G * rows, D], lse [N, Hk, G * rows] the JOINED one (pass two of two); rows with lse +inf give nothing.
    """
    N, Hk, R, _ = q.shape
    q, k = q.to(k.dtype).flatten(0, 1), k.flatten(0, 1).transpose(1, 2)
    if k.dtype == torch.float32:
        weights = torch.baddbmm(lse.flatten(0, 1).unsqueeze(-1), q, k, beta=-1, alpha=scale)
    else:
        weights = torch.bmm(q, k).float().mul_(scale).sub_(lse.flatten(0, 1).unsqueeze(-1))
    weights = weights.view(N, Hk, R, -1)
    if mask is not None:
        weights += mask
    weights.exp_()
    if empty is not None:
        weights.masked_fill_(empty[..., None], 0)
    return weights.view(N, Hk, G, R // G, -1).sum(-2)
