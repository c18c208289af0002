"""The run as ``metrics.jsonl``: one JSON object per event, in order, written by a thread of its own.

``recorder(event)`` only appends to a bounded buffer; the thread writes at once, then rests for ``flush_s``: the next
start counts the steps that were done from this file, and somebody has seen them on the screen. A line is whole or
absent: what a failed or dying write left of one is cut off. On resume, records of steps after the resumed one go, for
those steps are done again, and those that a journal has and the file has not are added; of a long file only the end is
read for that, for a checkpoint waits for it. Lines in it that stay are in a file beside (``.kept``) meanwhile. A full
disk is named once and the run goes on; how many events were lost is recorded (``{"event": "dropped", "count": n}``) as
soon as the disk takes lines again.

The worker command and the dashboard's link are not recorded: they may hold secrets.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from w5xde_async.errors import StoreError
from w5xde_async.store.failpoints import failpoint
from w5xde_async.store.filesystem import Filesystem, is_at, read_regular, regular, temporary_beside
from w5xde_async.telemetry.events import Event
from w5xde_async.telemetry.records import UNREADABLE, dated_line, mended, number, read_records, to_line

logger = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20


class Recorder:
    """A subscriber of the event bus that keeps everything. Close it, or its last lines are lost."""

    def __init__(
        self,
        path: Path,
        *,
        resumed_step: int = 0,
        replayed: Sequence[Mapping[str, object]] = (),
        flush_s: float | None = 0.1,
        capacity: int = 50_000,
        wall: Callable[[], float] = time.time,
        filesystem: Filesystem | None = None,
    ) -> None:
        """Touches no disk yet. ``flush_s`` None starts no thread: the owner calls ``flush``.

        ``replayed`` are records of steps, the last ones before the resumed step, of which the file may lack some.
        At most ``capacity`` events wait to be written; those beyond are dropped and counted.
        """
        self._path = path
        self._aside = path.with_name(f"{path.name}.kept")
        self._resumed_step = resumed_step
        self._replayed = replayed
        self._flush_s = flush_s
        self._capacity = capacity
        self._wall = wall
        self._filesystem = filesystem or Filesystem()
        self._pending: list[tuple[float, Event]] = []
        self._dropped = 0
        self._warned = False
        self._closed = False
        self._wake = threading.Condition()  # guards the five above
        self._file: FileIO | None = None
        self._size = 0  # of the whole lines in the file
        self._named = False  # the file's name is on the disk
        self._resumed = False  # what will be done again was cut off
        self._first = b""  # lines to be written before all others
        self._disk = threading.Lock()  # guards the five above; taken before _wake
        self._thread: threading.Thread | None = None
        if flush_s is not None:
            self._thread = threading.Thread(target=self._write_on, name="w5xde-recorder", daemon=True)
            self._thread.start()

    def __call__(self, event: Event) -> None:
        with self._wake:
            if len(self._pending) >= self._capacity or self._closed:
                self._dropped += 1
                return
            self._pending.append((self._wall(), event))
            if len(self._pending) in (1, self._capacity // 2):
                self._wake.notify()

    def flush(self) -> None:
        """Write what waits; never raises for the sake of the disk or of memory. Blocking."""
        with self._disk:
            with self._wake:
                pending, self._pending = self._pending, []
                dropped, self._dropped = self._dropped, 0
            if not pending and not dropped:
                return
            try:
                lines = [dated_line(event, when) for when, event in pending]
                if dropped:
                    lines.append(to_line({"time": round(self._wall(), 3), "event": "dropped", "count": dropped}))
                self._append("".join(lines).encode())
            except (OSError, StoreError, MemoryError) as error:
                self._lose(len(pending) + dropped, error)

    def sync(self) -> None:
        """``flush``, and return when the lines are on the disk: a checkpoint will say that their steps are history."""
        self.flush()
        with self._disk:
            if self._file is not None:
                with suppress(OSError):  # the next flush meets it too, and says so
                    self._sync(self._file)

    def close(self) -> None:
        """Write the rest and let go of the file. Blocking; calling it twice is fine."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        self.flush()
        with self._disk:
            if self._file is not None:
                with suppress(OSError):
                    self._sync(self._file)
                self._file.close()
                self._file = None

    def _sync(self, file: FileIO) -> None:
        os.fsync(file.fileno())
        if not self._named:  # it was made, or put in the place of another, by this object
            self._filesystem.sync_directory(self._path.parent)
            self._named = True

    def _write_on(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._pending or self._dropped)
            self.flush()
            with self._wake:
                self._wake.wait_for(lambda: self._closed or len(self._pending) >= self._capacity // 2, self._flush_s)
                if self._closed:
                    return

    def _append(self, data: bytes) -> None:
        self._filesystem.fence()  # raises where the file is another's
        if self._file is None or not is_at(self._file, self._path):  # or the run directory was made anew
            if self._file is not None:
                self._file.close()
            self._open()
            self._filesystem.fence()  # whoever took the run over since may have put there what was opened
        file = self._file
        assert file is not None
        if not self._resumed:
            self._cut_redone(file)
        data = self._first + data
        left = memoryview(data)
        try:
            failpoint("metrics.append.before")
            failpoint("metrics.append.half", lambda: file.write(data[: len(data) // 2]))
            while left:
                left = left[file.write(left) or 0 :]
            failpoint("metrics.append.after")
        except (OSError, MemoryError):
            # Half a line would spoil the next one too.
            with suppress(OSError):
                file.truncate(self._size)
            raise
        self._size += len(data)
        self._first = b""

    def _cut_redone(self, file: FileIO) -> None:
        self._put_back(file)
        with open(self._path, "rb", opener=regular) as old:
            end = _redone(old, self._resumed_step, self._replayed)
        self._filesystem.fence()
        if end.stays:
            self._put_aside(end)
            self._put_back(file)
        else:
            file.truncate(end.begins)
        self._size, self._resumed = file.seek(0, os.SEEK_END), True
        self._first = b"".join([to_line(record).encode() for record in end.lacks])

    def _put_aside(self, end: _End) -> None:
        """Where the lines that stay begin, and these, in a file beside: whatever happens next, they are there."""
        disk, temporary = self._filesystem, temporary_beside(self._aside)
        try:
            with disk.create(temporary) as made:
                disk.write(made, b"".join([b"%d\n" % end.begins, *end.stays]))
                disk.sync(made)
            disk.rename(temporary, self._aside)
        except BaseException:
            with suppress(OSError, StoreError):
                disk.remove(temporary)
            raise
        disk.sync_directory(self._path.parent)

    def _put_back(self, file: FileIO) -> None:
        """What was put aside, here or by a process that was killed, in place of the end. That needs no room."""
        try:
            begins, _, lines = read_regular(self._aside).partition(b"\n")
        except FileNotFoundError:
            return
        if not begins.isdigit():
            raise StoreError(str(self._aside), "it is none of this run's; remove it")
        self._filesystem.fence()
        with open(self._path, "r+b", buffering=0, opener=regular) as there:
            if not os.path.sameopenfile(there.fileno(), file.fileno()):
                raise StoreError(str(self._path), "it was replaced")
            there.seek(min(int(begins), there.seek(0, os.SEEK_END)))
            left = memoryview(lines)
            while left:
                left = left[there.write(left) :]
            there.truncate()
            os.fsync(there.fileno())
        self._filesystem.remove(self._aside)

    def _open(self) -> None:
        self._file, self._named = None, False
        self._file = self._filesystem.append(self._path)
        self._size = self._file.seek(0, os.SEEK_END)

    def _lose(self, count: int, error: OSError | StoreError | MemoryError) -> None:
        with self._wake:
            self._dropped += count
            first, self._warned = not self._warned, True
        if first:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or "out of memory"
            logger.warning("metrics not recorded path=%s reason=%s (the run goes on)", self._path, reason)


class Recorded(NamedTuple):
    """What a file of records says of a run: the last step that it has, and of some step whether the run has finished
    after it, and its loss, where that is known and finite."""

    last_step: int
    finished: bool
    loss: float | None


def recorded(path: Path, step: int) -> Recorded:
    """Of a file and a step of its last megabyte. Blocking; never raises for the disk's sake."""
    last, finished, loss = 0, False, None
    with suppress(OSError):
        for record in read_records(path, last_bytes=_TAIL_BYTES):
            event, at = record.get("event"), record.get("step")
            if event == "step_committed" and isinstance(at, int):
                last = max(last, at)
                if at == step:
                    loss = number(record.get("loss"))
            elif event == "run_finished" and at == step:
                finished = record.get("outcome") == "finished"
    return Recorded(last, finished, loss if loss is not None and math.isfinite(loss) else None)


class _End(NamedTuple):
    """Where records of later steps begin, or a torn last line; the lines that stay from there on, and the records that
    are in no line."""

    begins: int
    stays: list[bytes]
    lacks: list[Mapping[str, object]]


class _Stepped(msgspec.Struct):
    """All that is read of a line: the rest takes ten times as long."""

    event: str = ""
    step: int = 0


_stepped = msgspec.json.Decoder(_Stepped)


def _redone(file: BinaryIO, resumed_step: int, replayed: Sequence[Mapping[str, object]]) -> _End:
    """What a run that goes on at ``resumed_step`` does with the end of its file.

    It is read backwards, up to a step before those in question: no record of a step is before the commit of the one
    before it.
    """
    lacks = {record["step"]: record for record in replayed}
    before = min([resumed_step + 1, *(step for step in lacks if isinstance(step, int))])
    lines = _backwards(file)
    begins, _ = next(lines, (0, b""))  # what follows the last line's end
    kept, stays = list[bytes](), 0
    for at, line in lines:
        found = _Stepped()  # one that cannot be read is not ours to judge; readers pass over it
        with suppress(*UNREADABLE):
            try:
                found = _stepped.decode(line)
            except UNREADABLE:
                found = _stepped.decode(mended(line))
        if found.step > resumed_step:
            begins, stays = at, len(kept)
            continue
        kept.append(line)
        if found.event == "step_committed":
            if found.step < before:
                break
            lacks.pop(found.step, None)
    return _End(begins, kept[:stays][::-1], list(lacks.values()))


def _backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Where each line begins, and the line, from the last one on; first what follows the last line's end."""
    at, rest = file.seek(0, os.SEEK_END), list[bytes]()  # of a line whose beginning was not read yet, backwards
    while at:
        begins = max(0, at - _BLOCK_BYTES)
        file.seek(begins)
        first, *others = file.read(at - begins).split(b"\n")
        for piece in reversed(others):
            at -= len(piece)
            yield at, b"".join([piece, *reversed(rest)])
            at, rest = at - 1, [b"\n"]
        rest.append(first)
        at = begins
    if rest:
        yield 0, b"".join(reversed(rest))
