"""When a worker keeps the model that it has built, and when it builds another."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support import programs

from w5xde_async.params.flat import FlatState
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.engine_source import EngineSource


@pytest.mark.parametrize(("sandboxed", "built"), [(True, 2), (False, 1)])
async def test_a_sandbox_is_built_anew_for_another_number_of_threads(
    sandboxed: bool, built: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has the number that it was built with, whatever the next run asks for."""
    layout = programs.tiny_layout()
    engines: list[Any] = []

    async def fetch(*_: object) -> None:
        pass

    def rebuild(*_: object) -> Any:
        engines.append(SimpleNamespace(layout=layout))
        return engines[-1]

    welcome: Any = SimpleNamespace(
        fingerprint=layout.fingerprint, seed=1, precision="fp32", microbatch_size=4, accumulate=1, bucket_bytes=1024,
        update="sync", codec="raw", downlink="raw",
    )  # fmt: skip
    nobody: Any = None
    with ThreadPoolExecutor(1) as pool:
        source = EngineSource(
            None, WorkerConfig(), torch.device("cpu"), sandboxed=sandboxed, pool=pool, clock=lambda: 0.0
        )
        monkeypatch.setattr(source, "_fetch", fetch)
        monkeypatch.setattr(source, "_rebuild", rebuild)
        for threads in (1, 1, 2):
            assert await source.engine_for(welcome, layout, nobody, nobody, threads=threads) is engines[-1]
    assert len(engines) == built


@pytest.mark.parametrize("fails", [False, True])
async def test_parameters_are_held_no_longer_once_the_model_is_built_anew_without_them(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link was lost while it was rebuilt, so nobody heard that this has failed."""
    layout = programs.tiny_layout()
    begun, go_on = threading.Event(), threading.Event()

    async def fetch(*_: object) -> None:
        pass

    def build(spec: Any, *_: object) -> Any:
        if threads == 2:
            begun.set()
            assert go_on.wait(60.0)
            if fails:
                raise MemoryError
        return SimpleNamespace(layout=layout, incoming=FlatState(layout), load=list, close=lambda: None)

    welcome: Any = SimpleNamespace(
        fingerprint=layout.fingerprint, seed=1, precision="fp32", microbatch_size=4, accumulate=1, bucket_bytes=1024,
        update="sync", codec="raw", downlink="raw",
    )  # fmt: skip
    nobody: Any = None
    held = "run", 1, b"model", 7
    with ThreadPoolExecutor(1) as pool:
        source = EngineSource(
            None, WorkerConfig(), torch.device("cpu"), sandboxed=True, pool=pool, clock=lambda: 0.0
        )  # fmt: skip
        monkeypatch.setattr(source, "_fetch", fetch)
        monkeypatch.setattr(source, "_build", build)
        threads = 1
        await source.engine_for(welcome, layout, nobody, nobody, threads=threads)
        source.held = held
        threads = 2
        preparing = asyncio.create_task(source.engine_for(welcome, layout, nobody, nobody, threads=threads))
        assert await asyncio.to_thread(begun.wait, 60.0)
        preparing.cancel()
        go_on.set()
        await asyncio.wait([preparing])
        await asyncio.wrap_future(pool.submit(int))
        threads = 3
        await source.engine_for(welcome, layout, nobody, nobody, threads=threads)
        assert source.held == (None if fails else held)
        await asyncio.wait(source.end())


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_model_whose_link_was_lost_while_it_was_built_is_the_next_links_or_is_closed(
    comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = programs.tiny_layout()
    begun, go_on = threading.Event(), threading.Event()
    built, closed = list[Any](), list[Any]()

    def rebuild(*_: object) -> Any:
        begun.set()
        assert go_on.wait(60.0)
        built.append(SimpleNamespace(layout=layout, close=lambda: closed.append(True)))
        return built[-1]

    welcome: Any = SimpleNamespace(
        fingerprint=layout.fingerprint, seed=1, precision="fp32", microbatch_size=4, accumulate=1, bucket_bytes=1024
    )
    job: Any = object()
    nobody: Any = None
    with ThreadPoolExecutor(1) as pool:
        source = EngineSource(
            job, WorkerConfig(), torch.device("cpu"), sandboxed=False, pool=pool, clock=lambda: 0.0
        )  # fmt: skip
        monkeypatch.setattr(source, "_rebuild", rebuild)
        for _ in range(2):
            preparing = asyncio.create_task(source.engine_for(welcome, layout, nobody, nobody, threads=1))
            assert await asyncio.to_thread(begun.wait, 60.0)
            await asyncio.sleep(0)
            preparing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await preparing
        go_on.set()
        if comes_back:
            assert await source.engine_for(welcome, layout, nobody, nobody, threads=1) is built[0]
        await asyncio.wait(source.end())
    assert (len(built), len(closed)) == (1, 1)
