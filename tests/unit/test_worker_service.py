"""How a worker makes ready for a run: what is done where, and what it gives back where its link breaks meanwhile."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from tests.support.jobs import mlp_sgd

from w5xde_async.errors import LinkLost
from w5xde_async.wire.messages import Welcome
from w5xde_async.worker import service
from w5xde_async.worker.executors.executor import Unsent
from w5xde_async.worker.service import Worker
from w5xde_async.worker.uplink import uplink

NOBODY: Any = None


def joined(**options: Any) -> Any:
    welcome = Welcome("run", "run", 2, 0, "fp32", 2, 1, 64 << 10, b"m", 1.0, 12.0)
    layout = SimpleNamespace(fingerprint=b"m", buckets=())
    return SimpleNamespace(welcome=structs.replace(welcome, **options), layout=layout, link=None, inner=b"", nonce=b"")


@pytest.mark.parametrize("update", ["sync", "async"])
async def test_what_was_left_unsent_of_another_term_is_free_though_the_link_breaks(
    update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[Any] = []

    async def breaks(*_: object, **__: object) -> None:
        raise LinkLost("coordinator", "closed by peer")

    worker = Worker("127.0.0.1:1", job=mlp_sgd())
    engine = SimpleNamespace(release=released.append)
    monkeypatch.setattr(worker, "_engines", SimpleNamespace(engine=engine, engine_for=breaks, sandboxed=False))
    worker._unsent = [Unsent(NOBODY, (), NOBODY, (vector,)) for vector in ("one", "two")]  # type: ignore[arg-type]
    worker._unsent_of = ("run", 2 if update == "async" else 1, b"m")
    with pytest.raises(LinkLost):
        await worker._prepare(joined(update=update), NOBODY, NOBODY)
    assert released == ["one", "two"]
    assert not worker._unsent
    await asyncio.to_thread(worker._compute.shutdown)


@pytest.mark.parametrize("of_island", [False, True])
async def test_what_is_made_for_codecs_and_other_rules_is_made_on_the_compute_thread(
    of_island: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It copies the model, some times: on the event loop no heartbeat would leave meanwhile."""
    made: list[tuple[str, int]] = []

    def noted(name: str) -> Any:
        def make(*_: object, **__: object) -> Any:
            made.append((name, threading.get_ident()))
            return SimpleNamespace(layout=engine.layout, pool=None, awaited=())

        return make

    async def engine_for(*_: object, **__: object) -> Any:
        return engine

    engine = SimpleNamespace(
        layout=SimpleNamespace(fingerprint=b"m"),
        shard=SimpleNamespace(packed=b""),
        share=1.0,
        together=0,
        numerics="exact",
    )
    rank = SimpleNamespace(rank=0, ranks=1, key="0" * 32, shape="", lockstep=None, traced=False)
    worker = Worker("127.0.0.1:1", job=mlp_sgd(), rank=rank if of_island else None)  # type: ignore[arg-type]
    engines = SimpleNamespace(engine=None, engine_for=engine_for, island_for=engine_for, held=None, sandboxed=False)
    monkeypatch.setattr(worker, "_engines", engines)
    monkeypatch.setattr(worker, "_share", lambda *_: asyncio.sleep(0, ()))
    for name in ("CodedExecutor", "ShardEngine"):
        monkeypatch.setattr(service, name, noted(name))
    monkeypatch.setattr(service, "IslandExecutor", lambda *_: None)
    monkeypatch.setattr(service, "_fit", lambda *_: None)
    monkeypatch.setattr(
        uplink, "ResultEncoder", lambda *_, **__: SimpleNamespace(feedback=None, awaited=(), change=noted("change"))
    )
    for _ in range(2):
        await worker._prepare(joined(update="async"), NOBODY, NOBODY)
    thread = await worker._on_thread(threading.get_ident)
    of_one = ["ShardEngine", "CodedExecutor"] if of_island else ["CodedExecutor"]
    assert made == [(name, thread) for name in (*of_one, "change", *of_one)]
    await asyncio.to_thread(worker._compute.shutdown)
