"""From a job and a run directory to a run that can start: build, check, and take up where it was left.

Everything here blocks (it imports kernels, reads disks) and runs in an executor.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.inner import Schedule, describe_inner
from w5xde_async.compute.program.form import Document
from w5xde_async.compute.program.tracing import NotTraceable, trace_job
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.durability.journal_writer import apply_entry
from w5xde_async.coordinator.sync.batch_growth import BatchGrowth
from w5xde_async.errors import CheckpointCorrupt, CheckpointMismatch, JobError, MalformedFrame, UsageError
from w5xde_async.job import Job, build_model
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.plan.sampler import Sampler, Steps
from w5xde_async.plan.tuning import PAIRS
from w5xde_async.store.checkpoint import CheckpointStore, Record, Skipped, is_record
from w5xde_async.store.failpoints import failpoint
from w5xde_async.store.filesystem import Filesystem
from w5xde_async.store.journal import Journal, Position, Replay
from w5xde_async.store.rundir import RunDir
from w5xde_async.store.state import pack_state, unpack_state
from w5xde_async.telemetry.recorder import last_step
from w5xde_async.telemetry.records import number
from w5xde_async.updates.asynchronous import delay_warning
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.outer import OuterRule, check_trainable, make_rule
from w5xde_async.updates.sync import SyncRule

__all__ = ["Prepared", "change_rule", "prepare", "record_of"]

_MOST_LEAVES = 1 << 15  # losses and metrics of so many fit into a header


@dataclass(slots=True)
class Prepared:
    """All that a run is made of. ``evaluator`` is a copy of the model to evaluate with, where the job evaluates."""

    job: Job
    sampler: Sampler
    model: nn.Module
    evaluator: nn.Module | None
    layout: Layout
    state: FlatState
    rule: SyncRule | OuterRule
    run_dir: RunDir | None
    store: CheckpointStore | None
    run_id: str
    term: int
    first_step: int
    total_steps: int
    samples: int
    notes: list[str]
    saved_step: int = -1  # of the newest checkpoint that counts; -1: none
    program: Document | None = None  # of a job that no other process can load
    untraceable: str = ""  # why there is none
    journal: Journal | None = None  # has begun, where the run keeps one
    replayed: list[Mapping[str, object]] = field(default_factory=list)  # records for metrics.jsonl
    loss: float | None = None  # of the last step that was replayed
    schedule: Schedule | None = None  # under rules of local steps, of the workers' optimizers
    inner: bytes = b""  # and what those are: ``compute.inner``, as msgpack
    update: UpdateConfig = field(default_factory=UpdateConfig)  # what counts: ``auto`` may have chosen another
    growing: BatchGrowth | None = None  # where the batch grows
    possible: frozenset[tuple[str, str]] = frozenset()  # rules and codecs that ``auto`` may choose

    @property
    def steps(self) -> Steps:
        """Which samples make which step."""
        return self.sampler if self.growing is None else self.growing.plan


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
    sampler = Sampler(
        num_samples=len(job.dataset),
        batch_size=job.batch_size,
        leaf_samples=job.leaf_samples,
        seed=job.seed,
        shuffle=job.shuffle,
        drop_last=job.drop_last,
    )
    epochs, max_steps = _limits(job, config)
    ends = [] if epochs is None else [sampler.total_steps(epochs)]
    total_steps = min(ends if max_steps is None else [*ends, max_steps])
    _check_dataset(job)
    model = build_model(job)
    if any(tensor.device.type != "cpu" for tensor in model.state_dict().values()):
        raise JobError("model", "it lies on an accelerator", "build it on the CPU; workers move their copy themselves")
    try:
        layout = Layout.of(model, bucket_bytes=config.bucket_bytes)
    except ValueError as error:
        raise JobError("model", str(error)) from error
    evaluator = copy.deepcopy(model) if job.evaluate is not None and config.evaluate else None
    program, untraceable = _trace(job, model, layout) if alone and config.code_free else (None, "")
    state = FlatState(layout)
    state.copy_from(model)
    state.adopt(model)
    rule, schedule, inner = _rule(job, config, config.update, model, layout, state)
    pack_state(rule.state_dict())  # an optimizer that cannot be saved is refused now, not at the first checkpoint
    prepared = Prepared(
        job=job, sampler=sampler, model=model, evaluator=evaluator, layout=layout, state=state, rule=rule, run_dir=None,
        store=None, run_id="", term=1, first_step=0, total_steps=total_steps, samples=0, notes=[],
        program=program, untraceable=untraceable, schedule=schedule, inner=inner,
        update=config.update,
    )  # fmt: skip
    if config.auto:
        prepared.possible = _possible(job, config.update, model, layout, state)
    if config.target_batch is not None:
        prepared.growing = BatchGrowth(
            sampler, rule.optimizer, target=config.target_batch, patience=config.batch_patience, epochs=epochs,
            max_steps=max_steps,
        )  # fmt: skip
    if config.update.rule == "async" and (warning := delay_warning(rule.optimizer.param_groups)) is not None:
        prepared.notes.append(warning)
    if (unlike := config.unlike_results(config.update)) is not None:
        prepared.notes.append(unlike)
    if run_path is None:
        if config.resume not in ("auto", "never"):
            raise UsageError("resume names a checkpoint but there is no run directory")
        if config.durability != "checkpoint":
            raise UsageError(f"durability {config.durability} keeps files but there is no run directory")
        prepared.run_id = new_run_id()
        _order(prepared, config)
        return prepared
    if config.resume not in ("auto", "never") and not is_record(Path(config.resume)):
        raise UsageError(
            f"--resume: {config.resume} is no checkpoint; give auto, never, or a step-... directory of "
            "checkpoints/ in a run directory"
        )
    run_dir = RunDir.open(
        run_path, resume=config.resume != "never", filesystem=filesystem, new_run_id=new_run_id
    )  # fmt: skip
    try:
        _take_up(prepared, run_dir, config)
    except BaseException:
        run_dir.close()
        raise
    _order(prepared, config)
    return prepared


def _check_dataset(job: Job) -> None:
    """Whether its samples can travel, where that is seen without reading any. Others are read before any lease."""
    if type(job.dataset) is TensorDataset and job.collate is None:
        try:
            flatten(tuple([tensor[:1] for tensor in job.dataset.tensors]))
        except TypeError as error:
            raise JobError("dataset", str(error), "convert its tensors") from error


def _order(prepared: Prepared, config: CoordinatorConfig) -> None:
    """The orders that the event loop will ask for at once are there."""
    if config.auto:
        prepared.sampler.prepare(0)
    prepared.steps.prepare(prepared.steps.epoch_of(prepared.first_step))


def _rule(
    job: Job, config: CoordinatorConfig, update: UpdateConfig, model: nn.Module, layout: Layout, state: FlatState
) -> tuple[SyncRule | OuterRule, Schedule | None, bytes]:
    """The update rule; under rules of local steps also what workers are told of their optimizer."""
    rule = SyncRule.of(job, model, layout, state)
    _check_precision(job, update)
    if update.rule == "sync":
        return rule, None, b""
    _check_leaves(job)
    outer = make_rule(update, rule, state, min_workers=config.min_workers, gate=config.gate)
    if not update.local:
        return outer, None, b""
    schedule = Schedule(rule.optimizer, rule.scheduler)
    described = describe_inner(rule.optimizer, layout, model, scheduled=schedule.scheduled)
    streaming = [update.fragments, update.overlap, update.mixing] if update.rule == "streaming" else None
    inner = msgpack.packb({**described, "clip": job.gradient_clip_val, "streaming": streaming})
    return outer, schedule, bytes(inner)


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


def _possible(
    job: Job, update: UpdateConfig, model: nn.Module, layout: Layout, state: FlatState
) -> frozenset[tuple[str, str]]:
    """Rules and codecs of ``plan.tuning`` that this job and the other settings go with."""
    found, optimizer = set[tuple[str, str]](), SyncRule.of(job, model, layout, state).optimizer
    for rule, codec in PAIRS:
        try:
            wanted = replace(update, rule=rule, codec=codec, downlink="")
            _check_precision(job, wanted)
            if wanted.rule != "sync":
                check_trainable(layout)
                _check_leaves(job)
            if wanted.local:
                describe_inner(optimizer, layout, model)
        except (JobError, UsageError):
            continue
        found.add((rule, codec))
    return frozenset(found)


def change_rule(prepared: Prepared, config: CoordinatorConfig, update: UpdateConfig, step: int, samples: int) -> None:
    """Go on by another rule, from the parameters as they are after ``step`` steps.

    Optimizers begin afresh, but for that of sync where only the form of results changes: its state and its schedule are
    those of the steps so far. Raises JobError where the job does not fit the rule; then nothing has changed.
    """
    if update.rule == "sync" and isinstance(prepared.rule, SyncRule):
        _check_precision(prepared.job, update)
        prepared.update, prepared.first_step, prepared.samples = update, step, samples
        return
    made = _rule(prepared.job, config, update, prepared.model, prepared.layout, prepared.state)
    if made[1] is not None:
        made[1].rows(step, 1)
    prepared.rule, prepared.schedule, prepared.inner = made
    prepared.update, prepared.first_step, prepared.samples = update, step, samples
    if isinstance(prepared.rule, OuterRule):
        prepared.rule.begin_after(step, samples)


def _trace(job: Job, model: nn.Module, layout: Layout) -> tuple[Document | None, str]:
    try:
        return trace_job(job, model, layout), ""
    except NotTraceable as error:
        return None, str(error)


def _limits(job: Job, config: CoordinatorConfig) -> tuple[int | None, int | None]:
    """Epochs and steps after which the run ends, where they are given."""
    # What is given for this start takes the place of what the job says, both limits together.
    if config.max_steps is not None or config.epochs is not None:
        return config.epochs, config.max_steps
    return job.epochs, job.max_steps


def _take_up(prepared: Prepared, run_dir: RunDir, config: CoordinatorConfig) -> None:
    prepared.run_dir = run_dir
    prepared.run_id = run_dir.run_id
    if run_dir.set_aside is not None:
        prepared.notes.append(f"the run that was here lies in {run_dir.set_aside} now")
    store = prepared.store = CheckpointStore(
        run_dir.checkpoints_path, keep=config.keep_checkpoints, filesystem=run_dir.filesystem
    )  # fmt: skip
    store.sweep()
    record: Record | None = None
    skipped: list[Skipped] = []
    if config.resume == "auto":
        record, skipped = store.latest()
        for passed in skipped:
            prepared.notes.append(f"checkpoint {passed.path} was passed over: {passed.reason}")
        if record is None and skipped:
            raise CheckpointMismatch(
                str(run_dir.checkpoints_path),
                f"none of the {len(skipped)} checkpoints is whole ({skipped[0].reason}); "
                "--resume never starts afresh and sets them aside",
            )
    elif config.resume != "never":
        record = store.load(Path(config.resume))
    # The bucket size is in the layout's own fingerprint; it may change from start to start.
    entries = json.dumps(json.loads(prepared.layout.describe())["entries"]).encode()
    fingerprint = hashlib.blake2b(entries, digest_size=16).hexdigest()
    journal = Journal(
        run_dir.journal_path, run_id=run_dir.run_id, fingerprint=fingerprint, filesystem=run_dir.filesystem
    )  # fmt: skip
    journal.sweep()
    if record is not None:
        known: Any = record.meta.get("update")
        if config.auto and known is not None and known["rule"] != prepared.update.rule:
            change_rule(prepared, config, UpdateConfig(**known), 0, 0)
        _restore(prepared, record, str(run_dir.path))
    replay = _replay(prepared, record, journal, run_dir, config)
    if record is not None:
        if config.resume != "auto":
            prepared.notes.append(
                f"the run goes on from {config.resume}; without --resume the next start goes on from what follows, "
                "with it from there again"
            )
        if (other := record.meta.get("run_id")) not in (None, run_dir.run_id):
            prepared.notes.append(f"its checkpoint was written by run {other}; from here on it is run {run_dir.run_id}")
        if skipped:
            prepared.notes.append(f"the run goes on from the checkpoint of step {record.step}, the newest whole one")
        prepared.notes.extend(f"{path} belongs to another course of the run" for path in
                              store.abandon_after(record.step))  # fmt: skip
    journalled = config.durability == "journal"
    told, first = last_step(run_dir.metrics_path), prepared.first_step
    if told > first and journalled and replay is not None:
        prepared.notes.append(f"the journal ends with step {first}, though step {told} had been committed")
    elif told > first:
        prepared.notes.append(
            f"the {told - first} steps from {first + 1} to {told} were done before; they are done again"
        )
    # A checkpoint that names a place in a journal is refused where that journal is missing, so none may outlive it.
    named = record is not None and _position(record) is not None and (replay is None or not journalled)
    # One that lies elsewhere is not found by the next start, which would take up another course or none.
    elsewhere = record is not None and config.resume != "auto" and not store.holds(Path(config.resume))
    if named or elsewhere or (not journalled and journal.exists and prepared.first_step > prepared.saved_step):
        store.save(record_of(prepared, prepared.first_step, prepared.samples))
        prepared.saved_step = prepared.first_step
    if journalled:
        if record is None:
            # What is replayed later must stand on something that can be compared with the job.
            store.save(record_of(prepared, 0, 0))
            prepared.saved_step = 0
        journal.begin(prepared.first_step, run_dir.term + 1, replay)
        prepared.journal = journal
    elif journal.exists:
        journal.remove()
    # After the journal: a term that is stored has its segment.
    prepared.term = run_dir.next_term()


def _replay(
    prepared: Prepared, record: Record | None, journal: Journal, run_dir: RunDir, config: CoordinatorConfig
) -> Replay | None:
    """Apply what the journal has beyond ``record``, the checkpoint that is resumed. Raises CheckpointCorrupt."""
    position = None if record is None else _position(record)
    if config.resume != "auto" or not (journal.exists or (position and config.durability == "journal")):
        if journal.exists:
            prepared.notes.append(
                f"the journal lies in {journal.set_aside()}: it leads on to another course of the run"
            )
        return None
    replay = Replay(prepared.first_step)
    try:
        if record is None:
            raise CheckpointCorrupt(str(run_dir.journal_path), "there is a journal but no checkpoint to begin at")
        if journal.newest_term < run_dir.term:
            reason = f"its newest segment is of term {journal.newest_term}, the last start was term {run_dir.term}"
            raise CheckpointCorrupt(str(run_dir.journal_path), f"{reason}: segments are missing")
        _apply_all(prepared, journal, position, replay)
    except CheckpointCorrupt as error:
        if config.durability == "journal":
            raise
        prepared.notes.append(f"the journal is damaged and was set aside in {journal.set_aside()}: {error}")
        prepared.notes.append(f"the steps after {0 if record is None else record.step} are computed again")
        prepared.replayed.clear()
        if record is not None:
            _restore(prepared, record, str(run_dir.path))
        return None
    failpoint("replay.after")
    return replay


def _apply_all(prepared: Prepared, journal: Journal, position: Position | None, replay: Replay) -> None:
    began, base, notes = time.perf_counter(), prepared.first_step, prepared.notes
    vector, rule = ResultVector(prepared.layout), prepared.rule
    assert isinstance(rule, SyncRule), "a journal is kept of no other rule"
    differ = 0
    for entry in journal.read(base, position, replay):
        done = apply_entry(entry, prepared.layout, rule, vector)
        differ += not done.same
        prepared.replayed.append(done.line)
        prepared.samples, prepared.loss = done.samples_applied, number(done.line.get("loss"))
    prepared.first_step = replay.step
    if replay.step > base:
        seconds = time.perf_counter() - began
        notes.append(f"{replay.step - base} steps after step {base} came from the journal, in {seconds:.1f} s")
    if replay.torn_bytes:
        notes.append(
            f"the journal ends in {replay.torn_bytes} bytes of a step that was not committed; they are dropped"
        )
    if replay.gap is not None:
        after, until = replay.gap.after, replay.gap.until
        notes.append(f"steps {after + 1} to {until} are not in the journal (the disk failed) and are computed again")
    if differ:
        notes.append(
            f"{differ} of the replayed steps have another gradient norm than at first: another machine, thread count "
            "or library; the run goes on, its last bits may differ"
        )


def _position(record: Record) -> Position | None:
    """Where the journal goes on after a checkpoint, if it says so."""
    noted: Any = record.meta.get("journal")
    return None if noted is None else Position(int(noted[0]), str(noted[1]))


def _identity(prepared: Prepared) -> dict[str, Any]:
    """What must be the same for a run to go on, by the name that a person knows it by."""
    job = prepared.job
    return {
        "dataset length": len(job.dataset),
        "batch_size": job.batch_size,
        "microbatch_size": job.microbatch_samples,
        "accumulate_grad_batches": job.accumulate_grad_batches,
        "seed": job.seed,
        "shuffle": job.shuffle,
        "drop_last": job.drop_last,
        "precision": job.precision,
        "optimizer": type(prepared.rule.optimizer).__name__,
        "update rule": prepared.rule.name,
    }


def _restore(prepared: Prepared, record: Record, where: str) -> None:
    fresh = "--resume never starts afresh and sets the old run aside"
    try:
        theirs = Layout.parse(json.dumps(record.meta["layout"]).encode())
        identity: Any = record.meta["identity"]
        cursor: Any = record.meta["cursor"]
        samples = int(cursor["samples"])
    except (KeyError, TypeError, ValueError, MalformedFrame) as error:
        raise CheckpointMismatch(
            where, f"its checkpoint was not written by this version ({error!r}); {fresh}"
        ) from None
    difference = prepared.layout.first_difference(theirs)
    if difference:
        raise CheckpointMismatch(
            where, f"its checkpoint is of another model ({difference}; there: the checkpoint); {fresh}"
        )  # fmt: skip
    for name, value in _identity(prepared).items():
        if identity.get(name) != value:
            raise CheckpointMismatch(
                where,
                f"{name} was {identity.get(name)!r} when its checkpoint was written and is {value!r} now; {fresh}",
            )
    tensors = record.groups["model"]
    for entry, view in zip(prepared.layout.entries, prepared.state.views, strict=True):
        view.copy_(tensors[entry.name])
    ours = _hyperparameters(prepared.rule.optimizer)
    try:
        prepared.rule.load_state_dict(unpack_state(record.meta["rule"], record.groups["rule"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointMismatch(where, f"its optimizer state does not fit the job's ({error}); {fresh}") from error
    for name, value in _hyperparameters(prepared.rule.optimizer).items():
        # What a scheduler moves differs after some steps; what else differs was changed in the job, to no effect.
        if ours.get(name) != value and not (prepared.rule.scheduler and name.endswith(("lr", "momentum", "betas"))):
            prepared.notes.append(f"the checkpoint's optimizer setting {name}={value} counts, not {ours.get(name)}")
    grown: Any = record.meta.get("batch")
    if grown is not None:
        _restore_batch(prepared, grown, where)
    prepared.first_step = prepared.saved_step = record.step
    prepared.samples, prepared.loss = samples, None
    if isinstance(prepared.rule, OuterRule):  # what it was offered since that commit counts too
        prepared.first_step, prepared.samples = len(prepared.rule.done), prepared.rule.samples
    if prepared.schedule is not None:
        prepared.schedule.rows(prepared.first_step, 1)  # from the beginning to here, which may take seconds


def _restore_batch(prepared: Prepared, grown: Any, where: str) -> None:
    """The steps of a run whose batch grows are those that its checkpoint says."""
    growing = prepared.growing
    if growing is not None:
        try:
            growing.load_state_dict(grown)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointMismatch(where, f"its growing batch cannot be taken up: {error}") from error
        prepared.total_steps = growing.total_steps
    elif len(grown["plan"]["stretches"]) > 1:
        now = grown["plan"]["stretches"][-1]["batch_size"]
        raise CheckpointMismatch(
            where, f"its batch has grown to {now} samples; give --target-batch (--target-batch {now}: no further)"
        )


def _hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Every group's settings as text, by ``group N: name``."""
    return {
        f"group {number}: {name}": str(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }


def record_of(prepared: Prepared, step: int, samples: int) -> Record:
    """A consistent copy of everything that a resume needs. Runs between two commits; copies, writes nothing."""
    with torch.no_grad():
        model: dict[str, Tensor] = {
            entry.name: view.detach().clone()
            for entry, view in zip(prepared.layout.entries, prepared.state.views, strict=True)
        }
    skeleton, tensors = pack_state(prepared.rule.state_dict())
    return Record(
        step=step,
        meta={
            "run_id": prepared.run_id,
            "term": prepared.term,
            "cursor": {
                "step": step, "epoch": prepared.steps.epoch_of(step), "samples": samples,
            },
            "batch": None if prepared.growing is None else prepared.growing.state_dict(),
            "identity": _identity(prepared),
            "update": asdict(prepared.update),
            "layout": json.loads(prepared.layout.describe()),
            "rule": skeleton,
        },
        groups={"model": model, "rule": {name: tensor.clone() for name, tensor in tensors.items()}},
    )  # fmt: skip
