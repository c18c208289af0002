"""From what was prepared to the training that its update rule asks for."""

from __future__ import annotations

from w5xde_async.coordinator.outer.training import OuterTraining
from w5xde_async.coordinator.run.startup import Prepared
from w5xde_async.coordinator.sync.recomputation import Recomputation
from w5xde_async.coordinator.sync.training import StepJournal, SyncTraining
from w5xde_async.coordinator.training import History, Hooks, RunContext, Training
from w5xde_async.hub.members.roster import Greeting
from w5xde_async.runtime import Runtime
from w5xde_async.updates.sync import SyncRule
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Welcome

__all__ = ["make_training"]


def make_training(
    prepared: Prepared,
    context: RunContext,
    name: str,
    runtime: Runtime,
    *,
    journal: StepJournal | None = None,
    history: History | None = None,
    hooks: Hooks | None = None,
) -> Training:
    """The training of a prepared run; ``name`` is the run's. ``journal`` is kept under the synchronous rule alone."""
    job, update, config = prepared.job, prepared.update, context.config
    message = Welcome(
        prepared.run_id, name, prepared.term, job.seed, job.precision, job.microbatch_samples,
        job.accumulate_grad_batches, config.bucket_bytes, prepared.layout.fingerprint, config.heartbeat_s,
        config.silence_s, update.rule, update.codec, update.downlink_codec.name, update.feedback,
    )  # fmt: skip
    executor = runtime.executor(1, "w5xde-aggregate")
    if isinstance(prepared.rule, SyncRule):
        return SyncTraining(
            context, Greeting(message=message, layout=prepared.layout), prepared.rule, sampler=prepared.sampler,
            first_step=prepared.first_step, growing=prepared.growing, journal=journal, history=history, hooks=hooks,
            recomputation=Recomputation(prepared.job, context.loader, prepared.state, prepared.rule),
            executor=executor, random_bytes=runtime.random_bytes,
        )  # fmt: skip
    inner = prepared.inner
    buffers = [(BufferSpec("inner", "uint8", (len(inner),), "raw", len(inner)), inner)] if inner else []
    return OuterTraining(
        context, Greeting(message=message, layout=prepared.layout, buffers=buffers), prepared.rule,
        sampler=prepared.sampler, schedule=prepared.schedule, history=history, hooks=hooks, executor=executor,
    )  # fmt: skip
