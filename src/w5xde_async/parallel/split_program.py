"""Tensor parallelism of a program, without the model's code.

A program is a list of calls in which nothing says what a number of features or of heads is for. So every call sees
whole tensors: of a linear layer each rank computes some of the outputs, which are gathered, and the gradients of its
input are added up; of an embedding it looks up some of the rows. Two ranks have half of the parameters, gradients and
products each, but all activations, and send more than by splitting layers in pairs, as a job's code allows
(``tensor_plan``).

Split are parameters that only such calls use, where the number of ranks divides the first extent, and not small ones;
the rest is whole on every rank, as the weight of a linear layer whose bias is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from w5xde_async.compute.program.form import Graph, Node, Program, Ref
from w5xde_async.compute.program.interpreter import Measured, bind
from w5xde_async.compute.program.program_job import ProgramStep, skeleton
from w5xde_async.errors import UsageError
from w5xde_async.parallel.engine import Traced
from w5xde_async.parallel.group import Group
from w5xde_async.parallel.replica import Replica
from w5xde_async.parallel.tensor_plan import worth
from w5xde_async.params.flat import state_of
from w5xde_async.params.layout import Layout

_LINEAR, _EMBEDDING = "linear", "embedding"


def split_program(source: Traced, group: Group, precision: str) -> tuple[Replica, Callable[..., None]]:
    """What an engine computes with, and what divides its parameters over a mesh of one axis.

    Raises ProgramRefused; UsageError for a program of which nothing can be split.
    """
    program, layout = source.program, source.layout
    entries = splittable(program, layout, group.size)
    if not entries:
        raise UsageError(
            f"no layer of the program can be split over {group.size} ranks: tp needs linear layers or embeddings whose "
            "sizes the number of ranks divides; use fsdp or pp"
        )
    root = skeleton(layout, device="meta")
    for entry in layout.entries:
        if entry.role in ("mean", "max"):
            values = torch.zeros(entry.shape, dtype=entry.dtype, device=group.device)
            for name in entry.names:
                owner, _, leaf = name.rpartition(".")
                root.get_submodule(owner)._buffers[leaf] = values
    step = _SplitStep(
        program, layout, group.device, entries, group, memory_bytes=source.memory_bytes, precision=precision
    )  # fmt: skip
    replica = Replica(
        model=root, layout=layout, tensors=list(state_of(root, layout)), step=step, units=(), named=root, called=False,
        statistics=program.statistics,
    )  # fmt: skip
    return replica, partial(_divide, layout, entries)


def splittable(program: Program, layout: Layout, ranks: int) -> set[int]:
    """The entries of which each rank can have some of the first extent."""
    parameters = {index for index, entry in enumerate(layout.entries) if entry.role in ("grad", "frozen")}
    others: set[int] = set()
    weights: dict[int, set[int]] = {}  # -> biases that go with them
    for graph in program.graphs:
        for node in graph.nodes:
            used = [value.index for value in _flat(node) if type(value) is Ref and value.index < program.num_entries]
            weight = _weight(node)
            bias = node.arguments[2] if node.operator.base == _LINEAR and len(node.arguments) > 2 else None
            biases = {bias.index} if type(bias) is Ref else set()
            divided = biases if weight is None else biases | {weight}
            if weight is None or not divided <= parameters or any(used.count(one) > 1 for one in divided):
                others.update(used)
                continue
            weights.setdefault(weight, set()).update(biases)
            others.update(set(used) - divided)
    found, least = set(), worth(layout.entries[weight].numel for weight in weights)
    for weight, biases in weights.items():
        entry = layout.entries[weight]
        if entry.numel >= least and entry.shape[0] % ranks == 0 and not ({weight} | biases) & others:
            found |= {weight} | biases
    # A bias of two weights, of which one is whole, is whole, and so is the other.
    while odd := {w for w, biases in weights.items() if w in found and biases - found} | {
        w for w, biases in weights.items() if w not in found and biases & found
    }:
        for weight in odd:
            found -= {weight} | weights[weight]
    return found


def _weight(node: Node) -> int | None:
    """The parameter that a call could have a part of."""
    place = {_LINEAR: 1, _EMBEDDING: 0}.get(node.operator.base)
    if place is None or len(node.arguments) <= place or type(node.arguments[place]) is not Ref:
        return None
    if node.operator.base == _EMBEDDING and (any(node.arguments[3:]) or node.named):
        return None  # scaled by frequency, or sparse
    return None if node.operator.base == _LINEAR and node.named else int(node.arguments[place].index)


def _flat(node: Node) -> list[Any]:
    found: list[Any] = []
    for value in (*node.arguments, *(value for _, value in node.named)):
        found += value if type(value) is tuple else [value]
    return found


def _divide(layout: Layout, entries: set[int], model: nn.Module, mesh: DeviceMesh) -> None:
    for index in sorted(entries):
        entry = layout.entries[index]
        whole = model.get_parameter(entry.name)
        divided = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]), requires_grad=whole.requires_grad)
        for name in entry.names:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = divided


class _SplitStep(ProgramStep):
    """Sizes are measured on the program as it came: each rank needs no more."""

    def __init__(
        self, program: Program, layout: Layout, device: torch.device, entries: set[int], group: Group,
        **options: Any,
    ) -> None:  # fmt: skip
        self._whole: dict[int, Graph] = {}
        super().__init__(program, layout, device, **options)
        calls: Mapping[str, Callable[..., Any]] = {
            _LINEAR: partial(_linear, group), _EMBEDDING: partial(_embedding, group)
        }  # fmt: skip

        def of(node: Node) -> Node:
            if _weight(node) not in entries:
                return node
            return node._replace(operator=replace(node.operator, call=calls[node.operator.base]))

        split = replace(program, graphs=tuple(
            Graph(graph.inputs, tuple(map(of, graph.nodes)), graph.loss, graph.metrics) for graph in program.graphs
        ))  # fmt: skip
        self._bound = [bind(split, graph, device) for graph in split.graphs]
        self._whole = {id(graph): whole for graph, whole in zip(split.graphs, program.graphs, strict=True)}

    def _measure(self, graph: Graph, batch: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> Measured:
        return super()._measure(self._whole.get(id(graph), graph), batch)


def _linear(group: Group, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    spread, gather = cast(Any, _Spread).apply, cast(Any, _Gather).apply
    own = functional.linear(spread(x, group), _own(weight), None if bias is None else _own(bias))
    gathered: Tensor = gather(own, group)
    return gathered


def _embedding(group: Group, weight: Tensor, indices: Tensor, padding: int = -1, *_: Any) -> Tensor:
    own, rows = _own(weight), weight.shape[0]
    if indices.device.type == "cpu" and bool(((indices < 0) | (indices >= rows)).any()):
        raise IndexError("index out of range in self")  # as torch's own
    first = group.rank * own.shape[0]
    here = indices - first
    absent = (here < 0) | (here >= own.shape[0])
    padding = padding - first if 0 <= padding - first < own.shape[0] else None  # type: ignore[assignment]
    found = functional.embedding(here.masked_fill(absent, 0), own, padding_idx=padding)
    summed: Tensor = cast(Any, _Sum).apply(found.masked_fill(absent.unsqueeze(-1), 0.0), group)
    return summed


def _own(parameter: Tensor) -> Tensor:
    return cast(DTensor, parameter).to_local()


class _Spread(torch.autograd.Function):
    """What all ranks have, to each for its own outputs: gradients come back in parts of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.group.sum(gradients[0].contiguous().clone()), None


class _Gather(torch.autograd.Function):
    """Every rank's outputs side by side; each gets the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Group) -> Tensor:
        ctx.group = group
        flat = own.contiguous()
        gathered = flat.new_empty((group.size, flat.numel()))
        group.all_gather(gathered.view(-1), flat.view(-1))
        return torch.cat([part.view(flat.shape) for part in gathered], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        width = gradient.shape[-1] // ctx.group.size
        return gradient.narrow(-1, ctx.group.rank * width, width).contiguous(), None


class _Sum(torch.autograd.Function):
    """The sum over ranks, of which each has the gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        return group.sum(part.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None
