"""One simulated run: a coordinator that is restarted when it dies, workers that come and go, faults, checks.

Real: the whole coordinator and worker services with their sessions, ledger, dispatch, loader, aggregator, reducer,
update rule, publisher, checkpoints, run directory, handshake, framing, reconnect loop. Simulated: time, sockets,
threads, the disk's memory, the kernel's signals, and the arithmetic of forward and backward (``model``).
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulator.checks import Checks, Violation, WatchedTraining
from tests.simulator.disk import Disk, HostFilesystem
from tests.simulator.loop import Deadlock, Host, Killed, TimeUp, VirtualLoop
from tests.simulator.model import SHAPES, Shape, expected_run, job_of
from tests.simulator.network import ADDRESS, Network
from tests.simulator.patches import in_virtual_world, runtime_of

from w5xde_async.coordinator import making as coordinator_making
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.coordinator.training import Training
from w5xde_async.errors import LeafFailed, Refused, StoreError
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.store.rundir import Superseded
from w5xde_async.telemetry.events import (
    Bus,
)
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Worker
from w5xde_async.worker.serving import Departure, RunFailed

__all__ = ["BOUND_S", "Outcome", "Violation", "World", "simulate"]

BUCKET_BYTES = 256
#: Liveness: once faults have stopped the run ends within this much virtual time. What may have to pass first: a silent
#: peer is found (5 s + a heartbeat), a lease of a lost worker falls due (20 s at most, twice where its successor is
#: also one that hangs), a retry waits (5.5 s) and connects (10 s); then at most 8 steps of 16 leaves of 0.4 s on one
#: worker (51 s).
BOUND_S = 150.0
_DAY_S = 86400.0


@dataclass
class Outcome:
    """One simulation's end."""

    seed: int
    mode: str
    violations: list[Violation]
    faults: Counter[str]
    steps: int
    finished: bool
    virtual_s: float
    trace_hash: str
    trace: list[str] = field(default_factory=list)
    recomputed: int = 0


class _Errors(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.startswith("leaf failed"):
            self._world.violate("unexpected", f"log: {text} {record.exc_info[1] if record.exc_info else ''}")


class SmallBuckets(CoordinatorConfig):
    """Many buckets: they are smaller than a person may choose."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bucket_bytes", CoordinatorConfig.bucket_bytes)
        super().__post_init__()
        object.__setattr__(self, "bucket_bytes", BUCKET_BYTES)


class World(Checks):
    """The state of one simulation."""

    def __init__(self, seed: int, mode: str, root: Path, *, focus: tuple[str, ...] = (), verbose: bool = False) -> None:
        super().__init__(verbose=verbose)
        self.seed, self.mode, self.focus = seed, mode, focus
        self.random = random.Random(f"{seed}/{mode}")
        self.entropy = random.Random(f"{seed}/entropy")
        self.loop = VirtualLoop()
        self.loop.violate = self.violate
        self.loop.unexpected = lambda text: self.violate("unexpected", text)
        self.network = Network(self.loop, random.Random(f"{seed}/network"))
        self.network.note, self.network.hit = self.note, self.hit
        self.network.unexpected = self.loop.unexpected
        self.disk = Disk(root, random.Random(f"{seed}/disk"))
        self.shape: Shape = self.random.choice(SHAPES)
        self.expected = expected_run(self.shape, BUCKET_BYTES)
        self.hosts: list[Host] = []
        self.coordinators: list[Host] = []
        self.workers: dict[int, Host] = {}
        self.num_slots = 0
        self.pauses_at_joining_s: dict[str, float] = {}  # machine -> of the worker that is started there next
        self.finished = False
        self.stopped_faults = False
        self.supervisors: list[asyncio.Task[Any]] = []
        # Unjudged, buckets are added as they come; judged, a block at a time, and some are computed twice.
        norm_gate, audit_fraction = random.Random(f"{seed}/judging").choice([(0.0, 0.0), (6.0, 0.01), (6.0, 0.3)])
        self.config = SmallBuckets(
            norm_gate=norm_gate, audit_fraction=audit_fraction,
            host=ADDRESS[0], port=ADDRESS[1], token="simulated", heartbeat_s=1.0, silence_s=5.0, handshake_s=5.0,
            grace_s=self.random.choice([0.5, 3.0]), checkpoint_every=self.random.choice([1, 2, 3, 4, 50]),
            keep_checkpoints=self.random.choice([1, 2, 3]), durability=self.random.choice(["checkpoint", "journal"]),
            max_leaf_failures=12, evaluate=False,
            bulk_threads=0,
            prefetch_leaves=self.random.choice([4, 64]), min_workers=self.random.choice([1, 1, 2]),
            pacing=PacingConfig(
                target_lease_s=self.random.choice([0.03, 0.5]), leases_ahead=self.random.choice([1, 2, 3]),
                min_deadline_s=4.0, first_deadline_s=8.0, max_deadline_s=20.0,
            ),
        )  # fmt: skip

    # -- hosts -------------------------------------------------------------------------------------------------

    @property
    def coordinator(self) -> Host | None:
        """The process that the supervisor runs now, while it lives."""
        host = self.coordinators[-1] if self.coordinators else None
        return host if host is not None and host.state != Host.DEAD and not host.ended.done() else None

    def live_workers(self) -> list[Host]:
        return [h for _, h in sorted(self.workers.items()) if h.state != Host.DEAD and not h.ended.done()]

    def new_host(self, name: str, machine: str) -> Host:
        offset = self.random.choice([0.0, _DAY_S, -_DAY_S / 2])
        if offset:
            self.hit("clock a day off")
        host = Host(self.loop, name, machine, seed=str(self.seed), offset_s=offset + 2 * _DAY_S)
        host.world = self  # type: ignore[attr-defined]
        host.filesystem = HostFilesystem(self.disk, host)
        self.hosts.append(host)
        return host

    def kill(self, host: Host, *, power: bool) -> None:
        self.note("kill", f"{host.name} power={power}")
        host.die()
        self.network.died(host, power=power)
        if power and host.machine == "c":
            self.disk.power_cut()

    async def supervise_coordinator(self) -> None:
        while not self.finished:
            host = self.new_host(f"c.{len(self.coordinators)}", "c")
            self.coordinators.append(host)
            host.main(self._coordinate(host))
            await asyncio.wait([host.ended, host.replaced], return_when=asyncio.FIRST_COMPLETED)
            if not host.ended.done():
                host.ended.add_done_callback(lambda ended, host=host: self._ended(host, ended.result()))
                continue
            outcome = host.ended.result()
            self._ended(host, outcome)
            if outcome == "finished":
                self.finished = True
                return
            await asyncio.sleep(self.random.uniform(0.1, 3.0))

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

    async def _coordinate(self, host: Host) -> str:
        bus = Bus()
        config = copy.copy(self.config)
        if self.random.random() < 0.15:  # a person has changed it
            object.__setattr__(config, "durability", self.random.choice(["checkpoint", "journal"]))
        bus.subscribe(lambda event: self.on_event(host, event))
        service = Coordinator(
            job_of(self.shape), run_dir=self.disk.root / "run", name="simulated", config=config, bus=bus, record=False,
            runtime=runtime_of(host, self.network, self.entropy.randbytes),
        )  # fmt: skip
        host.service = service
        try:
            await service.start()
            result = await service.wait()
        finally:
            await service.aclose()
        return result.outcome

    async def supervise_worker(self, slot: int, first_s: float) -> None:
        await asyncio.sleep(first_s)
        generation = 0
        speed = self.random.choice([0.05, 0.1, 0.1, 0.4])
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
                if self.durable_step < self.shape.total_steps:
                    self.violate("durability", f"{host.name} was told of an end when step {self.durable_step} was safe")
                return
            await asyncio.sleep(self.random.uniform(0.1, 4.0))

    async def _work(self, host: Host) -> Departure:
        worker = Worker(
            f"{ADDRESS[0]}:{ADDRESS[1]}", job=job_of(self.shape),
            config=WorkerConfig(name=host.name, device="cpu", token="simulated", connect_timeout_s=3000.0),
            runtime=runtime_of(host, self.network, self.entropy.randbytes),
        )  # fmt: skip
        host.service = worker
        return await worker.run()

    def _ended(self, host: Host, outcome: Any) -> None:
        self.note("exit", f"{host.name} {outcome!r}"[:200])
        if isinstance(outcome, Killed):
            return
        failures = self.faults["leaf failed"] >= self.config.max_leaf_failures
        if isinstance(outcome, LeafFailed | RunFailed) and (failures or len(self.vanished) >= 8):
            return  # a leaf that failed so often, or on which so many workers vanished for good, ends the run
        if isinstance(outcome, Superseded) and host.superseded:
            return
        if isinstance(outcome, Refused) and self.hostile:
            return  # what was played again in its name was against the protocol
        if isinstance(outcome, BaseException) and not (isinstance(outcome, StoreError) and self.disk.num_errors):
            self.violate("unexpected", f"{host.name} ended with {type(outcome).__name__}: {outcome}")
        self.loop.call_later(0.5, self._nothing_left, host)

    def _nothing_left(self, host: Host) -> None:
        left = host.left_behind()
        if left and host.state != Host.DEAD:
            self.violate("tasks", f"{host.name} left {left[:4]} behind")

    def add_worker(self, first_s: float = 0.0) -> None:
        slot, self.num_slots = self.num_slots, self.num_slots + 1
        self.supervisors.append(self.loop.create_task(self.supervise_worker(slot, first_s)))

    # -- the run -----------------------------------------------------------------------------------------------

    async def run(self, schedule: Any) -> None:
        """Until the run is complete, or the faults' end in safety mode."""
        main = self.loop.create_task(self.supervise_coordinator())
        self.supervisors.append(main)
        for slot in range(self.random.randint(self.config.min_workers, 4)):
            self.add_worker(0.0 if slot == 0 else self.random.choice([0.0, 0.0, self.random.uniform(0.0, 8.0)]))
        faults = self.loop.create_task(schedule(self))
        self.supervisors.append(faults)
        try:
            await asyncio.wait([main, faults], return_when=asyncio.FIRST_COMPLETED)
            if not main.done() and self.mode == "liveness":
                self.stopped_faults = True
                self.note("faults", "have stopped")
                self.loop.limit_s = self.loop.now + BOUND_S
                await main
            if self.finished:
                await asyncio.sleep(8.0)  # who has heard the last message has left by now
        finally:
            for task in self.supervisors:
                task.cancel()
            await asyncio.gather(*self.supervisors, return_exceptions=True)
        for task in self.supervisors:
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]

    def progress(self) -> str:
        where = f"{len(self.history)} of {self.shape.total_steps} steps"
        host = self.coordinator
        if host is None or not hasattr(host, "training"):
            return where
        training: Training = host.training
        held = {name: [g.lease for g in training.ledger.held(name)] for name in training.sessions}
        return f"{where}; {host.name} is at {training.version} with leases {list(held.values())}"


def simulate(seed: int, mode: str, schedule: Any, *, focus: tuple[str, ...] = (), verbose: bool = False) -> Outcome:
    """Run one seed; ``focus`` names the only faults that are to happen."""
    root = Path(tempfile.mkdtemp(prefix=f"simulated-{seed}-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    world = World(seed, mode, root, focus=focus, verbose=verbose)
    logger = logging.getLogger("w5xde_async")
    handler, level, propagate = _Errors(world), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logging.getLogger("stamina").setLevel(logging.CRITICAL)
    real = coordinator_making.Training
    coordinator_making.Training = WatchedTraining  # type: ignore[misc]
    try:
        with in_virtual_world(str(seed), world.random):
            try:
                world.loop.run_until_complete(world.run(schedule))
            except TimeUp:
                world.violate("stuck", f"{BOUND_S:.0f} s after the last fault: {world.progress()}")
            except Deadlock:
                world.violate("stuck", f"nothing will ever happen: {world.progress()}")
            finished, virtual_s = world.finished, world.loop.now
            violations, trace_hash = list(world.violations), world.hash.hexdigest()
            world.loop.unexpected = world.network.unexpected = lambda text: None
            for host in world.hosts:
                host.die()
                host.discard()
    finally:
        coordinator_making.Training = real  # type: ignore[misc]
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        world.loop.close()
        shutil.rmtree(root, ignore_errors=True)
    return Outcome(
        seed, mode, violations, world.faults, len(world.history), finished, virtual_s, trace_hash, world.trace,
        world.recomputed,
    )  # fmt: skip
