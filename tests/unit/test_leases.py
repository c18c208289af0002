"""What a connection remembers of leases that it has answered."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Lease, Revoke, Verdict, VerdictCode
from w5xde_async.worker.connection.compute_queue import ComputeThread
from w5xde_async.worker.connection.inbox import OverMemoryLimit
from w5xde_async.worker.connection.leases import Leases


def leases_of(own: Any = None) -> Leases:
    executor: Any = SimpleNamespace(
        parameters=None, capacity_bytes=100, exact=True, repeatable=True, has_room=True, admit=lambda message: False
    )
    outbox: Any = None
    thread = ComputeThread(pool=None)  # type: ignore[arg-type]
    return Leases(executor, thread, outbox, on_failure=lambda error: None, own=own)


async def test_a_lease_that_was_revoked_while_its_answer_was_on_its_way_is_forgotten_with_its_verdict() -> None:
    """The link may last for weeks."""
    leases = leases_of()
    for lease in range(1, 4):
        leases._queue.computing = lease  # it was at it last
        leases.revoke(Revoke(lease, "another worker was faster"))
        assert leases.is_revoked(lease)
        leases.verdict(Verdict((lease,), VerdictCode.DUPLICATE, ""))
    assert not leases._revoked


async def test_what_waits_behind_a_lease_that_is_read_here_is_held_too() -> None:
    """Be it sent: the memory limit is for both."""

    class Own:
        def check(self, *_: Any) -> None: ...

        async def read(self, *_: Any) -> None:
            await asyncio.Event().wait()

    leases = leases_of(Own())
    indices, sent = BufferSpec("", "int64", (2,), "raw", 16), BufferSpec("", "float32", (2, 5), "raw", 40)

    def come(number: int, spec: BufferSpec, *, local: bool = False) -> None:
        message = Lease(number, 0, 0, 0, (2,), 1.0, False, b"", local=local)
        leases.place(message, [spec])
        leases.lease(message)

    come(1, indices, local=True)
    come(2, sent)
    come(3, sent)
    assert leases.held_bytes == 16 + 40 + 40
    with pytest.raises(OverMemoryLimit):
        come(4, sent)
    assert leases._arrivals is not None
    await leases._arrivals.aclose()
    assert leases.held_bytes == 0
