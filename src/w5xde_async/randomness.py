"""The process's random state, borrowed: torch's default generators, ``random`` and numpy's global one.

They belong to the process, so whoever draws from them takes turns under one lock, seeds them from what is being
computed, and puts back what was there: a worker or a loader may be a guest in somebody's program.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch

__all__ = ["draws_random", "random_state", "seed_all"]

_TURN = threading.RLock()  # a job's own code may build models and load jobs

# ``random.seed`` without its handling of strings: what it does for a number, at half the time. Once a leaf counts.
_GENERATOR: Any = random._inst
_seed_python = super(random.Random, _GENERATOR).seed


def seed_all(seed: int, device: torch.device | None = None, *, python: bool = True) -> None:
    """Seed every generator that a job's code may use, on the CPU and on ``device``; ``random`` and numpy on request."""
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device is not None and device.type == "mps":
        torch.mps.manual_seed(seed)
    if not python:
        return
    _seed_python(seed)
    _GENERATOR.gauss_next = None
    np.random.seed(seed & 0xFFFFFFFF)


class random_state:
    """Hold the process's random state alone; it is put back at the end (the device's own is not).

    >>> with random_state() as state:
    ...     seed_all(1)
    """

    def __enter__(self) -> Self:
        _TURN.acquire()
        self._torch = torch.default_generator.get_state()
        self._python = _python_state()
        self._same = False
        return self

    def unmoved(self) -> bool:
        """True when nobody has seeded or drawn from ``random`` and numpy so far."""
        self._same = _equal(self._python, _python_state())
        return self._same

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self._torch)
        if not self._same:
            random.setstate(self._python[0])
            np.random.set_state(self._python[1])
        _TURN.release()


def draws_random(action: Callable[[], object], seed: int) -> bool:
    """Run ``action`` with all generators seeded and tell whether it drew from any of them."""
    with random_state():
        seed_all(seed)
        before, python = torch.default_generator.get_state(), _python_state()
        action()
        return not (_equal(python, _python_state()) and torch.equal(before, torch.default_generator.get_state()))


_PythonState = tuple[Any, Any]


def _python_state() -> _PythonState:
    return random.getstate(), np.random.get_state()


def _equal(a: _PythonState, b: _PythonState) -> bool:
    return a[0] == b[0] and a[1][2:] == b[1][2:] and bool(np.array_equal(a[1][1], b[1][1]))
