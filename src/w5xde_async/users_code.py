"""Where code of the user's is called: what it raises is a failure of that code, whatever it raises."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

_TOO_LONG = "it took longer than it may"
_MOST_SWALLOWED = 3  # interrupts: by then it swallows every one


def is_interrupt(error: BaseException) -> bool:
    """Whether ``error``, met in code of the user's, came from outside of that code: Ctrl-C in the main thread.

    A task's cancellation arrives where it awaits, never inside of a call. A CancelledError, SystemExit or GeneratorExit
    out of a call is therefore the called code's own failure. So is a KeyboardInterrupt where Ctrl-C is ``heard``.
    """
    if heard.count or not isinstance(error, KeyboardInterrupt):
        return False
    return threading.current_thread() is threading.main_thread()


class heard:
    """Meanwhile the event loop is told of SIGINT, which raises nothing in whatever is being called."""

    count = 0

    def __enter__(self) -> None:
        heard.count += 1

    def __exit__(self, *_: object) -> None:
        heard.count -= 1


def take_stdin() -> int:
    """Standard input under another descriptor, for a process whose parent holds its other end. Code of the user's that
    reads standard input finds it empty: else it would wait for the parent, which says nothing."""
    line, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return line


def take_stdout() -> int:
    """Standard output under another descriptor, for a process whose parent reads words of ours there. What code of the
    user's prints goes where standard error goes."""
    words = os.dup(1)
    os.dup2(2, 1)
    return words


class users_code:
    """Calls of the user's code: whatever they raise arrives as an Exception, and ends no thread, task or process.

    SystemExit, GeneratorExit and asyncio.CancelledError would pass every ``except Exception`` on their way, and
    StopIteration cannot be the result of a future. They become a RuntimeError that names them.

    >>> with users_code():
    ...     raise SystemExit(3)
    Traceback (most recent call last):
    RuntimeError: SystemExit: 3
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or is_interrupt(error):
            return
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            said = f": {error}" if str(error) else ""
            raise RuntimeError(f"{type(error).__name__}{said}") from error


class Overdue(BaseException):
    """Code of the user's was interrupted: it took longer than it may."""


class time_limit:
    """Calls of the user's code on the main thread: after ``seconds`` they are interrupted, by Overdue.

    Also where they sleep or wait for a lock, by a signal (SIGALRM); not inside of a library's own code. Code that
    swallows the interrupt is interrupted again, and Overdue is raised at its end, whatever it returns: what it made of
    that is not what it makes. ``stuck`` is called where it has swallowed ``_MOST_SWALLOWED`` of them, and nothing will
    ever end it. To be used only where the signal ``is_free``, one at a time, and each until ``close``.

    The timer is left to run from call to call, and looks where it goes off whether that call has had its time: to set
    it and to stop it takes longer than all else around a small call.
    """

    _in_use = 0
    _rings = math.inf  # when the timer goes off, by ``time.monotonic``; infinite: it does not
    # Of the call under way:
    _ends = math.inf
    _fired = 0
    _again_s = 0.0
    _stuck: Callable[[], object] | None = None

    def __init__(self, seconds: float, *, stuck: Callable[[], object] | None = None) -> None:
        self._seconds, self._waits, self._on_stuck = seconds, False, stuck

    @staticmethod
    def is_free() -> bool:
        """Whether this is the main thread of a process that has no other use for the signal."""
        if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
            return False
        handler = signal.getsignal(signal.SIGALRM)
        return handler is _interrupt or (handler is signal.SIG_DFL and not any(signal.getitimer(signal.ITIMER_REAL)))

    def __enter__(self) -> None:
        if not self._waits:
            signal.signal(signal.SIGALRM, _interrupt)
            self._waits = True
            time_limit._in_use += 1
        time_limit._fired, time_limit._again_s, time_limit._stuck = 0, self._seconds, self._on_stuck
        now = time.monotonic()
        time_limit._ends = ends = now + self._seconds
        if not now < time_limit._rings <= ends:  # one that should have gone off was stopped by somebody else
            _ring_in(self._seconds)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        time_limit._ends = math.inf
        if time_limit._fired and not isinstance(error, Overdue):
            raise Overdue(_TOO_LONG) from error

    def close(self) -> None:
        """Others may have the signal again, once nobody here uses it."""
        if self._waits:
            self._waits = False
            time_limit._in_use -= 1
            if not time_limit._in_use:
                signal.setitimer(signal.ITIMER_REAL, 0)
                time_limit._rings = math.inf
                signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _ring_in(seconds: float) -> None:
    time_limit._rings = time.monotonic() + seconds
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))  # 0 would stop it


def _interrupt(number: int, frame: FrameType | None) -> None:
    time_limit._rings = math.inf
    left_s = time_limit._ends - time.monotonic()
    if left_s > 0:  # nothing of ours is called, or something that was called later
        if left_s < math.inf:
            _ring_in(left_s)
        return
    _ring_in(time_limit._again_s)
    while frame is not None:
        if frame.f_code in _OWN:  # raised there, the limit would stay in force when the call is over
            time_limit._fired += frame.f_code is _OWN[1]
            return
        frame = frame.f_back
    time_limit._fired += 1
    if time_limit._fired > _MOST_SWALLOWED and time_limit._stuck is not None:
        time_limit._stuck()
    raise Overdue(_TOO_LONG)


_OWN = (time_limit.__enter__.__code__, time_limit.__exit__.__code__)
