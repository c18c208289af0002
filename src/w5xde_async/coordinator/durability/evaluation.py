"""Evaluations of a run, off the step path: the job's ``evaluate`` on a copy of the model, in a thread of its own.

At most one is under way; one that falls due meanwhile is left out, but under an exact rule where ``stop_when`` or
``keep_best`` goes by them: there the next commit waits (``awaited``). An evaluation that raises does not end the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

import torch
from torch import Tensor, nn

from w5xde_async.compute.block import described
from w5xde_async.coordinator.durability.best import BestModel
from w5xde_async.coordinator.durability.journal_writer import JournalWriter
from w5xde_async.coordinator.training import Commit, Parameters
from w5xde_async.errors import JobError, in_one_line
from w5xde_async.job import Job
from w5xde_async.openmp import release_helpers
from w5xde_async.params.flat import state_of
from w5xde_async.params.layout import Layout
from w5xde_async.plan.sampler import Steps
from w5xde_async.randomness import draws_random, random_state, seed_all, unwatched
from w5xde_async.telemetry.events import Bus, Evaluated, Warned
from w5xde_async.users_code import users_code


class Evaluator:
    """The job's ``evaluate`` and the model that it is given, which belongs to this object."""

    def __init__(self, job: Job, model: nn.Module, layout: Layout) -> None:
        self._job, self._model, self._layout = job, model, layout
        self._draws: bool | None = None  # whether evaluate has drawn random numbers so far; None: not tried yet
        self._others_draw: Callable[[], bool] = lambda: False

    def beside(self, others_draw: Callable[[], bool]) -> None:
        """``others_draw``: whether reads or updates wait for their turn to draw in this process."""
        self._others_draw = others_draw

    def measure(self, snapshot: Mapping[str, Tensor]) -> dict[str, float]:
        """The metrics of these parameters. Raises what the job raises, and TypeError for what is no number."""
        model, evaluate, seed = self._model, self._job.evaluate, self._job.seed
        assert evaluate is not None
        found: dict[str, float] = {}

        def run() -> None:
            metrics = evaluate(model)
            if not isinstance(metrics, Mapping):
                raise TypeError(
                    f"it returned {described(metrics)}, not a dict of numbers by name; write return {{'accuracy': ...}}"
                )
            for name, value in metrics.items():
                try:
                    found[str(name)] = float(value)
                except (TypeError, ValueError, RuntimeError):
                    raise TypeError(f"metric {name!r} is {described(value)}; it must be a number") from None

        try:
            with users_code(), torch.no_grad():
                for entry, tensor in zip(self._layout.entries, state_of(model, self._layout), strict=True):
                    tensor.copy_(snapshot[entry.name])
                model.eval()
                if self._draws is False and self._others_draw():
                    with unwatched():  # these would wait for it, perhaps for minutes
                        run()
                else:  # even if it has never drawn: a later one may, and leaves are computed meanwhile
                    self._draws = draws_random(run, seed) or bool(self._draws)
        finally:
            release_helpers()  # or who computes steps meanwhile would wait asleep between operations
        return found

    @property
    def may_end(self) -> bool:
        """Whether the job has a ``stop_when``."""
        return self._job.stop_when is not None

    def ends(self, metrics: dict[str, float]) -> bool:
        """Whether the job's ``stop_when`` finishes the run at these metrics. Raises what it raises."""
        if self._job.stop_when is None:
            return False
        with users_code(), random_state():
            seed_all(self._job.seed)
            return bool(self._job.stop_when(dict(metrics)))


class Evaluation:
    """Evaluations of one run. ``metrics`` are those of the last one. ``ended_at``: the step at which the job's
    ``stop_when`` finished the run; -1: it has not."""

    def __init__(
        self, evaluator: Evaluator | None, steps: Steps, every: int | None, bus: Bus, thread: Executor,
        journal: JournalWriter | None = None, *, best_model: BestModel | None = None,
        record: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None, on_error: Callable[[JobError], None] = lambda error: None,
    ) -> None:  # fmt: skip
        """``evaluator`` None: nothing is evaluated. ``every``: steps between two; None: after each epoch. ``on_end`` is
        called where ``stop_when`` finishes the run, ``on_error`` where the first evaluation lacks the metric that
        ``best_model`` goes by: of no later one it could be told which is best. ``record`` writes down what was told,
        and may block: where training waits for evaluations, none is lost by a kill after the next step.

        ``thread`` runs one call at a time; it belongs to this object. With a journal, metrics are told when their step
        is durable.
        """
        self._evaluator, self._steps, self._every = evaluator, steps, every
        self._bus, self._thread, self._journal = bus, thread, journal
        self.metrics: dict[str, float] = {}
        self._evaluated_step = self.ended_at = -1
        self._complained: set[object] = set()
        self.best_model = best_model
        self._record, self._on_end, self._on_error = record, on_end, on_error
        self._evaluating: asyncio.Task[None] | None = None

    @property
    def _decides(self) -> bool:
        """Whether what an evaluation finds decides how the run goes on: by ``stop_when``, or which state is kept as the
        best."""
        return self.best_model is not None or (self._evaluator is not None and self._evaluator.may_end)

    def awaited(self) -> asyncio.Task[None] | None:
        """The evaluation that is under way, where it decides. Were training not to wait, that would depend on how long
        evaluations take."""
        return self._evaluating if self._decides else None

    def on_commit(self, commit: Commit, parameters: Parameters, tasks: asyncio.TaskGroup) -> None:
        """Runs before anything else can touch the parameters: what is submitted to their thread sees this version."""
        if self._every is None:
            due = self._steps.epoch_of(commit.step) > self._steps.epoch_of(commit.before)
        else:
            due = commit.passes(self._every)
        if due and self._evaluator is not None and (self._evaluating is None or self._evaluating.done()):
            evaluating = self._evaluate(self._evaluator, commit.step, parameters.submit(parameters.snapshot))
            self._evaluating = tasks.create_task(evaluating, name=f"evaluate {commit.step}")

    def take_up(self, step: int, parameters: Parameters, tasks: asyncio.TaskGroup) -> None:
        """The run goes on after ``step``, where it was killed: was an evaluation under way there that decides, it is
        made again. Before anything else can touch the parameters."""
        if self._decides:
            self.on_commit(Commit(step=step, before=step - 1), parameters, tasks)

    async def evaluate_last(self, step: int, parameters: Parameters) -> None:
        """The run is finished, after ``step`` steps: what it came to."""
        await self.settle()
        if self._evaluator is not None and self._evaluated_step != step:
            await self._evaluate(self._evaluator, step, parameters.submit(parameters.snapshot))
        await self.keep_best()

    async def keep_best(self) -> None:
        """Write the best state, where that has failed before."""
        if self.best_model is not None:
            await self.best_model.save()

    def abandon(self) -> bool:
        """Do not wait for the one that is under way: its thread is left to itself. Whether there was one."""
        return self._evaluating is not None and self._evaluating.cancel()

    async def settle(self) -> None:
        """Wait for the one that is under way."""
        if self._evaluating is not None and not self._evaluating.done():
            await asyncio.wait([self._evaluating])

    async def aclose(self) -> None:
        """Wait for the thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    async def _evaluate(self, evaluator: Evaluator, step: int, copying: asyncio.Future[dict[str, Tensor]]) -> None:
        began = time.monotonic()
        try:
            snapshot = await copying
            began = time.monotonic()
            measuring = asyncio.get_running_loop().run_in_executor(self._thread, evaluator.measure, snapshot)
            metrics = await measuring
        except Exception as error:
            self._complain("evaluate", error)
            return
        if self._journal is not None:
            await self._journal.settled(step)
        seconds = time.monotonic() - began
        first, self.metrics, self._evaluated_step = self._evaluated_step < 0, metrics, step
        best = self.best_model is not None and await self.best_model.offer(step, metrics, snapshot)
        self._bus.publish(Evaluated(step=step, metrics=metrics, seconds=seconds, best=best))
        if self.best_model is not None and self.best_model.metric not in metrics:
            unknown = _unknown_metric(self.best_model.metric, metrics)
            if first:
                self._on_error(unknown)
                return
            self._bus.publish(Warned(text=f"step {step}: {unknown}"))

        def ends_it() -> bool:
            self._record()
            return evaluator.ends(metrics)

        try:
            ends = await asyncio.get_running_loop().run_in_executor(self._thread, ends_it)
        except Exception as error:
            self._complain("stop_when", error)
            return
        if ends and self.ended_at < 0:
            self.ended_at = step
            self._on_end()

    def _complain(self, what: str, error: Exception) -> None:
        """Once for each place that raises: the next evaluation will most likely meet the same."""
        told = in_one_line(error)
        cause = what, type(error), told.rpartition(" (")[2]
        if cause not in self._complained:
            self._complained.add(cause)
            self._bus.publish(Warned(text=f"{what} raised {told}; the run goes on"))


def _unknown_metric(metric: str, metrics: Mapping[str, float]) -> JobError:
    found = ", ".join(metrics) or "no metric at all"
    return JobError("keep_best", f"evaluate gives no {metric!r}; it gives {found}", "name one that it gives")
