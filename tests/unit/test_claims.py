"""What a DONE may say of a lease, and how much of it is believed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace
from torch import nn

from w5xde_async.errors import RemoteError
from w5xde_async.hub.work.claims import Claims, seen
from w5xde_async.params.layout import Layout
from w5xde_async.wire.messages import Done

LAYOUT = Layout.of(nn.Linear(8, 4), bucket_bytes=64)
DONE = Done(1, (0.5, 0.5), (), (), (), (), 0, 1.0, 1.0)


def check(claims: Claims, who: str = "a", *, elapsed_s: float = 10.0, member_s: float = 10.0, **changes: Any) -> Done:
    return claims.check(who, replace(DONE, **changes), 2, elapsed_s=elapsed_s, member_s=member_s)


def test_nobody_took_longer_than_was_seen():
    said = replace(DONE, compute_s=1e9, wait_s=1e9, encode_s=1e9, raw_bytes=1 << 60)
    held = seen(said, 2.0, 5.0, 100)
    assert (held.compute_s, held.wait_s, held.encode_s, held.raw_bytes) == (2.0, 5.0, 2.0, 100)
    assert seen(said, -1.0, -1.0, 0).compute_s == 0.0
    assert seen(DONE, 2.0, 5.0, 100) is DONE


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"losses": (0.0,)}, "1 losses"),
        ({"losses": (0.0, -1e39)}, r"a loss of -1e\+39, and losses are float32"),
        ({"losses": (math.inf, 1e39)}, r"a loss of 1e\+39, and losses are float32"),
        ({"metrics": (1.0,)}, "1 metrics"),
        ({"metric_names": ("m",), "metrics": (1.0,)}, "1 metrics"),
        ({"absent": (10**6,)}, "as absent"),
        ({"absent": (0, 0)}, "twice as absent"),
        ({"untouched": (10**6,)}, "as untouched"),
        ({"untouched": (1, 1)}, "twice as untouched"),
    ],
)
def test_what_cannot_be_ends_the_session(changes: dict[str, Any], reason: str):
    with pytest.raises(RemoteError, match=reason):
        check(Claims(LAYOUT), **changes)


def test_metric_names_are_bounded_over_the_run():
    claims = Claims(LAYOUT)

    def names(who: str, first: int, count: int) -> Done:
        made = tuple(f"{who}{number}" for number in range(first, first + count))
        return check(claims, who, metric_names=made, metrics=(1.0, 2.0) * count)

    assert len(names("a", 0, 64).metric_names) == 64
    assert names("a", 64, 1).metric_names == ()
    assert len(names("a", 0, 10).metric_names) == 10  # those that it has said before
    for worker in range(20):
        names(f"w{worker}-", 0, 64)
    late = check(claims, "late", metric_names=("new", "a0"), metrics=(1.0, 2.0, 3.0, 4.0))
    assert (late.metric_names, late.metrics) == (("a0",), (2.0, 4.0))  # there is no room for its own
