"""The process's random state, borrowed: torch's default generators, ``random`` and numpy's global one.

They belong to the process, so whoever draws from them takes turns under one lock, seeds them from what is being
computed, and puts back what was there: a worker or a loader may be a guest in somebody's program.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["draws_random", "random_state", "seed_all"]

_TURN = threading.Lock()

# ``random.seed`` without its handling of strings: what it does for a number, at half the time. Once a leaf counts.
_GENERATOR: Any = random._inst
_seed_python = super(random.Random, _GENERATOR).seed


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seed every generator that a job's code may use, on the CPU and on ``device``."""
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device is not None and device.type == "mps":
        torch.mps.manual_seed(seed)
    _seed_python(seed)
    _GENERATOR.gauss_next = None
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def random_state(device: torch.device | None = None) -> Iterator[None]:
    """Hold the process's random state alone; it is put back at the end (the device's own is not)."""
    with _TURN:
        kept = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(kept[0])
            random.setstate(kept[1])
            np.random.set_state(kept[2])


def draws_random(action: Callable[[], object]) -> bool:
    """Run ``action`` and tell whether it drew from any of the generators."""
    with random_state():
        seed_all(0)
        before = torch.default_generator.get_state(), random.getstate(), _numpy_state()
        action()
        after = torch.default_generator.get_state(), random.getstate(), _numpy_state()
    same_numpy = bool(np.array_equal(before[2][0], after[2][0])) and before[2][1:] == after[2][1:]
    return not (torch.equal(before[0], after[0]) and before[1] == after[1] and same_numpy)


def _numpy_state() -> tuple[Any, ...]:
    return tuple(np.random.get_state(legacy=True))[1:]
