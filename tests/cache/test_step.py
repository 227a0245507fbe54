"""Packed rows of a step: which sequence, where in it, which position."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cache.step import DECODE, PREFILL, Step


@given(st.lists(st.tuples(st.integers(0, 5) | st.just(1), st.integers(0, 40)), min_size=1, max_size=6))
def test_rows_lie_in_the_order_of_the_sequences(what):
    """Also where every sequence has one token, which is told apart. Fails for a step of as many rows as sequences of
    which one has none and another two."""
    q_len, start = (np.array(x, np.int64) for x in zip(*what))
    n = np.arange(len(what))
    phase = np.where(q_len == 1, DECODE, PREFILL).astype(np.int8)
    step = Step(n, q_len, start, phase, start)
    want = [(i, t, s + t) for i, (q, s) in enumerate(what) for t in range(q)]
    got = zip(step.row_seq.tolist(), step.row_at.tolist(), step.positions.tolist())
    assert list(got) == want and step.cu.tolist() == [0, *np.cumsum(q_len).tolist()]
