"""The queue between the event loop and the compute thread.

The thread takes from the queue while there is anything in it, so that nothing waits for the loop between two blocks.
Blocks that take less time than the way to a thread and back are computed on the loop itself.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from w5xde_async.compute.engine import LeafError
from w5xde_async.errors import DeviceLost, IslandBroken, MalformedFrame, headline
from w5xde_async.parallel.engine import LoneLeafError
from w5xde_async.randomness import Claim
from w5xde_async.wire.messages import Submit, Verdict
from w5xde_async.worker.executors.executor import HeldLease, LeaseExecutor, Version

if TYPE_CHECKING:
    from w5xde_async.worker.connection.leases import Leases

_STALL, _STALL_S = 5.0, 1.0  # a block that takes so many times what a leaf took before, and longer than that
_LISTEN_S = 0.05  # for what came while the process stood still
_IDLE, _FULL = "waiting for work", "waiting for results to leave"

Item = HeldLease | Version | Submit | Verdict


@dataclass(frozen=True, kw_only=True)
class ComputeThread:
    """The one thread that computes, and how time passes for it.

    pool      one thread; it outlives connections
    inline_s  blocks expected to take no longer are computed on the event loop; 0: none are
    clock     as ``Runtime.clock``
    wait      as ``Runtime.wait``
    patience_s  at the end of a link, how long to wait for the block under way: an island's may never end once another
                rank is gone; None: until it ends
    """

    pool: Executor
    inline_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait
    patience_s: float | None = None


def raise_if_last(error: LeafError, step: int, executor: LeaseExecutor) -> None:
    """A leaf of ``step`` has failed. Raises DeviceLost, IslandBroken where this process computes nothing after it."""
    if error.device_lost:
        raise DeviceLost(str(executor.device), error.error) from error
    if isinstance(error, LoneLeafError):
        raise IslandBroken(step, error.leaf, headline(error.traceback)) from error


class ComputeQueue:
    """Work for one executor, in order; what comes of it is told to ``answers``. All methods belong to the event loop.

    ``on_failure`` is called on the loop with what an executor raised; nothing more should be put into the queue then.
    """

    def __init__(
        self,
        executor: LeaseExecutor,
        thread: ComputeThread,
        answers: Leases,
        *,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._executor, self._thread, self._answers, self._on_failure = executor, thread, answers, on_failure
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._items: deque[Item] = deque()
        self._running: asyncio.Future[None] | None = None
        self._stopping = False
        self._leaf_s = 0.0  # seconds a leaf, by the last block
        self._idle_since = thread.clock()
        self._ahead: set[int] = set()  # versions in the queue that were loaded before their turn, by id
        self.activity = _IDLE  #: what the thread is doing, for people; until it does something else
        self.computing = 0  #: the lease that the thread is at, or was at last

    @property
    def ended(self) -> bool:
        """Whether no compute thread is at the queue."""
        return self._running is None

    def put(self, items: Iterable[Item]) -> None:
        """Queue these and see that the compute thread is at it."""
        self._items.extend(items)
        self._run()

    def holds(self, lease: int) -> bool:
        """Whether a lease is queued. Any copy is made in one piece, while the compute thread takes from the queue."""
        return any(type(item) is HeldLease and item.message.lease == lease for item in self._items.copy())

    def stop(self) -> None:
        """Begin no further block."""
        self._stopping = True

    async def aclose(self) -> None:
        """Wait for the block under way: a thread cannot be cancelled, and the model is not ours until it ends."""
        self.stop()
        until = None if self._thread.patience_s is None else self._thread.clock() + self._thread.patience_s
        while self._running is not None:
            left_s = None if until is None else until - self._thread.clock()
            if left_s is not None and left_s <= 0:
                return
            await asyncio.wait([self._running], timeout=left_s)
        for item in self._items:
            if type(item) is Verdict:  # what it settles may outlive this link
                await self._loop.run_in_executor(self._thread.pool, self._executor.settle, item)

    # -- on the event loop -----------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._running is not None or self._stopping or not self._items or self._is_full():
            return
        if 0 < self._expected_s() <= self._thread.inline_s:
            with Claim() as mine:  # else the loop would wait for whoever reads samples that draw
                if mine:
                    try:
                        self._work()
                    except Exception as error:
                        self._on_failure(error)
                    return
        self._running = self._loop.run_in_executor(self._thread.pool, self._work)
        self._running.add_done_callback(self._worked)

    def _is_full(self) -> bool:
        """Whether the first thing in the queue is a lease that has to wait until results have left.

        The thread waits for them in no other way: it ends, and the queue is run again. Any thread.
        """
        return type(self._items[0]) is HeldLease and not self._executor.has_room

    def _expected_s(self) -> float:
        """How long what is queued will take, by the last block; 0 where that is not known or no lease is queued.

        Only while no compute thread is at the queue.
        """
        return self._leaf_s * sum(len(item.message.samples) for item in self._items if type(item) is HeldLease)

    def _worked(self, running: asyncio.Future[None]) -> None:
        self._running = None
        error = None if running.cancelled() else running.exception()
        if error is not None:
            self._on_failure(error)
        else:
            self._run()

    def _soon(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call on the loop's thread: at once from there, else as soon as it can."""
        if threading.get_ident() == self._loop_thread:
            call(*arguments)
        else:
            self._loop.call_soon_threadsafe(self._answer, call, arguments)

    def _answer(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            call(*arguments)
        except Exception as error:  # an answer that cannot be given: nobody would hear of the lease again
            self._on_failure(error)

    # -- on the compute thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        """Work until the queue is empty, or full of what cannot be computed yet."""
        executor = self._executor
        while self._items and not self._stopping:
            if self._is_full():
                self.activity = _FULL
                return
            item = self._items.popleft()
            if isinstance(item, HeldLease):
                self._lease(item)
            elif isinstance(item, Version):
                if id(item) in self._ahead:
                    self._ahead.discard(id(item))
                else:
                    executor.load(item)
            elif isinstance(item, Verdict):
                executor.settle(item)
            else:
                self._submit(item)

    def _lease(self, held: HeldLease) -> None:
        executor, lease = self._executor, held.message
        if executor.newest_first:
            self._load_ahead()
        if self._answers.is_revoked(lease.lease):
            self._soon(self._answers.not_begun, lease.lease)
        elif executor.version < lease.version:
            raise MalformedFrame(f"lease {lease.lease} needs version {lease.version}")
        elif executor.exact and executor.version != lease.version:
            self._soon(self._answers.void, lease.lease)
        else:
            self._block(held)

    def _load_ahead(self) -> None:
        """Load the versions that came after a lease: what is computed at an older one than need be is staler."""
        for item in self._items.copy():  # the queue itself is also put into on the event loop
            if type(item) is Version and id(item) not in self._ahead:
                self._executor.load(item)
                self._ahead.add(id(item))

    def _block(self, held: HeldLease) -> None:
        lease, answers = held.message, self._answers
        self.computing = lease.lease
        began = self._thread.clock()
        self.activity = f"step {lease.step + 1}, leaves {lease.start} to {lease.start + len(lease.samples) - 1}"
        try:
            computed = self._executor.compute(held, partial(self._soon, answers.result, lease.lease))
        except LeafError as error:
            self._soon(answers.failed, lease.lease, error)
            raise_if_last(error, lease.step, self._executor)
        else:
            self._soon(answers.done, held, computed, max(began - self._idle_since, 0.0))
        self._ended(began, len(lease.samples))

    def _submit(self, asked: Submit) -> None:
        self.activity = "submitting"
        self._soon(self._answers.submitted, asked, self._executor.submit(asked))
        self._idle_since = self._thread.clock()
        self.activity = _IDLE

    def _ended(self, began: float, leaves: int) -> None:
        """A block is over. After one that took so long that the process may have been stopped, the loop reads first:
        what is queued was perhaps given to others meanwhile."""
        self._idle_since = self._thread.clock()
        self.activity = _IDLE
        before_s, taken_s = self._leaf_s, self._idle_since - began
        self._leaf_s = taken_s / leaves
        if self._leaf_s > _STALL * before_s > 0.0 and taken_s > _STALL_S:
            if threading.get_ident() != self._loop_thread:
                read = threading.Event()
                self._loop.call_soon_threadsafe(self._loop.call_later, _LISTEN_S, read.set)
                self._thread.wait(read, _STALL_S)
