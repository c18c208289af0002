"""What a queue says of itself while it computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tests.simulator.loop import VirtualLoop

from w5xde_async.compute.block import ComputedBlock
from w5xde_async.wire.messages import Lease
from w5xde_async.worker.connection.compute_queue import ComputeQueue, ComputeThread
from w5xde_async.worker.executors.executor import Computed, HeldLease

NOTHING = ComputedBlock(
    losses=(), metric_names=(), metrics=(), untouched=(), absent=(), splits=0, compute_s=0.0, vectors=()
)  # fmt: skip


class _AtOnce(VirtualLoop):
    """Its executor does what it is given where it is given it."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        future = self.create_future()
        future.set_result(func(*args))
        return future


def test_people_are_told_of_steps_counted_from_one() -> None:
    """As in every line of the coordinator: a lease's own number of its step begins at zero."""
    seen: list[str] = []

    def compute(held: HeldLease, send: Any) -> Computed:
        seen.append(queue.activity)
        return Computed(NOTHING)

    loop = _AtOnce()

    async def run() -> None:
        nonlocal queue
        queue = ComputeQueue(
            cast(Any, executor), ComputeThread(pool=cast(Any, None), clock=loop.time), cast(Any, answers),
            on_failure=failures.append,
        )  # fmt: skip
        queue.put([HeldLease(Lease(1, 0, 6, 4, (1, 1), 1.0, False, b""), (), 0)])
        await queue.aclose()

    queue: Any = None
    failures: list[BaseException] = []
    executor = SimpleNamespace(newest_first=False, exact=True, has_room=True, version=0, compute=compute)
    answers = SimpleNamespace(is_revoked=lambda lease: False, done=lambda *_: None, result=lambda *_: None)
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    assert seen == ["step 7, leaves 4 to 5"]
    assert not failures
