"""Leases that name their samples: read, or asked for, and handed on in the order in which they came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from w5xde_async.errors import MalformedFrame
from w5xde_async.wire.messages import Lease, Submit, Unread
from w5xde_async.worker.connection.arrivals import Arrivals
from w5xde_async.worker.connection.inbox import MOST_LEASES
from w5xde_async.worker.connection.own_data import OwnBatch


def lease(number: int, *, local: bool = True) -> Lease:
    return Lease(number, 0, 0, 0, (2,), 1.0, False, b"" if local else b"sent", local=local)


class Bench:
    """Its data is read when the test says so: ``reads`` by lease."""

    def __init__(self, room: Callable[[int], bool] = lambda nbytes: True) -> None:
        self.reads: dict[int, asyncio.Future[OwnBatch]] = {}
        self.out: list[Any] = []
        self.asked: list[Unread] = []
        self.errors: list[BaseException] = []
        self.not_begun: list[int] = []
        self.hangs = asyncio.Event()  # until it is set, what was being read goes on
        own: Any = self
        self.arrivals = Arrivals(
            own, 7, lease=self._lease, submit=self.out.append, ask=self.asked.append, room=room,
            not_begun=self.not_begun.append, on_failure=self.errors.append,
        )  # fmt: skip

    async def read(self, message: Lease, indices: Tensor, seed: int) -> OwnBatch:
        assert (indices.tolist(), seed) == ([5, 9], 7)
        self.reads[message.lease] = asyncio.get_running_loop().create_future()
        return await self.reads[message.lease]

    async def quiet(self) -> None:
        await self.hangs.wait()

    def _lease(self, message: Lease, batch: tuple[Tensor, ...]) -> None:
        assert not message.local
        self.out.append((message.lease, message.structure, [tensor.tolist() for tensor in batch]))

    async def come(self, *numbers: int) -> None:
        for number in numbers:
            self.arrivals.lease(lease(number), (torch.tensor([5, 9]),))
        await asyncio.sleep(0)

    async def answer(self, number: int, error: Exception | None = None) -> None:
        if error is None:
            self.reads[number].set_result(OwnBatch(b"read", False, (torch.ones(1),)))
        else:
            self.reads[number].set_exception(error)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def send(self, number: int) -> None:
        self.arrivals.lease(lease(number, local=False), (torch.zeros(1),))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.arrivals.aclose()
    assert not made.errors


async def test_the_order_is_that_of_their_coming(bench: Bench) -> None:
    bench.send(1)
    await bench.come(2, 3)
    bench.send(4)
    bench.arrivals.submit(Submit(5, (0,)))
    assert bench.out == [(1, b"sent", [[0.0]])]
    await bench.answer(3)
    assert len(bench.out) == 1
    await bench.answer(2)
    assert bench.out[1:] == [
        (2, b"read", [[1.0]]), (3, b"read", [[1.0]]), (4, b"sent", [[0.0]]), Submit(5, (0,))
    ]  # fmt: skip


async def test_what_cannot_be_read_comes_in_its_place(bench: Bench) -> None:
    await bench.come(1, 2)
    await bench.answer(1, FileNotFoundError("gone"))
    await bench.answer(2)
    assert [(unread.lease, unread.reason) for unread in bench.asked] == [(1, "FileNotFoundError: gone")]
    assert bench.out == []
    bench.send(1)
    assert [item[:2] for item in bench.out] == [(1, b"sent"), (2, b"read")]


async def test_a_revoked_one_holds_up_nobody(bench: Bench) -> None:
    """Whether it is being read, or was asked for."""
    await bench.come(1, 2, 3)
    await bench.answer(1, OSError("gone"))
    await bench.answer(3)
    assert bench.arrivals.revoke(1)
    assert bench.arrivals.revoke(2)
    assert [item[0] for item in bench.out] == [3]
    assert not bench.arrivals.revoke(3)
    await bench.arrivals.aclose()


async def test_a_revoked_one_is_answered_when_nothing_is_read_for_it_any_more(bench: Bench) -> None:
    await bench.come(1, 2)
    await bench.answer(2, OSError("gone"))
    bench.arrivals.lease(lease(3), (torch.tensor([5, 9]),))
    for number in (1, 2, 3):  # under way, asked for, about to begin
        assert bench.arrivals.revoke(number)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sorted(bench.not_begun) == [2, 3]
    assert not bench.arrivals.revoke(1)
    bench.hangs.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sorted(bench.not_begun) == [1, 2, 3]


async def test_one_that_hangs_is_forgotten_at_the_end(bench: Bench) -> None:
    await bench.come(1)
    bench.arrivals.revoke(1)
    await asyncio.sleep(0)
    await bench.arrivals.aclose()
    assert bench.not_begun == []


async def test_hanging_reads_are_few(bench: Bench) -> None:
    """Whoever leases and revokes for ever is refused."""
    for number in range(MOST_LEASES):
        await bench.come(number)
        bench.arrivals.revoke(number)
        await asyncio.sleep(0)
    with pytest.raises(MalformedFrame, match="leases at once"):
        await bench.come(MOST_LEASES)
    await bench.arrivals.aclose()


async def test_what_there_is_no_room_for_is_asked_for() -> None:
    bench = Bench(room=lambda nbytes: False)
    await bench.come(1)
    await bench.answer(1)
    assert [unread.reason for unread in bench.asked] == ["it would hold more than its --memory-limit"]
    await bench.arrivals.aclose()


async def test_what_waits_for_a_slow_read_takes_room() -> None:
    bench = Bench(room=lambda nbytes: nbytes <= 16 + 2 * 4)  # the indices of one, and what two have read
    await bench.come(1, 2, 3, 4)
    for number in (2, 3, 4):
        await bench.answer(number)
    assert [unread.lease for unread in bench.asked] == [2, 3]  # those behind have indices still
    assert bench.arrivals.held_bytes == 16 + 4
    bench.send(2)
    assert bench.arrivals.held_bytes == 16 + 4 + 4
    bench.send(3)
    await bench.answer(1, OSError("gone"))
    bench.send(1)
    assert [item[:1] for item in bench.out] == [(1,), (2,), (3,), (4,)]
    assert bench.arrivals.held_bytes == 0
    await bench.arrivals.aclose()


async def test_a_lease_that_comes_twice_is_refused(bench: Bench) -> None:
    await bench.come(1)
    with pytest.raises(MalformedFrame, match="LEASE 1 came twice"):
        bench.send(1)
    await bench.answer(1, OSError("gone"))
    with pytest.raises(MalformedFrame, match="LEASE 1 came twice"):
        bench.arrivals.lease(structs.replace(lease(1)), (torch.tensor([5, 9]),))


async def test_the_links_end_leaves_nothing() -> None:
    bench = Bench()
    await bench.come(1, 2)
    await bench.arrivals.aclose()
    assert all(read.cancelled() for read in bench.reads.values())
    assert not bench.errors
