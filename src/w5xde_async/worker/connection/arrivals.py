"""Leases in the order in which they came, where some name their samples and have to be read first.

A lease that names samples is read from the worker's own data. If that fails, the coordinator is asked for them once,
and the same lease comes again. Everything behind it waits: rules that take late results count on the order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from msgspec import structs
from torch import Tensor

from w5xde_async.errors import MalformedFrame, headline
from w5xde_async.wire.messages import Lease, Submit, Unread
from w5xde_async.worker.connection.inbox import MOST_LEASES
from w5xde_async.worker.connection.own_data import OwnData


@dataclass(slots=True)
class _Waiting:
    message: Lease | Submit
    batch: tuple[Tensor, ...] = ()
    reading: asyncio.Task[None] | None = None
    asked: bool = False  # the coordinator was asked for its data
    ready: bool = False
    revoked: bool = False


class Arrivals:
    """Hands leases with their batches on to ``lease``, and requests to submit to ``submit``, in order."""

    def __init__(
        self,
        own: OwnData,
        seed: int,
        *,
        lease: Callable[[Lease, tuple[Tensor, ...]], None],
        submit: Callable[[Submit], None],
        ask: Callable[[Unread], None],
        room: Callable[[int], bool],
        not_begun: Callable[[int], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """``seed``: the run's. ``room``: whether batches of so many more bytes may be held, beside those that were
        handed on. ``not_begun`` is told of leases that were revoked here. ``on_failure`` hears what broke off outside
        of any call."""
        self._own, self._seed = own, seed
        self._lease, self._submit, self._ask, self._room = lease, submit, ask, room
        self._not_begun, self._on_failure = not_begun, on_failure
        self._waiting: deque[_Waiting] = deque()
        self._closed = False
        self._given_up: set[asyncio.Task[None]] = set()  # reads of leases that were revoked, until they are over

    @property
    def held_bytes(self) -> int:
        """Bytes of batches, and of indices, that wait for what came before them."""
        return sum(_nbytes(one.batch) for one in self._waiting)

    def lease(self, message: Lease, batch: tuple[Tensor, ...]) -> None:
        """A lease has come, with its batch or, where it is ``local``, the indices. Raises MalformedFrame."""
        known = next((one for one in self._waiting if _is(one, message.lease)), None)
        if known is not None:
            if not known.asked or message.local:
                raise MalformedFrame(f"LEASE {message.lease} came twice")
            known.message, known.batch, known.asked, known.ready = message, batch, False, True
            self._flow()
            return
        if not message.local and not self._waiting:
            self._lease(message, batch)
            return
        if len(self._waiting) + len(self._given_up) >= MOST_LEASES:
            raise MalformedFrame(f"{MOST_LEASES} leases at once")
        arrival = _Waiting(message, batch, ready=not message.local)
        self._waiting.append(arrival)
        if message.local:
            arrival.reading = asyncio.create_task(self._read(arrival, message), name=f"read lease {message.lease}")

    def submit(self, message: Submit) -> None:
        """A request to submit keeps its place."""
        if not self._waiting:
            self._submit(message)
        elif len(self._waiting) >= MOST_LEASES:
            raise MalformedFrame(f"{MOST_LEASES} leases at once")
        else:
            self._waiting.append(_Waiting(message, ready=True))

    def revoke(self, lease: int) -> bool:
        """The lease is void. False where it does not wait here.

        One that is being read is ``not_begun`` once that is over: else a worker whose disk hangs would be given lease
        after lease, and every step would wait for it.
        """
        known = next((one for one in self._waiting if _is(one, lease)), None)
        if known is None:
            return False
        self._waiting.remove(known)
        if known.reading is None:
            self._not_begun(lease)
        else:
            known.revoked = True
            self._given_up.add(known.reading)
            known.reading.add_done_callback(partial(self._over, lease))
            known.reading.cancel()
        self._flow()
        return True

    def _over(self, lease: int, reading: asyncio.Task[None]) -> None:
        """What was read of a revoked lease is over; or this is closed."""
        if reading in self._given_up:
            self._given_up.discard(reading)
            self._not_begun(lease)

    async def aclose(self) -> None:
        """Forget what waits."""
        self._closed = True
        reading = [*self._given_up, *(one.reading for one in self._waiting if one.reading is not None)]
        self._waiting.clear()
        self._given_up.clear()
        for task in reading:
            task.cancel()
        if reading:
            await asyncio.wait(reading)

    async def _read(self, arrival: _Waiting, message: Lease) -> None:
        try:
            try:
                structure, packed, tensors = await self._own.read(message, arrival.batch[0], self._seed)
                arrival.batch = ()
                fits = self._room(self.held_bytes + _nbytes(tensors))
                reason = "" if fits else "it would hold more than its --memory-limit"
            except asyncio.CancelledError:
                if self._closed or not arrival.revoked:
                    raise
                await self._own.quiet()
                return
            except Exception as error:  # whatever the dataset raises: the coordinator may read it, or leave samples out
                reason = headline(f"{type(error).__name__}: {error}")
            arrival.reading, arrival.batch = None, ()
            if reason:
                arrival.asked = True
                self._ask(Unread(message.lease, reason[:1000]))
                return
            arrival.message = structs.replace(message, structure=structure, packed=packed, local=False)
            arrival.batch, arrival.ready = tensors, True
            self._flow()
        except Exception as error:
            self._on_failure(error)

    def _flow(self) -> None:
        while self._waiting and self._waiting[0].ready:
            one = self._waiting.popleft()
            if isinstance(one.message, Submit):
                self._submit(one.message)
            else:
                self._lease(one.message, one.batch)


def _nbytes(batch: tuple[Tensor, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in batch)


def _is(waiting: _Waiting, lease: int) -> bool:
    return isinstance(waiting.message, Lease) and waiting.message.lease == lease
