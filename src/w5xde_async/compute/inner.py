"""The optimizer that a worker runs itself (local steps), sent to it as a name on a list and numbers.

The coordinator makes the job's optimizer and scheduler, ``describe_inner`` turns the optimizer into plain containers
that msgpack carries, and ``build_inner`` makes the same one at the worker, which needs no code of the job's for it. A
scheduler is never sent: a ``Schedule`` lets it run at the coordinator and gives what it sets at each step, numbers
again, so any scheduler of the step number will do, one made of the user's own functions too.

Invariants: a name stands for one of torch's own classes, never looked up elsewhere; every option is on that class's
list; numbers are finite and in the range that torch's constructor accepts; groups hold trainable entries of the layout,
each at most once. The optimizer built has the same bits as the one described, on the same kind of machine.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from w5xde_async.errors import JobError, LeafFailed, MalformedFrame, UpdateFailed
from w5xde_async.job import parts_of
from w5xde_async.params.flat import state_of
from w5xde_async.params.layout import Layout
from w5xde_async.users_code import users_code

_ALL = ("lr", "weight_decay", "foreach", "maximize")
_ADAM = (*_ALL, "betas", "eps", "decoupled_weight_decay")
#: Torch's class and the options of it that are sent. LBFGS needs a closure and SparseAdam sparse gradients.
INNER_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    "SGD": (torch.optim.SGD, (*_ALL, "momentum", "dampening", "nesterov", "fused")),
    "Adam": (torch.optim.Adam, (*_ADAM, "amsgrad", "fused")),
    "AdamW": (torch.optim.AdamW, (*_ADAM, "amsgrad", "fused")),
    "NAdam": (torch.optim.NAdam, (*_ADAM, "momentum_decay")),
    "RAdam": (torch.optim.RAdam, _ADAM),
    "Adamax": (torch.optim.Adamax, (*_ALL, "betas", "eps")),
    "RMSprop": (torch.optim.RMSprop, (*_ALL, "momentum", "alpha", "eps", "centered")),
    "Adagrad": (torch.optim.Adagrad, (*_ALL, "lr_decay", "eps", "initial_accumulator_value", "fused")),
    "Adadelta": (torch.optim.Adadelta, (*_ALL, "rho", "eps")),
    "ASGD": (torch.optim.ASGD, (*_ALL, "lambd", "alpha", "t0")),
    "Rprop": (torch.optim.Rprop, ("lr", "foreach", "maximize", "etas", "step_sizes")),
}
_FLAGS = {"nesterov", "amsgrad", "centered", "maximize", "decoupled_weight_decay"}
_CHOICES = {"foreach", "fused"}  # None, and torch chooses; or a flag
_OF_CONSTRUCTOR = {"initial_accumulator_value"}
_PAIRS = {"betas", "etas", "step_sizes"}
#: What a schedule may set beside ``lr``: one of them, where it cycles momentum (OneCycleLR, CyclicLR).
_CYCLED = {"momentum", "betas"}
_MAX_GROUPS = 4096
_MAX_NUMBER = 1e12


# -- at the coordinator ------------------------------------------------------------------------------------------


def describe_inner(
    optimizer: torch.optim.Optimizer, layout: Layout, model: nn.Module, *, scheduled: Sequence[str] = ("lr",)
) -> dict[str, Any]:
    """A fresh optimizer over ``model``'s parameters as plain containers. ``scheduled`` is ``Schedule.scheduled``.

    Raises JobError naming what is not on the list and what to do instead.
    """
    kind = type(optimizer)
    found = INNER_OPTIMIZERS.get(kind.__name__)
    if found is None or found[0] is not kind:
        known = ", ".join(INNER_OPTIMIZERS)
        raise JobError("optimizer", f"workers do not run {kind.__module__}.{kind.__qualname__}", f"take one of {known}")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise JobError("optimizer", "it has step hooks, which are code and stay here", "leave them out")
    if any(float(state.get("step", 0)) for state in optimizer.state.values()):
        raise JobError("optimizer", "it has made steps already", "make a fresh one")
    index_of = {id(tensor): index for index, tensor in enumerate(state_of(model, layout))}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        frozen = [p for p in group["params"] if id(p) not in index_of]
        if frozen:
            raise JobError("optimizer", f"group {number} holds a parameter that is not the model's")
        entries = [index_of[id(p)] for p in group["params"] if p.requires_grad]
        if len(entries) > len(set(entries)):
            twice = next(layout.entries[index].name for index in entries if entries.count(index) > 1)
            raise JobError(
                "optimizer", f"group {number} names {twice} twice, and would step it twice",
                "make it from model.parameters(), which names tied weights once",
            )  # fmt: skip
        # Torch takes an accumulator's first value from its constructor and ignores it in a group.
        group = {**group, **{o: v for o, v in optimizer.defaults.items() if o in _OF_CONSTRUCTOR}}
        options = {name: _described(kind.__name__, name, group[name]) for name in found[1] if name in group}
        for name in optimizer.defaults:
            if name not in options and group.get(name):
                raise JobError("optimizer", f"workers do not run {kind.__name__} with {name}", f"leave {name} out")
        groups.append({"entries": entries, **options})
    return {"name": kind.__name__, "scheduled": list(scheduled), "groups": groups}


def _described(optimizer: str, name: str, value: Any) -> Any:
    plain = [_plain(one) for one in value] if name in _PAIRS and isinstance(value, tuple | list) else _plain(value)
    try:
        _check_option(name, plain)
    except ValueError as error:
        hint = "give a plain number" if isinstance(value, Tensor) else ""
        raise JobError("optimizer", f"{optimizer}: {error}", hint) from None
    return plain


def has_memory(optimizer: torch.optim.Optimizer, scheduled: Sequence[str] = ("lr",)) -> bool:
    """Whether its steps depend on those before: all do but SGD without momentum."""
    return (
        type(optimizer) is not torch.optim.SGD
        or "momentum" in scheduled
        or any(group["momentum"] for group in optimizer.param_groups)
    )


class Schedule:
    """What a job's scheduler sets at each step, by step number. It runs ahead as far as it was asked for.

    It owns ``optimizer`` and ``scheduler``, whose parameters it leaves as they are, and keeps 8 bytes a number.
    ``scheduled`` names what a row has of every group: ``lr``, and ``momentum`` or the first of ``betas`` where the
    scheduler cycles it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any | None) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        cycled: tuple[str, ...] = ()
        if any(getattr(part, "cycle_momentum", False) for part in parts_of(scheduler)):
            cycled = ("betas",) if "betas" in optimizer.defaults else ("momentum",)
        self.scheduled: tuple[str, ...] = ("lr", *cycled)
        self._width = len(self.scheduled) * len(optimizer.param_groups)
        self._sizes = [sum(parameter.numel() for parameter in group["params"]) for group in optimizer.param_groups]
        self._fixed = self._others()
        self._numbers = array("d")
        if scheduler is not None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            optimizer.step()  # of nothing: torch warns of a scheduler that is stepped before
        self._take()

    def rows(self, first: int, count: int) -> list[list[float]]:
        """One row for each of the steps ``first`` to ``first + count - 1``, for ``set_scheduled``.

        Raises JobError where the scheduler sets something that is not sent, UpdateFailed where it raises.
        """
        if self._scheduler is None:
            return [list(self._numbers)] * count
        while len(self._numbers) < (first + count) * self._width:
            try:
                with users_code():
                    self._scheduler.step()
            except Exception as error:
                step = len(self._numbers) // self._width - 1
                raise UpdateFailed(step, error, LeafFailed.shown(error)) from error
            if self._others() != self._fixed:
                raise JobError("scheduler", "it sets more than learning rates and momentum", "leave the rest constant")
            self._take()
        width = self._width
        return [list(self._numbers[row * width : (row + 1) * width]) for row in range(first, first + count)]

    def rate(self, step: int) -> float:
        """How far a step goes by its learning rates, beside the others: their root mean square over parameters."""
        lrs = self.rows(step, 1)[0][:: len(self.scheduled)]
        return math.sqrt(sum(n * lr * lr for n, lr in zip(self._sizes, lrs, strict=True)) / max(sum(self._sizes), 1))

    def _take(self) -> None:
        owner, does = ("optimizer", "has {} of") if self._scheduler is None else ("scheduler", "sets {} to")
        for group in self._optimizer.param_groups:
            for name in self.scheduled:
                value = group[name][0] if name in _PAIRS else group[name]
                if isinstance(value, Tensor):
                    raise JobError("optimizer", f"it has {value!r} as {name}", "give a plain number")
                number = _plain(value)
                if not _is_number(number):
                    hint = f"give plain numbers of at most {_MAX_NUMBER:g}"
                    raise JobError(owner, f"it {does.format(name)} {value!r}", hint)
                self._numbers.append(number)

    def _others(self) -> list[list[Any]]:
        """What a scheduler must leave alone."""
        names = [name for name in self._optimizer.defaults if name not in self.scheduled]
        return [[group[name] for name in names] for group in self._optimizer.param_groups]


def _plain(value: Any) -> Any:
    """As a float where it is a number of another library's: numpy's come of a user's own arithmetic."""
    if type(value) in (int, float, bool) or not isinstance(value, Real):
        return value
    return float(value)


# -- at the worker -----------------------------------------------------------------------------------------------


def build_inner(description: Any, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """The optimizer that was described, without state. ``parameters``: the layout's tensors, in layout order.

    Raises MalformedFrame with the option and the reason for anything that ``describe_inner`` does not make.
    """
    try:
        return _build(description, parameters)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:  # the last three: torch's constructors
        raise MalformedFrame(f"inner optimizer: {error}") from None


def _build(description: Any, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    _need(isinstance(description, dict) and set(description) == {"name", "scheduled", "groups"}, "it has other fields")
    name, groups, scheduled = description["name"], description["groups"], description["scheduled"]
    _need(isinstance(name, str) and name in INNER_OPTIMIZERS, f"{str(name)[:40]!r} is not on the list")
    kind, options = INNER_OPTIMIZERS[name]
    _need(isinstance(groups, list) and 1 <= len(groups) <= _MAX_GROUPS, f"not 1 to {_MAX_GROUPS} groups")
    taken: set[int] = set()
    made: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        _need(isinstance(group, dict) and "entries" in group, f"group {number} has no entries")
        given = {option: value for option, value in group.items() if option != "entries"}
        for option, value in given.items():
            _need(option in options, f"{name} has no option {str(option)[:40]!r} here")
            _check_option(option, value)
        _need("lr" in given, f"group {number} has no lr")
        given = {option: tuple(value) if option in _PAIRS else value for option, value in given.items()}
        # Torch checks what its constructor is given, but not what stands in a group.
        kind([torch.zeros(1, requires_grad=True)], **{o: v for o, v in given.items() if _in_constructor(name, o)})
        made.append({"params": _pick(group["entries"], parameters, taken), **given})
    first: dict[str, Any] = {o: v for o, v in made[0].items() if o == "lr" or o in _OF_CONSTRUCTOR}
    optimizer = kind(made, **first)
    for group in made:
        for option in group:
            _need(option == "params" or option in optimizer.defaults, f"{name} of this torch has no option {option!r}")
    _need(
        isinstance(scheduled, list)
        and scheduled[:1] == ["lr"]
        and len(scheduled) <= 2
        and all(type(s) is str and s in _CYCLED and all(s in group for group in made) for s in scheduled[1:]),
        "it schedules something else",
    )
    return optimizer


def _in_constructor(name: str, option: str) -> bool:
    return not (name == "AdamW" and option == "decoupled_weight_decay")  # which is what makes it an AdamW


def _pick(entries: Any, parameters: Sequence[Tensor], taken: set[int]) -> list[Tensor]:
    _need(isinstance(entries, list) and len(entries) <= len(parameters), "its entries are not a list of this layout's")
    for index in entries:
        _need(type(index) is int and 0 <= index < len(parameters), f"there is no entry {index!r:.40}")
        _need(parameters[index].requires_grad, f"entry {index} is not trainable")
        _need(index not in taken, f"entry {index} stands twice")
        taken.add(index)
    return [parameters[index] for index in entries]


def set_scheduled(optimizer: torch.optim.Optimizer, scheduled: Sequence[str], row: Sequence[float]) -> None:
    """Set what a schedule says of one step. Raises MalformedFrame for a row that does not fit."""
    groups = optimizer.param_groups
    if len(row) != len(scheduled) * len(groups) or not all(map(_is_number, row)):
        raise MalformedFrame(f"{list(row)} for {len(groups)} groups' {', '.join(scheduled)}"[:300])
    values = iter(row)
    for group in groups:
        for name, value in zip(scheduled, values, strict=False):
            group[name] = (value, *group[name][1:]) if name in _PAIRS else value


# -- both --------------------------------------------------------------------------------------------------------


def _check_option(name: str, value: Any) -> None:
    if name in _FLAGS:
        fits = type(value) is bool
    elif name in _CHOICES:
        fits = value is None or type(value) is bool
    elif name in _PAIRS:
        fits = isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
    else:
        fits = _is_number(value)
    _need(fits, f"{name} is {value!r:.80}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MAX_NUMBER  # which no NaN is


def _need(holds: bool, reason: str) -> None:
    if not holds:
        raise ValueError(reason)
