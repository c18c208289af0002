"""What a worker process says of itself to who has started it, in a pipe of its own: its id, why it ends, that it does.

The standard descriptors are the job's, whose code or libraries may put files in their place. They may also end the
process, with any exit code: one says something only where the process has said that it ends. Code that closes
descriptors which it has not opened closes that pipe as well: such a process can say nothing, and is taken at its exit
code. There the two are told apart by time alone, for a process that ends closes the pipe too, a moment before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

#: In the environment of a process that is given such a pipe beside its standard descriptors: the file number.
WORD_FD = "WORKER_WORD_FD"

#: Of an exit code that says nothing.
BY_OTHERS = " (by the job's code or a library: the process itself has not said that it ends)"
#: So often is a process started again whose exit code says nothing but would, had it been the process's own, start no
#: other: however long it lasts and loads, it may end so each time.
MOST_BY_OTHERS = 3

_ID, _WHY, _ENDS = "id", "why", "ends"
_LONGEST = 2000  # bytes of a line
_MUTE_S = 5.0  # a device may take so long to let go of a process that ends


class WordWriter:
    """The pipe's end in the process, which no other process that this one starts has.

    Nothing is written, and nothing raised, where nobody reads any more, or another file has the descriptor's number.
    """

    def __init__(self, file: int) -> None:
        os.set_inheritable(file, False)
        self._file, self._identity = file, _identity(file)

    def tell_id(self, worker_id: str) -> None:
        """By this the coordinator will know it: what it needs is loaded, and it goes there."""
        self._tell(_ID, worker_id)

    def tell_why(self, said: str) -> None:
        """Why it will end, in one sentence."""
        self._tell(_WHY, said)

    def tell_end(self) -> None:
        """It ends by itself: its exit code is its own."""
        self._tell(_ENDS, "")

    def _tell(self, what: str, said: str) -> None:
        line = " ".join([what, *said.split()]).encode(errors="replace")
        with suppress(OSError):
            if _identity(self._file) == self._identity:
                os.write(self._file, b"\n" + line[: _LONGEST - 2] + b"\n")  # others may have begun a line before


class WordReader:
    """What was read of such a pipe so far. ``on_id(worker_id)`` is called when that is told."""

    def __init__(self, on_id: Callable[[str], None] | None = None) -> None:
        self.why = ""
        self.ran_at = 0.0  #: when the process was last known to run, where somebody looks
        self._on_id = on_id
        self._rest = b""
        self._ends = False
        self._loaded_at: float | None = None
        self._closed_at: float | None = None

    def feed(self, data: bytes, now: float) -> None:
        """``data``: what was read just now; empty at the pipe's end."""
        if not data and self._closed_at is None:
            self._closed_at = now
            self._loaded_at = now if self._loaded_at is None else self._loaded_at  # it could not tell later
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LONGEST:]
        for line in lines:
            what, _, said = line.decode(errors="replace").partition(" ")
            if what == _ID:
                self._loaded_at = now if self._loaded_at is None else self._loaded_at
                if self._on_id is not None:
                    self._on_id(said)
            elif what == _WHY:
                self.why = said
            elif what == _ENDS:
                self._ends = True

    def is_own_end(self, ran_at: float) -> bool:
        """Whether the exit code of the process, which has ended and was last known to run at ``ran_at``, is its own."""
        return self._ends or (self._closed_at is not None and ran_at - self._closed_at > _MUTE_S)

    def lasted_s(self, now: float) -> float:
        """For how long the process has run since it had loaded what it needs."""
        return 0.0 if self._loaded_at is None else now - self._loaded_at


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino
