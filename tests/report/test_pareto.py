"""The front equals its definition on random points, with duplicates, single points and missing values."""

import warnings
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab.report.pareto import front, staircase

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # shared machines stall

# few values: duplicates and ties in one coordinate are the rule
small = st.tuples(st.integers(0, 6).map(float), st.integers(0, 6).map(float))
wide = st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False))


def brute(points):
    def dominated(p):
        return any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)

    return {i for i, p in enumerate(points) if not dominated(p)}


@CALM
@given(st.one_of(st.lists(small, max_size=40), st.lists(wide, max_size=20)))
def test_front_equals_the_definition(points):
    result = front(points)
    assert set(result) == brute(points)
    assert len(set(result)) == len(result)
    assert [points[i][0] for i in result] == sorted(points[i][0] for i in result)


def test_equal_points_stay_together_and_a_tie_in_one_coordinate_does_not():
    assert front([(1, 2), (1, 2), (1, 3), (2, 2), (2, 1)]) == [0, 1, 4]
    assert front([(5, 5)]) == [0]
    assert front([]) == []


def test_missing_values_are_dropped_with_a_warning_and_never_win():
    nan = float("nan")
    with pytest.warns(UserWarning, match=r"points \[0, 2\]"):
        assert front([(nan, 0), (1, 1), (0, None)]) == [1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        front([(1, 1)])


@CALM
@given(st.lists(small, min_size=1, max_size=20))
def test_staircase_goes_right_and_down_through_every_front_point(points):
    corners = staircase(points)
    assert {points[i] for i in front(points)} <= set(corners)
    for (x0, y0), (x1, y1) in pairwise(corners):
        assert (x1 > x0 and y1 == y0) or (x1 == x0 and y1 < y0)
