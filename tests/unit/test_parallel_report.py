"""One outcome of all ranks' reports."""

from __future__ import annotations

import math

from w5xde_async.parallel.report import Report, outcome_of


def test_metrics_come_in_the_order_of_leaves_not_of_ranks() -> None:
    """Rank 0 has leaves 0 and 2, of which the last measures more than any before it; rank 1 has leaf 1."""
    first = Report(leaves=[0, 2], losses=[1.0, 3.0], names=["loss", "late"], metrics=[0.1, math.nan, 0.3, 0.5])
    second = Report(leaves=[1], losses=[2.0], names=["other", "loss", "undefined"], metrics=[0.7, 0.2, math.nan])
    outcome = outcome_of([first, second], rank=0, compute_s=0.0, vectors=())
    assert outcome.losses == (1.0, 2.0, 3.0)
    assert outcome.metric_names == ("loss", "other", "late", "undefined")
    nan = math.nan
    assert repr(outcome.metrics) == repr((0.1, nan, nan, nan, 0.2, 0.7, nan, nan, 0.3, nan, 0.5, nan))
