"""How fast a run goes."""

from __future__ import annotations

import pytest

from w5xde_async.telemetry.rates import Rate


def test_time_without_anybody_to_work_is_left_out() -> None:
    rate = Rate()
    assert rate.seconds_for(10) is None
    assert rate.seconds_for(0) == 0.0
    for at, count in ((0.0, 0), (1.0, 2), (1.0, 3), (2.0, 4)):  # the third comes at the same time, and says nothing
        rate.update(at, count)
    assert rate.seconds_for(10) == pytest.approx(5.0)
    rate.pause()
    for at, count in ((1000.0, 4), (1001.0, 6)):
        rate.update(at, count)
    assert rate.seconds_for(10) == pytest.approx(5.0)


def test_what_was_ten_seconds_ago_counts_a_third() -> None:
    rate = Rate()
    for at, count in ((0.0, 0), (1.0, 4), (11.0, 4)):
        rate.update(at, count)
    assert rate.per_s == pytest.approx(4 * 0.368, rel=0.01)
