"""Leaves that are too short to be sent: the coordinator computes them in a worker's place.

A small step's messages take longer than its leaves. What a worker on this machine would compute on its CPU is computed
here instead: on the event loop, with an engine of its own, as small updates are made there. That is the whole step
where it is not shared out anyway (``plan.pacing``). Else it is the leases of one worker, beside the others that compute
theirs: on a machine whose workers keep every core busy, the coordinator has no core to itself in any case.

Who computes may depend on the clock only where nothing else does. So the worker is asked first: ``_SETTLED`` steps show
what a step takes by way of it, and results in the next ``_PROOFS`` are computed here too, at the same parameters, and
must be the same to the bit. From then on they are computed here, as long as steps take less time so and such a worker
is present; where Python code reads in one thread, it is seen in the same way whether reading and steps better take
turns. What fails here, takes ``_LONGEST_S``, or changes what all of this process works with (``_SETTINGS``), ends it
for good: workers compute that, and tell what is wrong with it.

Memory: the model once more (of what workers of this machine see where it lies, only pages that a step writes),
``MOST_LENT`` result vectors and the activations of one leaf. It is built on the loop: only where all of it is small.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from w5xde_async.compute.block import ComputedBlock, Task
from w5xde_async.compute.engine import Engine
from w5xde_async.compute.program.switches import product_precision, set_product_precision
from w5xde_async.data.loader import Batch, Loader
from w5xde_async.errors import ExitCode
from w5xde_async.hub.members.session import Session
from w5xde_async.job import Job
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.plan.numerics import EXACT
from w5xde_async.plan.sampler import StepPlan
from w5xde_async.plan.tree import Block
from w5xde_async.randomness import Claim, random_state
from w5xde_async.segments import Opened, Segment, Unshared
from w5xde_async.telemetry.writer import flush_all, writer_for
from w5xde_async.updates.sync import SyncRule
from w5xde_async.users_code import Overdue, time_limit, users_code
from w5xde_async.wire.messages import Done

_SETTLED = 16  # steps by way of workers, and steps here, of which the medians are compared
_VARIED = 5 * _SETTLED  # the same where one step waits for the data of several: five groups, each by its mean
_PROOFS = 4
_MOST_KINDS = 16  # of workers that are compared
_MOST_BYTES = 8 << 20  # of a result, and of the model, which is built on the loop, and copied where it cannot be shown
_SLOWER = 1.1  # than steps by way of workers: medians of different moments differ by as much, for nothing
_MOST_PATIENCE = 4096  # steps by way of workers, before it is tried again
_BESIDE_S = 0.0005  # what a whole step takes here beside its leaves
_WEIGHED, _MOST_WEIGHED = 16, 256  # times that steps are compared, before what was slower is tried again
_LONGEST_S = 5.0
_MOMENT_S = 0.005  # that the loop waits for others' random numbers, once in a row
MOST_LENT = 4  #: results that wait for their step's end where they were summed; others are copied


_OTHER_BITS = (
    "{name} has computed other bits of a step than the coordinator from the same parameters and data: the job's step "
    "keeps something from call to call (a counter, a cache), or that worker's own code is other code, or it is wrong; "
    "its steps stay with workers"
)
_LEFT_TO_WORKERS = (
    "the coordinator computes nothing in place of a worker any more, since step {step} failed there ({error}): workers "
    "compute it, and all that follows"
)


_CHANGES = "it changes {what}, which the whole process works with"


_SUBNORMAL = sys.float_info.min / 2


def _flushes_denormals() -> bool:
    return _SUBNORMAL * 1.0 == 0.0


#: What a step may change that others here would go on with: the optimizer, first of all. By its name, how it is read
#: and put back.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled),
    "whether denormal numbers are flushed": (_flushes_denormals, torch.set_flush_denormal),
    "the precision of matrix products": (product_precision, set_product_precision),
}
_READ = [read for read, _ in _SETTINGS.values()]


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a worker computes, by what it says."""

    device_name: str
    threads: int
    torch_version: str


class _Ways:
    """Two ways to do the same, of which the faster one is taken: the other is tried now and then."""

    def __init__(self, *, first: bool) -> None:
        self.way = first
        self._known: dict[bool, float] = {}  # seconds, by the way that was taken
        self._weighed, self._until = 0, _WEIGHED

    def took(self, seconds: float) -> bool:
        """The way that is taken took so long. Whether it is the other one from now on: that was faster, or is to be
        tried."""
        self._known[self.way] = seconds
        self._weighed += 1
        other_s, again = self._known.get(not self.way), self._weighed >= self._until
        if other_s is not None and not again and seconds <= _SLOWER * other_s:
            return False
        if again:
            self._until = min(4 * self._until, _MOST_WEIGHED)
        self._weighed = 0
        self.way = not self.way
        return True


class InPlace:
    """Computes steps of ``job``, or parts of them, at ``state``'s parameters. All on the event loop's thread."""

    def __init__(
        self, job: Job, loader: Loader, model: nn.Module, state: FlatState, rule: SyncRule, *,
        segment: Segment | None = None, tell: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        """``model``: what the job builds, for its size. ``segment``: what ``state`` lies in, if that can be seen from
        elsewhere. ``tell``: a person, why nothing is computed here any more."""
        self._tell, self._segment = tell, segment
        self._job, self._loader, self._state, self._rule = job, loader, state, rule
        self._engine: Engine | None = None
        model_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        self._over = max(rule.layout.vector_bytes, model_bytes) > _MOST_BYTES or job.local_data is not None
        self._proofs: dict[_Kind, int] = {}  # steps that were the same to the bit; -1: one was not
        self._by: Session | None = None  # in whose place something is computed
        self.whole = False  #: that is whole steps; else the leases of this worker, or of one that takes its place
        self._sharing = _Ways(first=True)  # steps that are short, but not very (``whole_step_s`` of ``took``)
        self._turns = _Ways(first=True)  # between reading and whole steps, for Python's lock
        self._passed_over = 0  # steps to come whose seconds do not count
        # Seconds of the last steps by way of workers, and here, of which there are not enough for a group yet.
        self._groups: dict[bool, list[float]] = {False: [], True: []}
        self._leaf_s: deque[float] = deque(maxlen=_SETTLED)  # that leaves take here
        self._kind: _Kind | None = None  # its kind
        self._limit = time_limit(_LONGEST_S, stuck=_end)
        self._settles = self._patience = self._settling  # steps by workers before the first one that is compared
        self._watched: tuple[Session, Done] | None = None  # whose part of the step under way could be computed here
        self._version = -1  # of the parameters that the engine has
        self._shows = False  # it has ``state``'s own, and copies of pages that a step writes; else a copy of all
        self._drew = True  # nobody else had the random state, when it was asked for last
        self._lent: list[ResultVector] = []  # vectors in which parts of the step under way lie
        self._batch: Batch | None = None  # of the step under way, where it is computed here
        self._computed = self._compared = False  # the step under way was computed here; in place of a worker, or beside
        self._there: deque[float] = deque(maxlen=self._settling)  # seconds of steps by way of workers
        self._here: list[float] = []  # and of the last that were computed here, until they are compared

    # -- whether -------------------------------------------------------------------------------------------

    def stands_in(
        self, is_member: Callable[[Session], bool], members: Callable[[], Iterable[Session]]
    ) -> Session | None:
        """In place of which worker, that is a member, something is computed here now."""
        if self._by is None or self._over:
            return None
        with self._claim() as self._drew:
            if not self._drew:
                return None
        if not is_member(self._by):
            self._by = next((one for one in members() if _kind(one) == self._kind), None)
        return self._by

    def watch(self, session: Session, done: Done, plan: StepPlan) -> None:
        """A worker's block is about to count that is all of the step under way, which is short."""
        if self._by is None:
            self.whole = True
        if self._over:
            return
        self._watched = (session, done)
        if self._by is None and self._settles <= 0:  # its data, before it is forgotten
            self._batch = self._loader.batch(plan.step, Block(0, plan.num_leaves))

    @property
    def possible(self) -> bool:
        """Whether anything may be computed here, as far as is known."""
        return not self._over

    @property
    def shares(self) -> bool:
        """Whether steps that are short, but not very (``whole_step_s`` of ``took``), are shared out."""
        return self._sharing.way

    @property
    def takes_turns(self) -> bool:
        """Whether nothing is read while whole steps are computed here."""
        return self._turns.way and self.whole and self._loader.can_take_turns

    @property
    def stands_for(self) -> Session | None:
        """In whose place something was computed last, where it still is to be."""
        return self._by

    @property
    def watches(self) -> bool:
        """Whether ``watch_part`` does anything."""
        return not self._over and self._by is None and self._watched is None

    def watch_part(self, session: Session, done: Done, plan: StepPlan, block: Block, pieces: list[Tensor]) -> None:
        """A worker's block, whose leaves are short, is about to count in a step that is longer. Its sums lie in
        ``pieces``, one for each result bucket, and are compared when it is time to."""
        if not self.watches or not self._may_be_proven(session):
            return
        self._watched, self.whole = (session, done), False
        if self._settles <= 0 and (batch := self._loader.batch(plan.step, block)) is not None:
            self._compare(session, done, plan, block, batch, pieces)

    @property
    def wants_proof(self) -> bool:
        """Whether the complete step is to be computed here too, and compared."""
        if self._watched is None or self._batch is None or self._over or not self.whole:
            return False
        return self._may_be_proven(self._watched[0])

    def _may_be_proven(self, session: Session) -> bool:
        kind = _kind(session)
        return kind is not None and self._proofs.get(kind, 0) >= 0 and len(self._proofs) < _MOST_KINDS

    def took(self, seconds: float, leaves: int = 1, whole_step_s: float = 0.0) -> None:
        """A step of so many leaves was committed that long after the one before. One that takes less than
        ``whole_step_s`` need not be shared out."""
        if self._computed and self._passed_over:
            self._passed_over -= 1
        elif self._computed:
            self._count(seconds, here=True)
            if len(self._here) >= self._settling:
                step_s, leaf_s = statistics.median(self._here), statistics.median(self._leaf_s)
                short = leaves * leaf_s + _BESIDE_S < whole_step_s
                if self.whole and self._loader.can_take_turns and self._turns.took(step_s):
                    self._passed_over = _SETTLED  # among them those that have what was read the other way
                elif short and not (self.whole and self.shares) and self._sharing.took(step_s):
                    self._by, self._settles = None, self._settling
                    self._there.clear()
                elif self._there and step_s > _SLOWER * statistics.median(self._there):
                    self._settles, self._by = self._patience, None
                    self._patience = min(4 * self._patience, _MOST_PATIENCE)
                else:  # on a busy machine both take longer at times: once is not for good
                    self._patience = self._settling
                self._here.clear()
        elif self._watched is not None and not self._compared:
            self._settles -= 1
            self._count(seconds, here=False)
        self._watched = self._batch = None
        self._computed = self._compared = False

    @property
    def _settling(self) -> int:
        """Steps that are compared with as many others."""
        return _VARIED if self._loader.can_take_turns else _SETTLED

    def _count(self, seconds: float, *, here: bool) -> None:
        """A step took so long. Where one step waits for the data of several, it counts by the mean of its group; the
        groups are compared by their median, since a pause of the machine makes one of them longer."""
        among, group = self._here if here else self._there, self._groups[here]
        if not self._loader.can_take_turns:
            among.append(seconds)
            return
        group.append(seconds)
        if len(group) == _SETTLED:
            among.extend([statistics.fmean(group)] * _SETTLED)
            group.clear()

    def comes_beside(self, leaves: int, whole_step_s: float) -> None:
        """Another worker takes work, in whose presence a step of so many leaves is shared out that takes longer than
        ``whole_step_s``. Where whole steps do that were computed here, it is looked at anew what can be."""
        if self._by is None or not self.whole or not self._leaf_s:
            return
        if leaves * statistics.median(self._leaf_s) >= whole_step_s:
            self._by, self._settles = None, self._settling
            self._here.clear()
            self._there.clear()

    # -- how -----------------------------------------------------------------------------------------------

    def prove(self, plan: StepPlan, pieces: list[Tensor]) -> None:
        """Compare the step that a worker has computed, whose sums lie in ``pieces``, one for each result bucket, with
        what is computed here."""
        assert self._watched is not None
        assert self._batch is not None
        self._compare(*self._watched, plan, Block(0, plan.num_leaves), self._batch, pieces)

    def _compare(
        self, session: Session, done: Done, plan: StepPlan, block: Block, batch: Batch, pieces: list[Tensor]
    ) -> None:
        kind = _kind(session)
        assert kind is not None
        self._compared = True
        own = self._compute(plan, block, batch, kind.threads)
        if own is None:
            return
        if own.splits != done.splits:
            self._over = True  # one of the two lacks memory
        elif not _same(own, done, pieces):
            self._proofs[kind] = -1
            self._tell(_OTHER_BITS.format(name=session.name))
        else:
            self._proofs[kind] = self._proofs.get(kind, 0) + 1
            if self._proofs[kind] >= _PROOFS:
                self._by, self._kind = session, kind
        self.release(own)

    def has_data(self, plan: StepPlan) -> bool:
        """Whether the step's data has been read, for ``compute``; else the loader says when it is."""
        self._batch = self._loader.batch(plan.step, Block(0, plan.num_leaves))
        return self._batch is not None

    def gathers(self, plan: StepPlan) -> bool:
        """Whether the step's data could be gathered at once, for ``compute``, and is kept for nobody else."""
        if (batch := self._loader.gathered(plan)) is not None:
            self._batch = batch
        return batch is not None

    @contextmanager
    def row(self, *, holds: bool) -> Iterator[None]:
        """Steps that are computed in it follow each other at once, and what each of them would set and put back is set
        once. ``holds``: also the random state. Nothing may be waited for in it."""
        assert self._kind is not None
        threads = torch.get_num_threads()
        with ExitStack() as stack:
            if holds and stack.enter_context(self._claim()):
                stack.enter_context(random_state(spans=True))
            if threads != self._kind.threads:
                torch.set_num_threads(self._kind.threads)
                stack.callback(torch.set_num_threads, threads)
            yield

    def compute(self, plan: StepPlan) -> ComputedBlock | None:
        """The whole step. None where it is to be computed by workers after all. ``lend`` follows."""
        assert self._kind is not None
        assert self._batch is not None
        computed = self._compute(plan, Block(0, plan.num_leaves), self._batch, self._kind.threads)
        self._computed = computed is not None
        return computed

    def compute_part(self, plan: StepPlan, block: Block) -> ComputedBlock | None:
        """A block of the step under way. None where workers are to compute it after all. ``release`` or ``lend``
        follows."""
        batch = self._loader.batch(plan.step, block)
        if batch is None or self._kind is None or self._over:
            return None
        computed = self._compute(plan, block, batch, self._kind.threads)
        self._computed = computed is not None
        return computed

    def release(self, computed: ComputedBlock) -> None:
        """What was computed here was used."""
        assert self._engine is not None
        for vector in computed.vectors:
            self._engine.release(vector)

    @property
    def can_lend(self) -> bool:
        """Whether a result may stay where it was summed until the step is committed."""
        return len(self._lent) < MOST_LENT

    def lend(self, computed: ComputedBlock) -> None:
        """What was computed here is read where it lies, until ``committed``."""
        self._lent.extend(computed.vectors)

    def committed(self) -> None:
        """Nothing of the step is read any more."""
        if self._engine is not None:
            for vector in self._lent:
                self._engine.release(vector)
        self._lent.clear()

    def _compute(self, plan: StepPlan, block: Block, batch: Batch, threads: int) -> ComputedBlock | None:
        with self._claim() as self._drew:
            return self._compute_alone(plan, block, batch, threads) if self._drew else None

    def _claim(self) -> Claim:
        """Of the process's random state. A read has it for a moment, an evaluation perhaps for minutes, in which
        workers go on."""
        return Claim(_MOMENT_S if self._drew else 0.0)

    def _compute_alone(self, plan: StepPlan, block: Block, batch: Batch, threads: int) -> ComputedBlock | None:
        before, settings, kept = torch.get_num_threads(), [read() for read in _READ], False
        try:
            if threads != before:
                torch.set_num_threads(threads)
            with self._limit, users_code():
                engine = self._engine
                if engine is None:
                    engine = self._engine = Engine(
                        self._job, bucket_bytes=self._rule.layout.bucket_bytes, notes_draws=False
                    )
                    self._shows = self._show(engine)
                if self._version != plan.step:  # as a worker does: what a step writes into its model stays until then
                    self._version = -1
                    if not self._shows:
                        engine.incoming.copy_groups(self._state)
                    engine.load(range(len(engine.layout.buckets)))
                    self._version = plan.step
                tensors = batch.tensors
                if not batch.own and not engine.copies(tensors):  # a step may write into its batch
                    tensors = [tensor.clone() for tensor in tensors]
                task = Task(
                    step=plan.step, start=block.start, samples=batch.samples, loss_scale=self._rule.loss_scale,
                    structure=batch.structure, packed=batch.packed, tensors=tensors, own=batch.own,
                )  # fmt: skip
                computed = engine.compute(task, _nowhere)
            kept = [read() for read in _READ] == settings
            if kept and not computed.splits:
                self._leaf_s.append(computed.compute_s / block.num_leaves)
                return computed
            self.release(computed)
            if computed.splits:  # in halves it has other bits than a worker's that has the memory
                raise MemoryError("it lacks memory for a whole microbatch")
            changed = [
                what for (what, (read, _)), was in zip(_SETTINGS.items(), settings, strict=True) if read() != was
            ]
            raise RuntimeError(_CHANGES.format(what=" and ".join(changed)))
        except (Exception, KeyboardInterrupt, Overdue) as error:  # a worker computes it, and reports what is wrong
            self._tell(_LEFT_TO_WORKERS.format(step=plan.step, error=f"{type(error).__name__}: {error}"[:300]))
            self._over = True
            return None
        finally:
            if not kept:
                for (read, put_back), was in zip(_SETTINGS.values(), settings, strict=True):
                    if read() != was:
                        put_back(was)
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)

    def _show(self, engine: Engine) -> bool:
        """Have the engine see the parameters where they lie, as workers of this machine do. Whether it does."""
        if self._segment is None or not engine.can_share:
            return False
        try:
            opened = Opened(self._segment.told, FlatState.nbytes(engine.layout))
        except Unshared:
            return False
        try:
            if not opened.has(self._segment.secret):  # /proc is of other processes than the numbers
                return False
            engine.share(opened)
        except Unshared:
            return False
        finally:
            opened.close()
        return True

    def close(self) -> None:
        """Give the engine's memory back."""
        self._over, self._by = True, None
        self._limit.close()
        self._lent.clear()
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _end() -> None:
    """A step goes round in circles on the event loop and swallows whatever would end it: no signal is heard any more,
    nothing is sent, no checkpoint can be made. What is on the disk is whole."""
    writer_for(sys.stderr).write(
        "the job's step has swallowed every interrupt (an except without a type, or of BaseException) and does not "
        "return: the coordinator ends. Have it catch Exception, or start with --short-steps workers; --resume goes on "
        "from the last checkpoint"
    )
    flush_all()  # as far as somebody reads it
    os._exit(ExitCode.ERROR)


def _nowhere(bucket: int, vector: object) -> None:
    """Results are taken when the step is complete."""


def _kind(session: Session) -> _Kind | None:
    """How this worker computes; None where the coordinator cannot compute in its place."""
    said = session.ready
    if said is None or session.ranks > 1 or not session.link.same_host:
        return None
    if said.threads > (os.cpu_count() or 1):  # whatever it says, no more are started here
        return None
    if said.device.partition(":")[0] != "cpu" or said.numerics != EXACT or said.torch_version != torch.__version__:
        return None
    return _Kind(said.device_name, max(said.threads, 1), said.torch_version)


def _same(own: ComputedBlock, done: Done, pieces: list[Tensor]) -> bool:
    """Whether what was computed here is what a worker has sent, to the bit."""
    said = (done.losses, done.metric_names, done.metrics, done.untouched, tuple(sorted(done.absent)))
    if repr(said) != repr((own.losses, own.metric_names, own.metrics, own.untouched, tuple(sorted(own.absent)))):
        return False
    vector = own.vectors[-1]
    return all(
        bucket in own.absent or torch.equal(piece.view(torch.uint8), vector.buckets[bucket].view(torch.uint8))
        for bucket, piece in enumerate(pieces)
    )
