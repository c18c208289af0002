"""From a job to a program: ``torch.export`` of the whole training step, brought into our own form.

The step is traced in train mode on a copy of the model, with every size of the batch free that the model leaves free;
sizes that it fixes get a graph each. Then the program is parsed as a worker would, and run beside the model on real
samples: loss, gradients and buffers must have the same bits, or there is no program.

What cannot be traced raises NotTraceable with the line of the user's code. Blocks, and changes global state of torch
while it runs: nothing else may compute in this process meanwhile.
"""

from __future__ import annotations

import io
import logging
import math
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from functools import partial
from typing import Any

import torch
import torch.nn.modules.module as torch_modules
from torch import Tensor, nn
from torch.autograd import set_detect_anomaly
from torch.fx.traceback import preserve_node_meta
from torch.overrides import TorchFunctionMode
from torch.utils.data import TensorDataset

from w5xde_async.compute.batch import flatten, map_tensors, unflatten
from w5xde_async.compute.block import GRADIENTS_CHANGED, autocast
from w5xde_async.compute.buffers import freed, statistics
from w5xde_async.compute.program.checkpointing import marked
from w5xde_async.compute.program.converting import (
    Converter,
    NotListed,
    NotTraceable,
    calculates,
    frames_of,
    renumbered,
    same_bits,
    size_in,
    users_line,
)
from w5xde_async.compute.program.form import Document, Graph, Program, encode, parse
from w5xde_async.compute.program.interpreter import fits
from w5xde_async.compute.program.program_job import ProgramStep, skeleton
from w5xde_async.compute.program.switches import said_here
from w5xde_async.errors import ProgramRefused, causes
from w5xde_async.job import Job, StepFunction, collated, copied_model, first_samples, step_function
from w5xde_async.params.flat import state_of
from w5xde_async.params.layout import Layout
from w5xde_async.randomness import random_state, seed_all
from w5xde_async.users_code import users_code

_NOISY = (
    "torch.__trace",
    "torch.fx.experimental.symbolic_shapes",
    "torch._subclasses.fake_tensor",
    "torch._export",
    "torch.export",
    "torch._export.non_strict_utils",
)
_SIZE = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
#: A comparison of sizes, once they have their symbols: an Input states it where it holds in all of their ranges.
_COMPARISON = re.compile(r"(\w+) (==|!=|<=|>=|<|>) (\w+)")


_TRIES = 4  # whether it is the step that draws, and nobody else
_BACKWARD = "a program holds what is computed forward, and gradients as torch makes them of that"
_EAGER = "a model of transformers takes the same with attn_implementation='eager'"


class _LineOf(TorchFunctionMode):
    """Notes from where a function of torch was called last: traces know the lines of modules alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self.where = name.strip("_"), ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "").strip("_") == self._name:
            self.where = users_line([(frame.filename, str(frame.lineno)) for frame in traceback.extract_stack()])
        return func(*args, **(kwargs or {}))


class _Gradients(TorchFunctionMode):
    """Refuses what the step does with gradients while it runs: traces leave hooks out without a word."""

    _REFUSED: Mapping[Any, str] = {
        Tensor.register_hook: "register_hook on a tensor",
        Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
        torch.autograd.grad: "torch.autograd.grad",
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._REFUSED:
            where = users_line([(frame.filename, str(frame.lineno)) for frame in traceback.extract_stack()])
            raise NotTraceable(f"the step calls {self._REFUSED[func]}; {_BACKWARD}", where)
        return func(*args, **(kwargs or {}))


class _Step(nn.Module):
    """The step as a module of tensors alone; export reads parameters off the model inside."""

    def __init__(self, model: nn.Module, step: StepFunction, structure: bytes, names: list[str]) -> None:
        super().__init__()
        self.model, self._step_of, self._structure = model, step, structure
        self._note_names = names.extend  # export undoes what is set on the module itself

    def forward(self, *tensors: Tensor) -> Any:
        held = [
            (module, name, buffer)
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        loss, metrics = self._step_of(self.model, unflatten(self._structure, tensors))
        _write_assigned(held)
        self._note_names(metrics)
        for name, value in metrics.items():
            if type(value) is float and math.isnan(value):  # export looks for it among the results, and nan is not nan
                raise NotTraceable(f"metric {name!r} is nan, a number that no trace holds; make it a tensor")
        return (loss, *metrics.values())


def _write_assigned(held: Sequence[tuple[nn.Module, str, Tensor]]) -> None:
    """Make writes of what the step has assigned to buffers: export forgets an assignment."""
    assigned = [
        (module, name, buffer, value.detach().clone())
        for module, name, buffer in held
        if (value := module._buffers.get(name)) is not buffer and value is not None
    ]
    for module, name, buffer, value in assigned:
        if value.shape != buffer.shape or value.dtype != buffer.dtype:
            raise NotTraceable(f"buffer {name!r} is assigned a tensor of another shape or dtype")
        buffer.copy_(value)
        module._buffers[name] = buffer


def probe_batches(job: Job, sizes: Sequence[int]) -> list[Any]:
    """One batch of each number of samples, collated from the dataset's first ones."""
    if type(job.dataset) is TensorDataset and job.collate is None:  # gathered, as the loader does it
        return [tuple(tensor[:size] for tensor in job.dataset.tensors) for size in sizes]
    samples = first_samples(job, max(sizes))
    return [collated(job.collate, samples, range(size)) for size in sizes]


def trace_job(job: Job, model: nn.Module, layout: Layout) -> Document:
    """``trace`` with the first samples, for every number of samples that a microbatch of the run can have."""
    try:
        with users_code():
            batches = probe_batches(job, microbatch_sizes(job))
    except Exception as error:
        raise NotTraceable(f"its first samples cannot be read: {_first_line(error)}", _where(error)) from error
    return trace(job, model, layout, batches)


def microbatch_sizes(job: Job) -> list[int]:
    """Numbers of samples that microbatches have, whole ones first: the last of a leaf, step or epoch may be shorter."""
    total, whole = job.num_samples or job.batch_size, job.microbatch_samples
    rest = 0 if job.drop_last else total % job.batch_size
    steps = [count for count in (job.batch_size if total >= job.batch_size else 0, rest) if count]
    leaves = {size for step in steps for size in (min(step, job.leaf_samples), step % job.leaf_samples) if size}
    found = {size for leaf in leaves for size in (min(leaf, whole), leaf % whole) if size}
    return sorted(found, reverse=True)


def trace(job: Job, model: nn.Module, layout: Layout, batches: Sequence[Any]) -> Document:
    """The job's step as a program that holds for ``batches`` and, where the model allows, for batches of other sizes.

    ``model`` is the job's, on the CPU and in train mode; it is copied. Raises NotTraceable.
    """
    with random_state(), warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        seed_all(job.seed)
        try:
            with users_code():
                return _trace(job, model, layout, batches)
        except Exception as error:
            if _changes_gradients(job, model, batches[0]):  # whatever was met first
                raise NotTraceable(GRADIENTS_CHANGED) from error
            if isinstance(error, NotTraceable):
                raise
            if isinstance(error, ProgramRefused):
                raise NotTraceable(error.reason) from error
            scripted = [name for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)]
            if scripted:
                what = f"{scripted[0]} of the model" if scripted[0] else "the model"
                raise NotTraceable(f"{what} is in TorchScript, of which no program is made") from error
            raise NotTraceable(_first_line(error), _where(error)) from error


def outline(job: Job, model: nn.Module, layout: Layout, batch: Any) -> Program:
    """The job's step as a program for batches of this one's shapes, which nobody has compared with the model.

    Model and batch may be of fake tensors: the program's constants have no values. Raises NotTraceable.
    """
    structure, tensors = flatten(batch)
    in_precision: Callable[[], Any] = autocast(job.precision) or nullcontext
    names: list[str] = []
    constants: list[Tensor] = []
    with random_state(), warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        try:
            with users_code():
                exported, _ = _export(
                    lambda: model, step_function(job), structure, names, tensors, in_precision, (None,)
                )
        except Exception as error:
            raise NotTraceable(_first_line(error), _where(error)) from error
    graph = Converter(exported, tensors, _index_of(layout), constants, len(layout.entries)).graph()
    return Program(
        layout.fingerprint, structure, tuple(names), statistics(layout, model),
        tuple(torch.zeros((), dtype=constant.dtype).expand(constant.shape) for constant in constants),
        (renumbered(graph, len(layout.entries), len(constants)),), len(layout.entries),
    )  # fmt: skip


def _index_of(layout: Layout) -> dict[str, int]:
    return {name: index for index, entry in enumerate(layout.entries) for name in entry.names}


def _changes_gradients(job: Job, model: nn.Module, batch: Any) -> bool:
    """Whether the step itself changes gradients, which are not its own: it clips or zeroes them, or runs backward."""
    trained: list[nn.Parameter] = []
    before: list[Tensor] = []
    with suppress(Exception), users_code(), (autocast(job.precision) or nullcontext)():
        model = copied_model(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        before = [torch.zeros_like(parameter) for parameter in trained]
        for parameter, gradient in zip(trained, before, strict=True):
            parameter.grad = gradient
        step_function(job)(model, map_tensors(batch, torch.clone))
    return any(p.grad is not gradient or gradient._version for p, gradient in zip(trained, before, strict=False))


def _first_line(error: Exception) -> str:
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # a third of a second, at the start

    if isinstance(error, GuardOnDataDependentSymNode):
        return "a branch, a size or a number of the step follows from data-dependent values, which no program can have"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"


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
    skeleton(layout, device="meta")  # what workers build
    if sys.float_info.min / 2 * 1.0 == 0.0:
        raise NotTraceable("denormal numbers are flushed (torch.set_flush_denormal), which workers are not told")
    in_precision: Callable[[], Any] = autocast(job.precision) or nullcontext
    index_of = _index_of(layout)
    flat = [flatten(batch) for batch in batches]
    structure = flat[0][0]
    if any(other != structure for other, _ in flat):
        raise NotTraceable("the batch holds numbers or strings outside of tensors that differ from batch to batch")
    unwatched: Exception | None = None
    try:
        _refuse_what_traces_leave_out(model, step, batches, in_precision, seed=job.seed + 1)
    except NotTraceable:
        raise
    except Exception as error:
        unwatched = error  # exporting says better what it is
    constants: list[Tensor] = []
    graphs: list[Graph] = []
    names: list[str] = []
    steady = _steady(job, [tensors for _, tensors in flat])
    attempts: tuple[str | None, ...] = ("named", "automatic", "fixed", None)
    for _, tensors in flat:
        if any(fits(graph, tensors) for graph in graphs):
            continue
        names = []
        # A copy for each attempt: what a model keeps of its last call (a mask) is of the trace then.
        copied = partial(copied_model, model)
        exported, found = _export(copied, step, structure, names, tensors, in_precision, attempts, steady)
        attempts = (None,) if found is None else (found, None)
        try:
            graphs.append(Converter(exported, tensors, index_of, constants, len(layout.entries)).graph())
        except NotListed as error:
            with _LineOf(error.function) as finder, suppress(Exception), in_precision():
                step(copied_model(model), unflatten(structure, tensors))
            raise NotTraceable(error.reason, finder.where or error.where) from None
    graphs = [renumbered(graph, len(layout.entries), len(constants)) for graph in graphs]
    program = Program(
        layout.fingerprint, structure, tuple(names), statistics(layout, model), tuple(constants), tuple(graphs),
        len(layout.entries), said_here(),
    )  # fmt: skip
    document = encode(program)
    checked = parse(document, layout)
    own = ProgramStep(checked, layout, torch.device("cpu"), memory_bytes=1 << 60, precision=job.precision)
    _compare(own, layout, model, step, [*batches, batches[0]], in_precision, seed=job.seed + 1)
    if unwatched is not None:
        raise unwatched
    return document


def _refuse_what_traces_leave_out(
    model: nn.Module, step: StepFunction, batches: Sequence[Any], in_precision: Callable[[], Any], seed: int
) -> None:
    """Raises NotTraceable for what the comparison meets only where it acts on the samples compared.

    That is whatever changes gradients on their way, by hooks or an ``autograd.Function``, and random numbers that a
    program cannot draw. Never it meets hooks on parameters, which copies of a model have not, and parameters that come
    out of a function that holds the model itself, whose copies all compute with these.
    """
    first = {id(held): name for name, held in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for hooks, made_by in (("_backward_hooks", "register_hook"),
                               ("_post_accumulate_grad_hooks", "register_post_accumulate_grad_hook")):  # fmt: skip
            if getattr(parameter, hooks):
                raise NotTraceable(f"parameter {name} has a hook on its gradient ({made_by}); {_BACKWARD}")
    _refuse_backward_hooks(model)
    model = copied_model(model)
    for number, batch in enumerate(batches):
        for _ in range(_TRIES):
            seed_all(seed + number)
            # Regions of gradient checkpointing are computed as they are traced: their calls are seen, and no Function.
            with (
                random_state() as drawn, marked(), _Gradients(), _refusing_hooks_on_what_is_saved(), in_precision(),
                set_detect_anomaly(True, check_nan=False),
            ):  # fmt: skip
                loss, _ = step(model, map_tensors(batch, torch.clone))
                if unmoved := drawn.unmoved():  # by the step, or by others in this process meanwhile
                    break
        if not unmoved:
            raise NotTraceable(
                "the step draws from Python's or numpy's random numbers (or others do all the while, in the program "
                "that embeds the coordinator); draw from torch's"
            )
        _refuse_backward_hooks(model)  # which the step itself has set
        for node in _behind(loss.grad_fn):
            function = getattr(node, "_forward_cls", None)
            # Torch's own are for exporting to refuse, under the names that users call.
            if function is not None and function.__module__.partition(".")[0] != "torch":
                raise NotTraceable(
                    f"the step uses {function.__name__}, a torch.autograd.Function; {_BACKWARD}", _where_made(node)
                )
            for into, _ in node.next_functions:
                if taken := first.get(id(getattr(into, "variable", None))):
                    raise NotTraceable(
                        "the step, a hook or a function set on a module holds the model that it was made with (a "
                        f"closure) and takes parameter {taken} from there: it is to take it from the module that "
                        "it is given",
                        _where_made(node),
                    )


def _where_made(node: Any) -> str:
    """The user's line that a node of autograd's graph comes from, where anomalies are looked for."""
    return users_line(frames_of("".join(node.metadata.get("traceback_", ()))))


def _refuse_backward_hooks(model: nn.Module) -> None:
    if torch_modules._global_backward_hooks or torch_modules._global_backward_pre_hooks:
        raise NotTraceable(f"all modules have a backward hook (register_module_full_backward_hook); {_BACKWARD}")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise NotTraceable(f"module {name or type(module).__name__} has a backward hook; {_BACKWARD}")


def _behind(node: Any) -> Iterator[Any]:
    """Every node of autograd's graph that a loss comes from."""
    found, left = {node}, [node]
    while left:
        node = left.pop()
        if node is not None:
            yield node
            new = {before for before, _ in node.next_functions} - found
            found |= new
            left += new


@contextmanager
def _refusing_hooks_on_what_is_saved() -> Iterator[None]:
    """Whatever changes, by way of them, what backward computes with: traces leave these hooks out."""
    kind = torch.autograd.graph.saved_tensors_hooks
    enter, own = kind.__enter__, threading.get_ident()

    def refuse(self: Any) -> None:
        # Where they are kept changes nothing.
        if isinstance(self, torch.autograd.graph.save_on_cpu) or threading.get_ident() != own:
            return enter(self)
        where = users_line([(frame.filename, str(frame.lineno)) for frame in traceback.extract_stack()])
        raise NotTraceable(f"the step uses torch.autograd.graph.{type(self).__name__}; {_BACKWARD}", where)

    kind.__enter__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__enter__ = enter  # type: ignore[method-assign]


@contextmanager
def _texts_fix_sizes() -> Iterator[None]:
    """A size that becomes a text in code that is not torch's own (a key of a table, an attribute's name) is fixed: as a
    symbol it would be another text, without a word."""
    shown: Callable[[Any], str] = torch.SymInt.__repr__

    def text(self: Any) -> str:
        package = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
        return shown(self) if package in ("torch", "sympy") else str(int(self))

    torch.SymInt.__repr__ = text  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.SymInt.__repr__ = shown  # type: ignore[method-assign]


def _export(
    model: Callable[[], nn.Module],
    step: StepFunction,
    structure: bytes,
    names: list[str],
    tensors: Sequence[Tensor],
    in_precision: Callable[[], Any],
    attempts: Sequence[str | None],
    steady: Collection[int] = (),
) -> tuple[Any, str | None]:
    """The exported program and the first of ``attempts`` at free sizes (see ``_free``; None: none free) that holds.

    ``model()`` is what each attempt may change.

    ``steady``: tensors of which only the number of samples is free.
    """
    failure: Exception | None = None
    samples = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)
    loose = [tensor for index, tensor in enumerate(tensors) if index not in steady]
    if all(len(_free(tensor, samples, "named")) == len(_free(tensor, samples, "fixed")) for tensor in loose):
        attempts = list(dict.fromkeys(others and "fixed" for others in attempts))  # they would be the same
    for others in attempts:
        shapes = None if others is None else (tuple(
            _free(tensor, samples, "fixed" if index in steady else others) for index, tensor in enumerate(tensors)
        ),)  # fmt: skip
        names.clear()
        wrapped = _Step(model(), step, structure, names)
        try:
            with in_precision(), marked(), preserve_node_meta(), _texts_fix_sizes():
                exported = torch.export.export(wrapped, tuple(tensors), dynamic_shapes=shapes, strict=False)
        except Exception as error:
            # The first is about the model, later ones may be about fixed sizes; that a size is not free is no failure.
            if failure is None or "CONSTRAINT_VIOLATION" in str(getattr(failure, "error_type", "")):
                failure = error
            continue
        if shapes is None or (_states_all_its_guards(exported) and calculates(exported.graph_module)):
            return exported, others
    assert failure is not None
    raise failure


def _steady(job: Job, batches: Sequence[Sequence[Tensor]]) -> set[int]:
    """Tensors of which no size changes but the number of samples: all of a TensorDataset, and images (of four
    dimensions and more, with samples) whose first ones have one size, with what is said of each pixel.

    With sizes free that the model fixes, a trace of convolutions takes many times as long, and is thrown away. A mask
    of attention has as many dimensions, and the length of a sequence among its sizes: it is no image.
    """
    tensors = batches[0]
    if type(job.dataset) is TensorDataset and job.collate is None:
        return set(range(len(tensors)))
    alike = [
        index for index, found in enumerate(zip(*batches, strict=True)) if len({one.shape[1:] for one in found}) == 1
    ]
    lengths = {tensor.shape[1] for tensor in tensors if tensor.dim() == 2}
    images = {index for index in alike if tensors[index].dim() >= 4 and lengths.isdisjoint(tensors[index].shape[1:])}
    planes = {tensors[index].shape[-2:] for index in images}
    return images | {index for index in alike if tensors[index].dim() == 3 and tensors[index].shape[1:] in planes}


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
    inputs = [node for node in exported.graph.nodes if node.op == "placeholder"][-_num_inputs(exported) :]
    sizes = [[size_in(exported, size) for size in node.meta["val"].shape] for node in inputs]
    if any(size is None for shape in sizes for size in shape):
        return False
    ranges = {size[0]: size[1:] for shape in sizes for size in shape if isinstance(size, tuple)}

    def known(found: re.Match[str]) -> str:
        size = sizes[int(found[1])][int(found[2])]
        return str(size[0] if isinstance(size, tuple) else size)

    guards = [_SIZE.sub(known, str(guard)) for guard in getattr(exported, "_guards_code", ())]
    return all(_always(guard, ranges) or _trivial(guard) for guard in guards)


def _always(guard: str, ranges: Mapping[str, tuple[int, int]]) -> bool:
    """Whether a comparison of two sizes holds in the whole of their ranges: then an Input says it."""
    found = _COMPARISON.fullmatch(guard)
    if found is None:
        return False
    left, compared, right = found.groups()
    if left == right:
        return compared in ("==", "<=", ">=")
    if compared in (">", ">="):
        left, right, compared = right, left, compared.replace(">", "<")
    a, b = (ranges.get(side) or ((int(side), int(side)) if side.isdigit() else None) for side in (left, right))
    if a is None or b is None:
        return False
    if compared == "!=":
        return a[1] < b[0] or b[1] < a[0]
    return a[1] < b[0] if compared == "<" else a[1] <= b[0] if compared == "<=" else False


def _num_inputs(exported: Any) -> int:
    return len(exported.graph_signature.user_inputs)


def _trivial(guard: str) -> bool:
    """``a * b == b * a``."""
    left, _, right = guard.partition("==")
    factors = [sorted(re.findall(r"\w+", side)) for side in (left, right)]
    return factors[0] == factors[1] and re.fullmatch(r"[\w\s*()]+==[\w\s*()]+", guard) is not None


def _where(error: BaseException) -> str:
    """The user's line that an error was raised under."""
    for one in causes(error):
        frames = [(frame.filename, str(frame.lineno)) for frame in traceback.extract_tb(one.__traceback__)]
        if found := users_line(frames):
            return found
    return ""


# -- the proof -------------------------------------------------------------------------------------------------


def _compare(
    program_step: StepFunction,
    layout: Layout,
    model: nn.Module,
    step: StepFunction,
    batches: Sequence[Any],
    in_precision: Callable[[], Any],
    seed: int,
) -> None:
    """Run model and program on the same batches with the same seeds; raises NotTraceable where any bit differs."""
    ours, theirs = copied_model(model), copied_model(model)
    prefix = "the traced step differs from the model"
    hint = "does it use state that is neither parameter nor buffer, or Python's random numbers?"
    usual = torch.get_default_dtype() == torch.float32
    if not usual:
        hint = (
            f"torch's default dtype is {torch.get_default_dtype()}, and workers without the code are not told: say the "
            "dtype of each tensor that the step makes"
        )
    rounding = "by rounding alone, since it takes other kernels when it is traced"
    for number, batch in enumerate(batches):
        loss_a, metrics_a, state_a = _one_step(ours, step, batch, in_precision, seed + number)
        try:
            with _float32_by_default():
                loss_b, metrics_b, state_b = _one_step(theirs, program_step, batch, in_precision, seed + number)
        except Exception as error:
            if usual:
                raise
            raise NotTraceable(f"{prefix}: {_first_line(error)}; {hint}") from error
        if not same_bits(loss_a, loss_b):
            why = f"{rounding}; {_EAGER}" if usual and _close(loss_a, loss_b) else hint
            raise NotTraceable(f"{prefix}: loss {loss_b.item()} in place of {loss_a.item()}; {why}")
        if repr(metrics_a) != repr(metrics_b):
            raise NotTraceable(f"{prefix}: metrics {metrics_b} in place of {metrics_a}; {hint}")
        if not torch.equal(state_a, state_b):
            raise NotTraceable(f"{prefix}: it draws other random numbers")
        for entry, a, b in zip(layout.entries, state_of(ours, layout), state_of(theirs, layout), strict=True):
            if not _same_gradient(a.grad, b.grad):
                why = f"{rounding}; {_EAGER}" if usual and _close(a.grad, b.grad) else hint
                raise NotTraceable(f"{prefix}: the gradient of {entry.name} has other bits; {why}")
            if not same_bits(a.detach(), b.detach()):
                raise NotTraceable(f"{prefix}: {entry.name} has other bits after it; {hint}")


@contextmanager
def _float32_by_default() -> Iterator[None]:
    """As in the process of a worker without the code, whatever the job's file says at its top."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _one_step(
    model: nn.Module, step: StepFunction, batch: Any, in_precision: Callable[[], Any], seed: int
) -> tuple[Tensor, dict[str, float], Tensor]:
    """(loss, metrics, random state afterwards); gradients add up on the model."""
    seed_all(seed)
    with in_precision():
        loss, metrics = step(model, map_tensors(batch, torch.clone))
    torch.autograd.backward(loss.float())
    for module in model.modules():  # as after a leaf: the graph of what was written into buffers is used up
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.grad_fn is not None:
                module._buffers[name] = freed(buffer)
    return loss.detach(), {name: float(value) for name, value in metrics.items()}, torch.get_rng_state()


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether they differ by no more than the order of additions does."""
    if a is None or b is None:
        return False
    there, here = a.to_dense().double(), b.to_dense().double()
    return bool(torch.dist(there, here) <= 1e-5 * torch.linalg.vector_norm(there))


def _same_gradient(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.layout == b.layout and same_bits(a.to_dense(), b.to_dense())  # a sparse one is summed once it has come
