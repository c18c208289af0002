"""What a model-sharding engine is built of: a model without memory for its parameters, its step, and its units.

A **unit** is a part of the model that is gathered, computed and given up as a whole. Of a job's model, units are the
children of its outermost ``ModuleList`` and ``Sequential`` containers; everything else is the root's. A traced program
brings its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from w5xde_async.errors import JobError
from w5xde_async.job import Job, StepFunction, build_model, step_function
from w5xde_async.params.layout import Layout, named_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """``model``: its parameters are on the meta device. ``units`` are modules in it, in the order in which they run.

    ``statistics``: buffers that change without a version count (None: they are read off the model).
    """

    model: nn.Module
    layout: Layout
    step: StepFunction
    units: Sequence[nn.Module]
    statistics: Sequence[int] | None = None


def replica_of(job: Job, bucket_bytes: int) -> Replica:
    """A job's model, built without ever having all of its parameters in memory where the job gives a function.

    Raises JobError for a model that cannot be built so, ValueError for one that has no layout.
    """
    if isinstance(job.model, nn.Module):
        meta = {id(parameter): _on_meta(parameter) for parameter in job.model.parameters()}
        model = copy.deepcopy(job.model, dict(meta)).train()
    else:
        with _parameters_on_meta():
            model = build_model(job)
    persistent = {id(tensor) for _, tensor, _ in named_state(model)}
    for name, buffer in model.named_buffers():
        if buffer.is_meta and id(buffer) not in persistent:
            raise JobError(
                "model", f"its buffer {name!r} is computed from parameters, and no checkpoint has it",
                "make it persistent, or compute it in forward",
            )  # fmt: skip
    return Replica(
        model=model,
        layout=Layout.of(model, bucket_bytes=bucket_bytes),
        step=step_function(job),
        units=units_of(model),
    )


def units_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """The children, with parameters of their own, of the outermost lists and sequences of modules.

    One that shares parameters with the rest of the model, or is in it twice, is none.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList | nn.Sequential):
                found.append(child)
            else:
                visit(child)

    visit(model)
    places: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        places[id(parameter)] = places.get(id(parameter), 0) + 1
    units = []
    for unit in dict.fromkeys(found):
        own: dict[int, int] = {}
        for _, parameter in unit.named_parameters(remove_duplicate=False):
            own[id(parameter)] = own.get(id(parameter), 0) + 1
        if own and all(places[key] == count for key, count in own.items()):
            units.append(unit)
    return tuple(units)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter moves to the meta device as its module gets it; buffers and other tensors keep their values."""
    known: Any = WeakIdKeyDictionary()

    def move(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or nn.parameter.is_lazy(parameter):
            return None
        moved: nn.Parameter | None = known.get(parameter)
        if moved is None:
            moved = known[parameter] = _on_meta(parameter)
        return moved

    handle: Any = register_module_parameter_registration_hook(cast(Any, move))
    try:
        yield
    finally:
        handle.remove()


def _on_meta(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
