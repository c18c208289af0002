"""Taking up a run where it was left: the newest checkpoint, then what the journal has beyond it.

Everything here blocks (it reads disks) and runs in an executor.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w5xde_async.compute.engine import device_name
from w5xde_async.compute.inner import has_memory
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.durability.best import take_up_best
from w5xde_async.coordinator.durability.journal_writer import apply_entry
from w5xde_async.coordinator.run.overrides import changed_in_vain, override
from w5xde_async.coordinator.run.spec import Prepared, ResumePoint, RunFiles, RunSpec, Strategy
from w5xde_async.coordinator.run.strategy import change_strategy
from w5xde_async.coordinator.run.warm_start import would_begin_with
from w5xde_async.coordinator.training import ParametersNotFinite
from w5xde_async.data.stream import Mark, StreamReader
from w5xde_async.errors import CheckpointCorrupt, CheckpointMismatch, MalformedFrame
from w5xde_async.job import parts_of
from w5xde_async.params.flat import ResultVector
from w5xde_async.params.layout import Layout
from w5xde_async.plan.numerics import EXACT
from w5xde_async.store.checkpoint import CheckpointStore, Record
from w5xde_async.store.failpoints import failpoint
from w5xde_async.store.journal import Journal, Position, Replay
from w5xde_async.store.rundir import RunDir
from w5xde_async.store.state import JSON, pack_state, unpack_state
from w5xde_async.telemetry.recorder import recorded
from w5xde_async.telemetry.records import number
from w5xde_async.telemetry.wording import plural
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.outer import OuterRule
from w5xde_async.updates.own_code import HOOKS, forgets, has_hooks
from w5xde_async.updates.sync import SyncRule

_SET_ASIDE = (
    "start with --durability checkpoint to set the journal aside and go on from the newest checkpoint, of step {step}: "
    "all steps after it are computed again"
)
_FROM_0 = (
    "put that back from a copy, or start with --durability checkpoint to set the journal aside and begin at step 0"
)
_HALF_LEFT = "a start that was stopped half-way has left it as {aside}: move that back{beside}, and nothing is lost"


def take_up(fresh: Prepared, directory: RunDir, config: CoordinatorConfig) -> Prepared:
    """The run that lies in ``directory``, or ``fresh`` where nothing lies there. Raises StoreError."""
    spec, strategy, point = replace(fresh.spec, run_id=directory.run_id), fresh.strategy, fresh.resume
    notes = list(point.notes)
    if directory.set_aside is not None:
        notes.append(f"the run that was here lies in {directory.set_aside} now")
    store = CheckpointStore(
        directory.checkpoints_path, keep=config.keep_checkpoints, filesystem=directory.filesystem,
        run_id=directory.run_id, asked_for=None if config.resume in ("auto", "never") else Path(config.resume),
    )  # fmt: skip
    record, num_skipped = _find(store, directory, config, notes)
    if record is not None and record.meta.get("run_id") == directory.run_id:
        term = record.meta.get("term")
        directory.not_before(term if isinstance(term, int) else 0)
    # The bucket size is in the layout's own fingerprint; it may change from start to start.
    entries = json.dumps(json.loads(spec.layout.describe())["entries"]).encode()
    fingerprint = hashlib.blake2b(entries, digest_size=16).hexdigest()
    journal = Journal(
        directory.journal_path, run_id=directory.run_id, fingerprint=fingerprint, filesystem=directory.filesystem
    )  # fmt: skip
    if record is not None:
        known: Any = record.meta.get("update")
        if config.auto and known is not None and known["rule"] != strategy.update.rule:
            strategy = change_strategy(spec, config, strategy, UpdateConfig(**known), 0, 0)
        point = _restore(spec, strategy, record, directory, notes, again=journal.exists, override=config.override)
    point, replay, unused = _replay(spec, strategy, point, record, journal, store, directory, config, notes)
    past: Any = [] if record is None else record.meta.get("overrides", [])
    spec = replace(spec, overrides=tuple([(int(step), str(told)) for step, told in past]))
    if record is not None:
        spec = replace(spec, settings=_began_with(record, spec))
    (spec, _, _), changed = overridden(Prepared(spec, strategy, point), config, notes)
    # Only now is the disk changed, as nothing is refused any more; and in this order, as the next start takes up what a
    # kill leaves of it: without its journal it does not go on, and no course has the best of another.
    if unused:
        what = "the journal is damaged and" if record is not None and config.resume == "auto" else "the journal"
        notes.append(f"{what} was set aside in {journal.set_aside()}: {unused}")
    first = point.step
    if spec.job.keep_best is not None:
        chosen = None if config.resume == "auto" else first
        point = replace(point, best=take_up_best(spec.job.keep_best, directory, chosen, notes))
    if record is not None:
        if config.resume != "auto":
            notes.append(
                f"the run goes on from {config.resume}; without --resume the next start goes on from what follows, "
                "with it from there again"
            )
        if (other := record.meta.get("run_id")) not in (None, directory.run_id):
            notes.append(f"its checkpoint was written by run {other}; from here on it is run {directory.run_id}")
        if num_skipped:
            notes.append(f"the run goes on from the checkpoint of step {record.step}, the newest whole one of this run")
        notes.extend(f"a later checkpoint was set aside as {path}" for path in store.abandon_after(record.step))
        if 0 < point.step < spec.total_steps:
            notes.extend(_forgotten(strategy, [] if record is None else record.beside))
    journalled = config.durability == "journal"
    total_steps = spec.total_steps if spec.growing is None else spec.growing.total_steps
    told, finished, loss = recorded(directory.metrics_path, first)
    point = replace(point, finished=finished, loss=loss if point.loss is None else point.loss)
    if told > first and journalled and replay is not None:
        notes.append(f"the journal ends with step {first}, though step {told} had been committed")
    elif told > first:
        again = (
            "they are done again" if first < total_steps else "what they made is gone, and the run is to go no further"
        )
        notes.append(f"steps {first + 1} to {told}, at least, were done before; {again}")
    state = KeptState(spec, strategy)
    # A checkpoint that names a place in a journal is refused where that journal is missing: the next start must find
    # another first.
    named = record is not None and _position(record.meta) is not None and (replay is None or not journalled)
    # One that lies elsewhere, is another run's, or has been saved anew by an earlier start that went on from it, is not
    # taken by the next start: it would go another course, or none.
    elsewhere = (
        record is not None and config.resume != "auto"
        and (not store.ends_with(Path(config.resume)) or record.meta.get("run_id") not in (None, directory.run_id))
    )  # fmt: skip
    # What this start alone was told, the next one would not know after a kill before the next checkpoint: it would go
    # on, or replay, without what --override changed, or begin with other weights.
    told_now = changed or (record is None and config.init_from is not None)
    # What is replayed later must stand on something that can be compared with the job.
    stands = record is not None or not journalled
    if named or elsewhere or told_now or not stands or (not journalled and journal.exists and first > point.saved_step):
        store.save(state.record(first, point.samples))
        point = replace(point, saved_step=first)
    if journalled:
        journal.begin(first, directory.term + 1, replay)
    elif journal.exists:
        journal.remove()
    files = RunFiles(directory=directory, checkpoints=store, journal=journal if journalled else None)
    try:
        # The term last: a term that is stored has its segment of the journal.
        spec = replace(spec, files=files, total_steps=total_steps, term=directory.next_term())
    except BaseException:
        files.close()
        raise
    return Prepared(spec, strategy, replace(point, notes=tuple(notes)))


def overridden(prepared: Prepared, config: CoordinatorConfig, notes: list[str] | None = None) -> tuple[Prepared, bool]:
    """With the settings that --override changes, and whether it has changed any. Raises UsageError."""
    spec, strategy, point = prepared
    if config.override is None:
        return prepared, False
    told = override(config.override, strategy.rule.optimizer, strategy.rule.scheduler)
    said = [f"from step {point.step} on {change}" for change in told]
    if notes is None:
        point = replace(point, notes=(*point.notes, *said))
    else:
        notes.extend(said)
    spec = replace(spec, overrides=(*spec.overrides, *((point.step, change) for change in told)))
    return Prepared(spec, strategy, point), bool(told)


def _find(
    store: CheckpointStore, directory: RunDir, config: CoordinatorConfig, notes: list[str]
) -> tuple[Record | None, int]:
    """The checkpoint to go on from, and how many newer ones were passed over."""
    if config.resume == "never":
        return None, 0
    if config.resume != "auto":
        return store.load(Path(config.resume)), 0
    record, skipped = store.latest()
    notes.extend(f"checkpoint {passed.path} was passed over: {passed.reason}" for passed in skipped)
    others = [passed for passed in skipped if passed.run_id]
    own = [passed for passed in skipped if not passed.run_id]
    if record is None and others and not own:
        raise CheckpointMismatch(
            str(directory.identity_path),
            f"it is of run {directory.run_id}, and the checkpoints are of run {others[0].run_id}: put run.json of that "
            "run back from a copy; or, where it is the checkpoints that do not belong here, move them away, or go on "
            f"from one with --resume {others[0].path}",
        )
    if record is None and own:
        beside = f"; {others[0].path} is of run {others[0].run_id}" if others else ""
        raise CheckpointMismatch(
            str(directory.checkpoints_path),
            f"none of the {len(own)} checkpoints is whole ({own[0].reason}); "
            f"--resume never starts afresh and sets them aside{beside}",
        )
    return record, len(skipped)


def _half_left(journal: Journal, store: CheckpointStore, record: Record | None, directory: RunDir) -> str:
    """What to move back where a start has set a journal aside and did no more; empty where that is not what was."""
    aside = journal.left_aside(directory.term)
    if aside is None:
        return ""
    if record is not None and journal.leads_on(aside, record.step, _position(record.meta)):
        return _HALF_LEFT.format(aside=aside, beside="")
    for step, lies, name in store.abandoned():  # what it goes on from was set aside with it
        meta = store.meta(lies)
        if meta.get("run_id") == directory.run_id and journal.leads_on(aside, step, _position(meta)):
            return _HALF_LEFT.format(aside=aside, beside=f", and {lies} as {name}")
    return ""


def _replay(
    spec: RunSpec, strategy: Strategy, point: ResumePoint, record: Record | None, journal: Journal,
    store: CheckpointStore, directory: RunDir, config: CoordinatorConfig, notes: list[str],
) -> tuple[ResumePoint, Replay | None, str]:  # fmt: skip
    """Apply what the journal has beyond ``record``, the checkpoint that is resumed, and why a journal that is there is
    not gone on with. Changes nothing on the disk. Raises CheckpointCorrupt."""
    position = None if record is None else _position(record.meta)
    if config.resume != "auto" or not (journal.exists or (position and config.durability == "journal")):
        return point, None, "it leads on to another course of the run" if journal.exists else ""
    replay = Replay(point.step)
    try:
        if record is None:
            raise CheckpointCorrupt(str(directory.journal_path), "there is a journal but no checkpoint to begin at")
        if journal.newest_term < directory.term:
            newest = (
                f"its newest segment is of term {journal.newest_term}" if journal.newest_term else "it has no segment"
            )
            reason = f"{newest}, the last start was term {directory.term}"
            raise CheckpointCorrupt(str(directory.journal_path), f"{reason}: segments are missing")
        directory.not_before(journal.newest_term)
        point = _apply_all(spec, strategy, point, journal, position, replay, notes)
    except CheckpointCorrupt as error:
        if config.durability == "journal":
            advice = _FROM_0
            if record is not None:
                advice = _SET_ASIDE.format(step=record.step)
                if replay.step > record.step:
                    advice = f"before that, the steps up to {replay.step} are whole; {advice}"
            if half_left := _half_left(journal, store, record, directory):
                advice = f"{half_left}; or {advice}"
            raise CheckpointCorrupt(error.path, f"{error.reason}; {advice}") from error
        if record is not None:
            point = _restore(spec, strategy, record, directory, [])  # what they say has been said
        return point, None, f"{error}; the steps after {point.step} are computed again"
    failpoint("replay.after")
    return point, replay, ""


def _apply_all(
    spec: RunSpec, strategy: Strategy, point: ResumePoint, journal: Journal, position: Position | None, replay: Replay,
    notes: list[str],
) -> ResumePoint:  # fmt: skip
    began, base, rule = time.perf_counter(), point.step, strategy.rule
    vector = ResultVector(spec.layout)
    assert isinstance(rule, SyncRule), "a journal is kept of no other rule"
    lines: list[Mapping[str, object]] = []
    differ, samples, loss = 0, point.samples, point.loss
    for entry in journal.read(base, position, replay):
        done = apply_entry(entry, spec.layout, rule, vector)
        differ += not done.same
        lines.append(done.line)
        spec.bad.restore(done.bad_samples)
        spec.numerics.restore(done.numerics, done.devices)
        spec.counted.restore(done.counted, entry.step)
        samples, of_step = done.samples_applied, number(done.line.get("loss"))
        if loss is None or math.isfinite(of_step):  # as ``Phase.committed``
            loss = of_step
    if replay.step > base:
        seconds = time.perf_counter() - began
        notes.append(f"{replay.step - base} steps after step {base} came from the journal, in {seconds:.1f} s")
    if replay.torn_bytes:
        notes.append(
            f"the journal ends in {replay.torn_bytes} bytes that are no whole step (it was being written, or they have "
            "been damaged); they are dropped"
        )
    if replay.gap is not None:
        after, until = replay.gap.after, replay.gap.until
        steps, are = (f"step {until}", "is") if until == after + 1 else (f"steps {after + 1} to {until}", "are")
        notes.append(f"{steps} {are} not in the journal (the disk failed) and {are} computed again")
    if differ:
        notes.append(
            f"{differ} of the replayed steps have another gradient norm than at first: another machine, thread count "
            "or library; the run goes on, its last bits may differ"
        )
    return replace(point, step=replay.step, samples=samples, loss=loss, replayed=tuple(lines))


def _position(meta: Mapping[str, JSON]) -> Position | None:
    """Where the journal goes on after a checkpoint, if it says so."""
    noted: Any = meta.get("journal")
    return None if noted is None else Position(int(noted[0]), str(noted[1]))


def _identity(spec: RunSpec, strategy: Strategy) -> dict[str, Any]:
    """What must be the same for a run to go on, by the name that a person knows it by."""
    job = spec.job
    return {
        "dataset length": job.num_samples if job.streamed else spec.sampler.num_samples,  # as the run goes by it
        "batch_size": job.batch_size,
        "accumulate_grad_batches": job.accumulate_grad_batches,  # before what may follow from it
        "microbatch_size": job.microbatch_samples,
        "seed": job.seed,
        "shuffle": job.shuffle,
        "drop_last": job.drop_last,
        "precision": job.precision,
        **({"shuffle_buffer": job.shuffle_buffer} if job.streamed and job.shuffle else {}),
        "optimizer": type(strategy.rule.optimizer).__name__,
        "update rule": strategy.rule.name,
    }


def _stepped(spec: RunSpec, strategy: Strategy) -> list[str]:
    """What tells, for each of the optimizer's groups, its parameters and their order: by it their state is kept."""
    on_device = strategy.rule.on_device if isinstance(strategy.rule, SyncRule) else None
    models = [spec.model, *(() if on_device is None else (on_device.model,))]
    names = {id(parameter): name for model in models for name, parameter in model.named_parameters()}
    listed = [
        "\n".join(names.get(id(parameter), str(tuple(parameter.shape))) for parameter in group["params"])
        for group in strategy.rule.optimizer.param_groups
    ]
    return [hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in listed]


def _classes(scheduler: Any) -> str:
    return "none" if scheduler is None else ", ".join(type(part).__name__ for part in parts_of(scheduler))


def _restore(
    spec: RunSpec, strategy: Strategy, record: Record, directory: RunDir, notes: list[str], *, again: bool = False,
    override: str | None = None,
) -> ResumePoint:  # fmt: skip
    """Give parameters, optimizer and growing batch the state of ``record``. Raises CheckpointMismatch.

    ``again``: it may have to be restored once more. Otherwise its tensors become the optimizer's, which writes them.
    ``override``: what --override says of settings; whether the job has others now is no news.
    """
    where, rule = str(directory.path), strategy.rule
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
    difference, ours = spec.layout.first_difference(theirs), _identity(spec, strategy)
    changed = next((name for name, value in ours.items() if identity.get(name) != value), "")
    if difference or changed:
        other = (
            f"{changed} was {identity.get(changed)!r} when its checkpoint was written and is {ours.get(changed)!r} now"
        )
        if difference:
            other = f"its checkpoint is of another model ({difference}; there: the checkpoint)"
        begins = f"; a run in another --run-dir begins with its weights by --init-from {directory.model_path}"
        would = directory.model_path.is_file() and would_begin_with(spec.layout, theirs)
        raise CheckpointMismatch(where, f"{other}; {fresh}{begins if would else ''}")
    stepped = _stepped(spec, strategy)
    their_groups: Any = record.meta.get("stepped", stepped)  # older ones lack it
    if len(their_groups) != len(stepped):
        raise CheckpointMismatch(
            where,
            f"the optimizer had {plural(len(their_groups), 'group')} when its checkpoint was written and has "
            f"{len(stepped)} now: what it keeps of one parameter would be taken for another's. The job is to make all "
            f"groups, those too that a hook adds later; {fresh}",
        )
    for group, (now, then) in enumerate(zip(stepped, their_groups, strict=True)):
        if now != then:
            raise CheckpointMismatch(
                where,
                f"the parameters of the optimizer's group {group}, or their order, are others than when its checkpoint "
                f"was written: what the optimizer keeps of one would be taken for another's; {fresh}",
            )
    past: Any = record.meta.get("numerics", [])
    devices: Any = record.meta.get("devices", [])
    spec.numerics.begin_from(past, devices)
    if set(past) - {EXACT}:
        notes.append(f"results so far were computed in these ways: {', '.join(spec.numerics.past)} (docs/islands.md)")
    before, now = str(record.meta.get("updated_on", "cpu")), _updated_on(strategy)
    if before != now:
        notes.append(f"updates were made on {before} so far and are made on {now} now: the run's last bits may differ")
    counted: Any = record.meta.get("counted", [])
    spec.counted.clear()  # what a journal has said, which is set aside, is undone
    spec.counted.restore(counted, 0)
    bad: Any = record.meta.get("bad_samples", [])
    spec.bad.restore(map(int, bad))
    if spec.stream is not None:
        try:
            spec.stream.restore(Mark.of_json(record.meta["stream"]))  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointMismatch(
                where, f"its place in the stream cannot be taken up ({error!r}); {fresh}"
            ) from None
    tensors = record.groups["model"]
    for entry, view in zip(spec.layout.entries, spec.state.views, strict=True):
        view.copy_(tensors[entry.name])
    classes = _classes(rule.scheduler), record.meta.get("scheduler", _classes(rule.scheduler))  # older ones lack it
    if classes[0] != classes[1]:
        notes.append(
            f"the scheduler was {classes[1]} and is {classes[0]} now: it goes on from the rates and the count of "
            "steps that the other left; --init-from begins a run with another"
        )
    try:
        held = record.groups["rule"]
        own = {name: tensor.clone() for name, tensor in held.items()} if again else held
        rule.load_state_dict(unpack_state(record.meta["rule"], own))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointMismatch(where, f"the state of its update rule does not fit ({error}); {fresh}") from error
    notes.extend(
        changed_in_vain(
            rule.optimizer, rule.scheduler, now=spec.settings, began=_began_with(record, spec), told=override or ""
        )
    )
    grown: Any = record.meta.get("batch")
    if grown is not None:
        _restore_batch(spec, grown, where)
    step = record.step
    if isinstance(rule, OuterRule):  # what it was offered since that commit counts too
        step, samples = len(rule.done), rule.samples
    if strategy.schedule is not None:
        # From the beginning to here, which may take seconds; the last step's successor may have no rate.
        strategy.schedule.rows(max(0, min(step, spec.total_steps - 1)), 1)
    return ResumePoint(step=step, samples=samples, saved_step=record.step)


def _forgotten(strategy: Strategy, beside: Sequence[str]) -> list[str]:
    """What a checkpoint does not hold: what hooks keep, attributes of the optimizer (``beside``), and the state of
    optimizers that workers run, each its own."""
    schedule, optimizer = strategy.schedule, strategy.rule.optimizer
    scheduler = getattr(strategy.rule, "scheduler", None)
    has = ["the optimizer has step hooks"] if has_hooks(optimizer) else []
    for what, made in (("optimizer", optimizer), *(("scheduler", part) for part in parts_of(scheduler))):
        if made is not None and (names := [name for name in forgets(made) if name not in HOOKS]):
            has.append(f"the {what} has functions ({', '.join(names)[:100]}) that do more than compute")
    if beside:
        has.append(f"the optimizer changes attributes of its own ({', '.join(beside)[:200]}) with its steps")
    notes = []
    if has:
        notes.append(
            f"{'; '.join(has)}: what they keep themselves, a count or an average, begins anew; parameters, buffers and "
            "the state of optimizer and scheduler are as they were"
        )
    if schedule is None or not has_memory(optimizer, schedule.scheduled):
        return notes
    return [
        *notes,
        f"the workers' inner optimizer ({type(optimizer).__name__}) begins without the state it had: under "
        f"--update {strategy.update.rule} it lies in the workers and in no checkpoint (docs/resume.md)",
    ]


def _updated_on(strategy: Strategy) -> str:
    """Where its optimizer steps."""
    on_device = strategy.rule.on_device if isinstance(strategy.rule, SyncRule) else None
    return "cpu" if on_device is None else device_name(on_device.device)


def _restore_batch(spec: RunSpec, grown: Any, where: str) -> None:
    """The steps of a run whose batch grows are those that its checkpoint says."""
    if spec.growing is not None:
        try:
            spec.growing.load_state_dict(grown)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointMismatch(where, f"its growing batch cannot be taken up: {error}") from error
    elif len(grown["plan"]["stretches"]) > 1:
        now = grown["plan"]["stretches"][-1]["batch_size"]
        raise CheckpointMismatch(
            where, f"its batch has grown to {now} samples; give --target-batch (--target-batch {now}: no further)"
        )


def _began_with(record: Record, spec: RunSpec) -> Mapping[str, str]:
    """The job's settings when the run began; older checkpoints lack them."""
    began: Any = record.meta.get("settings", spec.settings)
    return {str(name): str(value) for name, value in began.items()}


@dataclass(frozen=True, slots=True)
class KeptState:
    """What of a run is kept in a checkpoint (``durability.checkpointing.RunState``)."""

    spec: RunSpec
    strategy: Strategy

    @property
    def version(self) -> int:
        """Of a rule whose versions are not its steps: fragments that stream have some without a step of their own."""
        rule = self.strategy.rule
        return rule.version if isinstance(rule, OuterRule) else 0

    def record(self, step: int, samples: int) -> Record:
        """A consistent copy of everything that a resume needs. Runs between two commits; copies, writes nothing.

        Raises ParametersNotFinite where an update has made them so: what was kept before is worth more.
        """
        spec = self.spec
        if spec.begins_finite and not spec.state.trains_finite:
            raise ParametersNotFinite(step)
        with torch.no_grad():
            model: dict[str, Tensor] = {
                entry.name: view.detach().clone()
                for entry, view in zip(spec.layout.entries, spec.state.views, strict=True)
            }
        skeleton, tensors = pack_state(self.strategy.rule.state_dict())
        return Record(
            step=step,
            meta={
                "run_id": spec.run_id,
                "term": spec.term,
                "cursor": {"step": step, "epoch": spec.steps.epoch_of(step), "samples": samples},
                "batch": None if spec.growing is None else spec.growing.state_dict(),
                "identity": _identity(spec, self.strategy),
                "step_flops": spec.step_flops,
                "stepped": [*_stepped(spec, self.strategy)],
                "scheduler": _classes(self.strategy.rule.scheduler),
                "settings": dict(spec.settings),
                "update": asdict(self.strategy.update),
                "layout": json.loads(spec.layout.describe()),
                "rule": skeleton,
                "numerics": list(spec.numerics.past),
                "devices": list(spec.numerics.devices),
                **({} if (place := _updated_on(self.strategy)) == "cpu" else {"updated_on": place}),
                **({} if spec.stream is None else {"stream": self._mark(spec.stream, step)}),
                **({"bad_samples": [*bad]} if (bad := spec.bad.all()) else {}),
                **({"counted": counted} if (counted := self._counted(step)) else {}),
                **({"beside": [*beside]} if (beside := self.strategy.rule.kept_beside()) else {}),
                **({"overrides": [list(one) for one in spec.overrides]} if spec.overrides else {}),
            },
            groups={"model": model, "rule": {name: tensor.clone() for name, tensor in tensors.items()}},
        )

    def _counted(self, step: int) -> list[JSON]:
        """Leases that are in it. Other rules count what has come for their next version, too, and keep that."""
        last = step if isinstance(self.strategy.rule, SyncRule) else sys.maxsize
        return [[*one] for one in self.spec.counted.records(0, last)]

    def _mark(self, stream: StreamReader, step: int) -> dict[str, JSON]:
        """Where the stream is read from after a resume: all that is not done lies behind it."""
        rule = self.strategy.rule
        first = rule.done.floor if isinstance(rule, OuterRule) else step
        place = int(self.spec.steps.plan(first).indices[0])
        stream.forget_before(place)
        return stream.mark(place).as_json()
