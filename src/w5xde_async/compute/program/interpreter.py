"""Runs a checked program: a flat list of calls over numbered values.

Autograd sees what it would see of the model itself: the calls are those of ``torch.export``'s graph before dispatch,
on the model's own parameters. A value is let go after its last use. The calls of a region (``checkpointing``) are one
step: its values are its own, and backward computes them again.

Before a graph runs on batches of new sizes it is run on the ``meta`` device, where nothing has memory: sizes that do
not fit, overflow or need more than ``memory_bytes`` are refused there, before anything is allocated. Kernels may give
other sizes than that: the first run with memory is held to what was seen (``Measured``), each call before the next.
Once for each set of sizes is enough, since no listed operator's sizes depend on values.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from w5xde_async.compute.program.checkpointing import computed
from w5xde_async.compute.program.constraints import check, check_view
from w5xde_async.compute.program.form import DEVICE, Graph, Input, Program, Ref
from w5xde_async.compute.program.operators import RECOMPUTE, SET_GRAD, Operator
from w5xde_async.errors import ProgramRefused

_MAX_ELEMENTS = 1 << 40  # of one tensor, views that repeat an element included
_MAX_TENSORS = 1 << 18  # that all nodes give together: each takes memory of its own, about a KiB
#: In-place operators of which autograd keeps nothing of what they write over; of others it keeps a copy of it.
_KEEP_NOTHING = frozenset((
    "add_", "addcdiv_", "addcmul_", "copy_", "detach_", "elu_", "celu_", "exp_", "fill_", "index_add_", "index_copy_",
    "leaky_relu_", "masked_fill_", "neg_", "reciprocal_", "relu_", "rsqrt_", "scatter_", "scatter_add_", "selu_",
    "sigmoid_", "sqrt_", "sub_", "tanh_", "tril_", "triu_", "zero_",
))  # fmt: skip
_LINEAR = frozenset(("mul_", "div_"))  # of which it keeps none where the other is a number
_TOO_LONG = re.compile(r"value of type '(\w+)' .* found type '\1'")  # so torch says it, of a number that it cannot hold
_CHECK_S = 60.0  # to check one graph at one size

Values = list[Any] | dict[int, Any]  #: by number; within a region, only those that it uses
Call = Callable[[Any], Any]


Step = tuple[Call, int, tuple[int, ...]]  #: a call, the number of its result, numbers that are not used any more


class Bound(NamedTuple):
    """A graph made ready for one device."""

    graph: Graph
    steps: tuple[Step, ...]
    num_values: int
    sets_grad: bool


def bind(
    program: Program,
    graph: Graph,
    device: torch.device,
    nodes: range | None = None,
    held: Callable[[int, Operator], Callable[..., Any]] | None = None,
) -> Bound:
    """Fill in everything that does not change from batch to batch. ``nodes``: these alone, whole regions of them.
    ``held``: gives the call to be made for a node's number and operator, in place of the operator's own."""
    lives = _Lives(program, graph)
    calls = [
        _call(
            node.operator, node.operator.call if held is None else held(number, node.operator), node.arguments,
            node.named, device,
        )
        for number, node in enumerate(graph.nodes)
    ]  # fmt: skip
    steps = _steps(lives, calls, range(len(graph.nodes)) if nodes is None else nodes)
    sets_grad = any(node.operator.name == SET_GRAD for node in graph.nodes)
    return Bound(graph, steps, lives.base + len(graph.nodes), sets_grad)


class _Lives:
    """Where each value of a graph is used. ``base``: the number of the first node's result."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self.graph, self.num_entries = graph, program.num_entries
        self.base = program.num_entries + len(graph.inputs) + len(program.constants)
        self.uses = [sorted(set(_uses(node.arguments, dict(node.named)))) for node in graph.nodes]
        self._last = {self.base + number: number for number in range(len(graph.nodes))}
        for number, used in enumerate(self.uses):
            self._last.update(dict.fromkeys(used, number))
        kept = (graph.loss, *(value.index for value in graph.metrics if type(value) is Ref))
        self._last.update(dict.fromkeys(kept, len(graph.nodes)))
        self._dying: list[list[int]] = [[] for _ in range(len(graph.nodes) + 1)]
        for index, number in self._last.items():
            if index >= self.base:
                self._dying[number].append(index)

    def region(self, number: int) -> range | None:
        """The calls of the region that begins at a node."""
        node = self.graph.nodes[number]
        return range(number + 1, number + 1 + node.arguments[0]) if node.operator.name == RECOMPUTE else None

    def taken(self, calls: range) -> list[int]:
        """Values from before that these calls use."""
        return sorted({index for number in calls for index in self.uses[number] if index < self.base + calls.start})

    def given(self, calls: range) -> list[int]:
        """Results of these calls that others use."""
        results = range(self.base + calls.start, self.base + calls.stop)
        return [index for index in results if self._last[index] >= calls.stop]

    def dying(self, calls: range) -> tuple[int, ...]:
        """Results of calls before the last of these that nothing uses afterwards."""
        return tuple(index for number in calls for index in self._dying[number])


def _steps(lives: _Lives, calls: Sequence[Call], numbers: range) -> tuple[Step, ...]:
    steps: list[Step] = []
    number = numbers.start
    while number < numbers.stop:
        inner = lives.region(number)
        if inner is None:
            steps.append((calls[number], lives.base + number, lives.dying(range(number, number + 1))))
            number += 1
            continue
        steps.append((_region(lives, calls, inner), lives.base + number, lives.dying(range(number, inner.stop))))
        number = inner.stop
    return tuple(steps)


def _region(lives: _Lives, calls: Sequence[Call], numbers: range) -> Call:
    """The calls of a region as one."""
    steps, results = _steps(lives, calls, numbers), lives.given(numbers)
    # A reentrant region gives gradients to what it is called with and, by themselves, to the model's tensors.
    own = [index for index in lives.taken(numbers) if index < lives.num_entries]
    others = [index for index in lives.taken(numbers) if index >= lives.num_entries]
    _, preserve_random, reentrant = lives.graph.nodes[numbers.start - 1].arguments

    def call(values: Values) -> None:
        held = {index: values[index] for index in own}

        def compute(*given: Any) -> tuple[Any, ...]:
            local = held | dict(zip(others, given, strict=True))
            run_steps(steps, local)
            return tuple([local[index] for index in results])

        given = [values[index] for index in others]
        made = (
            computed(compute, given, preserve_random=preserve_random, reentrant=reentrant)
            if results
            else compute(*given)
        )
        for index, value in zip(results, made, strict=True):
            values[index] = value

    return call


def _uses(arguments: Sequence[Any], named: dict[str, Any]) -> list[int]:
    found: list[int] = []
    for value in (*arguments, *named.values()):
        found.extend(item.index for item in (value if type(value) is tuple else (value,)) if type(item) is Ref)
    return found


def _call(
    of: Operator,
    operator: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: tuple[tuple[str, Any], ...],
    device: torch.device,
) -> Call:
    if of.makes_tensors:  # without a device torch would take its own default
        named = (*[pair for pair in named if pair[0] != "device"], ("device", DEVICE))

    def fixed(value: Any) -> Any:
        return device if value is DEVICE else list(value) if type(value) is tuple else value

    template = [fixed(value) for value in arguments]
    keywords = {name: fixed(value) for name, value in named}
    slots = [(at, value.index) for at, value in enumerate(arguments) if type(value) is Ref]
    lists = [(at, value) for at, value in enumerate(arguments) if type(value) is tuple and _has_ref(value)]
    named_slots = [(name, value.index) for name, value in named if type(value) is Ref]
    named_lists = [(name, value) for name, value in named if type(value) is tuple and _has_ref(value)]
    if not (lists or named_slots or named_lists):
        if len(slots) == len(template) == 1 and not keywords:
            only = slots[0][1]
            return lambda values: operator(values[only])
        if len(slots) == len(template) == 2 and not keywords:
            left, right = slots[0][1], slots[1][1]
            return lambda values: operator(values[left], values[right])
        if len(slots) == 1 and slots[0][0] == 0:
            first, rest = slots[0][1], template[1:]
            return lambda values: operator(values[first], *rest, **keywords)

    def call(values: list[Any]) -> Any:
        filled = template.copy()
        for at, index in slots:
            filled[at] = values[index]
        for at, items in lists:
            filled[at] = [values[item.index] if type(item) is Ref else item for item in items]
        if not named_slots and not named_lists:
            return operator(*filled, **keywords)
        by_name = keywords.copy()
        for name, index in named_slots:
            by_name[name] = values[index]
        for name, items in named_lists:
            by_name[name] = [values[item.index] if type(item) is Ref else item for item in items]
        return operator(*filled, **by_name)

    return call


def _has_ref(items: tuple[Any, ...]) -> bool:
    return any(type(item) is Ref for item in items)


def run(bound: Bound, given: Sequence[Tensor]) -> tuple[Tensor, tuple[Any, ...]]:
    """``(loss, metrics)``; ``given`` are the entries, the batch's tensors and the constants."""
    values: list[Any] = [*given, *([None] * (bound.num_values - len(given)))]
    if bound.sets_grad:
        with torch.enable_grad():
            run_steps(bound.steps, values)
    else:
        run_steps(bound.steps, values)
    graph = bound.graph
    return values[graph.loss], tuple([values[v.index] if type(v) is Ref else v for v in graph.metrics])


def run_steps(steps: Sequence[Step], values: Values) -> None:
    """Call one after the other; each puts its result among the values."""
    for call, result, dead in steps:
        values[result] = call(values)
        for index in dead:
            values[index] = None


def fits(graph: Graph, tensors: Sequence[Tensor]) -> bool:
    """Whether a batch's tensors are such as the graph was made for."""
    return matches(graph, [(tensor.dtype, tensor.shape) for tensor in tensors])


def matches(graph: Graph, batch: Sequence[tuple[torch.dtype, Sequence[int]]]) -> bool:
    """Whether a batch of these dtypes and shapes is such as the graph was made for."""
    if len(batch) != len(graph.inputs):
        return False
    symbols: dict[int, int] = {}
    for (dtype, shape), declared in zip(batch, graph.inputs, strict=True):
        if dtype != declared.dtype or len(shape) != len(declared.sizes):
            return False
        for size, wanted in zip(shape, declared.sizes, strict=True):
            if isinstance(wanted, int):
                if size != wanted:
                    return False
            else:
                symbol, least, most, _ = wanted
                if not least <= size <= most or symbols.setdefault(symbol, size) != size:
                    return False
    return True


def example(inputs: Sequence[Input]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and sizes of a batch that fits."""
    return [(i.dtype, tuple(size if isinstance(size, int) else size[3] for size in i.sizes)) for i in inputs]


class Scale:
    """Calls operators on tensors without memory and counts what they would take. Raises ValueError over a limit."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes, self._until = memory_bytes, time.monotonic() + _CHECK_S
        self._storages: dict[int, Any] = {}  # kept, so that no other storage gets the same address
        self._made: list[Any] = []  # those of them that calls made, in their order
        self._num_results = 0
        self._around: list[tuple[int, int, int]] = []  # of each open region: storages, total and again before it
        self.recording = True  #: autograd is on
        self.total = 0  #: bytes of the results so far that backward may find
        self.again = 0  #: bytes that the largest region so far takes when it is computed again

    def leave_out(self, tensor: Tensor) -> None:
        """``tensor`` is there before: views of it take no memory."""
        self._storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()

    def enter(self) -> None:
        """A region begins."""
        self._around.append((len(self._made), self.total, self.again))
        self.again = 0

    def leave(self, results: Sequence[Any]) -> None:
        """A region ends. What lies in it is let go, but for ``results``, and back once while backward is in it."""
        first, before, again = self._around.pop()
        kept = {tensor.untyped_storage()._cdata for tensor in _tensors(results)}
        peak = self.total - before + self.again
        self._made[first:] = [storage for storage in self._made[first:] if storage._cdata in kept]
        self.total = before + sum(storage.nbytes() for storage in self._made[first:])
        self.again = max(again, peak - (self.total - before))

    def weighed(self, operator: Operator) -> Callable[..., Any]:
        """``operator``'s call, checked before and weighed after."""
        in_place = operator.base.endswith("_") and operator.parameters[0].writes
        keeps = in_place and operator.base not in _KEEP_NOTHING

        def call(*arguments: Any, **named: Any) -> Any:
            if time.monotonic() > self._until:
                raise ValueError(f"to check the program takes more than {_CHECK_S:g} s")
            check(operator, arguments, named, memory_bytes=self._memory_bytes)
            if operator.name == "index.Tensor":
                arguments = (arguments[0], _broadcast(arguments[1]), *arguments[2:])
            result = operator.call(*arguments, **named)
            if operator.aliases:
                check_view(arguments, named, result, memory_bytes=self._memory_bytes)
            self._weigh(result)
            if keeps and self.recording and (operator.base not in _LINEAR or isinstance(arguments[1], Tensor)):
                self._add(arguments[0].numel() * arguments[0].element_size())
            return result

        return call

    def _weigh(self, value: Any) -> None:
        for tensor in _tensors([value]):
            if tensor.device.type != "meta" and not isinstance(tensor, FakeTensor):
                raise ValueError("its result has memory where nothing has")
            if tensor.numel() > _MAX_ELEMENTS:
                raise ValueError(f"a tensor of {tensor.numel()} elements")
            self._num_results += 1
            if self._num_results > _MAX_TENSORS:
                raise ValueError(f"the results before and this one are more than {_MAX_TENSORS} tensors")
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = storage
                self._made.append(storage)
                self._add(storage.nbytes())

    def _add(self, nbytes: int) -> None:
        self.total += nbytes
        if self.total + self.again > self._memory_bytes:
            raise ValueError(f"its results need more than {self._memory_bytes} bytes")


def _tensors(results: Sequence[Any]) -> Iterator[Tensor]:
    for value in results:
        yield from (
            item for item in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(item, Tensor)
        )


def _broadcast(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices as the kernel takes them: fake tensors leave one without axes out where others have some."""
    given = iter(torch.broadcast_tensors(*_tensors([indices])))  # type: ignore[no-untyped-call]
    return [None if index is None else next(given) for index in indices]


def _storages(results: Sequence[Any]) -> dict[int, int]:
    """The memory of tensors, and its bytes."""
    found = [tensor.untyped_storage() for tensor in _tensors(results)]
    return {storage._cdata: storage.nbytes() for storage in found}


def _form(value: Any) -> Any:
    """Dtypes and shapes of a call's result, and numbers as they are written."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    return tuple(map(_form, value)) if isinstance(value, (tuple, list)) else repr(value)


def _alike(found: Any, seen: Any) -> bool:
    """Whether they are the same, but for floating-point dtypes: those that autocast takes are the device's own."""
    if found == seen:
        return True
    if type(found) is not tuple or type(seen) is not tuple or len(found) != len(seen):
        return False
    if all(isinstance(one, torch.dtype) and one.is_floating_point for one in (found[0], seen[0])):
        return bool(found[1:] == seen[1:])
    return all(map(_alike, found, seen))


def _shown(form: Any) -> str:
    if type(form) is not tuple:
        return str(form)
    if form and isinstance(form[0], torch.dtype):
        return f"{str(form[0]).removeprefix('torch.')}{list(form[1])}"
    return f"({', '.join(map(_shown, form[:8]))}{', ...' if len(form) > 8 else ''})"


class Seen(NamedTuple):
    """What one call gave in a check. ``made``: bytes of its results' memory that its arguments have not."""

    form: Any
    made: int


class Measured:
    """What a run on some sizes takes, and what each of its calls gives: the first one with memory is held to it."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._seen: dict[int, Seen] = {}  # by node
        self._alike: dict[Seen, Seen] = {}  # most nodes give what others give
        self._more: dict[int, int] = {}  # by node: bytes that it made with memory and not in the check
        self.total = 0  #: most bytes of results

    def noting(self, number: int, operator: Operator, call: Callable[..., Any]) -> Callable[..., Any]:
        """A node's call in the check."""
        if operator.name in (SET_GRAD, RECOMPUTE):
            return call

        def noted(*arguments: Any, **named: Any) -> Any:
            result = call(*arguments, **named)
            made = _storages([result])
            before = _storages([*arguments, *named.values()])
            seen = Seen(_form(result), sum(made[one] for one in made.keys() - before.keys()))
            self._seen[number] = self._alike.setdefault(seen, seen)
            return result

        return noted

    def held(self, number: int, operator: Operator) -> Callable[..., Any]:
        """A node's call in the first run with memory. It raises ProgramRefused for what the check did not see."""
        seen = self._seen.get(number)
        if seen is None:
            return operator.call

        def call(*arguments: Any, **named: Any) -> Any:
            try:
                check(operator, arguments, named, memory_bytes=self._memory_bytes)  # strides may be others than seen
            except ValueError as error:
                raise ProgramRefused(str(error), node=number, operator=operator.name) from None
            result = operator.call(*arguments, **named)
            found = _form(result)
            if not _alike(found, seen.form):
                reason = f"it gives {_shown(found)} where the check saw {_shown(seen.form)}"
                raise ProgramRefused(reason[:300], node=number, operator=operator.name)
            made = _storages([result])
            if sum(made.values()) > seen.made:
                before = _storages([*arguments, *named.values()])
                more = sum(made[one] for one in made.keys() - before.keys()) - seen.made
                self._more[number] = max(more, 0)
                if self.total + sum(self._more.values()) > self._memory_bytes:
                    reason = f"its results need more than {self._memory_bytes} bytes"
                    raise ProgramRefused(reason, node=number, operator=operator.name)
            return result

        return call


def measure(
    program: Program,
    graph: Graph,
    entries: Sequence[tuple[torch.dtype, tuple[int, ...]]],
    batch: Sequence[tuple[torch.dtype, tuple[int, ...]]],
    *,
    memory_bytes: int,
    autocast: Callable[[], Any] | None = None,
    trained: Collection[int] = (),
    each: Callable[[int, Callable[[], Any]], Any] | None = None,
) -> Measured:
    """What a run on these sizes takes and gives, found without memory. Raises ProgramRefused.

    ``autocast`` makes the CPU's context of a run in half precision: ``meta`` tensors know none, fake ones do.
    ``trained``: entries that require gradients; without any, none are recorded. ``each`` is given a node's number and
    its call, and returns what that gives.
    """
    meta = torch.device("meta" if autocast is None else "cpu")
    scale, measured = Scale(memory_bytes), Measured(memory_bytes)
    lives = _Lives(program, graph)
    calls = [
        _call(
            node.operator, measured.noting(number, node.operator, scale.weighed(node.operator)), node.arguments,
            node.named, meta,
        )
        for number, node in enumerate(graph.nodes)
    ]  # fmt: skip
    ends: dict[int, list[Sequence[int]]] = {}  # by the last call of regions, innermost first: what others use of them
    for number in range(len(calls)):
        inner = lives.region(number)
        if inner is not None:
            ends.setdefault(inner.stop - 1, []).insert(0, lives.given(inner))
    number, name = -1, ""
    try:
        with ExitStack() as contexts:
            contexts.enter_context(torch.set_grad_enabled(bool(trained)))
            if autocast is not None:
                contexts.enter_context(FakeTensorMode())
                contexts.enter_context(autocast())
            given = [torch.empty(shape, dtype=dtype, device=meta) for dtype, shape in (*entries, *batch)]
            for index in trained:
                given[index].requires_grad_()
            given += [torch.empty(constant.shape, dtype=constant.dtype, device=meta) for constant in program.constants]
            values: list[Any] = [*given, *([None] * len(calls))]
            for tensor in given:
                scale.leave_out(tensor)
            for number, call in enumerate(calls):
                name = graph.nodes[number].operator.name
                if name == RECOMPUTE:
                    scale.enter()
                elif name == SET_GRAD and not trained:
                    scale.recording = graph.nodes[number].arguments[0] is not False
                else:
                    values[lives.base + number] = call(values) if each is None else each(number, partial(call, values))
                for results in ends.get(number, ()):
                    scale.leave([values[index] for index in results])
            number, name = -1, ""
            loss = values[graph.loss]
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ValueError("the loss has more than one element")
    except Exception as error:
        text = str(error).strip().splitlines()
        reason = text[0][:300] if text else type(error).__name__
        if _TOO_LONG.search(reason):  # torch names the type that it wants, which it was given
            reason = "a number of more than 64 bits"
        raise ProgramRefused(reason, node=number, operator=name) from None
    measured.total = scale.total + scale.again
    return measured
