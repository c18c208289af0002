"""What is put in the place of the real world while a simulation runs: clocks, sockets, threads, disks, entropy.

Only names through which the rooms reach the outside are replaced; every decision stays theirs.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.simulator.loop import HOST, ComputeExecutor, InlineExecutor, VirtualLoop
from tests.simulator.model import IntegerEngine
from tests.simulator.network import Network

from w5xde_async.coordinator import aggregator, ending, following, journaling, loader, phases, preparation
from w5xde_async.coordinator import service as coordinator
from w5xde_async.net import outbox
from w5xde_async.store import checkpoint, journal, rundir
from w5xde_async.worker import service as worker
from w5xde_async.worker import serving

__all__ = ["in_virtual_world"]


class _Locks:
    """The run directory's lock, held by a process and dropped with it."""

    def __init__(self) -> None:
        self._holders: dict[Any, Any] = {}

    def take(self, path: Any) -> Any:
        path.mkdir(parents=True, exist_ok=True)
        host, holder = HOST.get(), self._holders.get(path)
        if holder is not None and holder.state != 2 and not holder.superseded:
            raise rundir.RunDirBusy(str(path), "another process holds it")
        self._holders[path] = host
        return SimpleNamespace(path=path, host=host)

    def drop(self, lock: Any) -> None:
        if self._holders.get(lock.path) is lock.host:
            del self._holders[lock.path]


class _NoRecorder:
    """Metrics are telemetry: nothing is decided by them, and their thread is a real one."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, event: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _modules() -> list[ModuleType]:
    names = [name for name in sys.modules if name.startswith("w5xde_async") or name.startswith("tenacity")]
    return [sys.modules[name] for name in sorted(names)]


@lru_cache(maxsize=1)
def _clocks(num_modules: int) -> tuple[list[ModuleType], list[Any]]:
    """Modules that call ``time.something``, and functions whose ``clock=time.monotonic`` was bound at definition."""
    modules, functions = [], []
    for module in _modules():
        if getattr(module, "time", None) is time:
            modules.append(module)
        for thing in list(vars(module).values()):
            for function in [thing, *vars(thing).values()] if isinstance(thing, type) else [thing]:
                defaults = getattr(function, "__kwdefaults__", None)
                if defaults and any(value is time.monotonic for value in defaults.values()):
                    functions.append(function)
    return modules, list(dict.fromkeys(functions))


@contextmanager
def in_virtual_world(loop: VirtualLoop, network: Network, seed: str, knobs: random.Random) -> Iterator[None]:
    """Replace the outside for the time of one simulation."""
    entropy = random.Random(f"{seed}/entropy")

    def monotonic() -> float:
        host = HOST.get()
        return loop.now + (host.offset_s if host is not None else 0.0)

    clocks = SimpleNamespace(
        monotonic=monotonic, perf_counter=monotonic, time=monotonic, sleep=time.sleep, perf_counter_ns=None,
        thread_time=monotonic, process_time=monotonic, strftime=time.strftime, gmtime=time.gmtime,
    )  # fmt: skip

    def inline(*_: Any, **__: Any) -> InlineExecutor:
        return InlineExecutor(loop)

    def compute(*_: Any, initializer: Callable[[], None] | None = None, **__: Any) -> ComputeExecutor:
        return ComputeExecutor(loop)

    def filesystem() -> Any:
        host = HOST.get()
        assert host is not None
        assert host.filesystem is not None
        return host.filesystem

    locks = _Locks()
    undo: list[Callable[[], None]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        old = getattr(owner, name)
        undo.append(lambda: setattr(owner, name, old))
        setattr(owner, name, value)

    real_loader = loader.Loader

    def make_loader(*args: Any, **kwargs: Any) -> Any:
        made = real_loader(*args, **{**kwargs, "executor": InlineExecutor(loop, 0.0, 0.02)})
        made._random = False  # looking for random draws takes real time and does not touch what is simulated
        return made

    real_serving = serving.Serving

    def serving_noted(link: Any, welcome: Any, *args: Any, **kwargs: Any) -> Any:
        host = HOST.get()
        assert host is not None
        if host.terms_served and welcome.term < max(host.terms_served):
            host.loop.violate("term", f"{host.name} joins term {welcome.term} after {max(host.terms_served)}")
        host.terms_served.add(welcome.term)
        return real_serving(link, welcome, *args, **kwargs)

    try:
        modules, functions = _clocks(len(sys.modules))
        for module in modules:
            put(module, "time", clocks)
        for function in functions:
            defaults = function.__kwdefaults__
            bound = {name: monotonic if value is time.monotonic else value for name, value in defaults.items()}
            put(function, "__kwdefaults__", bound)
        put(os, "urandom", entropy.randbytes)
        put(coordinator, "listen", network.listen)
        put(phases, "Loader", make_loader)
        put(coordinator, "ThreadPoolExecutor", inline)
        put(coordinator, "Recorder", _NoRecorder)
        put(ending, "draw_loss", lambda *_: False)
        put(ending, "export_model", lambda *_, **__: 0)
        put(aggregator, "ThreadPoolExecutor", inline)
        put(following, "ThreadPoolExecutor", inline)
        put(journaling, "ThreadPoolExecutor", inline)
        put(worker, "ThreadPoolExecutor", compute)
        put(worker, "connect", network.connect)
        put(worker, "Engine", IntegerEngine)
        put(worker, "Serving", serving_noted)
        put(checkpoint, "Filesystem", filesystem)
        put(journal, "Filesystem", filesystem)
        put(rundir, "Filesystem", filesystem)
        put(rundir, "_take_lock", locks.take)
        put(rundir, "_drop_lock", locks.drop)
        put(preparation, "build_model", lambda job: job.model())
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
