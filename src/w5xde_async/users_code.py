"""Where code of the user's is called: what it raises is a failure of that code, whatever it raises."""

from __future__ import annotations

import threading
from types import TracebackType


def is_interrupt(error: BaseException) -> bool:
    """Whether ``error``, met in code of the user's, came from outside of that code: Ctrl-C in the main thread.

    A task's cancellation arrives where it awaits, never inside of a call. A CancelledError, SystemExit or GeneratorExit
    out of a call is therefore the called code's own failure.
    """
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


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
