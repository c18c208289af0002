"""What a codec left out, from one worker to the next over a directory that they share."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn

from w5xde_async.codecs.registry import codec
from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import Shard
from w5xde_async.wire.messages import VerdictCode, Welcome
from w5xde_async.worker.uplink import residual_store
from w5xde_async.worker.uplink.residual_store import forget, keep, take_up
from w5xde_async.worker.uplink.result_encoder import ResultEncoder
from w5xde_async.worker.uplink.uplink import Uplink


def encoder(scale: float = 0.0) -> ResultEncoder:
    """A worker's, which has left something out where ``scale`` is given."""
    layout = Layout.of(nn.Linear(8, 8, bias=False))
    made = ResultEncoder(layout, codec("topk:0.1"), feedback=True)
    if scale:
        vector = ResultVector(layout)
        vector.buckets[0].copy_(scale * torch.arange(64, dtype=torch.float32))
        made.encode(1, 0, vector)
        made.settle([1], VerdictCode.APPLIED)
    return made


def norm(of: ResultEncoder) -> float:
    assert of.feedback is not None
    return of.feedback.norm()


def leave(data_dir: Path, name: str, worker_id: str, scale: float, run_id: str = "run") -> float:
    leaving = encoder(scale)
    keep(leaving, data_dir, run_id=run_id, name=name, worker_id=worker_id)
    return norm(encoder(scale))


def come(data_dir: Path, name: str, worker_id: str, run_id: str = "run") -> float:
    coming = encoder()
    take_up(coming, data_dir, run_id=run_id, name=name, worker_id=worker_id)
    return norm(coming)


def test_two_workers_share_a_directory_and_each_finds_its_own(tmp_path: Path) -> None:
    left = {name: leave(tmp_path, name, worker_id, scale) for name, worker_id, scale in
            (("local-0", "aa", 1.0), ("local-1", "bb", 2.0))}  # fmt: skip
    assert left["local-1"] == 2 * left["local-0"] > 0
    assert len(list(tmp_path.iterdir())) == 2
    assert {name: come(tmp_path, name, f"new-{name}") for name in ("local-1", "local-0")} == left
    assert not list(tmp_path.iterdir())  # taken, so that nothing is added twice
    assert come(tmp_path, "local-0", "third") == 0


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    leave(tmp_path / "kept", "local-0", "aa", 1.0)
    (path,) = (tmp_path / "kept").iterdir()
    assert [oct(at.stat().st_mode & 0o777) for at in (path.parent, path)] == ["0o700", "0o600"]


def test_a_worker_of_another_name_takes_the_oldest_of_its_run(tmp_path: Path) -> None:
    """Usual names hold the process id: none comes again."""
    left = [leave(tmp_path, f"host-{number}", f"{number:02}", 1.0 + number) for number in range(3)]
    for number, age_s in enumerate((20, 30, 10)):
        (path,) = tmp_path.glob(f"*-{number:02}.safetensors")
        written = path.stat().st_mtime - age_s
        os.utime(path, (written, written))
    assert come(tmp_path, "host-9", "90", run_id="another") == 0
    assert [come(tmp_path, "host-9", f"9{number}") for number in range(4)] == [left[1], left[0], left[2], 0]


def test_old_files_go(tmp_path: Path) -> None:
    leave(tmp_path, "a", "aa", 1.0, run_id="ended unseen")
    (old,) = tmp_path.iterdir()
    os.utime(old, (0, 0))
    mine = tmp_path / "mine.safetensors"
    mine.touch()
    os.utime(mine, (0, 0))
    leave(tmp_path, "a", "bb", 1.0)
    leave(tmp_path, "a", "cc", 1.0, run_id="run2")
    assert not old.exists()
    assert len(list(tmp_path.iterdir())) == 3
    forget(tmp_path, "run")
    assert {path.name for path in tmp_path.iterdir()} == {"residual-run2-a-cc.safetensors", "mine.safetensors"}
    forget(None, "run")
    forget(tmp_path / "nowhere", "run")


def test_other_values_than_were_kept_are_not_taken_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They would count as what this worker computed: with a NaN among them it would be put out as a liar."""
    leave(tmp_path, "a", "aa", 1.0)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:-4] + b"\0\0\xc0\x7f", whole[:-2] + bytes([whole[-2] ^ 1, whole[-1]])):
        path.write_bytes(damaged)
        assert come(tmp_path, "a", "bb") == 0
        assert "does not match its digest" in caplog.text
        caplog.clear()
    path.write_bytes(whole)
    assert come(tmp_path, "a", "bb") > 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "residual-run-a-aa.safetensors")
    assert come(tmp_path, "a", "bb") == 0
    assert "is no regular file" in caplog.text


def test_what_cannot_be_read_or_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "residual-run-a-aa.safetensors").write_bytes(b"nonsense")
    assert come(tmp_path, "a", "bb") == 0
    (tmp_path / "file").touch()
    leaving = encoder(1.0)
    keep(leaving, tmp_path / "file" / "kept", run_id="run", name="a", worker_id="aa")
    assert norm(leaving) == 0  # dropped, and said


def test_another_codec_on_the_next_link_keeps_what_was_left_out() -> None:
    """A coordinator was started anew with it, and knows whether the lease that is under way has counted."""
    worker = encoder(1.0)
    before = norm(worker)
    vector = ResultVector(Layout.of(nn.Linear(8, 8, bias=False)))
    vector.buckets[0].zero_()
    worker.encode(2, 0, vector)
    for name in ("topk:0.1", "int4"):
        worker.change(codec(name))
        assert (worker.codec.name, worker.awaited) == (name, (2,))
    worker.settle([2], VerdictCode.STALE)
    assert norm(worker) == before > 0
    ((spec, _),) = worker.encode(3, 0, vector).buffers
    assert spec.codec == "int4"


@pytest.mark.parametrize("code", [VerdictCode.APPLIED, VerdictCode.STALE])
@pytest.mark.parametrize("other", ["int8", "sparseloco"])
def test_what_was_left_out_of_a_result_that_counted_outlives_another_codec(code: VerdictCode, other: str) -> None:
    worker, vector = encoder(1.0), ResultVector(Layout.of(nn.Linear(8, 8, bias=False)))
    assert worker.feedback is not None
    before = worker.feedback.residual(0)
    assert before is not None
    computed = torch.linspace(-1.0, 2.0, 64)
    vector.buckets[0].copy_(computed)
    ((spec, data),) = worker.encode(2, 0, vector).buffers
    arrived = torch.empty(64)
    codec(spec.codec).decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), arrived)
    left_out, before = computed + before - arrived, before.clone()
    worker.change(codec(other))
    worker.settle(worker.awaited, code)
    after = worker.feedback.residual(0)
    assert after is not None
    assert torch.equal(after, before) if code == VerdictCode.STALE else torch.allclose(after, left_out)
    assert worker.feedback.decay == codec(other).residual_decay


def test_what_an_islands_rank_left_out_is_for_a_rank_of_the_same_part(tmp_path: Path) -> None:
    layout = Layout.of(nn.Linear(64, 1, bias=False))
    halves = [Shard.of(layout, [(0, 0, 32)]), Shard.of(layout, [(0, 32, 64)])]

    def of(shard: Shard) -> ResultEncoder:
        return ResultEncoder(layout, codec("topk:0.1"), feedback=True, shard=shard)

    leaving = of(halves[0])
    vector = ResultVector(halves[0].own)
    vector.buckets[0].copy_(torch.arange(32.0))
    leaving.encode(1, 0, vector)
    leaving.settle([1], VerdictCode.APPLIED)
    left_out = norm(leaving)
    keep(leaving, tmp_path, run_id="run", name="local-0", worker_id="aa")
    assert left_out > 0
    assert come(tmp_path, "local-0", "whole") == 0
    found = {}
    for number, shard in ((1, halves[1]), (0, halves[0])):
        coming = of(shard)
        take_up(coming, tmp_path, run_id="run", name="local-0", worker_id=f"new-{number}")
        found[number] = norm(coming)
    assert found == {0: left_out, 1: 0}
    keep(coming, tmp_path, run_id="run", name="local-0", worker_id="bb")
    leave(tmp_path, "local-1", "cc", 1.0)
    assert len(list(tmp_path.iterdir())) == 2
    forget(tmp_path, "run")
    assert not list(tmp_path.iterdir())


def welcome(run_id: str = "run", codec: str = "topk:0.1", update: str = "async") -> Welcome:
    fingerprint = Layout.of(nn.Linear(8, 8, bias=False)).fingerprint
    plain = Welcome(run_id, "a run", 1, 0, "fp32", 2, 1, 64 << 10, fingerprint, 1e6, 2e6)
    return structs.replace(plain, codec=codec, update=update, feedback=True)


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def uplink(data_dir: Path, pool: Executor) -> tuple[Uplink, Callable[[Welcome], Coroutine[Any, Any, ResultEncoder]]]:
    made = Uplink(data_dir, name="a", worker_id="new", device="cpu", pool=pool, clock=time.perf_counter)
    return made, lambda welcome: made.encoder_for(welcome, Layout.of(nn.Linear(8, 8, bias=False)))


def submit(worker: ResultEncoder, code: int) -> None:
    vector = ResultVector(Layout.of(nn.Linear(8, 8, bias=False)))
    vector.buckets[0].copy_(torch.arange(64.0))
    worker.encode(1, 0, vector)
    worker.settle([1], code)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_link_that_is_lost_while_a_file_is_taken_up_loses_nothing(
    leaves: bool, tmp_path: Path, pool: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = residual_store._read
    kept = await asyncio.to_thread(leave, tmp_path, "a", "old", 1.0)
    begun, go_on = threading.Event(), threading.Event()

    def slowly(path: Path) -> Any:
        begun.set()
        assert go_on.wait(60.0)
        return read(path)

    monkeypatch.setattr(residual_store, "_read", slowly)
    worker, encoder_for = uplink(tmp_path, pool)
    preparing = asyncio.create_task(encoder_for(welcome()))
    assert await asyncio.to_thread(begun.wait, 60.0)
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    following = asyncio.create_task(leave_run(worker) if leaves else take(encoder_for))
    for _ in range(5):
        await asyncio.sleep(0)
    go_on.set()
    await following
    if leaves:
        assert await asyncio.to_thread(come, tmp_path, "a", "third") == kept > 0
    else:
        assert worker.encoder is not None
        assert norm(worker.encoder) == kept > 0


async def leave_run(worker: Uplink, *, abandoned: bool = False) -> None:
    await worker.close(finished=False, kept=True, abandoned=abandoned)


@pytest.mark.parametrize("abandoned", [False, True])
async def test_what_a_block_is_still_encoding_is_not_kept_before_that_has_ended(
    abandoned: bool, tmp_path: Path, pool: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    """An island's rank whose block does not end leaves without it."""
    worker, encoder_for = uplink(tmp_path, pool)
    of_run = await encoder_for(welcome())
    begun, go_on = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        assert go_on.wait(60.0)
        submit(of_run, VerdictCode.APPLIED)

    computing = pool.submit(block)
    assert await asyncio.to_thread(begun.wait, 60.0)
    leaving = asyncio.create_task(leave_run(worker, abandoned=abandoned))
    for _ in range(5):
        await asyncio.sleep(0)
    assert leaving.done() is abandoned
    go_on.set()
    await leaving
    await asyncio.wrap_future(computing)
    assert ("is dropped: the compute thread has not ended its block" in caplog.text) is abandoned
    assert await asyncio.to_thread(come, tmp_path, "a", "next") == (0 if abandoned else norm(of_run))
    assert norm(of_run) > 0


async def take(encoder_for: Callable[[Welcome], Coroutine[Any, Any, ResultEncoder]]) -> None:
    submit(await encoder_for(welcome()), VerdictCode.STALE)


async def test_another_run_at_the_same_address_leaves_what_was_left_out_of_the_first(
    tmp_path: Path, pool: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    _, encoder_for = uplink(tmp_path, pool)
    submit(await encoder_for(welcome()), VerdictCode.APPLIED)
    other = await encoder_for(welcome("other"))
    assert norm(other) == 0
    submit(other, VerdictCode.APPLIED)
    assert norm(await encoder_for(welcome("other", update="local"))) == 0  # it is of another kind
    assert "what the codec left out is dropped" in caplog.text
    assert await asyncio.to_thread(come, tmp_path, "a", "other", run_id="other") == 0
    assert await asyncio.to_thread(come, tmp_path, "a", "next") == norm(encoder(1.0))


async def test_what_an_exact_codec_does_not_add_is_told(
    tmp_path: Path, pool: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    _, encoder_for = uplink(tmp_path, pool)
    submit(await encoder_for(welcome()), VerdictCode.APPLIED)
    assert (await encoder_for(welcome(codec="lz4"))).feedback is None
    assert "what the codec left out is dropped" in caplog.text
