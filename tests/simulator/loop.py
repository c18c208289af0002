"""Virtual time: an event loop whose clock jumps to the next timer, and the machines' processes that live in it.

Every callback belongs to the process (``Host``) in whose context it was scheduled. A paused process' callbacks wait
until it is resumed, a dead one's are dropped; what the network delivers belongs to nobody and goes on. The same seed
gives the same order of callbacks: nothing here depends on addresses, hashes of strings or real time.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from types import CoroutineType
from typing import Any

from tests.simulator.disk import HostFilesystem

from w5xde_async.randomness import _TURN

__all__ = [
    "HOST", "ComputeExecutor", "Deadlock", "Host", "InlineExecutor", "Killed", "Livelock", "TimeUp", "VirtualLoop",
]  # fmt: skip

_MOST_TURNS = 200_000  # of the loop, without virtual time going on

HOST: contextvars.ContextVar[Host | None] = contextvars.ContextVar("host", default=None)


class Killed(BaseException):
    """Unwinds whatever a process was doing when it died."""


class Deadlock(Exception):
    """Nothing is ready and no timer is set."""


class Livelock(Exception):
    """Much goes on and no time passes."""


class TimeUp(Exception):
    """The virtual time that the run may take is over."""


class _Task(asyncio.Task):  # type: ignore[type-arg]
    """A task whose hash is its number: sets of tasks (TaskGroup) have the same order in every run."""

    number = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _Task.number += 1
        self.number = _Task.number
        super().__init__(*args, **kwargs)
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class Host:
    """One process on one machine. ``machine`` outlives it; ``offset_s`` is how far its clocks are off."""

    RUNNING, PAUSED, DEAD = 0, 1, 2

    def __init__(self, loop: VirtualLoop, name: str, machine: str, *, seed: str, offset_s: float = 0.0) -> None:
        self.loop, self.name, self.machine, self.offset_s = loop, name, machine, offset_s
        self.state = Host.RUNNING
        self.held: deque[asyncio.Handle] = deque()
        self.tasks: list[asyncio.Task[Any]] = []
        self.computers: list[ComputeExecutor] = []
        self.random = random.Random(f"{seed}/{name}")
        self.ended: asyncio.Future[Any] = loop.create_future()
        self.filesystem: HostFilesystem | None = None
        self.leaf_s = 0.1  # a leaf's virtual seconds
        self.slow_until = 0.0
        self.deaf_until = 0.0  # its programs read nothing until then
        self.pauses_at_joining_s = 0.0  # it reads nothing for that long once it has joined
        self.failing_leaf = False  # the job's code raises at the next leaf
        self.cursed = -1  # and at this sample, on workers
        self.hangs = False  # its compute thread comes to no end; the rest of it lives
        self.lies = 0  # its clock says what it likes, in one of several ways
        self.broken = False  # what it computes is not a number
        self.when_broken: Callable[[], object] | None = None  # called in its compute thread, the first time
        self.lied = False  # it did so at some time: what it says of a duration may be absurd ever after
        self.result: Any = None  # a coordinator's
        self.term = 0  # a coordinator's
        self.terms_served: set[int] = set()  # a worker's
        self.service: Any = None
        self.of_island = False  # it is one rank of a worker: when its link ends, or another rank, it ends
        self.superseded = False  # another coordinator has taken over
        self.replaced: asyncio.Future[None] = loop.create_future()

    @property
    def dead(self) -> bool:
        return self.state == Host.DEAD

    def clock(self) -> float:
        computing = ComputeExecutor.current()
        if computing is not None:
            computing.pay()
        now = self.loop.now + self.offset_s
        return _LIES[self.lies](now) if self.lies and computing is not None else now

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        context = contextvars.Context()
        context.run(HOST.set, self)
        return self.loop.create_task(work, name=name, context=context)

    def main(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run ``work``; its result or exception becomes ``ended``'s, unless the process dies first."""
        task = self.spawn(work, self.name)

        def done(task: asyncio.Task[Any]) -> None:
            if not self.ended.done():
                error = None if task.cancelled() else task.exception()
                self.ended.set_result(error if error is not None else task.result() if not task.cancelled() else None)

        task.add_done_callback(done, context=contextvars.Context())

    def pause(self) -> None:
        if self.state == Host.RUNNING:
            self.state = Host.PAUSED

    def resume(self) -> None:
        if self.state == Host.PAUSED:
            self.state = Host.RUNNING
            self.loop.requeue(self.held)
            self.held.clear()

    def die(self) -> None:
        """Stop here and now: no clean-up runs."""
        self.state = Host.DEAD
        self.held.clear()
        if not self.ended.done():
            self.ended.set_result(Killed())

    def left_behind(self) -> list[str]:
        return [task.get_name() for task in self.tasks if not task.done()]

    def discard(self) -> None:
        """Free what a dead process left: coroutines are closed, threads ended. Its effects reach nobody any more."""
        for computer in self.computers:
            computer.discard()
        for task in self.tasks:
            _close(task)
        if self.filesystem is not None:
            self.filesystem.discard()


def _close(task: asyncio.Task[Any]) -> None:
    """Unwind a task that will never run again, from within; its clean-up code may fail as it likes, or try to wait."""
    for _ in range(200):
        chain: list[Any] = [] if task.done() else [task.get_coro()]
        while chain and isinstance(chain[-1].cr_await, CoroutineType):
            chain.append(chain[-1].cr_await)
        while chain and chain[-1].cr_frame is None:
            chain.pop()
        if not chain:
            return
        with suppress(BaseException):
            chain[-1].close()


#: Clocks that tell of computing that took no time, hours, longer than there are numbers, less than none.
_LIES: tuple[Callable[[float], float], ...] = (
    lambda now: now, lambda now: 0.0, lambda now: now * 1e4, lambda now: now * 1e306, lambda now: -now,
    lambda now: float("nan"),
)  # fmt: skip


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs what is ready; with nothing ready, time jumps. Raises Deadlock, TimeUp out of ``run_until_complete``."""

    def __init__(self, *, limit_s: float = 1e6) -> None:
        super().__init__()
        self.set_debug(False)
        self.now = 0.0
        self.limit_s = limit_s
        self.tasks: list[asyncio.Task[Any]] = []  # of no process
        self._turns = 0
        self.blocking_s = 0.02  # most that a call takes in the default executor
        self.unexpected: Callable[[str], None] = lambda text: None
        self.violate: Callable[[str, str], None] = lambda kind, text: None
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.set_exception_handler(self._on_exception)

    def time(self) -> float:
        return self.now

    def _make_task(self, loop: Any, work: Any, context: contextvars.Context | None = None) -> asyncio.Task[Any]:
        task = _Task(work, loop=loop, context=context)
        host = HOST.get() if context is None else context.get(HOST)
        (self.tasks if host is None else host.tasks).append(task)
        return task

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def requeue(self, handles: deque[asyncio.Handle]) -> None:
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        if executor is None:
            executor = InlineExecutor(self, 0.0, self.blocking_s)
        return asyncio.wrap_future(executor.submit(func, *args), loop=self)

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        if not ready:
            while scheduled and scheduled[0]._cancelled:
                heapq.heappop(scheduled)._scheduled = False
            if not scheduled:
                raise Deadlock
            if scheduled[0]._when > self.now:
                self.now, self._turns = scheduled[0]._when, 0
            if self.now > self.limit_s:
                raise TimeUp
            while scheduled and scheduled[0]._when <= self.now:
                handle = heapq.heappop(scheduled)
                handle._scheduled = False
                ready.append(handle)
        self._turns += 1
        if self._turns > _MOST_TURNS:
            raise Livelock
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            host = handle._context.get(HOST)
            if host is not None and host.state:
                if host.state == Host.PAUSED:
                    host.held.append(handle)
                continue
            handle._run()

    def _on_exception(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, Killed):
            self.unexpected(f"{context.get('message')}: {type(error).__name__}: {error}")

    def close(self) -> None:
        self.set_exception_handler(lambda loop, context: None)
        for task in self.tasks:
            _close(task)
        super().close()


class InlineExecutor:
    """A thread pool whose jobs take a seeded virtual time and happen at its end, in order."""

    most_s = 0.005

    def __init__(self, loop: VirtualLoop, least_s: float = 0.0, most_s: float | None = None) -> None:
        self._loop, self._least_s, self._most_s = loop, least_s, self.most_s if most_s is None else most_s
        self._pending: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._free_at = 0.0
        host = HOST.get()
        assert host is not None
        self._host = host

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        takes = self._host.random.uniform(self._least_s, self._most_s)
        self._free_at = max(self._free_at, self._loop.now) + takes
        self._pending.append((future, lambda: call(*args, **kwargs)))
        self._loop.call_at(self._free_at, self._next)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while self._pending:
            if cancel_futures:
                self._pending.popleft()[0].cancel()
            else:
                self._next()

    def _next(self) -> None:
        if not self._pending:
            return
        future, call = self._pending.popleft()
        if not future.set_running_or_notify_cancel():
            return
        running = asyncio._get_running_loop()
        asyncio._set_running_loop(None)  # as in a thread: nothing there may think that it is on the loop
        try:
            result = call()
        except Killed:
            return
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            asyncio._set_running_loop(running)


class ComputeExecutor:
    """A worker's compute thread: a real one, which runs only while the loop stands still and sleeps in virtual time."""

    _local = threading.local()

    def __init__(self, loop: VirtualLoop) -> None:
        host = HOST.get()
        assert host is not None
        self._loop, self._host = loop, host
        host.computers.append(self)
        self._jobs: deque[tuple[Future[Any], Callable[[], Any], contextvars.Context]] = deque()
        self.debt_s = 0.0  # what it has computed and not yet slept for: see ``pay``
        self._busy = self._closed = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._sleep_s: float | None = None
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[..., Any], /, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((future, lambda: call(*args), contextvars.copy_context()))
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._step)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        running = asyncio._get_running_loop()
        asyncio._set_running_loop(None)  # whoever does not wait for the thread must not be seen to: it ends at once
        try:
            self.discard()
        finally:
            asyncio._set_running_loop(running)

    @staticmethod
    def sleep(seconds: float) -> None:
        """Called on a compute thread: let virtual time pass."""
        self: ComputeExecutor = ComputeExecutor._local.executor
        self._sleep_s = seconds
        self._back.release()
        self._go.acquire()
        if self._closed:
            raise Killed

    @staticmethod
    def current() -> ComputeExecutor | None:
        """The one whose thread this is."""
        return getattr(ComputeExecutor._local, "executor", None)

    def pay(self) -> None:
        """Let the time pass that was computed.

        Not in the midst of computing (an encoder's clock may be read there): the thread holds the random state, and
        another compute thread would wait for it in real time, which never passes here.
        """
        if _TURN._is_owned():  # type: ignore[attr-defined]
            return
        while self._host.hangs:
            self.sleep(5.0)
        if self.debt_s:
            debt, self.debt_s = self.debt_s, 0.0
            self.sleep(debt)

    @staticmethod
    def wait(event: threading.Event, most_s: float) -> bool:
        """``event.wait(most_s)``, in virtual time on a compute thread."""
        if ComputeExecutor.current() is None:
            return event.wait(most_s)
        waited = 0.0
        while not event.is_set() and waited < most_s:
            ComputeExecutor.sleep(0.01)
            waited += 0.01
        return event.is_set()

    def discard(self) -> None:
        if self._thread is not None and not self._closed:
            self._closed = True
            self._go.release()
            self._thread.join()

    def _step(self) -> None:
        """Let the thread run until it sleeps or has done its jobs."""
        if self._closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"compute {self._host.name}", daemon=True)
            self._thread.start()
        self._sleep_s = None
        self._go.release()
        self._back.acquire()
        if self._sleep_s is not None:
            self._loop.call_later(self._sleep_s, self._step)
        elif self._jobs:
            self._loop.call_soon(self._step)
        else:
            self._busy = False

    def _work(self) -> None:
        ComputeExecutor._local.executor = self
        while True:
            self._go.acquire()
            if self._closed:
                return
            future, call, context = self._jobs.popleft()
            try:
                result = context.run(call)
            except Killed:
                return
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            self._back.release()
