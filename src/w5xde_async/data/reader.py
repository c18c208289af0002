"""Leaves read from a dataset, by threads or processes: at the coordinator, and at a worker that has the data itself."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from w5xde_async.compute.batch import flatten, on_host
from w5xde_async.data.config import ReadersConfig
from w5xde_async.data.reading_processes import ReadingProcesses, Reads
from w5xde_async.data.shards import Fingerprints, fingerprints
from w5xde_async.data.stream import AT_FAULT, StreamReader
from w5xde_async.errors import JobError, UsageError, marked, utf8
from w5xde_async.job import Job, collated, load_job, made_by, may_change_samples
from w5xde_async.openmp import alone
from w5xde_async.randomness import draws_random, random_state, seed_all
from w5xde_async.runtime import thread_pool
from w5xde_async.users_code import users_code

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_STEADY_SAMPLES = 64
_HOLD_FILES = ("h5py", "sqlite3")  # modules whose objects have a file that Python does not see


class Read(NamedTuple):
    """Samples as a batch."""

    structure: bytes
    tensors: tuple[Tensor, ...]


def _lies_plain(tensor: Tensor) -> bool:
    """Whether rows that are gathered of it need no ``on_host``."""
    return not (tensor.requires_grad or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg())


class LeafReader:
    """Reads samples of ``job.dataset`` and collates them. Results come on the event loop's thread.

    Datasets that draw random numbers are seeded by what is given with each read: threads then take turns; processes
    need not. A dataset counts as one that draws until 64 samples have been read without.
    """

    def __init__(
        self,
        job: Job,
        config: ReadersConfig | None = None,
        *,
        reference: str | None = None,
        local: str = "",
        make_pool: Callable[[int, str], Executor] = thread_pool,
        stream: StreamReader | None = None,
    ) -> None:
        """``reference``: how a process loads the job; without one it is inherited. ``local``: what its ``local_data``
        opens instead of the dataset. ``make_pool``: of so many threads, with such a name, where no processes read.
        """
        config = config or ReadersConfig()
        self._job, self._stream = job, stream
        #: Whether rows of tensors are gathered, of any number of leaves at once.
        self.gathers = type(job.dataset) is TensorDataset and job.collate is None
        self._random: bool | None = None if not self.gathers else False
        # Of gathered rows: whether they lie as they are sent, and their structure, which is the dataset's own.
        self._plain = self.gathers and all(map(_lies_plain, job.dataset.tensors))
        self._structure: bytes | None = None
        self._steady = 0  # samples read so far without a random number
        self._probing = threading.Lock()
        threads, processes = config.loader_threads, config.loader_processes
        if stream is not None:
            threads, processes = 1, 0
        remote = processes > 0 and not self.gathers
        self.num_readers = max(1, processes or threads)
        # Starting a process blocks, and so does telling it something: each has a thread here that waits for it.
        self._threads = make_pool(self.num_readers, "w5xde-load")
        self._processes = _process_pool(job, reference, local, processes) if remote else None
        self._jobs: set[Future[Any]] = set()  # reads under way, and those that wait for a thread

    @property
    def reads_here(self) -> bool:
        """Whether threads of this process read, which may hold its random numbers meanwhile."""
        return self._processes is None

    @property
    def may_draw(self) -> bool:
        """Whether reads may wait for their turn to draw random numbers."""
        return not self.gathers and (self._stream is not None or self._random is not False)

    def read(self, indices: NDArray[np.int64], seed: int) -> asyncio.Future[Read]:
        """The batch of these samples (int64). What their reading raises has the one at fault, if it is one's fault, as
        its attribute ``AT_FAULT``."""
        read: asyncio.Future[Read] = asyncio.get_running_loop().create_future()

        def hand_on(there: asyncio.Future[Any]) -> None:
            if there.cancelled() or read.cancelled():
                read.cancel()
            elif isinstance(outcome := there.exception() or there.result(), BaseException):
                read.set_exception(outcome)  # not raised here: its traceback is that of who read
                read.exception()  # of several that fail only the first may be looked at, which ends the run
            else:
                read.set_result(Read(*outcome))

        reads = self._outcome if self._processes is None else self._processes.read
        there = self.submit(reads, indices, seed)
        there.add_done_callback(hand_on)
        read.add_done_callback(lambda _: there.cancel())  # one that is not wanted any more is not begun
        return read

    def read_in_turn(
        self, wanted: Sequence[tuple[NDArray[np.int64], int]], ahead: Sequence[tuple[NDArray[np.int64], int]],
        seconds: float,
    ) -> asyncio.Future[list[Read | Exception]]:  # fmt: skip
        """Several batches in one go, each by its indices and its seed, where threads of this process read: all of
        ``wanted``, or what reading them raised, and then of ``ahead`` as many as can be begun within so many seconds,
        up to the first of those that cannot be read."""
        return self.submit(self._read_some, wanted, ahead, seconds)

    def gather(self, indices: NDArray[np.int64]) -> Read:
        """``read`` on this thread, where rows of tensors are gathered."""
        at = torch.from_numpy(np.array(indices))
        if self._plain:
            rows = tuple([tensor.index_select(0, at) for tensor in self._job.dataset.tensors])
        else:
            rows = tuple([on_host(t.index_select(0, at.to(t.device))) for t in self._job.dataset.tensors])
        if self._structure is None:
            self._structure = flatten(rows)[0]
        return Read(self._structure, rows)

    def fingerprints(self, heard: Callable[[], None] = lambda: None) -> Fingerprints:
        """Of the dataset's shards, read by the processes where there are any. Blocks; any thread may call it.

        ``heard`` is called, on that thread, before each sample, and while a process loads the job. Raises JobError
        where that cannot be loaded there, and ReadersLost.
        """
        read = None if self._processes is None else partial(self._read_there, heard)
        return fingerprints(self._job, read, heard=heard)

    async def quiet(self) -> None:
        """Wait for the reads that are under way now, not for those that have no thread yet."""
        await asyncio.gather(
            *(asyncio.wrap_future(job) for job in tuple(self._jobs) if job.running()), return_exceptions=True
        )

    async def aclose(self) -> None:
        """Wait for reads under way. Cancelled, it leaves them to themselves."""
        loop = asyncio.get_running_loop()
        under_way = [asyncio.wrap_future(job) for job in tuple(self._jobs)]
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*under_way, return_exceptions=True)
        await loop.run_in_executor(None, self._threads.shutdown)
        if self._processes is not None:
            await loop.run_in_executor(None, self._processes.close)

    def submit(self, call: Callable[..., _T], *args: Any) -> asyncio.Future[_T]:
        """Have one of the threads call something that reads, too."""
        job = self._threads.submit(call, *args)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return asyncio.wrap_future(job)

    def _read_there(self, heard: Callable[[], None], index: int) -> Read:
        assert self._processes is not None
        outcome: Read | BaseException = self._processes.read(np.array([index]), 0, loading=heard)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _read_some(self, wanted: Any, ahead: Any, seconds: float) -> list[Read | Exception]:
        found, until = list[Read | Exception](), time.monotonic() + seconds
        for indices, seed in wanted:
            found.append(self._outcome(indices, seed))
        for indices, seed in ahead:
            if time.monotonic() >= until:
                break
            found.append(self._outcome(indices, seed))
            if isinstance(found[-1], Exception):
                break
        return found

    def _outcome(self, indices: Any, seed: int) -> Read | Exception:
        """What is read, or what reading raised: of some exceptions asyncio would make others on the way to its loop."""
        try:
            return _tried_again(partial(self._read_here, indices, seed))
        except Exception as error:
            return error

    def _read_here(self, indices: Any, seed: int) -> Read:
        if self.gathers:
            return self.gather(indices)
        draws = self._random if self._stream is None else self._stream.draws is not False
        if draws is None:
            return self._probe(indices, seed)
        if not draws:
            return _fetch(self._job, indices, self._stream)
        with random_state():
            seed_all(seed)
            return _fetch(self._job, indices, self._stream)

    def _probe(self, indices: Any, seed: int) -> Read:
        """Read as from a dataset that draws random numbers, and see whether it does."""
        found: list[Read] = []
        with self._probing:
            if draws_random(lambda: found.append(_fetch(self._job, indices)), seed):
                self._random = True
            self._steady += len(indices)
            if self._random is None and self._steady >= min(_STEADY_SAMPLES, self._job.num_samples or _STEADY_SAMPLES):
                self._random = False
        return found[0]


def _tried_again(read: Callable[[], Read]) -> Read:
    """What ``read`` makes. A sample is at fault only if it raises a second time.

    A file system over a network that gives up for once, or threads in each other's way within a library (numpy's files
    and the parser of Python 3.11) are not its fault: it would be left out for good, or end the run.
    """
    failed: dict[int | None, str] = {}
    while True:
        try:
            found = read()
        except (JobError, MemoryError):
            raise
        except Exception as error:
            if (sample := getattr(error, AT_FAULT, None)) in failed:
                raise
            failed[sample] = utf8(f"{type(error).__name__}: {error}"[:200])
            continue
        for sample, why in failed.items():
            what = "a batch" if sample is None else f"sample {sample}"
            logger.warning("%s could not be read (%s); read once more it was there", what, why)
        return found


def _fetch(job: Job, indices: Any, stream: StreamReader | None = None) -> Read:
    numbers, came = indices.tolist(), list[Any]()
    samples: Any = came
    many = getattr(job.dataset, "__getitems__", None) if stream is None else stream.read
    try:
        with users_code(), alone():
            samples = _read_all(came, job, numbers, many)
            structure, tensors = flatten((job.collate or default_collate)(samples))
    except Exception as error:
        known = isinstance(error, JobError) or hasattr(error, AT_FAULT)
        if not known and (sample := _at_fault(job, numbers, samples, many)) is not None:
            error = marked(error, AT_FAULT, sample)
        raise error
    if may_change_samples(job.collate):  # it may write into the same memory at its next call, or give the dataset's
        return Read(structure, tuple(map(_own, tensors)))
    return Read(structure, tuple(map(on_host, tensors)))


def _own(tensor: Tensor) -> Tensor:
    """``on_host``, in memory of its own."""
    host = on_host(tensor)
    return host.clone() if host.data_ptr() == tensor.data_ptr() else host


def _read_all(came: list[Any], job: Job, numbers: list[int], many: Callable[[list[int]], Any] | None) -> Any:
    """The samples, at once by ``many`` of a dataset that has it. Else those that ``came`` are there when one raises."""
    if many is None:
        for number in numbers:
            came.append(job.dataset[number])  # noqa: PERF401
        return came
    samples = many(numbers)
    if len(samples) != len(numbers):
        reason = f"dataset.__getitems__ gave {len(samples)} samples for {len(numbers)} indices"
        raise JobError("dataset", reason, "give one for each, in their order")
    return samples


def _at_fault(job: Job, numbers: list[int], samples: Any, many: Callable[[list[int]], Any] | None) -> int | None:
    """The sample because of which a leaf could not be read, if it is one's: by itself or beside the others.

    ``samples`` were read of it before something raised.
    """
    if many is None and len(samples) < len(numbers):
        return numbers[len(samples)]
    if len(numbers) == 1:
        return numbers[0]
    parts, call = samples, lambda some: flatten(collated(job.collate, some))
    if many is not None and not len(samples):
        parts, call = numbers, many
    elif may_change_samples(job.collate):  # those were given to it
        try:
            parts = _read_all([], job, numbers, many)
        except Exception:
            return None
    if len(parts) != len(numbers):  # what was read is not what was asked for
        return None
    alone = [number for number, part in zip(numbers, parts, strict=True) if _raises(call, [part])]
    if 0 < len(alone) < len(numbers):
        return alone[0]
    spoils = [
        number for at, number in enumerate(numbers) if not _raises(call, [*parts[:at], *parts[at + 1 :]])
    ]  # all others go together
    return spoils[0] if len(spoils) == 1 else None


def _raises(call: Callable[[list[Any]], Any], argument: list[Any]) -> bool:
    try:
        with users_code():
            call(argument)
    except Exception:
        return True
    return False


def _process_pool(job: Job, reference: str | None, local: str, processes: int) -> ReadingProcesses:
    # A job that has a name on the command line is loaded anew; one that was built in a program is inherited by fork.
    if reference is not None:
        return ReadingProcesses(processes, "spawn", partial(_opened, reference, local))
    if not hasattr(os, "fork"):
        raise UsageError(
            "loader_processes: on Windows other processes read a job by its name alone; give the job as FILE.py:NAME, "
            "or use loader_threads"
        )
    for name in _open_files(job.dataset):
        logger.warning(
            "the dataset's attribute %s is a file that is open, and reading processes share it, with the place that it "
            "is read at: they may read wrong samples; open it in dataset[i], once in each process, or give the job as "
            "FILE.py:NAME",
            name,
        )
    return ReadingProcesses(processes, "fork", partial(_reads, job))


def _open_files(dataset: Any) -> list[str]:
    """The attributes that hold a descriptor: a process that is forked has it in common with this one."""
    found = []
    for name, value in getattr(dataset, "__dict__", {}).items():
        held = str(type(value).__module__).partition(".")[0] in _HOLD_FILES
        with suppress(Exception):  # a file that is closed, or in memory
            file = getattr(value, "fp", None) or getattr(value, "fileobj", None) or value  # of archives
            held = held or (isinstance(file, io.IOBase) and file.fileno() >= 0)
        if held:
            found.append(name)
    return found


def _reads(job: Job) -> Reads:
    """In a reading process: what reads for the job."""
    torch.set_num_threads(1)
    return partial(_read_seeded, job)


def _opened(reference: str, local: str) -> Reads:
    torch.set_num_threads(1)
    job = load_job(reference)
    return _reads(with_local_data(job, local) if local else job)


def with_local_data(job: Job, where: str) -> Job:
    """The job over its own copy of the data, as its ``local_data`` opens it. Raises JobError."""
    opens = job.local_data
    if opens is None:
        raise JobError("local_data", "the job has none", "give Job(local_data=lambda where: ...), which opens a copy")
    dataset = made_by("local_data", lambda: opens(where))
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise JobError("local_data", f"it gave a {type(dataset).__name__}", "give a dataset with dataset[i] and len()")
    return replace(job, dataset=dataset)


def _read_seeded(job: Job, indices: Any, seed: int) -> Read:
    def read() -> Read:
        seed_all(seed)
        return _fetch(job, indices)

    return _tried_again(read)
