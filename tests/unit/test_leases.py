"""What a connection remembers of leases that it has answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from w5xde_async.wire.messages import Revoke, Verdict, VerdictCode
from w5xde_async.worker.connection.compute_queue import ComputeThread
from w5xde_async.worker.connection.leases import Leases


async def test_a_lease_that_was_revoked_while_its_answer_was_on_its_way_is_forgotten_with_its_verdict() -> None:
    """The link may last for weeks."""
    executor: Any = SimpleNamespace(
        parameters=None, capacity_bytes=1 << 20, exact=True, repeatable=True, admit=lambda message: False
    )
    outbox: Any = None
    leases = Leases(executor, ComputeThread(pool=None), outbox, on_failure=lambda error: None)  # type: ignore[arg-type]
    for lease in range(1, 4):
        leases._queue.computing = lease  # it was at it last
        leases.revoke(Revoke(lease, "another worker was faster"))
        assert leases.is_revoked(lease)
        leases.verdict(Verdict((lease,), VerdictCode.DUPLICATE, ""))
    assert not leases._revoked
