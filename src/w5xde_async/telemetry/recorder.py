"""The run as ``metrics.jsonl``: one JSON object per event, in order, written by a thread of its own.

``recorder(event)`` only appends to a bounded buffer; the thread writes at once, then rests for ``flush_s``: the next
start counts the steps that were done from this file, and somebody has seen them on the screen. A line is whole or
absent: what a failed or dying write left of one is cut off. On resume, records of steps after the resumed one go, for
those steps are done again, and those that a journal has and the file has not are added. A full disk is named once and
the run goes on; how many events were lost is recorded (``{"event": "dropped", "count": n}``) as soon as the disk takes
lines again.

The worker command and the dashboard's link are not recorded: they may hold secrets.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from w5xde_async.errors import StoreError
from w5xde_async.store.failpoints import failpoint
from w5xde_async.store.filesystem import Filesystem, is_at, regular
from w5xde_async.telemetry.events import Event
from w5xde_async.telemetry.records import dated_line, number, read_records, to_line

logger = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 20


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
        self._disk = threading.Lock()  # guards the three above; taken before _wake
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
        """Write what waits; never raises for the disk's sake. Blocking."""
        with self._disk:
            with self._wake:
                pending, self._pending = self._pending, []
                dropped, self._dropped = self._dropped, 0
            if not pending and not dropped:
                return
            lines = [dated_line(event, when) for when, event in pending]
            if dropped:
                lines.append(to_line({"time": round(self._wall(), 3), "event": "dropped", "count": dropped}))
            try:
                self._append("".join(lines).encode())
            except (OSError, StoreError) as error:
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
            if self._file is None:
                _drop_redone(self._filesystem, self._path, self._resumed_step)
            else:
                self._file.close()
            self._open()
            self._filesystem.fence()  # whoever took the run over since may have put there what was opened
        file = self._file
        assert file is not None
        if self._replayed:
            data = "".join(_lacking(self._path, self._replayed)).encode() + data
        left = memoryview(data)
        try:
            failpoint("metrics.append.before")
            failpoint("metrics.append.half", lambda: file.write(data[: len(data) // 2]))
            while left:
                left = left[file.write(left) or 0 :]
            failpoint("metrics.append.after")
        except OSError:
            # Half a line would spoil the next one too.
            with suppress(OSError):
                file.truncate(self._size)
            raise
        self._size += len(data)
        self._replayed = ()

    def _open(self) -> None:
        self._file, self._named = None, False
        self._file = self._filesystem.append(self._path)
        self._size = self._file.seek(0, os.SEEK_END)

    def _lose(self, count: int, error: OSError | StoreError) -> None:
        with self._wake:
            self._dropped += count
            first, self._warned = not self._warned, True
        if first:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
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


def _drop_redone(filesystem: Filesystem, path: Path, resumed_step: int) -> None:
    """Rewrite the file without records of later steps and without a torn last line, if it has any."""
    temporary = path.with_name(f".tmp-{path.name}-{os.urandom(4).hex()}")
    try:
        with open(path, "rb", opener=regular) as old:
            if all(_stays(line, resumed_step) for line in old):
                return
            old.seek(0)
            with temporary.open("xb") as new:
                new.writelines(line for line in old if _stays(line, resumed_step))
                new.flush()
                os.fsync(new.fileno())
        filesystem.rename(temporary, path)
    except FileNotFoundError:
        return
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _lacking(path: Path, replayed: Sequence[Mapping[str, object]]) -> list[str]:
    """The lines of those steps that the file does not have."""
    wanted = {record["step"]: record for record in replayed}
    for record in read_records(path):
        if record.get("event") == "step_committed":
            wanted.pop(record.get("step"), None)
    return [to_line(record) for record in wanted.values()]


def _stays(line: bytes, resumed_step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        step = json.loads(line).get("step", 0)
        return not isinstance(step, int) or step <= resumed_step
    except (ValueError, AttributeError):
        return True  # not ours to judge; readers pass over it
