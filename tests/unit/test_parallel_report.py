"""One outcome of all ranks' reports."""

from __future__ import annotations

import math

from w5xde_async.parallel.report import Report, outcome_of


def test_metrics_come_in_the_order_of_leaves_not_of_ranks() -> None:
    """Rank 0 has leaves 0 and 2, of which the last measures more than any before it; rank 1 has leaf 1."""
    first = Report(
        leaves=[0, 2], losses=[1.0, 3.0], names=["loss", "late"], metrics=[0.1, math.nan, 0.3, 0.5], firsts=[0, 1]
    )
    names = ["other", "loss", "undefined"]
    second = Report(leaves=[1], losses=[2.0], names=names, metrics=[0.7, 0.2, math.nan], firsts=[0, 0, 0])
    outcome = outcome_of([first, second], rank=0, compute_s=0.0, vectors=())
    assert outcome.losses == (1.0, 2.0, 3.0)
    assert outcome.metric_names == ("loss", "other", "undefined", "late")
    nan = math.nan
    assert repr(outcome.metrics) == repr((0.1, nan, nan, nan, 0.2, 0.7, nan, nan, 0.3, nan, nan, 0.5))
    assert outcome.firsts == (0, 1, 1, 2)


def test_a_metric_whose_value_is_nan_keeps_its_place() -> None:
    """Both ranks return a and b; a is NaN in the first leaf."""
    first = Report(leaves=[0], losses=[1.0], names=["a", "b"], metrics=[math.nan, 0.1], firsts=[0, 0])
    second = Report(leaves=[1], losses=[2.0], names=["a", "b"], metrics=[0.2, 0.3])
    outcome = outcome_of([first, second], rank=0, compute_s=0.0, vectors=())
    assert outcome.metric_names == ("a", "b")
    assert repr(outcome.metrics) == repr((math.nan, 0.1, 0.2, 0.3))
