"""Tensor parallelism of a job's model: which layers are split, and how, where the job does not say.

Transformers call their layers by few names. Those that project into many features and the one that projects back are
split together, the first by columns, the other by rows (Shoeybi et al. 2019): between them each rank has a part of the
features, or of the heads, and one sum over all ranks follows. Other linear layers are split by columns, and what they
give is gathered; embeddings by rows. What cannot be split evenly, and everything else, is whole on every rank.

A model may say it itself, as transformers' do: ``model._tp_plan`` (or the class's), from patterns of module names to
the names of styles.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from w5xde_async.errors import UsageError
from w5xde_async.parallel.replica import units_of

_Pairs = Sequence[tuple[tuple[str, ...], tuple[str, ...]]]
#: Of attention: queries, keys, values, and what follows. Between them lie heads, of which each rank computes some.
_ATTENTION: _Pairs = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj")),
    (("query", "key", "value"), ("out",)),
    (("wq", "wk", "wv"), ("wo",)),
    (("q", "k", "v"), ("o", "out")),
)
#: Of feed-forward layers. Between them lie features.
_FEED_FORWARD: _Pairs = (
    (("gate_proj", "up_proj"), ("down_proj",)),
    (("up_proj",), ("down_proj",)),
    (("gate", "up"), ("down",)),
    (("up",), ("down",)),
    (("w1", "w3"), ("w2",)),
    (("fc1",), ("fc2",)),
    (("c_fc",), ("c_proj",)),
    (("lin1",), ("lin2",)),
    (("linear1",), ("linear2",)),
    (("wi_0", "wi_1"), ("wo",)),
    (("wi",), ("wo",)),
    (("dense_h_to_4h",), ("dense_4h_to_h",)),
)
_LEAST = 4096  # elements: what is smaller costs more to exchange than it saves, unless all is small


def worth(sizes: Iterable[int]) -> int:
    """The least size, in elements, of a layer that is split by itself, of the sizes of those that could be."""
    return min(_LEAST, max(sizes, default=0) // 16)


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def parallelized(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle] | None = None) -> nn.Module:
    """Split a model's layers over the axis ``tp``, in place, and its units fully over ``fsdp``, where there is that.

    ``plan``: what ``plan_of`` has found. Raises UsageError for a model in which nothing can be split.
    """
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        _split(model, mesh["tp"], plan_of(model, mesh["tp"].size()) if plan is None else plan)
    if "fsdp" in names:
        whole: set[nn.Parameter] = {p for p in model.parameters() if not p.dim() or not p.numel()}
        for module in (*units_of(model), model):
            fully_shard(module, mesh=mesh["fsdp"], ignored_params=whole)
    return model


def plan_of(
    model: nn.Module, ranks: int, computes: Callable[[nn.Module], bool] = lambda part: True
) -> dict[str, ParallelStyle]:
    """Styles by module name: declared, or inferred. ``model`` is on the meta device.

    ``computes``: whether the step runs with one rank's part of a model. A model that takes its number of heads from a
    constant does not; then the layers of attention are split each by itself, or those of all pairs. A layer that the
    step never calls, for it uses the weight itself, stays whole.

    Raises UsageError where there is nothing to split.
    """
    declared = _declared(model)
    if declared:
        return declared
    plans = [inferred(model, ranks, pairs) for pairs in ((*_ATTENTION, *_FEED_FORWARD), _FEED_FORWARD, ())]
    if not plans[0]:
        raise UsageError(
            f"no layer of {type(model).__name__} can be split over {ranks} ranks: tp needs linear layers or "
            "embeddings whose sizes the number of ranks divides, and no embedding with sparse gradients, max_norm or "
            "scale_grad_by_freq; use fsdp, or say in Job.parallelize what is split"
        )
    for plan in plans:
        called = set[str]()
        part = part_of(model, ranks, plan)[0]
        for path in plan:
            part.get_submodule(path).register_forward_pre_hook(_noting(called, path))
        if computes(part):
            return {path: style for path, style in plan.items() if path in called} if called else plan
    return plans[0]  # it is not for the split that none computes: such a step needs values


def _noting(called: set[str], path: str) -> Callable[[nn.Module, object], None]:
    """A function, of which copies of the model have no copy."""

    def note(module: nn.Module, inputs: object) -> None:
        called.add(path)

    return note


def part_of(model: nn.Module, ranks: int, plan: Mapping[str, ParallelStyle]) -> tuple[nn.Module, set[str]]:
    """What one rank computes of a model without memory, a copy, with no exchange; and which parameters are split.

    Layers that are gathered stay whole: what they give is.
    """
    part, names = copy.deepcopy(model), set[str]()
    for path, chosen in plan.items():
        layer: Any = part.get_submodule(path)
        style: Any = chosen
        names |= {f"{path}.{name}" for name, _ in layer.named_parameters()}
        if isinstance(style, RowwiseParallel):
            names.discard(f"{path}.bias")
            if type(layer) is nn.Linear and style.input_layouts[0].is_shard():
                layer.weight = _on_meta(layer.weight, layer.out_features, layer.in_features // ranks)
        elif style.output_layouts[0].is_shard():
            layer.weight = _on_meta(layer.weight, layer.out_features // ranks, layer.in_features)
            if layer.bias is not None:
                layer.bias = _on_meta(layer.bias, layer.out_features // ranks)
    return part, names


def _on_meta(like: Tensor, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=like.dtype, device="meta"), requires_grad=like.requires_grad)


def _split(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            places.setdefault(id(parameter), []).append((module, name))
    for name, style in plan.items():
        parallelize_module(model.get_submodule(name), mesh, style)
    for (owner, own), *others in places.values():  # what was tied has become several
        for module, name in others:
            module._parameters[name] = owner._parameters[own]


def inferred(model: nn.Module, ranks: int, pairs: _Pairs) -> dict[str, ParallelStyle]:
    """Styles by module name. ``pairs`` are taken only where every layer of theirs can be split."""
    plan: dict[str, ParallelStyle] = {}
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    inside = {id(child) for module in model.modules() if isinstance(module, nn.MultiheadAttention)
              for child in module.modules()}  # fmt: skip  # it uses their weights without calling them

    def fits(module: nn.Module, extent: int) -> bool:
        return id(module) not in inside and extent % ranks == 0 and all(p.numel() for p in module.parameters())

    for path, module in model.named_modules():
        linear = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
        for columns, row in _pairs(linear, pairs):
            if any(uses[id(linear[name].weight)] > 1 or f"{path}.{name}" in plan for name in (*columns, row)):
                continue
            if linear[columns[0]].out_features != linear[row].in_features:
                continue
            if all(fits(linear[name], linear[name].out_features) for name in columns):
                plan |= {_joined(path, name): ColwiseParallel() for name in columns}
                plan[_joined(path, row)] = RowwiseParallel()
    least = worth(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding))
    single: dict[int, list[tuple[str, ParallelStyle]]] = {}
    for path, module in model.named_modules():
        if path in plan:
            continue
        style: ParallelStyle | None = None
        if type(module) is nn.Linear and module.weight.numel() >= least and fits(module, module.out_features):
            style = ColwiseParallel(output_layouts=Replicate())
        elif type(module) is nn.Embedding and module.weight.numel() >= least and fits(module, module.num_embeddings):
            if module.max_norm is None and not module.sparse and not module.scale_grad_by_freq:
                style = RowwiseParallel(input_layouts=Replicate())
        if style is not None:
            assert isinstance(module, nn.Linear | nn.Embedding)
            single.setdefault(id(module.weight), []).append((path, style))
    for weight, users in single.items():
        if len(users) == uses[weight]:  # tied ones are split alike, or not at all
            plan |= dict(users)
    return plan


def _pairs(linear: Mapping[str, nn.Linear], pairs: _Pairs) -> Iterator[tuple[tuple[str, ...], str]]:
    """The layers of one module that belong together, each once."""
    taken: set[str] = set()
    for columns, rows in pairs:
        row = next((name for name in rows if name in linear), None)
        if row is not None and all(name in linear for name in columns) and taken.isdisjoint((*columns, row)):
            taken.update((*columns, row))
            yield columns, row


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _declared(model: nn.Module) -> dict[str, ParallelStyle] | None:
    """Of ``model._tp_plan``; None where it has none. Raises UsageError for a style that is not known here."""
    told = getattr(model, "_tp_plan", None)
    if not told:
        return None
    plan: dict[str, ParallelStyle] = {}
    for pattern, name in told.items():
        if name not in _STYLES:
            raise UsageError(
                f"the model's _tp_plan has the style {name!r} for {pattern}; known are {', '.join(_STYLES)}: say in "
                "Job.parallelize what is split"
            )
        wanted = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        plan |= {path: _STYLES[name]() for path, _ in model.named_modules() if wanted.fullmatch(path)}
    return plan
