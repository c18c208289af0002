"""The registry of planted bugs, and how one is there for a time."""

from __future__ import annotations

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


BUGS: dict[str, Bug] = {}


LOST = ("worker killed", "link reset", "cut in mid-frame")
RESTART = ("coordinator killed", "coordinator stopped in good order")
POWER = ("coordinator without power", "coordinator dies while it writes")


def bug(name: str, text: str, *faults: str) -> Callable[[Callable[[Put], None]], Callable[[Put], None]]:
    def register(plant: Callable[[Put], None]) -> Callable[[Put], None]:
        BUGS[name] = Bug(text, plant, faults)
        return plant

    return register


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The bug is there for the time of the block."""
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, attribute: str, value: Any) -> None:
        undo.append((owner, attribute, owner.__dict__[attribute]))
        setattr(owner, attribute, value)

    try:
        BUGS[name].plant(put)
        yield
    finally:
        for owner, attribute, value in reversed(undo):
            setattr(owner, attribute, value)
