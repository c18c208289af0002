"""Real coordinators and workers in one event loop: their processes, the links between them and one machine's disk.

A ``Cluster`` starts the coordinator again when it has ended before the run has, and every worker that has died; it
knows nothing of what is trained. ``world`` puts the integer-vector model on it, ``tests.generated`` any job. The faults
in ``faults`` happen to a cluster.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.simulator.disk import Disk, HostFilesystem
from tests.simulator.islands import VirtualCircle
from tests.simulator.loop import ComputeExecutor, Host, InlineExecutor, VirtualLoop
from tests.simulator.network import Network
from torch import nn

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.plan.shares import Share
from w5xde_async.runtime import Runtime
from w5xde_async.worker.executors.island import Rank
from w5xde_async.worker.service import Departure, Worker

#: What events say of the process itself, and not of the run: two runs of a seed differ in it.
_MEASURED = re.compile(r"\b(host_bytes=|cpu_s=)[0-9.e+-]+")

__all__ = ["Cluster", "Violation"]


@dataclass(frozen=True)
class Violation:
    """``kind``: lost, twice, bits, stuck, term, versions, ledger, memory, durability, tasks or unexpected."""

    kind: str
    text: str
    at_s: float


class Cluster(ABC):
    """Processes that come and go. ``random`` decides when and how; the same seed gives the same run."""

    config: CoordinatorConfig
    seed: int
    kinds: list[str]  # of fault that a storm may have
    mode: str  # what a storm is for: "safety" or "liveness"
    focus: tuple[str, ...]  # the only kinds of fault in it, if any are named

    def __init__(self, seed: str, root: Path, *, verbose: bool = False) -> None:
        self.key, self.verbose = seed, verbose
        self.random = random.Random(seed)
        self.entropy = random.Random(f"{seed}/entropy")
        self.loop = VirtualLoop()
        self.loop.violate = self.violate
        self.loop.unexpected = lambda text: self.violate("unexpected", text)
        self.network = Network(self.loop, random.Random(f"{seed}/network"))
        self.network.note, self.network.hit = self.note, self.hit
        self.network.unexpected = self.loop.unexpected
        self.disk = Disk(root, random.Random(f"{seed}/disk"))
        self.hosts: list[Host] = []
        self.coordinators: list[Host] = []
        self.workers: dict[int, Host] = {}
        self.num_slots = 0
        self.away_until = 0.0  # nobody who has left comes back before
        self.pauses_at_joining_s: dict[str, float] = {}  # machine -> of the worker that is started there next
        self.doom_next: Callable[[Host], None] | None = None  # done to the coordinator that is started next
        self.finished = False
        self.stopped_faults = False
        self.hostile = False  # somebody says what no worker would say
        self.supervisors: list[asyncio.Task[Any]] = []
        self.faults: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self.trace: list[str] = []
        self.hash = hashlib.blake2b(digest_size=8)

    # -- what is run -------------------------------------------------------------------------------------------

    @abstractmethod
    def make_model(self) -> nn.Module:
        """What is trained, untrained."""

    @abstractmethod
    def make_coordinator(self, host: Host, runtime: Runtime) -> Coordinator:
        """A coordinator that takes the run up where the one before has left it."""

    @abstractmethod
    def make_worker(self, host: Host, runtime: Runtime, rank: Rank | None = None) -> Worker:
        """A worker, which may be the successor of one that died on the same machine. ``rank``: of an island."""

    @abstractmethod
    def ended(self, host: Host, outcome: Any) -> None:
        """A process has ended: with what its ``run`` or ``wait`` returned or raised, or Killed."""

    def new_host(self, name: str, machine: str) -> Host:
        host = Host(self.loop, name, machine, seed=self.key)
        host.filesystem = HostFilesystem(self.disk, host)
        self.hosts.append(host)
        return host

    def runtime(self, host: Host) -> Runtime:
        """The machine as a process on ``host`` sees it."""

        def executor(threads: int, name: str) -> Executor:
            pool = ComputeExecutor(host.loop) if name == "w5xde-compute" else InlineExecutor(host.loop)
            return pool  # type: ignore[return-value]

        assert host.filesystem is not None
        return Runtime(
            clock=host.clock, wall=host.clock, executor=executor, wait=ComputeExecutor.wait,
            listen=self.network.listen, connect=self.network.connect, filesystem=host.filesystem,
            random_bytes=self.entropy.randbytes,
        )  # fmt: skip

    # -- notes -------------------------------------------------------------------------------------------------

    def note(self, kind: str, text: str) -> None:
        line = f"{self.loop.now:9.4f} {kind} {text}"
        if kind != "bytes":
            line = line.replace(str(self.disk.root), "")  # a temporary directory has another name every time
            line = _MEASURED.sub(r"\1", line)  # this process, as it is by now
        self.hash.update(line.encode())
        if self.verbose and kind != "bytes":
            self.trace.append(line)

    def hit(self, fault: str) -> None:
        """A fault has had its effect."""
        self.faults[fault] += 1
        if fault not in ("full pipe", "delay spike", "frames replayed"):
            self.note("fault", fault)

    def violate(self, kind: str, text: str) -> None:
        self.note("VIOLATION", f"{kind}: {text}")
        if len(self.violations) < 5:
            self.violations.append(Violation(kind, text, self.loop.now))

    # -- processes ---------------------------------------------------------------------------------------------

    @property
    def coordinator(self) -> Host | None:
        """The process that the supervisor runs now, while it lives."""
        host = self.coordinators[-1] if self.coordinators else None
        return host if host is not None and host.state != Host.DEAD and not host.ended.done() else None

    def live_workers(self) -> list[Host]:
        return [h for _, h in sorted(self.workers.items()) if h.state != Host.DEAD and not h.ended.done()]

    def kill(self, host: Host, *, power: bool) -> None:
        self.note("kill", f"{host.name} power={power}")
        host.die()
        self.network.died(host, power=power)
        if power and host.machine == "c":
            self.disk.power_cut()

    async def supervise_coordinator(self) -> None:
        """Start it, and start it again, until the run is finished."""
        while not self.finished:
            host = self.new_host(f"c.{len(self.coordinators)}", "c")
            self.coordinators.append(host)
            if self.doom_next is not None:
                self.doom_next(host)
                self.doom_next = None
            host.main(self._coordinate(host))
            await asyncio.wait([host.ended, host.replaced], return_when=asyncio.FIRST_COMPLETED)
            if not host.ended.done():
                host.ended.add_done_callback(lambda ended, host=host: self._ended(host, ended.result()))
                continue
            outcome = host.ended.result()
            self._ended(host, outcome)
            if self.complete(outcome):
                self.finished = True
                return
            await asyncio.sleep(self.random.uniform(0.1, 3.0))

    def complete(self, outcome: Any) -> bool:
        """Whether a coordinator that ended so is not to be started again."""
        return bool(outcome == "finished")

    async def _coordinate(self, host: Host) -> str:
        host.service = service = self.make_coordinator(host, self.runtime(host))
        try:
            await service.start()
            result = await service.wait()
        finally:
            await service.aclose()
        host.result = result
        return result.outcome

    def supersede(self, old: Host) -> None:
        """A new coordinator takes over from one that is stopped."""
        if not self.finished and self.coordinator is old and old.state == Host.PAUSED:
            old.superseded = True
            self.note("supersede", old.name)
            old.replaced.set_result(None)

    def retire(self, old: Host) -> None:
        """End a coordinator that has been superseded."""
        if old.superseded and not old.ended.done():
            self.kill(old, power=False)

    def add_worker(self, first_s: float = 0.0) -> None:
        slot, self.num_slots = self.num_slots, self.num_slots + 1
        self.supervisors.append(self.loop.create_task(self.supervise_worker(slot, first_s)))

    async def supervise_worker(self, slot: int, first_s: float) -> None:
        """Start it, and start it again where it has died or left, until the run is finished."""
        await asyncio.sleep(first_s)
        generation = 0
        speed = self.leaf_seconds()
        while not self.finished:
            host = self.new_host(f"w{slot}.{generation}", f"w{slot}")
            host.leaf_s = speed
            host.pauses_at_joining_s = self.pauses_at_joining_s.pop(host.machine, 0.0)
            generation += 1
            self.workers[slot] = host
            host.main(self._work(host))
            outcome = await host.ended
            self._ended(host, outcome)
            if outcome is Departure.FINISHED:
                return
            await asyncio.sleep(max(self.away_until - self.loop.now, 0.0) + self.random.uniform(0.1, 4.0))

    def add_island(self, ranks: int, share: Share, first_s: float = 0.0) -> None:
        slot, self.num_slots = self.num_slots, self.num_slots + 1
        self.supervisors.append(self.loop.create_task(self.supervise_island(slot, ranks, share, first_s)))

    async def supervise_island(self, slot: int, ranks: int, share: Share, first_s: float) -> None:
        """Start all its ranks, end them all where one has ended, and start them again until the run is finished."""
        await asyncio.sleep(first_s)
        generation, speed = 0, self.leaf_seconds()
        while not self.finished:
            circle = VirtualCircle(ranks, share, seed=1000 * slot + generation)
            hosts = []
            for rank in range(ranks):
                host = self.new_host(f"w{slot}.{generation}.{rank}", f"w{slot}r{rank}")
                host.leaf_s, host.of_island = speed, True
                host.pauses_at_joining_s = self.pauses_at_joining_s.pop(host.machine, 0.0)
                hosts.append(host)
                self.workers[1000 * (slot + 1) + rank] = host
                host.main(self._work(host, circle.of_host(rank, host)))
            generation += 1
            ends = [host.ended for host in hosts]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finished = any(end.done() and end.result() is Departure.FINISHED for end in ends)
            await asyncio.sleep(self.random.uniform(0.0, 0.5))  # until its connections are heard to be gone
            circle.end()
            await asyncio.wait(ends, timeout=10.0 if finished else 3.0)
            for host in hosts:
                if not host.ended.done():
                    self.kill(host, power=False)
                self._ended(host, await host.ended)
            if finished:
                return
            await asyncio.sleep(self.random.uniform(0.5, 4.0))

    def leaf_seconds(self) -> float:
        """What a leaf takes on the next worker's machine."""
        return self.random.choice([0.05, 0.1, 0.1, 0.4])

    async def _work(self, host: Host, rank: Rank | None = None) -> Departure:
        host.service = worker = self.make_worker(host, self.runtime(host), rank)
        return await worker.run()

    def _ended(self, host: Host, outcome: Any) -> None:
        self.note("exit", f"{host.name} {outcome!r}"[:200])
        self.ended(host, outcome)
        self.loop.call_later(0.5, self._nothing_left, host)

    def _nothing_left(self, host: Host) -> None:
        left = host.left_behind()
        if left and host.state != Host.DEAD:
            self.violate("tasks", f"{host.name} left {left[:4]} behind")

    async def stop_supervising(self) -> None:
        """Raises what a supervisor raised."""
        for task in self.supervisors:
            task.cancel()
        await asyncio.gather(*self.supervisors, return_exceptions=True)
        for task in self.supervisors:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def discard(self) -> None:
        """Free what the processes left."""
        self.loop.unexpected = self.network.unexpected = lambda text: None
        for host in self.hosts:
            host.die()
            host.discard()
