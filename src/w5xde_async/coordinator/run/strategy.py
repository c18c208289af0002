"""From settings to the update rule that a run goes by, and from one rule to another.

Everything here may block (it imports kernels and replays schedules) and runs in an executor.
"""

from __future__ import annotations

from dataclasses import replace

import msgpack
import torch

from w5xde_async.compute.engine import choose_device
from w5xde_async.compute.inner import Schedule, describe_inner
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.run.spec import RunSpec, Strategy
from w5xde_async.errors import JobError, UsageError
from w5xde_async.job import Job
from w5xde_async.plan.strategy_choice import PAIRS
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.outer import OuterRule, check_trainable, make_rule
from w5xde_async.updates.sync import SyncRule

_MOST_LEAVES = 1 << 15  # losses and metrics of so many fit into a header


def make_strategy(spec: RunSpec, config: CoordinatorConfig, update: UpdateConfig) -> Strategy:
    """The strategy of ``update``, at its beginning. Raises JobError, UsageError where the job does not fit it."""
    job = spec.job
    rule = SyncRule.of(job, spec.model, spec.layout, spec.state, update_device(config))
    _check_precision(job, update)
    if update.rule == "sync":
        return Strategy(update=update, rule=rule)
    _check_leaves(job)
    outer = make_rule(update, rule, spec.state, min_workers=config.min_workers, gate=config.gate)
    if not update.local:
        return Strategy(update=update, rule=outer)
    schedule = Schedule(rule.optimizer, rule.scheduler)
    described = describe_inner(rule.optimizer, spec.layout, spec.model, scheduled=schedule.scheduled)
    streaming = [update.fragments, update.overlap, update.mixing] if update.rule == "streaming" else None
    inner: bytes = msgpack.packb({**described, "clip": job.gradient_clip_val, "streaming": streaming})
    return Strategy(update=update, rule=outer, schedule=schedule, inner=inner)


def update_device(config: CoordinatorConfig) -> torch.device | None:
    """Where optimizers step, if not in the memory that is sent. Raises UsageError where that is not here."""
    if config.update_device == "cpu":
        return None
    try:
        return choose_device(config.update_device)
    except ValueError as error:
        raise UsageError(f"--update-device: {error}") from None


def change_strategy(
    spec: RunSpec, config: CoordinatorConfig, before: Strategy, update: UpdateConfig, step: int, samples: int
) -> Strategy:
    """Go on by ``update``, from the parameters as they are after ``step`` steps and ``samples`` samples.

    Optimizers begin afresh, except that of sync where only the encoding of results changes: its state and its schedule
    are those of the steps so far. Raises JobError, UsageError where the job does not fit the rule; then nothing has
    changed.
    """
    if update.rule == "sync" and isinstance(before.rule, SyncRule):
        _check_precision(spec.job, update)
        return replace(before, update=update)
    made = make_strategy(spec, config, update)
    if made.schedule is not None:
        made.schedule.rows(step, 1)  # from the beginning to here, which may take seconds
    if isinstance(made.rule, OuterRule):
        made.rule.begin_after(step, samples)
    return made


def possible_choices(spec: RunSpec, update: UpdateConfig) -> frozenset[tuple[str, str]]:
    """Rules and codecs of ``plan.strategy_choice`` that this job and the other settings go with."""
    found, optimizer = set[tuple[str, str]](), SyncRule.of(spec.job, spec.model, spec.layout, spec.state).optimizer
    for rule, codec in PAIRS:
        try:
            wanted = replace(update, rule=rule, codec=codec, downlink="")
            _check_precision(spec.job, wanted)
            if wanted.rule != "sync":
                check_trainable(spec.layout)
                _check_leaves(spec.job)
            if wanted.local:
                describe_inner(optimizer, spec.layout, spec.model)
        except (JobError, UsageError):
            continue
        found.add((rule, codec))
    return frozenset(found)


def _check_precision(job: Job, update: UpdateConfig) -> None:
    if job.precision == "fp16" and not update.plain:
        raise JobError(
            "precision",
            "fp16 scales its losses by the version, which late or encoded results do not keep",
            "use precision='bf16', or --update sync --codec raw",
        )


def _check_leaves(job: Job) -> None:
    """Under every rule but sync one lease is a whole step, and its DONE has numbers of every leaf."""
    leaves = -(-job.batch_size // job.leaf_samples)
    if leaves > _MOST_LEAVES:
        raise JobError(
            "batch_size",
            f"a step has {leaves} leaves; a worker that is given whole steps takes at most {_MOST_LEAVES}",
            "raise microbatch_size or accumulate_grad_batches, lower batch_size, or use --update sync",
        )
