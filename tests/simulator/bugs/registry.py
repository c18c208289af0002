"""The registry of planted bugs, and how one is there for a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["BUGS", "LOST", "POWER", "RESTART", "Bug", "Put", "bug", "planted"]

Put = Callable[[Any, str, Any], None]


@dataclass(frozen=True)
class Bug:
    """``text`` says what is wrong, ``plant`` puts it there, ``faults`` (any, where there are none) bring it out."""

    text: str
    plant: Callable[[Put], None]
    faults: tuple[str, ...] = ()
    kind: str = ""  # of a simulation, as ``world.KINDS``


BUGS: dict[str, Bug] = {}


LOST = ("worker killed", "link reset", "cut in mid-frame")
RESTART = ("coordinator killed", "coordinator stopped in good order")
POWER = ("coordinator without power", "coordinator dies while it writes")


def bug(name: str, text: str, *faults: str, kind: str = "") -> Callable[[Callable[[Put], None]], Callable[[Put], None]]:
    def register(plant: Callable[[Put], None]) -> Callable[[Put], None]:
        BUGS[name] = Bug(text, plant, faults, kind)
        return plant

    return register


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The bug is there for the time of the block."""
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, attribute: str, value: Any) -> None:
        _check_call(owner, attribute, value)
        undo.append((owner, attribute, owner.__dict__[attribute]))
        setattr(owner, attribute, value)

    try:
        BUGS[name].plant(put)
        yield
    finally:
        for owner, attribute, value in reversed(undo):
            setattr(owner, attribute, value)


def _check_call(owner: Any, attribute: str, value: Any) -> None:
    """Refuse what cannot be called as the real thing is: the call would raise, and that is not the bug planted."""
    real = owner.__dict__[attribute]
    if not inspect.isfunction(real):
        return
    wanted, given = inspect.signature(real).parameters, inspect.signature(value).parameters
    kinds = {parameter.kind for parameter in given.values()}
    positional = [p for p in wanted.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = [p for p in given.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    fits = inspect.Parameter.VAR_POSITIONAL in kinds or len(taken) >= len(positional)
    for name, parameter in wanted.items():
        by_name = parameter.kind is parameter.KEYWORD_ONLY
        fits &= not by_name or name in given or inspect.Parameter.VAR_KEYWORD in kinds
    given_only = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p for p in given.values() if p.default is p.empty and p.kind not in given_only]
    if not fits or len(required) > len(wanted):
        here = f"{owner.__name__}.{attribute}"
        raise TypeError(f"{here} is called as {inspect.signature(real)}, not as {inspect.signature(value)}")
