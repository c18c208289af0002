"""What the head of an island tells the other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from w5xde_async.compute.engine import LeafError
from w5xde_async.parallel.engine import LoneLeafError
from w5xde_async.wire.messages import Lease, Submit, Verdict, VerdictCode
from w5xde_async.worker.executors.executor import HeldLease, Version
from w5xde_async.worker.executors.island import IslandExecutor, Turn

ALL_SAW_IT, ALONE = (kind.told(0, "ValueError: x", "", (), device_lost=False) for kind in (LeafError, LoneLeafError))


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), ALONE, ALL_SAW_IT, None], ids=["memory", "alone", "leaf", "none"]
)
@pytest.mark.parametrize("turn", [Turn.LOAD, Turn.COMPUTE, Turn.SUBMIT, Turn.SETTLE])
def test_the_end_is_told_only_to_ranks_that_listen(turn: Turn, error: BaseException | None) -> None:
    """The others are in the middle of what has failed here, or gone."""
    said: list[int] = []

    def does(*_: object) -> Any:
        if error is not None:
            raise error

    own: Any = SimpleNamespace(
        layout=SimpleNamespace(buckets=()), device=None, capacity_bytes=0, exact=True, newest_first=False,
        parameters=None, load=does, compute=does, submit=does, settle=does,
    )  # fmt: skip
    lockstep = SimpleNamespace(announce=lambda turn, number: said.append(turn), union=lambda numbers, count: [])
    rank: Any = SimpleNamespace(rank=0, lockstep=lockstep)
    head = IslandExecutor(own, rank)
    take: dict[Turn, Any] = {
        Turn.LOAD: lambda: head.load(Version(1, 1.0, ())),
        Turn.COMPUTE: lambda: head.compute(HeldLease(Lease(1, 1, 1, 0, (1,), 1.0, False, b""), (), 0), lambda _: None),
        Turn.SUBMIT: lambda: head.submit(Submit(1, ())),
        Turn.SETTLE: lambda: head.settle(Verdict((1,), VerdictCode.APPLIED, "")),
    }
    if error is None:
        take[turn]()
    else:
        with pytest.raises(type(error)):
            take[turn]()
    head.end()
    assert said == ([turn, Turn.END] if error in (None, ALL_SAW_IT) else [turn])
