"""Next tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.engine.sequence import Sequence


def sample(logits: Tensor, seqs: list[Sequence]) -> list[int]:
    """logits float [k, vocab], one row a sequence. Greedy rows are one argmax; others draw from their own generator."""
    best = _largest(logits)
    return [b if s.sampling.temperature == 0 else _draw(logits[i], s) for i, (b, s) in enumerate(zip(best, seqs))]


def _largest(logits: Tensor) -> list[int]:
    """The first of the largest of each row. On a CPU numpy finds it in a tenth of torch's time."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return logits.numpy().argmax(-1).tolist()
    return logits.argmax(-1).tolist()


def _draw(logits: Tensor, seq: Sequence) -> int:
    p = seq.sampling
    if seq.generator is None:
        seq.generator = torch.Generator().manual_seed(p.seed + seq.index)
    probs = distribution(logits, p.temperature, p.top_k, p.top_p)
    return int(torch.multinomial(probs.cpu(), 1, generator=seq.generator))


def distribution(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Probabilities float32 [vocab]: temperature, then the top_k best, then the smallest set with mass >= top_p."""
    x = logits.float() / temperature
    if top_k and top_k < len(x):
        outside = x.argsort(descending=True, stable=True)[top_k:]  # among equals the lower ids stay, as in greedy
        x = x.index_fill(0, outside, -torch.inf)
    if top_p < 1:
        order = x.argsort(descending=True, stable=True)
        probs = torch.softmax(x[order], 0)
        outside = probs.cumsum(0) - probs >= top_p  # the token that crosses top_p stays
        x = x.index_fill(0, order[outside], -torch.inf)
    return torch.softmax(x, 0)
