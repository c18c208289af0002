"""The worker's program, with a worker that does what the test says."""

from __future__ import annotations

import asyncio
import errno
import io
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.jobs import mlp_sgd

from w5xde_async.cluster.words import WordWriter
from w5xde_async.errors import ExitCode, W5xdeError
from w5xde_async.parallel.shape import IslandShape
from w5xde_async.settings import WorkerSettings, read
from w5xde_async.worker import __main__ as program
from w5xde_async.worker import service
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.connection import RunFailed


class Exited(BaseException):
    """``os._exit`` was called."""


class Unwritable(io.StringIO):
    """Its reader is gone, and what was printed cannot leave."""

    def flush(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.fixture(autouse=True)
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    def exit(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr("os._exit", exit)


@pytest.mark.parametrize("stdout", [io.StringIO, Unwritable])
@pytest.mark.parametrize(("error", "code"), [(RunFailed("leaf 3 raised"), 1), (None, 0)])
def test_a_leaf_that_hangs_changes_nothing_about_the_exit_code(
    error: W5xdeError | None, code: int, stdout: Callable[[], io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    parted = asyncio.Event()
    parted.set()
    worker: Any = SimpleNamespace(
        parted=parted, error=error, abandoned=False, was_asked_to_leave=False, host="", port=1, name="one",
        worker_id="1", run=parted_for_ever,
    )  # fmt: skip
    monkeypatch.setattr(service, "Worker", lambda *_, **__: worker)
    monkeypatch.setattr(program, "_PARTING_S", 0.0)
    monkeypatch.setattr("sys.stdout", stdout())
    settings = read(WorkerSettings, ["--server", "127.0.0.1:1"], prog="")[0]
    body = program._work(settings, WorkerConfig(device="cpu", threads=1), "127.0.0.1:1", None, mlp_sgd())
    with pytest.raises(Exited) as exited:
        asyncio.run(body())
    assert exited.value.args == (code,)


@pytest.mark.parametrize("stdout", [io.StringIO, Unwritable])
def test_a_rank_ends_with_its_exit_code_though_nobody_reads_what_it_says(
    stdout: Callable[[], io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def break_off() -> None:
        raise RuntimeError("Connection closed by peer")

    worker: Any = SimpleNamespace(
        parted=asyncio.Event(), error=None, abandoned=False, was_asked_to_leave=False, host="", port=1, name="one",
        worker_id="1", run=break_off,
    )  # fmt: skip
    monkeypatch.setattr(service, "Worker", lambda *_, **__: worker)
    monkeypatch.setattr(program, "_go_on_when_orphaned", lambda: None)
    monkeypatch.setattr(program, "_interruptibly", lambda *_: SimpleNamespace(rank=1))
    monkeypatch.setattr("sys.stdout", stdout())
    monkeypatch.setenv("RANK", "1")
    settings = read(WorkerSettings, ["--server", "127.0.0.1:1"], prog="")[0]
    shape = IslandShape.parse("fsdp=2")
    body = program._work(settings, WorkerConfig(device="cpu", threads=1), "127.0.0.1:1", shape, mlp_sgd())
    with pytest.raises(Exited) as exited:
        asyncio.run(body())
    assert exited.value.args == (ExitCode.ISLAND_LOST,)


def test_a_rank_may_tell_why_it_ends_when_who_has_started_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    unread, word = os.pipe()
    os.close(unread)
    monkeypatch.setattr(program, "_words", WordWriter(word))
    try:
        program._tell_why("another rank is gone")
    finally:
        os.close(word)


async def parted_for_ever() -> None:
    await asyncio.Event().wait()
