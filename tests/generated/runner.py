"""One scenario, run: real coordinators and workers on links in memory and in virtual time; what did not hold.

Kinds of violation: ``stuck`` (it does not end in bounded virtual time; the text says who waits where), ``slow`` (it
ends, long after it could have), ``bits`` (not those of the single-process loop), ``lost`` and ``twice`` (a sample's
applications), ``count`` (samples or steps as told), ``resume`` (taken up again it is something else), ``error`` (the
run or a worker ended with one), ``protocol`` (an honest peer was said to break it), ``unexpected`` (an error in a log
or a callback), ``tasks`` (something is left behind). ``refused`` is no violation: the job was refused at the start.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import tempfile
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.generated.jobs import Model, expected_applications, job_of, sampler_of
from tests.generated.scenario import EXACT, KEPT, LEAVING, Fault, Scenario
from tests.simulator import faults
from tests.simulator.cluster import Cluster, Violation
from tests.simulator.loop import HOST, Deadlock, Host, Killed, Livelock, TimeUp
from tests.simulator.patches import AS_IF_BIG
from tests.support import reference
from torch import nn

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import JobError, LeafFailed, Refused, StoreError, UsageError
from w5xde_async.job import Job
from w5xde_async.params.flat import named_digest
from w5xde_async.params.layout import Layout
from w5xde_async.runtime import Runtime
from w5xde_async.store.rundir import Superseded
from w5xde_async.telemetry.events import Bus, Event, RunFinished, RunStarted, StepCommitted, Warned, WorkerLeft
from w5xde_async.updates.admission import Outcome
from w5xde_async.updates.config import LOCAL_RULES, UpdateConfig
from w5xde_async.updates.outer import Contribution, OuterRule
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.executors.island import Rank
from w5xde_async.worker.service import Departure, RunFailed, Worker
from w5xde_async.worker.uplink.uplink import Uplink

__all__ = ["Report", "run"]

#: Applications of a sample may be off by so much, where the codec keeps every value by and by.
_TOLERANCE = {"bf16": 0.02, "fp16": 0.01, "int8": 0.1, "lz4:int8": 0.1, "int4": 0.6}
_MOST_DEATHS = 8
#: A worker that is here and from which nothing comes.
_SILENT = ("worker hangs in its step", "worker stopped (SIGSTOP)", "partition", "worker reads nothing")
_OFFER, _CLOSE = OuterRule.offer, Uplink.close
_SHARED = 6.0  # times as slow a line is meanwhile
_HARD_S = 700.0  # and so much later it is not waited for any more


@dataclass
class Report:
    """How a scenario ended."""

    scenario: Scenario
    violations: list[Violation]
    refused: str
    virtual_s: float
    trace: list[str]
    hits: dict[str, int]

    @property
    def signature(self) -> tuple[str, ...]:
        """What two failures of one cause have in common."""
        return tuple(sorted({f"{v.kind}: {_first_words(v.text)}" for v in self.violations}))


def _may_overflow(scenario: Scenario) -> bool:
    """Whether an update may overflow: parameters of float16."""
    return scenario.parameters == "float16"


def _first_words(text: str) -> str:
    words = "".join("0" if c.isdigit() else c for c in text.split("\n")[0]).split()
    return " ".join(words[:9])


class _Errors(logging.Handler):
    def __init__(self, run: _Run) -> None:
        super().__init__(logging.ERROR)
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.startswith("leaf failed"):
            self._run.violate("unexpected", f"log: {text} {record.exc_info[1] if record.exc_info else ''}")


class _Run(Cluster):
    """A scenario's processes and what is seen of them."""

    def __init__(self, scenario: Scenario, root: Path, *, verbose: bool) -> None:
        super().__init__(f"{scenario.seed}", root, verbose=verbose)
        self.scenario = scenario
        self.network.limit_bytes = max(self.network.limit_bytes, scenario.batch * scenario.columns // 8, 1 << 16)
        self.network.bytes_per_s = 1e8
        if scenario.line_s:
            vector_bytes = sum(tensor.nbytes for tensor in Model(scenario).state_dict().values())
            greeting_bytes = 1000 + 16 * scenario.tensors  # a second: those of a small model are more than it
            most = max(vector_bytes, scenario.batch * scenario.columns * 8, greeting_bytes * scenario.line_s)
            self.network.line_bytes_per_s = most / scenario.line_s
            self.network.limit_bytes = 4 << 20
            self.network.says_what_came = scenario.seed % 4 != 3  # else something sits between, and takes all at once
        self.loop.blocking_s = self.random.choice([0.02, 0.02, 0.5])
        self.network.jitter_s = min(self.network.jitter_s, 0.02)
        self.seed, self.mode, self.focus = scenario.seed, "liveness", ()  # of a storm
        self.kinds = sorted({**faults.FAULTS, **faults.MORE})
        self.refused = ""
        self.model: nn.Module | None = None  # the coordinator's
        self.job: Job = job_of(scenario, self._built)
        self.told: RunFinished | None = None
        self.stopped_at: tuple[int, str] | None = None  # step and digest of a run that was stopped in good order
        self.warnings: list[str] = []
        self.left_out = self.given_up = False
        self.accepted: torch.Tensor | None = None  # the sum of all accepted Deltas
        self.residuals = torch.zeros(scenario.samples, dtype=torch.float64)  # of those that have left for good
        self.residual_files: set[str] = set()  # which are in that
        self.committed, self.undone = 0, False  # the last step, and whether steps were forgotten
        self.unsettled = False  # somebody died, or does not know what became of what he had sent
        codec_exact = scenario.codec in EXACT
        update = UpdateConfig(
            rule=scenario.rule, codec=scenario.codec, downlink=scenario.downlink, inner_steps=scenario.inner_steps,
            fragments=scenario.fragments, outer_lr=1.0 if scenario.rule in ("local", "streaming", "async-local") else
            None, outer_momentum=0.0, staleness_exponent=0.0 if scenario.rule.startswith("async") else None,
            results_per_step=scenario.results_per_step if scenario.rule in ("async", "local") else 0,
            average=scenario.average, mixing=self._mixing(),
        )  # fmt: skip
        self.config = CoordinatorConfig(
            host="127.0.0.1", port=5555, token="generated", update=update, durability=scenario.durability,
            checkpoint_every=scenario.checkpoint_every, min_workers=scenario.min_workers, bucket_bytes=64 << 10,
            norm_gate=6.0 if scenario.gate else 0.0, audit_fraction=scenario.audit if codec_exact else 0.0,
            prefetch_leaves=scenario.prefetch, bulk_threads=0, grace_s=3.0, max_leaf_failures=12,
        )  # fmt: skip
        self.config = replace(self.config, pacing=replace(self.config.pacing, leases_ahead=scenario.ahead))

    def _quiet(self) -> bool:
        return not self.scenario.faults and not self.scenario.storm

    def _prompt(self) -> bool:
        """Whether nothing keeps who is asked to leave: not his lease either, which in a round is all of its steps."""
        made = self.scenario
        if made.rule in LOCAL_RULES and made.inner_steps * -(-made.batch // made.leaf_samples) * made.leaf_s > 10.0:
            return False
        return {fault.kind for fault in made.faults} <= {LEAVING, "worker drained", "late joiner"} and not (
            made.storm or made.line_s
        )

    def _mixing(self) -> float:
        """What is kept of the local values under ``streaming``, so that Deltas tell how often a sample is in them.

        All of it where one worker is alone with its values: then no step is forgotten. With several, those that are
        kept are also sent back against what the others made; so nothing is. Some runs have the default instead.
        """
        if self.scenario.seed % 4 == 3:
            return UpdateConfig().mixing
        alone = self.scenario.workers == 1 and self._quiet() and self.scenario.downlink in ("", *EXACT)
        return 0.9999 if alone else 0.0

    def heard(self, rule: OuterRule, given: Contribution) -> Outcome:
        """Add up what is accepted: what a round averages counts whole."""
        (at,) = [entry for entry in rule.layout.entries if entry.name == "applied"]
        part = given.vector.group(rule.group)[at.offset : at.offset + at.numel].double()
        outcome = _OFFER(rule, given)
        if outcome.accepted:
            self.accepted = part.neg() if self.accepted is None else self.accepted - part
        return outcome

    def leaves(self, uplink: Uplink, finished: bool) -> None:
        """A worker closes its uplink: what has been left out until then is in its encoder, or in files for others."""
        directory = self._residual_directory()
        if finished and directory is not None:
            for path in sorted(directory.glob("residual-*.safetensors")):
                if path.name not in self.residual_files:
                    self.residual_files.add(path.name)
                    self._left_out(load_file(path))
        encoder = uplink.encoder
        if encoder is None or encoder.feedback is None:
            return
        self.unsettled |= bool(encoder.awaited)
        encoder.cut()
        if finished or directory is None:
            self._left_out(encoder.feedback.state_dict())

    def _left_out(self, state: dict[str, torch.Tensor]) -> None:
        layout = Layout.of(Model(self.scenario), bucket_bytes=self.config.bucket_bytes)
        (at,) = [entry for entry in layout.entries if entry.name == "applied"]
        whole = torch.zeros(layout.groups[at.group].numel, dtype=torch.float64)
        for bucket in layout.result_buckets:
            residual = state.get(f"residual.{bucket.index}")
            if bucket.group == at.group and residual is not None:
                whole[bucket.offset : bucket.offset + bucket.numel] = residual.double()
        self.residuals -= whole[at.offset : at.offset + at.numel] * self.scenario.batch

    def _residual_directory(self) -> Path | None:
        return self.disk.root / "residuals" if self.scenario.keeps_residuals else None

    def _built(self, model: nn.Module) -> None:
        host = HOST.get()
        if host is not None and host.machine == "c" and self.model is None:  # later ones are the referee's
            self.model = model

    # -- what is run -------------------------------------------------------------------------------------------

    def make_model(self) -> nn.Module:
        return Model(self.scenario)

    def make_coordinator(self, host: Host, runtime: Runtime) -> Coordinator:
        bus = Bus()
        if host.machine == "c":
            bus.subscribe(lambda event: self.on_event(host, event))
            self.model = None
        # One that hangs for good does not come to the next start, which is not to wait for it.
        config = replace(self.config, min_workers=1) if self.told_start else self.config
        return Coordinator(
            self.job, run_dir=self.disk.root / "run" if self.scenario.kept else None, name="generated",
            config=config, bus=bus, record=False, runtime=runtime,
        )  # fmt: skip

    def make_worker(self, host: Host, runtime: Runtime, rank: Rank | None = None) -> Worker:
        name = "worker" if self.scenario.same_name else host.name
        self.num_made += 1
        has_own = self.scenario.own and rank is None and (self.scenario.own != "some" or self.num_made % 2)
        return Worker(
            "127.0.0.1:5555", job=self.job, runtime=runtime, rank=rank,
            config=WorkerConfig(
                name=name, device="cpu", token="generated", connect_timeout_s=3000.0,
                local_data="x" if has_own else "", data_dir=self._residual_directory(),
            ),
        )  # fmt: skip

    def leaf_seconds(self) -> float:
        return self.scenario.leaf_s * self.random.choice([1.0, 1.0, 0.5, 2.0])

    def complete(self, outcome: Any) -> bool:
        if outcome == "finished" or isinstance(outcome, Killed):
            return bool(outcome == "finished") or not self.scenario.kept
        return isinstance(outcome, BaseException) and not isinstance(outcome, StoreError | Superseded)

    def ended(self, host: Host, outcome: Any) -> None:
        if isinstance(outcome, Killed) or host.machine.startswith("r"):
            return
        if (isinstance(outcome, Superseded) and host.superseded) or (isinstance(outcome, Refused) and host.lied):
            return
        if isinstance(outcome, Refused | RunFailed | LeafFailed) and self.hostile:
            return  # what was played again in its name was against the protocol
        deaths = sum(count for fault, count in self.faults.items() if fault.startswith("worker "))
        if isinstance(outcome, LeafFailed | RunFailed) and max(deaths, self.faults["leaf failed"]) >= _MOST_DEATHS:
            self.given_up = True  # so many died on one leaf, or so often it failed: the run ends, as it says
            return
        if "made parameters infinite" in str(outcome) and _may_overflow(self.scenario):
            self.given_up = True  # as a plain loop's would be: the run says so, and ends
            return
        if host.machine == "c":
            if outcome == "stopped":
                self.stopped_at = (host.result.step, host.result.digest)
            elif isinstance(outcome, JobError | UsageError) and host.service.step == 0 and not self.told_start:
                self.refused = f"{type(outcome).__name__}: {outcome}"
            elif isinstance(outcome, BaseException) and not (isinstance(outcome, StoreError) and self.disk.num_errors):
                self.violate("error", f"the run ended with {type(outcome).__name__}: {_cause(outcome)}")
        elif isinstance(outcome, BaseException) and not self.refused and not self.finished:
            if not (self.violations and self.violations[0].kind == "error"):
                self.violate("error", f"a worker ended with {type(outcome).__name__}: {_cause(outcome)}")
        elif outcome is Departure.FINISHED and self.coordinator is not None:
            if self.coordinator.service.step < self.scenario.total_steps:
                self.violate("error", "a worker was told of the run's end before it")

    told_start = False
    num_made = 0  # workers

    def on_event(self, host: Host, event: Event) -> None:
        if host.state == Host.DEAD:
            return
        if self.verbose:
            self.note("event", f"{host.name} {event!r}"[:300])
        if isinstance(event, RunStarted):
            self.told_start = True
            self.undone |= event.resumed_step < self.committed
            self.committed = event.resumed_step
            if self.stopped_at is not None and event.resumed_step != self.stopped_at[0]:
                if not self.disk.num_errors:
                    self.violate("resume", f"stopped at step {self.stopped_at[0]}, goes on from {event.resumed_step}")
            self.stopped_at = None
        elif isinstance(event, StepCommitted):
            self.committed = event.step
        elif isinstance(event, Warned):
            self.warnings.append(event.text)
            self.left_out |= "is left out" in event.text
        elif isinstance(event, WorkerLeft) and self._quiet() and not (event.clean or self.finished):
            self.violate("dismissed", f"nothing went wrong, and a worker was sent away: {event.reason}")
        elif isinstance(event, WorkerLeft) and "its grace" in event.reason and self._prompt():
            self.violate("dismissed", f"a worker that was to leave was let go {event.reason}")
        elif isinstance(event, WorkerLeft) and "broke the protocol" in event.reason and not self.hostile:
            if not any(host.lied for host in self.hosts):  # whose absurd numbers are refused
                self.violate("protocol", f"{event.reason}")
        elif isinstance(event, RunFinished):
            self.told = event

    # -- the run -----------------------------------------------------------------------------------------------

    async def _share_the_line(self) -> None:
        """Somebody else uses it too after a while, and it is as fast as it was for a few minutes no more."""
        await asyncio.sleep(3.0 * self.scenario.line_s)
        self.network.line_bytes_per_s /= _SHARED
        await asyncio.sleep(30.0 * self.scenario.line_s)
        self.network.line_bytes_per_s *= _SHARED

    async def run(self) -> None:
        main = self.loop.create_task(self.supervise_coordinator())
        self.supervisors.append(main)
        for _ in range(self.scenario.workers):
            self.add_worker(0.0)
        for number, fault in enumerate(self.scenario.faults):
            self.supervisors.append(self.loop.create_task(self._happen(number, fault)))
        if self.scenario.storm:
            self.supervisors.append(self.loop.create_task(self._storm()))
        if self.scenario.line_s and self.network.says_what_came:
            self.supervisors.append(self.loop.create_task(self._share_the_line()))
        try:
            await main
            self.ended_at = self.loop.now
            if not self.refused:
                await asyncio.sleep(8.0)  # who has heard the last message has left by now
                workers = [host for host in self.hosts if host.machine.startswith("w")]
                self.unsettled |= any(not host.ended.done() or host.dead for host in workers)
                await self._take_up_again()
        finally:
            await self.stop_supervising()

    ended_at = 0.0

    async def _take_up_again(self) -> None:
        """A run that was kept and is finished: who starts it again finds it so, and the same."""
        if self.told is None or not self.scenario.kept or self.violations or self.given_up:
            return
        await self.stop_supervising()  # faults that were still to come
        self.disk.error, self.doom_next = 0, None
        host = self.new_host("r.0", "r")
        host.main(self._coordinate(host))
        outcome = await host.ended
        if outcome != "finished":
            self.violate("resume", f"taken up again, the finished run ended with {outcome!r}")
        elif (host.result.step, host.result.digest) != (self.told.step, self.told.digest):
            self.violate("resume", f"finished at step {self.told.step} as {self.told.digest[:12]}, "
                                   f"taken up again at {host.result.step} as {host.result.digest[:12]}")  # fmt: skip

    async def _happen(self, number: int, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        rng = random.Random(f"{self.scenario.seed}/{number}/{fault.kind}")
        world: Any = self
        if fault.kind in KEPT and not self.scenario.kept:
            return
        if {**faults.FAULTS, **faults.MORE, **faults.JUDGED}[fault.kind](world, rng):
            self.hit(fault.kind)

    async def _storm(self) -> None:
        world: Any = self
        await faults.schedule(world)
        self.stopped_faults = True

    def progress(self) -> str:
        """Who waits for what."""
        host = self.coordinator
        lines = ["no coordinator runs"]
        if host is not None and host.service is not None:
            lines = [f"{host.name} is at step {host.service.step} of {self.scenario.total_steps}, "
                     f"{host.service.num_workers} workers have joined"]  # fmt: skip
        for host in (*self.coordinators[-1:], *self.live_workers()):
            hung = " (hangs in its step)" if host.hangs else ""
            lines.append(f"  {host.name}{hung}:")
            for task in host.tasks:
                if not task.done():
                    lines.append(f"    {task.get_name()}: {_where(task)}")
        lines += [f"  warned: {text}" for text in self.warnings[-3:]]
        return "\n".join(lines)

    # -- afterwards --------------------------------------------------------------------------------------------

    def bound_s(self) -> float:
        """In so much virtual time it has to end, whatever happened: all of it computed ten times by the slowest."""
        scenario = self.scenario
        last = max((fault.at_s for fault in scenario.faults), default=0.0)
        if scenario.storm:
            last += 300.0
        silent = sum(fault.kind in _SILENT for fault in scenario.faults)
        # Under rules of local steps submissions have their own times, of which nothing is known for longer.
        unknown = silent + (2 * scenario.inner_steps if scenario.rule in ("local", "streaming", "async-local") else 0)
        if silent >= scenario.workers or (silent and scenario.rule != "sync" and scenario.total_steps <= unknown):
            # Where nobody's times are known a first lease may take so long, and the next on the same step twice.
            last += 600.0 * (2**silent - 1)
        ways = scenario.total_steps + scenario.workers + len(scenario.faults)
        on_the_line = scenario.line_s * (30.0 + 4.0 * ways)
        return last + 120.0 + 60.0 * len(scenario.faults) + on_the_line + 20.0 * scenario.leaf_s * scenario.leaves * (
            scenario.accumulate
        )  # fmt: skip

    def check(self) -> None:
        scenario, told = self.scenario, self.told
        if self.given_up:
            return
        if told is None or self.model is None:
            return self.violate("error", "the run has ended and nobody was told")
        if self.ended_at > self.bound_s():
            self.violate("slow", f"it took {self.ended_at:.0f} s, not {self.bound_s():.0f}; {self.warnings[-2:]}")
        sampler = sampler_of(scenario)
        total = sum(sampler.plan(step).num_samples for step in range(scenario.total_steps))
        if (told.step, told.samples) != (scenario.total_steps, total) and not self.left_out:
            self.violate("count", f"told of {told.step} steps and {told.samples} samples, "
                                  f"not {scenario.total_steps} and {total}")  # fmt: skip
        digest = named_digest(self.model)
        if told.digest != digest:
            self.violate("bits", "the digest that was told is not that of the model")
        if scenario.exact:
            wanted, _ = reference.train(job_of(scenario), scenario.total_steps)
            if digest != named_digest(wanted):
                self.violate("bits", _difference(self.model, wanted))
        elif scenario.optimizer in ("sgd", "momentum"):
            applied = dict(self.model.named_parameters())["applied"].detach().double()
            self._count(applied)
            if scenario.rule == "sync" and scenario.codec not in (*EXACT, "sparseloco") and not self.violations:
                self._conserved(applied)

    def _conserved(self, applied: torch.Tensor) -> None:
        """What was applied and what workers still have add up to what was computed."""
        if self.unsettled or self.left_out or self.undone:
            return
        expected = expected_applications(self.scenario)
        # The last worker that leaves is told that its part of the step under way counts. Where its coordinator ends
        # before others have finished that step, what it left out of it counts twice.
        leaving = any(self.faults[kind] for kind in (LEAVING, "worker drained")) or self.scenario.storm
        high = expected + (float("inf") if leaving and any(self.faults[kind] for kind in KEPT) else 1e-3)
        self.hit("conserved")
        self._compare(applied + self.residuals, expected - 1e-3, high, expected)

    def _count(self, applied: torch.Tensor) -> None:
        scenario = self.scenario
        tolerance = 1e-3 if scenario.codec in EXACT else _TOLERANCE.get(scenario.codec)
        if not bool(applied.isfinite().all()):
            return self.violate("bits", "what was applied is not finite")
        if "loud" in scenario.habits and scenario.codec not in EXACT:
            return  # the scale of a block is that of its largest value
        if "loud" in scenario.habits and scenario.average == "radial":
            return  # a short result counts by its direction, and is as long as a long one beside it
        if tolerance is None or self.left_out:
            return  # the codec keeps much back for ever
        expected = expected_applications(scenario)
        if scenario.rule == "streaming":
            return self._count_streamed(expected, tolerance + 0.005)
        if scenario.clipped or scenario.scheduled:
            return
        quiet = self._quiet()
        low, high = expected - tolerance, expected + tolerance
        if scenario.rule == "async-local" and (scenario.workers > 1 or not quiet):  # N counts whoever is there
            low = expected / scenario.workers - tolerance if quiet and scenario.min_workers > 1 else expected * 0.0
            high = high if not quiet or scenario.min_workers == 1 else expected / scenario.workers + tolerance
        elif scenario.rule == "local" and (scenario.workers > 1 or not quiet):
            # The mean of whoever took part in its round, each by its samples: a short batch counts for less.
            members = max(scenario.workers, self.num_slots)  # a storm brings more
            # So does a run's short last round, into which somebody's whole one may come late.
            shares = max(4 * members + 4, members * scenario.inner_steps + 1)
            low = expected_applications(scenario, weighted=False) / shares - tolerance
            if scenario.average != "mean":
                low = expected * 0.0  # what few of them say is left out
        elif scenario.rule == "async" and scenario.results_per_step > 1:
            low, high = expected / (2 * scenario.batch) - tolerance, high * scenario.batch
        if scenario.rule == "async" and scenario.gate:
            low = expected * 0.0  # the gate makes what is longer than most as long as they are
        self._compare(applied, low, high, expected)

    def _count_streamed(self, expected: torch.Tensor, tolerance: float) -> None:
        """No sample is in a fragment's Deltas more than once, nor left out where nothing goes wrong."""
        kept = self.config.update.mixing
        if kept == UpdateConfig().mixing or any(self.faults[kind] for kind in KEPT) or self.scenario.storm:
            return  # who was killed has taken with it what it had accepted since its last checkpoint
        accepted = torch.zeros_like(expected) if self.accepted is None else self.accepted
        low = expected - tolerance if kept and not self.scenario.gate else expected * 0.0 - tolerance
        self._compare(accepted, low, expected + tolerance, expected)

    def _compare(self, applied: torch.Tensor, low: torch.Tensor, high: torch.Tensor, expected: torch.Tensor) -> None:
        under, over = (applied < low).nonzero().flatten().tolist(), (applied > high).nonzero().flatten().tolist()
        if over:
            at = over[0]
            self.violate("twice", f"{len(over)} samples of {len(applied)} were applied too often: "
                                  f"sample {at} {applied[at]:.4g} times, not {expected[at]:.4g}")  # fmt: skip
        elif under:
            at = under[0]
            self.violate("lost", f"{len(under)} samples of {len(applied)} were applied too rarely: "
                                 f"sample {at} {applied[at]:.4g} times, not {expected[at]:.4g}")  # fmt: skip


def _cause(error: BaseException) -> str:
    cause = error.__cause__
    at = traceback.extract_tb((cause or error).__traceback__)
    where = f" at {Path(at[-1].filename).name}:{at[-1].lineno}" if at else ""
    return f"{error}{f' <- {type(cause).__name__}: {cause}' if cause is not None else ''}{where}"


def _where(task: asyncio.Task[Any]) -> str:
    frames: list[str] = []
    waiting: Any = task.get_coro()
    while waiting is not None and len(frames) < 12:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is None:
            break
        frames.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return " > ".join(frames[-3:])


def _difference(got: nn.Module, wanted: nn.Module) -> str:
    expected = {**dict(wanted.named_parameters()), **dict(wanted.named_buffers())}
    found = []
    for name, value in {**dict(got.named_parameters()), **dict(got.named_buffers())}.items():
        if not torch.equal(value, expected[name]):
            off = (value.detach().double() - expected[name].detach().double()).abs().max().item()
            found.append(f"{name} by {off:.2g}")
    return f"other bits than the plain loop: {', '.join(found)}"


def run(scenario: Scenario, *, verbose: bool = False) -> Report:
    """Run it, and once more where it was kept: a finished run that is taken up again is what it was."""
    root = Path(tempfile.mkdtemp(prefix="generated-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    one = _Run(scenario, root, verbose=verbose)
    logger = logging.getLogger("w5xde_async")
    handler, level, propagate = _Errors(one), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    state = random.getstate()
    random.seed(f"{scenario.seed}/jitter")
    one.loop.limit_s = one.bound_s() + _HARD_S
    patched = pytest.MonkeyPatch()

    async def close(uplink: Uplink, *, finished: bool, kept: bool, abandoned: bool) -> None:
        await asyncio.get_running_loop().run_in_executor(None, one.leaves, uplink, finished)
        await _CLOSE(uplink, finished=finished, kept=kept, abandoned=abandoned)

    patched.setattr(Uplink, "close", close)
    for owner, name, value in AS_IF_BIG if scenario.as_if_big else ():
        patched.setattr(owner, name, value)
    if scenario.rule == "streaming":
        patched.setattr(OuterRule, "offer", lambda rule, given: one.heard(rule, given))
    try:
        try:
            one.loop.run_until_complete(one.run())
            if not one.refused and not one.violations:
                one.check()
        except (TimeUp, Deadlock, Livelock) as error:
            one.violate("stuck", f"{type(error).__name__} after {one.loop.now:.0f} s: {one.progress()}")
        violations = list(one.violations)
        one.discard()
    finally:
        patched.undo()
        random.setstate(state)
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        one.loop.close()
        shutil.rmtree(root, ignore_errors=True)
    return Report(scenario, violations, one.refused, one.loop.now, one.trace, dict(one.faults))
