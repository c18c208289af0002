"""Processes that read leaves.

Each reads one leaf at a time, so it is known what one was reading when it died. It is replaced, and that is read again:
a passing lack of memory costs nothing. Where the leaf's reader dies once more, the leaf is read while the others
rest, then sample by sample; what still ends its reader is reported. So no leaf ends more than three of them.
One that dies while it loads the job has read nothing: it is no sample's fault, and another is started.

What they read comes through their pipes. To share its memory, as torch would, takes a descriptor for each tensor and
room in /dev/shm, of which a container has 64 MiB.

No process outlives its owner, however that ends: a thread in each watches it. They heed neither Ctrl-C nor SIGTERM,
which reach all processes of a terminal or a job: the owner still has something to read then.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from queue import SimpleQueue
from types import FrameType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from w5xde_async.data.stream import AT_FAULT
from w5xde_async.errors import LeafFailed, ReaderDied, ReadersLost, headline, marked
from w5xde_async.params.flat import bytes_of
from w5xde_async.users_code import heard

logger = logging.getLogger(__name__)

#: ``read(indices, seed)``, as a process does it: structure and tensors of a batch, these contiguous, in host memory.
Reads = Callable[[NDArray[np.int64], int], tuple[bytes, tuple[Tensor, ...]]]
Start = Literal["spawn", "fork"]

_LOOK_S = 1.0  # between two looks at whether the process at the other end is still there
_ENDS_S = 5.0  # for a process to end that was told to
_LOADS = 3  # that end the process, in a row, one process at a time
_BEFORE_OTHERS = 10  # of what Python does at its end: it waits for these processes after that
# While a process is being forked nobody else may be: it would inherit, and hold open, the end of a pipe that says that
# the other one has died.
_starting = threading.Lock()


class _Raised(NamedTuple):
    """What reading raised, on its way here."""

    error: Exception
    shown: str


class _Batch(NamedTuple):
    """What was read. The bytes of its structure and of each tensor that has any follow it."""

    structure_bytes: int
    kinds: list[tuple[torch.dtype, torch.Size]]


class _There(Exception):
    """The traceback of what a process raised."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class ReadingProcesses:
    """``count`` processes, each started when it is first needed."""

    def __init__(self, count: int, start: Start, opens: Callable[[], Reads]) -> None:
        """``opens`` is called in each process, and gives what reads there."""
        self._all = [_Process(start, opens) for _ in range(count)]
        self._free: SimpleQueue[_Process] = SimpleQueue()
        for process in self._all:
            self._free.put(process)
        self._resting = threading.Lock()
        self._loading_alone = threading.Lock()
        self._died_loading = 0  # in a row, alone
        self._at_exit = Finalize(self, _kill, args=(self._all,), exitpriority=_BEFORE_OTHERS)

    def read(self, indices: NDArray[np.int64], seed: int, *, loading: Callable[[], None] = lambda: None) -> Any:
        """What reading these gives, or the exception that it raised; ReaderDied if it has ended three processes, with
        the sample at fault, if it is one's fault, as its attribute ``AT_FAULT``. Blocks; any thread may call it.

        ``loading`` is called now and then while a process loads the job, which may take longer than any read. Raises
        ReadersLost where no process can be had.
        """
        with self._lent(1) as process:
            try:
                return self._read(process, indices, seed, loading)
            except ReaderDied as death:
                logger.warning("%s: it is read again", death)
        with self._resting, self._lent(len(self._all)) as process:
            try:
                return self._read(process, indices, seed, loading)
            except ReaderDied as death:
                logger.warning("%s, for the second time: each sample is read by itself", death)
            for at, sample in enumerate(indices.tolist()):
                try:
                    self._read(process, indices[at : at + 1], seed, loading)
                except ReaderDied as death:
                    last = ReaderDied(death.how, death.doing, again=True)
                    setattr(last, AT_FAULT, sample)
                    return last
            try:
                return self._read(process, indices, seed, loading)
            except ReaderDied as death:
                return ReaderDied(death.how, death.doing, again=True)

    def close(self) -> None:
        """End them, once nothing is being read. Blocks."""
        for process in self._all:
            process.tell_to_end()
        for process in self._all:
            process.end(_ENDS_S)
        self._at_exit.cancel()

    def _read(self, process: _Process, indices: NDArray[np.int64], seed: int, loading: Callable[[], None]) -> Any:
        """What this process gives, or the exception that it raised. Raises ReaderDied where it died reading."""
        if not process.runs() and (failure := self._load(process, loading)) is not None:
            return failure
        return process.read(indices, seed)

    def _load(self, process: _Process, loading: Callable[[], None]) -> Any:
        """Have it started with the job loaded; what that raised. After a death one process at a time loads: it is
        mostly memory that was short."""
        try:
            return self._loaded(process, loading)
        except ReaderDied as death:
            died = death
        with self._loading_alone:
            while self._died_loading < _LOADS:
                logger.warning("%s: it is started again", died)
                try:
                    return self._loaded(process, loading)
                except ReaderDied as death:
                    died, self._died_loading = death, self._died_loading + 1
        raise ReadersLost(f"die while they load the job: the last of several {died.how}")

    def _loaded(self, process: _Process, loading: Callable[[], None]) -> Any:
        failure = process.load(loading)
        self._died_loading = 0
        return failure

    @contextmanager
    def _lent(self, count: int) -> Iterator[_Process]:
        """One of them, while ``count`` are nobody else's."""
        lent = [self._free.get() for _ in range(count)]
        try:
            yield lent[0]
        finally:
            for process in lent:
                self._free.put(process)


class _Process:
    """One of them, and who takes its place when it has died. One thread at a time uses it."""

    def __init__(self, start: Start, opens: Callable[[], Reads]) -> None:
        contexts = multiprocessing.get_context
        self._context = contexts("spawn") if start == "spawn" else contexts("fork")
        self._opens = opens
        self._running: tuple[BaseProcess, Connection] | None = None

    def runs(self) -> bool:
        if self._running is not None and self._running[0].exitcode is not None:
            logger.warning("a reading process %s while it had nothing to do", _ended(self._running[0].exitcode))
            self.end(0)
        return self._running is not None

    def load(self, loading: Callable[[], None]) -> Any:
        """Start it and have the job loaded; the exception that this raised. Raises ReaderDied, ReadersLost."""
        try:
            self._start()
        except OSError as error:
            raise ReadersLost(f"cannot be started: {error}") from error
        if (failure := self._asked(None, "loaded the job", loading)) is not None:
            self.end(_ENDS_S)
        loading()
        return failure

    def read(self, indices: NDArray[np.int64], seed: int) -> Any:
        """What reading gives, or the exception that it raised. Raises ReaderDied."""
        numbers = indices.tolist()
        named = f"sample {numbers[0]}" if len(numbers) == 1 else f"samples {', '.join(map(str, numbers))}"
        return self._asked((indices, seed), f"read {named}")

    def tell_to_end(self) -> None:
        if self._running is not None:
            with suppress(OSError):  # it has ended by itself
                self._running[1].send(None)

    def end(self, wait_s: float) -> None:
        """Have it ended: after ``wait_s`` it is killed."""
        if self._running is None:
            return
        (process, pipe), self._running = self._running, None
        process.join(wait_s)
        process.kill()
        process.join(_LOOK_S)
        pipe.close()
        with suppress(ValueError):  # not even that has ended it: a disk hangs
            process.close()

    def kill(self) -> None:
        if self._running is not None:
            self._running[0].kill()

    def _start(self) -> None:
        with _starting:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._opens), name="w5xde-read")
            process.start()
            theirs.close()
        self._running = process, ours

    def _asked(self, question: Any, doing: str, waiting: Callable[[], None] = lambda: None) -> Any:
        assert self._running is not None
        process, pipe = self._running
        try:
            if question is not None:
                pipe.send(question)
            _wait(process, pipe, waiting)
            answer = pipe.recv()
            if isinstance(answer, _Batch):
                return _received(process, pipe, answer)
        except Exception as error:
            process.join(_LOOK_S)
            code = process.exitcode
            self.end(0)
            if code is None and not isinstance(error, EOFError):
                return error  # it has come and cannot be taken in, as where memory is short here
            raise ReaderDied(_ended(code), doing) from error
        if isinstance(answer, _Raised):
            return marked(answer.error, "__cause__", _There(answer.shown))
        return answer


def _received(process: BaseProcess, pipe: Connection, batch: _Batch) -> tuple[bytes, tuple[Tensor, ...]]:
    structure = bytearray(batch.structure_bytes)
    tensors = tuple([torch.empty(shape, dtype=dtype) for dtype, shape in batch.kinds])
    for part in (memoryview(structure), *map(bytes_of, tensors)):
        _take(process, pipe, part)
    return bytes(structure), tensors


def _take(process: BaseProcess, pipe: Connection, part: memoryview) -> None:
    """Fill ``part`` by what the process puts. Raises EOFError where it dies meanwhile.

    Not as a message of the pipe's own, half of which is waited for as long as anybody has the other end open.
    """
    if sys.platform == "win32":
        if part:
            _wait(process, pipe)
            pipe.recv_bytes_into(part)
        return
    while part:
        _wait(process, pipe)
        came = os.readv(pipe.fileno(), [part])
        if not came:
            raise EOFError
        part = part[came:]


def _wait(process: BaseProcess, pipe: Connection, waiting: Callable[[], None] = lambda: None) -> None:
    """For what comes next; ``waiting`` is called at each look. Raises EOFError where nothing will."""
    while not pipe.poll(_LOOK_S):
        waiting()
        if process.exitcode is not None:  # and a process of its own holds its end of the pipe
            raise EOFError


def _kill(processes: Iterable[_Process]) -> None:
    for process in processes:
        process.kill()


def _ended(code: int | None) -> str:
    """How a process did, by what Python says of it."""
    if code is None:
        return "no longer answered"
    if code >= 0:
        return f"ended with exit code {code}"
    known = -code in signal.Signals.__members__.values()
    return f"was ended by {signal.Signals(-code).name if known else f'signal {-code}'}"


# -- in the process


def _serve(pipe: Connection, opens: Callable[[], Reads]) -> None:
    _heed_no_stops()
    threading.Thread(target=_end_with_owner, name="w5xde-owner", daemon=True).start()
    with heard():  # no KeyboardInterrupt is Ctrl-C's
        try:
            read = opens()
            pipe.send(None)
        except Exception as error:
            pipe.send(_raised(error))
            return
        while (asked := pipe.recv()) is not None:
            try:
                structure, tensors = read(*asked)
                parts = [memoryview(structure), *map(bytes_of, tensors)]
            except Exception as error:
                pipe.send(_raised(error))
                continue
            pipe.send(_Batch(len(structure), [(tensor.dtype, tensor.shape) for tensor in tensors]))
            for part in parts:
                _put(pipe, part)


def _put(pipe: Connection, part: memoryview) -> None:
    """What ``_take`` takes, who knows how much it is."""
    if sys.platform == "win32":
        if part:
            pipe.send_bytes(part)
        return
    while part:
        part = part[os.write(pipe.fileno(), part) :]


def _raised(error: Exception) -> _Raised:
    shown = LeafFailed.shown(error)
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # its class takes other arguments than it keeps, or it holds something
        told = RuntimeError(headline(shown))
        if hasattr(error, AT_FAULT):
            setattr(told, AT_FAULT, getattr(error, AT_FAULT))
        error = told
    return _Raised(error, shown)


def _end_with_owner() -> None:
    """No goodbye is owed, and nothing may keep this process."""
    owner = multiprocessing.parent_process()
    assert owner is not None
    # Others that were forked after this one may hold the pipe open whose end the sentinel tells.
    while sys.platform == "win32" or os.getppid() == owner.pid:
        if wait([owner.sentinel], _LOOK_S):
            break
    os._exit(1)


def _heed_no_stops() -> None:
    own = os.getpid()

    def received(number: int, _: FrameType | None) -> None:
        if os.getpid() != own:  # a process that the dataset has forked: who started it may want to end it so
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.set_wakeup_fd(-1)  # where this process was forked: the owner's event loop listens there
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, received)
