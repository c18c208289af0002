"""Job: what to train. Written once by the user, loaded by the coordinator and (as local code) by workers.

A job is data and callables; nothing here runs them but ``loss_of`` (the default reading of a batch) and
``load_job``, which imports the file or module that the user named on the command line.
"""

from __future__ import annotations

import copy
import copyreg
import difflib
import dis
import gc
import hashlib
import importlib
import importlib.util
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest
from numbers import Real
from pathlib import Path
from types import CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from w5xde_async.errors import LACKS_MEMORY, JobError, LocalError, UsageError, in_one_line
from w5xde_async.randomness import random_state, seed_all
from w5xde_async.users_code import is_interrupt

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
_T = TypeVar("_T")
StepFunction = Callable[[nn.Module, Any], tuple[Tensor, Mapping[str, Any]]]

#: ``max_steps`` of a run that goes on until somebody stops it: more than any run makes.
ENDLESS = 1_000_000_000

_MOST_NESTED = 8  # attributes and containers, one in another, in which optimizers are looked for, and parts of a model
_MOST_HELD = 1024  # by one container; by what is not large
_LARGE_BYTES = 1 << 20
_MOST_UNREADABLE = 64  # of the first samples, for a look at a few
_CONSTANT = {bool, bytes, float, int, str, type(None)}
_MAKE = "give a function that makes the model (model=make)"
_LABELS = ("labels", "label", "targets", "target")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job.

    model           a module, or a function that makes one (called with the seed set)
    dataset         map-style: ``len(dataset)`` and ``dataset[i]``; ``__getitems__`` is used where it exists. Or a
                    stream: an IterableDataset that gives the same samples in the same order each time
    optimizer       ``model -> torch.optim.Optimizer``; several parameter groups are fine
    loss            ``loss(output, target) -> mean loss``, used by the default step
    step            ``step(model, batch) -> loss`` or ``(loss, {name: number})``, instead of ``loss``
    scheduler       ``optimizer -> LRScheduler``, stepped once a step
    collate         list of samples -> batch; torch's default_collate otherwise
    batch_size      samples a step (one optimizer update)
    microbatch_size samples a forward and backward pass; default: by the model's arithmetic, from an eighth of
                    ``batch_size`` to a half, or all of it where a step is small
    accumulate_grad_batches  microbatches that one leaf sums by autograd, in order
    epochs, max_steps        where the run ends: whichever comes first; one of them is needed
    gradient_clip_val        global norm to clip to
    precision       fp32, or bf16 / fp16 autocast (fp16 with dynamic loss scaling)
    local_data      ``local_data(where) -> dataset``: the same samples as in ``dataset``, by the same indices, of a copy
                    that a worker has, or reaches without the coordinator (``worker --local-data WHERE``)
    seed            of everything random: order, dropout, model factory
    shuffle_buffer  samples of a stream that are shuffled among themselves
    evaluate        ``evaluate(model) -> {name: number}``, on a copy in eval mode, on the coordinator
    evaluate_every  steps between evaluations; default: once an epoch. The last step is always evaluated
    parallelize     ``parallelize(model, mesh)``: divides the model among the ranks of an island, in place or by what it
                    returns, by torch's own means (``parallelize_module``, ``fully_shard``). ``mesh`` has the axes of
                    ``--island``: fsdp, tp
    stop_when       ``stop_when({name: number}) -> bool``, after each evaluation: True finishes the run
    keep_best       a metric of ``evaluate``: the weights of its best evaluation are kept in the run directory. The
                    smallest ``"...loss"`` and the largest ``"...acc"`` or ``"...accuracy"`` is best; of others say
                    ``"min:NAME"`` or ``"max:NAME"``
    source          digest of the code, set by ``load_job``; of a worker that has another the run warns
    """

    model: nn.Module | Callable[[], nn.Module]
    dataset: Any
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[Any, Any], Tensor] | None = None
    step: Callable[[nn.Module, Any], Any] | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    batch_size: int = 32
    microbatch_size: int | None = None
    accumulate_grad_batches: int = 1
    epochs: int | None = None
    max_steps: int | None = None
    gradient_clip_val: float | None = None
    precision: Precision = "fp32"
    seed: int = 0
    shuffle: bool = True
    shuffle_buffer: int = 1024
    drop_last: bool = False
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    evaluate_every: int | None = None
    stop_when: Callable[[Mapping[str, float]], bool] | None = None
    keep_best: str | None = None
    parallelize: Callable[[nn.Module, Any], nn.Module | None] | None = None
    local_data: Callable[[str], Any] | None = None
    source: bytes = field(default=b"", repr=False, compare=False)

    def __post_init__(self) -> None:
        def need(holds: bool, reason: str, hint: str = "") -> None:
            if not holds:
                raise JobError(type(self).__name__, reason, hint)

        need(callable(self.model), "model is neither a module nor a function that makes one")
        hint = "write optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=...)"
        need(callable(self.optimizer), "optimizer is not a function", hint)
        need(self.scheduler is None or callable(self.scheduler), "scheduler is not a function of the optimizer")
        for name in ("loss", "step", "collate", "evaluate"):
            given = getattr(self, name)
            need(given is None or callable(given), f"{name} is a {type(given).__name__}, not a function")
        made = isinstance(self.loss, type) and issubclass(self.loss, nn.Module)
        need(not made, "loss is a class", f"write loss=torch.nn.{getattr(self.loss, '__name__', '')}()")
        need(self.loss is None or self.step is None, "both loss and step are given", "give one of them")
        divides = self.parallelize is None or callable(self.parallelize)
        need(divides, "parallelize is not a function of the model and the mesh")
        need(self.local_data is None or callable(self.local_data), "local_data is not a function of a place")
        need(self.stop_when is None or callable(self.stop_when), "stop_when is not a function of the metrics")
        need(self.stop_when is None or self.evaluate is not None, "stop_when has nothing to go by", "give evaluate")
        if self.keep_best is not None:
            hint = "name a metric that evaluate gives, such as 'val_loss' or 'max:f1'"
            need(isinstance(self.keep_best, str), f"keep_best is {self.keep_best!r}", hint)
            direction, metric = best_by(self.keep_best)
            need(bool(metric), f"keep_best is {self.keep_best!r}", hint)
            hint = f"write 'min:{metric}' or 'max:{metric}'"
            need(bool(direction), f"keep_best is {metric!r}: whether less of it is better or more is not known", hint)
            need(self.evaluate is not None, "keep_best has nothing to go by", "give evaluate")
        optional = ("microbatch_size", "epochs", "max_steps", "evaluate_every")
        for name in ("batch_size", "accumulate_grad_batches", "shuffle_buffer", *optional):
            value = getattr(self, name)
            fits = value is None or (type(value) is int and value >= 1)
            need(fits, f"{name} is {value!r}", "give a whole number >= 1")
        need(
            self.epochs is not None or self.max_steps is not None,
            "it has no end",
            "give Job(epochs=...) or Job(max_steps=...)",
        )
        need(self.precision in PRECISIONS, f"precision is {self.precision!r}", "give fp32, bf16 or fp16")
        seeds = type(self.seed) is int and 0 <= self.seed < 1 << 63
        need(seeds, f"seed is {self.seed!r}", "give a whole number from 0 to 2^63 - 1")
        clip = self.gradient_clip_val
        clips = clip is None or (isinstance(clip, int | float | np.number) and clip is not True and clip > 0)
        need(clips, f"gradient_clip_val is {clip!r}", "give a number > 0, or None for no clipping")
        for name in ("shuffle", "drop_last"):  # any text counts as true
            given = getattr(self, name)
            one = isinstance(given, bool | np.bool_ | int) and given in (0, 1)
            need(one, f"{name} is {given!r}", "give True or False")
        if isinstance(self.dataset, DataLoader):
            hint = "give its dataset=loader.dataset, and collate=loader.collate_fn and batch_size=... where they matter"
            if sampler := _own_sampler(self.dataset):
                hint += (
                    f"; its {sampler} is not taken over: draw the samples' indices yourself, with a seed, and give "
                    "dataset=Subset(loader.dataset, indices) (docs/own-model.md)"
                )
            raise JobError(type(self).__name__, "dataset is a DataLoader", hint)
        columns = isinstance(self.dataset, Mapping) and 0 not in self.dataset
        hint = "give one of its parts, or of columns torch.utils.data.TensorDataset(x, y)"
        need(not columns, "dataset is a dict, which has no samples by number", hint)
        once = hasattr(self.dataset, "__next__")
        need(not once, "dataset is an iterator, which can be read once", "give what makes it: an IterableDataset")
        if self.streamed:
            hint = "give a dataset with dataset[i], or leave local_data out"
            need(self.local_data is None, "local_data needs a dataset that is read by index", hint)
            ends = self.num_samples is not None or self.max_steps is not None
            need(ends, "epochs cannot end it: the stream has no len()", "give max_steps")
        else:
            need(hasattr(self.dataset, "__getitem__"), "dataset has no dataset[i] and cannot be iterated")
            need(hasattr(self.dataset, "__len__"), "dataset has no len()")
            hint = (
                "make it an IterableDataset, whose set_epoch is called, or leave it out where samples are all the same"
            )
            told = callable(getattr(self.dataset, "set_epoch", None))
            need(not told, "dataset has a set_epoch, and one that is read by index is never told the epoch", hint)
        samples = self.num_samples
        need(samples is None or samples > 0, "dataset is empty")
        left_out = f"drop_last leaves no step: {samples} samples, batch_size {self.batch_size}"
        need(not self.drop_last or samples is None or samples >= self.batch_size, left_out)
        leaf = f"a leaf of {self.leaf_samples} samples (microbatch_size x accumulate_grad_batches)"
        need(self.leaf_samples <= self.batch_size, f"{leaf} is larger than batch_size {self.batch_size}")

    @property
    def streamed(self) -> bool:
        """Whether the dataset can only be read from its beginning."""
        kind = type(self.dataset)
        if isinstance(
            self.dataset, IterableDataset
        ):  # its own ``__getitem__`` raises; MosaicML's have one that does not
            return kind.__getitem__ is Dataset.__getitem__ or not hasattr(kind, "__len__")
        return hasattr(self.dataset, "__iter__") and not hasattr(self.dataset, "__getitem__")

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch; None of a stream that does not say."""
        if not self.streamed:
            return len(self.dataset)
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError):
            return None

    @property
    def microbatch_samples(self) -> int:
        """Samples of one forward and backward pass; where the job does not say (a run has it say before it begins), an
        eighth of a batch."""
        if self.microbatch_size is not None:
            return self.microbatch_size
        return max(1, -(-self.batch_size // (8 * self.accumulate_grad_batches)))

    @property
    def leaf_samples(self) -> int:
        """Samples of one leaf."""
        return self.microbatch_samples * self.accumulate_grad_batches


def first_samples(job: Job, count: int) -> list[Any]:
    """So many of the dataset, the first that can be read, over and over where it has fewer. For a look at them.

    Raises what reading raises where none can be read.
    """
    found: list[Any] = []
    error: Exception | None = None
    if job.streamed:
        iterator = iter(copy.copy(job.dataset))
        found = list(islice(iterator, count))
        if hasattr(iterator, "close"):
            iterator.close()
    else:
        for index in range(len(job.dataset)):
            if len(found) == count:
                break
            try:
                found.append(job.dataset[index])
            except Exception as raised:
                error = error or raised
                if index - len(found) > _MOST_UNREADABLE:
                    break
    if not found:
        raise error or JobError("dataset", "it gives no samples")
    return [found[at % len(found)] for at in range(count)]


def may_change_samples(collate: Callable[[list[Any]], Any] | None) -> bool:
    """Whether a job's collate may change what it is given. Torch's does not."""
    return collate is not None and collate is not default_collate


def collated(
    collate: Callable[[list[Any]], Any] | None, samples: Sequence[Any], numbers: Iterable[int] | None = None
) -> Any:
    """A batch of samples that others read, too, or that are looked at again: a job's collate is given copies, where
    there can be any. ``numbers``: which of them are in it; None: all."""
    copies = may_change_samples(collate)
    return (collate or default_collate)([
        copy_among(samples, number) if copies else samples[number]
        for number in (range(len(samples)) if numbers is None else numbers)
    ])  # fmt: skip


def copy_among(samples: Sequence[Any], number: int) -> Any:
    """Of one of them, ``copy_of_sample`` beside one that lies far from it: neighbours may be made of the same."""
    sample, other = samples[number], samples[(number + len(samples) // 2) % len(samples)]
    return copy_of_sample(sample, None if other is sample else other)


def copy_of_sample(sample: Any, beside: Any = None) -> Any:
    """Of its own values alone: of a row, ``deepcopy`` would copy the whole table. What cannot be copied is the same,
    and so is what is large and ``beside``, another sample, has in the same place: a vocabulary, or a tree, that all
    samples have."""
    try:
        with _ViewsAlone():
            return _copied(sample, beside, {})
    except MemoryError:
        raise
    except Exception:  # nested too deeply
        return sample


def _copied(value: Any, beside: Any, copies: dict[int, Any]) -> Any:
    """``copies``: what was copied so far, by what it is a copy of: the memo of a deep copy."""
    kind = type(value)
    if kind in _CONSTANT or isinstance(value, type):
        return value
    if (made := copies.get(id(value))) is not None:
        return made
    if value is beside and _is_large(value):
        copies[id(value)] = value
        return value
    if type(beside) is not kind:
        beside = None
    if _is_flat(value):  # tokens: looking at each once is enough
        made = value.copy()
    elif kind is dict:
        made = copies[id(value)] = {}  # before its parts: it may hold itself
        for key, part in value.items():
            made[key] = _copied(part, None if beside is None else beside.get(key), copies)
    elif kind is list:
        made = copies[id(value)] = []
        for part, other in zip_longest(value, (beside or ())[: len(value)]):
            made.append(_copied(part, other, copies))
    elif kind is tuple:
        others = zip_longest(value, (beside or ())[: len(value)])
        parts = tuple([_copied(part, other, copies) for part, other in others])
        made = copies.get(id(value), parts)  # a list in it may hold it
    else:
        begun = len(copies)
        try:
            made = (_deep_copied if hasattr(kind, "__deepcopy__") else _remade)(value, beside, copies)
        except MemoryError:
            raise
        except Exception:
            while len(copies) > begun:  # some of them are half made
                copies.popitem()
            made = value
    copies[id(value)] = made
    return made


def _deep_copied(value: Any, beside: Any, copies: dict[int, Any]) -> Any:
    return copy.deepcopy(value, copies)


def _remade(value: Any, beside: Any, copies: dict[int, Any]) -> Any:
    """A copy of any other object, as ``deepcopy`` makes it: of what it says that it is made of (``__reduce_ex__``)."""
    made_of = _made_of(value)
    if made_of is None:
        return value
    (make, arguments), parts = made_of
    of_other = None
    if beside is not None:
        with suppress(Exception):  # that is the other's matter
            of_other = _made_of(beside)
    (_, theirs), others = of_other or ((None, None), None)
    copies.setdefault(id(copies), []).append(made_of)  # what copies are looked up by must not end before they do
    made = copies[id(value)] = make(*_copied(arguments, theirs, copies))
    state, items, pairs = _copied(parts, others, copies)
    if parts[0] is value:  # its items are its attributes: ``self.__dict__ = self``
        made.__dict__ = made
    elif hasattr(made, "__setstate__") and state is not None:
        made.__setstate__(state)
    elif state is not None:
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        if attributes:
            vars(made).update(attributes)
        for name, part in (slots or {}).items():
            setattr(made, name, part)
    for item in items:
        made.append(item)
    for key, part in pairs:
        made[key] = part
    return made


def _made_of(value: Any) -> tuple[tuple[Any, Any], tuple[Any, list[Any], list[Any]]] | None:
    """A function and its arguments; what is set, appended and laid by key in what that gives. None: of nothing."""
    kind = type(value)
    reduced = copyreg.dispatch_table[kind](value) if kind in copyreg.dispatch_table else value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return None
    if len(reduced) > 5:
        raise TypeError(f"{kind.__name__} says itself how its state is set")
    make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    return (make, arguments), (state, list(items or ()), list(pairs or ()))


def _is_flat(value: Any) -> bool:
    """Whether it is a list, a set or a dict, and has constants alone."""
    if type(value) is dict:
        return _CONSTANT.issuperset(map(type, value.values()))
    return type(value) in (list, set) and _CONSTANT.issuperset(map(type, value))


def _is_large(value: Any) -> bool:
    """Whether it has many parts, or many bytes."""
    seen, waiting = {id(value)}, [value]
    while waiting and len(seen) <= _MOST_HELD:
        one = waiting.pop()
        if (one.nbytes if isinstance(one, Tensor | np.ndarray) else sys.getsizeof(one)) > _LARGE_BYTES:
            return True
        for part in gc.get_referents(one):
            if id(part) not in seen and not isinstance(part, type | ModuleType | FunctionType):
                seen.add(id(part))
                waiting.append(part)
    return bool(waiting)


class _ViewsAlone(TorchFunctionMode):
    """Within it, a deep copy of a tensor has that tensor's elements, not its whole storage."""

    def __torch_function__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if called is Tensor.__deepcopy__ and type(args[0]) is Tensor:
            value, copies = args
            made = copies[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
            vars(made).update(copy.deepcopy(vars(value), copies))
            return made
        return called(*args, **(kwargs or {}))


def of_whole_microbatches(dataset: Any, microbatch: int, batch_size: int, *, option: str) -> tuple[Any, bool]:
    """What to give a Job as ``dataset`` and ``drop_last`` so that of an epoch its short microbatch alone is dropped.

    That is what transformers and Lightning mean by it, while a Job's ``drop_last`` drops a step.
    ``microbatch`` and ``batch_size``: samples of a microbatch and of a step; ``option``: what asked for it, for errors.
    Where whole microbatches are left at an epoch's end they are a step of its own, and the dataset is cut to a Subset:
    then the last samples are of no epoch. Raises JobError where nothing is left, and for a stream that had to be cut.
    """
    if not hasattr(dataset, "__len__"):
        return dataset, False  # it has no epochs
    samples = len(dataset)
    over = samples % microbatch
    if samples == over:
        reason = f"{option} leaves nothing to train on: {samples} samples, {microbatch} a batch"
        raise JobError("dataset", reason, "leave it out")
    if over == 0:
        return dataset, False
    if samples % batch_size == over:  # whole steps are left, and which samples are not depends on the epoch
        return dataset, True
    if isinstance(dataset, IterableDataset):
        reason = f"{option} drops the last {over} samples of an epoch, and a stream's end cannot be cut"
        raise JobError("dataset", reason, f"leave it out, or make it a stream of {samples - over} samples")
    return Subset(dataset, range(samples - over)), False


def best_by(keep_best: str) -> tuple[Literal["min", "max", ""], str]:
    """What ``Job.keep_best`` says: whether the smallest or the largest is best ("": not known), and the metric."""
    for direction in ("min", "max"):
        if keep_best.startswith(f"{direction}:"):
            return direction, keep_best[4:]
    if keep_best.endswith("loss"):
        return "min", keep_best
    return ("max" if keep_best.endswith(("acc", "accuracy")) else ""), keep_best


def shown_end(total_steps: int) -> int:
    """The step at which a run ends as events tell it: 0 where it goes on until it is stopped."""
    return 0 if total_steps >= ENDLESS else total_steps


def shown_progress(step: int, total_steps: int) -> str:
    """Where a run is, in words."""
    return f"step {step}" + (f" of {end}" if (end := shown_end(total_steps)) else "")


def build_model(job: Job, *, replica: bool = False) -> nn.Module:
    """The job's model in train mode; a factory runs with all seeds set and the caller's random state kept.

    A module is trained in place by the coordinator; a ``replica`` is a copy of it, for a worker in the same process.
    Raises JobError where a copy would compute other gradients.
    """
    return in_train_mode(model_as_given(job, replica=replica))


def model_as_given(job: Job, *, replica: bool = False) -> nn.Module:
    """``build_model``, in the modes that it is given in."""
    if isinstance(job.model, nn.Module):
        require_copyable(job.model)
        return copied_model(job.model) if replica else job.model
    return made_model(job.model, job.seed)


def in_train_mode(model: nn.Module) -> nn.Module:
    hints = {"train() is not supported": "give the module itself, not what torch.export has made of it"}
    with _as_job_errors("model", f"{type(model).__name__}.train()", hints=hints):
        return model.train()


def lost_modes(model: nn.Module) -> str | None:
    """What to say where parts of ``model`` are in eval mode, as somebody leaves them who freezes them, and ``train``
    puts them into training mode. Raises JobError as ``in_train_mode`` does.
    """
    modes = {name: module.training for name, module in model.named_modules()}
    if not model.training or all(modes.values()):  # as it was loaded: all is to be trained
        return None
    in_train_mode(model)
    lost = [name for name, module in model.named_modules() if module.training and not modes.get(name, True)]
    for name, module in model.named_modules():
        module.training = modes.get(name, module.training)
    first = [name for name in lost if name.rpartition(".")[0] not in lost]  # not the parts of a part
    if not first:
        return None
    return (
        f"{', '.join(first)[:200]} {'is' if len(first) == 1 else 'are'} in eval mode, and a step begins in training "
        "mode, as model.train() gives it: to keep it so, have train() of the model's class switch it off "
        "(docs/own-model.md)"
    )


def replica_of(job: Job, model: nn.Module) -> nn.Module:
    """A copy of ``model``, which ``build_model`` has given.

    Where it holds itself, as by a hook that is a closure, a copy would compute with ``model``'s parameters: another is
    made then, with its values, as where it cannot be copied. Raises JobError where the job's function makes no other.
    """
    given, error = isinstance(job.model, nn.Module), None
    if given or not (place := _closure_over(model)):
        try:
            return copied_model(model)
        except JobError as raised:
            if given:
                raise
            error = raised
    made = build_model(job)
    ours, theirs = ([*one.parameters(), *one.buffers()] for one in (made, model))
    if not {id(tensor) for tensor in ours}.isdisjoint(map(id, theirs)):
        raise error or JobError(
            "model",
            f"its function gives the same parameters again, and {place} holds them: no copy of the model computes with "
            "its own",
            "have it make another model each time",
        )
    with torch.no_grad():
        for own, other in zip(ours, theirs, strict=True):
            own.copy_(other)
    return made.train(model.training)


def require_copyable(model: nn.Module) -> None:
    """Raises JobError for a model of which a copy would compute other gradients, or that torch does not copy."""
    for name, parameter in model.named_parameters():
        hooked: Any = parameter
        if hooked._backward_hooks or hooked._post_accumulate_grad_hooks:
            raise JobError(
                "model",
                f"parameter {name!r} has a hook on its gradient, which no copy of the model has",
                "remove it, or give a function that makes the model and its hooks (model=make)",
            )
    for where, part in model.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:  # as torch.nn.utils.weight_norm leaves one
                named = f"{where}.{name}" if where else name
                raise JobError(
                    "model",
                    f"{named!r} was computed from parameters, and torch copies no such tensor",
                    _MAKE,
                )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in (nn.Parameter, Tensor) and not _is_copied(tensor, {}):
            raise JobError("model", f"{name!r} is a {type(tensor).__name__}, which cannot be copied", _MAKE)
    if place := _closure_over(model):
        raise JobError(
            "model",
            f"{place} holds the model, or a part of it, as a closure, a global name in a function or a weak reference "
            "does, and would compute with that in every copy",
            "have it take what it needs from the module that it is given, or give a function that makes the model "
            "(model=make)",
        )


def copied_model(model: nn.Module, instead: Mapping[int, Any] = MappingProxyType({})) -> nn.Module:
    """A copy, whose parameters are its own. ``instead``: by id, what it has in place of a copy of a tensor.

    What hooks have computed from parameters, as ``weight_norm``'s, torch does not copy, and they compute it again: it
    is the same tensor till then. Raises JobError where there can be no such copy.
    """
    memo: dict[int, Any] = {**{id(value): value for value in _computed(model)}, **instead}
    try:
        made = copy.deepcopy(model, memo)
        _take_tensors(model, made, memo)
    except Exception as error:
        if not (place := _uncopied(model)):  # memory, say
            raise
        raise JobError("model", f"no copy can be made of {place}: {in_one_line(error)}", _MAKE) from error
    known = {id(one): name for name, one in model.named_parameters() if one.requires_grad}
    trained = [one for one in made.parameters() if one.requires_grad]
    shared = [known[id(one)] for one in trained if id(one) in known and id(one) not in instead]
    if shared or len(trained) != len(known):
        kept = (
            f"has its parameter {shared[0]!r} itself" if shared else f"trains {len(trained)} tensors, not {len(known)}"
        )
        raise JobError("model", f"a copy of it {kept}: what workers compute would be lost", _MAKE)
    return made


def _computed(model: nn.Module) -> Iterator[Tensor]:
    """What hooks have left in attributes."""
    for part in model.modules():
        yield from (value for value in vars(part).values() if isinstance(value, Tensor) and not value.is_leaf)


def _take_tensors(model: nn.Module, copied: nn.Module, memo: dict[int, Any]) -> None:
    """Give parts in TorchScript copies of their tensors: theirs are results of a computation, which are not trained,
    and none of those that another part has too."""
    parts: dict[str, Any] = dict(copied.named_modules())
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            for leaf, tensor in (*part._parameters.items(), *part._buffers.items()):
                setattr(parts[name], leaf, copy.deepcopy(tensor, memo))


def _uncopied(model: nn.Module) -> str:
    """What of a model raises where it is copied alone."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        if not _is_copied(tensor, {}):
            return f"{name!r}, a {type(tensor).__name__}"
    known = {id(one): one for one in (*model.modules(), *(tensor for _, tensor in tensors), *_computed(model))}
    for where, part in model.named_modules():
        place = f"module {where or type(part).__name__!r}"
        if hasattr(type(part), "__deepcopy__"):
            if not _is_copied(part, {}):
                return place
            continue
        state = part.__getstate__()
        for name, value in state.items() if isinstance(state, dict) else ():
            if not _is_copied(value, dict(known)):
                return f"attribute {name!r} of {place}"
    return ""


def _is_copied(value: object, memo: dict[int, Any]) -> bool:
    """Whether it can be; where memory lacks for that, nothing else is wrong with it."""
    try:
        copy.deepcopy(value, memo)
    except Exception as error:
        return isinstance(error, MemoryError) or "allocate" in str(error)
    return True


def _closure_over(model: nn.Module) -> str:
    """Where a hook, or an attribute, holds parts of this very model that copies share with it: a function, by its
    closure or by a global name, or a weak reference."""
    own = {id(held) for held in (*model.modules(), *model.parameters(), *model.buffers())}
    for where, part in model.named_modules():
        state = None if hasattr(type(part), "__deepcopy__") else part.__getstate__()
        for name, value in state.items() if isinstance(state, dict) else ():
            forward = name in ("_forward_hooks", "_forward_pre_hooks")
            if (forward or not (name.startswith("_") and name.endswith("hooks"))) and _is_held(own, value):
                place = f"module {where or type(part).__name__!r}"
                return f"a forward hook of {place}" if forward else f"attribute {name!r} of {place}"
    return ""


def _is_held(own: Collection[int], value: object) -> bool:
    """Whether one of ``own`` is found in what a function holds, there or in containers: what is found elsewhere is
    copied with it."""
    return any(id(one) in own for one in held_by_functions(value))


def held_by_functions(value: object, *, shared: bool = False) -> Iterator[object]:
    """What functions in it hold, by their closures, defaults and global names, and what weak references do.
    ``shared``: and the value itself, as arguments of a ``partial``."""
    seen, waiting = set[tuple[int, bool]](), [(value, shared, 0)]
    while waiting:
        value, shared, depth = waiting.pop()
        if (id(value), shared) in seen:
            continue
        if shared:
            yield value
        if depth > _MOST_NESTED:
            continue
        seen.add((id(value), shared))
        parts: Iterable[object] = ()
        if isinstance(value, FunctionType):
            cells = (cell.cell_contents for cell in value.__closure__ or () if cell != CellType())
            given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            parts, shared = (*cells, *given, *_globals_of(value)), True
        elif isinstance(value, MethodType):
            parts = (value.__func__, value.__self__)
        elif isinstance(value, partial):
            parts = (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, weakref.ref):
            parts, shared = (value(),), True
        elif isinstance(value, dict):
            parts = value.values()
        elif isinstance(value, list | tuple | set):
            parts = value
        waiting.extend((one, shared, depth + 1) for one in islice(parts, _MOST_HELD))


def _globals_of(function: FunctionType) -> Iterator[object]:
    """What a function of the user's names at the top of its file, as far as that is no function of another file."""
    known, codes = function.__globals__, [function.__code__]
    if str(known.get("__name__")).partition(".")[0] == "torch":  # it holds no model, and names a great deal
        return
    while codes:
        code = codes.pop()
        codes += (part for part in code.co_consts if isinstance(part, CodeType))
        for name in {said.argval for said in dis.get_instructions(code) if said.opname == "LOAD_GLOBAL"}:
            value = known.get(name)
            if not isinstance(value, FunctionType) or value.__globals__ is known:
                yield value


def made_model(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """What a function or class makes with all seeds set; the caller's random state is kept. Raises JobError."""
    with random_state():
        seed_all(seed)
        hint = ""
        if isinstance(make, type) and issubclass(make, nn.Module):
            where = "torch.nn." if make.__module__.startswith("torch.nn.") else ""
            hint = f"write model=lambda: {where}{make.__name__}(...)"
        model = made_by("model", make, hint=hint)
    if not isinstance(model, nn.Module):
        raise JobError("model", f"the model function returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _own_sampler(loader: DataLoader[Any]) -> str:
    """The class of what chooses a loader's samples, where that is neither torch's order nor its shuffle."""
    if isinstance(loader.dataset, IterableDataset):
        return ""
    batches: Any = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return type(batches).__name__
    sampler = loader.sampler if batches is None else batches.sampler
    if type(sampler) is RandomSampler:
        plain = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    else:
        plain = type(sampler) is SequentialSampler
    return "" if plain else type(sampler).__name__


def parts_of(scheduler: Any) -> list[Any]:
    """A scheduler and those that it is made of, and so on."""
    return [scheduler, *(part for one in getattr(scheduler, "_schedulers", ()) for part in parts_of(one))]


def optimizers_in(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """The optimizers that one of somebody's own makes its steps by, by their place in its attributes (``one``,
    ``several.0``), and so on: no ``state_dict`` of its has theirs, unless it sees to that itself."""
    found: dict[str, torch.optim.Optimizer] = {}
    seen, waiting = {id(optimizer)}, deque((name, value, 0) for name, value in _held_by(optimizer))
    while waiting:
        place, value, depth = waiting.popleft()
        if id(value) in seen or depth > _MOST_NESTED:
            continue
        if isinstance(value, torch.optim.Optimizer):
            found[place] = value
            parts = _held_by(value)
        elif isinstance(value, dict):
            named = all(isinstance(key, str | int) for key in value)  # others may take long to be shown
            parts = [(str(key) if named else str(n), part) for n, (key, part) in enumerate(value.items())]
        elif isinstance(value, list | tuple):
            parts = [(str(number), part) for number, part in enumerate(value)]
        else:
            continue
        seen.add(id(value))
        waiting.extend((f"{place}.{name}", part, depth + 1) for name, part in parts)
    return found


def groups_in(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups of an optimizer, then those of the ones that it holds, each once: they may share them."""
    found = (group for made in (optimizer, *optimizers_in(optimizer).values()) for group in made.param_groups)
    return list({id(group): group for group in found}.values())


def has_rate(group: Mapping[str, Any]) -> bool:
    """Whether a group has a learning rate. Optimizers of somebody's own may have none, or find one in each step."""
    rate = group.get("lr")
    return type(rate) is float or isinstance(rate, Tensor | Real)  # the first at once: it is asked in every step


def rate_of(optimizer: torch.optim.Optimizer) -> float | None:
    """The learning rate of the first group that has one, of its own or of an optimizer that it holds; None: no group
    has."""
    # Of its own first: it takes a while to look at all that it has.
    group = next(filter(has_rate, optimizer.param_groups), None) or next(filter(has_rate, groups_in(optimizer)), None)
    return None if group is None else float(group["lr"])


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the tensors that an optimizer, and those that it holds, keep from step to step."""
    return sum(
        value.numel() * value.element_size()
        for made in (optimizer, *optimizers_in(optimizer).values())
        for state in made.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def _held_by(optimizer: torch.optim.Optimizer) -> list[tuple[str, object]]:
    torchs_own = ("state", "param_groups", "defaults")
    return [(name, value) for name, value in vars(optimizer).items() if name not in torchs_own]


def trained_otherwise(name: str, *, begun: bool) -> str:
    """What is wrong where a parameter is frozen or trained now, other than it was when the run began (``begun``)."""
    was, now = ("trainable", "frozen") if begun else ("frozen", "to be trained")
    return (
        f"parameter {name!r} was {was} when the run began and is {now} now; what is trained is fixed for a run: give "
        "it a group of its own whose learning rate is 0 meanwhile, or begin another run with --init-from"
    )


def made_by(
    part: str, make: Callable[[], _T], *, hint: str = "", hints: Mapping[str, str] = MappingProxyType({})
) -> _T:  # fmt: skip
    """What a function of the job's makes. ``part``: which one. Raises JobError, in one line, where it raises; ``hint``
    and ``hints`` as in ``_as_job_errors``."""
    with _as_job_errors(part, "the function", hint, passed_on=(JobError,), hints=hints):
        return make()


@contextmanager
def _as_job_errors(
    reference: str, what: str, hint: str = "", *, passed_on: tuple[type[Exception], ...] = (),
    hints: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[None]:  # fmt: skip
    """The user's code runs here: whatever it raises becomes a JobError, in one line, which says that ``what`` did.

    ``hints``: what to do, by a part of what is raised; ``hint``: else.
    """
    try:
        yield
    except BaseException as error:
        if is_interrupt(error) or isinstance(error, passed_on):
            raise
        if isinstance(error, MemoryError):
            raise LocalError(f"{what} of the job ({reference}): {LACKS_MEMORY}") from error
        said = in_one_line(error)
        hint = next((known for part, known in hints.items() if part in said), hint)
        raise JobError(reference, f"{what} raised {said}", hint) from error


def step_function(job: Job) -> StepFunction:
    """The job's step as ``(model, batch) -> (loss, metrics)``."""
    if job.step is None:
        loss = job.loss
        return lambda model, batch: (loss_of(model, batch, loss), {})
    given = job.step

    def step(model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        result = given(model, batch)
        if isinstance(result, tuple):
            if len(result) != 2:
                raise TypeError(f"the step returned a tuple of {len(result)}, not a loss or (loss, {{name: number}})")
            value, metrics = result
            return value, {} if metrics is None else metrics
        return result, {}

    return step


def make_dense(model: nn.Module) -> None:
    """What autograd has given parameters sparse gradients (``Embedding(sparse=True)``) is dense, as a step's sum is:
    most optimizers take no other."""
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


def loss_of(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None) -> Tensor:
    """The default step: ``(x, ..., y)`` tuples and dicts such as ``{"input_ids", "attention_mask", "labels"}``.

    Tuples: ``loss(model(*inputs), target)``. Dicts: with ``loss``, ``loss(output, labels)``, where output is the
    model's ``logits`` if it has them; without, the model gets the labels too and its own ``loss`` is taken.
    Raises TypeError for anything else: such jobs give ``step``.
    """
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        if loss is None:
            raise TypeError("the batch is a tuple (inputs, target) and the job has no loss; give loss=... or step=...")
        *inputs, target = batch
        return loss(logits_of(model(*inputs)), target)
    if isinstance(batch, Mapping):
        if loss is None:
            output = model(**batch)
            own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
            if own is None:
                raise TypeError("the batch is a dict, the job has no loss and the model returned none; give loss=...")
            return own  # type: ignore[no-any-return]
        key = next((key for key in _LABELS if key in batch), None)
        if key is None:
            raise TypeError(f"the batch is a dict without any of {', '.join(_LABELS)}; give step=... to say what to do")
        inputs_by_name = {name: value for name, value in batch.items() if name != key}
        return loss(logits_of(model(**inputs_by_name)), batch[key])
    raise TypeError(f"the default step understands (x, y) tuples and dicts, not {type(batch).__name__}; give step=...")


def logits_of(output: Any) -> Any:
    """What a model gives as ``logits``, by name or as an attribute; else its output as it is."""
    if type(output) is Tensor:  # as most do; asking a tensor for an attribute that it lacks takes a while
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return output if logits is None else logits


def require_job(job: object, taker: str) -> None:
    """Raises UsageError where it is none: ``taker`` asks for a Job; JobError as ``_on_the_host`` does."""
    if not isinstance(job, Job):
        made = f"; give {job.__qualname__}()" if isinstance(job, FunctionType) else ""
        raise UsageError(f"{taker} takes a Job, not a {type(job).__name__}{made}")
    _on_the_host("job")


def _on_the_host(reference: str) -> None:
    """Raises JobError where torch makes tensors on another device unless told otherwise, in this thread: buffers that
    bytes are received in among them."""
    device = torch.get_default_device()
    if device.type != "cpu":
        raise JobError(
            reference, f"torch's default device is {device}",
            "leave out torch.set_default_device: each worker moves model and batch to its own device, and a step makes "
            "tensors where its batch is (device=batch.device)",
        )  # fmt: skip


def load_job(reference: str) -> Job:
    """Load ``train.py:job`` or ``package.module:job``: a Job, or a function that returns one.

    The user's own code runs here, with all seeds set to 0 first, so that a model made in it is the same at
    every start. Raises JobError with what is wrong and what to do.
    """
    target, colon, attribute = reference.rpartition(":")
    if not colon or not target or not attribute:
        raise JobError(reference, "is not FILE.py:NAME or MODULE:NAME", "for example train.py:job")
    with random_state():
        seed_all(0)
        job = _load(reference, target, attribute)
    _on_the_host(reference)
    return job


def _load(reference: str, target: str, attribute: str) -> Job:
    module = _import_file(reference, Path(target)) if target.endswith(".py") else _import_module(reference, target)
    found = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            # Jobs and functions of its own, not what it imports; those that are spelled alike first.
            names = [
                name
                for name, value in vars(module).items()
                if not name.startswith("_")
                and (isinstance(value, Job) or getattr(value, "__module__", None) == module.__name__)
                and not isinstance(value, type)
            ]
            alike = difflib.get_close_matches(attribute, names, 3)
            near = ", ".join(dict.fromkeys((*alike, *names[:8])))
            reason = f"{target} has no {attribute!r}"
            raise JobError(reference, reason, f"it has {near}" if near else "") from None
    if not isinstance(found, Job):
        if not callable(found):
            told = "None" if found is None else f"a {type(found).__name__}"
            raise JobError(reference, f"is {told}, not a Job or a function that returns one")
        found = made_by(reference, found, hint="run it alone to see the whole traceback")
    if not isinstance(found, Job):
        raise JobError(reference, f"returned {type(found).__name__}", "return a w5xde_async.Job")
    object.__setattr__(found, "source", _digest(module, found, _folder(module, target)))
    return found


def _folder(module: ModuleType, target: str) -> Path:
    """Where imports of the job's own begin: at its file, or at the top package of its module."""
    if target.endswith(".py") or not module.__file__:
        return Path(target).resolve().parent
    inside = target.count(".") + (Path(module.__file__).stem == "__init__")
    return Path(module.__file__).resolve().parents[inside]


def _digest(module: ModuleType, job: Job, folder: Path) -> bytes:
    """Of the text of ``module``'s file and of what it and ``job`` use by name from files beneath ``folder``, and those
    from others there; and of what ``job`` has of that. Line ends do not count, nor what the files are called, nor what
    else has been imported."""
    texts: dict[Path, bytes] = {}
    pending = [module, *_modules_of(vars(job).values())]
    seen = set(pending)
    while pending:
        one = pending.pop()
        try:
            path = Path(one.__file__ or "").resolve()
            if path.suffix != ".py" or "site-packages" in path.relative_to(folder).parts:
                continue
            text = path.read_bytes().replace(b"\r\n", b"\n")
        except (AttributeError, OSError, ValueError):  # it has no file, or one that is elsewhere
            continue
        texts[path] = hashlib.blake2b(text, digest_size=16).digest()
        used = _modules_of(list(vars(one).values())) - seen
        seen |= used
        pending += used
    names = [_namesake(value).__qualname__ for value in (job.model, job.loss, job.step)]
    return hashlib.blake2b(b"".join(sorted(set(texts.values()))) + repr(names).encode(), digest_size=16).digest()


def _namesake(value: Any) -> type | FunctionType:
    """A function or class; of all else the class."""
    return value if isinstance(value, type | FunctionType) else type(value)


def _modules_of(values: Iterable[Any]) -> set[ModuleType]:
    """Modules among them, and those that have made their functions, classes and instances; none of this package's."""
    found = set()
    for value in values:
        module = value if isinstance(value, ModuleType) else sys.modules.get(_namesake(value).__module__)
        if isinstance(module, ModuleType) and not module.__name__.startswith("w5xde_async"):
            found.add(module)
    return found


def _import_file(reference: str, path: Path) -> Any:
    if not os.path.isfile(path):  # nor one whose name is too long, of which pathlib raises
        raise JobError(reference, f"there is no file {path}", f"the current directory is {Path.cwd()}")
    known = sys.modules.get(path.stem)
    taken = known is not None and getattr(known, "__file__", None) != str(path.resolve())
    name = f"job_{path.stem}" if taken else path.stem  # a file may be called json.py
    before = sys.modules.get(name)
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    top = path.resolve().parent
    while (top.parent / "__init__.py").is_file():
        top = top.parent
    inside = ".".join(path.resolve().relative_to(top.parent).with_suffix("").parts)
    hints = {"no known parent package": f"in {top.parent}, write {inside}:{reference.rpartition(':')[2]}"}
    with _as_job_errors(reference, f"importing {path}", hints=hints):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            if before is not None:
                sys.modules[name] = before
            raise
    return module


def _import_module(reference: str, name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with _as_job_errors(reference, f"importing {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not error.name or not (name == error.name or name.startswith(error.name + ".")):
                raise
    raise JobError(reference, f"there is no module {name}", "for a file write its name with .py")
