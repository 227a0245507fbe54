"""The non-dominated set: points that no other point beats in one coordinate without losing in the other.

Both coordinates are minimised (bytes per token and delta NLL; negate accuracy to maximise it). q dominates p when
q <= p in both and q < p in at least one, so equal points are kept together. A point with a coordinate that is None
or NaN has no place in an order: it is dropped with a warning, never treated as zero or infinity.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

Point = tuple[float | None, float | None]


def front(points: Sequence[Point]) -> list[int]:
    """Indices of the non-dominated points, by ascending x, then y, then index. O(n log n)."""
    known = [i for i, (x, y) in enumerate(points) if x is not None and y is not None and x == x and y == y]
    if len(known) < len(points):
        dropped = sorted(set(range(len(points))) - set(known))
        warnings.warn(f"pareto: points {dropped} have no value in x or y and are left out", stacklevel=2)
    kept: list[int] = []
    best = None  # the lowest y so far, and the x where it was first reached
    for i in sorted(known, key=lambda i: (points[i][0], points[i][1], i)):
        x, y = points[i]
        if best is None or y < best[1] or (x, y) == best:
            kept.append(i)
            best = (x, y)
    return kept


def staircase(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Corners of the line under which nothing was reached: to the right at constant y, then down at the next x."""
    corners: list[tuple[float, float]] = []
    for i in front(points):
        x, y = points[i]
        if corners and (x, y) != corners[-1]:
            corners.append((x, corners[-1][1]))
        if not corners or (x, y) != corners[-1]:
            corners.append((x, y))
    return corners
