"""What a model-sharding engine is built of: a model without memory for its parameters, its step, and its units.

A **unit** is a part of the model that is gathered, computed and given up as a whole. Of a job's model, units are the
children of its outermost ``ModuleList`` and ``Sequential`` containers; everything else is the root's. Of a program they
are runs of its atoms; parameters that several of them use, and those that none uses, are the root's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.program.atoms import Atoms, Part, Sizes
from w5xde_async.compute.program.program_job import skeleton
from w5xde_async.errors import JobError, ProgramRefused, UsageError
from w5xde_async.job import (
    Job,
    StepFunction,
    build_model,
    copied_model,
    held_by_functions,
    require_copyable,
    step_function,
)
from w5xde_async.params.flat import state_of
from w5xde_async.params.layout import Layout, named_state

_UNITS = 16  # of a program, about; each is as large as
_IS_META: Any = cast(Any, Tensor.is_meta).__get__
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """``model``: its parameters are on the meta device. ``units`` are modules in it, in the order in which they run.

    ``tensors``: the model's, in layout order. ``named``: where its buffers hang under the layout's names.
    ``called``: whether modules inside of units are called, and not only looked into. ``statistics``: buffers that
    change without a version count (None: they are read off the model).
    """

    model: nn.Module
    layout: Layout
    tensors: Sequence[Tensor]
    step: StepFunction
    units: Sequence[nn.Module]
    named: nn.Module
    called: bool = True
    statistics: Sequence[int] | None = None


def replica_of(job: Job, bucket_bytes: int) -> Replica:
    """A job's model, built without ever having all of its parameters in memory where the job gives a function.

    Raises JobError for a model that cannot be built so, ValueError for one that has no layout.
    """
    if isinstance(job.model, nn.Module):
        require_copyable(job.model)
        meta = {id(parameter): _on_meta(parameter) for parameter in job.model.parameters()}
        model = copied_model(job.model, meta).train()
    else:
        with _parameters_on_meta(), _drawing() as drawing:
            try:
                model = build_model(job)
            except JobError as error:
                if drawing.lacking or _lacks_values(error.__cause__):
                    raise _without_values(error.reason) from error
                raise
        if drawing.lacking:
            raise _without_values(drawing.lacking[0][:200])
    persistent = {id(tensor) for _, tensor, _ in named_state(model)}
    for name, buffer in model.named_buffers():
        if buffer.is_meta and id(buffer) not in persistent:
            raise JobError(
                "model", f"its buffer {name!r} is computed from parameters, and no checkpoint has it",
                "make it persistent, or compute it in forward",
            )  # fmt: skip
    layout = Layout.of(model, bucket_bytes=bucket_bytes)
    return Replica(
        model=model, layout=layout, tensors=list(state_of(model, layout)), step=step_function(job),
        units=units_of(model), named=model,
    )  # fmt: skip


def _lacks_values(error: BaseException | None) -> bool:
    """Whether it is torch that says so, of what has no memory."""
    return type(error) in (RuntimeError, NotImplementedError, TypeError) and bool(
        re.search(r"\bon (device )?meta\b|\bmeta (tensor|device)|\bdevices, .*\bmeta\b", str(error))
    )


def _without_values(said: str) -> JobError:
    return JobError(
        "model",
        "its function computes with parameters, as a pass to find a layer's width does, or a parametrization; they "
        f"have no values where islands divide a model while it is built ({said})",
        "give the job the model itself, Job(model=make())",
    )


def replica_of_program(atoms: Atoms, device: torch.device, precision: str, *, unit_bytes: int = 0) -> Replica:
    """A program, without a model's code. ``unit_bytes``: most of a unit of several atoms (0: by the model's size)."""
    layout = atoms.layout
    total = sum(e.numel * e.dtype.itemsize for e in layout.entries if e.role in ("grad", "frozen"))
    runs = [alike for run in atoms.units(unit_bytes or min(max(total // _UNITS, _LEAST_BYTES), _MOST_BYTES))
            for alike in _in_one_dtype(run, atoms)]  # fmt: skip
    users: dict[int, list[int]] = {}
    for number, run in enumerate(runs):
        for entry in sorted({entry for atom in run for entry in atoms.atoms[atom].entries}):
            users.setdefault(entry, []).append(number)
    buffers = [entry for entry, told in enumerate(layout.entries) if told.role in ("mean", "max")]
    shared = [entry for entry, numbers in users.items() if len(numbers) > 1 and entry not in set(buffers)]
    refuse_cast_again(atoms, shared, precision)
    unused = [entry for entry in range(len(layout.entries)) if entry not in users]
    root = skeleton(layout, sorted({*buffers, *shared, *unused}), "meta")
    held: dict[int, Tensor] = {}
    for entry in buffers:
        told = layout.entries[entry]
        held[entry] = torch.zeros(told.shape, dtype=told.dtype, device=device)
        for name in told.names:
            owner, _, leaf = name.rpartition(".")
            root.get_submodule(owner)._buffers[leaf] = held[entry]
    for entry in (*shared, *(entry for entry in unused if entry not in held)):
        held[entry] = root.get_parameter(layout.entries[entry].name)
    units: list[_PartUnit] = []
    for number, run in enumerate(runs):
        lent = [entry for entry in shared if users[entry][0] <= number <= users[entry][-1]]
        passed = [entry for entry in lent if number < users[entry][-1]]
        unit = _PartUnit(atoms.part(run, device, lent=lent, passed=passed))
        units.append(unit)
        for entry in unit.part.entries:
            if entry not in held:
                held[entry] = unit.part.model.get_parameter(layout.entries[entry].name)
    return Replica(
        model=_Chain(units, root), layout=layout, tensors=[held[entry] for entry in range(len(layout.entries))],
        step=_ChainStep(atoms, precision), units=[unit for unit in units if any(True for _ in unit.parameters())],
        named=root, called=False, statistics=atoms.program.statistics,
    )  # fmt: skip


def refuse_cast_again(atoms: Atoms, shared: Iterable[int], precision: str) -> None:
    """Raises UsageError where a parameter of several parts would get other bits than in one process."""
    wanted = set(shared)
    names = [atoms.layout.entries[e].name for e in sorted(wanted & atoms.cast_again(precision))] if wanted else []
    if names:
        raise UsageError(
            f"{', '.join(names[:4])}: several parts of the model use it, and in {precision} the gradients of its uses "
            "are added in half precision, which cannot be divided to the same bits; use fp32 or dp, or fsdp with --job"
        )


def _in_one_dtype(run: range, atoms: Atoms) -> list[range]:
    """A run, cut where the dtype of what is trained changes: a unit is exchanged in one."""
    found: list[range] = []
    known: set[torch.dtype] = set()
    begin = run.start
    for number in run:
        entries = [atoms.layout.entries[entry] for entry in atoms.atoms[number].entries]
        dtypes = {entry.dtype for entry in entries if entry.role == "grad" and entry.shape}
        if known and dtypes and dtypes != known:
            found.append(range(begin, number))
            known, begin = set(), number
        known |= dtypes
    return [*found, range(begin, run.stop)]


class _PartUnit(nn.Module):
    """A run of atoms. What is not tensors is told beside the call, through which tensors are followed."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part
        self.sizes: Sizes | None = None

    def forward(self, values: list[Tensor], batch: list[Tensor | None]) -> Any:
        assert self.sizes is not None
        return self.part(values, batch, self.sizes)


class _Chain(nn.Module):
    def __init__(self, units: Sequence[_PartUnit], root: nn.Module) -> None:
        super().__init__()
        self.units, self.root = nn.ModuleList(units), root


class _ChainStep:
    """The units one after the other. Raises ProgramRefused for a batch that the program was not traced for."""

    def __init__(self, atoms: Atoms, precision: str) -> None:
        self._atoms, self._precision = atoms, precision

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        assert isinstance(model, _Chain)
        structure, tensors = flatten(batch)
        if structure != self._atoms.program.structure:
            raise ProgramRefused("the batch has another structure, or other numbers, than was traced")
        shapes = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        sizes = self._atoms.sizes(shapes, precision=self._precision)
        entries = self._atoms.layout.entries
        values: list[Tensor] = []
        passed: dict[int, Tensor] = {}
        result: Any = None
        for module in model.units:
            unit: Any = module
            part: Part = unit.part
            part.hold(
                {e: model.root.get_buffer(entries[e].name) for e in part.entries if entries[e].role in ("mean", "max")}
            )
            unit.sizes = sizes
            # Its first user takes a shared parameter from the root, each later one from the one before: so gradients
            # are added in the program's order.
            lent = [passed[e] if e in passed else model.root.get_parameter(entries[e].name) for e in part.lent]
            result = unit([*values, *lent], [tensor if n in part.tensors else None for n, tensor in enumerate(tensors)])
            if not part.last:
                crossing = len(sizes.live[part.atoms.stop])
                values, passed = list(result[:crossing]), dict(zip(part.passed, result[crossing:], strict=True))
        loss, metrics = result
        return loss, metrics


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
    return _share_hooks(
        parameter, nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    )


@contextmanager
def _drawing() -> Iterator[_Drawing]:
    """What has no memory draws its random numbers all the same, into memory that is given back at once: whatever the
    constructor draws after it has the values that it has in every other worker.

    Where the job's own code builds on the meta device, other workers draw nothing either.
    """
    with _InitDrawing(), cast(Any, _Drawing)() as drawing:
        yield drawing


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``lacking``: what needs values, and was asked of what has none. Whoever asked may have gone on without it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lacking: list[str] = []

    def __torch_dispatch__(self, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in operator.tags and tree_any(_is_without_memory, (args, kwargs)):
            if not _within_meta():
                given, named = tree_map(_in_memory, (args, kwargs))
                operator(*given, **named)
        try:
            return operator(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            reads = isinstance(error, NotImplementedError) or operator is torch.ops.aten._local_scalar_dense.default
            if reads and tree_any(_is_without_memory, (args, kwargs)):
                self.lacking.append(str(error).partition("\n")[0])
            raise


class _InitDrawing(TorchFunctionMode):
    """Functions of ``torch.nn.init`` that ask whether a tensor is on the meta device do nothing then."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if found is True and function == _IS_META:
            asking = sys._getframe(1)
            if asking.f_globals is vars(nn.init):
                code, held = asking.f_code, asking.f_locals
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                vars(nn.init)[code.co_name](**{name: _in_memory(held[name]) for name in names})
        return found


def _within_meta() -> bool:
    """Whether this is called within the job's own ``with torch.device("meta")``, or with that as the default."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is DeviceContext.__torch_function__.__code__:
            return bool(frame.f_locals["self"].device.type == "meta")
        frame = frame.f_back
    return False


def _is_without_memory(value: object) -> bool:
    return value.is_meta if isinstance(value, Tensor) else isinstance(value, torch.device) and value.type == "meta"


def _in_memory(value: Any) -> Any:
    """It on the CPU, full of ones (which may be weights, or probabilities), laid out alike: by that it draws."""
    if not _is_without_memory(value):
        return value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu").fill_(1)


def is_hooked(parameter: Tensor) -> bool:
    """Whether somebody has hung a hook on its gradient."""
    return bool(_hooks_of(parameter))


def _hooks_of(parameter: Tensor) -> list[Any]:
    found = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return [hooks for hooks in found if hooks]


def carry_hooks(given: Tensor, taker: nn.Parameter, name: str) -> nn.Parameter:
    """``taker``, which stands in the place of ``given``, with its hooks. Who has hung them can still take them off.

    Raises UsageError for one that would compute with what ``taker`` stands for: torch says nothing of most of that.
    """
    for hooks in _hooks_of(given) if taker.requires_grad else ():
        for one in held_by_functions(hooks, shared=True):
            # Without memory, or what it was before its module took it.
            if isinstance(one, Tensor) and (one.is_meta or any(hooks is other for other in _hooks_of(one))):
                raise UsageError(
                    f"a hook on the gradient of parameter {name!r} holds a parameter itself (in its closure, a "
                    "default, a partial or a global name), which has no values where the model is divided: have it "
                    "take that from its module (lambda gradient: gradient + module.weight), or use dp"
                )
    return _share_hooks(given, taker)


def _share_hooks(given: Tensor, taker: nn.Parameter) -> nn.Parameter:
    hooked, other = cast(Any, given), cast(Any, taker)
    if is_hooked(given) and taker.requires_grad:
        other._backward_hooks = hooked._backward_hooks
        other._post_accumulate_grad_hooks = hooked._post_accumulate_grad_hooks
    return taker


def coalesced(gradient: Tensor) -> Tensor | None:
    """A hook of a parameter: rows that a sparse gradient names several times are summed before they land."""
    return gradient.coalesce() if gradient.layout is torch.sparse_coo else None


def made_dense(parameter: Tensor) -> None:
    """After a gradient has landed: ``fully_shard`` cuts no sparse ones. Rows that it does not name hold nothing (-0.0,
    which changes no sum), as where one process adds it to what it has."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout is torch.sparse_coo:
        parameter.grad = torch.full_like(parameter, -0.0, requires_grad=False).add_(gradient)
