"""The queue of an island's rank that is not the head: things are done in the order that the head announces."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from w5xde_async.compute.engine import LeafError
from w5xde_async.errors import MalformedFrame
from w5xde_async.wire.messages import Submit, Verdict
from w5xde_async.worker.connection.compute_queue import ComputeThread, Item, raise_if_last
from w5xde_async.worker.executors.executor import HeldLease, Version
from w5xde_async.worker.executors.island import IslandExecutor, Turn

if TYPE_CHECKING:
    from w5xde_async.worker.connection.leases import Leases


_LOOK_S = 60.0  # any: it is told of changes
_Item = TypeVar("_Item", HeldLease, Submit)


class _Stopped(Exception):
    """The link has ended: what the head announced will not come any more."""


class FollowerQueue:
    """As ``ComputeQueue``; the compute thread is at it from the beginning, and waits for the head or for the link."""

    def __init__(
        self, executor: IslandExecutor, thread: ComputeThread, answers: Leases, *,
        on_failure: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self._executor, self._thread, self._answers, self._on_failure = executor, thread, answers, on_failure
        self._loop = asyncio.get_running_loop()
        self._lock, self._changed = threading.Lock(), threading.Event()
        self._versions: dict[int, Version] = {}  # that came and were not loaded: bounded by what may wait, one a step
        self._leases: dict[int, HeldLease] = {}
        self._asked: dict[int, Submit] = {}  # by lease
        self._verdicts: deque[Verdict] = deque()
        self._stopping = False
        self._idle_since = thread.clock()
        self.activity = "waiting for the head"
        self.computing = 0
        self._running = self._loop.run_in_executor(thread.pool, self._follow)
        self._running.add_done_callback(self._ended)

    @property
    def ended(self) -> bool:
        """Whether the compute thread is done."""
        return self._running.done()

    def put(self, items: Iterable[Item]) -> None:
        """Keep these until the head comes to them."""
        with self._lock:
            for item in items:
                if isinstance(item, Version):
                    self._versions[item.number] = item
                elif isinstance(item, HeldLease):
                    self._leases[item.message.lease] = item
                elif isinstance(item, Submit):
                    self._asked[item.lease] = item
                else:
                    self._verdicts.append(item)
        self._changed.set()

    def holds(self, lease: int) -> bool:
        """Whether a lease waits."""
        return lease in self._leases

    def stop(self) -> None:
        """Wait for nothing more that is to come."""
        self._stopping = True
        self._changed.set()

    async def aclose(self) -> None:
        """Wait for the block under way, and not for a head that is gone: see ``ComputeThread.patience_s``."""
        self.stop()
        await asyncio.wait([self._running], timeout=self._thread.patience_s)
        while self._verdicts and self._running.done():  # what they settle may outlive this link
            verdict = self._verdicts.popleft()
            await self._loop.run_in_executor(self._thread.pool, self._executor.settle, verdict)

    def _ended(self, running: asyncio.Future[None]) -> None:
        error = None if running.cancelled() else running.exception()
        if error is not None and not isinstance(error, _Stopped):
            self._on_failure(error)

    # -- on the compute thread -------------------------------------------------------------------------------

    def _follow(self) -> None:
        while True:
            turn, number = self._executor.hear()
            if turn == Turn.LOAD:
                self._load(number)
            elif turn == Turn.COMPUTE:
                self._compute(self._await(self._leases, number))
            elif turn == Turn.SUBMIT:
                self._submit(self._await(self._asked, number))
            elif turn == Turn.SETTLE:
                self._wait_for(lambda: bool(self._verdicts))
                self._executor.settle(self._verdicts.popleft())
            elif turn == Turn.END:
                return
            else:
                raise MalformedFrame(f"the head announced {turn}")

    def _load(self, number: int) -> None:
        """Take up a version, with those that the head's link has overtaken. One that this link has overtaken will not
        come: a newer one is there then, nobody waits for results of the older, and nothing of it is loaded here."""
        self._wait_for(lambda: any(version >= number for version in self._versions))
        with self._lock:
            come = [self._versions.pop(version) for version in sorted(self._versions) if version <= number]
        version = come[-1] if come else Version(number, 1.0, ())
        buckets = sorted({bucket for one in come for bucket in one.buckets})
        updates = tuple(update for one in come for update in one.updates)
        self._executor.load(Version(number, version.loss_scale, tuple(buckets), updates))
        if self._executor.exact:
            self._void(lambda held: held.message.version < number)

    def _void(self, is_void: Callable[[HeldLease], bool]) -> None:
        """Leases that the head will not come to."""
        with self._lock:
            over = [lease for lease, held in self._leases.items() if is_void(held)]
            for lease in over:
                del self._leases[lease]
        for lease in over:
            self._soon(self._answers.void, lease)

    def _submit(self, asked: Submit) -> None:
        self.activity = "submitting"
        self._soon(self._answers.submitted, asked, self._executor.submit(asked))
        self._idle_since = self._thread.clock()
        self.activity = "waiting for the head"

    def _compute(self, held: HeldLease) -> None:
        lease, began = held.message, self._thread.clock()
        if not self._executor.exact:  # they are computed in their order: the head was told that it need not
            self._void(lambda other: other.message.lease < lease.lease)
        self.computing = lease.lease
        self.activity = f"step {lease.step + 1}, leaves {lease.start} to {lease.start + len(lease.samples) - 1}"
        try:
            computed = self._executor.compute(held, partial(self._soon, self._answers.result, lease.lease))
        except LeafError as error:
            self._soon(self._answers.failed, lease.lease, error)
            raise_if_last(error, lease.step, self._executor)
        else:
            self._soon(self._answers.done, held, computed, max(began - self._idle_since, 0.0))
        self._idle_since = self._thread.clock()
        self.activity = "waiting for the head"

    def _await(self, coming: dict[int, _Item], number: int) -> _Item:
        self._wait_for(lambda: number in coming)
        return coming.pop(number)

    def _wait_for(self, is_there: Callable[[], bool]) -> None:
        """Raises _Stopped where it will not come."""
        while True:
            self._changed.clear()  # before the look
            with self._lock:
                if is_there():
                    return
            if self._stopping:
                raise _Stopped
            self._thread.wait(self._changed, _LOOK_S)

    def _soon(self, call: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(self._answer, call, arguments)

    def _answer(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            call(*arguments)
        except Exception as error:
            self._on_failure(error)
