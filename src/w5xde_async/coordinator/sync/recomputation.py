"""The coordinator's own computation of a block: two workers do not agree about it, or too many have failed on it.

The coordinator is the one party whose word is not in question: a third worker could be in league with either of the
two, and many names may be one peer. It computes on its CPU with a replica of the model that exists only meanwhile
(memory: the model once more, and three result vectors), in a thread of its own, at the parameters of the step under
way, which cannot change before the block is settled.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from w5xde_async.compute.block import ComputedBlock, Task
from w5xde_async.compute.engine import Engine, LeafError
from w5xde_async.data.loader import BlockData, Loader
from w5xde_async.errors import W5xdeError
from w5xde_async.job import Job
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.plan.sampler import StepPlan
from w5xde_async.plan.tree import Block
from w5xde_async.updates.sync import SyncRule
from w5xde_async.wire.frame import Buffer, BufferSpec

logger = logging.getLogger(__name__)

_LONGEST_S = 600.0  # a block takes, on the coordinator's CPU


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """A block as the coordinator computed it."""

    vector: ResultVector
    present: frozenset[int]
    losses: tuple[float, ...]
    untouched: tuple[int, ...]
    metric_names: tuple[str, ...] = ()
    metrics: tuple[float, ...] = ()
    drew: bool = False
    splits: int = 0  #: more than asked for where memory lacked here


class Recomputation:
    """Computes single blocks of ``job`` at ``state``'s parameters and ``rule``'s loss scale.

    ``state`` may be replaced before the first: by what workers are told, where that lacks something. ``threads``: with
    how many workers compute on this kind of device, since others may give other bits; 0: as this process does.
    """

    threads = 0

    def __init__(self, job: Job, loader: Loader, state: FlatState, rule: SyncRule) -> None:
        self._job, self._loader, self.state, self._rule = job, loader, state, rule
        self._given_up = asyncio.Event()
        self.raised = ""  #: the traceback of what the job's code raised in the last computation; "": it raised nothing
        self.refused = ""  #: what it raised, in a line, where that was no lack of memory

    def give_up(self) -> None:
        """Wait for no computation any more, and for no data: the run is to end."""
        self._given_up.set()

    @property
    def given_up(self) -> bool:
        """Whether the run ends, so that nothing is computed here any more."""
        return self._given_up.is_set()

    async def recompute(self, plan: StepPlan, block: Block, splits: int = 0) -> ReferenceResult | None:
        """The block's result, of microbatches halved ``splits`` times.

        None where it cannot be computed here or takes too long, or its data is gone.

        A thread cannot be stopped: one that hangs in the job's code is left to itself. It reads the parameters, and
        what it makes of them goes nowhere.
        """
        self.raised = self.refused = ""
        given_up = asyncio.ensure_future(self._given_up.wait())
        try:
            return await self._computed(plan, block, splits, given_up)
        finally:
            given_up.cancel()

    async def _computed(
        self, plan: StepPlan, block: Block, splits: int, given_up: asyncio.Future[Any]
    ) -> ReferenceResult | None:
        reading = asyncio.ensure_future(self._loader.wait(plan.step, block))
        try:
            await asyncio.wait((reading, given_up), return_when=asyncio.FIRST_COMPLETED)
            data = reading.result() if reading.done() else None
        finally:
            reading.cancel()
        if data is None or self.given_up:
            return None
        task = Task(
            step=plan.step, start=block.start, samples=data.samples, loss_scale=self._rule.loss_scale,
            structure=data.structure, packed=data.packed, tensors=_tensors(data),
        )  # fmt: skip
        computing = asyncio.get_running_loop().run_in_executor(None, self._compute, task, splits)
        either: list[asyncio.Future[Any]] = [computing, given_up]
        try:
            await asyncio.wait(either, timeout=_LONGEST_S, return_when=asyncio.FIRST_COMPLETED)
            if not computing.done():
                logger.warning("recomputation is not waited for any longer step=%d start=%d", plan.step, block.start)
                computing.add_done_callback(_forget)
                return None
            return computing.result()
        except asyncio.CancelledError:
            computing.add_done_callback(_forget)
            raise
        except (W5xdeError, RuntimeError, MemoryError, ValueError) as error:
            if isinstance(error, LeafError):
                self.raised, self.refused = error.traceback, "" if error.lacked_memory else error.error
            known = logging.INFO if isinstance(error, LeafError) else logging.WARNING  # workers have told of it
            logger.log(known, "recomputation failed step=%d start=%d error=%s", plan.step, block.start, str(error))
            return None

    def _compute(self, task: Task, splits: int) -> ReferenceResult:
        before = torch.get_num_threads()
        if self.threads:
            torch.set_num_threads(self.threads)
        engine = Engine(self._job, bucket_bytes=self._rule.layout.bucket_bytes, splits=splits)
        try:
            with torch.no_grad():
                for mine, theirs in zip(engine.incoming.views, self.state.views, strict=True):
                    mine.copy_(theirs)
            engine.load(range(len(engine.layout.buckets)))
            outcome: ComputedBlock = engine.compute(task, lambda bucket, vector: None)
        finally:
            engine.close()
            torch.set_num_threads(before)
        present = frozenset(bucket.index for bucket in engine.layout.result_buckets) - set(outcome.absent)
        return ReferenceResult(
            outcome.vectors[-1],
            present,
            outcome.losses,
            outcome.untouched,
            outcome.metric_names,
            outcome.metrics,
            outcome.drew,
            outcome.splits,
        )


def _forget(computing: asyncio.Future[ReferenceResult]) -> None:
    """What was not waited for is over, with an error or without."""
    if not computing.cancelled():
        computing.exception()


def _tensors(data: BlockData) -> list[Tensor]:
    return [_tensor(spec, buffer) for spec, buffer in data.buffers]


def _tensor(spec: BufferSpec, buffer: Buffer) -> Tensor:
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    return torch.frombuffer(bytearray(buffer), dtype=getattr(torch, spec.dtype)).reshape(spec.shape)
