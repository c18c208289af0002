"""The worker's program, with a worker that does what the test says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.jobs import mlp_sgd

from w5xde_async.errors import W5xdeError
from w5xde_async.settings import WorkerSettings, read
from w5xde_async.worker import __main__ as program
from w5xde_async.worker import service
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.connection import RunFailed


class Exited(BaseException):
    """``os._exit`` was called."""


@pytest.mark.parametrize(("error", "code"), [(RunFailed("leaf 3 raised"), 1), (None, 0)])
def test_a_leaf_that_hangs_changes_nothing_about_the_exit_code(
    error: W5xdeError | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parted = asyncio.Event()
    parted.set()
    worker: Any = SimpleNamespace(
        parted=parted, error=error, abandoned=False, was_asked_to_leave=False, host="", port=1, name="one",
        worker_id="1", run=parted_for_ever,
    )  # fmt: skip

    def exit(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(service, "Worker", lambda *_, **__: worker)
    monkeypatch.setattr(program, "_PARTING_S", 0.0)
    monkeypatch.setattr("os._exit", exit)
    settings = read(WorkerSettings, ["--server", "127.0.0.1:1"], prog="")[0]
    body = program._work(settings, WorkerConfig(device="cpu", threads=1), "127.0.0.1:1", None, mlp_sgd())
    with pytest.raises(Exited) as exited:
        asyncio.run(body())
    assert exited.value.args == (code,)


async def parted_for_ever() -> None:
    await asyncio.Event().wait()
