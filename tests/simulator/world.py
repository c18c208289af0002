"""One simulated run: a coordinator that is restarted when it dies, workers that come and go, faults, checks.

Real: the whole coordinator and worker services with their sessions, ledger, dispatch, loader, aggregator, reducer,
update rule, publisher, checkpoints, run directory, handshake, framing, reconnect loop. Simulated: time, sockets,
threads, the disk's memory, the kernel's signals, and the arithmetic of forward and backward (``model``).
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
import random
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulator.disk import Disk, HostFilesystem
from tests.simulator.loop import HOST, Deadlock, Host, Killed, TimeUp, VirtualLoop
from tests.simulator.model import SHAPES, Shape, expected_run, explain_difference, job_of
from tests.simulator.network import ADDRESS, Network
from tests.simulator.patches import in_virtual_world

from w5xde_async.coordinator import service as coordinator_service
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.training import Training
from w5xde_async.errors import LeafFailed, Refused, StoreError
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.store.rundir import Superseded
from w5xde_async.telemetry.events import (
    Bus,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    JournalFailed,
    JournalRestored,
    RunFinished,
    RunStarted,
    StepCommitted,
    Warned,
    WorkerLeft,
)
from w5xde_async.worker import service as worker_service
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.serving import Departure, RunFailed

__all__ = ["BOUND_S", "Outcome", "Violation", "World", "simulate"]

BUCKET_BYTES = 256
#: Liveness: once faults have stopped the run ends within this much virtual time. What may have to pass first: a silent
#: peer is found (5 s + a heartbeat), a lease of a lost worker falls due (20 s at most, twice where its successor is
#: also one that hangs), a retry waits (5.5 s) and connects (10 s); then at most 8 steps of 16 leaves of 0.4 s on one
#: worker (51 s).
BOUND_S = 150.0
_DAY_S = 86400.0


@dataclass(frozen=True)
class Violation:
    """``kind``: lost, twice, bits, stuck, term, versions, ledger, memory, durability, tasks or unexpected."""

    kind: str
    text: str
    at_s: float


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


class WatchedTraining(Training):
    """The training room; after what sessions and the clock do to it, its books must balance."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        host = HOST.get()
        assert host is not None
        host.training = self  # type: ignore[attr-defined]
        self._watch = host.world.watch  # type: ignore[attr-defined]
        commit = self.aggregator.commit

        async def committed() -> Any:
            result = await commit()
            host.world.on_applied(host, self, self.version + 1)  # type: ignore[attr-defined]
            return result

        self.aggregator.commit = committed  # type: ignore[method-assign]

    def tick(self, now: float) -> None:
        super().tick(now)
        self._watch(self, "tick")

    def done(self, session: Any, done: Any) -> None:
        super().done(session, done)
        self._watch(self, "done")

    def failed(self, session: Any, failed: Any) -> None:
        super().failed(session, failed)
        self._watch(self, "failed")

    def draining(self, session: Any, drain: Any) -> None:
        super().draining(session, drain)
        self._watch(self, "draining")

    def left(self, session: Any, reason: str, *, clean: bool) -> None:
        super().left(session, reason, clean=clean)
        self._watch(self, "left")


class _Errors(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.startswith("leaf failed"):
            self._world.violate("unexpected", f"log: {text} {record.exc_info[1] if record.exc_info else ''}")


class World:
    """The state of one simulation."""

    def __init__(self, seed: int, mode: str, root: Path, *, verbose: bool = False) -> None:
        self.seed, self.mode, self.verbose = seed, mode, verbose
        self.random = random.Random(f"{seed}/{mode}")
        self.loop = VirtualLoop()
        self.loop.violate = self.violate
        self.loop.unexpected = lambda text: self.violate("unexpected", text)
        self.network = Network(self.loop, random.Random(f"{seed}/network"))
        self.network.note, self.network.hit = self.note, self.hit
        self.network.unexpected = self.loop.unexpected
        self.disk = Disk(root, random.Random(f"{seed}/disk"))
        self.shape: Shape = self.random.choice(SHAPES)
        self.expected = expected_run(self.shape, BUCKET_BYTES)
        self.faults: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self.trace: list[str] = []
        self._hash = hashlib.blake2b(digest_size=8)
        self.hosts: list[Host] = []
        self.coordinators: list[Host] = []
        self.workers: dict[int, Host] = {}
        self.num_slots = 0
        self.pauses_at_joining_s: dict[str, float] = {}  # machine -> of the worker that is started there next
        self.finished = False
        self.stopped_faults = False
        self.hostile = False  # somebody says what no worker would say
        self.history: list[int] = []  # the term in which each version was made, of the history that survives
        self.durable_step = 0
        self.highest_term = 0
        self.recomputed = 0
        self.supervisors: list[asyncio.Task[Any]] = []
        self.config = CoordinatorConfig(
            host=ADDRESS[0], port=ADDRESS[1], token="simulated", heartbeat_s=1.0, silence_s=5.0, handshake_s=5.0,
            grace_s=self.random.choice([0.5, 3.0]), checkpoint_every=self.random.choice([1, 2, 3]),
            keep_checkpoints=self.random.choice([1, 2, 3]), durability=self.random.choice(["checkpoint", "journal"]),
            max_leaf_failures=12, evaluate=False,
            bulk_threads=0,
            prefetch_leaves=self.random.choice([4, 64]), min_workers=self.random.choice([1, 1, 2]),
            pacing=PacingConfig(
                target_lease_s=self.random.choice([0.03, 0.5]), leases_ahead=self.random.choice([1, 2, 3]),
                min_deadline_s=4.0, first_deadline_s=8.0, max_deadline_s=20.0,
            ),
        )  # fmt: skip
        object.__setattr__(self.config, "bucket_bytes", BUCKET_BYTES)  # less than a person may choose: many buckets

    # -- notes and checks --------------------------------------------------------------------------------------

    def note(self, kind: str, text: str) -> None:
        line = f"{self.loop.now:9.4f} {kind} {text}"
        self._hash.update(line.encode())
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

    def watch(self, training: Training, what: str) -> None:
        try:
            training.ledger.validate()
        except (AssertionError, KeyError) as error:
            self.violate("ledger", f"after {what}: {error!r}")
        sessions, ahead = len(training.sessions), self.config.pacing.leases_ahead
        # A drained or replaced worker's leases go with it; two steps are open.
        if training.ledger.num_open > 2 * ahead * max(sessions, 1) + ahead:
            self.violate("memory", f"{training.ledger.num_open} leases open for {sessions} workers")
        leaves = self.shape.sampler.plan(0).num_leaves
        blocks = min(self.config.max_workers * ahead, leaves)
        bound = min(leaves, (blocks + 1) * max(1, leaves.bit_length())) + 4
        vectors = training.aggregator._reducer.pool.num_out
        if vectors > bound:
            self.violate("memory", f"{vectors} result vectors are out, the bound is {bound}")
        if what == "tick":
            self._overdue(training)
        for session in training.sessions.values():
            queued = len(session.outbox._items)
            if queued > 160:
                self.violate("memory", f"{queued} frames queued for one worker")

    def _overdue(self, training: Training) -> None:
        """After a tick nobody holds a lease beyond its deadline while another could have it."""
        now, ready = training.clock(), [member.worker_id for member in training.membership.ready()]
        for worker, session in training.sessions.items():
            for grant in training.ledger.held(worker):
                late_s = now - training.ledger.began_at(grant) - grant.deadline_s
                others = any(other != worker for other in ready)
                if grant.step == training.version and late_s > 0.1 and others and session.link.bytes_sent >= 0:
                    if session.receiving != grant.lease and not session.ended.is_set():
                        self.violate("deadline", f"lease {grant.lease} of {session.name} is {late_s:.1f} s overdue")

    def on_event(self, host: Host, event: Event) -> None:
        if host.state != Host.RUNNING:
            return
        if isinstance(event, StepCommitted):
            self._on_commit(host, event)
        elif isinstance(event, RunStarted):
            self._on_start(host, event)
        elif isinstance(event, CheckpointSaved):
            self.note("saved", f"{host.name} step {event.step}")
            if not host.superseded:
                self.durable_step = max(self.durable_step, event.step)
        elif isinstance(event, CheckpointFailed | JournalFailed | JournalRestored):
            self.note("disk", f"{host.name} {type(event).__name__} step {event.step}")
        elif isinstance(event, WorkerLeft):
            self.note("left", f"{event.name} {event.reason}")
            if "broke the protocol" in event.reason and not self.hostile:
                self.violate("unexpected", f"{event.name}: {event.reason}")
            if not event.clean and not event.name.startswith("r") and not self.num_losses and not self.num_stalls:
                self.violate("unexpected", f"{event.name} was lost without a fault: {event.reason}")
        elif isinstance(event, Warned):
            self.note("warned", f"{host.name} {event.text[:160]}")
        elif isinstance(event, RunFinished):
            self.note("ended", f"{host.name} {event.outcome} step {event.step}")

    def _on_start(self, host: Host, event: RunStarted) -> None:
        self.note("start", f"{host.name} term {event.term} from step {event.resumed_step}")
        host.term = event.term
        if event.term <= self.highest_term:
            self.violate("term", f"term {event.term} after {self.highest_term}")
        self.highest_term = max(self.highest_term, event.term)
        if event.resumed_step < self.durable_step:
            self.violate("durability", f"resumed at step {event.resumed_step}, {self.durable_step} was durable")
        if event.resumed_step > len(self.history):
            self.violate("versions", f"resumed at step {event.resumed_step} of {len(self.history)} ever made")
        self.recomputed += max(0, len(self.history) - event.resumed_step)
        del self.history[event.resumed_step :]
        training = host.training  # type: ignore[attr-defined]
        self._compare(training, event.resumed_step, "resumed")
        self._count(training)

    def _count(self, training: Training) -> None:
        """See which leaves the ledger counts as applied when a step is closed."""
        real = training.ledger.close

        def close(step: int) -> None:
            opened = training.ledger._steps[step]
            done = sorted((s.block.start, s.block.stop) for s in opened.slots.values() if s.finished)
            leaves = [leaf for start, stop in done for leaf in range(start, stop)]
            if leaves != list(range(self.shape.sampler.plan(step).num_leaves)):
                self.violate("lost", f"step {step} was committed with leaves {leaves} by the ledger")
            real(step)

        training.ledger.close = close  # type: ignore[method-assign]

    def on_applied(self, host: Host, training: Training, version: int) -> None:
        """A version has been made, in the memory of one coordinator."""
        self.note("applied", f"{host.name} {version}")
        if host.term < self.highest_term:
            # From bytes that it had received before: nobody follows it, nothing of it may survive.
            self.hit("superseded coordinator committed in vain")
            return
        if version != len(self.history) + 1:
            self.violate("versions", f"commit of version {version} where {len(self.history) + 1} is the next")
        self.history.append(host.term)
        self._compare(training, version, "committed")

    def _on_commit(self, host: Host, event: StepCommitted) -> None:
        """Whoever follows the run is told of a commit."""
        self.note("commit", f"{host.name} {event.step} loss {event.loss:.6g} skipped {event.skipped}")
        if host.term < self.highest_term or event.step >= len(self.expected.losses):
            return
        if event.step > len(self.history):
            self.violate("versions", f"told of version {event.step} of {len(self.history)}")
        journaling = host.training.journaling  # type: ignore[attr-defined]
        if journaling is not None and journaling.sound:
            self.durable_step = max(self.durable_step, event.step)
        plan = self.shape.sampler.plan(event.step - 1)
        if (event.epoch, event.samples) != (plan.epoch, plan.num_samples):
            self.violate("bits", f"step {event.step} counts {event.samples} samples of epoch {event.epoch}")
        if event.loss != self.expected.losses[event.step]:
            self.violate("bits", f"loss of step {event.step} is {event.loss}, not {self.expected.losses[event.step]}")
        rows = event.metrics.get("rows")
        want = sum(plan.samples_in(leaf) ** 2 for leaf in range(plan.num_leaves)) / plan.num_samples
        if rows != want:
            self.violate("bits", f"metric of step {event.step} is {rows}, {want} expected")

    def _compare(self, training: Training, version: int, what: str) -> None:
        if version >= len(self.expected.digests):
            self.violate("versions", f"{what} version {version} of {len(self.expected.digests) - 1}")
            return
        state = training.aggregator.state
        if state.digest() != self.expected.digests[version]:
            text = explain_difference(self.shape, state.views, state.layout, self.expected.tensors[version])
            self.violate(text.partition(":")[0], f"{what} version {version}: {text}")
        # At a commit the step itself is counted a little later.
        steps = version if what == "resumed" else version - 1
        total = sum(self.shape.sampler.plan(step).num_samples for step in range(steps))
        if training.samples_applied != total:
            self.violate("twice", f"{what} version {version}: {training.samples_applied} samples counted, not {total}")

    @property
    def num_losses(self) -> int:
        """How often a link or a worker has been lost so far."""
        kinds = (
            "link",
            "cut",
            "partition",
            "worker killed",
            "worker without",
            "worker stopped",
            "half",
            "worker reads",
        )
        return sum(n for kind, n in self.faults.items() if any(word in kind for word in kinds))

    @property
    def num_stalls(self) -> int:
        """What may make a worker that is well look as if it were not."""
        kinds = ("delay spike", "coordinator", "replayed", "leaf failed", "disk", "drained", "joiner")
        return sum(n for kind, n in self.faults.items() if any(word in kind for word in kinds))

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
        host.filesystem = HostFilesystem(self.disk, lambda: host.state != Host.DEAD)
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
        service = coordinator_service.Coordinator(
            job_of(self.shape), run_dir=self.disk.root / "run", name="simulated", config=config, bus=bus
        )
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
        worker = worker_service.Worker(
            f"{ADDRESS[0]}:{ADDRESS[1]}", job=job_of(self.shape),
            config=WorkerConfig(name=host.name, device="cpu", token="simulated", connect_timeout_s=3000.0),
        )  # fmt: skip
        host.service = worker
        return await worker.run()

    def _ended(self, host: Host, outcome: Any) -> None:
        self.note("exit", f"{host.name} {outcome!r}"[:200])
        if isinstance(outcome, Killed):
            return
        if isinstance(outcome, LeafFailed | RunFailed) and self.num_losses >= 8:
            return  # a leaf on which so many workers vanished is given up, and says so
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


def simulate(seed: int, mode: str, schedule: Any, *, verbose: bool = False) -> Outcome:
    """Run one seed."""
    root = Path(tempfile.mkdtemp(prefix=f"simulated-{seed}-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    world = World(seed, mode, root, verbose=verbose)
    logger = logging.getLogger("w5xde_async")
    handler, level, propagate = _Errors(world), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logging.getLogger("stamina").setLevel(logging.CRITICAL)
    real = coordinator_service.Training
    coordinator_service.Training = WatchedTraining  # type: ignore[misc]
    try:
        with in_virtual_world(world.loop, world.network, str(seed), world.random):
            try:
                world.loop.run_until_complete(world.run(schedule))
            except TimeUp:
                world.violate("stuck", f"{BOUND_S:.0f} s after the last fault: {world.progress()}")
            except Deadlock:
                world.violate("stuck", f"nothing will ever happen: {world.progress()}")
            finished, virtual_s = world.finished, world.loop.now
            violations, trace_hash = list(world.violations), world._hash.hexdigest()
            world.loop.unexpected = world.network.unexpected = lambda text: None
            for host in world.hosts:
                host.die()
                host.discard()
    finally:
        coordinator_service.Training = real  # type: ignore[misc]
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        world.loop.close()
        shutil.rmtree(root, ignore_errors=True)
    return Outcome(
        seed, mode, violations, world.faults, len(world.history), finished, virtual_s, trace_hash, world.trace,
        world.recomputed,
    )  # fmt: skip
