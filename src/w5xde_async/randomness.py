"""The process's random state, borrowed: torch's default generators, ``random`` and numpy's global one.

They belong to the process, so whoever draws from them takes turns under one lock, seeds them from what is being
computed, and puts back what was there: a worker or a loader may be a guest in somebody's program.
"""

from __future__ import annotations

import ctypes
import random
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

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
        _mps_seeded[:] = [torch.mps.get_rng_state()]
    if not python:
        return
    _seed_python(seed)
    _GENERATOR.gauss_next = None
    np.random.seed(seed & 0xFFFFFFFF)


def has_drawn(device: torch.device) -> bool:
    """Whether anybody has drawn from torch's generators, the CPU's and the device's, since ``seed_all``."""
    if _header(torch.default_generator) not in _SEEDED:
        return True
    if device.type == "mps":
        return not all(torch.equal(state, torch.mps.get_rng_state()) for state in _mps_seeded)
    return device.type == "cuda" and _header(torch.cuda.default_generators[device.index or 0]) not in _SEEDED


def _header(generator: torch.Generator) -> bytes:
    """How far a generator is: the CPU's place in its Mersenne twister, or CUDA's offset. Behind the seed."""
    return generator.get_state().numpy()[8:24].tobytes()


# No draw leads back there: the twister's place is never again both before its first number and before its next 624.
_SEEDED = {_header(torch.Generator()), bytes(8)}
_mps_seeded: list[Tensor] = []  # MPS has no such place: where its generator stood when it was seeded last


class random_state:
    """Hold the process's random state alone; it is put back at the end (the device's own is not).

    ``quick`` is for holders that expect nobody to draw from ``random`` or numpy: it costs a tenth, and where somebody
    drew after all, numpy's spare gaussian is lost. With ``spans`` it is held for several of those, one after the other,
    each of which seeds what it draws from: torch's state is put back at the end of this one alone.

    >>> with random_state() as state:
    ...     seed_all(1)
    """

    _spanning: random_state | None = None  # the one that does, of the thread that has the turn

    def __init__(self, *, quick: bool = False, spans: bool = False) -> None:
        self._quick, self._spans = quick or spans, spans
        self._python: tuple[Any, ...]
        self._raw: bytes | None
        self._numpy: Any

    def __enter__(self) -> Self:
        _TURN.acquire()
        self._same = False
        self._around = outer = random_state._spanning if self._quick else None
        if outer is not None:  # whoever draws from these two puts them back
            self._python, self._raw, self._numpy = outer._python, outer._raw, outer._numpy
            return self
        self.torch_state = torch.default_generator.get_state()
        self._python = _raw_python() if self._quick else random.getstate()
        self._raw = _raw_numpy() if self._quick else None
        self._numpy = np.random.get_state() if self._raw is None else None
        if self._spans:
            random_state._spanning = self
        return self

    def unmoved(self) -> bool:
        """True when nobody has seeded or drawn from ``random`` and numpy so far."""
        if self._raw is None:
            same = _equal(self._numpy, np.random.get_state())
        else:
            same = self._raw == _raw_numpy()
        self._same = same and self._python == (_raw_python() if self._quick else random.getstate())
        return self._same

    def __exit__(self, *_: object) -> None:
        if self._around is None:
            torch.default_generator.set_state(self.torch_state)
        if self._spans and self._around is None:
            random_state._spanning = None
            self.unmoved()
        if not self._same:
            random.setstate(_of_raw(self._python) if isinstance(self._python[0], bytes) else self._python)
            if self._raw is None:
                np.random.set_state(self._numpy)
            else:
                key = np.frombuffer(self._raw[:-4], np.uint32)
                np.random.set_state(("MT19937", key, *_POSITION.unpack(self._raw[-4:])))
        _TURN.release()


class PythonGenerators:
    """Where ``random`` and numpy's global generator stand. Whoever draws from them holds the random state."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()

    @contextmanager
    def again(self) -> Iterator[None]:
        """They stand there once more, until the end."""
        later = PythonGenerators()
        self._set()
        try:
            yield
        finally:
            later._set()

    def _set(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)


_unwatched: list[object] = []  # what runs in some thread without the lock, though it might draw


class unwatched:
    """What is done in it has never drawn, and is not waited for by those who take turns; nobody claims the state."""

    def __enter__(self) -> None:
        _unwatched.append(self)

    def __exit__(self, *_: object) -> None:
        _unwatched.remove(self)


class Claim:
    """Whether this thread has the random state, for which it waits no longer than ``seconds``; until the end.

    >>> with Claim() as mine:
    ...     mine
    True
    """

    __slots__ = ("_mine", "_seconds")

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def __enter__(self) -> bool:
        self._mine = not _unwatched and (
            _TURN.acquire(blocking=False) or (self._seconds > 0 and _TURN.acquire(timeout=self._seconds))
        )
        return self._mine

    def __exit__(self, *_: object) -> None:
        if self._mine:
            _TURN.release()


def draws_random(action: Callable[[], object], seed: int) -> bool:
    """Run ``action`` with all generators seeded and tell whether it drew from any of them."""
    with random_state():
        seed_all(seed)
        with random_state() as state:
            action()
            return not (state.unmoved() and torch.equal(state.torch_state, torch.default_generator.get_state()))


_numpy: Any = np.random  # its typing does not know all of it
_POSITION = struct.Struct("=i")


class _Twister:
    """Where numpy's global Mersenne twister lies in memory. It is another one after ``np.random.set_bit_generator``."""

    def __init__(self) -> None:
        self._generator: Any = None  # kept, so that its memory stays its own
        self._memory: Any = None

    def raw(self) -> bytes | None:
        """Its state: 624 words and the position in them; None where numpy has another kind of generator."""
        generator = _numpy.get_bit_generator()
        if generator is not self._generator:
            self._generator, self._memory = generator, None
            if type(generator) is np.random.MT19937:
                self._memory = _Raw.from_address(generator.ctypes.state_address)
        raw: bytes | None = None if self._memory is None else self._memory.raw
        return raw


_Raw = ctypes.c_char * (624 * 4 + 4)
_raw_numpy = _Twister().raw
_WORDS = struct.Struct("=i624I")
_STATE_AT = object.__basicsize__  # of what CPython's generator is: its place in the twister, and 624 words
_python_memory: Any = (ctypes.c_char * _WORDS.size).from_address(id(_GENERATOR) + _STATE_AT)  # read where it _LIES_SO


def _raw_python() -> tuple[Any, ...]:
    """The state of ``random`` as it lies in memory, and its spare gaussian; ``random.getstate()`` where it lies
    otherwise. That makes 625 numbers, which takes longer than all else that is done around a small leaf."""
    if not _LIES_SO:
        return random.getstate()
    return _python_memory.raw, _GENERATOR.gauss_next


def _of_raw(raw: tuple[Any, ...]) -> tuple[Any, ...]:
    place, *words = _WORDS.unpack(raw[0])
    return random.Random.VERSION, (*words, place), raw[1]


def _lies_so() -> bool:
    if random.Random.__basicsize__ < _STATE_AT + _WORDS.size or type(_GENERATOR) is not random.Random:
        return False
    return _of_raw((_python_memory.raw, random.getstate()[2])) == random.getstate()


_LIES_SO = _lies_so()


def _equal(a: Any, b: Any) -> bool:
    return bool(a[2:] == b[2:] and np.array_equal(a[1], b[1]))
