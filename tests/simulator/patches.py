"""What no constructor takes, replaced for the time of one simulation: the engine's arithmetic, how long the coordinator
computes what workers cannot, and the sizes from which on a model counts as big. All else that a process has of its
machine is its ``Runtime`` (``cluster``).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.simulator.loop import HOST, InlineExecutor
from tests.simulator.model import IntegerEngine

from w5xde_async.coordinator.parameters import aggregator
from w5xde_async.coordinator.sync import recomputation, results, verification
from w5xde_async.coordinator.sync.recomputation import Recomputation
from w5xde_async.net import outbox
from w5xde_async.worker import engine_source
from w5xde_async.worker.executors import in_place

__all__ = ["AS_IF_BIG", "in_virtual_world"]

#: From which sizes on something is done as for a big model: here from the smallest.
_Sizes = tuple[tuple[Any, str, int], ...]
_ONE_BY_ONE: _Sizes = ((in_place, "_TOGETHER_BYTES", 0),)  # results do not leave with their DONE
_IN_THREADS: _Sizes = (  # what the parameters' thread and others do
    (aggregator, "_INLINE_ADD_BYTES", 0), (aggregator, "_INLINE_UPDATE_BYTES", -1),
    (verification, "INLINE_WEIGH_BYTES", -1), (results, "INLINE_BYTES", -1), (results, "INLINE_CODED_BYTES", -1),
)  # fmt: skip
_IN_PIECES: _Sizes = ((outbox, "_SEND_BYTES", 64),)  # a frame or two in a send
_SLOWLY: _Sizes = ((InlineExecutor, "most_s", 0.1),)  # what those threads do
AS_IF_BIG = (*_ONE_BY_ONE, *_IN_THREADS, *_IN_PIECES, *_SLOWLY)


@contextmanager
def in_virtual_world(seed: str, knobs: random.Random) -> Iterator[None]:
    """Replace, for the time of one simulation, what no constructor takes."""
    undo: list[Callable[[], None]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        old = getattr(owner, name)
        undo.append(lambda: setattr(owner, name, old))
        setattr(owner, name, value)

    try:
        put(engine_source, "Engine", IntegerEngine)
        put(recomputation, "Engine", IntegerEngine)
        put(Recomputation, "recompute", _slow(Recomputation.recompute))
        for of_big_models in (_ONE_BY_ONE, _IN_THREADS, _IN_PIECES):
            if knobs.random() < 0.5:
                for owner, name, value in of_big_models:
                    put(owner, name, value)
        if random.Random(f"{seed}/threads").random() < 0.3:
            for owner, name, value in _SLOWLY:
                put(owner, name, value)
        yield
    finally:
        for step in reversed(undo):
            step()


def _slow(recompute: Callable[..., Any]) -> Callable[..., Any]:
    """On one CPU it may take longer than a worker's lease may."""

    async def slowly(self: Recomputation, *args: Any) -> Any:
        host = HOST.get()
        assert host is not None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._given_up.wait(), host.random.choice([0.0, 1.0, 12.0]))
        return await recompute(self, *args)

    return slowly
