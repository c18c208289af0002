"""What the programs of this package do alike: arguments in, signals, an event loop, exit code out.

Signals, the choice of the event loop and the process's exit live here and in the ``__main__`` modules alone: everything
below them is a guest in somebody's loop.

Everything slow (settings, torch, the job) is imported after ``launch`` has taken the signals over: one that comes while
a program starts is kept for whoever listens to it later, and kills nobody.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import logging
import math
import os
import platform
import signal
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

from w5xde_async.config import Answer
from w5xde_async.errors import (
    DeviceLost,
    DiskHangs,
    ExitCode,
    LeafFailed,
    LocalError,
    UpdateFailed,
    UsageError,
    W5xdeError,
    causes,
)
from w5xde_async.users_code import heard, take_stdin

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from types import FrameType

    import torch

    from w5xde_async.settings import CoordinatorSettings, WorkerSettings

_S = TypeVar("_S", bound="CoordinatorSettings | WorkerSettings")
_Body = Callable[[], Coroutine[Any, Any, int]]

_NO_JOIN_SECRET = (
    "--join: whoever is on this machine could read the secret from the list of processes; put the join string into a "
    "file of mode 0600 and give --join-file, or set W5XDE_JOIN"
)
_NO_THREADS = (
    "this machine lets this process start no more threads: raise its limit of processes (ulimit -u, or the "
    "container's), or of memory (ulimit -v), which a thread's stack needs"
)
_NO_MEMORY = (
    "this process has no room to load what it needs: {reason}; raise its limit of memory (ulimit -v, or the "
    "container's), or free some"
)
_NO_ROOM = ("failed to map segment", "cannot allocate memory")  # in the words of the loader, of the system
_FEW_FILES = (
    "this process may have {number} files and connections open (ulimit -Hn, or the container's limit), and needs "
    "{least}: raise that limit"
)

CTRL_C = "Ctrl-C"
_DEAF_S, _ECHO_S = 1.0, 0.25
_NEVER = 1 << 30  # collections of young objects before a full one
_STOPS = ("SIGINT", "SIGTERM", "SIGBREAK")  # the last on Windows: Ctrl-Break, and a console that is closed


class _Echoes:
    """Tells a signal's echo: timeout(1), and programs that run programs, pass on what the terminal has told the whole
    group, so that the same one comes twice within ``_ECHO_S``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_at: dict[int, float] = {}

    def among(self, number: int) -> bool:
        """Whether this one, which comes now, is one."""
        now = self._clock()
        if now - self._told_at.get(number, -math.inf) < _ECHO_S:
            return True
        self._told_at[number] = now
        return False


class _Early:
    """The handler of a signal that comes before anybody listens to it. ``came``: which, once it did.

    One that stops the program also interrupts what is going on. Code that is being imported may swallow that: whoever
    listens later finds ``came`` set.
    """

    def __init__(self, *, stops: bool = False) -> None:
        self.came: int | None = None
        self._stops, self._echoes = stops, _Echoes()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._echoes.among(number):
            return
        again, self.came = self.came in _known(*_STOPS), number
        if self._stops:
            if again:
                os._exit(ExitCode.INTERRUPTED_TWICE)
            raise _Interrupt(_reason(number))


class _Interrupt(KeyboardInterrupt):
    """By another name: where KeyboardInterrupt itself leaves ``exec`` of a text, as dataclasses have it while modules
    are imported, Python ends its process by SIGINT in the end, whatever the exit code was to be (``python -m``)."""


class _Ending:
    """The handler of signals that stop the program while it ends. The first changes nothing: what it asks for is under
    way. Another ends the process at once."""

    def __init__(self) -> None:
        self._came, self._echoes = False, _Echoes()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._echoes.among(number):
            return
        if self._came:
            os._exit(ExitCode.INTERRUPTED_TWICE)
        self._came = True


def _ignore_signals() -> None:
    """Python gives signals their defaults back long before its process has ended: with those, one that comes then would
    make a death of a good end."""
    for number in _known(*_STOPS, "SIGUSR1", "SIGUSR2", "SIGHUP"):
        if isinstance(signal.getsignal(number), _Ending | _Early):
            signal.signal(number, signal.SIG_IGN)


def stop_came_early() -> bool:
    """Whether a SIGINT or SIGTERM has come and the program goes on: somebody has swallowed the interrupt."""
    return any(_came_early(number) for number in _known(*_STOPS))


def _came_early(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    return isinstance(handler, _Early) and handler.came == number


def _reason(number: int) -> str:
    return CTRL_C if number == signal.SIGINT else signal.Signals(number).name


def use_batch_scheduling() -> None:
    """On Linux, no thread of this process that wakes takes the core from the one that has woken it (sched(7),
    SCHED_BATCH). Threads that are started from now on inherit that. The process has the same part of the cores.

    Else a coordinator on the same cores tells one worker of a version, is put aside while that computes, and tells the
    next one milliseconds later. And where there are more workers than cores each computes ``_SLICE_NS`` in one go.
    """
    if hasattr(os, "sched_setscheduler"):
        with suppress(OSError):  # somebody has forbidden it
            if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else it was started with what its owner wants
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                _ask_for_slice(_LONG_SLICE_NS, os.SCHED_BATCH, 0)


def use_short_slices() -> None:
    """On Linux, this thread, an event loop's, has a core soon after it wakes, also where others compute on all of them.
    It has the same part of the cores; the threads and processes that it starts are scheduled as ever.

    Else those keep their cores until their slices are over: a coordinator heard of a result 3 ms after it had come.
    """
    if (
        hasattr(os, "sched_getscheduler")
        and os.sched_getscheduler(0) == os.SCHED_OTHER
        and os.getpriority(os.PRIO_PROCESS, 0) >= 0  # else what it starts would lose the precedence it was given
    ):
        _ask_for_slice(_SHORT_SLICE_NS, os.SCHED_OTHER, _RESET_ON_FORK)


def _ask_for_slice(nanoseconds: int, policy: int, flags: int) -> None:
    """Have this thread keep a core for so long where others want it too (sched_setattr(2): from Linux 6.12 on, where
    it is 1 to 3 ms by default; older kernels heed nothing of it).

    Who comes back to a core finds its caches full of others' work. A thread that asks for less than the one that
    computes gets its core at once when it wakes, if it has not had more than its part (the kernel's
    scheduler/sched-eevdf).
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)  # it is set, too
        asked = _SCHED_ATTR.pack(_SCHED_ATTR.size, policy, flags, nice, 0, nanoseconds, 0, 0)
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 0, asked, 0)


_LONG_SLICE_NS = 20_000_000
_SHORT_SLICE_NS = 100_000  # the least that there is
_RESET_ON_FORK = 1  # of its flags
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}  # no libc before glibc 2.41 has a name for it
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def _hold_standard_descriptors() -> None:
    """Have all three standard descriptors. Where a shell has closed one (``<&-``), what is opened next would be in its
    place: uvloop ends the process when it closes that, and what C libraries say on 2 would be written into it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


def _allow_descriptors() -> None:
    """Let this process open as many files and connections as it may: shells and services begin with few.

    Raises LocalError where those are too few for a run: one that had begun would have to wait for ever, or fail of
    whatever comes first.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    while soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a system may have a lower limit than it says, as macOS does
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return
        wanted //= 2
    if soft != resource.RLIM_INFINITY and soft < _LEAST_DESCRIPTORS:
        raise LocalError(_FEW_FILES.format(number=soft, least=_LEAST_DESCRIPTORS))


def _need_directory() -> None:
    """Raises UsageError where the directory that this process began in is there no more: torch would end the process,
    or every relative path would be somebody's fault."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working directory has been removed: start this in one that is there (cd)") from None


def _need_threads() -> None:
    """Raises LocalError where this process can start next to no threads: libraries would abort it without a word
    (libuv), or send it SIGINT (OpenBLAS)."""
    ready = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(_LEAST_THREADS):
            thread = threading.Thread(target=ready.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise LocalError(_NO_THREADS) from error
    finally:
        ready.set()
        for thread in started:
            thread.join()


_LEAST_THREADS = 8  # under ``ulimit -u 9`` a run of one worker came to its end
_LEAST_DESCRIPTORS = 64  # a run of two workers takes 28
_MOST_DESCRIPTORS = 1 << 16


def exit_code_of(reason: str, exit_on_drain: int) -> int:
    """What a program that was told to stop ends with. ``reason``: what told it; after Ctrl-C nobody wants another."""
    return ExitCode.OK if reason == CTRL_C else exit_on_drain


@contextmanager
def keeping_objects() -> Iterator[None]:
    """Take all objects that exist at the end out of garbage collection, and meanwhile collect young ones alone.

    A program imports and builds half a million objects that stay. To go through all of them stops everything for a
    tenth of a second and more, five times while they come and now and then ever after: 0.65 s of a run of 8 s. For
    programs alone: in somebody else's, what is there may become garbage.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        if gc.get_threshold()[2] == _NEVER:  # else the job's own code has chosen
            gc.set_threshold(*before)
        gc.freeze()


def launch(
    kind: Callable[[], type[_S]], arguments: Sequence[str], *, prog: str, prepare: Callable[[_S, str], _Body],
    heeds: Sequence[str] = (), ends: Sequence[str] = (), exit_on_drain: int = ExitCode.OK,
) -> int:  # fmt: skip
    """Read the settings and the token, ``prepare`` with them, run what that gives in an event loop.

    ``kind`` imports the class of the settings. Until somebody listens (``signals``, ``listening``), SIGINT, SIGTERM and
    the signals named in ``ends`` end the program where it stands: nothing has begun. Those named in ``heeds`` wait.
    ``exit_on_drain``: the exit code of such an end while the setting of that name is not known.
    """
    _hold_standard_descriptors()
    as_json = False
    code: int | None = None
    failure: Exception | None = None
    stops = _take_signals(ends)
    for number in _known(*heeds):
        signal.signal(number, _Early())
    try:
        _need_directory()
        _allow_descriptors()
        _need_threads()
        from w5xde_async.net.join import Invitation
        from w5xde_async.net.token import find_token
        from w5xde_async.runtime import loop_factory
        from w5xde_async.settings import misspelt_variables, read

        try:
            settings, given = read(kind(), arguments, prog=prog)
        except Answer as answer:
            for text in misspelt_variables(os.environ):
                _complain(prog, text, None, False)
            return tell(prog, f"{answer.text}\n")
        as_json = settings.values["log_format"] == "json"
        exit_on_drain = settings.exit_on_drain
        if settings.exit_with_stdin:
            line = take_stdin()
            threading.Thread(target=_end_with, args=(line,), name="w5xde-parent", daemon=True).start()
        else:  # a parent of this project has said it
            for text in misspelt_variables(os.environ):
                _complain(prog, text, None, as_json)
        if settings.profile_memory is not None and hasattr(signal, "SIGUSR2"):
            signal.signal(signal.SIGUSR2, _Early())
        token = find_token(settings.token_file, given_as_argument="token_file" in given, environment=os.environ)
        if "join" in given and Invitation.parse(getattr(settings, "join", ""), place="--join").secret:
            raise UsageError(_NO_JOIN_SECRET)
        with keeping_objects():
            body = prepare(settings, token)
        if stops.came is not None:  # the job's own code has swallowed the interrupt
            raise _Interrupt

        async def run() -> int:
            nonlocal code, failure
            try:
                code = await body()
                return code
            except (DiskHangs, DeviceLost) as error:  # the loop's end, and Python's, would wait for what hangs
                _complain(prog, str(error), error.exit_code, as_json)
                end_without_threads(error.exit_code)
            except Exception as error:
                failure = error
                raise

        with asyncio.Runner(loop_factory=loop_factory(settings.loop)) as runner:
            return runner.run(run())
    except (KeyboardInterrupt, Exception) as error:
        if code is not None and isinstance(error, KeyboardInterrupt):  # it had ended, and waited for its threads
            return code
        # Whoever swallowed an early interrupt may have failed of what it left undone.
        if isinstance(error, KeyboardInterrupt) or (code is None and stops.came is not None):
            return _stopped_early(prog, stops, exit_on_drain, as_json)
        if (told := _told(error)) is not None:
            return _fail(prog, told, as_json)
        if not _lacks_threads(error):
            _show_all()
            raise
        if code is not None:  # the program had ended, and its loop wanted a thread to wait for others
            return code
        if failure is None or _lacks_threads(failure):
            return _fail(prog, LocalError(_NO_THREADS), as_json)
        if isinstance(failure, W5xdeError):  # and the loop's end came to the same
            return _fail(prog, failure, as_json)
        _show_all()
        raise failure from None


def _take_signals(ends: Sequence[str]) -> _Early:
    """Have those that stop a program, and ``ends``, end it where it stands, until somebody listens."""
    stops = _Early(stops=True)
    for number in _known(*_STOPS, *ends):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stops)
    return stops


def _stopped_early(prog: str, stops: _Early, exit_on_drain: int, as_json: bool) -> int:
    try:
        _need_threads()
    except LocalError as lack:  # nobody has interrupted it but a library
        return _fail(prog, lack, as_json)
    code = exit_code_of(CTRL_C if stops.came is None else _reason(stops.came), exit_on_drain)
    _complain(prog, "stopped before it began", code, as_json)
    atexit.register(_ignore_signals)
    return code


def with_own_loop(prog: str, program: Callable[[], int], *, ends: Sequence[str], exit_on_drain: int) -> int:
    """Run a program that blocks on an event loop of its own, in which it listens (``signals``), and what it imports.
    Until then signals end it as in ``launch``. The exit code."""
    _hold_standard_descriptors()
    stops = _take_signals(ends)
    try:
        _need_directory()
        _allow_descriptors()
        _need_threads()
        return program()
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, KeyboardInterrupt) or stops.came is not None:
            return _stopped_early(prog, stops, exit_on_drain, False)
        if (told := _told(error)) is None:
            raise
        return _fail(prog, told, False)


def without_loop(prog: str, program: Callable[[], int]) -> int:
    """Run a program that has no event loop and nothing to end in good order, and what it imports. The exit code."""
    _hold_standard_descriptors()
    try:
        with interrupts():
            return program()
    except Answer as answer:
        return tell(prog, f"{answer.text}\n")
    except KeyboardInterrupt:
        return ExitCode.OK
    except Exception as error:
        if (told := _told(error)) is None:
            raise
        return _fail(prog, told, False)


def imported(name: str, arguments: Sequence[str], *, prog: str) -> int:
    """Run the program of a module that imports torch at once. The exit code."""
    from w5xde_async.telemetry import records, wording, writer  # noqa: F401  # to say so where there is no room for it

    return without_loop(prog, lambda: int(import_module(name).main(arguments, prog=prog)))


def _fail(prog: str, error: W5xdeError, as_json: bool) -> int:
    # A traceback of the job's code was part of the run's summary; here the first line is enough.
    text = str(error).splitlines()[0] if isinstance(error, LeafFailed | UpdateFailed) else str(error)
    _complain(prog, text, error.exit_code, as_json)
    return error.exit_code


def _lacks_threads(error: BaseException) -> bool:
    """Whether that is all there is to it: Python has no class of its own for it, and it may come from anywhere."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_lacks_threads, error.exceptions))
    return isinstance(error, RuntimeError) and str(error) == "can't start new thread"


def _told(error: Exception) -> W5xdeError | None:
    """An error that says in a line what is wrong: one of this package's own, or of what there was no room to load."""
    if isinstance(error, W5xdeError):
        return error
    reason = _lacks_memory(error)
    return None if reason is None else LocalError(_NO_MEMORY.format(reason=reason))


def _lacks_memory(error: Exception) -> str | None:
    """What there was no room for while something was imported, in whatever words its importer has wrapped it."""
    if not isinstance(error, ImportError) and not any(
        frame.f_code.co_name == "<module>" or frame.f_code.co_filename.startswith("<frozen importlib")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ):
        return None
    found: str | None = None  # the first cause says it most plainly
    for one in causes(error):
        said = [line.strip() for line in str(one).splitlines() if any(words in line.lower() for words in _NO_ROOM)]
        if isinstance(one, MemoryError):
            found = str(one)[:300] or "MemoryError"
        elif isinstance(one, ImportError | OSError) and said:
            found = said[-1][:300]
        if one.__cause__ is None and not isinstance(one, ImportError):  # what came before it has nothing to do with it
            break
    return found


def _end_with(line: int) -> None:
    """Nobody is left to work for: no goodbye is owed, and nothing may keep this process."""
    while os.read(line, 4096):
        pass
    os._exit(ExitCode.ERROR)


def _show_all() -> None:
    """What was logged comes before what Python prints of a crash."""
    with suppress(ImportError, MemoryError):
        from w5xde_async.telemetry.writer import flush_all

        flush_all()


def end_without_threads(code: int) -> NoReturn:
    """End this process where a thread of it may never end: Python's own end would wait for that. What was logged and
    printed leaves first, as far as it can be written."""
    from w5xde_async.telemetry.writer import flush_all

    logging.shutdown()
    flush_all()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # nobody reads any more, or the job's code has put something of its own there
            stream.flush()
    os._exit(code)


def _known(*names: str) -> list[signal.Signals]:
    """Those of the signals that this system has."""
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


@contextmanager
def signals(
    stop: Callable[[str], None], *, abandon: Callable[[], None] | None = None, warns: Sequence[str] = ()
) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls ``stop(reason)``; another after that ends the process with 130 at once.

    An echo (``_Echoes``) is no other one.

    A signal named in ``warns`` calls ``stop`` too, and counts as neither: a job engine sends it, and SIGTERM some time
    later.

    Also where the loop hears nothing, since code of the user's that is called there does not return: then one ends the
    process that comes ``_DEAF_S`` after one that was not heard.
    """
    from w5xde_async.telemetry.writer import flush_all

    loop = asyncio.get_running_loop()
    told, unheard_since = 0, math.inf
    echoes = _Echoes(loop.time)
    forewarnings = _known(*warns)

    def received(number: signal.Signals) -> None:
        nonlocal told, unheard_since
        unheard_since = math.inf
        if number not in forewarnings:
            if echoes.among(number):
                return
            told += 1
        if told > 1:
            end()
        stop(_reason(number))

    def end() -> None:
        if abandon is not None:
            abandon()
        flush_all()
        os._exit(ExitCode.INTERRUPTED_TWICE)

    def unheard(number: int, _: FrameType | None) -> None:
        """In the main thread, between two instructions of whatever it does; the loop is told besides."""
        nonlocal unheard_since
        if number in forewarnings:
            return
        now = time.monotonic()
        if now - unheard_since >= _DEAF_S:
            end()
        unheard_since = min(unheard_since, now)

    numbers = [number for number in (*_known(*_STOPS), *forewarnings) if signal.getsignal(number) is not signal.SIG_IGN]
    early = [number for number in numbers if _came_early(number)]
    before = {number: signal.getsignal(number) for number in numbers}
    launched = any(isinstance(handler, _Early) for handler in before.values())
    for number in numbers:
        if sys.platform == "win32":
            signal.signal(number, lambda got, _: loop.call_soon_threadsafe(received, signal.Signals(got)))
        else:
            loop.add_signal_handler(number, received, number)
            signal.signal(number, unheard)
    try:
        if early:
            received(early[0])
        with heard():
            yield
    finally:
        ending = _Ending()
        for number in numbers:
            if sys.platform != "win32":
                loop.remove_signal_handler(number)
            handler = before[number]  # None: it is not Python's
            signal.signal(number, ending if isinstance(handler, _Early) else handler or signal.SIG_DFL)
        if launched:
            atexit.register(_ignore_signals)


@contextmanager
def interrupts() -> Iterator[None]:
    """In a program without an event loop: meanwhile Ctrl-C raises KeyboardInterrupt as ever, and no echo of it does."""
    echoes = _Echoes()

    def received(number: int, frame: FrameType | None) -> None:
        if not echoes.among(number):
            raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or a host program's
        yield
        return
    signal.signal(signal.SIGINT, received)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def listening(name: str, act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` in the event loop when the signal of that name comes, and now where it came before."""
    if not hasattr(signal, name):  # Windows has none of them
        yield
        return
    loop, number = asyncio.get_running_loop(), getattr(signal, name)
    came = _came_early(number)
    loop.add_signal_handler(number, act)
    try:
        if came:
            loop.call_soon(act)
        yield
    finally:
        loop.remove_signal_handler(number)
        signal.signal(number, _Early())  # while the program ends it changes nothing


@contextmanager
def memory_reports(folder: Path | None, name: str, device: torch.device | None = None) -> Iterator[None]:
    """With a folder: what allocates memory is noted, SIGUSR2 writes a report into it and so does the end."""
    if folder is None:
        yield
        return
    from w5xde_async.telemetry.memory import MemoryReport

    loop, report = asyncio.get_running_loop(), MemoryReport(device)

    def write() -> None:
        try:
            logger.warning("memory report path=%s", report.write(folder, name))
        except OSError as error:
            logger.error("no memory report: %s: %s", error.filename or folder, error.strerror or error)

    report.begin()
    try:
        with listening("SIGUSR2", lambda: loop.run_in_executor(None, write)):
            yield
    finally:
        write()
        report.end()


def attach(handler: logging.Handler, level: int) -> None:
    """Send all logging, and Python's warnings in a line each, to ``handler``."""

    def warned(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: object = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        said = " ".join(str(message).split())
        logging.getLogger("py.warnings").warning("%s: %s (%s:%d)", category.__name__, said, Path(filename).name, lineno)

    # Not by logging.captureWarnings: that shows the source's line too, and libraries replace its wording by their own.
    warnings.showwarning = warned
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level)


def tell(prog: str, text: str) -> int:
    """``say``, at the end of a program. The exit code."""
    try:
        say(text)
    except LocalError as error:
        return _fail(prog, error, False)
    return ExitCode.OK


def say(text: str) -> bool:
    """Write what a program was asked for. False: who has read enough ("| head") reads no more, which is no failure.

    Raises LocalError where it cannot be written. What follows on either is dropped.
    """
    failed = _write(sys.stdout, text, last=True)
    if failed is None or isinstance(failed, BrokenPipeError):
        return failed is None
    reason = failed.strerror if isinstance(failed, OSError) else failed
    raise LocalError(f"standard output cannot be written: {reason}")


def note(text: str) -> None:
    """A line for whoever waits, on standard error: nothing depends on whether it can be written, or is read."""
    from w5xde_async.telemetry.writer import writer_for

    writer_for(sys.stderr).write(text)


def _complain(prog: str, text: str, code: int | None, as_json: bool) -> None:
    """``code`` None: a warning, and the program goes on."""
    from w5xde_async.telemetry.records import to_line
    from w5xde_async.telemetry.wording import clean
    from w5xde_async.telemetry.writer import writer_for

    if as_json:
        event = {"event": "warning"} if code is None else {"event": "exit", "code": int(code)}
        line = to_line(event | {"message": text}).rstrip("\n")
    else:
        line = f"{prog}: {clean(text, limit=100_000)}"
    shown = writer_for(sys.stderr)
    shown.write(line)
    if code is not None and shown.flush():
        _write(sys.stderr, "", last=True)


def _write(stream: TextIO, text: str, *, last: bool) -> OSError | ValueError | None:
    """As far as it can be; why it cannot be: nobody reads ("| head"), the disk is full, the job's code has closed it.

    ``last``: the program ends, or can do without. What the stream still holds is dropped, and what follows, for
    Python's own end would have another code where it cannot be written; but not what follows where whoever reads is
    only slow, and does not let it be waited for.
    """
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:  # a name, or a unit, may have what the stream's encoding has not
            stream.write(text.encode("ascii", "backslashreplace").decode("ascii"))
        stream.flush()
    except (OSError, ValueError) as error:
        if last:
            with suppress(OSError, ValueError):
                _drop(stream, for_good=not isinstance(error, BlockingIOError))
        return error
    return None


def _drop(stream: TextIO, *, for_good: bool) -> None:
    """What a stream holds; ``for_good``: and what will be written to it."""
    descriptor, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
    kept = os.dup(descriptor)
    try:
        os.dup2(nowhere, descriptor)
        stream.flush()
    finally:
        if not for_good:
            os.dup2(kept, descriptor)
        os.close(kept)
        os.close(nowhere)
