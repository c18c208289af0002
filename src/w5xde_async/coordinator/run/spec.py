"""What a run is made of, by what rule it trains, and where it is taken up: values that nobody rewrites."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from w5xde_async.compute.inner import Schedule
from w5xde_async.compute.program.form import Document
from w5xde_async.coordinator.durability.evaluation import Evaluator
from w5xde_async.coordinator.sync.batch_growth import BatchGrowth
from w5xde_async.data.stream import StreamReader
from w5xde_async.hub.work.verdicts import Counted
from w5xde_async.job import Job
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.plan.bad_samples import BadSamples
from w5xde_async.plan.numerics import RunNumerics
from w5xde_async.plan.sampler import Sampler, Steps
from w5xde_async.segments import Segment
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.store.journal import Journal
from w5xde_async.store.rundir import RunDir
from w5xde_async.telemetry.events import Best
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.outer import OuterRule
from w5xde_async.updates.sync import SyncRule

_SHORT_LEAF_FLOPS = 200_000_000  # some milliseconds on one core
_FEW_BYTES = 16 << 20  # of a gradient: two threads clear and add more of it in less time


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Where a run is kept. ``journal`` has begun; None where the run keeps none."""

    directory: RunDir
    checkpoints: CheckpointStore
    journal: Journal | None

    def close(self) -> None:
        """Let go of them: the start has come to nothing."""
        try:
            if self.journal is not None:
                self.journal.close()
        finally:
            self.directory.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What a run is made of, whatever its update rule.

    ``model``'s tensors are views of ``state``. ``evaluator`` is there where the job evaluates. ``program`` is there
    where no other process can load the job; ``untraceable`` says why it is not. ``possible``: rules and codecs that
    ``auto`` may choose. ``segment``: what ``state`` lies in, where workers of this machine may have it.
    """

    job: Job
    sampler: Sampler
    total_steps: int  # as planned when the run starts
    model: nn.Module
    evaluator: Evaluator | None
    layout: Layout
    state: FlatState
    segment: Segment | None = None
    program: Document | None = None
    untraceable: str = ""
    leaves_by: str = ""  # what has decided the size of a leaf, where the job does not
    step_flops: int = 0  # operations of a step, where they were counted
    growing: BatchGrowth | None = None  # where the batch grows
    possible: frozenset[tuple[str, str]] = frozenset()
    run_id: str = ""
    term: int = 1
    files: RunFiles | None = None  # None: nothing is kept
    settings: Mapping[str, str] = field(default_factory=dict)  # of optimizer and scheduler, as the job began with them
    overrides: tuple[tuple[int, str], ...] = ()  # what was changed of optimizer and scheduler, after which step
    numerics: RunNumerics = field(default_factory=RunNumerics)  # also of what came before a resume
    counted: Counted = field(default_factory=Counted)  # the same
    stream: StreamReader | None = None  # where the dataset is one
    bad: BadSamples = field(default_factory=BadSamples)  # the same
    begins_finite: bool = True  # what is trained, where this start takes it up

    @property
    def has_short_leaves(self) -> bool:
        """Whether a microbatch is so little arithmetic that a second thread costs more than it computes.

        That is known where the job leaves ``microbatch_size`` open: else no step is tried before the first one.
        """
        flops = self.step_flops * self.job.microbatch_samples / self.job.batch_size
        return 0 < flops < _SHORT_LEAF_FLOPS and self.layout.vector_bytes <= _FEW_BYTES

    @property
    def steps(self) -> Steps:
        """Which samples make which step."""
        return self.sampler if self.growing is None else self.growing.plan

    @property
    def step_leaves(self) -> int:
        """Leaves of the largest step: not of an epoch's last one. Where the batch grows, of its newest size."""
        return -(-min(self.steps.batch_size, self.sampler.num_samples) // self.sampler.leaf_samples)

    def close(self) -> None:
        """Let go of what it holds, where the start comes to nothing. Blocking."""
        with ExitStack() as held:
            if self.files is not None:
                held.callback(self.files.close)
            if self.stream is not None:
                held.callback(self.stream.close)
            if self.segment is not None:
                held.callback(self.segment.close)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How results become parameters. Under ``auto`` a run may go on by another one.

    ``schedule`` is that of the workers' optimizers, under rules of local steps; ``inner`` says what those are
    (``compute.inner``, as msgpack).
    """

    update: UpdateConfig
    rule: SyncRule | OuterRule
    schedule: Schedule | None = None
    inner: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run goes on: after ``step`` steps and ``samples`` samples.

    ``loss`` is the last finite one, where it is known. ``saved_step`` is that of the newest checkpoint that counts; -1:
    none. ``replayed`` are the records of steps that came from the journal, for metrics.jsonl. ``notes`` are for people.
    ``best``: of the evaluations so far, where the job keeps it. ``finished``: there it was finished before, so what
    was evaluated there has decided what it decides.
    """

    step: int = 0
    samples: int = 0
    loss: float | None = None
    saved_step: int = -1
    replayed: tuple[Mapping[str, object], ...] = ()
    notes: tuple[str, ...] = ()
    best: Best | None = None
    finished: bool = False


class Prepared(NamedTuple):
    """A run that can start."""

    spec: RunSpec
    strategy: Strategy
    resume: ResumePoint
