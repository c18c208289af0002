"""Functions that only compute are told from those that may do anything; where it is not known, it is the latter."""

from __future__ import annotations

import argparse
import functools
import math
import operator
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from w5xde_async.job import parts_of
from w5xde_async.updates.own_code import forgets, is_foreign

S = torch.optim.lr_scheduler
WARMUP, RATES, TABLE = 10, [1.0, 0.5, 0.25], np.linspace(1, 0, 50)
MODEL = nn.Linear(2, 2)
TOLD = argparse.Namespace(warmup=3)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(MODEL.parameters(), lr=0.1)


def foreign(scheduler: Any) -> bool:
    return any(map(is_foreign, parts_of(scheduler)))


def of_torch(made: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "step": S.StepLR(made, 2),
        "multi": S.MultiStepLR(made, [2, 4]),
        "constant": S.ConstantLR(made),
        "linear": S.LinearLR(made),
        "exponential": S.ExponentialLR(made, 0.9),
        "polynomial": S.PolynomialLR(made),
        "cosine": S.CosineAnnealingLR(made, 5),
        "restarts": S.CosineAnnealingWarmRestarts(made, 5),
        "cyclic": S.CyclicLR(made, 0.1, 0.2, cycle_momentum=False),
        "cyclic, exp": S.CyclicLR(made, 0.1, 0.2, mode="exp_range", gamma=0.9, cycle_momentum=False),
        "one cycle": S.OneCycleLR(made, 0.1, 20, cycle_momentum=False),
        "sequential": S.SequentialLR(made, [S.ConstantLR(made), S.ExponentialLR(made, 0.9)], [2]),
        "chained": S.ChainedScheduler([S.ConstantLR(made), S.ExponentialLR(made, 0.9)]),
        "swa": torch.optim.swa_utils.SWALR(made, 0.1),
    }


@pytest.mark.parametrize("name", of_torch(optimizer()))
def test_none_of_torchs_own_schedulers_is_foreign_nor_what_they_step(name: str) -> None:
    made = optimizer()
    assert not foreign(of_torch(made)[name])
    assert not is_foreign(made)


@pytest.mark.parametrize("name", [
    "constant", "constant_with_warmup", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "inverse_sqrt",
    "linear", "polynomial", "warmup_stable_decay",
])  # fmt: skip
def test_what_transformers_gives_to_lambdas_computes(name: str) -> None:
    kept = {"cosine_with_min_lr": {"min_lr": 0.01}, "warmup_stable_decay": {"num_decay_steps": 5}}.get(name)
    made = transformers.get_scheduler(name, optimizer(), 5, 50, scheduler_specific_kwargs=kept)
    assert not foreign(made)


def nested(step: int) -> float:
    def inner(x: float) -> float:
        return helped(x) + sum(RATES[i] for i in range(2))

    return inner(step / WARMUP)


def helped(x: float) -> float:
    return min(1.0, max(x, math.cos(x))) if x else float(np.exp(-x))


def recursive(step: int) -> float:
    return 1.0 if step == 0 else 0.9 * recursive(step - 1)


def tempered(step: int, *, by: float = 0.5) -> float:
    return by**step


def lists_its_own(step: int) -> float:
    found = [1.0]
    while len(found) < step:
        found.append(0.9 * found[-1])
    return found[-1]


def by_milestones(step: int, *, by: float = 0.5) -> float:
    factor = 1.0
    step -= WARMUP
    for milestone in RATES:
        if step >= milestone:
            factor *= by
    by *= factor
    return factor


SETTINGS: dict[str, Any] = {"warmup": 3, "total": 20, "floor": 0.1, "milestones": [5, 10]}
MULTIPLY = np.multiply


def warmed_up(warmup: int, total: int, cycles: float = 0.5) -> Callable[[int], float]:
    def factor(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        progress = (step - warmup) / max(1, total - warmup)
        progress *= cycles * 2
        scale = max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
        scale *= 0.9
        return scale

    return factor


def by_settings(step: int) -> float:
    if step < SETTINGS["warmup"]:
        return float(step) / SETTINGS["warmup"]
    left = float(SETTINGS["total"] - step)
    left /= SETTINGS["total"] - SETTINGS["warmup"]
    scale = math.cos(math.pi * (1 - left))
    scale += 1.0
    floor: float = SETTINGS["floor"]
    return max(floor, scale / 2) * 0.5 ** len([m for m in SETTINGS["milestones"] if step >= m])


def by_numpy(step: int) -> float:
    at = np.clip(step / SETTINGS["total"], 0, 1)
    at *= np.pi
    scale = np.cos(at)
    scale += 1
    decayed = np.prod([0.5 for milestone in SETTINGS["milestones"] if step >= milestone])
    return float(MULTIPLY(scale, 0.5) * decayed + np.interp(step, [0, 20], TABLE[:2]))


def counts_down(step: int) -> float:
    rates = list(RATES)
    passed = 0
    rates += [0.1]
    for milestone in SETTINGS["milestones"]:
        passed += step >= milestone
    left = abs(step - SETTINGS["total"])
    left -= 1
    return rates[passed] * left


def by_the_least(step: int) -> float:
    rate = min(1.0, (step + 1) / WARMUP)
    rate *= max(SETTINGS["floor"], 1 - step / 500)
    for milestone in SETTINGS["milestones"]:
        if step >= milestone:
            rate *= 0.1
    return rate


def by_one_or_the_other(step: int) -> float:
    rate = (step + 1) / WARMUP if step < WARMUP else 1.0
    rate *= sum(step >= at for at in RATES)
    first = RATES[0]
    first *= rate
    return first


def warm(step: float) -> float:
    return step / WARMUP if step < WARMUP else 1.0


def cut(x: float, most: float = 1.0) -> float:
    return max(0.0, min(most, x))


def halved(step: int, times: int) -> float:
    return step if times == 0 else halved(step, times - 1)


def by_other_functions(step: int) -> float:
    rate = warm(step)
    rate *= len(RATES)
    other = cut((step + 1) / WARMUP)
    other *= 0.1
    third = halved(step, 2)
    third += 0.5
    return rate + other + third


COMPUTE: dict[str, Callable[[int], float]] = {
    "by the least of two": by_the_least,
    "by one or the other": by_one_or_the_other,
    "by other functions of numbers": by_other_functions,
    "warm-up and cosine": warmed_up(3, 20),
    "warm-up and cosine by settings": by_settings,
    "by numpy and settings": by_numpy,
    "a list that it copied": counts_down,
    "warm-up and root": lambda step, peak=4000: min((step + 1) ** -0.5, (step + 1) * peak**-1.5),
    "cycles": lambda step: 0.1 + 0.9 * abs(1 - 2 * ((step % 10) / 10)),
    "power": lambda step: 0.95**step,
    "globals": lambda step: min(1.0, (step + 1) / WARMUP),
    "list": lambda step: RATES[min(step, len(RATES) - 1)],
    "array": lambda step: float(TABLE[step]),
    "numpy": lambda step: np.float64(0.9) ** step,
    "others": nested,
    "recursive": recursive,
    "partial": functools.partial(tempered, by=0.3),
    "builtin": math.exp,
    "table's method": {0: 1.0, 1: 0.5}.get,
    "parsed arguments": lambda step: min(1.0, step / TOLD.warmup),
    "a list of its own": lists_its_own,
    "by milestones": by_milestones,
    "numpy's function by keyword": lambda step: float(np.add(RATES[0], float(TABLE[0]), dtype=np.float64)),
    "numpy's functions of a table": lambda step: float(np.add(np.sort(TABLE), 1.0)[step]),
}  # fmt: skip


class Own:
    def __call__(self, step: int) -> float:
        return 1.0

    def factor(self, step: int) -> float:
        return 1.0


def writes(step: int) -> float:
    global WARMUP
    WARMUP = step
    return 1.0


def imports(step: int) -> float:
    import secrets

    return 1.0 + secrets.randbelow(2)


def hidden(step: int) -> float:
    return deeper(step)


def deeper(step: int) -> float:
    return sum(random.random() for _ in range(2))


def later(step: int) -> float:
    return not_yet_there(step)  # type: ignore[name-defined] # noqa: F821


def counting() -> Callable[[int], float]:
    count = 0

    def factor(step: int) -> float:
        nonlocal count
        count += 1
        return 0.9**count

    return factor


def around(model: nn.Module) -> Callable[[int], float]:
    return lambda step: 1.0 if model.training else 0.5


def by_keyword(step: int, *, model: nn.Module = MODEL) -> float:
    return 1.0 if model.training else 0.5


KEPT: list[Any] = [1.0]


def adds(step: int) -> float:
    kept = KEPT
    kept += [step]
    return 0.9 ** len(kept)


def adds_to_what_it_was_given(step: int, kept: list[int] = []) -> float:  # noqa: B006
    kept += [step]
    return 0.9 ** len(kept)


def scales(step: int) -> float:
    table = TABLE
    table *= 0.9
    return float(table[0])


def by_a_module_around_it() -> Callable[[int], float]:
    op, kept = operator, [0]
    return lambda step: op.setitem(kept, 0, kept[0] + 1) or 0.9 ** kept[0]  # type: ignore[func-returns-value]


HELD: dict[str, list[float]] = {"kept": [0.0]}


def same(value: Any) -> Any:
    return value


def adds_to(kept: Callable[[], Any]) -> Callable[[int], float]:
    def factor(step: int) -> float:
        found = kept()
        found += [step]
        return 0.9 ** len(found)

    return factor


def adds_to_the_larger(step: int) -> float:
    found = max(HELD["kept"], [-1.0])
    found += [step]
    return 0.9 ** len(found)


def adds_to_what_a_table_gives(step: int) -> float:
    found: Any = HELD.get("kept")
    found += [step]
    return 0.9 ** len(found)


def adds_to_what_it_called(step: int) -> float:
    found = same(HELD["kept"])
    found += [step]
    return 0.9 ** len(found)


def adds_to_an_arrays_view(step: int) -> float:
    view = TABLE.reshape(-1)
    view += 1
    return float(view[0])


def adds_to_the_same_array(step: int) -> float:
    array = np.asarray(TABLE)
    array += 1
    return float(array[0])


def longer(kept: list[float], step: int) -> int:
    kept += [step]
    return len(kept)


def adds_further_in(step: int) -> float:
    def longer(kept: list[float]) -> int:
        kept += [step]
        return len(kept)

    return 0.9 ** longer(KEPT)


def adds_to_one_of_two(step: int) -> float:
    first, second = [0.0], KEPT
    second += [step]
    return 0.9 ** len(first + second)


def by_another_name(step: int) -> float:
    multiply = np.multiply
    multiply(TABLE, 0.9, TABLE)
    return float(TABLE[0])


def either(step: int, kept: list[float] = KEPT) -> Any:
    return 1.0 if step < WARMUP else kept


def deeper_down(value: Any, times: int) -> Any:
    return value if times == 0 else deeper_down(value, times - 1)


def first_given(*values: Any) -> Any:
    return values[0]


def from_the_second(step: int) -> Any:
    first, second = 1.0, KEPT
    return second if step else first


def tried(step: int) -> Any:
    try:
        return 1.0 / step
    except ZeroDivisionError:
        return KEPT


def adds_to_the_shorter(step: int) -> float:
    found = min(HELD["kept"], [step], key=len)
    found += [step]
    return 0.9 ** len(found)


def adds_to_a_sum(step: int) -> float:
    found: Any = sum([], start=KEPT)  # type: ignore[call-overload]
    found += [step]
    return 0.9 ** len(found)


def adds_to_one_or_the_other(step: int) -> float:
    found: Any = [1.0] if step < WARMUP else KEPT
    found += [step]
    return 0.9 ** len(found)


def adds_to_a_part(step: int) -> float:
    found: Any = HELD["kept"]
    found += [step]
    return 0.9 ** len(found)


KEEP_SOMETHING: dict[str, Callable[..., float]] = {
    "adds to what one of two returns gives": adds_to(lambda: either(WARMUP)),
    "adds to what is given further down": adds_to(lambda: deeper_down(KEPT, 2)),
    "adds to the first of all": adds_to(lambda: first_given(KEPT)),
    "adds to one of two that were stored": adds_to(lambda: from_the_second(1)),
    "adds to what is there after an error": adds_to(lambda: tried(0)),
    "adds to the shorter": adds_to_the_shorter,
    "adds to a sum": adds_to_a_sum,
    "adds to one or the other": adds_to_one_or_the_other,
    "adds to a part": adds_to_a_part,
    "into an array by a method's further place": lambda step: float(TABLE.cumsum(0, None, TABLE)[0]),  # type: ignore[arg-type]
    "into an array by a method of a new one": lambda step: float((TABLE + 1).clip(0, 5, TABLE)[0]),
    "into an array for what is no number": lambda step: float(np.nan_to_num(TABLE, False, float(step))[0]),
    "in an array's own bytes": lambda step: float(TABLE.byteswap(True)[0]),
    "in an array's order": lambda step: float(np.median(TABLE, overwrite_input=True)),
    "adds to the larger": adds_to_the_larger,
    "adds to what a table gives": adds_to_what_a_table_gives,
    "adds to what it called": adds_to_what_it_called,
    "adds to what it was told to call": adds_to(lambda: KEPT),
    "adds to an array's view": adds_to_an_arrays_view,
    "adds to the same array": adds_to_the_same_array,
    "adds to one of two": adds_to_one_of_two,
    "adds by another function": lambda step: 0.9 ** longer(KEPT, step),
    "adds by a part of another function": functools.partial(longer, KEPT),
    "adds further in": adds_further_in,
    "adds by the operator's name": lambda step: 0.9 ** len(KEPT.__iadd__([step])),
    "adds to an array by the operator's name": lambda step: float(TABLE.__iadd__(1)[0]),
    "into an array by a function's other name": by_another_name,
    "into an array by a function of several": lambda step: float((np.add, np.multiply)[1](TABLE, 0.9, TABLE)[0]),
    "into an array by a function for others": lambda step: len(list(map(MULTIPLY, [TABLE], [0.9], [TABLE]))),
    "into an array by a function for one": lambda step: len(list(map(np.negative, [TABLE], [TABLE]))),
    "into an array by what it was given": lambda step, by=np.multiply: float(by(TABLE, 0.9, TABLE)[0]),
    "into an array by part of a function": functools.partial(np.multiply, TABLE, 0.9, TABLE),
    "into an array by a further place": lambda step: float(np.cumsum(TABLE, 0, None, TABLE)[0]),
    "pops": lambda step: KEPT.pop(0),
    "pops what it was given": lambda step, rates=[1.0]: rates.pop(0),
    "is a pop": [1.0].pop,
    "appends": lambda step: 0.9 ** len(KEPT.append(step) or KEPT),  # type: ignore[func-returns-value]
    "adds in place": lambda step: 0.9 ** len(operator.iadd(KEPT, [step])),
    "by a method's name": lambda step: operator.methodcaller("pop")(KEPT),
    "into an array": lambda step: float(np.add(TABLE, 1, out=TABLE)[0]),
    "into an array by place": lambda step: float(np.multiply(TABLE, np.add(0.4, 0.5), TABLE)[0]),
    "adds to a global": adds,
    "adds to what it was given": adds_to_what_it_was_given,
    "scales an array": scales,
    "by a module around it": by_a_module_around_it(),
    "an array's place": lambda step: np.add.at(TABLE, 0, 1) or TABLE[0],  # type: ignore[func-returns-value]
    "a dictionary": lambda step, kept={}: 0.9 ** kept.setdefault("first", step),
    "by another function": lambda step: first_of(KEPT),
    "a variable": counting(),
}  # fmt: skip


def first_of(rates: list[float]) -> float:
    return rates.pop(0)


MAY_DO_ANYTHING: dict[str, Callable[..., float]] = {
    "draws": lambda step: random.random(),
    "draws by a method": random.random,
    "draws by numpy": lambda step: np.random.rand(),
    "draws by torch": lambda step: torch.rand(()).item(),
    "draws further down": hidden,
    "a model of the file's": lambda step: MODEL.weight.fill_(0.0) and 1.0,
    "a model of its own": lambda step, model=MODEL: model.requires_grad_(False) and 1.0,
    "a model around it": around(MODEL),
    "a model by keyword": by_keyword,
    "partial of a model": functools.partial(lambda model, step: 1.0, MODEL),
    "a model in a list": lambda step, held=[{"of": (MODEL,)}]: 1.0,
    "an object": Own(),
    "a method": Own().factor,
    "a class": Own,
    "writes a global": writes,
    "imports": imports,
    "what is not there yet": later,
    "reads a file": lambda step: float(open("rate").read()),
    "evaluates": lambda step: eval("step"),
    "finds what it is not given": lambda step: getattr(step, "re" + "al"),
    "prints": print,
}


@pytest.mark.parametrize("kind", COMPUTE)
def test_a_function_that_only_computes_is_no_code_to_look_after(kind: str) -> None:
    assert not is_foreign(scheduler(COMPUTE[kind]))


@pytest.mark.parametrize("kind", MAY_DO_ANYTHING)
def test_a_function_that_may_do_anything_is(kind: str) -> None:
    assert is_foreign(scheduler(MAY_DO_ANYTHING[kind]))


@pytest.mark.parametrize("kind", KEEP_SOMETHING)
def test_a_function_that_may_keep_something_from_step_to_step_does_so_beside_checkpoints(kind: str) -> None:
    assert is_foreign(scheduler(KEEP_SOMETHING[kind]))


def test_what_a_function_keeps_no_checkpoint_has() -> None:
    assert forgets(scheduler(KEEP_SOMETHING["pops"])) == ["lr_lambdas"]
    assert forgets(scheduler(COMPUTE["list"])) == []


def scheduler(factor: Callable[..., float]) -> Any:
    made = S.LambdaLR(optimizer(), lambda step: 1.0)
    made.lr_lambdas = [factor]
    return made


@pytest.mark.parametrize("factor", [MAY_DO_ANYTHING["draws"], MAY_DO_ANYTHING["a model of its own"]])
def test_where_schedulers_take_a_function(factor: Callable[..., float]) -> None:
    made = optimizer()
    assert foreign(S.MultiplicativeLR(made, factor))
    assert foreign(S.CyclicLR(made, 0.1, 0.2, scale_fn=factor, cycle_momentum=False))
    assert foreign(S.SequentialLR(made, [S.ConstantLR(made), S.LambdaLR(made, factor)], [2]))
    assert foreign(S.ChainedScheduler([S.ConstantLR(made), S.LambdaLR(made, factor)]))


class Ours(torch.optim.SGD):
    """An optimizer of one's own."""

    def step(self, closure: Any = None) -> Any:
        MODEL.weight.data.clamp_(-1, 1)
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Ours])
def test_a_step_whose_calls_a_scheduler_counts_is_still_its_classs(kind: type[torch.optim.Optimizer]) -> None:
    made = kind(MODEL.parameters(), lr=0.1)  # type: ignore[call-arg]
    S.StepLR(made, 2)
    assert "step" in vars(made)
    assert is_foreign(made) == (kind is Ours)
    assert forgets(made) == []


def test_a_function_without_a_module_is_read_as_others_are() -> None:
    assert not is_foreign(scheduler(eval("lambda step: 0.9**step", {})))
    assert is_foreign(scheduler(eval("lambda step: model.tau", {"model": MODEL})))


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_that_was_put_in_place_of_torchs_is_foreign(scheduled: bool) -> None:
    """With a scheduler torch puts one of its own there, which calls it."""
    made = optimizer()
    before = made.step

    def step(self: torch.optim.Optimizer, closure: None = None) -> Any:
        MODEL.weight.data.clamp_(-1, 1)
        return before(closure)

    made.step = types.MethodType(step, made)  # type: ignore[method-assign]
    if scheduled:
        S.ConstantLR(made)
    assert is_foreign(made)
