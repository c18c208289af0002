"""What follows a commit, off the step path: checkpoints and evaluations, each on a copy made between two commits.

At most one of each is under way; a checkpoint that falls due meanwhile is made at the next commit, an evaluation is
left out. A disk that fails does not end the run: it is said, once a minute as long as it lasts and whenever somebody
asked for a checkpoint, and tried again, at first after seconds, later once a minute. State that no disk could keep ends
it. A checkpoint counts only when all that led to it is on the disk too: its steps' lines of metrics.jsonl and, with a
journal, their records.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

import torch
from torch import Tensor

from w5xde_async.compute.block import described
from w5xde_async.coordinator.durability.config import DurabilityConfig
from w5xde_async.coordinator.durability.journal_writer import REMIND_S, RETRY_S, JournalWriter
from w5xde_async.coordinator.run.startup import Prepared, record_of
from w5xde_async.coordinator.training import Commit, Training
from w5xde_async.errors import JobError, StoreError, W5xdeError
from w5xde_async.params.flat import state_of
from w5xde_async.randomness import draws_random, random_state, seed_all
from w5xde_async.store.checkpoint import Record, SavedCheckpoint
from w5xde_async.store.journal import Position
from w5xde_async.store.rundir import Superseded
from w5xde_async.telemetry.events import Bus, CheckpointFailed, CheckpointSaved, Evaluated, Warned
from w5xde_async.updates.outer import OuterRule
from w5xde_async.users_code import users_code

__all__ = ["Checkpointing"]

_Copied = tuple[Record, float, int]  # a checkpoint, the seconds that copying took, and the rule's version


class Checkpointing:
    """Checkpoints and evaluations of one run. ``save_error`` is what the last attempt to save met, if anything."""

    def __init__(
        self, prepared: Prepared, training: Training, journal: JournalWriter | None,
        config: DurabilityConfig, bus: Bus, make_pool: Callable[[int, str], Executor],
    ) -> None:  # fmt: skip
        self._prepared, self._training, self._journal = prepared, training, journal
        self._config, self._bus = config, bus
        self.metrics: dict[str, float] = {}
        self.save_error: W5xdeError | None = None
        self._wanted = self._asked = False
        self.before_save: Callable[[], None] = lambda: None  # blocks; runs before a checkpoint is written
        self._saved_step, self._saved_version = prepared.saved_step, self._rule_version()
        self._retry_at = self._remind_at = self._retry_s = 0.0  # after a failure
        self._evaluated_step = -1
        self._saving: asyncio.Task[None] | None = None
        self._evaluating: asyncio.Task[None] | None = None
        self._evaluation_draws: bool | None = None  # whether evaluate uses random numbers; None: not tried yet
        self._thread = make_pool(1, "w5xde-evaluate")

    def request(self) -> None:
        """A checkpoint after the next commit; that it failed is said even if it was said a moment ago."""
        self._wanted = self._asked = True

    def on_commit(self, commit: Commit, tasks: asyncio.TaskGroup) -> None:
        """Runs before anything else can touch the parameters: what is submitted to the aggregator sees this version."""
        due = self._wanted or commit.passes(self._config.checkpoint_every) or self._again()
        if due and self._prepared.store is not None:
            self._wanted = self._saving is not None and not self._saving.done()
            if not self._wanted:
                asked, self._asked = self._asked, False
                saving = self._save(commit.step, self._copy(commit.step), self._rotate(commit.step), asked=asked)
                self._saving = tasks.create_task(saving, name=f"checkpoint {commit.step}")
        every = self._prepared.job.evaluate_every
        steps = self._prepared.steps
        ended = steps.epoch_of(commit.step) > steps.epoch_of(commit.before)
        due = ended if every is None else commit.passes(every)
        if due and self._prepared.evaluator is not None and (self._evaluating is None or self._evaluating.done()):
            self._evaluating = tasks.create_task(
                self._evaluate(commit.step, self._snapshot()), name=f"evaluate {commit.step}"
            )

    async def save_last(self) -> None:
        """The run has ended: a last checkpoint."""
        journaling = self._journal
        if journaling is not None:
            await journaling.flush()
        if self._saving is not None and not self._saving.done():
            await asyncio.wait([self._saving])
        version = self._training.progress
        stands = version and not self._training.aggregator.torn
        saved = self._saved_step == version and self._saved_version == self._rule_version()
        if stands and self._prepared.store is not None and not saved:
            await self._save(version, self._copy(version), self._rotate(version))

    async def evaluate_last(self) -> None:
        """The run is finished: what it came to."""
        await self.settle()
        version = self._training.progress
        if self._prepared.evaluator is not None and self._evaluated_step != version:
            await self._evaluate(version, self._snapshot())

    def abandon(self) -> bool:
        """Wait for nothing that is under way: its threads are left to themselves. Whether anything was."""
        return any([task.cancel() for task in (self._saving, self._evaluating) if task is not None])

    async def settle(self) -> None:
        """Wait for what is under way."""
        under_way = [task for task in (self._saving, self._evaluating) if task is not None and not task.done()]
        if under_way:
            await asyncio.wait(under_way)

    async def aclose(self) -> None:
        """Wait for the evaluation's thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def _rule_version(self) -> int:
        """Of a rule whose versions are not its steps: fragments that stream have some without a step of their own."""
        rule = self._prepared.rule
        return rule.version if isinstance(rule, OuterRule) else 0

    def _again(self) -> bool:
        """Whether a disk that failed is to be tried again."""
        journaling = self._journal
        failed = self.save_error is not None and self._training.context.clock() >= self._retry_at
        return failed or (journaling is not None and journaling.wants_checkpoint)

    def _rotate(self, step: int) -> asyncio.Future[Position | None] | None:
        journaling = self._journal
        return None if journaling is None else journaling.rotate(step)

    def _copy(self, step: int) -> asyncio.Future[_Copied]:
        """Have the parameters' thread copy what is to be saved, before anything that is given to it later."""
        samples = self._training.samples_applied

        def copy() -> _Copied:
            began = time.perf_counter()
            with users_code():  # an optimizer's and a scheduler's state_dict()
                record = record_of(self._prepared, step, samples)
            return record, time.perf_counter() - began, self._rule_version()

        return self._training.aggregator.submit(copy)

    async def _save(
        self, step: int, copying: asyncio.Future[_Copied], rotation: asyncio.Future[Position | None] | None, *,
        asked: bool = False,
    ) -> None:  # fmt: skip
        store = self._prepared.store
        assert store is not None
        loop = asyncio.get_running_loop()

        def write() -> tuple[SavedCheckpoint, int]:
            self.before_save()
            return store.save(record), min(store.steps())

        try:
            record, pause_s, version = await copying
        except Exception as error:  # whatever a state_dict() raises: no later checkpoint would fare better
            what = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
            self.save_error = JobError("optimizer", f"after step {step} its state cannot be kept: {what}")
            self._training.fail(self.save_error)
            return
        if rotation is not None:  # done when every step up to this one is in the journal
            position = await rotation
            record.meta["journal"] = None if position is None else [position.sequence, position.chain]
        try:
            saved, oldest = await loop.run_in_executor(None, write)
        except Superseded as error:
            self.save_error = error
            self._training.fail(error)
            return
        except StoreError as error:
            now = self._training.context.clock()
            self._retry_s = min(max(2 * self._retry_s, RETRY_S), REMIND_S)  # each attempt costs a copy
            self._retry_at = now + self._retry_s
            if asked or self.save_error is None or now >= self._remind_at:
                self._remind_at = now + REMIND_S
                self._bus.publish(CheckpointFailed(step=step, reason=str(error), safe_step=max(self._saved_step, 0)))
            self.save_error = error
            return
        self.save_error, self._retry_s = None, 0.0
        self._saved_step, self._saved_version = max(self._saved_step, step), version
        if self._journal is not None:
            self._journal.saved(step, oldest)
        self._bus.publish(
            CheckpointSaved(
                step=step, path=str(saved.path), nbytes=saved.nbytes, pause_s=pause_s, seconds=saved.seconds
            )
        )

    def _snapshot(self) -> asyncio.Future[dict[str, Tensor]]:
        aggregator = self._training.aggregator
        return aggregator.submit(aggregator.snapshot)

    async def _evaluate(self, step: int, copying: asyncio.Future[dict[str, Tensor]]) -> None:
        loop = asyncio.get_running_loop()
        snapshot = await copying
        began = time.monotonic()
        try:
            metrics = await loop.run_in_executor(self._thread, self._measure, snapshot)
        except Exception as error:
            self._bus.publish(Warned(text=f"evaluate raised {type(error).__name__}: {error}; the run goes on"))
            return
        if self._journal is not None:
            await self._journal.settled(step)
        self.metrics, self._evaluated_step = metrics, step
        self._bus.publish(Evaluated(step=step, metrics=metrics, seconds=time.monotonic() - began))

    def _measure(self, snapshot: Mapping[str, Tensor]) -> dict[str, float]:
        prepared = self._prepared
        model, evaluate, seed = prepared.evaluator, prepared.job.evaluate, prepared.job.seed
        assert model is not None
        assert evaluate is not None
        found: dict[str, float] = {}

        def run() -> None:
            metrics = evaluate(model)
            if not isinstance(metrics, Mapping):
                raise TypeError(f"it returned {type(metrics).__name__}, not a dict of numbers by name")
            for name, value in metrics.items():
                try:
                    found[str(name)] = float(value)
                except (TypeError, ValueError, RuntimeError):
                    raise TypeError(f"metric {name!r} is {described(value)}; it must be a number") from None

        with users_code(), torch.no_grad():
            for entry, tensor in zip(prepared.layout.entries, state_of(model, prepared.layout), strict=True):
                tensor.copy_(snapshot[entry.name])
            model.eval()
            if self._evaluation_draws is None:
                self._evaluation_draws = draws_random(run, seed)
            elif self._evaluation_draws:
                with random_state():
                    seed_all(seed)
                    run()
            else:
                run()
        return found
