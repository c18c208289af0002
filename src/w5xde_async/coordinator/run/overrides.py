"""Settings of the optimizer and the scheduler that are changed where a run is taken up (``--override``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from w5xde_async.errors import UsageError
from w5xde_async.job import groups_in, optimizers_in, parts_of


def override(changes: str, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[str]:
    """Set what ``changes`` names, ``optimizer.lr=3e-4,scheduler.total_steps=2000``. What has changed, as text.

    An optimizer's setting is that of every group that has it, also of optimizers that it holds. ``lr`` under a
    scheduler is the rate that the schedule begins with: the present one, and all that the scheduler makes of it, change
    in proportion. Raises UsageError for a name that is none.
    """
    told = []
    for change in changes.split(","):
        name, _, text = change.strip().partition("=")
        owner, _, key = name.partition(".")
        value = float(text)
        before = _set_group(optimizer, scheduler, key, value) if owner == "optimizer" else [_set(scheduler, key, value)]
        if before != [value]:
            told.append(f"{name} is {value:g}, was {' and '.join(f'{one:g}' for one in before)}")
    return told


def _set_group(optimizer: torch.optim.Optimizer, scheduler: Any, key: str, value: float) -> list[float]:
    """What it was: of the first group where all change in proportion, else every number that one of them had."""
    groups = groups_in(optimizer)
    known = {name for group in groups for name, now in group.items() if _is_number(now)}
    if key not in known:
        has = ", ".join(sorted(known)) or "no number in its param_groups"
        raise UsageError(f"--override optimizer.{key}: {type(optimizer).__name__} has {has}")
    for made in (optimizer, *optimizers_in(optimizer).values()):
        if any(key in group for group in made.param_groups):
            _check(made, key, value)
    # A scheduler of somebody's own need not keep what it begins with.
    scaled = key == "lr" and scheduler is not None and any("initial_lr" in group for group in groups)
    name = "initial_lr" if scaled else key
    present = [float(group[name]) for group in groups if _is_number(group.get(name))][: 1 if scaled else None]
    before = present[0]
    was = list(dict.fromkeys(present))
    if was == [value]:
        return was
    if scaled and not before:
        raise UsageError("--override optimizer.lr: the schedule begins with 0, of which nothing is in proportion")
    for group in groups:
        for name in ("lr", "initial_lr", "max_lr", "min_lr") if scaled else (key,):
            if _is_number(group.get(name)):
                _put(group, name, float(group[name]) * (value / before) if scaled else value)
    for part in parts_of(scheduler) if scaled else ():
        for name in ("base_lrs", "max_lrs"):  # CyclicLR has its upper rates beside the optimizer's
            if hasattr(part, name):
                setattr(part, name, [rate * (value / before) for rate in getattr(part, name)])
    return was


def _check(optimizer: torch.optim.Optimizer, key: str, value: float) -> None:
    """Whether torch's own optimizers would begin with it. Raises UsageError."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim."):
        try:
            changed: dict[str, Any] = {key: value}
            kind([torch.zeros(1, requires_grad=True)], **changed)
        except ValueError as error:
            raise UsageError(f"--override optimizer.{key}={value:g}: {error}") from None
        except TypeError:
            pass  # it is a group's, and no argument


def _set(scheduler: Any, key: str, value: float) -> float:
    if scheduler is None:
        raise UsageError(f"--override scheduler.{key}: the job has no scheduler")
    known = {name: part for part in parts_of(scheduler) for name, now in vars(part).items() if _is_number(now)}
    if key not in known or key.startswith("_"):
        names = ", ".join(sorted(name for name in known if not name.startswith("_")))
        raise UsageError(f"--override scheduler.{key}: {type(scheduler).__name__} has {names}")
    before = float(vars(known[key])[key])
    _put(vars(known[key]), key, value)
    return before


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor | float | int) and not isinstance(value, bool)


def _put(settings: dict[str, Any], name: str, value: float) -> None:
    """In the type that it has."""
    now = settings[name]
    if isinstance(now, Tensor):
        settings[name] = torch.full_like(now, value)
    else:
        settings[name] = int(value) if isinstance(now, int) and value.is_integer() else value
