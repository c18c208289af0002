"""When a worker keeps the model that it has built, and when it builds another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support import programs

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
