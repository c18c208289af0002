"""One link after joining: leases and versions in, results out.

Reader, writer, heartbeat and who watches the child are tasks of one TaskGroup. What the leases mean is the matter of
``Leases`` and of the executor that ``prepare`` makes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from enum import Enum

from w5xde_async.errors import (
    DeviceLost,
    IslandBroken,
    LinkLost,
    ProgramRefused,
    Refused,
    RemoteError,
    UsageError,
    W5xdeError,
)
from w5xde_async.net.link import Accept, Link, Received
from w5xde_async.net.outbox import Outbox
from w5xde_async.telemetry.memory import device_memory, host_bytes, usage_of
from w5xde_async.wire import messages
from w5xde_async.wire.frame import BufferSpec, encode
from w5xde_async.wire.handshake import WORKER, State, advance
from w5xde_async.worker.connection.compute_queue import ComputeThread
from w5xde_async.worker.connection.handshake import Dismissed, Receive, refused
from w5xde_async.worker.connection.inbox import OverMemoryLimit
from w5xde_async.worker.connection.leases import Leases
from w5xde_async.worker.connection.metering import Meter
from w5xde_async.worker.connection.own_data import OwnData
from w5xde_async.worker.executors.executor import LeaseExecutor, Unsent
from w5xde_async.worker.hooks import WorkerHooks

logger = logging.getLogger(__name__)

_A_TURN = 256  # messages, after which whatever else there is to do has its turn
_PARTING_S = 1.0  # for the last message to be sent
_BLOCK_S = 5.0  # for a block to end that nobody needs: the run is finished, or this worker has no part in it
_WORD_S = 2.0  # for the coordinator's last word, where ranks of an island cannot go on together

Prepare = Callable[[Receive, Outbox], Awaitable[tuple[LeaseExecutor, messages.Ready]]]
"""Makes ready for computing, while heartbeats go on. It may send and receive meanwhile."""


class Departure(Enum):
    """Why a worker's ``run`` returned."""

    FINISHED = "the run is finished"
    DRAINED = "it was asked to leave"


class RunFailed(W5xdeError):
    """The coordinator ended the run with an error. Field: ``reason``."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the coordinator ended the run: {reason}")


class Connection:
    """One link from WELCOME to its end."""

    def __init__(
        self,
        link: Link,
        welcome: messages.Welcome,
        thread: ComputeThread,
        *,
        hooks: WorkerHooks | None = None,
        gather: bool = True,
        parted: asyncio.Event | None = None,
        earlier: Sequence[Unsent] = (),
        must_share: bool = False,
        own: OwnData | None = None,
        child_died: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``earlier``: what the last link has left. ``gather``: as for ``Outbox``. ``parted`` is set when nobody
        needs its block any more, and that does not end. ``must_share``, ``own``: as for ``Leases``.
        ``child_died`` raises when the process that computes for this one has died.
        """
        self.link, self.welcome = link, welcome
        self._thread, self._clock = thread, thread.clock
        self._own, self._child_died = own, child_died
        self._parted, self._earlier, self._must_share = parted or asyncio.Event(), earlier, must_share
        self._outbox = Outbox(link, gather=gather, clock=thread.clock)
        self._meter: Meter | None = None
        if hooks is not None and hooks.on_answered is not None:
            self._meter = Meter(link, self._outbox, hooks.on_answered, thread.clock)
        self._on_failed = None if hooks is None else hooks.on_failed
        self._receive: Receive = link.recv if self._meter is None else self._meter.recv
        self._state = State.JOINING
        self._num_frames = 0
        self._hearing = False  # whoever prepares waits for a message
        self._over = False  # the link is lost, and what has come is being read
        self._executor: LeaseExecutor | None = None
        self.leases: Leases | None = None  #: once it is ready for any
        self.unsent: list[Unsent] = []  #: once it has ended: answers that had not left
        self._announced = asyncio.Event()  # READY has left
        self._ready_at: float | None = None
        self._stopping = False
        self.ends_with_coordinator = False  #: it is not waited for until it comes back
        self._drain = ""
        self._grace_s = 0.0
        self._last_word: asyncio.TimerHandle | None = None  # until it is there, or is not waited for any more
        self._failure: BaseException | None = None
        self.error: W5xdeError | None = None  #: that ``run`` raises once its block has ended
        self._bye: messages.Bye | None = None  # the coordinator's last message
        self.heard = ""  #: what the coordinator said that it does, last

    @property
    def served_s(self) -> float:
        """For how long it was ready for leases, until now."""
        return 0.0 if self._ready_at is None else self._clock() - self._ready_at

    @property
    def holds_nothing(self) -> bool:
        """Whether it has had no lease yet, and has no answers of an earlier link to bring."""
        return self._state is State.JOINING and not self._earlier

    async def run(self, prepare: Prepare) -> Departure | None:
        """Serve until the end. None: the coordinator stops and may come back.

        Raises LinkLost, Refused, RunFailed, RemoteError, UsageError (its memory limit holds less than the leases of
        this run), and whatever ``prepare`` raises.
        """
        departure: Departure | None = None
        try:
            departure = await self._serve(prepare)
        except W5xdeError as error:
            self.error = error
            if not isinstance(error, LinkLost | RemoteError):
                raise
        finally:
            await self._stop()
        if departure is None and self._failure is not None and not self._may_be_the_end:
            raise self._failure  # also where the link had ended before: another one would not mend it
        if self.error is not None:
            raise self.error
        return departure

    async def _serve(self, prepare: Prepare) -> Departure | None:
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [
                    tasks.create_task(self._write(), name="write"),
                    tasks.create_task(self._beat(), name="heartbeat"),
                    tasks.create_task(self._watch_child(), name="child"),
                ]
                try:
                    return await self._read(await self._prepare(prepare))
                except Dismissed as dismissed:
                    return await self._dismissed(dismissed.bye)
                except OverMemoryLimit as error:
                    raise await self._too_small(error) from None
                finally:
                    for task in helpers:
                        task.cancel()
        except BaseExceptionGroup as group:
            if self._bye is not None and (self._failure is None or self._may_be_the_end):
                return self._goodbye(self._bye)  # the link ended before it had our answer
            # What broke the compute thread ended the link; the lost link is only what follows from it.
            raise self._failure or _first(group) from None

    async def _write(self) -> None:
        try:
            await self._outbox.run()
        except LinkLost:
            if self._state is State.JOINING and not self._hearing:
                self._over = True
                await self._hear_the_last()
            raise

    async def _watch_child(self) -> None:
        """Without a lease nothing else would meet a process that is gone."""
        await self._announced.wait()
        try:
            if self._child_died is not None:
                await self._child_died()
        except ProgramRefused as error:
            self._failed(error)

    async def _hear_the_last(self) -> None:
        """While a model is built nobody reads: what the coordinator has said last may lie there still."""

        def accept(message: messages.Message, _: object) -> Sequence[memoryview]:
            raise RemoteError(f"{type(message).__name__} came with buffers, for which there is no use any more")

        with suppress(W5xdeError, TimeoutError):
            async with asyncio.timeout(_PARTING_S):
                while self._bye is None:
                    message, _, _ = await self._receive(accept)
                    self._bye = message if type(message) is messages.Bye else None

    def drain(self, reason: str, grace_s: float) -> None:
        """Ask the coordinator to let us go; after ``grace_s`` somebody calls ``leave``. Returns at once."""
        if self._drain or self._failure is not None:
            return
        self._drain, self._grace_s = reason, grace_s
        if self._state in (State.READY, State.DRAINING):
            self._outbox.post(encode(messages.Drain(reason[:200], grace_s)))

    def leave(self) -> None:
        """The grace is over: what is not finished is for others to do."""
        if self._state in (State.JOINING, State.READY, State.DRAINING):
            self._stopping = True
            if self.leases is not None:
                self.leases.stop()
            self._outbox.post(encode(messages.Bye(messages.ByeCode.LEAVING, "its grace was over")))

    async def _too_small(self, error: OverMemoryLimit) -> UsageError:
        """Say goodbye: connecting again would bring the same lease."""
        needed, limit = f"{error.nbytes / 2**20:.1f} MiB", f"{error.limit / 2**20:.1f} MiB"
        text = f"the leases of this run hold {needed} of batches at once, more than the {limit} of --memory-limit"
        await self._part(text)
        return UsageError(f"{text}; raise --memory-limit, or lower the job's microbatch_size")

    async def _prepare(self, prepare: Prepare) -> Leases:
        try:
            executor, ready = await prepare(self._hear, self._outbox)
        except Refused as error:
            await self.link.send(encode(messages.Bye(messages.ByeCode.MISMATCH, error.reason[:500])))
            raise
        except Dismissed:
            raise
        except W5xdeError as error:
            await self.link.send(encode(messages.Bye(messages.ByeCode.LEAVING, str(error)[:500])))
            raise
        self._executor = executor
        self.leases = leases = Leases(
            executor, self._thread, self._outbox, self._meter, on_failure=self._failed, on_failed=self._on_failed,
            unsent=self._earlier, must_share=self._must_share, own=self._own, seed=self.welcome.seed,
        )  # fmt: skip
        if self._stopping:
            leases.stop()
        self._outbox.post(encode(ready), sent=self._announced.set)
        self._state, self._ready_at = State.READY, self._clock()
        if self._drain:
            self._outbox.post(encode(messages.Drain(self._drain[:200], self._grace_s)))
        return leases

    async def _hear(self, accept: Accept) -> Received:
        """``_receive`` for whoever prepares. ``_beat`` heeds the coordinator's silence as long as it waits in here."""
        self._hearing = True
        try:
            return await self._next(accept)
        finally:
            self._hearing = False

    async def _next(self, accept: Accept) -> Received:
        """The next frame. They may come faster than they are read, and the program has signals to heed."""
        self._num_frames += 1
        if self._over:
            await asyncio.Event().wait()  # until this is cancelled
        if not self._num_frames % _A_TURN:
            await asyncio.sleep(0)
        return await self._receive(accept)

    def _failed(self, error: BaseException) -> None:
        """The compute thread broke off."""
        if self._failure is not None:
            return
        self._failure = error
        if self.leases is not None:
            self.leases.stop()
        if self._state is State.CLOSED:
            return  # ``run`` raises it
        if self._may_be_the_end and self.leases is not None:
            self._last_word = asyncio.get_running_loop().call_later(_WORD_S, self._give_up, error)
        elif isinstance(error, ProgramRefused | DeviceLost):
            logger.error("leaving the run reason=%s", str(error))
            self._give_up(error)
        else:
            self.link.abort()

    @property
    def _may_be_the_end(self) -> bool:
        """Whether the run's end may be why the compute thread broke off: of an island, another rank has heard of it and
        has left, or a leaf that broke the island ends the run. Then the coordinator says so."""
        of_island = self._thread.patience_s is not None
        error = self._failure
        return of_island and (isinstance(error, IslandBroken) or not isinstance(error, W5xdeError))

    def _give_up(self, error: BaseException) -> None:
        """Leave, for this process computes nothing any more."""
        if isinstance(error, W5xdeError):
            self._outbox.post(encode(messages.Bye(messages.ByeCode.LEAVING, str(error)[:500])), sent=self.link.abort)
        else:
            self.link.abort()

    async def _read(self, leases: Leases) -> Departure | None:
        def accept(message: messages.Message, specs: tuple[BufferSpec, ...]) -> Sequence[memoryview]:
            self._state = advance(WORKER, self._state, message)
            return leases.place(message, specs)

        while True:
            message, specs, _ = await self._next(accept)
            if self._failure is not None and not self._may_be_the_end:
                raise self._failure
            if type(message) is messages.Params:
                leases.params(message, specs)
            elif type(message) is messages.Lease:
                leases.lease(message)
            else:
                self._state = advance(WORKER, self._state, message)
                if type(message) is messages.Verdict:
                    leases.verdict(message)
                elif type(message) is messages.Revoke:
                    leases.revoke(message)
                elif type(message) is messages.Heartbeat:
                    self.heard = message.activity[:100]
                elif type(message) is messages.Submit:
                    leases.submit(message)
                elif type(message) is messages.Drain:
                    leases.draining()
                elif type(message) is messages.Refusal:
                    raise refused(message)
                elif type(message) is messages.Bye:
                    return await self._dismissed(message)

    async def _dismissed(self, bye: messages.Bye) -> Departure | None:
        """Let the coordinator know that its last message was heard: it waits for nobody who has heard it."""
        self._bye = bye
        await self._part("heard")
        return self._goodbye(bye)

    async def _part(self, reason: str) -> None:
        """Our own last message; nobody waits long for it to leave."""
        said = asyncio.Event()
        self._outbox.post(encode(messages.Bye(messages.ByeCode.LEAVING, reason)), sent=said.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(_PARTING_S):
                await said.wait()

    def _goodbye(self, bye: messages.Bye) -> Departure | None:
        if bye.code == messages.ByeCode.FINISHED:
            return Departure.FINISHED
        if bye.code == messages.ByeCode.LEAVING or self._drain:
            return Departure.DRAINED
        if bye.code == messages.ByeCode.STOPPING:
            if self.ends_with_coordinator:
                return Departure.DRAINED
            logger.warning("the coordinator ends the link, joining again once it is there reason=%s", bye.reason[:300])
            return None
        raise RunFailed(bye.reason[:1000])

    def _activity(self) -> str:
        if self.leases is not None:
            return self.leases.activity
        return (self._own.activity if self._own is not None else "") or "building the model"

    async def _beat(self) -> None:
        """Say that we live, and notice when the coordinator does not."""
        beat_s, silence_s = self.welcome.heartbeat_s, self.welcome.silence_s
        said = told = since = self._clock()
        told_speed = False
        while True:
            await asyncio.sleep(min(beat_s, 1.0))
            now = self._clock()
            if self._outbox.idle and now - said >= beat_s * 0.99:
                self._outbox.post(encode(messages.Heartbeat(self._activity())))
                said = now
            leaf_s = 0.0 if self.leases is None else self.leases.leaf_s
            if (
                self._executor is not None
                and self._announced.is_set()  # it would overtake READY
                and self._state in (State.READY, State.DRAINING)
                and (now - told >= beat_s * 0.99 or bool(leaf_s) > told_speed)
            ):
                # Before the results that wait: on a slow line a gradient takes minutes.
                self._outbox.post(encode(_report(self._executor, leaf_s)), first=True)
                told, told_speed = now, bool(leaf_s)
            if self.link.heard(beat_s, silence_s) or (self._state is State.JOINING and not self._hearing):
                # While the model is being built nobody reads: silence then says nothing of the coordinator.
                since = now
            elif now - since > silence_s:
                raise LinkLost(self.link.peer, f"the coordinator was silent for {now - since:.0f} s")

    async def _stop(self) -> None:
        if self._last_word is not None:
            self._last_word.cancel()
        self._state = State.CLOSED
        if self.leases is not None:
            ends = self._bye is not None and self._bye.code == messages.ByeCode.FINISHED
            # After a lost link or a broken protocol there may be another link, which wants the block.
            ends |= self.error is not None and not isinstance(self.error, LinkLost | RemoteError)
            late = asyncio.get_running_loop().call_later(_BLOCK_S, self._parted.set) if ends else None
            try:
                self.unsent = await self.leases.aclose()
            finally:
                if late is not None:
                    late.cancel()


def _report(executor: LeaseExecutor, leaf_s: float) -> messages.Report:
    times, device = os.times(), device_memory(executor.device)
    child = usage_of(executor.child)
    return messages.Report(
        host_bytes() + child.host_bytes, device.used_bytes, device.total_bytes,
        times.user + times.system + child.cpu_s, executor.flops_per_leaf, leaf_s,
    )  # fmt: skip


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that says most: not the lost link that follows from another."""
    lost, others = group.split(LinkLost)
    error: BaseException | None = others or lost
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[-1]
    assert error is not None
    return error
