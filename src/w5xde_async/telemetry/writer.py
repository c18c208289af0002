"""What this process writes on a stream, so that nobody waits for whoever reads it.

A terminal that is paused, a pager and a log collector that stalls let a write stand for as long as they like. So lines
and paintings of bars go through one bounded queue to one thread for each stream, past Python's own buffer, whose lock
it would hold meanwhile. Whoever writes a line waits a moment for it to leave, as long as that goes well: it may be the
last that the process says, and what is printed next comes after it. What the queue cannot take, and what the stream has
refused (a full disk), is left out, counted and told of with what is written next, or at the end. The thread ends when
it has nothing to do. A stream that is no file's (a notebook's, one in memory), or before which somebody has put a
``write`` of his own, is written by the caller. Where somebody has made another standard error of its file, lines go
there.

Who ends a process calls ``flush``, which waits for the rest, but not for ever; Python's own end does. A process that
was forked from one that writes does so after each line: it may end at any time, without a word.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TextIO
from weakref import WeakValueDictionary, ref

from w5xde_async.telemetry.wording import plural

_ASCII = str.maketrans({"·": "|", "…": "...", "µ": "u", "\N{REPLACEMENT CHARACTER}": "?"})
_CAPACITY = 4 << 20  # characters
_IDLE_S = 1.0  # after which the thread ends
_MOMENT_S = 0.01  # that a line is waited for, until one has not left in time
_PATIENCE_S = 2.0  # with whoever does not read, when a process ends
_LOOK_S = 1.0  # at most, between two looks whether there is room
_NOT_READ = "standard error was not read"


class Bar(Protocol):
    """What stands below all lines. Both write to ``Writer.canvas``."""

    def clear(self) -> None: ...

    def refresh(self) -> None: ...


def left_out(count: int, why: str) -> str:
    """How it is told that lines are left out."""
    return f"{plural(count, 'line')} left out: {why}"


class Writer:
    """The only way to a stream. Every method may be called from any thread, and none raises for the stream's sake."""

    def __init__(self, stream: TextIO, *, capacity: int = _CAPACITY, patience_s: float = _PATIENCE_S) -> None:
        """``capacity``: of the queue, in characters. One for each stream: ``writer_for``."""
        self._use(stream)
        self._is_standard = stream is sys.stderr
        self.bars: list[Bar] = []  #: changed by what is given to ``call`` alone
        self.canvas = Canvas(self)
        self.left_out = left_out
        self._capacity = capacity
        self._most_s = self._patience_s = patience_s
        self._why = ""  # lines were refused
        self._torn = False  # what has been written ends within a line
        self._forked = False
        self._begin()

    def _use(self, stream: TextIO) -> None:
        self.stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.unicode = self.encoding.lower().startswith("utf")

    def _begin(self) -> None:
        self._writes = threading.RLock()  # guards the pieces
        self._pieces: list[str] = []  # that a batch comes to
        self._composer = 0  # the thread that makes them
        self._changed = threading.Condition()  # guards all below. Reentrant: a signal's handler may write
        self._items: list[str | Callable[[], None]] = []
        self._size = 0  # of the items
        self._too_many = 0  # lines that the queue could not take
        self._refused = 0  # lines that the stream could not
        self._writing = self._rests = self._stalls = False
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """A line, or several, above the bars."""
        self._put(text, len(text) + 1)
        with self._changed:
            if not self._stalls and threading.current_thread() is not self._thread:
                self._stalls = not self._changed.wait_for(self._has_written, _MOMENT_S)

    def call(self, change: Callable[[], None]) -> None:
        """Have the bars changed, in its turn; that may write to the ``canvas``. It is never left out."""
        self._put(change, 0)

    def encodable(self, text: str) -> str:
        """``text`` as the stream can have it."""
        if self.unicode:
            return text
        return text.translate(_ASCII).encode(self.encoding, "replace").decode(self.encoding)

    def flush(self) -> bool:
        """Wait until all is written, and whether it is. Blocking, for ``patience_s`` at most in all, until somebody
        reads again."""
        with self._changed:
            done = self._changed.wait_for(self._has_written, self._patience_s)
            if done and self._refused:
                self._enqueue(_nothing, 0)  # beside which it is told
                done = self._changed.wait_for(self._has_written, self._patience_s)
            self._patience_s = self._most_s if done else 0.0
            if done and self._thread is not None:  # it has nothing to stay for
                self._rests = True
                self._changed.notify_all()
        return done

    def _has_written(self) -> bool:
        return not (self._writing or self._items)

    def _put(self, item: str | Callable[[], None], size: int) -> None:
        if self._is_standard and sys.stderr is not self.stream and sys.stderr is not None and _is_dead(self.stream):
            with _finding:
                _writers.pop(id(self.stream), None)  # another one's, soon
                self._use(sys.stderr)
                _writers[id(self.stream)] = self
        self._enqueue(item, size)
        if self._forked:
            self.flush()

    def _enqueue(self, item: str | Callable[[], None], size: int) -> None:
        if _raw(self.stream) is None:
            if not self._has_written():  # before somebody came between
                self.flush()
            self._write([item])
            return
        with self._changed:
            if size and self._items and self._size + size > self._capacity:
                self._too_many += item.count("\n") + 1 if isinstance(item, str) else 0
                return
            self._items.append(item)
            self._size += size
            if self._thread is None:
                self._start()
            elif len(self._items) == 1:
                self._changed.notify_all()

    def _start(self) -> None:
        # It is there before it begins: what interrupts its start may write, too.
        self._thread = thread = threading.Thread(target=self._work, name="w5xde-writer", daemon=True)
        try:
            thread.start()
        except BaseException as error:
            if not thread.is_alive():
                self._thread = None
            if not isinstance(error, RuntimeError):
                raise
            self._write(*self._taken())  # there can be no more of them, or Python ends

    def _taken(self) -> tuple[list[str | Callable[[], None]], int]:
        taken = self._items, self._too_many
        self._items, self._size, self._too_many = [], 0, 0
        return taken

    def _work(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._stalls = self._stalls and bool(self._items)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._items or self._rests, _IDLE_S)
                self._rests = False
                if not self._items:
                    self._thread = None
                    return
                taken = self._taken()
                self._writing = True
            try:
                self._write(*taken)
            except BaseException:  # a bar's fault; the next line has another thread
                with self._changed:
                    self._writing, self._thread = False, None
                raise

    def _write(self, items: list[str | Callable[[], None]], too_many: int = 0) -> None:
        with self._changed:
            refused, self._refused = self._refused, 0
        told = {}
        if refused:
            told[self.left_out(refused, self._why)] = refused
            items = [*told, *items]
        if too_many:
            told[said := self.left_out(too_many, _NOT_READ)] = too_many
            items = [*items, said]
        with self._writes:
            text = self._composed(items)
            if not text:
                return
            rest = self._out(f"\n{text}" if self._torn else text)[-len(text) :]
        if not rest:
            self._torn = False
            _owing.discard(self)
            return
        lost = rest.count("\n") + sum(count - 1 for said, count in told.items() if said in rest)
        with self._changed:
            self._refused += lost
        _owing.add(self)

    def _composed(self, items: list[str | Callable[[], None]]) -> str:
        self._composer = threading.get_ident()
        bars: list[Bar] = []  # that are cleared
        try:
            for item in items:
                if not isinstance(item, str):
                    item()
                    bars = [bar for bar in bars if bar in self.bars]
                    continue
                for bar in self.bars:
                    if bar not in bars:
                        bar.clear()
                        bars.append(bar)
                self._pieces.append(f"{item}\n")
            for bar in bars:
                bar.refresh()
            return "".join(self._pieces)
        finally:
            self._composer = 0
            self._pieces.clear()

    def _show(self, text: str) -> None:
        """What a bar writes: part of a batch, or at once where somebody else than this object has it painted."""
        if threading.get_ident() == self._composer:
            self._pieces.append(text)
        else:
            self._out(text)

    def _out(self, text: str) -> str:
        """Write it. Returns what of it could not be written."""
        raw = _raw(self.stream)
        try:
            text = self.encodable(text)
            if raw is None:
                self.stream.write(text)
                self.stream.flush()
                return ""
            data = text.replace("\n", os.linesep).encode(self.encoding, "backslashreplace")
        except Exception as error:  # whatever somebody has put there
            self._why = _reason(error)
            return text
        left = memoryview(data)
        try:
            while left:
                written = raw.write(left)
                if written is None:  # somebody has made it non-blocking
                    _wait_for_room(raw)
                else:
                    left = left[written:]
        except (OSError, ValueError) as error:
            self._why = _reason(error)
            if len(left) < len(data):
                self._torn = data[len(data) - len(left) - 1] != ord("\n")
        return bytes(left).decode(self.encoding, "replace")


class Canvas:
    """The file that a writer's bars are painted on. To tqdm it is the stream itself: who prints by it has them cleared.

    It keeps no writer: with one that nobody has any more, its bars are gone at once.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = ref(writer)

    def write(self, text: str) -> None:
        writer = self._writer()
        if writer is not None:
            writer._show(text)

    def flush(self) -> None:
        """Nothing is held."""

    def __eq__(self, other: object) -> bool:
        # Not while the first is made: tqdm would flush the stream, and ask it for its size.
        writer = self._writer()
        return other is self or (writer is not None and bool(writer.bars) and other is writer.stream)

    def __hash__(self) -> int:
        return id(self)


def _wait_for_room(raw: io.RawIOBase) -> None:
    if hasattr(select, "poll"):
        room = select.poll()
        room.register(raw.fileno(), select.POLLOUT)
        room.poll(1000 * _LOOK_S)
    else:
        time.sleep(0.05)


def _reason(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    return f"standard error could not be written ({reason or error})"


def _nothing() -> None:
    """A change of no bar."""


def _is_dead(stream: TextIO) -> bool:
    try:
        return stream.closed
    except (ValueError, AttributeError) as error:
        return isinstance(error, ValueError)  # detached


def _raw(stream: TextIO) -> io.RawIOBase | None:
    """The file itself, where it is one and nobody has put his own ``write`` before it, to keep what is printed."""
    plain = getattr(type(stream), "write", None) is io.TextIOWrapper.write and "write" not in vars(stream)
    buffer = stream.buffer if plain and isinstance(stream, io.TextIOWrapper) else None
    raw = getattr(buffer, "raw", buffer)
    return raw if isinstance(raw, io.RawIOBase) else None


_writers: WeakValueDictionary[int, Writer] = WeakValueDictionary()  # each keeps its stream, whose id is so no other's
_owing: set[Writer] = set()  # who has to tell of lines that were refused is kept for that
_finding = threading.RLock()


def writer_for(stream: TextIO) -> Writer:
    """The one that this process has for it."""
    with _finding:
        writer = _writers.get(id(stream))
        if writer is None:
            _writers[id(stream)] = writer = Writer(stream)
        return writer


@atexit.register
def flush_all() -> None:
    """``flush`` each. Blocking, for seconds at most."""
    with _finding:
        writers = list(_writers.values())
    for writer in writers:
        writer.flush()


def _after_fork() -> None:
    global _finding
    _finding = threading.RLock()
    for writer in list(_writers.values()):
        writer._begin()
        writer._forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
