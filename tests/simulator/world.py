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

from tests.simulator.checks import Checks, WatchedTraining
from tests.simulator.cluster import Violation
from tests.simulator.faults import FAULTS
from tests.simulator.loop import Deadlock, Host, Killed, TimeUp
from tests.simulator.model import SHAPES, Shape, expected_run, job_of
from tests.simulator.network import ADDRESS
from tests.simulator.patches import in_virtual_world
from tests.support.circle import Gone
from torch import nn

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.run import run as coordinator_run
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.coordinator.sync.training import SyncTraining
from w5xde_async.errors import IslandBroken, LeafFailed, LinkLost, Refused, StoreError
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.plan.shares import Share
from w5xde_async.runtime import Runtime
from w5xde_async.store.rundir import Superseded
from w5xde_async.telemetry.events import (
    Bus,
)
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.connection import Departure, RunFailed
from w5xde_async.worker.executors.island import Rank
from w5xde_async.worker.service import Worker

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
        of_island = self._world.islands and text.startswith("leaving the run reason=cpu is lost")  # after such a leaf
        if not text.startswith("leaf failed") and not of_island:
            self._world.violate("unexpected", f"log: {text} {record.exc_info[1] if record.exc_info else ''}")


class SmallBuckets(CoordinatorConfig):
    """Many buckets: they are smaller than a person may choose."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bucket_bytes", CoordinatorConfig.bucket_bytes)
        super().__post_init__()
        object.__setattr__(self, "bucket_bytes", BUCKET_BYTES)


#: Of a simulation: workers that have several ranks, or a sample that none of them can compute.
KINDS = ("", "islands", "curses")


class World(Checks):
    """The state of one simulation."""

    def __init__(
        self, seed: int, mode: str, root: Path, *, focus: tuple[str, ...] = (), kind: str = "",
        verbose: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(f"{seed}/{mode}", root, verbose=verbose)
        self.seed, self.mode, self.focus, self.islands = seed, mode, focus, kind == "islands"
        self.cursed = -1  # a sample that no worker can compute
        self.kinds = sorted(FAULTS)
        self.shape: Shape = self.random.choice(SHAPES)
        self.expected = expected_run(self.shape, BUCKET_BYTES)
        # Unjudged, buckets are added as they come; judged, a block at a time, and some are computed twice.
        norm_gate, audit_fraction = random.Random(f"{seed}/judging").choice([(0.0, 0.0), (6.0, 0.01), (6.0, 0.3)])
        failures = 12
        if kind == "curses":
            drawn = random.Random(f"{seed}/curses")
            failures, self.cursed = drawn.choice([1, 2]), drawn.randrange(self.shape.num_samples)
        self.config = SmallBuckets(
            norm_gate=norm_gate, audit_fraction=audit_fraction,
            host=ADDRESS[0], port=ADDRESS[1], token="simulated", heartbeat_s=1.0, silence_s=5.0, handshake_s=5.0,
            grace_s=self.random.choice([0.5, 3.0]), checkpoint_every=self.random.choice([1, 2, 3, 4, 50]),
            keep_checkpoints=self.random.choice([1, 2, 3]), durability=self.random.choice(["checkpoint", "journal"]),
            max_leaf_failures=failures, evaluate=False,
            bulk_threads=0,
            prefetch_leaves=self.random.choice([4, 64]), min_workers=self.random.choice([1, 1, 2]),
            pacing=PacingConfig(
                target_lease_s=self.random.choice([0.03, 0.5]), leases_ahead=self.random.choice([1, 2, 3]),
                min_deadline_s=4.0, first_deadline_s=8.0, max_deadline_s=20.0,
            ),
        )  # fmt: skip

    # -- hosts -------------------------------------------------------------------------------------------------

    def new_host(self, name: str, machine: str) -> Host:
        host = super().new_host(name, machine)
        host.offset_s = self.random.choice([0.0, _DAY_S, -_DAY_S / 2])
        if host.offset_s:
            self.hit("clock a day off")
        host.offset_s += 2 * _DAY_S
        host.cursed = self.cursed
        host.world = self  # type: ignore[attr-defined]
        return host

    def make_model(self) -> nn.Module:
        model = job_of(self.shape).model
        assert callable(model)
        return model()

    def make_coordinator(self, host: Host, runtime: Runtime) -> Coordinator:
        bus = Bus()
        config = copy.copy(self.config)
        if self.random.random() < 0.15:  # a person has changed it
            object.__setattr__(config, "durability", self.random.choice(["checkpoint", "journal"]))
        bus.subscribe(lambda event: self.on_event(host, event))
        return Coordinator(
            job_of(self.shape), run_dir=self.disk.root / "run", name="simulated", config=config, bus=bus, record=False,
            runtime=runtime,
        )  # fmt: skip

    def make_worker(self, host: Host, runtime: Runtime, rank: Rank | None = None) -> Worker:
        return Worker(
            f"{ADDRESS[0]}:{ADDRESS[1]}", job=job_of(self.shape), runtime=runtime, rank=rank,
            config=WorkerConfig(name=host.name, device="cpu", token="simulated", connect_timeout_s=3000.0),
        )  # fmt: skip

    def ended(self, host: Host, outcome: Any) -> None:
        if outcome is Departure.FINISHED and self.durable_step < self.shape.total_steps:
            self.violate("durability", f"{host.name} was told of an end when step {self.durable_step} was safe")
        if isinstance(outcome, Killed):
            return
        if host.of_island and isinstance(outcome, LinkLost | Gone | IslandBroken):
            return  # it was lost, and it all begins anew
        failures = self.faults["leaf failed"] >= self.config.max_leaf_failures
        if isinstance(outcome, LeafFailed | RunFailed) and (failures or len(self.vanished) >= 8):
            return  # a leaf that failed so often, or on which so many workers vanished for good, ends the run
        if isinstance(outcome, Superseded) and host.superseded:
            return
        if isinstance(outcome, Refused) and self.hostile:
            return  # what was played again in its name was against the protocol
        if isinstance(outcome, BaseException) and not (isinstance(outcome, StoreError) and self.disk.num_errors):
            self.violate("unexpected", f"{host.name} ended with {type(outcome).__name__}: {outcome}")

    # -- the run -----------------------------------------------------------------------------------------------

    async def run(self, schedule: Any) -> None:
        """Until the run is complete, or the faults' end in safety mode."""
        main = self.loop.create_task(self.supervise_coordinator())
        self.supervisors.append(main)
        if self.islands:
            self.add_island(self.random.choice([2, 2, 3]), self.random.choice(list(Share)))
            if self.random.random() < 0.3:
                self.add_island(2, self.random.choice(list(Share)), self.random.uniform(0.0, 8.0))
        for slot in range(self.random.randint(self.config.min_workers, 2 if self.islands else 4)):
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
            await self.stop_supervising()

    def progress(self) -> str:
        where = f"{len(self.history)} of {self.shape.total_steps} steps"
        host = self.coordinator
        if host is None or not hasattr(host, "training"):
            return where
        training: SyncTraining = host.training
        held = {name: [g.lease for g in training.ledger.held(name)] for name in training.roster.sessions}
        return f"{where}; {host.name} is at {training.version} with leases {list(held.values())}"


def simulate(
    seed: int, mode: str, schedule: Any, *, focus: tuple[str, ...] = (), kind: str = "", verbose: bool = False
) -> Outcome:
    """Run one seed; ``focus`` names the only faults that are to happen, ``kind`` is one of KINDS."""
    root = Path(tempfile.mkdtemp(prefix=f"simulated-{seed}-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    world = World(seed, mode, root, focus=focus, kind=kind, verbose=verbose)
    logger = logging.getLogger("w5xde_async")
    handler, level, propagate = _Errors(world), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    real = coordinator_run.SyncTraining
    coordinator_run.SyncTraining = WatchedTraining  # type: ignore[misc]
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
            world.discard()
    finally:
        coordinator_run.SyncTraining = real  # type: ignore[misc]
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        world.loop.close()
        shutil.rmtree(root, ignore_errors=True)
    return Outcome(
        seed, mode, violations, world.faults, len(world.history), finished, virtual_s, trace_hash, world.trace,
        world.recomputed,
    )  # fmt: skip
