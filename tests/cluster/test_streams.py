"""Runs whose dataset is a stream: what people have, as it comes."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from tests.support import reference
from tests.support.cluster import QUICK_WORKER, Commits, settings, train
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.coordinator.service import Coordinator, RunResult
from w5xde_async.data.sharded import ShardedStream
from w5xde_async.errors import JobError, LeafFailed, UsageError, W5xdeError
from w5xde_async.job import Job
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.telemetry.events import Event, RunStarted
from w5xde_async.worker.service import Worker

ROWS = 300


def row(number: int) -> dict[str, Any]:
    return {"x": [float(number), 1.0, number % 7], "label": number % 2}


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    x = torch.tensor([one["x"] for one in rows], dtype=torch.float32) / ROWS
    return {"input": x, "labels": torch.tensor([one["label"] for one in rows])}


def job(dataset: Any, **changes: Any) -> Job:
    return Job(**{
        "model": lambda: nn.Linear(3, 2), "dataset": dataset, "loss": nn.functional.cross_entropy, "collate": collate,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "batch_size": 8, "max_steps": 60,
        "microbatch_size": 2, "shuffle_buffer": 50, **changes,
    })  # fmt: skip


def lines(shards: list[str]) -> ShardedStream:
    return ShardedStream(shards, open=open, decode=json.loads)


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """JSON lines in ten files."""
    paths = [tmp_path / f"{number}.jsonl" for number in range(10)]
    for number, path in enumerate(paths):
        path.write_text("\n".join(json.dumps(row(at)) for at in range(number * 30, number * 30 + 30)))
    return list(map(str, paths))


@pytest.fixture
def damaged(shards: list[str]) -> list[str]:
    """A line of two of them is cut off."""
    for path in map(Path, (shards[3], shards[7])):
        kept = path.read_text().splitlines()
        path.write_text("\n".join([*kept[:5], "{", *kept[6:]]))
    return shards


async def mark_in(path: Path) -> Any:
    """Where the newest checkpoint says that the stream goes on."""
    record, _ = await asyncio.to_thread(CheckpointStore(path / "checkpoints").latest)
    assert record is not None
    return record.meta["stream"]


async def stopped(path: Path, made: Job, at: int) -> RunResult:
    commits = Commits()
    async with Coordinator(made, run_dir=path, config=settings(checkpoint_every=5), bus=commits.bus) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=made, config=QUICK_WORKER).run())
        await commits.reach(at)
        coordinator.request_stop("enough")
        result = await coordinator.wait()
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    return result


@pytest.mark.slow
async def test_shards_of_lines(shards: list[str], tmp_path: Path) -> None:
    """Over the end of an epoch, stopped and resumed: the bits of one process. The checkpoint has shard and offset."""
    events: list[Event] = []
    expected = await asyncio.to_thread(reference.digest, job(lines(shards)))
    whole = await train(lambda: job(lines(shards)), workers=2, events=events)
    assert whole.digest == expected
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    assert (started.num_samples, started.steps_per_epoch) == (0, 0)
    before = await stopped(tmp_path / "run", job(lines(shards)), 17)
    mark = await mark_in(tmp_path / "run")
    assert 100 <= mark["place"] == mark["offset"] <= 8 * before.step
    assert mark["offset"] == 30 * mark["state"]["turn"] + mark["state"]["offset"]
    assert mark["state"]["shard"] == lines(shards).order()[mark["state"]["turn"]]
    after = await train(lambda: job(lines(shards)), run_dir=tmp_path / "run")
    assert (after.step, after.digest) == (60, expected)


def in_tar(path: str) -> Iterator[dict[str, bytes]]:
    """Files that follow each other and have one name but for what follows its first dot are one record."""
    with tarfile.open(path) as tar:
        for name, files in groupby(tar, lambda file: file.name.partition(".")[0]):
            yield {"name": name.encode()} | {
                file.name.partition(".")[2]: tar.extractfile(file).read() for file in files
            }


def from_tar(record: dict[str, bytes]) -> dict[str, Any]:
    return {"x": np.load(io.BytesIO(record["x.npy"])).tolist(), "label": int(record["label.cls"])}


@pytest.fixture
def tars(tmp_path: Path) -> list[str]:
    """The same rows in ten tar files, each with two files a sample."""
    paths = [str(tmp_path / f"{number}.tar") for number in range(10)]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for at in range(number * 30, number * 30 + 30):
                array = io.BytesIO()
                np.save(array, np.array(row(at)["x"]))
                for suffix, content in (("x.npy", array.getvalue()), ("label.cls", str(row(at)["label"]).encode())):
                    entry = tarfile.TarInfo(f"{at:04d}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    return paths


@pytest.mark.slow
async def test_shards_of_tar(tars: list[str], shards: list[str], tmp_path: Path) -> None:
    """As WebDataset has them. The same rows as lines come to the same bits."""
    expected = await train(lambda: job(lines(shards)))
    made = job(ShardedStream(tars, open=in_tar, decode=from_tar))
    await stopped(tmp_path / "run", made, 17)
    assert (await train(lambda: made, run_dir=tmp_path / "run", workers=2)).digest == expected.digest


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow
async def test_shards_behind_urls(shards: list[str], tmp_path: Path) -> None:
    expected = await train(lambda: job(lines(shards)))
    folder = str(Path(shards[0]).parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        serving = asyncio.create_task(asyncio.to_thread(server.serve_forever, 0.01))
        try:
            urls = [f"http://127.0.0.1:{server.server_port}/{Path(shard).name}" for shard in shards]
            made = job(ShardedStream(urls, open=urlopen, decode=json.loads))
            await stopped(tmp_path / "run", made, 17)
            resumed = await train(lambda: made, run_dir=tmp_path / "run")
        finally:
            server.shutdown()
            await serving
    assert resumed.digest == expected.digest


class Indexed(IterableDataset[Any]):
    """As MosaicML's ``StreamingDataset``: a stream by its class that gives any sample by its index."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return row(index)

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        raise AssertionError


async def test_a_stream_with_an_index_is_read_by_it() -> None:
    expected = await train(lambda: job([row(at) for at in range(ROWS)], max_steps=20))
    assert (await train(lambda: job(Indexed(), max_steps=20))).digest == expected.digest


@pytest.mark.slow
async def test_lines_that_are_none(damaged: list[str]) -> None:
    """They are left out as bad samples are, in each epoch anew."""
    first = await train(lambda: job(lines(damaged)), max_bad_samples=9)
    assert first.bad_samples == 4
    assert (await train(lambda: job(lines(damaged)), workers=2, max_bad_samples=4)).digest == first.digest
    with pytest.raises(LeafFailed, match="JSONDecodeError"):
        await train(lambda: job(lines(damaged)))


async def test_what_a_resume_refuses(shards: list[str], tmp_path: Path) -> None:
    await stopped(tmp_path / "run", job(lines(shards)), 17)
    with pytest.raises(W5xdeError, match="shuffle_buffer was 50 when its checkpoint was written and is 9 now"):
        await train(lambda: job(lines(shards), shuffle_buffer=9), run_dir=tmp_path / "run")
    with pytest.raises(JobError, match="the list of shards has changed"):
        await train(lambda: job(lines(shards[:-1])), run_dir=tmp_path / "run")


class Counted(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(row, range(44))

    def __len__(self) -> int:
        return 44


@pytest.mark.parametrize("changes", [{}, {"drop_last": True}, {"shuffle": False}])
async def test_epochs_of_one_with_a_len(changes: dict[str, Any]) -> None:
    def made() -> Job:
        return job(Counted(), max_steps=None, epochs=3, **changes)

    steps = 3 * (5 if changes.get("drop_last") else 6)
    result = await train(made, workers=2)
    assert (result.step, result.digest) == (steps, reference.digest(made(), steps))


async def test_epochs_of_one_without() -> None:
    with pytest.raises(UsageError, match="epochs cannot end the run: its dataset is a stream without len"):
        await train(lambda: job(ShardedStream([range(9)], open=iter)), epochs=2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dataset": Counted(), "epochs": 3}, ""),
        ({"epochs": 3}, "epochs=3 ends nothing: the dataset is a stream without len(). Step 4 ends the run"),
        ({"shuffle": False}, "shuffle_buffer=50 of the job does nothing: shuffle is off"),
        ({"dataset": [row(place) for place in range(44)]},
         "shuffle_buffer=50 of the job does nothing: a dataset with a length and dataset[i] is shuffled as a whole"),
        ({"evaluate_every": 2}, "evaluate_every=2 of the job does nothing: it has no evaluate"),
        ({"evaluate_every": 2, "evaluate": lambda model: {}}, ""),
    ],
    ids=["all is used", "epochs", "shuffle off", "map-style", "evaluate_every", "evaluate"],
)  # fmt: skip
def test_what_a_job_says_to_no_effect_is_told(changes: dict[str, Any], told: str) -> None:
    made = job(**{"dataset": ShardedStream([range(9)], open=iter, decode=row), "max_steps": 4, **changes})
    prepared = prepare(made, settings(), None, lambda: "0" * 16)
    try:
        assert [note for note in prepared.resume.notes if "nothing" in note] == [told] * bool(told)
    finally:
        prepared.spec.close()


@pytest.fixture
def parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    datasets = pytest.importorskip("datasets", reason="extra models")
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.0)  # when an iteration is broken off
    from pyarrow import Table, parquet

    files = [str(tmp_path / f"{number}.parquet") for number in range(3)]
    for number, file in enumerate(files):
        rows = [row(at) for at in range(number * ROWS // 3, (number + 1) * ROWS // 3)]
        parquet.write_table(Table.from_pylist(rows), file)
    return files


def loaded(files: list[str], **how: Any) -> Any:
    import datasets

    return datasets.load_dataset("parquet", data_files=files, split="train", **how)


@pytest.mark.allow_leaks  # a thread of tqdm's
async def test_parquet_as_datasets_maps_it(parquet: list[str], tmp_path: Path) -> None:
    rows = await asyncio.to_thread(loaded, parquet, cache_dir=str(tmp_path / "cache"))
    expected = await train(lambda: job([row(at) for at in range(ROWS)], max_steps=20))
    assert (await train(lambda: job(rows, max_steps=20), workers=2)).digest == expected.digest


@pytest.mark.slow
@pytest.mark.allow_leaks
@pytest.mark.parametrize("shuffles", [False, True])
async def test_parquet_as_datasets_streams_it(shuffles: bool, parquet: list[str], tmp_path: Path) -> None:
    """Resumed by its own state; where it shuffles in a buffer, which the state leaves out, by passing samples over."""
    rows = await asyncio.to_thread(loaded, parquet, streaming=True)
    if shuffles:
        rows = rows.shuffle(seed=3, buffer_size=20)
    expected = await asyncio.to_thread(reference.digest, job(rows))
    await stopped(tmp_path / "run", job(rows), 17)
    mark = await mark_in(tmp_path / "run")
    assert mark["offset"] >= 100
    assert mark["state"] is not None
    assert (await train(lambda: job(rows), run_dir=tmp_path / "run")).digest == expected
