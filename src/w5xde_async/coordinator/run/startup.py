"""From a job and a run directory to a run that can start: build, check, and take up where it was left.

Everything here blocks (it imports kernels, reads disks) and runs in an executor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.leaf_size import with_leaf_size
from w5xde_async.compute.mean_over_samples import what_is_no_mean
from w5xde_async.compute.program.converting import NotTraceable
from w5xde_async.compute.program.form import Document
from w5xde_async.compute.program.tracing import trace_job
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.durability.evaluation import Evaluator
from w5xde_async.coordinator.run.overrides import settings_of
from w5xde_async.coordinator.run.resume import overridden, take_up
from w5xde_async.coordinator.run.spec import Prepared, ResumePoint, RunSpec
from w5xde_async.coordinator.run.strategy import make_strategy, possible_choices, update_device
from w5xde_async.coordinator.run.warm_start import begin_with, begins_anew, kept_leaf_size
from w5xde_async.coordinator.sync.batch_growth import BatchGrowth
from w5xde_async.data.stream import stream_of
from w5xde_async.errors import JobError, StoreError, UsageError, in_one_line
from w5xde_async.job import Job, in_train_mode, lost_modes, model_as_given, replica_of
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.plan.bad_samples import BadSamples
from w5xde_async.plan.sampler import ENDLESS_SAMPLES, Sampler
from w5xde_async.segments import Segment, Unshared
from w5xde_async.store.checkpoint import is_record
from w5xde_async.store.filesystem import Filesystem
from w5xde_async.store.rundir import RunDir
from w5xde_async.store.state import pack_state
from w5xde_async.updates.asynchronous import delay_warning
from w5xde_async.updates.outer import OuterRule
from w5xde_async.updates.sync import SyncRule
from w5xde_async.users_code import users_code
from w5xde_async.wire.handshake import NONCE_BYTES


def prepare(
    job: Job,
    config: CoordinatorConfig,
    run_path: Path | None,
    new_run_id: Callable[[], str],
    alone: bool = False,
    filesystem: Filesystem | None = None,
) -> Prepared:
    """Build the run. No other process can load a job that is ``alone``: its step is made a program here.

    Raises JobError, StoreError, CheckpointMismatch, UsageError; then nothing is held.
    """
    anew = begins_anew(run_path, config.resume)
    step_flops = 0
    if run_path is not None and not anew and job.microbatch_size is None:
        size, step_flops = kept_leaf_size(run_path, config.resume)
        if size is None or size * job.accumulate_grad_batches <= job.batch_size:  # else batch_size has been changed
            job = replace(job, microbatch_size=size)
    built = _build(job, config, alone, anew=anew, step_flops=step_flops)
    if run_path is None:
        if config.resume not in ("auto", "never"):
            raise UsageError("resume names a checkpoint but there is no run directory")
        if config.durability != "checkpoint":
            raise UsageError(f"durability {config.durability} keeps files but there is no run directory")
        if job.keep_best is not None:
            raise UsageError("the job's keep_best keeps a file but there is no run directory; give run_dir")
        prepared, _ = overridden(built._replace(spec=replace(built.spec, run_id=new_run_id())), config)
    elif config.resume not in ("auto", "never") and not is_record(Path(config.resume)):
        raise UsageError(
            f"--resume: {config.resume} is no checkpoint; give auto, never, or a step-... directory of "
            "checkpoints/ in a run directory"
        )
    else:
        directory = RunDir.open(
            run_path, resume=config.resume != "never", filesystem=filesystem, new_run_id=new_run_id
        )  # fmt: skip
        try:
            prepared = take_up(built, directory, config)
        except BaseException:
            directory.close()
            raise
    prepared = _looked_at(prepared)
    # The order that the event loop will ask for at once is there.
    steps = prepared.spec.steps
    try:
        steps.prepare(steps.epoch_of(prepared.resume.step))
    except MemoryError:
        prepared.spec.close()
        reason = f"the order of its {job.num_samples:,} samples (24 bytes each) does not fit into memory"
        raise JobError("dataset", reason, "shuffle=False, or a stream") from None
    return prepared


def _looked_at(prepared: Prepared) -> Prepared:
    """With whether what is trained is finite."""
    spec, strategy, resume = prepared
    if spec.state.trains_finite:
        return prepared
    if resume.step:
        told = f"parameters are infinite or NaN at step {resume.step} already; --resume PATH begins at an earlier one"
        resume = replace(resume, notes=(*resume.notes, told))
    return Prepared(replace(spec, begins_finite=False), strategy, resume)


def _build(job: Job, config: CoordinatorConfig, alone: bool, *, anew: bool, step_flops: int) -> Prepared:
    """The run at its very beginning, as if nothing had been kept of it. ``anew``: it is there that it begins.

    ``step_flops``: counted at the beginning of a run that goes on.
    """
    _check_dataset(job)
    model = model_as_given(job)
    lost = lost_modes(model) if job.step is None else None  # one of the job's own may switch it
    model = in_train_mode(model)
    for name, held in model.state_dict().items():
        if not isinstance(held, Tensor):
            raise JobError(
                "model", f"its state_dict() has {name!r}, {type(held).__name__}, no tensor, which no checkpoint keeps",
                "keep it in a buffer; what never changes need not be in a state_dict",
            )  # fmt: skip
    if any(tensor.device.type != "cpu" for tensor in model.state_dict().values()):
        raise JobError("model", "it lies on an accelerator", "build it on the CPU; workers move their copy themselves")
    job, leaves_by, counted = with_leaf_size(job, model, grows=config.target_batch is not None)
    sampler = sampler_of(job)
    epochs, max_steps = limits(job, config)
    ends = [] if epochs is None else [sampler.total_steps(epochs)]
    total_steps = min(ends if max_steps is None else [*ends, max_steps])
    try:
        layout = Layout.of(model, bucket_bytes=config.bucket_bytes)
    except ValueError as error:
        raise JobError("model", str(error)) from error
    evaluates = job.evaluate is not None and config.evaluate
    evaluator = Evaluator(job, replica_of(job, model), layout) if evaluates else None
    program, untraceable = _trace(job, model, layout) if alone and config.code_free else (None, "")
    segment = _segment(layout) if config.update.plain else None
    copied = update_device(config)  # from there, which is faster from pinned memory
    pinned = segment is None and copied is not None and copied.type == "cuda"
    state = FlatState(layout, memory=None if segment is None else segment.payload, pinned=pinned)
    state.copy_from(model)
    state.adopt(model)
    begun = None
    if config.init_from is not None:
        unused = "--init-from is for the beginning of a run; this one goes on from its checkpoint"
        begun = begin_with(state, Path(config.init_from)) if anew else unused
    spec = RunSpec(
        job=job, sampler=sampler, total_steps=total_steps, model=model, evaluator=evaluator, layout=layout,
        state=state, segment=segment, program=program, untraceable=untraceable, leaves_by=leaves_by,
        step_flops=counted or step_flops,
        bad=BadSamples(config.max_bad_samples), stream=stream_of(job),
    )  # fmt: skip
    strategy = make_strategy(spec, config, config.update)
    optimizer = strategy.rule.optimizer
    _check_kept(strategy.rule)
    spec = replace(spec, settings=settings_of(optimizer, strategy.rule.scheduler))
    if config.auto:
        spec = replace(spec, possible=possible_choices(spec, config.update))
    if config.target_batch is not None:
        growing = BatchGrowth(
            sampler, optimizer, target=config.target_batch, patience=config.batch_patience, epochs=epochs,
            max_steps=max_steps,
        )  # fmt: skip
        spec = replace(spec, growing=growing)
    warnings = [
        begun,
        *_without_effect(job, epochs, max_steps),
        lost,
        _hooked(job, model),
        what_is_no_mean(job, model, counted) if anew else None,
        delay_warning(optimizer.param_groups) if config.update.rule == "async" and _has_delay(config) else None,
        config.unlike_results(config.update),
    ]
    return Prepared(spec, strategy, ResumePoint(notes=tuple(filter(None, warnings))))


def _check_kept(rule: SyncRule | OuterRule) -> None:
    """An optimizer that cannot be saved is refused now, not at a checkpoint. Raises JobError."""
    try:
        with users_code():
            pack_state(rule.state_dict())
    except Exception as error:
        what = str(error) if isinstance(error, StoreError) else in_one_line(error)
        hint = "have state_dict() give numbers, strings, tensors, and lists and dicts of those"
        raise JobError("optimizer", f"its state, or its scheduler's, cannot be kept: {what}", hint) from error


def _without_effect(job: Job, epochs: int | None, max_steps: int | None) -> Iterator[str]:
    """What is said of the job to no effect."""
    if job.evaluate_every is not None and job.evaluate is None:
        yield f"evaluate_every={job.evaluate_every} of the job does nothing: it has no evaluate"
    if job.shuffle_buffer != Job.shuffle_buffer and not (job.streamed and job.shuffle):
        why = "shuffle is off" if job.streamed else "a dataset with a length and dataset[i] is shuffled as a whole"
        yield f"shuffle_buffer={job.shuffle_buffer} of the job does nothing: {why}"
    if epochs is not None and job.num_samples is None:
        yield f"epochs={epochs} ends nothing: the dataset is a stream without len(). Step {max_steps} ends the run"


def _has_delay(config: CoordinatorConfig) -> bool:
    """Whether a result may be older than the newest parameters: not that of a worker alone, with one lease at once."""
    return config.max_workers > 1 or config.pacing.leases_ahead > 1


def _hooked(job: Job, model: nn.Module) -> str | None:
    """What to say where code of the job's sees gradients, which are those of a sum here."""
    hooked = [name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    hooked += [name or "the model" for name, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks]
    if not hooked:
        return None
    return (
        f"{', '.join(hooked)[:200]}: its hook sees gradients of a microbatch's sum, which are those of its mean times "
        f"its samples ({job.microbatch_samples}{', and the loss scale' if job.precision == 'fp16' else ''}): what it "
        "compares them with, as to clamp them, is to be as many times larger"
    )


def _segment(layout: Layout) -> Segment | None:
    """Where parameters lie that workers of this machine read; None where they travel as fast as they are told of."""
    if layout.is_small:
        return None
    try:
        return Segment("parameters", FlatState.nbytes(layout), os.urandom(NONCE_BYTES))
    except Unshared:
        return None


def _check_dataset(job: Job) -> None:
    """Whether its samples can travel, where that is seen without reading any. Others are read before any lease."""
    if type(job.dataset) is TensorDataset and job.collate is None:
        try:
            flatten(tuple([tensor[:1] for tensor in job.dataset.tensors]))
        except TypeError as error:
            raise JobError("dataset", str(error), "convert its tensors") from error


def _trace(job: Job, model: nn.Module, layout: Layout) -> tuple[Document | None, str]:
    try:
        return trace_job(job, model, layout), ""
    except NotTraceable as error:
        return None, str(error)


def limits(job: Job, config: CoordinatorConfig) -> tuple[int | None, int | None]:
    """Epochs and steps after which the run ends, where they are given. Raises UsageError where it has no end."""
    # What is given for this start takes the place of what the job says, both limits together.
    epochs, max_steps = job.epochs, job.max_steps
    if config.max_steps is not None or config.epochs is not None:
        epochs, max_steps = config.epochs, config.max_steps
    if max_steps is None and job.num_samples is None:
        raise UsageError("epochs cannot end the run: its dataset is a stream without len(); give --max-steps")
    return epochs, max_steps


def sampler_of(job: Job) -> Sampler:
    """Which samples make which step of a run whose batch does not grow."""
    samples = job.num_samples
    return Sampler(
        num_samples=ENDLESS_SAMPLES if samples is None else samples, batch_size=job.batch_size,
        leaf_samples=job.leaf_samples, seed=job.seed, shuffle=job.shuffle, drop_last=job.drop_last, stream=job.streamed,
    )  # fmt: skip
