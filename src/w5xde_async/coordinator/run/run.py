"""A run: one training after the other over the same parameters, listener and directory.

Most runs have one. Under ``auto`` the first steps are exact synchronous ones, and where the links ask for another rule
or codec the run goes on by those: workers connect anew, and the steps that were made so far count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.durability.best import BestModel
from w5xde_async.coordinator.durability.checkpointing import Checkpointing, CheckpointPolicy
from w5xde_async.coordinator.durability.evaluation import Evaluation
from w5xde_async.coordinator.durability.journal_writer import JournalWriter
from w5xde_async.coordinator.memory_bound import memory_bound_bytes
from w5xde_async.coordinator.outer.training import OuterTraining
from w5xde_async.coordinator.run.resume import KeptState
from w5xde_async.coordinator.run.spec import Prepared, RunSpec, Strategy
from w5xde_async.coordinator.run.strategy import change_strategy
from w5xde_async.coordinator.run.strategy_chooser import StrategyChooser, chosen
from w5xde_async.coordinator.sync.in_place import InPlace
from w5xde_async.coordinator.sync.recomputation import Recomputation
from w5xde_async.coordinator.sync.training import StepJournal, SyncTraining
from w5xde_async.coordinator.training import Commit, History, Hooks, ParametersNotFinite, RunContext, Training
from w5xde_async.data.loader import Loader
from w5xde_async.errors import JobError, UsageError
from w5xde_async.hub.members.roster import Greeting
from w5xde_async.plan.strategy_choice import Choice
from w5xde_async.runtime import Runtime
from w5xde_async.telemetry.events import Best, Bus, SampleLeftOut, Warned
from w5xde_async.updates.sync import SyncRule
from w5xde_async.users_code import time_limit
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import ByeCode, Welcome


async def gone(training: Training) -> None:
    """Workers close when they have read the last message; nobody waits long for one that does not. One that builds its
    model reads nothing meanwhile: it has to have been sent that message."""
    with suppress(TimeoutError):
        async with asyncio.timeout(2.0):
            for session in tuple(training.roster.joining):
                await session.told.wait()
            while training.roster.sessions:
                await next(iter(training.roster.sessions.values())).gone()


def _raise_failure(training: Training) -> None:
    """Raise what a training that has ended has failed with since, if it has."""
    if (failure := training.phase.lifecycle.failure) is not None:
        raise failure


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """Where a run takes place. ``reference``: how other processes load the job; "" where they cannot."""

    name: str
    reference: str
    bus: Bus
    runtime: Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHooks:
    """What a run tells whoever owns it.

    ``record`` runs when an evaluation was told, and ``before_save`` before a checkpoint is written, in executors.
    ``on_change`` is given the training of each later phase, ``on_quarantine`` the name or id of a worker that was
    quarantined, and why.
    """

    record: Callable[[], None] = lambda: None
    before_save: Callable[[], None] = lambda: None
    on_change: Callable[[Training], None] = lambda training: None
    on_quarantine: Callable[[str, str], None] = lambda name, reason: None


class Run:
    """``training`` and ``checkpointing`` are those of the phase that goes on, and ``config`` has its update rule."""

    def __init__(
        self,
        prepared: Prepared,
        config: CoordinatorConfig,
        environment: RunEnvironment,
        *,
        journal: JournalWriter | None = None,
        hooks: RunHooks | None = None,
    ) -> None:
        self._spec, self._strategy, resume = prepared
        self._environment, self._journal, self._hooks = environment, journal, hooks or RunHooks()
        self.config = replace(config, update=self._strategy.update)
        self._stopping = False
        self._looking: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._batch_leaves = self._spec.step_leaves
        self._chooser: StrategyChooser | None = None
        if config.auto:
            kept = self._strategy.update if resume.step and self._strategy.update.rule != "sync" else None
            self._chooser = StrategyChooser(self._batch_leaves, self._spec.possible, kept=kept)
        self._next: Choice | None = None  # what was chosen, where it needs another training, until that is there
        bus, spec, files = environment.bus, self._spec, self._spec.files
        best_model = None
        if files is not None and spec.job.keep_best is not None:
            directory = files.directory
            best_model = BestModel(
                spec.job.keep_best, spec.layout, directory.best_path, directory.filesystem, bus, resume.best
            )  # fmt: skip
        self.evaluation = Evaluation(
            spec.evaluator, spec.steps, spec.job.evaluate_every, bus, environment.runtime.executor(1, "w5xde-evaluate"),
            journal, best_model=best_model, record=self._hooks.record, on_end=self._end_early,
            on_error=self._has_no_best,
        )  # fmt: skip
        policy = CheckpointPolicy(
            store=None if files is None else files.checkpoints, every=config.checkpoint_every,
            every_s=config.checkpoint_time_s, before_save=self._hooks.before_save, saved_step=resume.saved_step,
        )  # fmt: skip
        self._unsettled = 0 if resume.finished else resume.step  # what was evaluated there may not have decided yet
        if spec.evaluator is not None:
            spec.evaluator.beside(self._others_draw)
        self.training = self._begin(History(step=resume.step, samples=resume.samples, loss=resume.loss))
        self.checkpointing = Checkpointing(
            policy, KeptState(spec, self._strategy), self.training, bus, environment.runtime.clock, journal
        )  # fmt: skip

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Train to the end, a stop or a failure (which is raised)."""
        self._tasks = tasks
        if self._unsettled:
            self.evaluation.take_up(self._unsettled, self.training.aggregator, tasks)
        while True:
            training, spec = self.training, self._spec
            finding = training.roster.programs.run(
                self._environment.reference, spec.job.microbatch_samples, spec.program, spec.untraceable,
                idle=lambda: not (self.training.phase.begun and self.training.roster.membership.members),
            )  # fmt: skip
            tracing = tasks.create_task(finding, name="trace")
            try:
                await training.run()
            finally:
                tracing.cancel()
            choice = self._next
            if choice is None or self._stopping or training.progress >= training.total_steps:
                return
            await self._change(choice)
            self._next = None
            if self.training is training:
                return

    async def check_parameters(self) -> None:
        """The run has failed where an update of this session has made parameters infinite or NaN."""
        training, spec = self.training, self._spec
        step = training.progress
        if spec.begins_finite and not await training.aggregator.submit(training.aggregator.trains_finite):
            self._fail(ParametersNotFinite(step))

    def tick(self, now: float) -> None:
        """Do what is due by time. Called every second or so."""
        self.training.tick(now)
        if self._chooser is None or self._next is not None or self.training.phase.lifecycle.ends:
            return
        undecided = self._chooser.current is None
        choice, said = self._chooser.tick(self.training)
        if said:
            self._warn(said)
        if choice is not None:
            # The rest of the first step would take longer than to compute it again by what was chosen.
            self._choose(choice, grace_s=0.0 if undecided else None)

    @property
    def best(self) -> Best | None:
        """The best state that was kept, if any."""
        kept = self.evaluation.best_model
        return None if kept is None else kept.best

    def stop(self) -> None:
        """End in good order."""
        self._stopping = True
        self.training.stop()

    def begin_with(self, num_workers: int) -> None:
        """Wait for so many workers, here and where another rule begins anew: the others will never come."""
        self.config = replace(self.config, min_workers=num_workers)
        self.training.phase.min_workers = num_workers
        self.training.phase.lifecycle.wake.set()  # leases are given at the next tick

    def _end_early(self) -> None:
        """The job's ``stop_when`` finishes the run, also where somebody has asked it to stop."""
        training = self.training
        if training.progress < training.total_steps and training.phase.lifecycle.failure is None:
            self._stopping = True
            training.finish()

    def abandon(self) -> bool:
        """Wait for no disk and no evaluation any more. Whether anybody did."""
        if self._looking is not None:
            self._looking.cancel()
        return any(
            [
                self.checkpointing.abandon(),
                self.evaluation.abandon(),
                self._journal is not None and self._journal.abandon(),
            ]
        )

    def hangs(self) -> str:
        """What of the job's code is under way where the parameters are changed and copied; "": nothing."""
        return "" if self.training.aggregator.is_idle else "its optimizer or scheduler (step or state_dict)"

    async def aclose(self) -> None:
        """Free what the last phase has."""
        try:
            await self.training.aclose()
            if self._spec.stream is not None:
                await asyncio.get_running_loop().run_in_executor(None, self._spec.stream.close)
        finally:
            await self.evaluation.aclose()

    def _others_draw(self) -> bool:
        rule = self._strategy.rule
        return self._loader.may_draw or (isinstance(rule, SyncRule) and rule.may_draw)

    def _data_came(self) -> None:
        self.training.data_came()

    def _left_out(self, sample: int, error: str) -> None:
        bad = self._spec.bad
        self._environment.bus.publish(
            SampleLeftOut(sample=sample, error=error, bad_samples=len(bad), most=bad.most)
        )  # fmt: skip

    def _fail(self, error: BaseException) -> None:
        self.training.phase.lifecycle.fail(error)

    def _has_no_best(self, error: JobError) -> None:
        """The first evaluation lacks the metric that ``keep_best`` names. A run that is over does not fail of it."""
        training = self.training  # which also stops where another is to follow it
        over = self._stopping or training.progress >= training.total_steps
        if over or training.phase.lifecycle.failure is not None:
            self._environment.bus.publish(Warned(text=str(error)))
        else:
            self._fail(error)

    def _skipped(self, step: int) -> None:
        """What is skipped because of the parameters will always be."""
        assert self._tasks is not None
        if self._looking is None or self._looking.done():
            self._looking = self._tasks.create_task(self.check_parameters(), name=f"look at what step {step} found")

    def _committed(self, commit: Commit) -> None:
        assert self._tasks is not None
        self.checkpointing.on_commit(commit, self._tasks)
        self.evaluation.on_commit(commit, self.training.aggregator, self._tasks)
        if self._chooser is None or self._next is not None:
            return
        choice = self._chooser.after_commit(self.training)
        if choice is not None:
            self._choose(choice)

    def _choose(self, choice: Choice, *, grace_s: float | None = None) -> None:
        """Go by what was chosen for the run's links; a step that takes longer than ``grace_s`` is made anew."""
        assert self._chooser is not None
        update = self.config.update
        if choice.reason:
            self._warn(f"auto: {choice.reason}")
        same = (choice.update, choice.codec) == (update.rule, update.codec)
        if same and (choice.update == "sync" or choice.inner_steps == update.inner_steps):
            bound = self._memory_bound_bytes()
            self.training.pacing.lead(choice.leases_ahead)
            self._tell_bound(bound, len(self.training.roster.sessions))
            self._chooser.begins(choice, self.training)
        else:
            self._next = choice
            self.training.stop(grace_s)

    def _memory_bound_bytes(self, num_workers: int = 0) -> int:
        """For ``num_workers``; for as many as may come where that is 0."""
        layout, config = self._spec.layout, replace(self.config, pacing=self.training.pacing.config)
        config = replace(config, max_workers=num_workers or config.max_workers)
        return memory_bound_bytes(layout.vector_bytes, layout.state_bytes, self._batch_leaves, config)

    def _tell_bound(self, before: int, num_workers: int) -> None:
        """Say how much may be held for workers now, where it is not ``before``."""
        bound, here = self._memory_bound_bytes(), self._memory_bound_bytes(num_workers)
        if bound != before:
            self._warn(
                f"auto: workers have {self.training.pacing.config.leases_ahead} leases at once; from now on the "
                f"coordinator holds at most {here / 2**30:,.1f} GiB for {num_workers} workers, and "
                f"{bound / 2**30:,.1f} GiB for {self.config.max_workers} (--max-workers)"
            )

    def _warn(self, text: str) -> None:
        self._environment.bus.publish(Warned(text=text))

    def _has_other_data(self, worker: str, same: int, said: int) -> None:
        self.training.phase.note_other_data(worker, same, said)

    def _begin(self, history: History) -> Training:
        """The training that goes on after ``history`` by the strategy that counts now."""
        spec, config, environment = self._spec, self.config, self._environment
        self._loader = loader = Loader(
            spec.job, spec.steps, config, reference=environment.reference or None,
            make_pool=environment.runtime.executor, whole_steps=config.update.rule != "sync",
            bad=spec.bad, stream=spec.stream, on_ready=self._data_came, on_skip=self._left_out, on_error=self._fail,
            on_foreign=self._has_other_data,
        )  # fmt: skip
        context = RunContext(
            layout=spec.layout, state=spec.state, sampler=spec.sampler, loader=loader, config=config, checks=config,
            bus=environment.bus, clock=environment.runtime.clock, total_steps=spec.total_steps, history=history,
            numerics=spec.numerics, counted=spec.counted,
            hooks=Hooks(
                on_commit=self._committed, awaited=self.evaluation.awaited, on_quarantine=self._hooks.on_quarantine,
                on_skip=self._skipped,
            ),
            executor=environment.runtime.executor(1, "w5xde-aggregate"),
            random_bytes=environment.runtime.random_bytes,
        )  # fmt: skip
        return make_training(spec, self._strategy, context, environment.name, journal=self._journal)

    async def _change(self, choice: Choice) -> None:
        """Go on by another rule, or by this one where the job turns out not to fit the other.

        Every lease was given back; workers connect anew. Raises what has failed meanwhile: nobody else looks.
        """
        before, bound = self.training, self._memory_bound_bytes()
        num_workers = len(before.roster.sessions)
        before.roster.say_goodbye(ByeCode.STOPPING, "the update rule changes; join again")
        await gone(before)
        for session in tuple(before.roster.sessions.values()):
            session.abort("it did not leave when the update rule changed")
            await session.gone()
        _raise_failure(before)
        await self.checkpointing.settle()
        _raise_failure(before)
        await self.evaluation.settle()
        _raise_failure(before)
        if self.evaluation.ended_at >= 0:  # ``stop_when`` has finished the run
            return
        step, samples = before.progress, before.phase.samples_applied
        update, leases_ahead = chosen(choice, self.config.update), choice.leases_ahead
        try:
            self._strategy = await asyncio.get_running_loop().run_in_executor(
                None, change_strategy, self._spec, self.config, self._strategy, update, step, samples
            )
        except (JobError, UsageError) as error:
            self._warn(f"auto: the run goes on as before: {error}")
            leases_ahead, self._chooser = self.config.pacing.leases_ahead, None
        else:
            if (unlike := self.config.unlike_results(update)) is not None:
                self._warn(unlike)
            self.config = replace(self.config, update=update)
        _raise_failure(before)  # now: what is still to be saved needs the thread that owns the parameters
        await before.aclose()
        history = History(
            step=step, samples=samples, loss=before.phase.last_loss, counts=before.phase.totals(),
            downlink_bytes=before.downlink_bytes(), trained_s=before.phase.trained_s,
            contributions=before.roster.contributions,
        )  # fmt: skip
        self.training = self._begin(history)
        if (failure := before.phase.lifecycle.failure) is not None:
            self._fail(failure)
        self.training.roster.programs.go_on_from(before.roster.programs)
        self.training.pacing.lead(leases_ahead)
        self._tell_bound(bound, num_workers)
        if self._chooser is not None:
            self._chooser.begins(choice, self.training)
        self.checkpointing.go_on_with(KeptState(self._spec, self._strategy), self.training)
        if self._stopping:
            self.training.stop()
        self._hooks.on_change(self.training)


def make_training(
    spec: RunSpec, strategy: Strategy, context: RunContext, name: str, *, journal: StepJournal | None = None
) -> Training:
    """The training of ``strategy`` in the run of that name. ``journal`` is kept under the synchronous rule alone."""
    job, update, config = spec.job, strategy.update, context.config
    message = Welcome(
        spec.run_id, name, spec.term, job.seed, job.precision, job.microbatch_samples,
        job.accumulate_grad_batches, config.bucket_bytes, spec.layout.fingerprint, config.heartbeat_s,
        config.silence_s, update.rule, update.codec, update.downlink_codec.name, update.feedback,
        threads=1 if spec.has_short_leaves else 0,
    )  # fmt: skip
    if isinstance(strategy.rule, SyncRule):
        in_place = None
        if config.pacing.short_steps == "here" and update.plain and spec.growing is None and time_limit.is_free():
            in_place = InPlace(
                job, context.loader, spec.model, spec.state, strategy.rule, segment=spec.segment,
                tell=lambda text: context.bus.publish(Warned(text=text)),
            )  # fmt: skip
        return SyncTraining(
            context, Greeting(
                message=message, layout=spec.layout, segment=spec.segment if update.plain else None, code=job.source
            ),
            strategy.rule, growing=spec.growing,
            recomputation=Recomputation(job, context.loader, spec.state, strategy.rule), journal=journal,
            in_place=in_place,
        )  # fmt: skip
    inner = strategy.inner
    buffers = [(BufferSpec("inner", "uint8", (len(inner),), "raw", len(inner)), inner)] if inner else []
    greeting = Greeting(message=message, layout=spec.layout, buffers=buffers, code=job.source)
    return OuterTraining(context, greeting, strategy.rule, strategy.schedule)
