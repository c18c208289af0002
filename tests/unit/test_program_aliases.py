"""What an operator returns without a word about it in its schema must not be its argument, or a view of one.

Every operator of the list is run on small arguments of many kinds; those that say that they return views, and those
that are known to without saying so, are left out. A program could else write into parameters through them.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from w5xde_async.compute.program.operators import _MAY_ALIAS, NAMES, Operator, find

TRIES, SEEN = 80, 10  # of one operator: most calls, and most that torch takes


def tensors() -> list[Tensor]:
    made = [torch.rand(shape) for shape in ((2, 2), (2,), (1, 1, 2, 2), (1, 2, 2), (1, 2, 2, 2, 2), (1, 1))]
    return [*made, torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.bool)]


def choices(kind: str, name: str, pool: list[Tensor]) -> list[Any]:
    if kind == "Tensor":
        return pool
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        return [[tensor] for tensor in pool] + [[pool[0], pool[0]]]
    if kind == "List[int]":
        return [[1], [1, 1], [0], [2, 2], [0, 0], []]
    if kind == "str":
        return {"mode": ["constant"], "equation": ["ij->ij"], "reduce": ["sum"], "indexing": ["ij"]}.get(name, ["none"])
    known: dict[str, list[Any]] = {
        "int": [1, 0, 2], "number": [1, 0], "float": [0.0, 1.0], "bool": [False, True], "ScalarType": [torch.float32],
        "List[float]": [[1.0, 1.0]],
    }  # fmt: skip
    return known.get(kind, [None])


def calls(operator: Operator, pool: list[Tensor]) -> Iterator[dict[str, Any]]:
    """Arguments by name: what is needed alone, then all that may be given."""
    needed = [p for p in operator.parameters if not p.default]
    for parameters in (needed, operator.parameters):
        columns = [choices(p.kind, p.name, pool) + [None] * p.optional for p in parameters]
        drawn = random.Random(7)
        every: Iterator[tuple[Any, ...]] = itertools.product(*columns)
        if len(columns) > 2:
            every = (tuple(drawn.choice(column) for column in columns) for _ in range(TRIES))
        for values in itertools.islice(every, TRIES):
            yield dict(zip([p.name for p in parameters], values, strict=True))


def storages(value: Any) -> set[int]:
    items = value if isinstance(value, (list, tuple)) else (value,)
    return {item.untyped_storage().data_ptr() for item in items if isinstance(item, Tensor) and item.numel()}


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_no_operator_returns_its_argument_without_saying_so() -> None:
    ran, found = set(), set()
    plain = [
        operator for name in sorted(NAMES) if (operator := find(name)) is not None
        and operator.takes_tensors and not any(p.aliases for p in operator.parameters)
    ]  # fmt: skip
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in plain:
            taken, pool = 0, tensors()
            for given in calls(operator, pool):
                try:
                    result = operator.call(**given)
                except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
                    continue
                taken += 1
                ran.add(operator.name)
                if storages(result) & set().union(*map(storages, given.values())):
                    found.add(operator.name)
                if taken == SEEN:
                    break
    assert not found
    missed = sorted({operator.name for operator in plain} - ran)
    assert len(missed) < 0.12 * len(plain), missed


def test_those_that_are_known_to_do_so() -> None:
    assert {name for name in _MAY_ALIAS if f"{name}.default" in NAMES} == _MAY_ALIAS
    same = torch.rand(2, 2)
    operator = find("type_as.default")
    assert operator is not None
    assert storages(operator.call(same, same)) == storages(same)
    assert operator.parameters[0].aliases
