"""A program cut into atoms: runs of its nodes, at the places where little crosses from one to the next.

What crosses a cut is **live**: results of nodes before it that nodes behind it use. Parameters, batches and constants
do not cross; whoever computes a part has those that it needs. Sizes do not cross either: each part is told them
(``Sizes``), which are those of the batch's shapes alone.

The parts of a program, run one after the other, are the program: the same calls in the same order. So are they with
every live value detached, and its gradient handed back by hand: autograd runs backward in the opposite order of
forward, and adds the gradients of a value that several nodes use in that order. A live value that a part does not use,
or not alone, passes through it, and what the later parts found of its gradient comes back through it: the latest users
are added first, as in the program. Three things are the caller's:

- random numbers: the generator's state goes on from part to part (``Atom.draws`` says who needs it);
- a parameter that several parts use (``Atoms.shared``): one part holds it and passes it on behind the live values;
- under autocast such a parameter may be cast once for several uses, whose gradients are then added in half precision.
  Parts cast it anew for each, with other bits: ``Atoms.cast_again`` says of which it holds.

A cut never lies within what writes in place into memory that was there before, within a region that backward computes
again, or between an operator of several results and their use. Which cuts are made depends on the program alone,
through integers: operations and bytes, counted on tensors without memory, at the sizes that were traced, in full
precision.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from w5xde_async.compute.block import autocast
from w5xde_async.compute.flops import counting_flops
from w5xde_async.compute.program.form import Graph, Input, Node, Program, Ref
from w5xde_async.compute.program.interpreter import Measured, Step, bind, example, matches, measure, run_steps
from w5xde_async.compute.program.operators import RECOMPUTE, SCALARS, SET_GRAD, Operator
from w5xde_async.compute.program.program_job import skeleton
from w5xde_async.errors import ProgramRefused
from w5xde_async.params.layout import ALIGN_BYTES, Layout

#: Between two cuts with less than one part in so many of all operations, none is made that so many times the bytes of
#: either cross; between one and an end of the program (where layers may widen step by step), so many times.
_NEAR, _WIDER, _WIDER_AT_ENDS = 4, 1.5, 2
_MAX_KNOWN = 256  # sizes of batches that are remembered

Shapes = Sequence[tuple[torch.dtype, tuple[int, ...]]]


class Atom(NamedTuple):
    """Nodes ``begin`` to ``end`` of the program's first graph.

    ``entries`` of the layout and ``tensors`` of the batch (their numbers) are those that it uses in any graph.
    ``flops``: operations of one forward pass at the sizes that were traced, one for each element that is made included.
    ``parameter_bytes``: of what it is the first to use. ``draws``: whether it may draw random numbers.
    """

    begin: int
    end: int
    entries: tuple[int, ...]
    tensors: tuple[int, ...]
    flops: int
    parameter_bytes: int
    draws: bool


class Live(NamedTuple):
    """A value that crosses a cut, and how it lies where it is made: kernels may give other bits for other strides and
    alignments. ``offset``: elements between a multiple of 64 bytes and its first one. Without ``requires_grad`` it has
    no gradient; with it, it may turn out to have none."""

    value: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool

    @property
    def packed(self) -> tuple[int, ...]:
        """The shape in which it travels: along axes that repeat one element it has that once."""
        return tuple(size if step else min(size, 1) for size, step in zip(self.shape, self.stride, strict=True))

    def pack(self, tensor: Tensor) -> Tensor:
        """Its elements, contiguous, of shape ``packed``; ``tensor`` itself where it is that."""
        for axis, (size, once) in enumerate(zip(self.shape, self.packed, strict=True)):
            if size != once:
                tensor = tensor.narrow(axis, 0, once)
        return tensor.contiguous()

    def unpack(self, packed: Tensor) -> Tensor:
        """The value as it lay, of what ``pack`` gave; ``packed`` itself where that lies so."""
        if self.stride == packed.stride() and not self.offset and self.shape == packed.shape:
            return packed
        reach = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) + 1
        memory = packed.new_empty(self.offset + (reach if packed.numel() else 0))
        memory.as_strided(self.packed, self.stride, self.offset).copy_(packed)
        return memory.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Sizes:
    """What a batch's shapes decide. ``graph``: the program's graph that it fits. ``live``: what crosses each cut, the
    program's two ends (where nothing does) included. ``measured``: what every part's first run is held to."""

    graph: int
    numbers: Mapping[int, Any]
    live: tuple[tuple[Live, ...], ...]
    measured: Measured


@dataclass(frozen=True, eq=False)
class Atoms:
    """A program in atoms. ``bounds``: for each graph, the cuts' positions among its nodes, both ends included."""

    program: Program
    layout: Layout
    atoms: tuple[Atom, ...]
    bounds: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]
    """Bytes that cross each cut at the sizes that were traced, both ends included."""
    memory_bytes: int
    _known: dict[Any, Sizes] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.atoms)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes: equal where the same program is cut alike."""
        text = repr((self.program.fingerprint, self.bounds, [atom.entries for atom in self.atoms]))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    @cached_property
    def shared(self) -> dict[int, tuple[int, ...]]:
        """Entries that several atoms use, and the atoms."""
        users: dict[int, list[int]] = {}
        for number, atom in enumerate(self.atoms):
            for entry in atom.entries:
                users.setdefault(entry, []).append(number)
        return {entry: tuple(users[entry]) for entry in sorted(users) if len(users[entry]) > 1}

    @cached_property
    def owner(self) -> tuple[int, ...]:
        """For each entry the first atom that uses it; one that none uses goes with the entry before it."""
        first: dict[int, int] = {}
        for number, atom in enumerate(self.atoms):
            for entry in atom.entries:
                first.setdefault(entry, number)
        found: list[int] = []
        for entry in range(len(self.layout.entries)):
            found.append(first.get(entry, found[-1] if found else 0))
        return tuple(found)

    def passed(self, cut: int) -> tuple[int, ...]:
        """Entries that atoms before this cut use and atoms behind it too."""
        return tuple(entry for entry, users in self.shared.items() if users[0] < cut <= users[-1])

    def cast_again(self, precision: str) -> frozenset[int]:
        """Entries that more than one node brings to half precision under autocast.

        The program does it once and adds the gradients of all uses in half precision; a part that was lent the entry
        does it for each use, and its gradients have other bits.
        """
        half = autocast(precision)
        if half is None:
            return frozenset()
        trained, again = set(self.layout.trainable), set[int]()
        for traced, sized in zip(self.program.graphs, self._sized, strict=True):
            users: dict[int, int] = {}

            def each(number: int, call: Callable[[], Any], sized: _Sized = sized, users: dict[int, int] = users) -> Any:
                torch.clear_autocast_cache()
                with _Casting() as casting:
                    result = call()
                value = sized.values[number]
                if casting.found and value >= sized.base:
                    for index in trained.intersection(_refs(sized.graph.nodes[value - sized.base])):
                        users[index] = users.get(index, 0) + 1
                return result

            _rehearse(self, traced, example(traced.inputs), each, half)
            again.update(index for index, count in users.items() if count > 1)
        return frozenset(again)

    def sizes(self, batch: Shapes, *, precision: str = "fp32") -> Sizes:
        """For a batch of these dtypes and shapes. Raises ProgramRefused where no graph of the program takes it."""
        key = (precision, tuple((dtype, tuple(shape)) for dtype, shape in batch))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[key] = self._sizes(batch, precision)
        return known

    def _sizes(self, batch: Shapes, precision: str) -> Sizes:
        which = next((n for n, graph in enumerate(self.program.graphs) if matches(graph, batch)), None)
        if which is None:
            raise ProgramRefused(f"the program was not traced for a batch of {[list(shape) for _, shape in batch]}")
        traced, sized = self.program.graphs[which], self._sized[which]
        base, bounds = sized.base, self.bounds[which]
        numbers: dict[int, Any] = {}
        made: dict[int, Live] = {}
        tensors: dict[int, Tensor] = {}
        reentrant = sized.reentrant()

        def each(number: int, call: Callable[[], Any]) -> Any:
            result, value = call(), sized.values[number]
            if isinstance(result, Tensor):
                tensors[value] = result
            elif value < base:
                numbers[value] = result
            for taken, results in reentrant.get(value, ()):
                if any(tensors[index].requires_grad for index in taken & tensors.keys()):
                    for index in results & tensors.keys():
                        if tensors[index].is_floating_point():
                            tensors[index].requires_grad_()
            return result

        measured = _rehearse(self, traced, batch, each, autocast(precision) or nullcontext)
        for value, tensor in tensors.items():
            offset = int(tensor.storage_offset()) % (ALIGN_BYTES // tensor.element_size())
            shape, stride = tuple(tensor.shape), tuple(tensor.stride())
            made[value] = Live(value, tensor.dtype, shape, stride, offset, tensor.requires_grad)
        last = sized.last_uses()
        live: list[tuple[Live, ...]] = []
        for cut in bounds:
            crossing = [value for value in made if value < base + cut <= last.get(value, -1)]
            live.append(tuple(made[value] for value in crossing) if 0 < cut < len(sized.graph.nodes) else ())
        return Sizes(which, numbers, tuple(live), measured)

    @cached_property
    def _sized(self) -> list[_Sized]:
        return [_Sized.of(self.program, graph) for graph in self.program.graphs]

    def stages(self, count: int) -> list[range]:
        """The atoms in ``count`` runs, the largest of which has as few operations as can be.

        Among equal ones, those that the fewest bytes cross. Raises ValueError where there are fewer atoms.
        """
        if not 0 < count <= len(self.atoms):
            raise ValueError(f"the program can be cut into {len(self.atoms)} parts at most, not {count}")
        before = list(accumulate((atom.flops for atom in self.atoms), initial=0))
        total = len(self.atoms)
        # best[end]: (operations of the largest run, bytes that cross, cuts) of atoms 0 to end in so many runs
        best: list[tuple[int, int, tuple[int, ...]] | None] = [(before[end], 0, ()) for end in range(total + 1)]
        best[0] = None
        for _ in range(count - 1):
            longer: list[tuple[int, int, tuple[int, ...]] | None] = [None] * (total + 1)
            for end in range(2, total + 1):
                longer[end] = min(
                    (
                        (max(known[0], before[end] - before[cut]), known[1] + self.widths[cut], (*known[2], cut))
                        for cut in range(1, end)
                        if (known := best[cut]) is not None
                    ),
                    default=None,
                )
            best = longer
        found = best[total]
        assert found is not None
        return [range(begin, end) for begin, end in pairwise((0, *found[2], total))]

    def stages_at(self, names: Sequence[str]) -> list[range]:
        """The atoms in runs: the first one, and for each of these modules or parameters, by name, one that begins with
        the atom that is the first to use anything of it. Raises ValueError for a name that begins none."""
        begins = [0]
        for name in names:
            of_it = [
                number
                for entry, number in zip(self.layout.entries, self.owner, strict=True)
                if any(own == name or own.startswith(f"{name}.") for own in entry.names)
            ]
            if not of_it:
                known = dict.fromkeys(entry.name.rpartition(".")[0] or entry.name for entry in self.layout.entries)
                raise ValueError(f"the model has nothing called {name!r}; it has {', '.join(known)}"[:1000])
            if min(of_it) <= begins[-1]:
                raise ValueError(
                    f"no stage can begin at {name!r}: the step can be cut into {len(self.atoms)} parts, and it begins "
                    "in the same part as the stage before, or in an earlier one"
                )
            begins.append(min(of_it))
        return [range(*pair) for pair in pairwise((*begins, len(self.atoms)))]

    def units(self, most_bytes: int) -> list[range]:
        """The atoms in runs, each of which has parameters: at most ``most_bytes`` of them, or is one atom that has."""
        found: list[list[int]] = []
        held = 0
        for number, atom in enumerate(self.atoms):
            if found and (not held or not atom.parameter_bytes or held + atom.parameter_bytes <= most_bytes):
                found[-1].append(number)
                held += atom.parameter_bytes
            else:
                found.append([number])
                held = atom.parameter_bytes
        return [range(numbers[0], numbers[-1] + 1) for numbers in found]

    def part(
        self,
        atoms: range,
        device: torch.device | str = "cpu",
        *,
        lent: Iterable[int] = (),
        passed: Iterable[int] = (),
    ) -> Part:
        """A run of atoms as a module that computes on ``device``; see Part."""
        return Part(self, atoms, torch.device(device), sorted(lent), sorted(passed))


class _Casting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``found``: a parameter was brought to another dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it would import it: two seconds

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].is_leaf and args[0].requires_grad:
            self.found = True
        return func(*args, **(kwargs or {}))


class Part(nn.Module):
    """A run of atoms. Its parameters and buffers are those that it uses, under their names in the model, in ``model``.

    They are made on the ``meta`` device; ``hold`` gives them memory. ``lent`` entries are not its own: they come with
    the live values, behind them, in the order of their numbers; ``passed`` ones go out likewise.
    """

    def __init__(
        self, atoms: Atoms, run: range, device: torch.device, lent: Sequence[int], passed: Sequence[int]
    ) -> None:
        super().__init__()
        if not run or run.step != 1 or run.start < 0 or run.stop > len(atoms):
            raise ValueError(f"{run} is no run of {len(atoms)} atoms")
        self.atoms, self.layout, self.device = run, atoms.layout, device
        self.entries = tuple(sorted({entry for number in run for entry in atoms.atoms[number].entries} - {*lent}))
        self.tensors = tuple(sorted({tensor for number in run for tensor in atoms.atoms[number].tensors}))
        self.flops = sum(atoms.atoms[number].flops for number in run)
        self.draws = any(atoms.atoms[number].draws for number in run)
        self.lent, self.passed = tuple(lent), tuple(passed)
        missing = {*passed} - {*lent} - {*self.entries}
        if missing:
            raise ValueError(f"entries {sorted(missing)} are passed on by a part that does not have them")
        self.last = run.stop == len(atoms)
        self.model = skeleton(atoms.layout, self.entries, "meta")
        self._metrics = atoms.program.metrics
        self._slots = [(entry, *_place(self.model, atoms.layout.entries[entry].name)) for entry in self.entries]
        self._ways = [
            _Way.of(atoms.program, sized, range(bounds[run.start], bounds[run.stop]), device)
            for sized, bounds in zip(atoms._sized, atoms.bounds, strict=True)
        ]
        self._known: WeakSet[Sizes] = WeakSet()  # on which it has run

    def hold(self, tensors: Mapping[int, Tensor]) -> None:
        """Let these tensors be the entries, under all their names: memory for what had none, or other memory.

        Their shapes and dtypes are the layout's. Parts that hold one entry together are given one nn.Parameter.
        """
        for index, tensor in tensors.items():
            entry = self.layout.entries[index]
            if tensor.shape != entry.shape or tensor.dtype != entry.dtype:
                raise ValueError(f"{entry.name!r} is {tensor.dtype} of shape {list(tensor.shape)}")
            parameter = entry.role in ("grad", "frozen")
            if parameter and not isinstance(tensor, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=entry.role == "grad")
            for name in entry.names:
                owner, leaf = _place(self.model, name)
                held: dict[str, Any] = owner._parameters if parameter else owner._buffers
                held[leaf] = tensor

    def forward(self, values: Sequence[Tensor], batch: Sequence[Tensor | None], sizes: Sizes) -> tuple[Any, ...]:
        """The live values at the run's end; of the last atom ``(loss, {metric: value})``.

        ``values``: the live ones at its beginning, ``sizes.live[atoms.start]``, and the lent entries. ``batch``: all
        its tensors, those that are not in ``tensors`` may be None.
        """
        way = self._ways[sizes.graph]
        table: list[Any] = [None] * way.num_values
        for entry, owner, leaf in self._slots:
            table[entry] = getattr(owner, leaf)
        for index in way.tensors:
            table[way.first_tensor + index] = batch[index]
        for value, constant in way.constants:
            table[value] = constant
        for value in way.numbers:
            table[value] = sizes.numbers[value]
        arriving = [live.value for live in sizes.live[self.atoms.start]]
        for value, tensor in zip((*arriving, *self.lent), values, strict=True):
            # As in the program, it is no leaf: autocast keeps what it makes of leaves, for all their uses.
            table[value] = tensor.view_as(tensor) if tensor.is_leaf and tensor.requires_grad else tensor
        with nullcontext() if way.grad is None else torch.set_grad_enabled(way.grad):
            run_steps(way.steps if sizes in self._known else way.held(sizes.measured), table)
        self._known.add(sizes)
        if self.last:
            metrics = [table[value.index] if type(value) is Ref else value for value in way.metrics]
            return table[way.loss], dict(zip(self._metrics, metrics, strict=True))
        leaving = [live.value for live in sizes.live[self.atoms.stop]]
        return tuple([table[value] for value in (*leaving, *self.passed)])


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf


class _Sized(NamedTuple):
    """A graph without its calculations with sizes: their results are inputs, behind the batch's tensors.

    ``base``: the number of the first node's result. ``values``: the number here of each of the graph's results.
    """

    graph: Graph
    num_entries: int
    num_tensors: int
    num_constants: int
    values: tuple[int, ...]

    @property
    def base(self) -> int:
        return self.num_entries + len(self.graph.inputs) + self.num_constants

    @classmethod
    def of(cls, program: Program, graph: Graph) -> _Sized:
        numbers = [_is_number(node.operator) for node in graph.nodes]
        kept = list(accumulate((not number for number in numbers), initial=0))  # nodes that stay, before each
        for at, node in enumerate(graph.nodes):
            if node.operator.name == RECOMPUTE and kept[at + 1] == kept[at + 1 + node.arguments[0]]:
                numbers[at] = True  # of a region nothing is left
        kept = list(accumulate((not number for number in numbers), initial=0))
        tensors, constants, entries = len(graph.inputs), len(program.constants), program.num_entries
        added = len(numbers) - kept[-1]
        base = entries + tensors + added + constants
        values = tuple(
            entries + tensors + at - kept[at] if number else base + kept[at] for at, number in enumerate(numbers)
        )
        old_base = entries + tensors + constants

        def final(value: Any) -> Any:
            if type(value) is tuple:
                return tuple(final(item) for item in value)
            if type(value) is not Ref or value.index < entries + tensors:
                return value
            return Ref(value.index + added if value.index < old_base else values[value.index - old_base])

        nodes: list[Node] = []
        for at, node in enumerate(graph.nodes):
            if not numbers[at]:
                arguments = final(node.arguments)
                if node.operator.name == RECOMPUTE:
                    arguments = (kept[at + 1 + arguments[0]] - kept[at + 1], *arguments[1:])
                nodes.append(Node(node.operator, arguments, tuple((name, final(value)) for name, value in node.named)))
        inputs = (*graph.inputs, *([Input(torch.int64, ())] * added))
        made = Graph(inputs, tuple(nodes), final(Ref(graph.loss)).index, final(graph.metrics))
        return cls(made, entries, tensors, constants, values)

    def reentrant(self) -> dict[int, list[tuple[set[int], set[int]]]]:
        """Reentrant regions by their last result: what they take and what they give. All that such a region gives has
        a gradient where anything that it takes has one."""
        found: dict[int, list[tuple[set[int], set[int]]]] = {}
        last = self.last_uses()
        for number in reversed(range(len(self.graph.nodes))):  # inner ones first
            node = self.graph.nodes[number]
            if node.operator.name == RECOMPUTE and node.arguments[2]:
                calls = range(number + 1, number + 1 + node.arguments[0])
                inside = range(self.base + calls.start, self.base + calls.stop)
                taken = {index for call in calls for index in _refs(self.graph.nodes[call]) if index < inside.start}
                given = {index for index in inside if last.get(index, 0) >= inside.stop}
                found.setdefault(inside.stop - 1, []).append((taken, given))
        return found

    def outcome(self) -> list[int]:
        """Values that loss and metrics are."""
        return [self.graph.loss, *[value.index for value in self.graph.metrics if type(value) is Ref]]

    def last_uses(self) -> dict[int, int]:
        """For each node's result, the number of the last result that needs it; past the end where it is an outcome."""
        found = {
            index: self.base + number
            for number, node in enumerate(self.graph.nodes)
            for index in _refs(node)
            if index >= self.base
        }
        return found | {index: self.base + len(self.graph.nodes) for index in self.outcome() if index >= self.base}


class _Way(NamedTuple):
    """A run of one graph's nodes, made ready. ``grad``: whether gradients are recorded where it begins; None where the
    program leaves that to its caller. ``held``: the steps of a first run on some sizes."""

    steps: tuple[Step, ...]
    held: Callable[[Measured], tuple[Step, ...]]
    num_values: int
    first_tensor: int
    tensors: tuple[int, ...]
    constants: tuple[tuple[int, Tensor], ...]
    numbers: tuple[int, ...]
    grad: bool | None
    loss: int
    metrics: tuple[Any, ...]

    @classmethod
    def of(cls, program: Program, sized: _Sized, nodes: range, device: torch.device) -> _Way:
        graph, entries = sized.graph, sized.num_entries
        bound = bind(program, graph, device, nodes)
        used = {index for number in nodes for index in _refs(graph.nodes[number])}
        if nodes.stop == len(graph.nodes):
            used.update(sized.outcome())
        tensors = range(entries, entries + sized.num_tensors)
        numbers = range(tensors.stop, entries + len(graph.inputs))
        constants = range(numbers.stop, sized.base)
        traced = {value - sized.base: number for number, value in enumerate(sized.values) if value >= sized.base}

        def held(measured: Measured) -> tuple[Step, ...]:
            def call(number: int, operator: Operator) -> Callable[..., Any]:
                return measured.held(traced[number], operator)

            return bind(program, graph, device, nodes, call).steps

        return cls(
            steps=bound.steps,
            held=held,
            num_values=bound.num_values,
            first_tensor=entries,
            tensors=tuple(sorted(index - entries for index in used if index in tensors)),
            constants=tuple(
                (index, program.constants[index - constants.start].to(device))
                for index in sorted(used)
                if index in constants
            ),
            numbers=tuple(sorted(index for index in used if index in numbers)),
            grad=_grad_modes(graph)[nodes.start] if bound.sets_grad else None,
            loss=graph.loss,
            metrics=graph.metrics,
        )


def cut(program: Program, layout: Layout, *, precision: str, memory_bytes: int, most: int = 256) -> Atoms:
    """Cut a checked program, for runs in ``precision``, into at most ``most`` atoms.

    Each has at least one part in ``most`` of the operations or of the parameters. A program of several graphs is cut
    where all of them can be, so that an atom has the same entries in each. Raises ProgramRefused where the program's
    results need more than ``memory_bytes``, all parts together.
    """
    whole = Atoms(program, layout, (), (), (), memory_bytes)
    half = autocast(precision)
    lines = [_Line(whole, *pair, half) for pair in zip(program.graphs, whole._sized, strict=True)]
    chosen = lines[0].narrow(most)
    bounds = _aligned(lines, chosen)
    atoms: list[Atom] = []
    seen: set[int] = set()
    for number, (begin, end) in enumerate(pairwise(bounds[0])):
        entries: set[int] = set()
        tensors: set[int] = set()
        draws = False
        for line, own in zip(lines, bounds, strict=True):
            used, read, random = line.needs(own[number], own[number + 1])
            entries |= used
            tensors |= read
            draws |= random
        flops = lines[0].operations[end] - lines[0].operations[begin]
        held = sum(layout.entries[entry].numel * layout.entries[entry].dtype.itemsize for entry in entries - seen)
        seen |= entries
        atoms.append(Atom(begin, end, tuple(sorted(entries)), tuple(sorted(tensors)), flops, held, draws))
    widths = tuple(0 if cut in (0, bounds[0][-1]) else lines[0].widths[cut] for cut in bounds[0])
    return Atoms(program, layout, tuple(atoms), bounds, widths, memory_bytes)


def _aligned(lines: Sequence[_Line], chosen: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The chosen cuts of the first graph, as far as every other graph has one with the same entries on either side."""
    bounds: list[list[int]] = [[0] for _ in lines]
    for position in chosen:
        found = [position]
        for line, own in zip(lines[1:], bounds[1:], strict=True):
            alike = line.alike(lines[0], position, own[-1])
            if alike is None:
                break
            found.append(alike)
        else:
            for own, at in zip(bounds, found, strict=True):
                own.append(at)
    return tuple((*own, len(line.graph.nodes)) for own, line in zip(bounds, lines, strict=True))


class _Line:
    """A graph as a line of nodes, with what there is to know of every position between two of them."""

    def __init__(self, atoms: Atoms, traced: Graph, sized: _Sized, half: Callable[[], Any] | None) -> None:
        self._sized, self._layout = sized, atoms.layout
        self.graph, self._base = graph, base = sized.graph, sized.base
        count = len(graph.nodes)
        self._refs = [_refs(node) for node in graph.nodes]
        operations = [0] * count
        nbytes: dict[int, int] = {}

        def each(number: int, call: Callable[[], Any]) -> Any:
            result, flops = counting_flops(call)
            value = sized.values[number]
            if value < base:
                return result
            node = graph.nodes[value - base]
            made = [item for item in (result if isinstance(result, (tuple, list)) else (result,)) if _is_tensor(item)]
            operations[value - base] = flops + (0 if node.operator.aliases else sum(item.numel() for item in made))
            if _is_tensor(result):
                sizes = [size for size, step in zip(result.shape, result.stride(), strict=True) if step]
                elements = 1
                for size in sizes:
                    elements *= size
                nbytes[value] = elements * result.element_size()
            return result

        _rehearse(atoms, traced, example(traced.inputs), each, half)
        self.operations = list(accumulate(operations, initial=0))  #: before each position
        self._first = self._first_uses()
        numel = [0] * count
        for entry, number in self._first.items():
            numel[number] += self._layout.entries[entry].numel
        self._parameters = list(accumulate(numel, initial=0))
        self.widths, self._allowed = self._crossing(nbytes)

    def _first_uses(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for number, refs in enumerate(self._refs):
            for index in refs:
                if index < self._sized.num_entries:
                    found.setdefault(index, number)
        return found

    def _crossing(self, nbytes: Mapping[int, int]) -> tuple[list[int], list[bool]]:
        """Bytes that are live at each position, and whether a cut may lie there."""
        count = len(self.graph.nodes)
        change, closed = [0] * (count + 2), [0] * (count + 2)

        def close(first: int, last: int) -> None:  # no cut between these two nodes
            closed[first + 1] += 1
            closed[last + 1] -= 1

        for value, last in self._sized.last_uses().items():
            if value in nbytes:
                change[value - self._base + 1] += nbytes[value]
                change[last - self._base + 1] -= nbytes[value]
            else:
                close(value - self._base, last - self._base)
        for number, node in enumerate(self.graph.nodes):
            if node.operator.name == RECOMPUTE:
                close(number, number + node.arguments[0])
        for first, last in self._written():
            close(first, last)
        shut = list(accumulate(closed))
        return list(accumulate(change))[: count + 1], [not shut[p] and 0 < p < count for p in range(count + 1)]

    def _written(self) -> list[tuple[int, int]]:
        """(first node that touches it, last node that a cut must not come before) of all memory that is written into.

        Values that may share memory count as one. A buffer is read by other parts from copies of their own, so all that
        touches one that is written stays together.
        """
        count = len(self.graph.nodes)
        leader = list(range(self._base + count))

        def of(value: int) -> int:
            while leader[value] != value:
                leader[value] = leader[leader[value]]
                value = leader[value]
            return value

        writes: list[tuple[int, int]] = []
        for number, node in enumerate(self.graph.nodes):
            given = {parameter.name: value for parameter, value in zip(_positional(node), node.arguments, strict=False)}
            given.update(node.named)
            for parameter in node.operator.parameters:
                value = given.get(parameter.name)
                items = value if type(value) is tuple else (value,)
                for index in [item.index for item in items if type(item) is Ref]:
                    if parameter.aliases:
                        leader[of(self._base + number)] = of(index)
                    if parameter.writes:
                        writes.append((index, number))
        last_write: dict[int, int] = {}
        for index, number in writes:
            last_write[of(index)] = number
        touched: dict[int, list[int]] = {}
        kept = {of(entry) for entry in range(self._sized.num_entries)}
        for number, refs in enumerate(self._refs):
            for group in {of(index) for index in (*refs, self._base + number)} & last_write.keys():
                touched.setdefault(group, []).append(number)
        return [(numbers[0], numbers[-1] if group in kept else last_write[group]) for group, numbers in touched.items()]

    def narrow(self, most: int) -> list[int]:
        """The positions to cut at, in order: those that the fewest bytes cross, with enough between any two."""
        count = len(self.graph.nodes)
        total, parameters = self.operations[-1], self._parameters[-1]

        def apart(a: int, b: int) -> bool:
            return (
                (self.operations[b] - self.operations[a]) * most >= max(total, 1)
                or (self._parameters[b] - self._parameters[a]) * most >= max(parameters, 1)
            )  # fmt: skip

        chosen = [0, count]
        for position in sorted((p for p in range(count) if self._allowed[p]), key=lambda p: (self.widths[p], p)):
            if len(chosen) > most:
                break
            at = bisect_left(chosen, position)
            before, after = chosen[at - 1], chosen[at]
            if not apart(before, position) or not apart(position, after):
                continue
            near = (self.operations[after] - self.operations[before]) * _NEAR < total
            beside = [self.widths[cut] for cut in (before, after) if 0 < cut < count]
            limit = max(beside, default=self.widths[position]) * (_WIDER if len(beside) == 2 else _WIDER_AT_ENDS)
            if near and self.widths[position] > limit:
                continue
            insort(chosen, position)
        return chosen[1:-1]

    def needs(self, begin: int, end: int) -> tuple[set[int], set[int], bool]:
        """(entries, tensors of the batch, whether random numbers) that these nodes use."""
        entries = self._sized.num_entries
        used = {index for refs in self._refs[begin:end] for index in refs}
        if end == len(self.graph.nodes):
            used.update(self._sized.outcome())
        tensors = {index - entries for index in used if entries <= index < entries + self._sized.num_tensors}
        draws = any(_draws(node) for node in self.graph.nodes[begin:end])
        return {index for index in used if index < entries}, tensors, draws

    def alike(self, other: _Line, position: int, behind: int) -> int | None:
        """The narrowest cut behind ``behind`` that parts the entries as ``position`` parts those of the other graph."""
        before, after = other._sides(position)
        names = [node.operator.name for node in self.graph.nodes]
        if names == [node.operator.name for node in other.graph.nodes] and self._allowed[position]:
            if position > behind and self._sides(position) == (before, after):
                return position
        found = (p for p in range(behind + 1, len(names)) if self._allowed[p] and self._sides(p) == (before, after))
        return min(found, key=lambda p: (self.widths[p], p), default=None)

    def _sides(self, position: int) -> tuple[frozenset[int], frozenset[int]]:
        known = self._known_sides.get(position)
        if known is None:
            entries = self._sized.num_entries
            known = self._known_sides[position] = (
                frozenset(entry for entry, number in self._first.items() if number < position),
                frozenset(index for refs in self._refs[position:] for index in refs if index < entries),
            )
        return known

    @cached_property
    def _known_sides(self) -> dict[int, tuple[frozenset[int], frozenset[int]]]:
        return {}


def _rehearse(
    atoms: Atoms,
    graph: Graph,
    batch: Shapes,
    each: Callable[[int, Callable[[], Any]], Any],
    half: Callable[[], Any] | None,
) -> Measured:
    """Run a graph without memory, gradients recorded."""
    layout = atoms.layout
    return measure(
        atoms.program, graph, [(entry.dtype, entry.shape) for entry in layout.entries], batch,
        memory_bytes=atoms.memory_bytes, autocast=half, trained=layout.trainable, each=each,
    )  # fmt: skip


def _refs(node: Node) -> tuple[int, ...]:
    values = (*node.arguments, *[value for _, value in node.named])
    items = [item for value in values for item in (value if type(value) is tuple else (value,))]
    return tuple(item.index for item in items if type(item) is Ref)


def _is_number(operator: Operator) -> bool:
    """Whether it only calculates with sizes: the parts of a program are told what comes of it."""
    return operator.name in SCALARS and operator.name not in ("item", SET_GRAD, RECOMPUTE)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _positional(node: Node) -> list[Any]:
    return [parameter for parameter in node.operator.parameters if not parameter.keyword]


def _grad_modes(graph: Graph) -> list[bool]:
    """Whether gradients are recorded, before each node and at the end."""
    modes = [True]
    for node in graph.nodes:
        modes.append(bool(node.arguments[0]) if node.operator.name == SET_GRAD else modes[-1])
    return modes


#: Arguments by whose literal 0 or False an operator draws nothing.
_CHANCES = ("p", "dropout", "dropout_p", "train", "training")


def _draws(node: Node) -> bool:
    tags: Collection[Any] = getattr(node.operator.call, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    given = {parameter.name: value for parameter, value in zip(_positional(node), node.arguments, strict=False)}
    given.update(node.named)
    if node.operator.base == "scaled_dot_product_attention":
        given.setdefault("dropout_p", 0.0)
    return not any(name in given and type(given[name]) in (bool, float, int) and not given[name] for name in _CHANCES)
