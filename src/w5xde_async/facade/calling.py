"""What both facades do alike: block on an event loop of their own, show the run, find the secret.

Coordinator and Worker are guests in somebody's loop and read no environment; the earlier systems' calls block, and
their scripts say nothing of secrets. This is where the one becomes the other. Works from any thread; from the main
one, Ctrl-C cancels the call once, which then ends in good order.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from w5xde_async.config import Kind
from w5xde_async.errors import UsageError
from w5xde_async.facade.arguments import PORT, TEXT
from w5xde_async.facade.neighbours import join_file_here
from w5xde_async.facade.words import Words
from w5xde_async.net.endpoint import format_address, parse_address, valid_host
from w5xde_async.net.join import Invitation, read_join_file
from w5xde_async.net.tls import is_loopback
from w5xde_async.net.token import find_token
from w5xde_async.runtime import loop_factory
from w5xde_async.telemetry import wording
from w5xde_async.telemetry.events import Bus, Event, RunStarted
from w5xde_async.telemetry.progress import Progress, ProgressConfig
from w5xde_async.telemetry.writer import flush_all, writer_for
from w5xde_async.wire.messages import Welcome
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.connection import Departure
from w5xde_async.worker.hooks import LeaseAnswered
from w5xde_async.worker.service import Worker

_T = TypeVar("_T")
_EXIT_S = 30.0  #: how long a program that ends waits for calls in daemon threads
_FIRST_LINE_S = 5.0  #: from joining to a node's first line about its work
_ELSE = "that of another user's is named by join_file= or W5XDE_JOIN_FILE"
LogMode = Literal["silent", "normal", "verbose"]


def beats_for(timeout_s: float) -> float:
    """Seconds between two signs of life where ``timeout_s`` of silence count as gone."""
    return min(3.0, timeout_s / 4)


def page_at(dashboard: str | bool) -> str:
    """The dashboard's address: True is loopback; empty: none."""
    return "localhost" if dashboard is True else dashboard or ""


def block_on(main: Callable[[], Coroutine[Any, Any, _T]], *, instead: str, words: Words, serves: bool = False) -> _T:
    """Run ``main`` in a new event loop (uvloop where it is) until it ends. What it raises is in these ``words``.

    ``serves``: others depend on it. When the program ends while it runs in a daemon thread, they are ended first.

    Raises UsageError where this thread runs a loop already, and names ``instead``, which does not block.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise UsageError(f"this call blocks, and an event loop runs in this thread: use {instead}, or another thread")
    try:
        with words.said(), _ended_at_exit(serves) as running, asyncio.Runner(loop_factory=loop_factory()) as runner:
            try:
                return runner.run(running.call(main))
            except KeyboardInterrupt:
                raise KeyboardInterrupt from None  # where the loop stood is no news
            except asyncio.CancelledError:
                if running.cancelled:
                    raise SystemExit from None  # which ends a thread without a word
                raise
    finally:
        flush_all()  # what the caller prints now comes after it


# -- calls that are still running when the program ends


class _Running:
    """A call in a daemon thread."""

    def __init__(self, serves: bool) -> None:
        self.serves = serves
        self.cancelled = False
        self.ended = threading.Event()
        self._task: asyncio.Task[Any] | None = None

    async def call(self, main: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """``main()``, in its loop."""
        self._task = task = asyncio.current_task()
        if self.cancelled and task is not None:
            task.cancel()
        return await main()

    def cancel(self) -> None:
        """From any thread: as Ctrl-C does in the main one."""
        self.cancelled = True
        if self._task is not None:
            with suppress(RuntimeError):  # it has ended just now
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)


_in_daemons: set[_Running] = set()
_registered = threading.Lock()  # taken for good


@contextmanager
def _ended_at_exit(serves: bool) -> Iterator[_Running]:
    """In a daemon thread: have the call end in good order when the program does.

    Python kills such threads where they stand. In the middle of one of torch's operations that aborts the process.
    """
    running = _Running(serves)
    if not threading.current_thread().daemon:
        yield running
        return
    if _registered.acquire(blocking=False):
        # What is registered with threading is called while thread pools still take work; atexit comes too late.
        register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
        with suppress(RuntimeError):  # the program is ending already
            register(_end_all)
    _in_daemons.add(running)
    try:
        yield running
    finally:
        _in_daemons.discard(running)
        running.ended.set()


def _end_all() -> None:
    calls, now = _in_daemons.copy(), time.monotonic()
    # Nodes of this program leave while their server is still there: none of them is to wait for it to come back.
    for serving, deadline in ((False, now + _EXIT_S / 2), (True, now + _EXIT_S)):
        ending = [running for running in calls if running.serves is serving]
        for running in ending:
            running.cancel()
        for running in calls if serving else ending:
            running.ended.wait(max(0.0, deadline - time.monotonic()))


async def working(worker: Worker) -> Departure:
    """The worker's ``run``. Cancelled (Ctrl-C), it first leaves in good order: the lease under way is finished."""
    running = asyncio.create_task(worker.run(), name="worker")
    try:
        await asyncio.wait([running])
    except asyncio.CancelledError:
        worker.drain("Ctrl-C")
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # looked at: what ended it now is no news
        raise
    return running.result()


# -- what is shown


@contextmanager
def shown(bus: Bus, mode: LogMode, *, join: Callable[[], str], words: Words, resume: str) -> Iterator[Progress]:
    """Show the run on stderr for as long as the context is open, this package's warnings too.

    ``join``: what somebody types to join; asked for once the run has begun. ``resume`` is the facade's argument.
    """
    dumb = os.environ.get("TERM") == "dumb"
    color = not os.environ.get("NO_COLOR") and not dumb
    progress = Progress(ProgressConfig(mode=mode, color=color), terminal=False if dumb else None, words=words)

    def show(event: Event) -> None:
        if isinstance(event, RunStarted):
            event = replace(event, worker_command=join())
        progress(words.of_event(event))
        if isinstance(event, RunStarted) and event.resumed_step and mode != "silent":
            again = 'resume="never" trains anew and keeps it aside'
            where = wording.place(event.run_dir)
            tell(f"goes on from step {event.resumed_step:,} of the run in {where} (resume={resume!r}; {again})")

    unsubscribe = bus.subscribe(show, prompt=False)
    handler = progress.handler()
    handler.setFormatter(words.formatter())
    try:
        with _logging_to(handler):
            yield progress
    finally:
        unsubscribe()
        progress.close()


@contextmanager
def _logging_to(handler: logging.Handler) -> Iterator[None]:
    """This package's warnings go there, unless another call of this process shows them already."""
    logger = logging.getLogger("w5xde_async")
    with _one_at_a_time:
        _shown_by.append(handler)
        handler.addFilter(lambda record: _shown_by[0] is handler)
        logger.addHandler(handler)
    try:
        yield
    finally:
        with _one_at_a_time:
            logger.removeHandler(handler)
            _shown_by.remove(handler)


_one_at_a_time = threading.Lock()
_shown_by: list[logging.Handler] = []


def tell(text: str) -> None:
    """A line on stderr, above the bar of a run that may be there."""
    writer_for(sys.stderr).write(wording.clean(text))


class NodeLines:
    """What a node says of its work on stderr: that it joined, how far it is, how it ended."""

    def __init__(self, mode: LogMode, words: Words, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._told, self._words, self._clock = mode != "silent", words, clock
        self._began = self._said = self._next_at = clock()
        self._pieces = self._samples = self._samples_said = 0

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Warnings of this package are shown too."""
        handler = _Told()
        handler.setFormatter(self._words.formatter())
        with _logging_to(handler):
            yield

    def looking(self, place: Place, config: WorkerConfig) -> None:
        """A server is looked for."""
        waits = "" if place.now(config) else f", whose join string this user's servers leave at {place.found}; "
        self._say(f"looking for the server at {place.address}{waits}{_ELSE if waits else ''}")

    def meeting(self, shape: str) -> None:
        """The other members of an island are waited for."""
        self._say(f"waiting for the other workers that the model is divided among ({shape})")

    def joined(self, worker: Worker, welcome: Welcome) -> None:
        """A server has let it in."""
        self._began = self._said = self._clock()
        self._next_at = self._began + _FIRST_LINE_S
        address = format_address(worker.host, worker.port)
        self._say(f"joined run {welcome.run_name} at {address} as {worker.name}, on {worker.device}")

    def answered(self, answer: LeaseAnswered) -> None:
        """A piece has been computed and sent."""
        self._pieces += 1
        self._samples += sum(answer.samples)
        now = self._clock()
        if now >= self._next_at:
            rate = (self._samples - self._samples_said) / max(now - self._said, 1e-9)
            self._said, self._samples_said = now, self._samples
            self._next_at = now + min(max((now - self._began) / 20, _FIRST_LINE_S), 60.0)
            self._say(f"step {answer.step:,}: loss {answer.loss:.4f}, {wording.short(rate)} samples/s")

    def ended(self, how: str, worker: Worker) -> None:
        """It leaves, for the reason ``how``."""
        traffic = f"{wording.size(worker.bytes_sent)} sent, {wording.size(worker.bytes_received)} received"
        samples, took = wording.plural(self._samples, "sample"), wording.duration(self._clock() - self._began)
        self._say(f"{how}: {wording.plural(self._pieces, 'piece')} of batches, {samples} in {took}; {traffic}")

    def _say(self, text: str) -> None:
        if self._told:
            tell(text)


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tell(f"{record.levelname.lower()} {self.format(record)}")
        except Exception:
            self.handleError(record)


# -- who may join


def token_of(token: str) -> str:
    """``token``, or where it is looked for without one (``net.token``). Raises UsageError."""
    if not isinstance(token, str):
        raise UsageError(f"token is of type {type(token).__name__}; give a text")
    named = os.environ.get("W5XDE_TOKEN_FILE", "")
    return token or find_token(Path(named) if named else None, given_as_argument=False, environment=os.environ)


@dataclass(frozen=True)
class Place:
    """Where a node's server is.

    ``server``: ``host:port`` or a join string. ``found``: where a server of this machine leaves its join string; it
    need not be there. ``plain``: without one it is tried without TLS, or by the token. ``address`` may be shown.
    """

    server: str
    address: str
    found: Path | None = None
    plain: bool = True

    def now(self, config: WorkerConfig) -> str:
        """The join string that is there now, or else ``server``; "" where only a join string will do."""
        if self.found is None:
            return self.server
        try:
            return read_join_file(self.found).reveal()
        except UsageError:
            return self.server if self.plain or config.token else ""

    def worker(self, config: WorkerConfig, **more: Any) -> Callable[[], Worker]:
        """Reads the join string that is there now; makes the worker. Raises UsageError."""
        server = self.now(config)
        return lambda: Worker(server, config=config, join_file=self.found, **more)


def where_to_join(
    address: tuple[str, int] | str | None, default: tuple[str, int], *, join_file: Path | str | None, secure: bool,
    argument: str = "server_address",
) -> Place:  # fmt: skip
    """The server by its address and, where there is one, a join string: ``join_file``, W5XDE_JOIN_FILE, W5XDE_JOIN, or
    what a server of this machine leaves. The string's secret and certificate count, its address only where ``address``
    is None. ``argument``: where the address was given.

    Raises UsageError for a bad address or join string.
    """
    given = None if address is None else _parsed(address, argument)
    told: Invitation | None = None
    if named := join_file or os.environ.get("W5XDE_JOIN_FILE", ""):
        told = read_join_file(Path(named))
    elif text := os.environ.get("W5XDE_JOIN", ""):
        told = Invitation.parse(text, place="W5XDE_JOIN")
    if told is not None:
        told = told if given is None else replace(told, host=given[0], port=given[1], also=())
        return Place(told.reveal(), format_address(told.host, told.port))
    host, port = given or default
    plain = is_loopback(host) and not secure
    address = format_address(host, port)
    return Place(address, address, join_file_here(host, port), plain)


_ADDRESS = Kind(
    "(host, port) with a port from 1 to 65535, or 'host:port'", "", str,
    lambda value: isinstance(value, tuple) and len(value) == 2 and TEXT.holds(value[0]) and PORT.holds(value[1]),
)  # fmt: skip


def _parsed(address: Any, argument: str) -> tuple[str, int]:
    """Host and port. Raises UsageError, which begins with ``argument``."""
    if isinstance(address, str):
        return parse_address(address, place=argument)
    _ADDRESS.check(argument, address)
    return valid_host(address[0], place=argument), int(address[1])
