"""Settings of the optimizer and the scheduler that are changed where a run is taken up (``--override``)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
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


#: Of a scheduler: what the optimizer's groups say too, and what another setting says.
_SAID_ELSEWHERE = ("base_lrs", "_last_lr", "T_i")
_MOST_SHOWN = 200


def settings_of(optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, str]:
    """The settings of every group, of an optimizer that it holds too, and those of the scheduler and of the ones that
    it is made of, as far as they are numbers, texts and collections of those; as text by name."""
    parts = [] if scheduler is None else parts_of(scheduler)
    return {
        f"scheduler setting {f'part {number}: ' if number else ''}{name.lstrip('_')}": _as_text(value)
        for number, part in enumerate(parts)
        for name, value in vars(part).items()
        if _is_plain(value) and name not in _SAID_ELSEWHERE
    } | {
        f"optimizer setting group {number}: {name}": _as_text(value)
        for number, group in enumerate(groups_in(optimizer))
        for name, value in group.items()
        if name != "params"
    }


def changed_in_vain(
    optimizer: torch.optim.Optimizer, scheduler: Any, *, now: Mapping[str, str], began: Mapping[str, str], told: str
) -> list[str]:
    """What to say of settings that the job has ``now`` and had not when its run ``began``, where those of the optimizer
    and the scheduler, which are the checkpoint's, count; ``told``: --override's, which count instead."""
    counts, said = settings_of(optimizer, scheduler), []
    names = {change.partition("=")[0].strip() for change in told.split(",")}
    for name, value in now.items():
        owner, *_, key = name.split(" ")
        if owner == "optimizer" and key in ("initial_lr", "max_lr", "min_lr"):
            key = "lr"
        if began.get(name, value) == value or counts.get(name, value) == value or f"{owner}.{key}" in names:
            continue
        if name.endswith(" lr") and name.removesuffix("lr") + "initial_lr" in now:
            continue  # which it follows from
        advice = "; give --override optimizer.lr=X to change it" if (owner, key) == ("optimizer", "lr") else ""
        said.append(f"the checkpoint's {name}={counts[name]} counts, not the job's {value}{advice}")
    return said


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _as_text(value: object) -> str:
    if isinstance(value, Counter):  # milestones; a count may be of anything, and large
        once = all(count == 1 for count in value.values())
        value = sorted(value if once else value.items(), key=_order)
    text = str(value)
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[:_MOST_SHOWN]}... ({hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"


def _order(value: Any) -> tuple[bool, Any]:
    """Numbers by size, and whatever else after them."""
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else repr(value)


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
