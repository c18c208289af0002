"""Tensor parallelism of a job's model: which layers are split, and how, where the job does not say.

Transformers call their layers by few names. Those that project into many features and the one that projects back are
split together, the first by columns, the other by rows (Shoeybi et al. 2019): between them each rank has a part of the
features, or of the heads, and one sum over all ranks follows. A name proves nothing: a pair is split so only if its
module, with small numbers in place of its parameters and inputs, computes the same with a rank's part (``_divides``).
Other linear layers are split by columns, and what they give is gathered; embeddings by rows. What cannot be split
evenly, and everything else, is whole on every rank.

A model may say it itself, as transformers' do: ``model._tp_plan`` (or the class's), from patterns of module names to
the names of styles.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from w5xde_async.compute.footprint import faked
from w5xde_async.errors import UsageError
from w5xde_async.job import copied_model
from w5xde_async.parallel.replica import units_of
from w5xde_async.randomness import random_state, seed_all
from w5xde_async.users_code import users_code

logger = logging.getLogger(__name__)

_Names = Sequence[tuple[tuple[str, ...], tuple[str, ...]]]
#: Of attention: queries, keys, values, and what follows. Between them lie heads, of which each rank computes some.
_ATTENTION: _Names = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj")),
    (("query", "key", "value"), ("out",)),
    (("wq", "wk", "wv"), ("wo",)),
    (("q", "k", "v"), ("o", "out")),
)
#: Of feed-forward layers. Between them lie features.
_FEED_FORWARD: _Names = (
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
_MOST_CALLS = 4  # unlike ones of a module, each of which is tried
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
_ON_PARTS = "replicated_with_grad_allreduce"  # of what is whole, and computes with each rank's part of heads


def parallelized(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> nn.Module:
    """Split a model's layers over the axis ``tp``, in place, and its units fully over ``fsdp``, where there is that.

    ``plan``: what ``plan_of`` has found.
    """
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        _split(model, mesh["tp"], plan)
    if "fsdp" in names:
        whole: set[nn.Parameter] = {p for p in model.parameters() if not p.dim() or not p.numel()}
        for module in (*units_of(model), model):
            fully_shard(module, mesh=mesh["fsdp"], ignored_params=whole)
    return model


def plan_of(model: nn.Module, ranks: int, run: Callable[[nn.Module], object]) -> dict[str, ParallelStyle]:
    """Styles by module name: declared, or inferred. ``model`` is on the meta device.

    ``run``: the step with such a model, forward; raises where that needs values, or the data is not here. What it shows
    is how modules are called: pairs whose call is not seen are split layer by layer, and so are those that do not
    divide, such as attention that takes its number of heads from a constant, or a softmax over all features. A layer
    that the step never calls stays whole, and so does one whose weight it uses itself, beside that.

    Raises UsageError where there is nothing to split.
    """
    declared, between = _declared(model)
    if declared:
        pairs = _declared_pairs(model, declared)
    else:
        pairs = [pair for pair in _pairs(model) if _can_divide(model, pair, ranks)]
    seen = _Calls(model, pairs)
    seen.watch(run)
    if declared:
        apart = [pair for pair in pairs if pair.path in between or seen.fails(pair, ranks)]
        plan = _tied_alike(model, _each_by_itself(model, declared, apart, ranks), ranks)
    else:
        plan = _own(model, seen, pairs, ranks)
    if not plan:
        raise UsageError(
            f"no layer of {type(model).__name__} can be split over {ranks} ranks: tp needs linear layers or "
            "embeddings that the step calls, whose weights it uses nowhere else, whose sizes the number of ranks "
            "divides, and no embedding with sparse gradients, max_norm or scale_grad_by_freq; use fsdp, or say in "
            "Job.parallelize what is split"
        )
    return plan


def _own(model: nn.Module, seen: _Calls, pairs: Sequence[_Pair], ranks: int) -> dict[str, ParallelStyle]:
    """The plan of a model that declares none."""
    pairs, whole = [pair for pair in pairs if seen.divides(pair, ranks)], set[str]()
    while True:
        plan = _inferred(model, ranks, pairs, whole)
        if seen.complete:
            plan = {path: style for path, style in plan.items() if path in seen.called}
        if not (mixed := seen.mixed(plan)):
            return plan
        whole |= mixed
        pairs = [pair for pair in pairs if whole.isdisjoint(_joined(pair.path, name) for name in pair.names)]


def part_of(model: nn.Module, ranks: int, plan: Mapping[str, ParallelStyle]) -> tuple[nn.Module, set[str]]:
    """What one rank computes of a model without memory, a copy, with no exchange; and which parameters are split.

    Layers that are gathered stay whole: what they give is.
    """
    part, names = copied_model(model), set[str]()
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
    planned = {name: model.get_submodule(name) for name in plan}
    for name, style in plan.items():
        parallelize_module(planned[name], mesh, style)
        planned[name].register_forward_hook(_as_made)
    split = {id(module) for module in planned.values()}
    for tied in places.values():  # what was tied has become several
        owner, own = next((place for place in tied if id(place[0]) in split), tied[0])
        for module, name in tied:
            module._parameters[name] = owner._parameters[own]


def _as_made(layer: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """What a split layer gives may be written into, as what any layer gives: that of ``DTensor`` is a view."""
    made: Tensor = cast(Any, _AsMade).apply(output)
    return made


class _AsMade(torch.autograd.Function):
    """The same memory in a tensor that is no view."""

    @staticmethod
    def forward(output: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _inferred(model: nn.Module, ranks: int, pairs: Sequence[_Pair], whole: Collection[str]) -> dict[str, ParallelStyle]:
    """Styles by module name: of these pairs, and of what is split by itself. ``whole``: what is not."""
    plan: dict[str, ParallelStyle] = {}
    for pair in pairs:
        plan |= {_joined(pair.path, name): ColwiseParallel() for name in pair.columns}
        plan[_joined(pair.path, pair.row)] = RowwiseParallel()
    uses = _uses(model)
    inside = {id(child) for module in model.modules() if isinstance(module, nn.MultiheadAttention)
              for child in module.modules()}  # fmt: skip  # it uses their weights without calling them

    def fits(module: nn.Module, extent: int) -> bool:
        return id(module) not in inside and extent % ranks == 0 and all(p.numel() for p in module.parameters())

    weights = [m._parameters.get("weight") for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    least = worth(weight.numel() for weight in weights if weight is not None)
    single: dict[str, tuple[nn.Linear | nn.Embedding, ParallelStyle]] = {}
    for path, module in model.named_modules():
        if path in plan or path in whole:
            continue
        style = _by_itself(module)
        if style is not None:
            assert isinstance(module, nn.Linear | nn.Embedding)
            if module.weight.numel() >= least and fits(module, module.weight.shape[0]):
                single[path] = module, style
    while True:  # tied ones are split alike, or not at all, and so is what is tied to these
        split = Counter(id(parameter) for module, _ in single.values() for parameter in module.parameters())
        odd = [
            path
            for path, (module, _) in single.items()
            if not uses[id(module.weight)] or any(split[id(one)] < uses[id(one)] for one in module.parameters())
        ]
        if not odd:
            return plan | {path: style for path, (_, style) in single.items()}
        for path in odd:
            del single[path]


def _by_itself(module: nn.Module) -> ParallelStyle | None:
    """How a layer is split that is in no pair: its weight by rows, in memory."""
    if type(module) is nn.Linear:
        return ColwiseParallel(output_layouts=Replicate())
    if type(module) is nn.Embedding and module.max_norm is None and not module.sparse:
        return None if module.scale_grad_by_freq else RowwiseParallel(input_layouts=Replicate())
    return None


def _uses(model: nn.Module) -> Counter[int]:
    """How many names each parameter has, by its id; 0 of what is none, as a weight that a hook computes."""
    return Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))


# -- pairs


@dataclass(frozen=True, slots=True)
class _Pair:
    """Layers of one module, by their names in it: ``columns`` give features, of which ``row`` makes sums."""

    path: str
    columns: tuple[str, ...]
    row: str

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.columns, self.row)


def _pairs(model: nn.Module) -> Iterator[_Pair]:
    """By names alone. A layer is in one of them at most."""
    for path, module in model.named_modules():
        linear = {name for name, child in module.named_children() if type(child) is nn.Linear}
        for columns, rows in (*_ATTENTION, *_FEED_FORWARD):
            row = next((name for name in rows if name in linear), None)
            if row is not None and linear.issuperset(columns):
                linear.difference_update((*columns, row))
                yield _Pair(path, columns, row)


def _can_divide(model: nn.Module, pair: _Pair, ranks: int) -> bool:
    """By sizes."""
    module, uses = model.get_submodule(pair.path), _uses(model)
    layers = [module.get_submodule(name) for name in pair.names]
    *columns, row = (layer for layer in layers if isinstance(layer, nn.Linear))
    return (
        columns[0].out_features == row.in_features
        and all(layer.out_features % ranks == 0 for layer in columns)
        and all(uses[id(layer.weight)] == 1 and layer.weight.numel() for layer in (*columns, row))
        and all(uses[id(parameter)] == 1 for layer in (*columns, row) for parameter in layer.parameters())
    )


class _Like:
    """A tensor that a module was given, without its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def __repr__(self) -> str:
        return f"{self.shape} {self.dtype}"


class _Calls:
    """How a copy of a model, ``model``, calls its layers, and the modules that hold pairs. ``complete``: it was run."""

    def __init__(self, model: nn.Module, pairs: Iterable[_Pair]) -> None:
        self.model = copied_model(model)
        self.called = set[str]()
        self.complete = True
        self._source = model
        self._kinds: dict[object, bool] = {}  # what was found of modules like one
        self._uses = _Uses(model)
        # Of calls of each module that holds a pair: what it was given, by how that is shown; one more than are tried.
        self._given: dict[str, dict[str, tuple[Any, Any]]] = {}
        self._outside = set[str]()  # layers that somebody else calls than the module that holds them
        self._open: dict[str, int] = {}
        for path in {pair.path for pair in pairs}:
            module = self.model.get_submodule(path)
            module.register_forward_pre_hook(partial(self._begins, path), with_kwargs=True, prepend=True)
            module.register_forward_hook(partial(self._ends, path), always_call=True)
        for path, module in self.model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.register_forward_pre_hook(partial(self._calls, path))
                module.register_forward_hook(self._called, always_call=True)

    def watch(self, run: Callable[[nn.Module], object]) -> None:
        """Run the model."""
        try:
            with self._uses:
                run(self.model)
        except Exception:  # of the user's code, told where it is computed
            self.complete = False

    def mixed(self, plan: Mapping[str, ParallelStyle]) -> set[str]:
        """The layers of a plan whose weights were used with other tensors, and not by these layers' own calls."""
        return self._uses.mixed(plan)

    # Who runs the model may run a copy of it. These are called there, for copies of them would note it for themselves.
    def __deepcopy__(self, memo: object) -> _Calls:
        return self

    def _begins(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._open[path] = self._open.get(path, 0) + 1
        known = self._given.setdefault(path, {})
        if len(known) <= _MOST_CALLS:
            given = tree_map_only(Tensor, _Like, (args, kwargs))
            known.setdefault(repr(given), given)

    def _ends(self, path: str, module: nn.Module, inputs: object, outputs: object) -> None:
        self._open[path] -= 1

    def _calls(self, path: str, module: nn.Module, inputs: object) -> None:
        self.called.add(path)
        self._uses.begins(path, module)
        if not self._open.get(path.rpartition(".")[0]):
            self._outside.add(path)

    def _called(self, module: nn.Module, inputs: object, output: object) -> None:
        self._uses.ends(module)

    def divides(self, pair: _Pair, ranks: int) -> bool:
        """Whether each rank may have its part of the pair."""
        names = [_joined(pair.path, name) for name in pair.names]
        calls = self._given.get(pair.path, {})
        if not 0 < len(calls) <= _MOST_CALLS:
            return False
        if not self._outside.isdisjoint(names) or not self.called.issuperset(names):
            return False
        return self._found(pair, lambda module: all(_divides(module, pair, ranks, one) for one in calls.values()))

    def fails(self, pair: _Pair, ranks: int) -> bool:
        """Whether a call of the module that holds the pair fails for a rank's part alone."""
        calls = self._given.get(pair.path, {})
        return self._found(pair, lambda module: any(_fails(module, pair, ranks, one) for one in calls.values()))

    def _found(self, pair: _Pair, find: Callable[[nn.Module], bool]) -> bool:
        module = self._source.get_submodule(pair.path)
        kind = pair.names, _kind(module), tuple(self._given.get(pair.path, {}))
        if kind not in self._kinds:
            with random_state(), users_code():
                self._kinds[kind] = find(module)
        return self._kinds[kind]


class _Uses(TorchFunctionMode):
    """How parameters of layers, and what is computed from these alone, are used beside the calls of the layers.

    A ``DTensor`` goes together with other tensors only where these have one value: with them a penalty of all
    parameters can be computed, and nothing else. What counts is what it sees itself: operators, and not functions that
    take no more than the dtype or the shape of a tensor (``type_as``).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._shapes = {
            tuple(weight.shape)
            for module in model.modules()
            if type(module) in (nn.Linear, nn.Embedding) and (weight := module._parameters.get("weight")) is not None
        }
        # By a tensor's memory, as ``_memory_of`` names it; they are kept, so that nobody else gets it.
        self._layers: dict[int, tuple[Tensor, set[str]]] = {}  # that have a parameter
        self._own = Counter[int]()  # of parameters: calls that go on of layers that have them
        self._sources: dict[int, tuple[Tensor, frozenset[int]]] = {}  # parameters that it was made from
        self._together = set[frozenset[tuple[frozenset[int], bool]]]()  # of a call: these, and whether it is one value
        self._operators = _Operators(self._note)

    def begins(self, path: str, layer: nn.Module) -> None:
        for parameter in layer._parameters.values():
            if parameter is not None:
                self._layers.setdefault(key := _memory_of(parameter), (parameter, set()))[1].add(path)
                self._own[key] += 1

    def ends(self, layer: nn.Module) -> None:
        self._own.subtract(_memory_of(parameter) for parameter in layer._parameters.values() if parameter is not None)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, nn.Parameter):  # its ``data`` is none, and no operator makes that
                self._of(one)
        with self._operators:  # here, for whoever runs the model enters modes of his own, which would hide them
            return func(*args, **(kwargs or {}))

    def _note(self, given: Iterable[Any], result: Any) -> None:
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        if not made:
            return
        given = [one for one in given if isinstance(one, Tensor)]
        sources = [self._of(one) for one in given]
        if every := frozenset[int]().union(*sources):
            self._together.add(frozenset((of, one.numel() == 1) for of, one in zip(sources, given, strict=True)))
            for one in made:
                self._sources[_memory_of(one)] = one, every

    def _of(self, tensor: Tensor) -> frozenset[int]:
        if self._own[key := _memory_of(tensor)] > 0:
            return frozenset()
        if isinstance(tensor, nn.Parameter) and (key in self._layers or tuple(tensor.shape) in self._shapes):
            self._sources[key] = tensor, frozenset((key,))  # also of a copy, which was made from another
        return self._sources[key][1] if key in self._sources else frozenset()

    def mixed(self, plan: Collection[str]) -> set[str]:
        split = {key for key, (_, paths) in self._layers.items() if not paths.isdisjoint(plan)}
        found = set[str]()
        for together in self._together:
            if any(sources.isdisjoint(split) and not one for sources, one in together):
                used = split.intersection(key for sources, _ in together for key in sources)
                found |= {path for key in used for path in self._layers[key][1]}
        return found


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of each operator what it was given, and what it made."""

    supports_higher_order_operators = True

    def __init__(self, note: Callable[[Iterable[Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() < 0:  # backward is that of the layers' own calls
            self._note(tree_leaves((args, kwargs)), result)
        return result


def _memory_of(tensor: Tensor) -> int:
    """Equal for a tensor and its views, and no others."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _kind(module: nn.Module) -> object:
    """Equal for modules of one class with the same shapes and attributes."""
    known = nn.Module().__dict__

    def of(value: object) -> object:
        return value if isinstance(value, int | float | str | None) else id(value)

    return tuple(
        (path, type(part), *((name, of(value)) for name, value in vars(part).items() if name not in known))
        for path, part in module.named_modules()
    ) + tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in module.named_parameters())


def _divides(module: nn.Module, pair: _Pair, ranks: int, given: tuple[Any, Any]) -> bool:
    """Whether the module, called so, computes the same with each rank's part of a pair: in training, with nothing
    dropped; in evaluation where that tells nothing, since it draws random numbers."""
    tensors = (*module.buffers(), *tree_leaves(given))
    masks = any(getattr(tensor, "dtype", None) is torch.bool for tensor in tensors)
    for training in (True, False):
        found = set[bool | None]()
        for bools in (True, False) if masks else (True,):
            try:
                found.add(_is_alike(module, pair, ranks, given, bools=bools, training=training))
            except Exception:  # it cannot be computed by itself, or draws
                found.add(None)
        if False in found:
            return False
        if True in found:
            return True
    return False


def _is_alike(
    module: nn.Module, pair: _Pair, ranks: int, given: tuple[Any, Any], *, bools: bool, training: bool
) -> bool | None:
    """Whether the module computes the same, and what is whole has the same gradients, with each rank's part of a pair;
    None where these numbers cannot tell.

    Parameters, buffers and what it is given are random numbers, tensors of bools all ``bools``. What columns are given
    passes no gradient on: the ranks add that. What the row gives is replaced by the sum that the ranks make of it.
    """
    seed_all(0)
    whole = _filled(module, bools)
    if not training:
        whole.eval()
    args, kwargs = tree_map_only(_Like, partial(_values, bools=bools), given)
    sums: list[Tensor] = []
    shared: dict[int, Any] = {id(parameter): parameter for parameter in whole.parameters()}
    # A copy is computed, for that changes its buffers.
    expected, between = _outcome(copy.deepcopy(whole, {**shared}), pair, args, kwargs, sums, first=True)
    if not all(torch.isfinite(tensor).all() for tensor in expected.values()):
        return None
    if any(not features.numel() or features.std() == 0 for features in between):
        return None  # a mask of such values hides all
    for rank in range(ranks):
        part = copy.deepcopy(whole, {**shared})
        for name in pair.columns:
            layer: Any = part.get_submodule(name)
            rows = slice(rank * (size := layer.out_features // ranks), (rank + 1) * size)
            layer.weight = nn.Parameter(layer.weight.detach()[rows])
            layer.bias = layer.bias if layer.bias is None else nn.Parameter(layer.bias.detach()[rows])
        row: Any = part.get_submodule(pair.row)
        ours = slice(rank * (size := row.in_features // ranks), (rank + 1) * size)
        row.weight = nn.Parameter(row.weight.detach()[:, ours])
        try:
            found, parts = _outcome(part, pair, args, kwargs, sums, first=False)
        except Exception:
            return False
        if len(parts) != len(between) or found.keys() != expected.keys():
            return False
        if not all(_near(found[name], expected[name]) for name in found):
            return False
        if not all(_near(mine, features[..., ours]) for mine, features in zip(parts, between, strict=True)):
            return False
    return True


def _fails(module: nn.Module, pair: _Pair, ranks: int, given: tuple[Any, Any]) -> bool:
    """Whether the module, called so, computes, and does not with a rank's part of a pair; without memory.

    What is not known to be a value, as a cache that is filled while it is called, is left out.
    """
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in pair.columns}
    part, _ = part_of(module, ranks, plan | {pair.row: RowwiseParallel()})

    def of(leaf: object) -> Any:
        if isinstance(leaf, _Like):
            return _values(leaf, bools=True)
        return leaf if isinstance(leaf, bool | int | float | str | torch.dtype | torch.device) else None

    for one in (module, part):
        try:
            with faked(one) as (copied, _):
                args, kwargs = tree_map(of, given)
                copied(*args, **kwargs)
        except Exception:
            return one is part
    return False


def _outcome(
    module: nn.Module, pair: _Pair, args: Any, kwargs: Any, sums: list[Tensor], *, first: bool
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What a module gives, with its buffers after that and the gradients of what is whole; and what the row was given.

    ``sums``: what the row gives in the whole module, found in the ``first`` run. Raises RuntimeError where it draws.
    """
    between: list[Tensor] = []

    def cut(layer: nn.Module, inputs: Any) -> Any:
        return tree_map_only(Tensor, Tensor.detach, inputs)

    def summed(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        between.append(inputs[0].detach().clone())
        if first:
            sums.append(output.detach().clone())
        return sums[len(between) - 1] + (output - output.detach())

    hooks = [module.get_submodule(name).register_forward_pre_hook(cut) for name in pair.columns]
    hooks.append(module.get_submodule(pair.row).register_forward_hook(summed))
    leaves = {f"input {number}": tensor for number, tensor in enumerate(tree_leaves((args, kwargs)))
              if isinstance(tensor, Tensor) and tensor.is_floating_point()}  # fmt: skip
    for leaf in leaves.values():
        leaf.requires_grad_()
    layers = {f"{name}.{kind}" for name in pair.names for kind in ("weight", "bias")} - {f"{pair.row}.bias"}
    leaves |= {name: p for name, p in module.named_parameters() if p.requires_grad and name not in layers}
    drawn = torch.get_rng_state()
    with torch.enable_grad():
        made = module(*tree_map_only(Tensor, Tensor.clone, args), **tree_map_only(Tensor, Tensor.clone, kwargs))
        for hook in hooks:
            hook.remove()
        if not torch.equal(drawn, torch.get_rng_state()):
            raise RuntimeError("it draws random numbers: of other shapes, others")
        outputs = [tensor for tensor in tree_leaves(made) if isinstance(tensor, Tensor)]
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        seed_all(1)
        gradients = torch.autograd.grad(
            roots, list(leaves.values()), [torch.randn_like(root) for root in roots], allow_unused=True
        )
    found = {f"output {number}": tensor.detach() for number, tensor in enumerate(outputs)}
    found |= {f"buffer {name}": tensor.detach() for name, tensor in module.named_buffers()}
    return found | {
        name: gradient for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None
    }, between


def _filled(module: nn.Module, bools: bool) -> nn.Module:
    """A copy in memory, which drops nothing: masks of dropout are another matter."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        made = _values(_Like(tensor), bools=bools)
        if isinstance(tensor, nn.Parameter):
            scale = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 1.0
            memo[id(tensor)] = nn.Parameter(made.mul_(scale), requires_grad=tensor.requires_grad)
        else:
            memo[id(tensor)] = made
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        for name, value in tuple(vars(part).items()):
            drops = "drop" in name or (name == "p" and isinstance(part, _DropoutNd))
            if drops and isinstance(value, float):
                setattr(part, name, 0.0)
    return copied


def _values(like: _Like, *, bools: bool) -> Tensor:
    if like.dtype is torch.bool:
        return torch.full(like.shape, bools)
    if like.dtype.is_floating_point:
        return torch.randn(like.shape)
    if like.dtype.is_complex:
        return torch.randn(like.shape, dtype=torch.complex64)
    return torch.zeros(like.shape, dtype=like.dtype)  # an index of something


def _near(ours: Tensor, others: Tensor) -> bool:
    if ours.shape != others.shape:
        return False
    most = others.abs().max().item() if others.numel() and others.dtype is not torch.bool else 1.0
    return torch.allclose(ours, others, rtol=1e-3, atol=1e-4 * most)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _declared(model: nn.Module) -> tuple[dict[str, ParallelStyle], set[str]]:
    """Of ``model._tp_plan``: styles by module name, nothing where it has none; and the modules in which others that are
    whole would compute with parts. Raises UsageError for a style that is not known here."""
    plan, between = dict[str, ParallelStyle](), set[str]()
    for pattern, name in (getattr(model, "_tp_plan", None) or {}).items():
        if name not in _STYLES and name != _ON_PARTS:
            raise UsageError(
                f"the model's _tp_plan has the style {name!r} for {pattern}; known are "
                f"{', '.join((*_STYLES, _ON_PARTS))}: say in Job.parallelize what is split"
            )
        wanted = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        for path, _ in model.named_modules():
            if wanted.fullmatch(path) is None:
                continue
            if name == _ON_PARTS:
                between.add(path.rpartition(".")[0])
            else:
                plan[path] = _STYLES[name]()
    return plan, between


def _declared_pairs(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> list[_Pair]:
    """Layers of one module between which each rank has its own part."""
    columns, rows = dict[str, list[str]](), dict[str, list[str]]()
    for path, chosen in plan.items():
        style: Any = chosen
        inside = style.output_layouts if isinstance(style, ColwiseParallel) else style.input_layouts
        if type(model.get_submodule(path)) is nn.Linear and inside[0].is_shard():
            parent, _, name = path.rpartition(".")
            (columns if isinstance(style, ColwiseParallel) else rows).setdefault(parent, []).append(name)
    return [_Pair(path, tuple(columns[path]), names[0]) for path, names in rows.items()
            if path in columns and len(names) == 1]  # fmt: skip


def _each_by_itself(
    model: nn.Module, plan: Mapping[str, ParallelStyle], pairs: Sequence[_Pair], ranks: int
) -> dict[str, ParallelStyle]:
    """A plan in which the layers of these pairs are not split together."""
    found = dict(plan)
    for pair in pairs:
        for name in pair.names:
            path = _joined(pair.path, name)
            layer = model.get_submodule(path)
            style = _by_itself(layer)
            if style is None or cast(nn.Linear, layer).out_features % ranks:
                del found[path]
            else:
                found[path] = style
    if pairs:
        logger.warning(
            "the layers of %s%s are split each by itself, though the model's _tp_plan splits them together: none of %d "
            "ranks can compute its part alone, for it has no whole head, or a norm works between that would have a "
            "part of its gradient",
            pairs[0].path or type(model).__name__, f" and {len(pairs) - 1} other modules" if pairs[1:] else "", ranks,
        )  # fmt: skip
    return found


def _tied_alike(model: nn.Module, plan: Mapping[str, ParallelStyle], ranks: int) -> dict[str, ParallelStyle]:
    """A plan in which layers that share a weight are split alike, as an embedding with the head that is declared;
    or, where the others cannot be, not at all."""
    modules = {path: module for path, module in model.named_modules()}
    users: dict[int, list[str]] = {}
    for path, module in modules.items():
        if isinstance(weight := module._parameters.get("weight"), Tensor):
            users.setdefault(id(weight), []).append(path)
    found = dict(plan)
    for paths in users.values():
        rows = {path: _splits_rows(modules[path], found[path]) for path in paths if path in found}
        if len(paths) == 1 or not rows or (len(rows) == len(paths) and len(set(rows.values())) == 1):
            continue
        others = {path: style for path in paths if path not in rows and (style := _by_itself(modules[path]))}
        extent = cast(Tensor, modules[paths[0]].weight).shape[0]
        if all(rows.values()) and len(rows) + len(others) == len(paths) and not extent % ranks:
            found |= others
            continue
        logger.warning(
            "%s share a weight and cannot be split alike, so none of them is, though the model's _tp_plan names %s",
            " and ".join(map(repr, paths)), " and ".join(map(repr, rows)),
        )  # fmt: skip
        for path in rows:
            del found[path]
    return found


def _splits_rows(layer: nn.Module, style: ParallelStyle) -> bool:
    return isinstance(style, ColwiseParallel) != isinstance(layer, nn.Embedding)
