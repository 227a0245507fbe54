"""Top-k with rules: protection is a mask, ties go to the lower slot, results are ascending."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_top(score: Tensor, n: Tensor, budget: Tensor, sinks: int, recent: int) -> Tensor:
    """Slots to keep, ascending: int64 [..., k] with k = max(budget); entries from `budget` on are meaningless.

    score   float32 [..., slots]  higher stays; slots >= n are ignored whatever they hold
    n       int64 [...]           slots held
    budget  int64 [...]           how many to keep, <= n
    sinks   first slots that always stay     recent  newest slots that always stay

    The protected come first, then the best of the rest: a stable descending sort, so equal scores keep the lower slot.
    Protection never touches the scores: a sentinel would tie with a large score.
    """
    at = torch.arange(score.shape[-1], device=score.device)
    valid = at < n[..., None]
    protected = valid & ((at < sinks) | (at >= n[..., None] - recent))
    by_score = torch.where(valid, score, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank_class = torch.where(protected, 0, torch.where(valid, 1, 2)).to(torch.int8).expand_as(score)
    order = rank_class.gather(-1, by_score).argsort(dim=-1, stable=True)
    k = int(budget.max()) if budget.numel() else 0
    best = by_score.gather(-1, order)[..., :k]
    taken = torch.arange(k, device=score.device) < budget[..., None]
    return torch.where(taken, best, score.shape[-1]).sort(dim=-1).values
