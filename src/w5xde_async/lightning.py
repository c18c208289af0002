"""From a LightningModule and its data to a Job: the same model, data, loss, optimizer, schedule, evaluation and seed.

What Lightning's Trainer does besides (its loop, devices, checkpoints, logs) the coordinator and its workers do in their
own way. What would change the result and cannot be taken over is refused by name; the rest is said in one warning.
Nothing of Lightning is imported: ``lightning`` and ``pytorch_lightning`` will both do.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from w5xde_async.errors import JobError
from w5xde_async.job import Job, Precision, of_whole_microbatches

_PRECISIONS: dict[str, Precision] = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
#: Callbacks that show or save; every other one may change the training.
_REPORTERS = {
    "Checkpoint", "DeviceStatsMonitor", "LearningRateMonitor", "ModelSummary", "ProgressBar", "ThroughputMonitor",
}  # fmt: skip
#: Methods that change batches, gradients or the update; no worker and no coordinator calls them.
_DECIDING = (
    "on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device", "on_train_batch_start",
    "on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping",
    "optimizer_step", "on_before_zero_grad", "optimizer_zero_grad", "lr_scheduler_step", "configure_callbacks",
)  # fmt: skip
#: Methods that mostly log.
_TELLING = (
    "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_train_batch_end", "on_save_checkpoint", "on_load_checkpoint", "teardown",
)  # fmt: skip
#: Of the trainer, what is the same for the whole run.
_LASTING = (
    "estimated_stepping_batches", "num_training_batches", "max_epochs", "min_epochs", "max_steps", "min_steps",
    "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision", "world_size", "num_devices",
    "num_nodes", "datamodule",
)  # fmt: skip
#: Methods that make the model and its data what they are, called once for the whole run.
_MAKING = ("prepare_data", "setup", "configure_model", "teardown")


def job_of(
    trainer: Any, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, datamodule: Any = None
) -> Job:
    """The job that ``trainer.fit`` would do, with the same arguments. The coordinator trains ``model``, in place.

    A step has ``accumulate_grad_batches`` batches of the training DataLoader, of which each is a microbatch. Raises
    JobError for what cannot be taken over.
    """
    for given, has, wanted in ((trainer, "fit", "Trainer"), (model, "training_step", "LightningModule")):
        _need(hasattr(given, has), "lightning.job_of", f"it is given a {type(given).__name__}", f"give a {wanted}")
    compiled = isinstance(inner := getattr(model, "_orig_mod", None), nn.Module)
    if compiled:  # which has none of the module's own methods to see
        model = inner
    if hasattr(train_dataloaders, "train_dataloader"):  # as fit takes one
        train_dataloaders, datamodule = None, train_dataloaders
    data = datamodule if datamodule is not None else model
    _refuse(trainer, model, data)
    asked = _Asked(trainer, datamodule)
    with _attached(asked, model, data):
        for part in {id(part): part for part in (data, model)}.values():
            part.prepare_data()
            part.setup("fit")
        model.configure_model()
        loader = data.train_dataloader() if train_dataloaders is None else train_dataloaders
        held_out = val_dataloaders
        if held_out is None and _own(data, "val_dataloader"):
            held_out = data.val_dataloader()
    _refuse_loader(loader)
    batch_size = loader.batch_size * trainer.accumulate_grad_batches
    dataset, drop_last = loader.dataset, False
    if loader.drop_last:
        dataset, drop_last = of_whole_microbatches(dataset, loader.batch_size, batch_size, option="drop_last")
    samples = len(dataset) if hasattr(dataset, "__len__") else None
    evaluates = bool(held_out is not None and trainer.limit_val_batches and _own(model, "validation_step"))
    if samples is None:
        _refuse_epochs(trainer, evaluates)
    a_step = math.floor if drop_last else math.ceil
    epoch_steps = None if samples is None else a_step(samples / batch_size)
    ends = [epoch_steps * trainer.max_epochs] if epoch_steps and (trainer.max_epochs or -1) > 0 else []
    ends += [trainer.max_steps] if trainer.max_steps > 0 else []
    asked.estimated_stepping_batches = min(ends, default=math.inf)
    asked.num_training_batches = math.inf if samples is None else len(loader)
    lasting = _for_schedules(asked)

    def optimizer(model: Any) -> torch.optim.Optimizer:
        with _attached(asked, model):
            made, schedule = _configured(model, epoch_steps)
        if schedule is not None:
            _attach_in_step(schedule, lasting, model)
        made.schedule = schedule  # type: ignore[attr-defined]  # configure_optimizers makes both at once
        return made

    with _attached(asked, model):
        _, schedule = _configured(model, epoch_steps)
    job = Job(
        model=model.cpu(),
        dataset=dataset,
        collate=loader.collate_fn,
        optimizer=optimizer,
        scheduler=None if schedule is None else lambda optimizer: vars(optimizer).pop("schedule"),
        step=_step(frozenset(name for name, module in model.named_modules() if not module.training)),
        batch_size=batch_size,
        microbatch_size=loader.batch_size,
        max_steps=min(ends, default=None),
        gradient_clip_val=max(trainer.gradient_clip_val or 0.0, 0.0) or None,
        precision=_PRECISIONS[trainer.precision],
        seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),  # as seed_everything leaves it
        shuffle=isinstance(loader.sampler, RandomSampler),  # no stream has one
        drop_last=drop_last,
        evaluate=_evaluate(trainer, held_out, datamodule) if evaluates else None,
        evaluate_every=_every(trainer, loader, epoch_steps) if evaluates else None,
        keep_best=next(iter(_bests(trainer)), None) if evaluates else None,
    )
    left = _left(trainer, model, loader, job)
    if compiled:
        left.append("torch.compile: start workers with --compile")
    if left:
        warnings.warn(f"of Lightning not taken over: {'; '.join(left)}", stacklevel=2)
    return job


def _need(holds: Any, what: str, reason: str, hint: str) -> None:
    if not holds:
        raise JobError(f"of a {what}", reason, hint)


def _refuse(trainer: Any, model: Any, data: Any) -> None:
    def need(holds: Any, reason: str, hint: str) -> None:
        _need(holds, "Trainer", reason, hint)

    hint = "optimize in training_step's return value: one loss, one optimizer"
    _need(model.automatic_optimization, "LightningModule", "it optimizes by hand (automatic_optimization)", hint)
    takes_all = "dataloader_iter" in inspect.signature(model.training_step).parameters
    hint = "take one batch"
    _need(not takes_all, "LightningModule", "its training_step takes batches by itself (dataloader_iter)", hint)
    for part in (model, data):
        for name in _DECIDING:
            hint = "do it in training_step, in the dataset or in its collate_fn"
            _need(not _own(part, name), type(part).__name__, f"its {name} would be called by nobody", hint)
    for one in trainer.callbacks:
        name = type(one).__name__
        hint = "leave it out; for one that stops or watches, give the job stop_when, or subscribe to a Bus"
        need({kind.__name__ for kind in type(one).__mro__} & _REPORTERS, f"callback {name} is called by nobody", hint)
    devices = trainer.num_devices * trainer.num_nodes
    need(devices == 1, f"it has {devices} devices", "give devices=1; each worker takes a device of its own")
    need(trainer.precision in _PRECISIONS, f"precision is {trainer.precision}", f"give one of {', '.join(_PRECISIONS)}")
    by_value = getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm) == "value"
    need(not by_value, "gradient_clip_algorithm is value", "clip by norm")
    for name in ("max_steps", "max_epochs"):  # whichever comes first ends it
        need(getattr(trainer, name) != 0, f"{name} is 0: it trains nothing", "give a number, or -1 for no limit")
    hint = "give the dataset that is meant: torch.utils.data.Subset"
    for name, whole in (("overfit_batches", 0.0), ("limit_train_batches", 1.0)):
        given = getattr(trainer, name)
        need(type(given) is float and given == whole, f"{name} is {given}", hint)
    need(hasattr(trainer, "val_check_interval"), "val_check_interval is a time", "give it in batches or in epochs")
    reloads = trainer.reload_dataloaders_every_n_epochs
    need(not reloads, "reload_dataloaders_every_n_epochs is given", "a run has one dataset")


def _refuse_loader(loader: Any) -> None:
    def need(holds: bool, reason: str, hint: str) -> None:
        _need(holds, "train_dataloader", reason, hint)

    need(isinstance(loader, DataLoader), f"is a {type(loader).__name__}", "give one DataLoader of torch")
    need(loader.batch_size is not None, "has no batches: batch_size is None", "give batch_size")
    if isinstance(loader.dataset, IterableDataset):
        return
    hint = "give batch_size, and shuffle or not; for some of the samples the dataset torch.utils.data.Subset"
    sampler, batches = loader.sampler, loader.batch_sampler
    own = type(batches) is not BatchSampler or type(sampler) not in (RandomSampler, SequentialSampler)
    drawn = getattr(sampler, "replacement", False) or (not own and len(sampler) != len(loader.dataset))
    kind = type(sampler if batches else batches).__name__
    need(not own and not drawn, f"chooses samples by its own {kind}", hint)


def _refuse_epochs(trainer: Any, evaluates: bool) -> None:
    """What goes by epochs is refused: the stream does not say how long one is."""
    unseen, every = "and its stream has no len()", trainer.val_check_interval
    epochs = trainer.max_epochs
    _need((epochs or -1) < 0, "Trainer", f"max_epochs is {epochs}, {unseen}", "give max_steps, and max_epochs=-1")
    hint = "give a number of batches, and check_val_every_n_epoch=None"
    _need(isinstance(every, int) or not evaluates, "Trainer", f"val_check_interval is {every}, {unseen}", hint)


def _left(trainer: Any, model: Any, loader: Any, job: Job) -> list[str]:
    """What the job leaves out that somebody may have counted on."""
    left = [f"{name} of {type(model).__name__}: called by nobody" for name in _TELLING if _own(model, name)]
    if job.shuffle and job.num_samples and (cut := len(loader.dataset) - job.num_samples):
        left.append(
            f"the samples that drop_last drops: of {len(loader.dataset)} samples no epoch has the last {cut}, and in "
            f"Lightning each epoch leaves out {cut} others"
        )
    rest = 0 if job.drop_last else (job.num_samples or 0) % job.batch_size
    if rest and trainer.accumulate_grad_batches > 1:
        batches = math.ceil(rest / loader.batch_size)
        left.append(
            f"the weight of an epoch's last step: Lightning adds the gradients of its {batches} batches and divides "
            f"them by accumulate_grad_batches={trainer.accumulate_grad_batches}; here its gradient is the mean over "
            f"its {rest} samples"
        )
    if job.num_samples is None:
        left.append(
            "the ends of epochs: the stream has no len(), and a step may hold the end of one epoch and the beginning "
            "of the next"
        )
    between = _batches_between(trainer, loader) if job.evaluate else 0
    if between and (epochs := trainer.check_val_every_n_epoch or 1) > 1:
        left.append(f"check_val_every_n_epoch={epochs}: with a val_check_interval evaluated is in every epoch")
    if between % trainer.accumulate_grad_batches:
        left.append(
            f"a val_check_interval of {between} batches, which are no whole number of steps: evaluated is every "
            f"{job.evaluate_every} steps of {trainer.accumulate_grad_batches} batches"
        )
    if others := [one.partition(":")[2] for one in _bests(trainer) if one != job.keep_best]:
        why = "a run keeps the best of one metric" if job.evaluate else "there is no validation to go by"
        left.append(f"a ModelCheckpoint of {', '.join(others)}: {why}")
    if trainer.accumulate_grad_batches == 1:
        left.append(
            "several devices: with accumulate_grad_batches=1 a step is one microbatch, which one worker computes while "
            "the others wait; divide the DataLoader's batch_size by 4, say, and accumulate 4"
        )
    return left


def _own(part: Any, name: str) -> bool:
    """Whether a class of the user's defines a method that Lightning's classes have too."""
    base = next(
        (kind for kind in type(part).__mro__ if kind.__name__ in ("LightningModule", "LightningDataModule")), None
    )
    return getattr(type(part), name, None) is not getattr(base, name, None)


class _Asked:
    """The trainer as ``setup`` and ``configure_optimizers`` may ask it; it knows the numbers of steps and batches."""

    estimated_stepping_batches: float
    num_training_batches: float

    def __init__(self, trainer: Any, datamodule: Any) -> None:
        self._trainer, self.datamodule = trainer, datamodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


class _Known:
    """The trainer where there is none: what is not among ``known`` fails, by name."""

    def __init__(self, reason: str, hint: str, known: Mapping[str, Any]) -> None:
        vars(self).update(known)
        self._reason, self._hint = reason, hint

    def __getattr__(self, name: str) -> Any:
        raise JobError("of a LightningModule", self._reason.format(name=name), self._hint)


def _for_workers() -> _Known:
    reason = "training_step asks for trainer.{name}, which no worker knows"
    return _Known(reason, "compute it from the batch, or keep it in a buffer", {})


def _for_schedules(asked: _Asked) -> _Known:
    reason = "its schedule asks for trainer.{name}, which is not known while it is stepped"
    hint = (
        "go by the number of the step or epoch that a schedule is given, or read it in configure_optimizers; known are "
        f"{', '.join(_LASTING)}"
    )
    return _Known(reason, hint, {name: getattr(asked, name) for name in _LASTING})


@contextmanager
def _attached(trainer: Any, *parts: Any) -> Iterator[None]:
    before = [vars(part).get("_trainer", vars(part).get("trainer")) for part in parts]  # of a module, of its data
    for part in parts:
        part.trainer = trainer
    try:
        yield
    finally:
        for part, had in zip(parts, before, strict=True):
            part.trainer = had


def _configured(model: Any, epoch_steps: int | None) -> tuple[torch.optim.Optimizer, Any]:
    """Of ``configure_optimizers``: the optimizer, and the schedule as it is stepped once a step, or None."""
    found, schedules = model.configure_optimizers(), []

    def need(holds: Any, reason: str, hint: str) -> None:
        _need(holds, "LightningModule", f"configure_optimizers gives {reason}", hint)

    if isinstance(found, (list, tuple)) and len(found) == 2 and isinstance(found[0], (list, tuple)):
        optimizers, schedules = found
    else:
        optimizers = list(found) if isinstance(found, (list, tuple)) else [found]
    need(len(optimizers) == 1, f"{len(optimizers)} optimizers", "give one, with several groups of parameters")
    optimizer = optimizers[0]
    schedules = list(schedules) if isinstance(schedules, (list, tuple)) else [schedules]
    if isinstance(optimizer, Mapping):
        schedules += [optimizer["lr_scheduler"]] if "lr_scheduler" in optimizer else []
        optimizer = optimizer["optimizer"]
    need(isinstance(optimizer, torch.optim.Optimizer), f"{type(optimizer).__name__}", "give a torch.optim.Optimizer")
    need(len(schedules) <= 1, f"{len(schedules)} schedules", "give one: torch.optim.lr_scheduler.ChainedScheduler")
    if not schedules:
        return optimizer, None
    given = schedules[0] if isinstance(schedules[0], Mapping) else {"scheduler": schedules[0]}
    schedule, every = given["scheduler"], given.get("frequency", 1)
    # One whose class has ``__slots__`` alone can be neither attached to nor put back to where it was.
    own = hasattr(schedule, "__dict__")
    need(own, f"a {type(schedule).__name__} as schedule", "give a torch.optim.lr_scheduler.LRScheduler")
    hint = "use a schedule of the step number"
    need(not isinstance(schedule, ReduceLROnPlateau), "ReduceLROnPlateau, which needs a metric", hint)
    if given.get("interval", "epoch") == "step":
        need(every == 1, f"a schedule with frequency {every} of steps", "use a schedule of the step number")
        return optimizer, schedule
    need(epoch_steps is not None, "a schedule of epochs, and the stream has no len()", 'give interval="step"')
    assert epoch_steps is not None
    return optimizer, _OnceIn(every * epoch_steps, schedule)


def _attach_in_step(schedule: Any, trainer: _Known, model: Any) -> None:
    """Whatever the schedule computes by finds the trainer at the model. It stays what it is, to every other eye."""
    kind: Any = type(schedule)

    class Attached(kind):  # type: ignore[misc]
        def step(self, *given: Any, **named: Any) -> None:
            with _attached(trainer, model):
                super().step(*given, **named)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Attached, name, getattr(kind, name))
    schedule.__class__ = Attached


class _OnceIn(LRScheduler):
    """A schedule that is stepped once in so many steps: at the end of an epoch."""

    def __init__(self, steps: int, schedule: Any) -> None:
        self.optimizer, self.steps, self.last_epoch = schedule.optimizer, steps, 0
        self._schedulers = [schedule]

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        if self.last_epoch % self.steps == 0:
            self._schedulers[0].step()

    def get_last_lr(self) -> list[float | Tensor]:
        return self._schedulers[0].get_last_lr()  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "_schedulers": [self._schedulers[0].state_dict()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self._schedulers[0].load_state_dict(state_dict["_schedulers"][0])


def _step(frozen: frozenset[str]) -> Callable[[nn.Module, Any], tuple[Tensor, dict[str, Any]]]:
    """The step. ``frozen``: the modules that are in eval mode before the training, and stay so, as in ``Trainer.fit``
    (since Lightning 2.2)."""

    def step(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        if frozen:
            for name, module in model.named_modules():
                if name in frozen:
                    module.training = False
        return _trained(model, batch)

    return step


def _trained(model: Any, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    """``training_step``, and what it logs. Which batch it is nobody knows here: ``batch_idx`` is None."""
    metrics: dict[str, Any] = {}

    def log(name: str, value: Any, *_: Any, **__: Any) -> None:
        metrics[name] = value.compute() if hasattr(value, "compute") else value
        if hasattr(value, "reset"):  # a metric of torchmetrics: each microbatch has its own, which are averaged
            value.reset()

    def log_dict(values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        for name, value in values.items():
            log(name, value)

    model.log, model.log_dict = log, log_dict
    try:
        with _attached(_for_workers(), model):
            takes = inspect.signature(model.training_step).parameters
            indexed = len([one for one in takes.values() if one.kind is not one.VAR_KEYWORD]) > 1 or any(
                one.kind is one.VAR_POSITIONAL for one in takes.values()
            )
            found = model.training_step(batch, None) if indexed else model.training_step(batch)
    finally:
        del model.log, model.log_dict
    return found["loss"] if isinstance(found, Mapping) else found, metrics


def _evaluate(trainer: Any, held_out: Any, datamodule: Any) -> Callable[[nn.Module], dict[str, float]]:
    """What ``trainer.fit`` evaluates, by a Trainer that shows and writes nothing: what its callbacks would see.

    That is more than ``validate`` returns, which leaves out what is not for loggers, by name or altogether.
    """
    says = logging.getLogger(type(trainer).__module__.partition(".trainer")[0])
    level = says.level
    says.setLevel(logging.WARNING)  # the devices it will not use
    try:
        quiet = type(trainer)(
            accelerator="cpu", devices=1, logger=False, precision=trainer.precision,
            limit_val_batches=trainer.limit_val_batches, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, inference_mode=False,  # as within fit: a validation_step may take gradients
        )  # fmt: skip
    finally:
        says.setLevel(level)
    quiet.datamodule = datamodule

    def evaluate(model: nn.Module) -> dict[str, float]:
        parts = [model] if datamodule is None else [model, datamodule]
        with _attached(quiet, *parts), _as_made(*parts):
            quiet.validate(model, held_out, verbose=False)
        return {name: float(value) for name, value in quiet.callback_metrics.items()}

    return evaluate


def _nothing(*_: Any, **__: Any) -> None: ...


@contextmanager
def _as_made(*parts: Any) -> Iterator[None]:
    """``validate`` makes nothing again, as it would by itself: ``setup`` may build layers, with new weights."""
    own = [{name: value for name, value in vars(part).items() if name in _MAKING} for part in parts]
    for part in parts:
        vars(part).update(dict.fromkeys(_MAKING, _nothing))
    try:
        yield
    finally:
        for part, before in zip(parts, own, strict=True):
            for name in _MAKING:
                del vars(part)[name]
            vars(part).update(before)


def _every(trainer: Any, loader: Any, epoch_steps: int | None) -> int | None:
    """Steps between evaluations, where that is not once an epoch."""
    epochs = trainer.check_val_every_n_epoch
    if between := _batches_between(trainer, loader):
        return max(1, between // int(trainer.accumulate_grad_batches))
    return epoch_steps * int(epochs) if epoch_steps and (epochs or 1) > 1 else None


def _batches_between(trainer: Any, loader: Any) -> int:
    """Batches between evaluations within an epoch; 0 where there are none."""
    between = trainer.val_check_interval
    if isinstance(between, int):
        return between
    return max(1, int(len(loader) * between)) if isinstance(between, float) and between < 1.0 else 0


def _bests(trainer: Any) -> list[str]:
    """``Job.keep_best`` of each ModelCheckpoint that monitors something."""
    return [f"{one.mode}:{one.monitor}" for one in trainer.checkpoint_callbacks if getattr(one, "monitor", None)]
