"""What follows a commit, off the step path: checkpoints and evaluations, each on a copy made between two commits.

At most one of each is under way; a checkpoint that falls due meanwhile is made at the next commit, an evaluation is
left out. A disk that fails does not end the run: it is said, and the next commit tries again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.preparation import Prepared, record_of
from w5xde_async.coordinator.training import Commit, Training
from w5xde_async.errors import StoreError
from w5xde_async.params.flat import state_of
from w5xde_async.randomness import draws_random, random_state, seed_all
from w5xde_async.store.checkpoint import Record
from w5xde_async.telemetry.events import Bus, CheckpointFailed, CheckpointSaved, Evaluated, Warned

__all__ = ["Following"]


class Following:
    """Checkpoints and evaluations of one run. ``save_error`` is what the last attempt to save met, if anything."""

    def __init__(self, prepared: Prepared, training: Training, config: CoordinatorConfig, bus: Bus) -> None:
        self._prepared, self._training, self._config, self._bus = prepared, training, config, bus
        self.metrics: dict[str, float] = {}
        self.save_error: StoreError | None = None
        self.checkpoint_wanted = False
        self._saved_step = prepared.first_step or -1
        self._evaluated_step = -1
        self._saving: asyncio.Task[None] | None = None
        self._evaluating: asyncio.Task[None] | None = None
        self._evaluation_draws: bool | None = None  # whether evaluate uses random numbers; None: not tried yet
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="w5xde-evaluate")

    def on_commit(self, commit: Commit, tasks: asyncio.TaskGroup) -> None:
        """Runs before anything else can touch the parameters: what is submitted to the aggregator sees this version."""
        due = self.checkpoint_wanted or commit.step % self._config.checkpoint_every == 0
        if due and self._prepared.store is not None:
            self.checkpoint_wanted = self._saving is not None and not self._saving.done()
            if not self.checkpoint_wanted:
                self._saving = tasks.create_task(self._save(commit.step), name=f"checkpoint {commit.step}")
        every = self._prepared.job.evaluate_every
        due = commit.last_of_epoch if every is None else commit.step % every == 0
        if due and self._prepared.evaluator is not None and (self._evaluating is None or self._evaluating.done()):
            self._evaluating = tasks.create_task(self._evaluate(commit.step), name=f"evaluate {commit.step}")

    async def finish(self, *, evaluate: bool) -> None:
        """The run has ended: a last checkpoint, and the last evaluation where it is wanted."""
        version = self._training.version
        stands = version and not self._training.aggregator.torn
        if stands and self._prepared.store is not None and self._saved_step != version:
            await self._save(version)
        if evaluate and self._prepared.evaluator is not None and self._evaluated_step != version:
            await self._evaluate(version)

    async def aclose(self) -> None:
        """Wait for the evaluation's thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    async def _save(self, step: int) -> None:
        store = self._prepared.store
        assert store is not None
        loop = asyncio.get_running_loop()
        samples = self._training.samples_applied

        def copy() -> tuple[Record, float]:
            began = time.perf_counter()
            return record_of(self._prepared, step, samples), time.perf_counter() - began

        record, pause_s = await self._training.aggregator.submit(copy)
        try:
            saved = await loop.run_in_executor(None, store.save, record)
        except StoreError as error:
            self.save_error, self.checkpoint_wanted = error, True
            self._bus.publish(CheckpointFailed(step=step, reason=str(error)))
            return
        self.save_error = None
        self._saved_step = max(self._saved_step, step)
        self._bus.publish(
            CheckpointSaved(
                step=step, path=str(saved.path), nbytes=saved.nbytes, pause_s=pause_s, seconds=saved.seconds
            )
        )

    async def _evaluate(self, step: int) -> None:
        loop = asyncio.get_running_loop()
        aggregator = self._training.aggregator
        snapshot = await aggregator.submit(aggregator.snapshot)
        began = time.monotonic()
        try:
            metrics = await loop.run_in_executor(self._thread, self._measure, snapshot)
        except Exception as error:
            self._bus.publish(Warned(text=f"evaluate raised {type(error).__name__}: {error}; the run goes on"))
            return
        self.metrics, self._evaluated_step = metrics, step
        self._bus.publish(Evaluated(step=step, metrics=metrics, seconds=time.monotonic() - began))

    def _measure(self, snapshot: Mapping[str, Tensor]) -> dict[str, float]:
        prepared = self._prepared
        model, evaluate, seed = prepared.evaluator, prepared.job.evaluate, prepared.job.seed
        assert model is not None
        assert evaluate is not None
        found: dict[str, float] = {}

        def run() -> None:
            found.update({str(name): float(value) for name, value in evaluate(model).items()})

        with torch.no_grad():
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
