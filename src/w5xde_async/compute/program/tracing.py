"""From a job to a program: ``torch.export`` of the whole training step, brought into our own form.

The step is traced in train mode on a copy of the model, with every size of the batch free that the model leaves free;
sizes that it fixes get a graph each. Then the program is parsed as a worker would, and run beside the model on real
samples: loss, gradients and buffers must have the same bits, or there is no program.

What cannot be traced raises NotTraceable with the line of the user's code. Blocks, and changes global state of torch
while it runs: nothing else may compute in this process meanwhile.
"""

from __future__ import annotations

import copy
import io
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

import w5xde_async
from w5xde_async.compute.batch import flatten, map_tensors, unflatten
from w5xde_async.compute.buffers import statistics
from w5xde_async.compute.program.form import DEVICE, Document, Graph, Input, Node, Program, Ref, encode, parse
from w5xde_async.compute.program.interpreter import fits
from w5xde_async.compute.program.operators import SCALARS, SET_GRAD, find, name_of
from w5xde_async.compute.program.replica import ProgramStep
from w5xde_async.errors import ProgramRefused, W5xdeError
from w5xde_async.job import Job, StepFunction, step_function
from w5xde_async.params.flat import bytes_of, state_of
from w5xde_async.params.layout import Layout
from w5xde_async.randomness import random_state, seed_all

__all__ = ["NotTraceable", "probe_batches", "trace"]

_OURS = (str(Path(torch.__file__).parent), str(Path(w5xde_async.__file__).parent))
_NOISY = (
    "torch.__trace",
    "torch.fx.experimental.symbolic_shapes",
    "torch._export",
    "torch.export",
    "torch._export.non_strict_utils",
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_SIZE = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
#: Guards that an Input states, once sizes have their symbols: of one size, or that two are equal.
_SIMPLE = re.compile(r"(s\d+|\d+) (==|>=|!=) \d+|\d+ <= s\d+|(\w+) == \3")


class NotTraceable(W5xdeError):
    """The job's step cannot become a program. Fields: ``reason``, ``where`` (``file.py:line``, or empty)."""

    def __init__(self, reason: str, where: str = "") -> None:
        self.reason, self.where = reason, where
        super().__init__(reason + (f" ({where})" if where else ""))


class _NotListed(NotTraceable):
    """An operator that is not on the list. Field: ``target``."""

    def __init__(self, target: str, where: str) -> None:
        self.target = target
        super().__init__(f"the step uses {target}, which programs may not use", where)


class _LineOf(TorchFunctionMode):
    """Notes from where a function of torch was called last: traces know the lines of modules alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self.where = name.strip("_"), ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "").strip("_") == self._name:
            self.where = _last([(frame.filename, str(frame.lineno)) for frame in traceback.extract_stack()])
        return func(*args, **(kwargs or {}))


class _Step(nn.Module):
    """The step as a module of tensors alone; export reads parameters off the model inside."""

    def __init__(self, model: nn.Module, step: StepFunction, structure: bytes, names: list[str]) -> None:
        super().__init__()
        self.model, self._step_of, self._structure = model, step, structure
        self._note_names = names.extend  # export undoes what is set on the module itself

    def forward(self, *tensors: Tensor) -> Any:
        loss, metrics = self._step_of(self.model, unflatten(self._structure, tensors))
        self._note_names(metrics)
        return (loss, *metrics.values())


def probe_batches(job: Job, sizes: Sequence[int]) -> list[Any]:
    """One batch of each number of samples, collated from the dataset's first ones."""
    collate = job.collate or default_collate
    samples = [job.dataset[index % len(job.dataset)] for index in range(max(sizes))]
    return [collate(samples[:size]) for size in sizes]


def trace(job: Job, model: nn.Module, layout: Layout, batches: Sequence[Any]) -> Document:
    """The job's step as a program that holds for ``batches`` and, where the model allows, for batches of other sizes.

    ``model`` is the job's, on the CPU and in train mode; it is copied. Raises NotTraceable.
    """
    with random_state(), warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        seed_all(job.seed)
        try:
            return _trace(job, model, layout, batches)
        except NotTraceable:
            raise
        except ProgramRefused as error:
            raise NotTraceable(error.reason) from error
        except Exception as error:
            text = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {text[0][:300] if text else ''}"
            raise NotTraceable(reason, _where(error)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """What export prints of its failures says less than the exception."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _trace(job: Job, model: nn.Module, layout: Layout, batches: Sequence[Any]) -> Document:
    step = step_function(job)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.precision)
    autocast: Callable[[], Any] = nullcontext if dtype is None else partial(torch.autocast, "cpu", dtype=dtype)
    index_of = {name: index for index, entry in enumerate(layout.entries) for name in entry.names}
    flat = [flatten(batch) for batch in batches]
    structure = flat[0][0]
    if any(other != structure for other, _ in flat):
        raise NotTraceable("the batch holds numbers or strings outside of tensors that differ from batch to batch")
    constants: list[Tensor] = []
    graphs: list[Graph] = []
    names: list[str] = []
    attempts: tuple[str | None, ...] = ("named", "automatic", "fixed", None)
    for _, tensors in flat:
        if any(fits(graph, tensors) for graph in graphs):
            continue
        names = []
        exported, found = _export(copy.deepcopy(model), step, structure, names, tensors, autocast, attempts)
        attempts = (None,) if found is None else (found, None)
        try:
            graphs.append(_Converter(exported, tensors, index_of, constants, len(layout.entries)).graph())
        except _NotListed as error:
            with autocast(), _LineOf(error.target.split(".")[-2]) as finder:
                step(copy.deepcopy(model), unflatten(structure, tensors))
            raise NotTraceable(error.reason, finder.where or error.where) from None
    graphs = [_renumbered(graph, len(layout.entries), len(constants)) for graph in graphs]
    program = Program(
        layout.fingerprint, structure, tuple(names), statistics(layout, model), tuple(constants), tuple(graphs),
        len(layout.entries),
    )  # fmt: skip
    document = encode(program)
    checked = parse(document, layout)
    own = ProgramStep(checked, layout, torch.device("cpu"), memory_bytes=1 << 60, precision=job.precision)
    _compare(own, layout, model, step, [*batches, batches[0]], autocast, seed=job.seed + 1)
    return document


def _export(
    model: nn.Module,
    step: StepFunction,
    structure: bytes,
    names: list[str],
    tensors: Sequence[Tensor],
    autocast: Callable[[], Any],
    attempts: Sequence[str | None],
) -> tuple[Any, str | None]:
    """The exported program and the first of ``attempts`` at free sizes (see ``_free``; None: none free) that holds."""
    failure: Exception | None = None
    samples = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)
    for others in attempts:
        shapes = None if others is None else (tuple(_free(tensor, samples, others) for tensor in tensors),)
        names.clear()
        wrapped = _Step(model, step, structure, names)
        try:
            with autocast():
                exported = torch.export.export(wrapped, tuple(tensors), dynamic_shapes=shapes, strict=False)
        except Exception as error:
            failure = failure or error  # the first one is about the model, later ones may be about fixed sizes
            continue
        if shapes is None or _states_all_its_guards(exported):
            return exported, others
    assert failure is not None
    raise failure


def _free(tensor: Tensor, samples: int, others: str) -> dict[int, Any]:
    """Which sizes are free: the number of samples, and the others by name (equal ones together), on their own, or not.

    Sizes of 0 and 1 are never free: kernels and models treat them apart.
    """
    dim, auto = torch.export.Dim, torch.export.Dim.AUTO
    free: dict[int, Any] = {}
    for axis, size in enumerate(tensor.shape):
        if size < 2:
            continue
        if axis == 0 and size == samples:
            free[axis] = dim("samples")
        elif others != "fixed":
            free[axis] = dim(f"size{size}") if others == "named" else auto
    return free


def _states_all_its_guards(exported: Any) -> bool:
    """Whether an Input can say all that the trace took for granted of the batch's sizes."""
    shapes = [node.meta["val"].shape for node in exported.graph.nodes if node.op == "placeholder"][
        -_num_inputs(exported) :
    ]
    if not all(isinstance(size, int) or size.node.expr.is_Symbol for shape in shapes for size in shape):
        return False

    def known(found: re.Match[str]) -> str:
        return str(shapes[int(found[1])][int(found[2])])

    return all(_SIMPLE.fullmatch(_SIZE.sub(known, str(guard))) or _trivial(_SIZE.sub(known, str(guard)))
               for guard in getattr(exported, "_guards_code", ()))  # fmt: skip


def _num_inputs(exported: Any) -> int:
    return len(exported.graph_signature.user_inputs)


def _trivial(guard: str) -> bool:
    """``a * b == b * a``."""
    left, _, right = guard.partition("==")
    factors = [sorted(re.findall(r"\w+", side)) for side in (left, right)]
    return factors[0] == factors[1] and re.fullmatch(r"[\w\s*()]+==[\w\s*()]+", guard) is not None


class _Converter:
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

    def graph(self) -> Graph:
        signature = self._exported.graph_signature
        module = self._exported.graph_module
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(places, signature.input_specs, strict=True):
            self._values[node] = self._place(node, spec)
        results = self._walk(module)
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
                if _same(known, constant):
                    return Ref(-1 - number)
            self._constants.append(constant)
            return Ref(-len(self._constants))
        raise NotTraceable(f"the step uses {spec.target or kind.lower()}, which is neither a tensor nor of the model")

    def _input(self, node: Any, tensor: Tensor) -> Input:
        sizes: list[int | tuple[int, int, int, int]] = []
        for size, example in zip(node.meta["val"].shape, tensor.shape, strict=True):
            if isinstance(size, int):
                sizes.append(size)
                continue
            expression = size.node.expr
            bounds = self._exported.range_constraints.get(expression)
            symbol = self._symbols.setdefault(str(expression), len(self._symbols))
            sizes.append((symbol, *_range(bounds), example))
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
            raise _NotListed(str(target), _line(node))
        if name == "item" and isinstance(self._values.get(node.args[0]), tuple):
            self._values[node] = self._values[node.args[0]][node.args[1]]
            return
        if name in SCALARS and name != "require" and not node.users:
            return
        arguments = node.args[:1] if name == "require" else node.args
        named = {} if name == "require" else node.kwargs
        self._values[node] = self._emit(
            name,
            tuple(self._argument(value, node) for value in arguments),
            tuple((key, self._argument(value, node)) for key, value in named.items() if key != "pin_memory"),
        )

    def _region(self, module: Any, node: Any) -> None:
        """What ran under ``no_grad`` (or ``enable_grad``): its calls in place, with the switch around them."""
        enabled, inner, *operands = node.args
        before = self._grad
        self._grad = bool(enabled)
        self._emit(SET_GRAD, (self._grad,), ())
        graph = module.get_submodule(str(inner.target))
        places = [place for place in graph.graph.nodes if place.op == "placeholder"]
        for place, operand in zip(places, operands, strict=True):
            self._values[place] = self._argument(operand, node)
        self._values[node] = self._walk(graph)
        self._grad = before
        self._emit(SET_GRAD, (before,), ())

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


#: While graphs are converted the number of constants is not known: constants count down from -1, nodes up from here.
_FIRST_NODE = 1 << 40


def _renumbered(graph: Graph, entries: int, constants: int) -> Graph:
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


def _range(bounds: Any) -> tuple[int, int]:
    most = (1 << 40) - 1
    if bounds is None:
        return 2, most
    upper = str(bounds.upper)
    # Kernels and models treat one sample, or none, apart: such batches have a graph of their own.
    return max(int(bounds.lower), 2), min(int(upper), most) if upper.isdigit() else most


def _line(node: Any) -> str:
    """The user's line that a traced call comes from."""
    return _last(_FRAME.findall(node.meta.get("stack_trace") or ""))


def _where(error: BaseException) -> str:
    """The user's line that an error was raised under."""
    frames: list[tuple[str, str]] = []
    current: BaseException | None = error
    while current is not None and not frames:
        frames = [(frame.filename, str(frame.lineno)) for frame in traceback.extract_tb(current.__traceback__)]
        found = _last(frames)
        if found:
            return found
        frames = []
        current = current.__cause__ or current.__context__
    return ""


def _last(frames: Sequence[tuple[str, str]]) -> str:
    users = [(file, line) for file, line in frames if not file.startswith((*_OURS, "<"))]
    return f"{Path(users[-1][0]).name}:{users[-1][1]}" if users else ""


# -- the proof -------------------------------------------------------------------------------------------------


def _compare(
    program_step: StepFunction,
    layout: Layout,
    model: nn.Module,
    step: StepFunction,
    batches: Sequence[Any],
    autocast: Callable[[], Any],
    seed: int,
) -> None:
    """Run model and program on the same batches with the same seeds; raises NotTraceable where any bit differs."""
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    prefix = "the traced step differs from the model"
    hint = "does it use state that is neither parameter nor buffer, or Python's random numbers?"
    for number, batch in enumerate(batches):
        loss_a, metrics_a, state_a = _one_step(ours, step, batch, autocast, seed + number)
        loss_b, metrics_b, state_b = _one_step(theirs, program_step, batch, autocast, seed + number)
        if not _same(loss_a, loss_b):
            raise NotTraceable(f"{prefix}: loss {loss_b.item()} in place of {loss_a.item()}; {hint}")
        if repr(metrics_a) != repr(metrics_b):
            raise NotTraceable(f"{prefix}: metrics {metrics_b} in place of {metrics_a}; {hint}")
        if not torch.equal(state_a, state_b):
            raise NotTraceable(f"{prefix}: it draws other random numbers")
        for entry, a, b in zip(layout.entries, state_of(ours, layout), state_of(theirs, layout), strict=True):
            if not _same_gradient(a.grad, b.grad):
                raise NotTraceable(f"{prefix}: the gradient of {entry.name} has other bits; {hint}")
            if not _same(a.detach(), b.detach()):
                raise NotTraceable(f"{prefix}: {entry.name} has other bits after it; {hint}")


def _one_step(
    model: nn.Module, step: StepFunction, batch: Any, autocast: Callable[[], Any], seed: int
) -> tuple[Tensor, dict[str, float], Tensor]:
    """(loss, metrics, random state afterwards); gradients add up on the model."""
    seed_all(seed)
    with autocast():
        loss, metrics = step(model, map_tensors(batch, torch.clone))
    torch.autograd.backward(loss.float())
    return loss.detach(), {name: float(value) for name, value in metrics.items()}, torch.get_rng_state()


def _same_gradient(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else _same(a, b)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bytes_of(a.contiguous()) == bytes_of(b.contiguous())
