"""The best scalar quantizer for one coordinate of a random unit vector (Lloyd-Max), to float64 precision, no sampling.

Law: x uniform on the unit sphere of R^d, t = x_j:  f(t) = C (1 - t^2)^((d-3)/2) on [-1, 1], C = Gamma(d/2) /
(sqrt(pi) Gamma((d-1)/2)); variance 1/d; N(0, 1/d) for large d. Cells are closed forms: mass by the incomplete beta
function, first moment by C/(d-1) [(1-a^2)^((d-1)/2) - (1-b^2)^((d-1)/2)].
A codebook has 2**bits centroids, symmetric, ascending; edges are midpoints, centroids the means of their cells. Start:
quantiles of f^(1/3) (Panter-Dite), itself a beta law; then Newton on the tridiagonal system "centroid = mean of cell".
Ties (t on an edge) take the upper cell. Source: TurboQuant, arXiv 2504.19874, section 3.1 (its tables are Gaussian).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Codebook:
    """centroids float64 [2**bits], edges float64 [2**bits - 1]; mse = E|x - x~|^2 of a unit vector (d coordinates)."""

    d: int
    bits: int
    centroids: Tensor
    edges: Tensor
    mse: float


@lru_cache(maxsize=64)
def lloyd_max(d: int, bits: int) -> Codebook:
    if d < 3 or not 1 <= bits <= 8:
        raise ValueError(f"a codebook needs d >= 3 and 1 to 8 bits, got d={d}, bits={bits}")
    n = 2 ** (bits - 1)  # the positive half; 0 is always an edge
    c = _start(d, n)
    for _ in range(40):  # 4 to 20 are enough
        edges, mass, mean, pdf = _cells(d, c)
        gap = c - mean / mass  # zero when every centroid is the mean of its cell
        step = _newton(c, edges, mass, pdf, c * mass - mean)
        if np.abs(step).max() * np.sqrt(d) < 1e-10:  # converges quadratically: the next step is below float64
            c = c - step
            break
        c = c - next((t * step for t in (1, 0.5, 0.25, 0.125) if _better(d, c - t * step, gap)), gap)
    mass = _cells(d, c)[1]
    both = np.concatenate([-c[::-1], c])
    return Codebook(
        d,
        bits,
        torch.from_numpy(both),
        torch.from_numpy((both[1:] + both[:-1]) / 2),
        float(1 - 2 * d * np.sum(mass * c * c)),  # E|x|^2 - E|x~|^2, as x~ is the conditional mean
    )


def _better(d: int, c: np.ndarray, gap: np.ndarray) -> bool:
    """A Newton step is taken if centroids stay ordered and move towards the means; else Lloyd's own step, c - gap."""
    if np.any(np.diff(c, prepend=0.0) <= 0) or c[-1] >= 1:
        return False
    _, mass, mean, _ = _cells(d, c)
    return bool(np.sum((c - mean / mass) ** 2) < np.sum(gap**2))


def _start(d: int, n: int) -> np.ndarray:
    from scipy.special import betaincinv

    a = (d + 3) / 6  # f^(1/3) is a beta law in (t + 1) / 2 with both parameters (d + 3) / 6
    return 2 * betaincinv(a, a, (n + np.arange(n) + 0.5) / (2 * n)) - 1


def _cells(d: int, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Edges [n+1] from 0 to 1, mass and first moment of the n cells between them, density at the edges."""
    from scipy.special import betainc, betaln

    edges = np.concatenate([[0.0], (c[1:] + c[:-1]) / 2, [1.0]])
    norm = np.exp(-betaln(0.5, (d - 1) / 2))
    log_in = np.log1p(-(edges[:-1] ** 2))  # log(1 - t^2), edges below 1
    tail = np.append(np.exp(log_in * (d - 1) / 2), 0.0)
    pdf = np.append(norm * np.exp(log_in * (d - 3) / 2), 0.0)  # the edge at 1 does not move: its density is not used
    mass = -np.diff(betainc((d - 1) / 2, 0.5, 1 - edges**2)) / 2  # upper tails: small cells keep their precision
    return edges, mass, norm / (d - 1) * -np.diff(tail), pdf


def _newton(c: np.ndarray, edges: np.ndarray, mass: np.ndarray, pdf: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """Solve J step = rhs, J = d(c mass - mean)/dc. Edge i+1 is (c_i + c_(i+1)) / 2 and moves (c - edge) pdf.

    J is tridiagonal; eliminated in place (no pivots needed: it is the Hessian of a convex problem near its minimum).
    """
    upper = 0.5 * (c - edges[1:]) * pdf[1:]
    lower = -0.5 * (c - edges[:-1]) * pdf[:-1]
    lower[0] = upper[-1] = 0.0
    diag, upper, lower, x = (mass + upper + lower).tolist(), upper.tolist(), lower.tolist(), rhs.tolist()
    for i in range(1, len(x)):
        w = lower[i] / diag[i - 1]
        diag[i] -= w * upper[i - 1]
        x[i] -= w * x[i - 1]
    x[-1] /= diag[-1]
    for i in range(len(x) - 2, -1, -1):
        x[i] = (x[i] - upper[i] * x[i + 1]) / diag[i]
    return np.array(x)


@lru_cache(maxsize=64)
def grid(d: int, bits: int) -> tuple[float, Tensor, Tensor]:
    """Tables that find a cell with two loads instead of a binary search: half, base uint8 [m], edge float32 [m].

    [-1, 1] is cut into uniform slots so fine that a slot holds at most one edge. slot(t) = int(t * half + half), in
    float32, never decreases with t; so edges in lower slots are below t, edges in higher slots above, and only the edge
    in t's own slot needs a comparison. Exact for every float32 t: equals searchsorted(edges, t, right=True).
    """
    edges = lloyd_max(d, bits).edges.float()
    gap = edges.diff().min().item() if len(edges) > 1 else 1.0
    half = float(2 ** int(np.ceil(np.log2(2 / gap))))  # slots are half the smallest cell or less
    slot = (edges * half).add_(half).to(torch.int64)
    assert len(slot.unique()) == len(slot), "two edges in one slot"
    own = torch.full((2 * int(half) + 2,), torch.inf)
    own[slot] = edges
    base = torch.searchsorted(slot, torch.arange(len(own))).to(torch.uint8)  # edges in lower slots
    return half, base, own


def quantize(z: Tensor, half: float, base: Tensor, own: Tensor) -> Tensor:
    """z float32 [...] -> codes uint8 [...], with the tables of `grid`. Anything outside [-1, 1] takes an outer cell."""
    slot = z.mul(half).add_(half).to(torch.int32).clamp_(0, len(own) - 1).reshape(-1)
    codes = torch.index_select(base, 0, slot)
    above = z.reshape(-1) >= torch.index_select(own, 0, slot)
    return codes.add_(above.view(torch.uint8)).view(z.shape)
