"""The form of a program: msgpack text in, a checked list of nodes out; and back.

A program is ``[form, fingerprint, structure, metrics, statistics, operators, constants, graphs]``; a graph is
``[inputs, nodes, outputs]``, a node ``[operator, arguments, named arguments]``. Values are numbered: the layout's
entries, the batch's tensors, the constants, then each node's result; a node may use what stands before it.
docs/code-free.md has every field.

Invariants: the text's length is bounded before it is parsed; every operator is on the list of ``operators``; every
argument fits the operator's schema; a node writes into nothing but buffers and results of other nodes. Nothing here
computes with tensors. Raises ProgramRefused for everything else, and never another error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgpack
import msgspec
import torch
from msgspec import DecodeError, Meta
from torch import Tensor

from w5xde_async.compute.program.operators import (
    DTYPES,
    LAYOUTS,
    MEMORY_FORMATS,
    RECOMPUTE,
    STRINGS,
    Operator,
    Parameter,
    find,
)
from w5xde_async.compute.program.switches import Said, contradiction
from w5xde_async.errors import ProgramRefused
from w5xde_async.params.layout import Layout

FORM = 2

# Tags of what is not a plain literal: [tag, value].
_VALUE, _DTYPE, _LAYOUT, _MEMORY_FORMAT, _DEVICE, _LIST = range(6)
_EQUATION = re.compile(r"[A-Za-z., \->]{1,200}")


class Limits(NamedTuple):
    """What a program may have. ``text_bytes`` leaves the constants out; ``items`` counts one list's."""

    text_bytes: int = 2 << 20
    constants: int = 1024
    constant_bytes: int = 256 << 20
    graphs: int = 64
    nodes: int = 32768
    inputs: int = 1024
    items: int = 4096
    axes: int = 16
    metrics: int = 64
    switches: int = 64
    regions_deep: int = 16  # each level computes what lies in it once more


LIMITS = Limits()
_MAX_INT = 1 << 63


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of a number."""

    index: int


class _Device:
    """The device of whoever runs the program."""

    def __repr__(self) -> str:
        return "DEVICE"


DEVICE = _Device()


class Input(NamedTuple):
    """One tensor of a batch. A size is a number or ``(symbol, least, most, example)``, the same for one symbol."""

    dtype: torch.dtype
    sizes: tuple[int | tuple[int, int, int, int], ...]


class Node(NamedTuple):
    """One call. Arguments: literals, Ref, DEVICE, dtypes, or tuples of literals and Ref."""

    operator: Operator
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """One way through the step, for batches that fit ``inputs``. ``metrics``: numbers or Ref."""

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    loss: int
    metrics: tuple[Any, ...]


class Document(NamedTuple):
    """A program as it travels: its text and its constants."""

    text: bytes
    constants: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A program that was checked. ``statistics`` are layout entries that change without a version count; ``said`` is
    what torch was told where it was traced."""

    fingerprint: bytes
    structure: bytes
    metrics: tuple[str, ...]
    statistics: tuple[int, ...]
    constants: tuple[Tensor, ...]
    graphs: tuple[Graph, ...]
    num_entries: int
    said: Said = ()


# -- out -------------------------------------------------------------------------------------------------------


def encode(program: Program) -> Document:
    """The program as it travels."""
    operators: dict[str, int] = {}

    def number(operator: Operator) -> int:
        return operators.setdefault(operator.name, len(operators))

    graphs = [
        [
            [[_name(DTYPES, input_.dtype), list(input_.sizes)] for input_ in graph.inputs],
            [
                [number(node.operator), [*map(_pack, node.arguments)], [[k, _pack(v)] for k, v in node.named]]
                for node in graph.nodes
            ],
            [graph.loss, [_pack(value) for value in graph.metrics]],
        ]
        for graph in program.graphs
    ]
    constants = [[_name(DTYPES, constant.dtype), list(constant.shape)] for constant in program.constants]
    head = (FORM, program.fingerprint, program.structure, program.metrics, program.statistics)
    text: bytes = msgpack.packb((*head, list(operators), constants, graphs, program.said))
    return Document(text, program.constants)


def _pack(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is Ref:
        return [_VALUE, value.index]
    if isinstance(value, torch.dtype):
        return [_DTYPE, _name(DTYPES, value)]
    if isinstance(value, torch.layout):
        return [_LAYOUT, _name(LAYOUTS, value)]
    if isinstance(value, torch.memory_format):
        return [_MEMORY_FORMAT, _name(MEMORY_FORMATS, value)]
    if value is DEVICE:
        return [_DEVICE, 0]
    if isinstance(value, tuple):
        return [_LIST, [_pack(item) for item in value]]
    raise ValueError(f"no program can hold an argument of type {type(value).__name__}")


def _name(table: Any, value: Any) -> str:
    for name, known in table.items():
        if known == value:
            return str(name)
    raise ValueError(f"no program can hold {value}")


# -- in --------------------------------------------------------------------------------------------------------


_Input = tuple[str, Annotated[tuple[Any, ...], Meta(max_length=LIMITS.axes)]]
_Node = tuple[int, tuple[Any, ...], tuple[tuple[str, Any], ...]]
_Graph = tuple[
    Annotated[tuple[_Input, ...], Meta(max_length=LIMITS.inputs)],
    Annotated[tuple[_Node, ...], Meta(max_length=LIMITS.nodes)],
    tuple[int, tuple[Any, ...]],
]
#: A text as it lies: what sizes and arguments are is left to ``_Reader``.
_TEXT = msgspec.msgpack.Decoder(
    tuple[
        int,
        bytes,
        Annotated[bytes, Meta(max_length=1 << 16)],
        Annotated[tuple[str, ...], Meta(max_length=LIMITS.metrics)],
        tuple[int, ...],
        Annotated[tuple[str, ...], Meta(max_length=LIMITS.items)],
        Annotated[tuple[tuple[str, tuple[int, ...]], ...], Meta(max_length=LIMITS.constants)],
        Annotated[tuple[_Graph, ...], Meta(min_length=1, max_length=LIMITS.graphs)],
        Annotated[tuple[tuple[str, bool | str], ...], Meta(max_length=LIMITS.switches)],
    ]
)


def parse(document: Document, layout: Layout) -> Program:
    """Check every part. Raises ProgramRefused, naming the node and what is wrong with it."""
    text, entries = document.text, layout.entries
    _need(len(text) <= LIMITS.text_bytes, f"its text has {len(text)} bytes, more than {LIMITS.text_bytes}")
    try:
        form, fingerprint, structure, metrics, statistics, names, constants, graphs, said = _TEXT.decode(text)
    except (DecodeError, ValueError, RecursionError) as error:
        raise ProgramRefused(f"its text is not msgpack of form {FORM}: {str(error)[:200]}") from None
    _need(form == FORM, f"it has form {form!r:.40}, this version knows {FORM}: use the same version on both sides")
    _need(fingerprint == layout.fingerprint, "it is of another model than the run")
    _need(
        all(_in(index, len(entries)) and entries[index].role == "mean" for index in statistics),
        "its statistics are not buffers",
    )
    _check_constants(document.constants, constants)
    _need(not (wrong := contradiction(said)), wrong)
    total = sum(len(nodes) for _, nodes, _ in graphs)
    _need(total <= LIMITS.nodes, f"it has {total} nodes, more than {LIMITS.nodes}")
    made = tuple(_Reader(layout, names, document.constants, len(metrics)).graph(graph) for graph in graphs)
    return Program(fingerprint, structure, metrics, statistics, document.constants, made, len(entries), said)


def _need(holds: bool, reason: str) -> None:
    if not holds:
        raise ProgramRefused(reason)


def _check_constants(constants: Sequence[Tensor], declared: Any) -> None:
    total = sum(constant.numel() * constant.element_size() for constant in constants)
    _need(total <= LIMITS.constant_bytes, f"its constants have {total} bytes, more than {LIMITS.constant_bytes}")
    known = set(DTYPES.values())
    _need(all(constant.dtype in known for constant in constants), "its constants are of a dtype that no program has")
    found = tuple((_name(DTYPES, constant.dtype), tuple(constant.shape)) for constant in constants)
    _need(declared == found, "its constants are not those that came with it")


def _in(index: Any, count: int) -> bool:
    return type(index) is int and 0 <= index < count


def _check_regions(nodes: Sequence[Node]) -> None:
    """Each region ends with the graph, or with the region around it, or before."""
    ends: list[int] = []
    for number, node in enumerate(nodes):
        while ends and ends[-1] < number:
            ends.pop()
        if node.operator.name != RECOMPUTE:
            continue
        left = (ends[-1] if ends else len(nodes) - 1) - number
        count = node.arguments[0] if len(node.arguments) == 3 else None
        if type(count) is not int or not 0 < count <= left:
            raise ProgramRefused(f"{count!r:.40} calls of the {left} that follow", node=number, operator=RECOMPUTE)
        if len(ends) == LIMITS.regions_deep:
            reason = f"more than {LIMITS.regions_deep} regions in one another"
            raise ProgramRefused(reason, node=number, operator=RECOMPUTE)
        ends.append(number + count)


class _Reader:
    """Reads one graph: keeps what kind each value is and what memory it may lie in."""

    def __init__(self, layout: Layout, names: Sequence[str], constants: Sequence[Tensor], num_metrics: int) -> None:
        self._layout, self._names, self._constants, self._num_metrics = layout, names, constants, num_metrics
        self._kinds: list[Any] = []  # a kind; a tuple of them for several results; None for none
        self._roots: list[int | None] = []  # the first value that is not ours to write and that it may be a view of

    def graph(self, raw: Any) -> Graph:
        inputs, nodes, (loss, metrics) = raw
        made_inputs = tuple(self._input(number, *raw_input) for number, raw_input in enumerate(inputs))
        for index, entry in enumerate(self._layout.entries):
            self._kinds.append("Tensor")
            self._roots.append(None if entry.role in ("mean", "max") else index)
        for _ in range(len(inputs) + len(self._constants)):
            self._roots.append(len(self._kinds))
            self._kinds.append("Tensor")
        made_nodes = tuple([self._node(number, *raw_node) for number, raw_node in enumerate(nodes)])
        _check_regions(made_nodes)
        _need(_in(loss, len(self._kinds)) and self._kinds[loss] == "Tensor", "the loss is no tensor of the graph")
        _need(len(metrics) == self._num_metrics, "the number of metrics")
        return Graph(made_inputs, made_nodes, loss, tuple(self._metric(value) for value in metrics))

    def _input(self, number: int, dtype: str, sizes: tuple[Any, ...]) -> Input:
        _need(dtype in DTYPES, f"tensor {number} of the batch has an unknown dtype")
        for size in sizes:
            parts = size if type(size) is list and len(size) == 4 else [size]
            _need(all(_in(part, 1 << 40) for part in parts), f"tensor {number} of the batch has an odd size")
        return Input(DTYPES[dtype], tuple(tuple(size) if type(size) is list else size for size in sizes))

    def _metric(self, raw: Any) -> Any:
        if type(raw) in (int, float, bool):
            return raw
        value = self._value(raw)
        _need(value is not None and self._kinds[value.index] in ("Tensor", "number"), "a metric is no number")
        return value

    def _value(self, raw: Any) -> Ref | None:
        """The Ref that ``raw`` is, if it is one. Raises ProgramRefused for one of a value that is not there (yet)."""
        if type(raw) is not list or len(raw) != 2 or type(raw[0]) is not int or raw[0] != _VALUE:
            return None
        _need(_in(raw[1], len(self._kinds)), f"value {raw[1]!r:.40} is not there yet; {len(self._kinds)} are")
        return Ref(raw[1])

    def _node(self, number: int, which: int, arguments: Any, named: Any) -> Node:
        name = ""
        try:
            _need(_in(which, len(self._names)), "its operator is not in the program's list")
            name = self._names[which]
            operator = find(name)
            if operator is None:
                raise ProgramRefused("this operator is not on the list of those that a program may use")
            return self._call(operator, arguments, named)
        except ProgramRefused as error:
            raise ProgramRefused(error.reason, node=number, operator=name[:80]) from None

    def _call(self, operator: Operator, arguments: Sequence[Any], named: Sequence[tuple[str, Any]]) -> Node:
        positional = [parameter for parameter in operator.parameters if not parameter.keyword]
        by_name = {parameter.name: parameter for parameter in operator.parameters}
        _need(len(arguments) <= len(positional), f"{len(arguments)} arguments in place of {len(positional)}")
        given = {parameter.name: raw for parameter, raw in zip(positional, arguments, strict=False)}
        for name, raw in named:
            _need(name in by_name, f"it has no argument {name!r:.40}")
            _need(name not in given, f"argument {name} comes twice")
            given[name] = raw
        roots: list[int] = []
        made = {}
        tensors = 0
        for parameter in operator.parameters:
            if parameter.name not in given:
                _need(parameter.default or parameter.optional, f"argument {parameter.name} is missing")
                continue
            value = made[parameter.name] = self._argument(parameter, given[parameter.name])
            touched = [item for item in (value if type(value) is tuple else (value,)) if type(item) is Ref]
            for item in touched:
                root = self._roots[item.index]
                if parameter.writes and root is not None:
                    raise ProgramRefused(f"it writes into {self._described(root)}")
                if parameter.aliases and root is not None:
                    roots.append(root)
            if parameter.takes_tensors:
                found = sum(self._kinds[item.index] not in ("number", None) for item in touched)
                whole = found == (len(value) if type(value) is tuple else value is not None)
                _need(whole or not (parameter.writes or parameter.aliases), f"argument {parameter.name} is no tensor")
                tensors += found
        # torch makes a tensor of a number, on the CPU: alone it would take the call off the device it is for.
        _need(tensors > 0 or not operator.takes_tensors, "none of its arguments is a tensor")
        self._kinds.append(self._result(operator, made))
        self._roots.append(min(roots, default=None))
        used = [parameter.name for parameter in positional[: len(arguments)]]
        return Node(
            operator,
            tuple(made[name] for name in used),
            tuple((name, value) for name, value in made.items() if name not in used),
        )

    def _result(self, operator: Operator, made: dict[str, Any]) -> Any:
        if operator.name == "item":
            of, index = self._kinds[made["operand0"].index], made["operand1"]
            if of == "List[Tensor]":
                _need(_in(index, LIMITS.nodes), "an index")
                return "Tensor"
            _need(_in(index, len(of)), f"result {index!r:.40} of {len(of)}")
            return of[index]
        results = operator.results
        return None if not results else results[0] if len(results) == 1 else results

    def _described(self, root: int) -> str:
        if root < len(self._layout.entries):
            return f"{self._layout.entries[root].name!r}, which is not a buffer"
        return "the batch or a constant"

    def _argument(self, parameter: Parameter, raw: Any) -> Any:
        value = self._literal(parameter, raw)
        if value is _WRONG:
            raise ProgramRefused(f"argument {parameter.name} is not what it has to be ({parameter.kind})")
        return value

    def _literal(self, parameter: Parameter, raw: Any) -> Any:
        kind = parameter.kind
        if raw is None:
            return None if parameter.optional else _WRONG
        if type(raw) is list:
            return self._tagged(parameter, raw)
        if type(raw) is bool:
            allowed = kind in ("bool", "number", "Tensor") and not (parameter.name == "pin_memory" and raw)
            return raw if allowed else _WRONG
        if type(raw) is int:
            return raw if kind in _WHOLE and -_MAX_INT <= raw < _MAX_INT else _WRONG
        if type(raw) is float:
            return raw if kind in ("float", "number", "Tensor") and not parameter.writes else _WRONG
        if type(raw) is str and kind == "str":
            known = STRINGS.get(parameter.name)
            fits = raw in known if known is not None else bool(_EQUATION.fullmatch(raw))
            return raw if fits else _WRONG
        return _WRONG

    def _tagged(self, parameter: Parameter, raw: Any) -> Any:
        kind = parameter.kind
        _need(len(raw) == 2 and type(raw[0]) is int, "an argument without a tag")
        tag, content = raw
        if tag == _VALUE:
            value = self._value(raw)
            assert value is not None
            of = self._kinds[value.index]
            if kind == "results":
                return value if type(of) is tuple or of == "List[Tensor]" else _WRONG
            return value if of in _REFERENCES.get(kind, ()) else _WRONG
        if tag == _LIST and kind.startswith("List["):
            most = f"argument {parameter.name} is no list of at most {LIMITS.items} items, as a program's are"
            _need(type(content) is list and len(content) <= LIMITS.items, most)
            inner = kind[len("List[") : -1]
            item = Parameter(
                parameter.name, inner.removeprefix("Optional[").rstrip("]"), inner.startswith("Optional["), False,
                False, parameter.writes, parameter.aliases,
            )  # fmt: skip
            return tuple([self._argument(item, part) for part in content])
        for own, known, table in (
            (_DTYPE, "ScalarType", DTYPES),
            (_LAYOUT, "Layout", LAYOUTS),
            (_MEMORY_FORMAT, "MemoryFormat", MEMORY_FORMATS),
        ):
            if tag == own and kind == known:
                return table[content] if type(content) is str and content in table else _WRONG
        return DEVICE if tag == _DEVICE and kind == "Device" else _WRONG


_WRONG = object()
_WHOLE = ("int", "number", "float", "Tensor")
#: What kinds of value may stand for what kinds of argument.
_REFERENCES = {
    "Tensor": ("Tensor", "number"), "number": ("number",), "int": ("number",), "float": ("number",),
}  # fmt: skip
