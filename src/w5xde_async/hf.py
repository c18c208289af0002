"""From a ``Trainer`` of transformers to a Job: the same model, data, optimizer, schedule, evaluation and seed.

What a Trainer does besides (its loop, devices, checkpoints, logs) the coordinator and its workers do in their own way.
What would change the result and cannot be taken over is refused by name; the rest is said in one warning.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from transformers import (
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
    TrainerControl,
    TrainerState,
    trainer_utils,
)
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, PrinterCallback, ProgressCallback

from w5xde_async.errors import JobError
from w5xde_async.job import Job, Precision, collated, copied_model, first_samples, of_whole_microbatches, step_function
from w5xde_async.randomness import random_state, seed_all

#: What an evaluation tells of itself, not of the model.
_OF_THE_RUN = ("_runtime", "_per_second", "_preparation_time")
#: Samples that are looked at for the lengths of their labels, and what stands there for none.
_LOOKED_AT, _NO_LABEL = 32, -100
_QUICK_PARAMETERS = 10_000_000  # of a model whose loss of two samples is there in no time
_OWN_CALLBACKS = (DefaultFlowCallback, PrinterCallback, ProgressCallback)

_IN_THE_LOSS = "do it in compute_loss or in the data_collator"
_BEFORE = "do what it adds before job_of is called"
#: Methods that nobody calls here, and where what an own one does belongs.
_NOT_CALLED = {
    "training_step": "override compute_loss",
    "_prepare_inputs": _IN_THE_LOSS,
    "_prepare_input": _IN_THE_LOSS,
    "get_batch_samples": _IN_THE_LOSS,
    "_get_num_items_in_batch": "leave it out: each microbatch counts by its samples",
    "compute_loss_context_manager": "enter the context in compute_loss",
    "autocast_smart_context_manager": "enter the context in compute_loss",
    "_clip_grad_norm": "give max_grad_norm",
    "_wrap_model": "wrap the model before it is given to the Trainer",
    **dict.fromkeys(("train", "_inner_training_loop", "_prepare_for_training", "set_initial_training_values"), _BEFORE),
    "_run_epoch": "leave it out",
}
#: The same of what decides when to evaluate, which changes no parameter.
_NOT_ASKED = ("_maybe_log_save_evaluate", "_evaluate", "_determine_best_metric")
_OF_DATA = ("_get_train_sampler", "get_train_dataloader", "_get_dataloader")
#: What ``Trainer.train()`` knows of its state before the first step. All else changes in training.
_FIXED = {
    "max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps", "trial_name",
    "trial_params", "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search",
}  # fmt: skip
_CHANGING = {field.name for field in dataclasses.fields(TrainerState)} - _FIXED


def job_of(trainer: Trainer) -> Job:
    """The job that ``trainer.train()`` would do. The coordinator trains the trainer's own model, in place.

    A step has ``per_device_train_batch_size * gradient_accumulation_steps`` samples, a microbatch the former. Each
    microbatch counts by its samples, not by its tokens. Raises JobError for what cannot be taken over.
    """
    if not isinstance(trainer, Trainer):
        raise JobError("hf.job_of", f"it is given a {type(trainer).__name__}", "give a Trainer of transformers")
    _refuse(trainer)
    args = trainer.args
    # What the job asks of the trainer is asked of a copy, so that the trainer itself stays as it is.
    asked = _copied(trainer)
    asked.create_accelerator_and_postprocess()
    loader = asked.get_train_dataloader()
    if any(_own(trainer, name) for name in _OF_DATA):
        _refuse_other_batches(trainer, loader)
    collate = loader.collate_fn
    batch_size = args.train_batch_size * args.gradient_accumulation_steps
    dataset, drop_last = loader.dataset, False
    if args.dataloader_drop_last:
        dataset, drop_last = of_whole_microbatches(
            dataset, args.train_batch_size, batch_size, option="dataloader_drop_last"
        )
    steps, epochs = args.max_steps, sys.maxsize
    if trainer_utils.has_length(dataset):  # as it is for a Trainer without max_steps
        of_an_epoch = (math.floor if drop_last else math.ceil)(len(dataset) / batch_size)
        epochs = math.ceil(args.num_train_epochs if steps <= 0 else steps / max(of_an_epoch, 1))
        if steps <= 0:
            steps = math.ceil(args.num_train_epochs * of_an_epoch)
    streamed = isinstance(loader.dataset, IterableDataset)
    if hasattr(loader.dataset, "set_epoch") and not streamed:
        reason = "its dataset has a set_epoch, and one that is read by index is never told the epoch"
        raise JobError("of a Trainer", reason, "make it an IterableDataset, whose set_epoch is called")
    _align_tokens(trainer)
    step = _Step(trainer, _fixed_state(args, steps, epochs)) if _computes_a_loss(trainer) else None
    if args.activation_checkpointing:
        _checkpoint_activations(trainer.model, args.activation_checkpointing_kwargs)
    evaluates = args.eval_strategy != "no"
    job = Job(
        model=trainer.model.cpu(),
        dataset=dataset,
        collate=collate,
        optimizer=lambda model: _optimizer(trainer, model),
        scheduler=lambda optimizer: _scheduler(trainer, optimizer, steps),
        step=step,
        batch_size=batch_size,
        microbatch_size=args.train_batch_size,
        max_steps=steps,
        gradient_clip_val=max(args.max_grad_norm or 0.0, 0.0) or None,
        precision=_precision(trainer),
        seed=args.seed,
        shuffle=not streamed and type(_sampler(loader)) is not SequentialSampler,
        drop_last=drop_last,
        evaluate=_evaluate(asked) if evaluates else None,
        evaluate_every=_every(args.eval_steps, steps) if args.eval_strategy == "steps" else None,
        keep_best=_best(args) if evaluates else None,
    )
    if left := _left(trainer, job):
        warnings.warn(f"of the Trainer not taken over: {'; '.join(left)}", stacklevel=2)
    return job


def _refuse(trainer: Trainer) -> None:
    args = trainer.args

    def need(holds: bool, reason: str, hint: str) -> None:
        if not holds:
            raise JobError("of a Trainer", reason, hint)

    need(trainer.train_dataset is not None, "it has no train_dataset", "give one")
    unseen = args.eval_strategy == "epoch" and not hasattr(trainer.train_dataset, "__len__")
    need(not unseen, "eval_strategy is epoch, and its stream has no len()", 'give eval_strategy="steps"')
    given = trainer.optimizer is not None or trainer.lr_scheduler is not None
    hint = "give optimizer_cls_and_kwargs or the arguments (optim, lr_scheduler_type) of a new Trainer"
    need(not given, "optimizers were given, or it has trained before", hint)
    hint = "give another: it would need a metric at each step"
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    need(kind not in ("reduce_lr_on_plateau", "greedy"), f"lr_scheduler_type is {kind}", hint)
    for name, hint in _NOT_CALLED.items():
        need(not _own(trainer, name), f"{type(trainer).__name__} overrides {name}, which nobody would call", hint)
    optim = str(getattr(args.optim, "value", args.optim))
    by_layers = "lomo" in optim or "layerwise" in optim
    need(not by_layers, f"optim is {optim}, which steps while gradients are computed", "give another")
    need(not args.neftune_noise_alpha, "neftune_noise_alpha is not done by workers", "leave it out")
    hint = "leave it out, and start workers with --island fsdp=N where a model does not fit (docs/islands.md)"
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        need(not getattr(args, name, None), f"{name} is the Trainer's own way to use several devices", hint)


def _own(trainer: Trainer, name: str) -> bool:
    """Whether the trainer has another such method than Trainer, by its class or set on itself."""
    given = getattr(trainer, name, None)
    return getattr(given, "__func__", given) is not getattr(Trainer, name, None)


def _sampler(loader: Any) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.batch_sampler)


def _refuse_other_batches(trainer: Trainer, loader: Any) -> None:
    """Raises JobError for an own loader whose batches are not the dataset's samples, each once an epoch, in random
    order or in the dataset's."""
    args, name = trainer.args, next(name for name in _OF_DATA if _own(trainer, name))

    def need(holds: bool, gives: str, hint: str) -> None:
        if not holds:
            raise JobError("of a Trainer", f"{type(trainer).__name__} overrides {name}, which gives {gives}", hint)

    need(isinstance(loader, DataLoader), f"a {type(loader).__name__}", "return a DataLoader, or give train_dataset")
    batches: Any = loader.batch_sampler if loader.batch_size is None else loader
    hint = "give per_device_train_batch_size or dataloader_drop_last"
    size = getattr(batches, "batch_size", None)
    need(size == args.train_batch_size, f"batches of {size} samples, not of {args.train_batch_size}", hint)
    if isinstance(loader.dataset, IterableDataset):
        return
    need(batches.drop_last == args.dataloader_drop_last, f"drop_last={batches.drop_last}", hint)
    sampler, kind = _sampler(loader), type(loader.batch_sampler)
    hint = 'give train_dataset=Subset(dataset, indices) in this order, and train_sampling_strategy="sequential"'
    need(kind is BatchSampler, f"a {kind.__name__}", hint)
    known = type(sampler) in (RandomSampler, SeedableRandomSampler, SequentialSampler)
    whole = known and len(sampler) == len(loader.dataset) and not getattr(sampler, "replacement", False)
    need(whole, f"samples by a {type(sampler).__name__}" + " of its own number of samples" * known, hint)


def _align_tokens(trainer: Trainer) -> None:
    """The tokenizer's special tokens into the model's config, as ``Trainer.train()`` begins: losses may read them."""
    given = trainer.processing_class
    if isinstance(given, (PreTrainedTokenizerBase, ProcessorMixin)) and hasattr(trainer.model, "config"):
        if align := getattr(trainer_utils, "align_special_tokens", None):  # not in every version
            align(trainer.model, given)


def _checkpoint_activations(model: Any, given: Mapping[str, Any] | None) -> None:
    """As ``Trainer.train()`` begins: two of what is given are not for torch's checkpoint."""
    rest = dict(given or {})
    which = {name: rest.pop(name) for name in ("every_n_layers", "offload") if name in rest}
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # an older name
    getattr(model, f"{kind}_checkpointing_enable")(**{f"{kind}_checkpointing_kwargs": rest or None}, **which)


def _left(trainer: Trainer, job: Job) -> list[str]:
    """What the job leaves out that somebody may have counted on."""
    args, left = trainer.args, []
    if kept := _kept(trainer, job):
        left.append(
            f"what compute_loss keeps on the trainer from one call to the next ({', '.join(kept)}): each worker has "
            "its own, of the microbatches that it computed; keep it in a buffer of the model"
        )
    if own := [name for name in _NOT_ASKED if _own(trainer, name)]:
        left.append(f"own {', '.join(own)}: give evaluate of the Job, or subscribe to a Bus")
    if args.use_liger_kernel:
        left.append("use_liger_kernel: apply it to the model before it is given to the Trainer")
    if callbacks := [
        type(one).__name__
        for one in trainer.callback_handler.callbacks
        if not isinstance(one, _OWN_CALLBACKS) and not type(one).__module__.startswith("transformers.integrations")
    ]:
        left.append(f"callbacks ({', '.join(callbacks)}): subscribe to a Bus, or give stop_when")
    if job.num_samples is None:
        left.append(
            "the ends of epochs: the stream has no len(), and a step may hold the end of one epoch and the beginning "
            "of the next"
        )
    elif args.train_sampling_strategy not in ("random", "sequential") and not job.streamed:
        left.append(f"train_sampling_strategy {args.train_sampling_strategy}: samples come in random order")
    given = trainer.train_dataset
    if job.shuffle and job.num_samples and (cut := len(given) - job.num_samples):
        left.append(
            f"the samples that dataloader_drop_last drops: of {len(given)} samples no epoch has the last {cut}, and in "
            f"the Trainer each epoch leaves out {cut} others"
        )
    if job.evaluate and args.eval_delay:
        left.append(f"eval_delay {args.eval_delay:g}: evaluations before it are made, and count for the best model")
    if job.evaluate and args.eval_on_start:
        left.append("eval_on_start: the first evaluation is after the first steps")
    if args.load_best_model_at_end:
        left.append("load_best_model_at_end: the best weights are in best.safetensors of the run directory")
    if args.full_determinism:
        left.append("full_determinism: start workers with --deterministic")
    if args.torch_compile:
        left.append("torch_compile: start workers with --compile")
    by_tokens = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if args.gradient_accumulation_steps > 1 and by_tokens and _lengths_differ(job):
        left.append(
            "the mean over all tokens of a step: samples here have labels on different numbers of tokens, and each "
            "microbatch counts by its samples, so that tokens of short samples weigh more"
        )
    if not math.isclose(ratio := _gradient_ratio(trainer, job), 1.0, rel_tol=0.01):
        left.append(
            f"the size of gradients: the Trainer divides this loss by something else than a mean does, so that its "
            f"gradients are {ratio:.3g} times the mean over a step's samples; to train as it does, divide "
            f"max_grad_norm by {ratio:.3g} and multiply learning_rate by it where the optimizer's steps grow "
            "with gradients (sgd)"
        )
    if args.gradient_accumulation_steps == 1:
        left.append(
            "several devices: with gradient_accumulation_steps=1 a step is one microbatch, which one worker computes "
            "while the others wait; divide per_device_train_batch_size by 4, say, and accumulate 4"
        )
    return left


def _lengths_differ(job: Job) -> bool:
    """Whether some of the first samples have labels on more tokens than others."""
    assert job.collate is not None
    with random_state():
        batch: Any = collated(job.collate, first_samples(job, _LOOKED_AT))
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.ndim < 2:
        return False
    return len(set((labels != _NO_LABEL).flatten(1).sum(1).tolist())) > 1


def _gradient_ratio(trainer: Trainer, job: Job) -> float:
    """The Trainer's gradients by the job's, as the losses of two samples have it; 1 where these cannot be told, or
    the model is so large that each process that loads the job would take long for it.

    The Trainer gives the number of a step's labels to whatever may take it, and then does not divide the loss by the
    number of microbatches. That is right for a loss that divides by that number of labels, and for no other.
    """
    assert job.collate is not None
    count = trainer.args.gradient_accumulation_steps
    if not _is_quick(trainer.model) or count == 1:
        return 1.0
    try:
        with random_state(), torch.no_grad():
            model = copied_model(trainer.model).eval()
            batch = dict(collated(job.collate, first_samples(job, min(2, job.microbatch_samples))))
            _, labels = trainer.get_batch_samples(iter([batch] * count), count, torch.device("cpu"))
            seed_all(job.seed)
            ours, _ = step_function(job)(model, dict(batch))
            seed_all(job.seed)
            theirs = _Step(trainer, trainer.state)(model, batch, num_items_in_batch=labels)
            theirs = theirs[0] if isinstance(theirs, tuple) else theirs
            scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # not in every version
            if scaled is None:
                by_labels = trainer.model_accepts_loss_kwargs and labels is not None
                scaled = by_labels or trainer.compute_loss_func is not None
            ratio = float(theirs) * (count if scaled else 1) / float(ours)
    except Exception:  # of the user's code: told where it ends the run
        return 1.0
    return ratio if math.isfinite(ratio) and ratio > 0 else 1.0


def _is_quick(model: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) <= _QUICK_PARAMETERS


def _kept(trainer: Trainer, job: Job) -> list[str]:
    """Names of what is another after a step than after the same step once more, which begins alike.

    Raises JobError for what the step may not read, before any worker finds it.
    """
    if not isinstance(job.step, _Step) or not _is_quick(trainer.model):
        return []
    assert job.collate is not None
    tried, seen = job.step.again(), []
    try:
        with random_state():
            batch = collated(job.collate, first_samples(job, min(2, job.microbatch_samples)))
            for _ in range(2):
                seed_all(job.seed)
                tried(copied_model(trainer.model).train(), batch)
                seen.append({name: _of_value(value) for name, value in vars(tried.trainer).items()})
    except JobError:
        raise
    except Exception:  # of the user's code: told where it ends the run
        return []
    once, twice = seen
    return sorted(name for name, value in twice.items() if name in once and value != once[name])


def _of_value(value: Any) -> Any:
    """What tells a number, tensor or container that was changed from one that was not."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().double().numpy().tobytes()
    if isinstance(value, (int, float)):
        return value
    return len(value) if isinstance(value, (list, dict, set)) else None


def _copied(trainer: Trainer, **changes: Any) -> Trainer:
    """A copy of the trainer, whose bound methods among the attributes are its own."""
    made = copy.copy(trainer)
    for name, value in vars(trainer).items():
        if isinstance(value, MethodType) and value.__self__ is trainer:
            changes.setdefault(name, MethodType(value.__func__, made))
    vars(made).update(changes)
    return made


def _optimizer(trainer: Trainer, model: nn.Module) -> torch.optim.Optimizer:
    made = _copied(trainer, optimizer=None, lr_scheduler=None, model=model, model_wrapped=model)
    returned = made.create_optimizer()
    optimizer: Any = returned if made.optimizer is None else made.optimizer  # a Trainer takes what is set
    if callable(getattr(optimizer, "eval", None)):
        reason = f"{type(optimizer).__name__} has other parameters in evaluation than in training"
        raise JobError("optimizer", reason, "give another")
    return optimizer  # type: ignore[no-any-return]


def _scheduler(trainer: Trainer, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    made = _copied(trainer, optimizer=optimizer, lr_scheduler=None)
    returned = made.create_scheduler(num_training_steps=steps)
    return returned if made.lr_scheduler is None else made.lr_scheduler


class _Fixed(TrainerState):  # type: ignore[misc]
    """The state of a Trainer where a step is computed, which knows nothing of the steps before it."""

    def __init__(self, of: TrainerState) -> None:
        self.__dict__.update(vars(of))

    def __getattribute__(self, name: str) -> Any:
        if name in _CHANGING:
            raise JobError(
                "of a Trainer",
                f"compute_loss reads self.state.{name}, which is not known where a step is computed",
                "count steps in an integer buffer of the model (docs/finetune.md), or schedule the learning rate",
            )
        return super().__getattribute__(name)


class _Unknown:
    """In the place of the optimizer and the schedule, which the coordinator has."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        reason = f"compute_loss reads self.{self._name}.{attribute}, which is not known where a step is computed"
        raise JobError("of a Trainer", reason, "leave it out")


def _fixed_state(args: Any, steps: int, epochs: int) -> TrainerState:
    """As ``Trainer.train()`` sets it before its first step."""
    state = TrainerState(max_steps=steps, num_train_epochs=epochs, train_batch_size=args.train_batch_size)
    state.compute_steps(args, steps)
    return _Fixed(state)


def _computes_a_loss(trainer: Trainer) -> bool:
    """Whether its loss is another than the model's own, which the default step takes."""
    return bool(_own(trainer, "compute_loss") or trainer.compute_loss_func or trainer.label_smoother)


class _Step:
    """``trainer.compute_loss`` of whatever model computes a step, and what it logs as the step's metrics.

    Several threads of a process may compute steps: each has a copy of the trainer.
    """

    def __init__(self, trainer: Trainer, state: TrainerState) -> None:
        self._of, self._state, self._own = trainer, state, threading.local()
        self._real_state = trainer.state

    def again(self) -> _Step:
        """Another that has made no step."""
        return _Step(self._of, self._state)

    @property
    def trainer(self) -> Trainer:
        """What compute_loss has as ``self`` in this thread."""
        if not hasattr(self._own, "trainer"):
            unknown = {"optimizer": _Unknown("optimizer"), "lr_scheduler": _Unknown("lr_scheduler")}
            self._own.trainer = _copied(self._of, state=self._state, is_in_train=True, **unknown)
        return self._own.trainer

    def __call__(self, model: nn.Module, batch: Any, **given: Any) -> Any:
        trainer, told = self.trainer, dict[str, Any]()
        trainer.control = TrainerControl()
        trainer.log = lambda logs, *_, **__: told.update(_numbers(logs))
        trainer.model = trainer.model_wrapped = model
        with self._watched():
            loss = trainer.compute_loss(model, dict(batch), **given)
        trainer.model = trainer.model_wrapped = self._of.model  # not to keep a replica that its owner gives up
        if trainer.control.should_training_stop or trainer.control.should_epoch_stop:
            raise JobError(
                "of a Trainer", "compute_loss ends the training", "raise an error, or give stop_when of the Job"
            )
        return (loss, told) if told else loss

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """For a compute_loss_func that has the trainer itself and no copy."""
        self._of.state = self._state
        try:
            yield
        finally:
            self._of.state = self._real_state


def _numbers(logs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in logs.items() if isinstance(value, (int, float, torch.Tensor))}


def _precision(trainer: Trainer) -> Precision:
    """The accelerator's, which ``accelerate launch --mixed_precision`` sets where no argument does."""
    given = trainer.accelerator.mixed_precision
    return "fp32" if given == "no" else given


def _every(eval_steps: float, steps: int) -> int:
    return int(eval_steps) if eval_steps >= 1 else math.ceil(eval_steps * steps)


def _best(args: Any) -> str | None:
    """``Job.keep_best`` of ``metric_for_best_model``, which transformers takes with and without ``eval_``."""
    metric = args.metric_for_best_model
    if not metric:
        return None
    return f"{'max' if args.greater_is_better else 'min'}:eval_{metric.removeprefix('eval_')}"


def _evaluate(asked: Trainer) -> Callable[[nn.Module], dict[str, float]]:
    """``trainer.evaluate()`` of another model, which no callback hears of."""

    def evaluate(model: nn.Module) -> dict[str, float]:
        asked.model = asked.model_wrapped = model
        asked.is_in_train = True  # or bf16_full_eval would cast the model
        asked.accelerator.free_memory()  # what it has prepared before keeps it from preparing this one for bf16
        asked.state, asked.control = TrainerState(epoch=None), TrainerControl()
        asked.callback_handler = CallbackHandler([DefaultFlowCallback()], model, asked.processing_class, None, None)
        found = asked.evaluate()
        return {name: value for name, value in found.items() if not name.endswith(_OF_THE_RUN)}

    return evaluate
