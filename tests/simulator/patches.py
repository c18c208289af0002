"""What is put in the place of the real world: each process gets a ``Runtime`` of its own (``runtime_of``).

What no constructor takes is replaced for the time of one simulation (``in_virtual_world``): the engine's arithmetic,
and the sizes from which on a model counts as big.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from tests.simulator.loop import ComputeExecutor, Host, InlineExecutor
from tests.simulator.model import IntegerEngine
from tests.simulator.network import Network

from w5xde_async.coordinator import aggregator
from w5xde_async.net import outbox
from w5xde_async.runtime import Runtime
from w5xde_async.worker import service as worker
from w5xde_async.worker import serving

__all__ = ["in_virtual_world", "runtime_of"]


def runtime_of(host: Host, network: Network, random_bytes: Callable[[int], bytes]) -> Runtime:
    """The machine as a process on ``host`` sees it."""

    def executor(threads: int, name: str) -> Executor:
        pool = ComputeExecutor(host.loop) if name == "w5xde-compute" else InlineExecutor(host.loop)
        return pool  # type: ignore[return-value]

    filesystem = {} if host.filesystem is None else {"filesystem": host.filesystem}
    return Runtime(
        clock=host.clock, wall=host.clock, executor=executor, listen=network.listen, connect=network.connect,
        random_bytes=random_bytes, **filesystem,
    )  # fmt: skip


@contextmanager
def in_virtual_world(seed: str, knobs: random.Random) -> Iterator[None]:
    """Replace, for the time of one simulation, what no constructor takes."""
    undo: list[Callable[[], None]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        old = getattr(owner, name)
        undo.append(lambda: setattr(owner, name, old))
        setattr(owner, name, value)

    try:
        put(worker, "Engine", IntegerEngine)
        if knobs.random() < 0.5:  # results one by one, as those of a big model
            put(serving, "_TOGETHER_BYTES", 0)
        if knobs.random() < 0.5:  # additions and updates in the aggregator's thread, as those of a big model
            put(aggregator, "_INLINE_ADD_BYTES", 0)
            put(aggregator, "_INLINE_UPDATE_BYTES", -1)
        if knobs.random() < 0.5:  # a frame or two in a send, as those of a big model
            put(outbox, "_SEND_BYTES", 64)
        state = random.getstate()
        undo.append(lambda: random.setstate(state))
        random.seed(f"{seed}/jitter")  # of retries
        yield
    finally:
        for step in reversed(undo):
            step()
