"""The process's random state: seeded, borrowed, given back."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from w5xde_async.randomness import draws_random, has_drawn, random_state, seed_all

DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(()),
    "python": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: np.random.rand(),
    "numpy normal": lambda: np.random.standard_normal(),
}


def sequence() -> list[float]:
    return [float(draw()) for draw in DRAWS.values() for _ in range(3)]  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_numbers() -> None:
    with random_state():
        seed_all(5)
        first = sequence()
        random.gauss(0, 1)  # leaves half of a pair behind
        seed_all(5)
        assert sequence() == first
        seed_all(6)
        assert sequence() != first


def dropout(p: float) -> Tensor:
    return F.dropout(torch.ones(64), p)


@pytest.mark.parametrize(
    ("draw", "drawn"),
    [
        *[(partial(torch.rand, count), True) for count in (1, 2, 623, 624, 625, 1248, 624 * 7)],
        (lambda: torch.randn(5), True),
        (lambda: torch.randperm(3), True),
        (lambda: torch.bernoulli(torch.full((2,), 0.5)), True),
        (lambda: dropout(0.5), True),
        (lambda: dropout(0.0), False),
        (lambda: F.scaled_dot_product_attention(*[torch.ones(1, 2, 4, 8)] * 3, dropout_p=0.5), True),
        (lambda: F.scaled_dot_product_attention(*[torch.ones(1, 2, 4, 8)] * 3), False),
        (random.random, False),  # the same on every machine
        (np.random.rand, False),
        (lambda: torch.ones(9).sum(), False),
        (lambda: torch.rand(3, generator=torch.Generator()), False),
    ],
)
@pytest.mark.parametrize("seed", [0, 5, (1 << 63) - 1])
def test_whether_torch_drew_is_seen(draw: Callable[[], object], drawn: bool, seed: int) -> None:
    with random_state():
        seed_all(seed)
        assert not has_drawn(torch.device("cpu"))
        draw()
        assert has_drawn(torch.device("cpu")) is drawn


class Accelerator:
    """Of its generator a state is known, and how to seed it."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.manual_seed, self.get_rng_state = self.generator.manual_seed, self.generator.get_state


@pytest.mark.parametrize("name", ["mps", "cuda:0"])
def test_draws_on_a_device_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Accelerator()
    monkeypatch.setattr(torch, "mps", fake)
    monkeypatch.setattr(torch.cuda, "default_generators", (fake.generator,))
    with random_state():
        for seed in (5, 6):
            seed_all(seed, torch.device(name))
            assert not has_drawn(torch.device(name))
            torch.rand(3, generator=fake.generator)
            assert has_drawn(torch.device(name))
            assert not has_drawn(torch.device("cpu"))


def test_python_and_numpy_are_seeded_as_their_own_functions_do() -> None:
    with random_state():
        seed_all(1234567890123)
        found = random.random(), np.random.rand(), torch.rand(()).item()
        random.seed(1234567890123)
        np.random.seed(1234567890123 & 0xFFFFFFFF)
        torch.manual_seed(1234567890123)
        assert found == (random.random(), np.random.rand(), torch.rand(()).item())


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1])
def test_any_63_bit_seed(seed: int) -> None:
    with random_state():
        seed_all(seed)


@pytest.mark.parametrize("spans", [False, True])
def test_the_state_is_put_back_even_after_an_error(spans: bool) -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = sequence()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)

    def work() -> None:
        with random_state(spans=spans):
            seed_all(9)
            sequence()
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert sequence() == expected


@pytest.mark.parametrize("source", ["none", *DRAWS])
def test_what_is_held_for_several_is_put_back_at_its_end(source: str) -> None:
    """Each of them finds ``random`` and numpy as they were before all of them."""

    def state() -> tuple[Any, ...]:
        key = np.random.get_state()
        return random.getstate(), key[1].tolist(), key[2]

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before, draw = (*state(), torch.get_rng_state().tolist()), DRAWS.get(source, lambda: None)
    with random_state(spans=True):
        for number in range(4):
            with random_state(quick=True) as one:
                seed_all(number, python=False)
                assert state() == before[:3]
                assert one.unmoved()
                if number == 2:
                    draw()
                assert one.unmoved() == (number != 2 or source in ("none", "torch"))
            assert state() == before[:3]
            with random_state() as whole:  # who expects draws has it as ever
                seed_all(number + 9)
                torch.rand(1)
                assert not whole.unmoved()
            assert state() == before[:3]
    assert (*state(), torch.get_rng_state().tolist()) == before
    with random_state(quick=True):  # nobody holds it for several any more: this one puts it back itself
        random.random()
    assert state() == before[:3]


def test_one_holds_it_at_a_time() -> None:
    inside = 0
    overlaps = []

    def work() -> None:
        nonlocal inside
        for number in range(50):
            with random_state():
                inside += 1
                overlaps.append(inside)
                seed_all(number)
                torch.rand(3)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(overlaps) == {1}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_seen(name: str) -> None:
    assert draws_random(DRAWS[name], 1)


def test_what_does_not_draw_is_seen_too() -> None:
    assert not draws_random(lambda: torch.zeros(3) + 1, 1)
    assert not draws_random(lambda: random.Random(3).random(), 1)


def test_probing_leaves_the_callers_state_alone() -> None:
    random.seed(4)
    expected = random.random()
    random.seed(4)
    draws_random(DRAWS["python"], 1)
    assert random.random() == expected


def test_an_error_while_probing_is_raised_and_frees_the_state() -> None:
    with pytest.raises(ZeroDivisionError):
        draws_random(lambda: 1 / 0, 1)
    with random_state():
        pass
