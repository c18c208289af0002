"""From a ``Trainer`` of transformers to a Job: the same model, data, optimizer, schedule, evaluation and seed.

What a Trainer does besides (its loop, devices, checkpoints, logs) the coordinator and its workers do in their own way.
What would change the result and cannot be taken over is refused by name; the rest is said in one warning.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, PrinterCallback, ProgressCallback

from w5xde_async.errors import JobError
from w5xde_async.job import Job, Precision, first_samples, of_whole_microbatches, step_function
from w5xde_async.randomness import random_state, seed_all

#: What an evaluation tells of itself, not of the model.
_OF_THE_RUN = ("_runtime", "_per_second", "_preparation_time")
#: Samples that are looked at for the lengths of their labels, and what stands there for none.
_LOOKED_AT, _NO_LABEL = 32, -100
_QUICK_PARAMETERS = 10_000_000  # of a model whose loss of two samples is there in no time
#: Of ``trainer.state``: what is the same before and while it trains.
_STAYS = ("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params")
_OWN_CALLBACKS = (DefaultFlowCallback, PrinterCallback, ProgressCallback)


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
    asked = copy.copy(trainer)
    asked.create_accelerator_and_postprocess()
    loader = asked.get_train_dataloader()
    collate = loader.collate_fn
    batch_size = args.train_batch_size * args.gradient_accumulation_steps
    dataset, drop_last = loader.dataset, False
    if args.dataloader_drop_last:
        dataset, drop_last = of_whole_microbatches(
            dataset, args.train_batch_size, batch_size, option="dataloader_drop_last"
        )
    steps = args.max_steps
    if steps <= 0:  # a Trainer without them knows how many samples there are
        of_an_epoch = (math.floor if drop_last else math.ceil)(len(dataset) / batch_size)
        steps = math.ceil(args.num_train_epochs * of_an_epoch)
    streamed = isinstance(loader.dataset, IterableDataset)
    if args.activation_checkpointing:
        trainer.model.activation_checkpointing_enable(args.activation_checkpointing_kwargs)
    evaluates = args.eval_strategy != "no"
    job = Job(
        model=trainer.model.cpu(),
        dataset=dataset,
        collate=collate,
        optimizer=lambda model: _made(trainer, model=model).create_optimizer(),
        scheduler=lambda optimizer: _made(trainer).create_scheduler(steps, optimizer),
        step=_step(trainer, steps),
        batch_size=batch_size,
        microbatch_size=args.train_batch_size,
        max_steps=steps,
        gradient_clip_val=args.max_grad_norm or None,
        precision=_precision(args),
        seed=args.seed,
        shuffle=args.train_sampling_strategy != "sequential" and not streamed,
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
    own = type(trainer).training_step is not Trainer.training_step
    need(not own, f"{type(trainer).__name__} overrides training_step", "override compute_loss")
    for name, hint in {
        "_get_train_sampler": "give train_sampling_strategy, or a dataset with samples as often as they count",
        "get_train_dataloader": "give train_dataset and data_collator",
        "_prepare_inputs": "do it in data_collator, or in compute_loss",
        "get_batch_samples": "do it in data_collator, or in compute_loss",
    }.items():
        own = getattr(type(trainer), name, None) is not getattr(Trainer, name, None)
        need(not own, f"{type(trainer).__name__} overrides {name}, which nobody would call", hint)
    need(not args.neftune_noise_alpha, "neftune_noise_alpha is not done by workers", "leave it out")
    hint = "leave it out, and start workers with --island fsdp=N where a model does not fit (docs/islands.md)"
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        need(not getattr(args, name, None), f"{name} is the Trainer's own way to use several devices", hint)


def _left(trainer: Trainer, job: Job) -> list[str]:
    """What the job leaves out that somebody may have counted on."""
    args, left = trainer.args, []
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
        batch: Any = job.collate(first_samples(job, _LOOKED_AT))
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
    model, count = trainer.model, trainer.args.gradient_accumulation_steps
    if sum(parameter.numel() for parameter in model.parameters()) > _QUICK_PARAMETERS or count == 1:
        return 1.0
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with random_state(), torch.no_grad():
            batch = dict(job.collate(first_samples(job, min(2, job.microbatch_samples))))
            _, labels = trainer.get_batch_samples(iter([batch] * count), count, torch.device("cpu"))
            seed_all(job.seed)
            ours, _ = step_function(job)(model, dict(batch))
            seed_all(job.seed)
            theirs = trainer.compute_loss(model, dict(batch), num_items_in_batch=labels)
            scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # not in every version
            if scaled is None:
                by_labels = trainer.model_accepts_loss_kwargs and labels is not None
                scaled = by_labels or trainer.compute_loss_func is not None
            ratio = float(theirs) * (count if scaled else 1) / float(ours)
    except Exception:  # of the user's code: told where it ends the run
        return 1.0
    finally:
        for module in trained:
            module.training = True
    return ratio if math.isfinite(ratio) and ratio > 0 else 1.0


def _made(trainer: Trainer, **changes: Any) -> Trainer:
    """A copy of the trainer that has no optimizer and no schedule yet."""
    made = copy.copy(trainer)
    vars(made).update({"optimizer": None, "lr_scheduler": None, **changes})
    return made


def _step(trainer: Trainer, steps: int) -> Callable[[nn.Module, Any], torch.Tensor] | None:
    """None where the model's own loss is taken, as the default step does."""
    own = type(trainer).compute_loss is not Trainer.compute_loss
    if not (own or trainer.compute_loss_func or trainer.label_smoother):
        return None
    known = {name: getattr(trainer.state, name) for name in _STAYS if hasattr(trainer.state, name)}
    state = _State(known | {"max_steps": steps, "train_batch_size": trainer.args.train_batch_size})
    asked = _made(trainer, state=state, log=lambda *_, **__: None)  # who logs reads the step's number
    return lambda model, batch: asked.compute_loss(model, dict(batch))


class _State:
    """In the place of ``trainer.state`` where a step is computed: what changes is not known there."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":  # Python's own, as in copying
            raise AttributeError(name)
        raise RuntimeError(
            f"compute_loss reads self.state.{name}, which is not known where a step is computed; count in an integer "
            "buffer of the model that its forward advances by one, or leave it to the learning rate's schedule"
        )


def _precision(args: Any) -> Precision:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


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
        asked.state, asked.control = TrainerState(epoch=None), TrainerControl()
        asked.callback_handler = CallbackHandler([DefaultFlowCallback()], model, asked.processing_class, None, None)
        found = asked.evaluate()
        return {name: value for name, value in found.items() if not name.endswith(_OF_THE_RUN)}

    return evaluate
