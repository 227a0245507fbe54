"""Covering arrays: few cases in which every two values of two factors meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

Case = dict[str, Any]


def pairs(case: Mapping[str, Any]) -> set:
    return set(combinations(sorted(case.items(), key=lambda item: item[0]), 2))


def all_pairs(shapes: Sequence[Case], free: Mapping[str, Sequence]) -> set:
    """What can meet: values of one shape, a value of a shape or a free factor with any of another free factor."""
    out = set().union(*map(pairs, shapes))
    values = {name: sorted({s[name] for s in shapes}, key=str) for name in shapes[0]} | dict(free)
    for a, b in combinations(sorted(values), 2):
        if a in free or b in free:
            out |= {((a, x), (b, y)) for x, y in product(values[a], values[b])}
    return out


def covering(shapes: Sequence[Case], free: Mapping[str, Sequence], tries: int = 20, seed: int = 0) -> list[Case]:
    """shapes: values of factors that depend on each other, as they may be; free: those that go with any. Greedy: a case
    is the best of some random ones around a pair that is still missing."""
    r, missing, cases = Random(seed), all_pairs(shapes, free), []
    for pair in sorted(missing, key=str):
        if pair not in missing:
            continue
        fixed = dict(pair)
        fit = [s for s in shapes if all(s.get(k, v) == v for k, v in fixed.items())]
        drawn = [r.choice(fit) | {k: r.choice(v) for k, v in free.items()} | fixed for _ in range(tries)]
        cases.append(max(drawn, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(cases[-1])
    return cases
