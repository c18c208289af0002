"""Rows: any length of run in a bounded table, the newest at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from w5xde_async.telemetry.dashboard.rows import Rows


def test_it_merges_two_by_two_when_it_is_full():
    rows = Rows(("last", "mean", "low", "high"), capacity=4)
    for n in range(4):
        rows.append((n, float(n), n, n))
    assert rows.stride == 2
    assert rows.rows() == [(1, 0.5, 0, 1), (3, 2.5, 2, 3)]
    rows.append((4, 4.0, 4, 4))
    assert rows.rows()[-1] == (4, 4.0, 4, 4)  # the newest is there though its row is not full


def test_cells_without_a_value():
    rows = Rows(("last", "mean"), capacity=2)
    rows.append((None, 1.0))
    rows.append((7, None))
    assert rows.rows() == [(7, 1.0)]
    rows.append((None, None))
    assert rows.rows()[-1] == (None, None)


@given(st.integers(0, 3000), st.sampled_from([2, 4, 16, 100]))
def test_never_more_than_its_capacity_and_nothing_is_lost(length: int, capacity: int):
    rows = Rows(("last", "low", "high"), capacity=capacity)
    for n in range(length):
        rows.append((n, n, n))
    found = rows.rows()
    assert len(found) <= capacity
    # The slices follow one another without a gap, from the first row to the last.
    edges = [(low, high) for _, low, high in found]
    assert [low for low, _ in edges] == ([0] + [high + 1 for _, high in edges[:-1]] if edges else [])
    assert not found or found[-1][0] == length - 1


@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_a_capacity_that_cannot_be_halved(capacity: int):
    with pytest.raises(ValueError, match="even"):
        Rows(("last",), capacity=capacity)


def test_a_row_of_another_width():
    with pytest.raises(ValueError, match="1 cells"):
        Rows(("last",), capacity=2).append((1, 2))
