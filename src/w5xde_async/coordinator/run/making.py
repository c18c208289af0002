"""From what was prepared to the training that its update rule asks for."""

from __future__ import annotations

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.outer.training import Rounds
from w5xde_async.coordinator.run.startup import Prepared
from w5xde_async.coordinator.sync.recomputation import Recomputation
from w5xde_async.coordinator.sync.training import Training
from w5xde_async.data.loader import Loader
from w5xde_async.runtime import Runtime
from w5xde_async.telemetry.events import Bus
from w5xde_async.updates.sync import SyncRule
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Welcome

__all__ = ["make_training"]


def make_training(
    prepared: Prepared, loader: Loader, name: str, config: CoordinatorConfig, bus: Bus, runtime: Runtime
) -> Training | Rounds:
    """The training of a prepared run; ``name`` is the run's."""
    job, update = prepared.job, prepared.update
    welcome = Welcome(
        prepared.run_id, name, prepared.term, job.seed, job.precision, job.microbatch_samples,
        job.accumulate_grad_batches, config.bucket_bytes, prepared.layout.fingerprint, config.heartbeat_s,
        config.silence_s, update.rule, update.codec, update.downlink_codec.name, update.feedback,
    )  # fmt: skip
    executor = runtime.executor(1, "w5xde-aggregate")
    training: Training | Rounds
    if isinstance(prepared.rule, SyncRule):
        training = Training(
            sampler=prepared.sampler, loader=loader, layout=prepared.layout, state=prepared.state, rule=prepared.rule,
            welcome=welcome, config=config, bus=bus, first_step=prepared.first_step, total_steps=prepared.total_steps,
            growing=prepared.growing, clock=runtime.clock, executor=executor, random_bytes=runtime.random_bytes,
        )  # fmt: skip
        training.verification.recomputation = Recomputation(prepared.job, loader, prepared.state, prepared.rule)
    else:
        inner = prepared.inner
        buffers = [(BufferSpec("inner", "uint8", (len(inner),), "raw", len(inner)), inner)] if inner else []
        training = Rounds(
            sampler=prepared.sampler, loader=loader, layout=prepared.layout, state=prepared.state, rule=prepared.rule,
            schedule=prepared.schedule, welcome=welcome, welcome_buffers=buffers, config=config, bus=bus,
            total_steps=prepared.total_steps, clock=runtime.clock, executor=executor,
        )  # fmt: skip
    training.samples_applied, training.last_loss = prepared.samples, prepared.loss
    return training
