"""An exported graph in our own form: nodes of listed operators over numbered values."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import w5xde_async
from w5xde_async.compute.program.checkpointing import Region, regions_of
from w5xde_async.compute.program.form import DEVICE, Graph, Input, Node, Ref
from w5xde_async.compute.program.operators import RECOMPUTE, SCALARS, SET_GRAD, find, name_of
from w5xde_async.errors import W5xdeError
from w5xde_async.params.flat import bytes_of

_OURS = (str(Path(torch.__file__).parent), str(Path(w5xde_async.__file__).parent))
_PYTHONS = sysconfig.get_path("stdlib")  # where packages may be installed, too
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class NotTraceable(W5xdeError):
    """The job's step cannot become a program. Fields: ``reason``, ``where`` (``file.py:line``, or empty)."""

    def __init__(self, reason: str, where: str = "") -> None:
        self.reason, self.where = reason, where
        super().__init__(reason + (f" ({where})" if where else ""))


class NotListed(NotTraceable):
    """An operator that is not on the list. Field: ``function``, its name without namespace and overload."""

    def __init__(self, target: Any, where: str) -> None:
        # Not every target is an overload: some are functions, or operators that take parts of the step.
        overload = isinstance(target, torch._ops.OpOverload)
        text = str(target) if overload else getattr(target, "__name__", str(target))
        self.function = text.split(".")[-2] if overload else text
        super().__init__(f"the step uses {_SAID.get(text, text)}, which programs may not use", where)


#: What users call that traces name otherwise.
_SAID = {
    "wrap_with_autocast": "torch.autocast (the job's precision does the same)",
    "cond": "torch.cond",
    "lazy_load_decompositions": "torch.func.vmap",
}


class Converter:
    """One exported graph in our form. ``constants`` is shared by all graphs of a program and grows."""

    def __init__(
        self,
        exported: Any,
        tensors: Sequence[Tensor],
        index_of: Mapping[str, int],
        constants: list[Tensor],
        entries: int,
    ) -> None:
        self._exported, self._tensors, self._index_of = exported, tensors, index_of
        self._constants, self._entries = constants, entries
        self._nodes: list[Node] = []
        self._values: dict[Any, Any] = {}  # traced node -> what stands for it: Ref, literal or a tuple of them
        self._inputs: list[Input] = []
        self._symbols: dict[str, int] = {}
        self._grad = True
        self._open: list[tuple[Region, int]] = []  # regions that calls now go to, and where each began

    def graph(self) -> Graph:
        signature = self._exported.graph_signature
        module = self._exported.graph_module
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(places, signature.input_specs, strict=True):
            self._values[node] = self._place(node, spec)
        results = self._walk(module)
        self._enter(())
        loss, *metrics = results
        if type(loss) is not Ref:
            raise NotTraceable("the loss does not depend on the batch")
        return Graph(tuple(self._inputs), tuple(self._nodes), loss.index, tuple(metrics))

    def _place(self, node: Any, spec: Any) -> Ref:
        kind = spec.kind.name
        if kind in ("PARAMETER", "BUFFER"):
            index = self._index_of.get(str(spec.target).removeprefix("model."))
            if index is not None:
                return Ref(index)
        if kind == "USER_INPUT":
            self._inputs.append(self._input(node, self._tensors[len(self._inputs)]))
            return Ref(self._entries + len(self._inputs) - 1)
        if kind in ("BUFFER", "CONSTANT_TENSOR"):  # a buffer that is not kept in checkpoints
            constant = self._exported.constants[spec.target].detach().contiguous()
            for number, known in enumerate(self._constants):
                if same_bits(known, constant):
                    return Ref(-1 - number)
            self._constants.append(constant)
            return Ref(-len(self._constants))
        raise NotTraceable(f"the step uses {spec.target or kind.lower()}, which is neither a tensor nor of the model")

    def _input(self, node: Any, tensor: Tensor) -> Input:
        sizes: list[int | tuple[int, int, int, int]] = []
        for size, example in zip(node.meta["val"].shape, tensor.shape, strict=True):
            found = size_in(self._exported, size)
            if found is None:
                raise NotTraceable(f"a size of the batch is {size}, neither fixed nor free")
            if isinstance(found, int):
                sizes.append(found)
                continue
            name, least, most = found
            sizes.append((self._symbols.setdefault(name, len(self._symbols)), least, most, example))
        return Input(tensor.dtype, tuple(sizes))

    def _walk(self, module: Any) -> tuple[Any, ...]:
        """Convert a graph's calls; what its output stands for."""
        for node in module.graph.nodes:
            if node.op == "output":
                return tuple(self._argument(value, node) for value in node.args[0])
            if node.op == "call_function":
                self._function(module, node)
            elif node.op not in ("placeholder", "get_attr"):
                raise NotTraceable(f"the trace holds a {node.op}", _line(node))
        return ()

    def _function(self, module: Any, node: Any) -> None:
        target = node.target
        if str(target) == "aten._assert_tensor_metadata.default":
            return
        if str(target) == "wrap_with_set_grad_enabled":
            self._region(module, node)
            return
        name = name_of(target)
        if name is None:
            raise NotListed(target, _line(node) or _first_line(module, node))
        if name == "item" and isinstance(self._values.get(node.args[0]), tuple):
            self._values[node] = self._values[node.args[0]][node.args[1]]
            return
        if name in SCALARS and name != "require" and not node.users:
            return
        if name not in SCALARS:  # sizes are calculated wherever export has put them
            self._enter(regions_of(node.meta))
        arguments = node.args[:1] if name == "require" else node.args
        named = {} if name == "require" else node.kwargs
        given = tuple(self._argument(value, node) for value in arguments)
        # ``zeros``, which ``empty`` travels as, knows no format of memory.
        left_out = ("pin_memory", "memory_format") if name == "zeros.default" else ("pin_memory",)
        result = self._emit(
            name,
            given,
            tuple((key, self._argument(value, node)) for key, value in named.items() if key not in left_out),
        )
        # What was written into a buffer is that buffer: it is no result that a region would keep.
        into = given[0] if given and _in_place(target) and type(given[0]) is Ref else None
        self._values[node] = into if into is not None and 0 <= into.index < self._entries else result

    def _region(self, module: Any, node: Any) -> None:
        """What ran under ``no_grad`` (or ``enable_grad``): its calls in place, with the switch around them."""
        enabled, inner, *operands = node.args
        before = self._grad
        self._grad = bool(enabled)
        graph = module.get_submodule(str(inner.target))
        around = _common([regions_of(call.meta) for call in graph.graph.nodes if call.op == "call_function"])
        self._enter(around)
        self._emit(SET_GRAD, (self._grad,), ())
        places = [place for place in graph.graph.nodes if place.op == "placeholder"]
        for place, operand in zip(places, operands, strict=True):
            self._values[place] = self._argument(operand, node)
        self._values[node] = self._walk(graph)
        self._grad = before
        self._enter(around)
        self._emit(SET_GRAD, (before,), ())

    def _enter(self, regions: tuple[Region, ...]) -> None:
        """Leave regions and begin others, so that the next call lies in exactly these."""
        same = len(_common([regions, tuple(region for region, _ in self._open)]))
        while len(self._open) > same:
            region, at = self._open.pop()
            count = len(self._nodes) - 1 - at
            self._nodes[at] = self._nodes[at]._replace(arguments=(count, region.preserve_random, region.reentrant))
        for region in regions[same:]:
            self._open.append((region, len(self._nodes)))
            self._emit(RECOMPUTE, (), ())

    def _emit(self, name: str, arguments: tuple[Any, ...], named: tuple[tuple[str, Any], ...]) -> Ref:
        operator = find(name)
        assert operator is not None
        self._nodes.append(Node(operator, arguments, named))
        return Ref(_FIRST_NODE + len(self._nodes) - 1)

    def _argument(self, value: Any, node: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return self._values[value]
        if isinstance(value, torch.device):
            return DEVICE
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(item, node) for item in value)
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.layout, torch.memory_format)):
            return value
        raise NotTraceable(f"an argument of {node.target} is a {type(value).__name__}", _line(node))


def _in_place(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and str(schema.name).endswith("_") and not str(schema.name).endswith("__")


def _common(paths: Sequence[tuple[Region, ...]]) -> tuple[Region, ...]:
    """What all of them begin with."""
    first, *others = paths or [()]
    count = 0
    while count < len(first) and all(path[: count + 1] == first[: count + 1] for path in others):
        count += 1
    return first[:count]


#: While graphs are converted the number of constants is not known: constants count down from -1, nodes up from here.
_FIRST_NODE = 1 << 40


def renumbered(graph: Graph, entries: int, constants: int) -> Graph:
    base = entries + len(graph.inputs)

    def final(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(final(item) for item in value)
        if type(value) is not Ref:
            return value
        if value.index < 0:
            return Ref(base - 1 - value.index)
        return Ref(value.index - _FIRST_NODE + base + constants) if value.index >= _FIRST_NODE else value

    nodes = tuple(
        Node(node.operator, final(node.arguments), tuple((name, final(value)) for name, value in node.named))
        for node in graph.nodes
    )
    return Graph(graph.inputs, nodes, final(Ref(graph.loss)).index, final(graph.metrics))


def size_in(exported: Any, size: Any) -> int | tuple[str, int, int] | None:
    """A size of an exported batch: a number, which may have been a free one at first; a symbol, its least and its most;
    None where it is calculated from others."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if expression.is_Integer:
        return int(expression)
    return (str(expression), *_range(exported.range_constraints.get(expression))) if expression.is_Symbol else None


def _range(bounds: Any) -> tuple[int, int]:
    most = (1 << 40) - 1
    if bounds is None:
        return 2, most
    upper = str(bounds.upper)
    # Kernels and models treat one sample, or none, apart: such batches have a graph of their own.
    return max(int(bounds.lower), 2), min(int(upper), most) if upper.isdigit() else most


def _line(node: Any) -> str:
    """The user's line that a traced call comes from."""
    return users_line(frames_of(node.meta.get("stack_trace") or ""))


def _first_line(module: Any, node: Any) -> str:
    """The user's line that the first call comes from of those that ``node`` takes as a part."""
    modules = dict(module.named_modules())
    parts = [modules.get(str(part.target)) for part in node.all_input_nodes if part.op == "get_attr"]
    calls = [call for part in parts if part is not None for call in part.graph.nodes]
    return next((line for call in calls if (line := _line(call))), "")


def calculates(module: Any) -> bool:
    """Whether programs know every calculation with free sizes in an exported graph: where not, sizes must be fixed."""
    return all(
        name_of(node.target) is not None
        for part in module.modules()
        for node in getattr(part, "graph", torch.fx.Graph()).nodes
        if node.op == "call_function" and isinstance(node.meta.get("val"), _SYMBOLIC)
    )


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def frames_of(trace: str) -> list[tuple[str, str]]:
    """The files and lines of a trace that was printed."""
    return _FRAME.findall(trace)


def users_line(frames: Sequence[tuple[str, str]]) -> str:
    users = [
        (file, line)
        for file, line in frames
        if not file.startswith((*_OURS, "<")) and (not file.startswith(_PYTHONS) or "-packages" in file)
    ]
    return f"{Path(users[-1][0]).name}:{users[-1][1]}" if users else ""


def same_bits(a: Tensor, b: Tensor) -> bool:
    if isinstance(a, FakeTensor):  # it has no bits
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bytes_of(a.contiguous()) == bytes_of(b.contiguous())
