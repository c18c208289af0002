"""Reading processes: what was read by one that died is read again, and none outlives its owner."""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import os
import signal
import sqlite3
import threading
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from w5xde_async.data import reader as reader_module
from w5xde_async.data import reading_processes as processes_module
from w5xde_async.data.config import DataConfig, ReadersConfig
from w5xde_async.data.loader import Loader
from w5xde_async.data.reader import LeafReader
from w5xde_async.data.reading_processes import Reads
from w5xde_async.data.shards import fingerprints
from w5xde_async.data.stream import AT_FAULT
from w5xde_async.errors import JobError, LeafFailed, ReadersLost
from w5xde_async.job import Job
from w5xde_async.params.flat import bytes_of
from w5xde_async.plan.sampler import Sampler
from w5xde_async.plan.tree import Block

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the job is inherited by fork")
SAMPLES, LEAF = 16, 4
LEAF_3 = np.arange(12, 16)


class Dataset:
    """Samples of a number and a random one; ``at(index)`` is called before each is read."""

    def __init__(self, at: Callable[[int], object]) -> None:
        self.at = at

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        self.at(index)
        return index, torch.rand(2)


def job(at: Callable[[int], object] = lambda index: None) -> Job:
    return Job(
        model=nn.Identity, dataset=Dataset(at), optimizer=lambda m: None, batch_size=8, microbatch_size=LEAF, epochs=1
    )  # type: ignore[arg-type, return-value]  # fmt: skip


@asynccontextmanager
async def reading(at: Callable[[int], object] = lambda index: None, processes: int = 2) -> AsyncIterator[LeafReader]:
    reader = LeafReader(job(at), ReadersConfig(loader_processes=processes))
    try:
        yield reader
    finally:
        await reader.aclose()


def rows(reads: list[Any]) -> list[list[Any]]:
    return [[tensor.tolist() for tensor in read.tensors] for read in reads]


async def all_leaves(reader: LeafReader) -> list[list[Any]]:
    leaves = np.arange(SAMPLES).reshape(-1, LEAF)
    return rows(await asyncio.gather(*[reader.read(leaf, seed) for seed, leaf in enumerate(leaves)]))


def deaths(marks: Path) -> int:
    return len(list(marks.iterdir()))


def dies(times: int, marks: Path, *, at: int, of: Callable[[], object]) -> Callable[[int], None]:
    """What ends its process at this sample, so often."""

    def read(index: int) -> None:
        died = deaths(marks)
        if index == at and died < times:
            (marks / str(died)).touch()
            of()

    return read


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("times", [1, 2])
async def test_what_was_read_by_a_process_that_died_is_read_again(
    times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with reading() as reader:
        expected = await all_leaves(reader)
    async with reading(dies(times, tmp_path, at=6, of=kill)) as reader:
        assert await all_leaves(reader) == expected
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == times
    assert all(
        text.startswith("a reading process was ended by SIGKILL while it read samples 4, 5, 6, 7") for text in said
    )


@pytest.mark.slow
async def test_a_process_that_dies_beside_the_pipe_that_its_own_holds_open(tmp_path: Path) -> None:
    """As where a dataset starts processes: nobody sees the end of the pipe then."""
    held = os.pipe()

    def fork_and_die() -> None:
        if os.fork():
            kill()
        os.close(held[1])
        os.read(held[0], 1)  # until the test closes it
        os._exit(0)

    async with reading(dies(1, tmp_path, at=13, of=fork_and_die), processes=1) as reader:
        read = await reader.read(LEAF_3, 0)
    os.close(held[0])
    os.close(held[1])
    assert read.tensors[0].tolist() == LEAF_3.tolist()


@pytest.mark.parametrize(
    ("of", "how"),
    [(kill, "was ended by SIGKILL"), (partial(os._exit, 3), "ended with exit code 3")],
    ids=["killed", "exits"],
)
async def test_the_sample_is_named_whose_reading_ends_every_process(
    of: Callable[[], object], how: str, tmp_path: Path
) -> None:
    async with reading(dies(99, tmp_path, at=13, of=of)) as reader:
        with pytest.raises(Exception, match=f"a reading process {how} while it read sample 13, and") as caught:
            await reader.read(LEAF_3, 0)
        assert getattr(caught.value, AT_FAULT) == 13
        assert deaths(tmp_path) == 3
        await reader.read(np.arange(4), 0)  # others go on


async def test_a_leaf_that_ends_processes_as_a_whole_blames_no_sample(tmp_path: Path) -> None:
    class Whole(Dataset):
        def __getitems__(self, indices: list[int]) -> list[tuple[int, Tensor]]:
            if len(indices) == LEAF:
                os._exit(3)
            return [self[index] for index in indices]

    whole = job()
    object.__setattr__(whole, "dataset", Whole(lambda index: None))
    reader = LeafReader(whole, ReadersConfig(loader_processes=1))
    with pytest.raises(Exception, match="while it read samples 12, 13, 14, 15, and so did") as caught:
        await reader.read(LEAF_3, 0)
    await reader.aclose()
    assert not hasattr(caught.value, AT_FAULT)


@pytest.mark.parametrize("most", [0, 1])
async def test_such_a_sample_ends_the_run_or_is_left_out(most: int, tmp_path: Path) -> None:
    steps = Sampler(num_samples=SAMPLES, batch_size=8, leaf_samples=LEAF, seed=3)
    plan = steps.plan(0)
    bad = int(plan.indices[5])
    told: list[tuple[int, str]] = []
    errors: asyncio.Queue[BaseException] = asyncio.Queue()
    loader = Loader(
        job(dies(99, tmp_path, at=bad, of=partial(os._exit, 3))), steps,
        DataConfig(loader_processes=2, max_bad_samples=most),
        on_skip=lambda *of: told.append(of), on_error=errors.put_nowait,
    )  # fmt: skip
    loader.open(plan)
    if most:
        data = await loader.wait(0, Block(1, 2))
        assert data is not None
        assert [sample for sample, _ in told] == [bad]
        assert told[0][1].startswith("a reading process ended with exit code 3 while it read sample")
    else:
        error = await errors.get()
        assert isinstance(error, LeafFailed)
        assert error.sample == bad
        assert str(error).startswith("step 0, leaf 1: a reading process ended with exit code 3 while it read sample")
    await loader.aclose()


def all_kinds(samples: list[Any]) -> dict[str, Tensor]:
    at = torch.tensor([index for index, _ in samples])
    odd = torch.randint(0, 1 << 15, (3, 5), dtype=torch.int16)
    return {
        "index": at,
        "bfloat16": odd.view(torch.bfloat16),  # some are nan, of any bits
        "float8": odd.view(torch.float8_e5m2),
        "bool": odd > 7,
        "complex": torch.randn(2, 3, dtype=torch.complex64).conj(),
        "0-dim": torch.tensor(-0.0),
        "empty": torch.empty(0, 3),
        "row": torch.randn(4, 5)[2],
        "column": torch.randn(4, 5)[:, 2],
        "turned": torch.randn(4, 5).T,
        "expanded": torch.randn(5, 1).expand(5, 3),
        "large": torch.randn(600_000),
    }


async def test_what_processes_read_has_the_bits_and_dtypes_of_what_threads_read() -> None:
    kinds = replace(job(), collate=all_kinds)
    found = []
    for config in (ReadersConfig(), ReadersConfig(loader_processes=1)):
        reader = LeafReader(kinds, config)
        found.append(await reader.read(LEAF_3, 7))
        await reader.aclose()
    here, there = found
    assert there.structure == here.structure
    for mine, its in zip(here.tensors, there.tensors, strict=True):
        assert (its.dtype, its.shape) == (mine.dtype, mine.shape)
        assert bytes_of(its) == bytes_of(mine)


async def test_what_is_read_needs_no_descriptors_and_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of either a machine may have little: ``ulimit -n``, and the 64 MiB of a container's /dev/shm."""

    def none_left(*_: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device")

    for shares in ("_share_fd_cpu_", "_share_filename_cpu_"):
        monkeypatch.setattr(torch.UntypedStorage, shares, none_left)
    reader = LeafReader(
        replace(job(), collate=lambda samples: list(torch.zeros(64, 8))), ReadersConfig(loader_processes=1)
    )
    held = [await reader.read(LEAF_3, 0)]
    before = len(os.listdir("/dev/fd"))
    held += [await reader.read(LEAF_3, 0) for _ in range(3)]
    assert len(os.listdir("/dev/fd")) == before
    assert [len(read.tensors) for read in held] == [64] * 4
    await reader.aclose()


async def test_one_that_dies_before_all_that_it_read_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    puts = processes_module._put

    def put(pipe: Connection, part: memoryview) -> None:
        dies(1, tmp_path, at=0, of=kill)(0)
        puts(pipe, part)

    monkeypatch.setattr(processes_module, "_put", put)
    async with reading(processes=1) as reader:
        assert (await reader.read(LEAF_3, 0)).tensors[0].tolist() == LEAF_3.tolist()
    assert deaths(tmp_path) == 1


@pytest.mark.slow
async def test_one_that_dies_in_the_middle_of_a_tensor_beside_the_pipe_that_its_own_holds_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, waits, waited = os.pipe(), processes_module._wait, list[BaseProcess]()

    def wait(process: BaseProcess, *of: Any) -> None:
        waited.append(process)
        waits(process, *of)
        if len(waited) == 3:  # the job is loaded, the read has begun to come, and it is more than a pipe holds
            process.kill()
            process.join()

    def fork(_: int) -> None:
        if not os.fork():
            os.close(held[1])
            os.read(held[0], 1)  # until the test closes it
            os._exit(0)

    monkeypatch.setattr(processes_module, "_wait", wait)
    reader = LeafReader(
        replace(job(fork), collate=lambda samples: torch.zeros(1 << 20)), ReadersConfig(loader_processes=1)
    )
    read = await reader.read(LEAF_3[:1], 0)
    os.close(held[0])
    os.close(held[1])
    assert waited[0] is not waited[-1]
    assert torch.equal(read.tensors[0], torch.zeros(1 << 20))
    await reader.aclose()


def dies_loading(
    times: int, marks: Path, monkeypatch: pytest.MonkeyPatch, after: Callable[[], object] = lambda: True
) -> None:
    """Processes of readers that are made now die so often while they load the job, if ``after`` has happened."""
    loads = reader_module._reads

    def load(of: Job) -> Reads:
        if after():
            dies(times, marks, at=0, of=kill)(0)
        return loads(of)

    monkeypatch.setattr(reader_module, "_reads", load)


async def test_processes_that_died_while_they_loaded_the_job_are_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with reading() as reader:
        expected = await all_leaves(reader)
    dies_loading(3, tmp_path, monkeypatch)
    async with reading(processes=1) as reader:
        assert await all_leaves(reader) == expected
    assert [record.getMessage() for record in caplog.records] == [
        "a reading process was ended by SIGKILL while it loaded the job: it is started again"
    ] * 3


async def test_one_that_cannot_load_the_job_again_blames_not_what_was_read_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the kernel has killed the process over this sample's leaf, and memory is short still."""
    loads, read = tmp_path / "loads", tmp_path / "read"
    for marks in (loads, read):
        marks.mkdir()
    dies_loading(3, loads, monkeypatch, after=lambda: deaths(read))
    async with reading(dies(2, read, at=13, of=kill), processes=1) as reader:
        assert (await reader.read(LEAF_3, 0)).tensors[0].tolist() == LEAF_3.tolist()
    assert deaths(loads) == 3


@pytest.mark.parametrize("processes", [1, 3])
async def test_where_all_die_loading_the_job_the_run_ends_and_no_sample_is_at_fault(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies_loading(99, tmp_path, monkeypatch)
    steps = Sampler(num_samples=SAMPLES, batch_size=8, leaf_samples=LEAF, seed=3)
    told: list[tuple[int, str]] = []
    errors: asyncio.Queue[BaseException] = asyncio.Queue()
    loader = Loader(
        job(), steps, DataConfig(loader_processes=processes, max_bad_samples=5),
        on_skip=lambda *of: told.append(of), on_error=errors.put_nowait,
    )  # fmt: skip
    loader.open(steps.plan(0))
    error = await errors.get()
    await loader.aclose()
    assert isinstance(error, ReadersLost)
    assert "was ended by SIGKILL" in str(error)
    assert "--loader-processes" in str(error)
    assert "sample" not in str(error)
    assert not told


async def test_where_no_process_can_be_started_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pipe(*_: object) -> None:
        raise OSError(24, "Too many open files")

    async with reading() as reader:
        monkeypatch.setattr(multiprocessing.get_context("fork"), "Pipe", no_pipe)
        with pytest.raises(ReadersLost, match=r"cannot be started: .*Too many open files"):
            await reader.read(LEAF_3, 0)


@pytest.mark.parametrize("opened", ["file", "archive", "database", "bytes"])
async def test_a_file_that_forked_processes_would_share_is_warned_of(
    opened: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(64))
    of = job()
    with ExitStack() as open_now:
        if opened == "file":
            of.dataset.held = open_now.enter_context(path.open("rb"))
        elif opened == "archive":
            of.dataset.held = open_now.enter_context(zipfile.ZipFile(tmp_path / "zip", "w"))
        elif opened == "database":
            of.dataset.held = open_now.enter_context(closing(sqlite3.connect(tmp_path / "sql")))
        else:  # each process has a copy
            of.dataset.held = io.BytesIO(bytes(64))
        await LeafReader(of, ReadersConfig(loader_processes=1)).aclose()
    said = [record.getMessage() for record in caplog.records]
    if opened == "bytes":
        assert not said
    else:
        assert len(said) == 1
        assert said[0].startswith("the dataset's attribute held is a file that is open, and reading processes share it")


class Awkward(Exception):
    """As h5py's, PIL's and botocore's: what it is made of is not what it keeps."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: {code}")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [(Awkward("corrupt", 7), RuntimeError, "Awkward: corrupt: 7"), (JobError("x", "y", "z"), JobError, "job x: y; z")],
    ids=["awkward", "job"],
)
async def test_what_cannot_be_sent_as_it_was_raised_is_told(error: Exception, kind: type, said: str) -> None:
    def fail(index: int) -> None:
        if index == 13:
            raise error

    async with reading(fail) as reader:
        with pytest.raises(kind, match=said) as caught:
            await reader.read(LEAF_3, 0)
        if kind is RuntimeError:
            assert getattr(caught.value, AT_FAULT) == 13


async def process_of(reader: LeafReader) -> int:
    read = await reader.read(np.arange(1), 0)
    return int(read.structure.split(b"pid ")[1].split(b";")[0])


class Named:
    """Samples that say who reads them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, str]:
        return index, f"pid {os.getpid()};"


def named_job() -> Job:
    return Job(model=nn.Identity, dataset=Named(), optimizer=lambda m: None, batch_size=1, epochs=1)  # type: ignore[arg-type, return-value]


async def test_what_stops_a_run_in_good_order_stops_no_reader() -> None:
    reader = LeafReader(named_job(), ReadersConfig(loader_processes=1))
    process = await process_of(reader)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process, number)
        assert await process_of(reader) == process
    await reader.aclose()


async def test_one_that_dies_between_reads_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    reader = LeafReader(named_job(), ReadersConfig(loader_processes=1))
    process = await process_of(reader)
    os.kill(process, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert await process_of(reader) != process
    assert [record.getMessage() for record in caplog.records] == [
        "a reading process was ended by SIGKILL while it had nothing to do"
    ]
    await reader.aclose()


def test_no_reader_outlives_its_owner_that_is_killed() -> None:
    """Also where it reads, and where another that was forked later holds the pipe that tells of the owner's end."""
    ends, begun = os.pipe(), os.pipe()

    def hang(index: int) -> None:
        os.write(begun[1], b".")
        signal.pause()

    async def own() -> None:
        reader = LeafReader(job(hang), ReadersConfig(loader_processes=2))
        reads = [reader.read(LEAF_3, 0), reader.read(np.arange(4), 0)]
        await asyncio.gather(*reads)

    owner = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(own()))
    owner.start()
    os.close(ends[1])
    for _ in range(2):
        assert os.read(begun[0], 1)
    owner.kill()
    owner.join()
    owner.close()
    assert os.read(ends[0], 1) == b""  # all that had its other end are gone
    for descriptor in (ends[0], *begun):
        os.close(descriptor)


JOB = """
import os
from torch import nn
from w5xde_async import Job

class Hangs:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        os.write(os.open(FIFO, os.O_WRONLY), b".")
        import signal
        signal.pause()

def job():
    return Job(model=nn.Identity, dataset=Hangs(), optimizer=lambda m: None, batch_size=4, epochs=1)
"""


@pytest.mark.slow
def test_nor_does_one_that_was_started_anew(tmp_path: Path) -> None:
    path, fifo = tmp_path / "training.py", tmp_path / "fifo"
    path.write_text(f"FIFO = {str(fifo)!r}\n{JOB}")
    os.mkfifo(fifo)

    async def own() -> None:
        reader = LeafReader(job(), ReadersConfig(loader_processes=2), reference=f"{path}:job")
        await asyncio.gather(reader.read(LEAF_3, 0), reader.read(np.arange(4), 0))

    owner = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(own()))
    owner.start()
    with fifo.open("rb", buffering=0) as ends:
        assert ends.read(1)
        owner.kill()
        owner.join()
        owner.close()
        assert ends.read().strip(b".") == b""  # until both are gone, of which one may just have begun


# -- fingerprints


async def test_they_read_what_fingerprints_are_made_of() -> None:
    """The values are those that are read here, but for a shard one of whose samples ends whoever reads it."""
    here, owner, expected = threading.Event(), os.getpid(), fingerprints(job()).shards

    def at(index: int) -> None:
        if os.getpid() == owner:
            here.set()
        if index == 5:
            os._exit(0)

    async with reading(at) as reader:
        found = await reader.submit(reader.fingerprints)
    assert not here.is_set()
    assert found.shards == (*expected[:5], 0, *expected[6:])
    assert found.sample_bytes > 0


async def test_where_no_process_can_be_had_that_is_said_and_not_tried_for_each_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies_loading(99, tmp_path, monkeypatch)
    async with reading() as reader:
        with pytest.raises(ReadersLost, match="was ended by SIGKILL"):
            await reader.submit(reader.fingerprints)
    assert deaths(tmp_path) == 4


async def test_nor_where_the_job_cannot_be_loaded_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: Job) -> Reads:
        (tmp_path / str(deaths(tmp_path))).touch()
        raise JobError("train.py", "it is not there")

    monkeypatch.setattr(reader_module, "_reads", load)
    async with reading() as reader:
        with pytest.raises(JobError, match="it is not there"):
            await reader.submit(reader.fingerprints)
    assert deaths(tmp_path) == 1


async def test_a_process_that_loads_the_job_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: it is no read that hangs."""
    loads, (waits, goes_on), heard = reader_module._reads, os.pipe(), list[int]()

    def load(of: Job) -> Reads:
        os.read(waits, 1)
        return loads(of)

    def hear() -> None:
        heard.append(1)
        if len(heard) == 3:
            os.write(goes_on, b"\0")

    monkeypatch.setattr(reader_module, "_reads", load)
    monkeypatch.setattr(processes_module, "_LOOK_S", 0.01)
    async with reading(processes=1) as reader:
        assert (await reader.submit(reader.fingerprints, hear)).shards == fingerprints(job()).shards
    os.close(waits)
    os.close(goes_on)


@pytest.mark.slow
async def test_a_run_whose_workers_have_the_data_outlives_a_sample_that_ends_its_reader() -> None:
    owner = os.getpid()

    def at(index: int) -> None:
        assert os.getpid() != owner
        if index == 5:
            os._exit(0)

    made = replace(job(at), local_data=lambda where: Dataset(at))
    steps = Sampler(num_samples=SAMPLES, batch_size=8, leaf_samples=LEAF, seed=0)
    loader = Loader(made, steps, DataConfig(loader_processes=2, max_bad_samples=1))
    loader.open(steps.plan(0))
    assert loader._fingerprinting is not None
    found = await loader._fingerprinting
    assert [number for number, one in enumerate(found.shards) if not one] == [5]
    await loader.aclose()
