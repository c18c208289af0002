"""Every argument of every call of the facades, with values of every sort: it is taken, or one line names it."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
import torch
from tests.support.facade import Data, Model, no_secret_of_this_machine
from torch import nn

from w5xde_async.coordinator.run_result import RunResult
from w5xde_async.errors import Unreachable, UsageError
from w5xde_async.facade.guava import DistributedConfig, NetworkWorker, Orchestrator
from w5xde_async.facade.w5xde import CentralServer, TrainingNode

__all__ = ["no_secret_of_this_machine"]

VALUES: dict[str, Any] = {
    "None": None, "yes": True, "zero": 0, "negative": -1, "three": 3, "huge": 10**400, "fraction": 1.5,
    "NaN": float("nan"), "infinite": float("inf"), "very large": 1e300, "complex": 1j, "empty text": "", "text": "x",
    "zero byte": "\0", "no text": "\ud800", "two lines": "two\nlines", "long": "x" * 5000, "bytes": b"x",
    "empty list": [], "list": [1], "empty tuple": (), "tuple": ("x", "y"), "empty dict": {}, "dict": {1: 2},
    "object": object(), "class": int, "class of modules": nn.Linear, "module": nn.Linear(2, 2), "function": len,
    "tensor": torch.zeros(2, 2), "array": np.zeros((2, 2)), "path": Path("x"),
}  # fmt: skip


def orchestrator() -> Orchestrator:
    made = Orchestrator(DistributedConfig(master_port=0))
    made.register_model(nn.Linear(4, 2))
    return made


CALLS: dict[str, tuple[Callable[[], Callable[..., Any]], dict[str, Any]]] = {  # and the arguments that it needs
    "CentralServer": (lambda: CentralServer, {"model": Model(), "dataset": Data(), "checkpoint_dir": None}),
    "CentralServer.predict": (lambda: CentralServer(Model(), Data()).predict, {}),
    "CentralServer.stop": (lambda: CentralServer(Model(), Data()).stop, {}),
    "TrainingNode": (lambda: TrainingNode, {"model": Model}),
    "TrainingNode.train": (
        lambda: TrainingNode(Model, ("127.0.0.1", 9), timeout_s=0.001, collect_metrics=True, log="silent").train, {}
    ),
    "Orchestrator": (lambda: Orchestrator, {"config": DistributedConfig()}),
    "Orchestrator.register_model": (lambda: orchestrator().register_model, {"model": nn.Linear(4, 2)}),
    "Orchestrator.start_training": (lambda: orchestrator().start_training, {"dataloader": Data()}),
    "Orchestrator.predict": (lambda: orchestrator().predict, {"dataloader": Data()}),
    "Orchestrator.stop": (lambda: orchestrator().stop, {}),
    "Orchestrator.save_checkpoint": (lambda: orchestrator().save_checkpoint, {}),
    "Orchestrator.enable_memory_profiling": (lambda: orchestrator().enable_memory_profiling, {}),
    "NetworkWorker": (lambda: NetworkWorker, {"gpu_id": 0, "config": DistributedConfig()}),
    "DistributedConfig": (lambda: DistributedConfig, {}),
    "DistributedConfig.from_env": (lambda: DistributedConfig.from_env, {}),
    "DistributedConfig.from_dict": (lambda: DistributedConfig.from_dict, {"values": {}}),
    "DistributedConfig.adapt_to_gpus": (lambda: DistributedConfig().adapt_to_gpus, {"num_gpus": 1}),
}  # fmt: skip
ARGUMENTS = [
    (call, name) for call, (made, _) in CALLS.items() for name in inspect.signature(made()).parameters if name != "self"
]
#: What is named in an argument's place.
ALSO = {"values": "has no 1", "join_file": "join file x cannot be read"}
#: What the package itself calls.
WITHIN = {"DistributedConfig.coordinator_config"}


def hint_of(call: Callable[..., Any], name: str) -> Any:
    wrapped = inspect.unwrap(call.__init__ if inspect.isclass(call) else call)  # type: ignore[misc]
    return typing.get_type_hints(getattr(wrapped, "__func__", wrapped))[name]


def fits(value: Any, hint: Any) -> bool:
    """Whether it is of the annotation's type, as far as a call can know."""
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in get_args(hint))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if origin is tuple:
        one, another = get_args(hint)
        return isinstance(value, tuple) and len(value) == 2 and fits(value[0], one) and fits(value[1], another)
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is float:
        return isinstance(value, int | float)
    kind = origin or hint
    return callable(value) if kind is Callable else isinstance(value, Mapping if kind is Mapping else kind)


@pytest.fixture(autouse=True)
def nothing_is_trained(no_secret_of_this_machine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    ended = RunResult(outcome="finished", reason="", step=0, loss=None)
    for facade in ("guava.orchestrator", "w5xde"):
        monkeypatch.setattr(f"w5xde_async.facade.{facade}.predict", lambda *args, **kwargs: None)
    monkeypatch.setattr("w5xde_async.facade.guava.orchestrator.block_on", lambda *args, **kwargs: ended)


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids=[f"{name}-{argument}" for name, argument in ARGUMENTS])
def test_an_argument_is_taken_or_named(name: str, argument: str) -> None:
    made, base = CALLS[name]
    for sort, value in VALUES.items():
        call = made()
        try:
            call(**(base | {argument: value}))
        except Unreachable:  # it was begun
            pass
        except UsageError as error:
            told = str(error)
            assert re.search(rf"\b{argument}\b", told) or ALSO.get(argument, "?") in told, f"{sort}: {told}"
            assert "\n" not in told
            assert len(told) < 800, sort
            continue
        except Exception as error:
            pytest.fail(f"{argument}={sort}: {type(error).__name__}: {error}")
        assert fits(value, hint_of(call, argument)), f"{argument}={sort} was taken"


def test_every_call_is_looked_at() -> None:
    for kind in (CentralServer, TrainingNode, Orchestrator, NetworkWorker, DistributedConfig):
        for name, member in inspect.getmembers(kind, callable):
            own = not name.startswith("_") and set(inspect.signature(member).parameters) - {"self"}
            assert not own or f"{kind.__name__}.{name}" in CALLS.keys() | WITHIN
