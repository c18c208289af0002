"""The phases of a run: one training after the other over the same parameters, listener and directory.

Most runs have one. Under ``auto`` the first steps are exact synchronous ones, and where the links ask for another rule
the run goes on by that one: workers connect anew, and what was computed so far counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.durability.checkpointing import Checkpointing
from w5xde_async.coordinator.durability.journal_writer import JournalWriter
from w5xde_async.coordinator.run.making import make_training
from w5xde_async.coordinator.run.startup import Prepared, change_rule
from w5xde_async.coordinator.run.strategy_tuner import Autotuning, chosen
from w5xde_async.coordinator.training import Commit, History, Hooks, RunContext, Training
from w5xde_async.data.loader import Loader
from w5xde_async.errors import JobError, UsageError
from w5xde_async.runtime import Runtime
from w5xde_async.telemetry.events import Bus, Warned
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.wire.messages import ByeCode

__all__ = ["Run", "gone"]


async def gone(training: Training) -> None:
    """Workers close when they have read the last message; nobody waits long for one that does not."""
    with suppress(TimeoutError):
        async with asyncio.timeout(2.0):
            while training.roster.sessions:
                await next(iter(training.roster.sessions.values())).ended.wait()


class Run:
    """``training`` and ``following`` are those of the phase that goes on."""

    def __init__(
        self, prepared: Prepared, config: CoordinatorConfig, bus: Bus, *, name: str, reference: str, runtime: Runtime,
        journal: JournalWriter | None = None, on_change: Callable[[Training], None] = lambda training: None,
        on_quarantine: Callable[[str, str], None] = lambda name, reason: None,
    ) -> None:  # fmt: skip
        """``reference``: how other processes load the job; "" where they cannot. ``on_change`` is given the training of
        each later phase."""
        self._prepared, self._bus, self._name, self._reference = prepared, bus, name, reference
        self._runtime = runtime
        self.config = config
        self._journal, self._on_change = journal, on_change
        self._hooks = Hooks(on_commit=self._committed, on_quarantine=on_quarantine)
        self._stopping = False
        self._tasks: asyncio.TaskGroup | None = None
        self._tuning: Autotuning | None = None
        self.training = self._begin(History(samples=prepared.samples, loss=prepared.loss))
        self.following = Checkpointing(prepared, self.training, journal, self.config, bus, runtime.executor)
        if config.auto:
            leaves = prepared.sampler.plan(0).num_leaves
            self._tuning = Autotuning(leaves, lambda text: bus.publish(Warned(text=text)), config, prepared.possible)
            self._tuning.resume(prepared.update, prepared.first_step)

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Train to the end, a stop or a failure (which is raised)."""
        self._tasks = tasks
        while True:
            training, tuning = self.training, self._tuning
            programs, prepared = training.roster.programs, self._prepared
            finding = programs.run(self._reference, prepared.program, prepared.untraceable)
            tracing = tasks.create_task(finding, name="trace")
            try:
                await training.run()
            finally:
                tracing.cancel()
            more = tuning is not None and not self._stopping and training.progress < training.total_steps
            if tuning is None or not more or tuning.choice is None or not tuning.changes(training):
                return
            await self._change(chosen(tuning.choice, self.config.update))

    def _committed(self, commit: Commit) -> None:
        assert self._tasks is not None
        self.following.on_commit(commit, self._tasks)
        if self._tuning is not None and self._tuning.after_commit(self.training):
            self.training.stop()

    def stop(self) -> None:
        """End in good order."""
        self._stopping = True
        self.training.stop()

    def abandon(self) -> bool:
        """Wait for no disk any more. Whether anybody did."""
        return self.following.abandon() | (self._journal is not None and self._journal.abandon())

    async def aclose(self) -> None:
        """Free what the last phase has."""
        await self.training.aclose()
        await self.following.aclose()

    def _begin(self, history: History) -> Training:
        prepared = self._prepared
        self.config = config = replace(self.config, update=prepared.update)
        loader = Loader(
            prepared.job, prepared.steps, threads=config.loader_threads, processes=config.loader_processes,
            prefetch_leaves=config.prefetch_leaves, reference=self._reference or None, make_pool=self._runtime.executor,
            whole_steps=config.update.rule != "sync",
        )  # fmt: skip
        context = RunContext(
            layout=prepared.layout, state=prepared.state, loader=loader, config=config, checks=config,
            bus=self._bus, clock=self._runtime.clock, total_steps=prepared.total_steps,
        )  # fmt: skip
        training = make_training(
            prepared, context, self._name, self._runtime, journal=self._journal, history=history, hooks=self._hooks
        )  # fmt: skip
        if self._tuning is not None:
            self._tuning.lead(training)
        return training

    async def _change(self, update: UpdateConfig) -> None:
        """Go on by another rule, or by this one where the job turns out not to fit the other.

        Every lease was given back; workers connect anew.
        """
        before, following = self.training, self.following
        before.roster.say_goodbye(ByeCode.STOPPING, "the update rule changes; join again")
        await gone(before)
        for session in tuple(before.roster.sessions.values()):
            session.abort("it did not leave when the update rule changed")
            await session.ended.wait()
        await following.settle()
        step, samples = before.progress, before.samples_applied
        try:
            await asyncio.get_running_loop().run_in_executor(
                None, change_rule, self._prepared, self.config, update, step, samples
            )
        except (JobError, UsageError) as error:
            self._bus.publish(Warned(text=f"auto: the run goes on as before: {error}"))
            self._prepared.first_step, self._prepared.samples = step, samples
            if self._tuning is not None:
                self._tuning.stay(self.config.update)
        else:
            if (unlike := self.config.unlike_results(update)) is not None:
                self._bus.publish(Warned(text=unlike))
        await before.aclose()
        self._prepared.loss = before.last_loss
        history = History(
            samples=self._prepared.samples, loss=before.last_loss, counts=before.totals(),
            downlink_bytes=before.downlink_bytes(), contributions=before.roster.contributions,
        )  # fmt: skip
        self.training = self._begin(history)
        self.following = Checkpointing(
            self._prepared, self.training, self._journal, self.config, self._bus, self._runtime.executor
        )  # fmt: skip
        self.following.before_save, self.following.metrics = following.before_save, following.metrics
        await following.aclose()
        if self._stopping:
            self.training.stop()
        self._on_change(self.training)
