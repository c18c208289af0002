"""One link after joining: leases and versions in, results out.

Reader, writer and heartbeat are tasks of one TaskGroup; forward and backward run on the worker's compute thread, which
takes from a queue while there is anything in it, so that nothing waits for the loop between two blocks. Results of a
big model leave bucket by bucket while backward goes on; those of a small one leave with their DONE, in one send.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from enum import Enum
from typing import Any

from w5xde_async.compute.block import Computing, Outcome, Task
from w5xde_async.compute.engine import LeafError
from w5xde_async.errors import LinkLost, MalformedFrame, ProgramRefused, Refused, UsageError, W5xdeError
from w5xde_async.net.link import Link
from w5xde_async.net.outbox import Outbox
from w5xde_async.params.flat import ResultVector
from w5xde_async.telemetry.memory import device_memory, host_bytes, usage_of
from w5xde_async.wire.frame import BufferSpec, encode
from w5xde_async.wire.handshake import WORKER, State, advance
from w5xde_async.wire.messages import (
    Bye,
    ByeCode,
    Done,
    Drain,
    Failed,
    Heartbeat,
    Lease,
    Message,
    Params,
    Ready,
    Refusal,
    Report,
    Result,
    Revoke,
    Verdict,
    VerdictCode,
    Welcome,
)
from w5xde_async.worker.handshake import Dismissed, refused
from w5xde_async.worker.inbox import HeldLease, Inbox, OverMemoryLimit, Version

__all__ = ["Departure", "RunFailed", "Serving"]

logger = logging.getLogger(__name__)

_PARTING_S = 1.0  # for the last message to be sent
_STALL, _STALL_S = 5.0, 1.0  # a block that takes so many times what a leaf took before, and longer than that
_LISTEN_S = 0.05  # for what came while the process stood still
_MOST_UNBEGUN = 4096
_TOGETHER_BYTES = 64 << 10  # a block's result of at most this leaves with its DONE


class Departure(Enum):
    """Why a worker's ``run`` returned."""

    FINISHED = "the run is finished"
    DRAINED = "it was asked to leave"


class RunFailed(W5xdeError):
    """The coordinator ended the run with an error. Field: ``reason``."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the coordinator ended the run: {reason}")


class Serving:
    """One link from READY to its end."""

    def __init__(
        self,
        link: Link,
        welcome: Welcome,
        compute: Executor,
        *,
        memory_limit_bytes: int,
        inline_s: float,
        parted: asyncio.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self._clock, self._wait = clock, wait
        self._parted = parted or asyncio.Event()
        self.link, self.welcome = link, welcome
        self.outbox = Outbox(link, clock=clock)
        self.leases_done = self.leases_stale = self.leases_applied = 0
        self._compute, self._limit, self._inline_s = compute, memory_limit_bytes, inline_s
        self._leaf_s = 0.0  # seconds a leaf, by the last block: what it says of inline blocks
        self._paced_s = 0.0  # the same, for the compute thread's own use
        self._state = State.JOINING
        self._activity = "building the model"
        self._queue: deque[HeldLease | Version | Message] = deque()
        self._thread: asyncio.Future[None] | None = None
        self._revoked: set[int] = set()
        self._unbegun: set[int] = set()  # given back before they were begun; until their verdict is here
        self._computing = 0  # the lease that the compute thread is at
        self._stopping = False
        self._drain = ""
        self._grace_s = 0.0
        self._hurry: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None
        self._flops_per_leaf: float | None = None  # None: not counted yet
        self._idle_since = self._clock()
        self._bye: Bye | None = None  # the coordinator's last message
        self.heard = ""  #: what the coordinator said that it does, last

    async def run(self, prepare: Callable[[], Awaitable[tuple[Computing, Ready]]]) -> Departure | None:
        """Serve until the end. None: the coordinator stops and may come back.

        Raises LinkLost, Refused, RunFailed, RemoteError, UsageError (its memory limit holds less than the leases of
        this run), and whatever ``prepare`` raises.
        """
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [
                    tasks.create_task(self.outbox.run(), name="write"),
                    tasks.create_task(self._beat(), name="heartbeat"),
                ]
                try:
                    await self._prepare(prepare)
                    return await self._read()
                except Dismissed as dismissed:
                    return await self._dismissed(dismissed.bye)
                except OverMemoryLimit as error:
                    raise await self._too_small(error) from None
                finally:
                    for task in helpers:
                        task.cancel()
        except BaseExceptionGroup as group:
            if self._bye is not None and self._failure is None:
                return self._goodbye(self._bye)  # the link ended before it had our answer
            # What broke the compute thread ended the link; the lost link is only what follows from it.
            raise self._failure or _first(group) from None
        finally:
            await self._stop()

    def drain(self, reason: str, grace_s: float) -> None:
        """Ask the coordinator to let us go; after ``grace_s`` go without being let. Returns at once."""
        if self._drain:
            return
        self._drain, self._grace_s = reason, grace_s
        self._hurry = asyncio.get_running_loop().call_later(grace_s, self._leave)
        if self._state in (State.READY, State.DRAINING):
            self.outbox.post(encode(Drain(reason[:200], grace_s)))

    def _leave(self) -> None:
        """The grace is over: what is not finished is for others to do."""
        if self._state in (State.JOINING, State.READY, State.DRAINING):
            self._stopping = True
            self.outbox.post(encode(Bye(ByeCode.LEAVING, "its grace was over")))
        self._parted.set()

    async def _too_small(self, error: OverMemoryLimit) -> UsageError:
        """Say goodbye: connecting again would bring the same lease."""
        needed, limit = f"{error.nbytes / 2**20:.1f} MiB", f"{error.limit / 2**20:.1f} MiB"
        text = f"the leases of this run hold {needed} of batches at once, more than the {limit} of --memory-limit"
        await self._part(text)
        return UsageError(f"{text}; raise --memory-limit, or lower the job's microbatch_size")

    async def _prepare(self, prepare: Callable[[], Awaitable[tuple[Computing, Ready]]]) -> None:
        try:
            engine, ready = await prepare()
        except Refused as error:
            await self.link.send(encode(Bye(ByeCode.MISMATCH, error.reason[:500])))
            raise
        except Dismissed:
            raise
        except W5xdeError as error:
            await self.link.send(encode(Bye(ByeCode.LEAVING, str(error)[:500])))
            raise
        layout = engine.layout
        self._engine = engine
        self._take_up(engine)
        self._together = layout.vector_bytes <= _TOGETHER_BYTES
        self._specs = [
            BufferSpec(
                "",
                str(layout.groups[bucket.group].result_dtype).removeprefix("torch."),
                (bucket.numel,),
                "raw",
                layout.result_nbytes(bucket),
            )
            for bucket in layout.result_buckets
        ]
        self._activity = "waiting for work"
        self.outbox.post(encode(ready))
        self._idle_since = self._clock()
        self._state = State.READY
        if self._drain:
            self.outbox.post(encode(Drain(self._drain[:200], self._grace_s)))

    def _take_up(self, engine: Computing) -> None:
        self._inbox = Inbox(engine.layout, engine.incoming, self._limit)

    # -- in ------------------------------------------------------------------------------------------------

    async def _read(self) -> Departure | None:
        while True:
            message, specs, _ = await self.link.recv(self._accept)
            if self._failure is not None:
                raise self._failure
            if type(message) is Params:
                if bool(specs) != bool(message.num_buckets):
                    raise MalformedFrame(f"PARAMS of {message.num_buckets} buckets came with {len(specs)} buffers")
                version = self._inbox.params(message)
                if version is not None:
                    self._queue.append(version)
                    self._feed()
            elif type(message) is Lease:
                self._inbox.lease(message)
                self._feed()
            else:
                self._state = advance(WORKER, self._state, message)
                if type(message) is Verdict:
                    if message.code == VerdictCode.APPLIED:
                        self.leases_applied += len(message.leases)
                    else:
                        wasted = sorted(set(message.leases) - self._unbegun)
                        self.leases_stale += len(wasted)
                        if wasted:
                            logger.info("leases not applied leases=%s reason=%s", wasted[:8], message.reason[:200])
                    self._unbegun.difference_update(message.leases)
                    self._other(message)
                elif type(message) is Revoke:
                    self._revoke(message.lease)
                elif type(message) is Heartbeat:
                    self.heard = "".join(filter(str.isprintable, message.activity[:100]))
                elif type(message) is Drain:
                    self._activity = "draining"
                elif type(message) is Refusal:
                    raise refused(message)
                elif type(message) is Bye:
                    return await self._dismissed(message)
                else:
                    self._other(message)

    def _other(self, message: Message) -> None:
        """What the plain synchronous rule has no use for."""

    def _feed_from_inbox(self) -> None:
        self._queue.extend(self._inbox.take())

    def _accept(self, message: Message, specs: tuple[BufferSpec, ...]) -> Sequence[memoryview]:
        self._state = advance(WORKER, self._state, message)
        if type(message) is Params:
            return self._inbox.place_params(message, specs)
        if type(message) is Lease:
            return self._inbox.place_lease(message, specs)
        raise MalformedFrame(f"{type(message).__name__} came with buffers")

    async def _dismissed(self, bye: Bye) -> Departure | None:
        """Let the coordinator know that its last message was heard: it waits for nobody who has heard it."""
        self._bye = bye
        await self._part("heard")
        return self._goodbye(bye)

    async def _part(self, reason: str) -> None:
        """Our own last message; nobody waits long for it to leave."""
        said = asyncio.Event()
        self.outbox.post(encode(Bye(ByeCode.LEAVING, reason)), sent=said.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(_PARTING_S):
                await said.wait()

    def _goodbye(self, bye: Bye) -> Departure | None:
        if bye.code == ByeCode.FINISHED:
            return Departure.FINISHED
        if bye.code == ByeCode.LEAVING or self._drain:
            return Departure.DRAINED
        if bye.code == ByeCode.STOPPING:
            logger.warning("coordinator stops, waiting for it to come back reason=%s", bye.reason[:300])
            return None
        raise RunFailed(bye.reason[:1000])

    def _revoke(self, lease: int) -> None:
        if self._inbox.revoke(lease):
            self._send_nothing(lease)
        elif lease == self._computing or lease in self._queued():
            self._revoked.add(lease)  # otherwise its DONE is on its way

    # -- computing -----------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Queue what can be computed now and see that the compute thread is at it."""
        self._feed_from_inbox()
        if not self._queue or self._thread is not None or self._stopping:
            return
        if 0 < self._expected_s() <= self._inline_s:
            try:
                self._work()
            except Exception as error:
                self._failure = error
                self.link.abort()
        else:
            self._thread = self._loop.run_in_executor(self._compute, self._work)
            self._thread.add_done_callback(self._worked)

    def _queued(self) -> set[int]:
        """Leases in the queue. Looked up in a copy, made in one piece: the compute thread takes from the queue."""
        return {item.message.lease for item in self._queue.copy() if type(item) is HeldLease}

    def _expected_s(self) -> float:
        """How long what is queued will take, by the last block; 0 where that is not known or no lease is queued.

        For the loop, while no compute thread is at the queue.
        """
        leaves = sum(len(item.message.samples) for item in self._queue if type(item) is HeldLease)
        return leaves * self._leaf_s

    def _soon(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call on the loop's thread: at once from there, else as soon as it can."""
        if threading.get_ident() == self._loop_thread:
            call(*arguments)
        else:
            self._loop.call_soon_threadsafe(call, *arguments)

    def _worked(self, thread: asyncio.Future[None]) -> None:
        self._thread = None
        error = None if thread.cancelled() else thread.exception()
        if isinstance(error, ProgramRefused):
            self._failure = error
            logger.error("leaving the run reason=%s", error)
            self.outbox.post(encode(Bye(ByeCode.LEAVING, str(error)[:500])), sent=self.link.abort)
        elif error is not None:
            self._failure = error
            self.link.abort()
        else:
            self._feed()

    def _work(self) -> None:
        """On the compute thread: compute until the queue is empty."""
        version = Version(-1, 1.0, ())
        while not self._stopping:
            try:
                item = self._queue.popleft()
            except IndexError:
                return
            if type(item) is Version:
                self._engine.load(item.buckets)
                self._version = version = item
                continue
            assert type(item) is HeldLease
            lease = item.message
            if version.number < 0:
                version = self._version
            if lease.lease in self._revoked:
                self._soon(self._send_nothing, lease.lease)
                continue
            if lease.version != version.number:
                self._soon(self._inbox.end, lease.lease)
                continue
            self._block(item, version.loss_scale)

    def _block(self, item: HeldLease, loss_scale: float) -> None:
        lease = item.message
        self._computing = lease.lease
        began = self._clock()
        self._activity = f"step {lease.step}, leaves {lease.start} to {lease.start + len(lease.samples) - 1}"
        task = Task(
            step=lease.step,
            start=lease.start,
            samples=lease.samples,
            loss_scale=loss_scale,
            structure=lease.structure,
            packed=lease.packed,
            tensors=item.tensors,
        )
        together: list[tuple[int, ResultVector]] = []

        def emit(bucket: int, vector: ResultVector) -> None:
            if self._together:
                together.append((bucket, vector))
            else:
                self._soon(self._send_result, lease.lease, bucket, vector)

        try:
            if self._flops_per_leaf is None:
                outcome, flops = self._engine.counted(task, emit)
                self._flops_per_leaf = flops / len(lease.samples)
            else:
                outcome = self._engine.compute(task, emit)
        except LeafError as error:
            self._soon(self._send_failed, lease.lease, error)
        else:
            wait_s = began - self._idle_since
            self._soon(self._send_done, lease.lease, outcome, wait_s, together)
        self._leaf_s = self._ended(began, len(lease.samples))

    def _ended(self, began: float, leaves: int) -> float:
        """A block is over: seconds a leaf. On the compute thread, after one that took so long that the process may have
        been stopped, the loop reads first: what is queued was perhaps given to others meanwhile."""
        self._idle_since = self._clock()
        self._activity = "waiting for work"
        before_s, taken_s = self._paced_s, self._idle_since - began
        self._paced_s = taken_s / leaves
        if self._paced_s > _STALL * before_s > 0.0 and taken_s > _STALL_S:
            if threading.get_ident() != self._loop_thread:
                read = threading.Event()
                self._loop.call_soon_threadsafe(self._loop.call_later, _LISTEN_S, read.set)
                self._wait(read, _STALL_S)
        return self._paced_s

    # -- out -----------------------------------------------------------------------------------------------

    def _send_result(self, lease: int, bucket: int, vector: ResultVector) -> None:
        if lease not in self._revoked:
            self.outbox.post(encode(Result(lease, bucket), [(self._specs[bucket], vector.bucket_bytes[bucket])]))

    def _send_done(self, lease: int, outcome: Outcome, wait_s: float, together: list[tuple[int, ResultVector]]) -> None:
        engine = self._engine
        self._inbox.end(lease)

        def release() -> None:
            for vector in outcome.vectors:
                engine.release(vector)

        if lease in self._revoked:
            # The work was in vain; the coordinator is told, since it may wonder whether we are still here.
            self._revoked.discard(lease)
            together = []
        for bucket, vector in together:
            self._send_result(lease, bucket, vector)
        done = Done(
            lease, outcome.losses, outcome.metric_names, outcome.metrics, outcome.untouched, outcome.absent,
            outcome.splits, outcome.compute_s, max(wait_s, 0.0),
        )  # fmt: skip
        self.outbox.post(encode(done), sent=release)
        self.leases_done += 1

    def _send_nothing(self, lease: int) -> None:
        """Answer a REVOKE of a lease that was not begun."""
        self._inbox.end(lease)
        self._revoked.discard(lease)
        if len(self._unbegun) < _MOST_UNBEGUN:
            self._unbegun.add(lease)
        self.outbox.post(encode(Done(lease, (), (), (), (), (), 0, 0.0, 0.0)))

    def _send_failed(self, lease: int, error: LeafError) -> None:
        self._inbox.end(lease)
        self._revoked.discard(lease)
        logger.error("leaf failed leaf=%d error=%s", error.leaf, error.error)

        def release() -> None:
            for vector in error.vectors:
                self._engine.release(vector)

        self.outbox.post(encode(Failed(lease, error.leaf, error.error, error.traceback)), sent=release)

    async def _beat(self) -> None:
        """Say that we live, and notice when the coordinator does not."""
        beat_s, silence_s = self.welcome.heartbeat_s, self.welcome.silence_s
        seen, since = -1, self._clock()
        said = told = since
        while True:
            await asyncio.sleep(min(beat_s, 1.0))
            now = self._clock()
            if self.outbox.idle and now - said >= beat_s * 0.99:
                self.outbox.post(encode(Heartbeat(self._activity)))
                said = now
            if self._state in (State.READY, State.DRAINING) and now - told >= beat_s * 0.99:
                self.outbox.post(encode(self._report()))
                told = now
            if self._state is State.JOINING or self.link.bytes_received != seen:
                # While the model is being built nobody reads: silence then says nothing of the coordinator.
                seen, since = self.link.bytes_received, now
            elif now - since > silence_s:
                raise LinkLost(self.link.peer, f"the coordinator was silent for {now - since:.0f} s")

    def _report(self) -> Report:
        times, device = os.times(), device_memory(self._engine.device)
        child = usage_of(self._engine.child)
        return Report(
            host_bytes() + child.host_bytes, device.used_bytes, device.total_bytes,
            times.user + times.system + child.cpu_s, self._flops_per_leaf or 0.0,
        )  # fmt: skip

    async def _stop(self) -> None:
        """Wait for the block under way: a thread cannot be cancelled, and the model is not ours until it ends."""
        self._stopping = True
        if self._hurry is not None:
            self._hurry.cancel()
        while self._thread is not None:
            await asyncio.wait([self._thread])


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that says most: not the lost link that follows from another."""
    errors: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(error.exceptions)
        else:
            errors.append(error)
    return min(errors, key=lambda error: isinstance(error, LinkLost))
