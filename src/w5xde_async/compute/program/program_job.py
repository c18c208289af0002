"""A model without its code: the layout's tensors under their names, and the program as the step over them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import autocast
from w5xde_async.compute.machine import machine_memory_bytes
from w5xde_async.compute.program.form import Program
from w5xde_async.compute.program.interpreter import Bound, Measured, bind, example, fits, measure, run
from w5xde_async.errors import ProgramRefused
from w5xde_async.params.flat import state_of
from w5xde_async.params.layout import Layout

_MAX_PART, _MAX_PARTS = 120, 64  # characters between the dots of a name
_MAX_KNOWN = 1 << 12
_MAX_MODULES = 1 << 17  # some 2 KiB of memory each


class ProgramStep:
    """The program as a step ``(model, batch) -> (loss, metrics)``.

    Raises ProgramRefused for a batch that fits none of its graphs, and for one whose results need more than
    ``memory_bytes``: before anything is allocated for it. So it does where the first run on some sizes gives others
    than were seen then: before the next call is made.
    """

    def __init__(
        self,
        program: Program,
        layout: Layout,
        device: torch.device,
        *,
        memory_bytes: int,
        precision: str = "fp32",
    ) -> None:
        self._program, self._layout, self._memory_bytes = program, layout, memory_bytes
        self._device, self._autocast = device, autocast(precision)
        self._bound = [bind(program, graph, device) for graph in program.graphs]
        self._entries = [(entry.dtype, entry.shape) for entry in layout.entries]
        self._constants = [constant.to(device) for constant in program.constants]
        self._known: dict[tuple[Any, ...], Bound] = {}  # sizes and dtypes on which it has run
        self._plain: Any = _plain_type(program)
        self._num_tensors = len(program.graphs[0].inputs)
        self._run: Callable[..., tuple[Tensor, tuple[Any, ...]]] = run
        self._state: list[Tensor] = []
        self._model: nn.Module | None = None
        for graph in program.graphs:
            self._measure(graph, example(graph.inputs))

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        if model is not self._model:
            self._model, self._state = model, list(state_of(model, self._layout))
        tensors = self._tensors(batch)
        bound = self._known.get(tuple([(tensor.shape, tensor.dtype) for tensor in tensors]))
        given = (*self._state, *tensors, *self._constants)
        loss, metrics = self._first(tensors, given) if bound is None else self._run(bound, given)
        return loss, dict(zip(self._program.metrics, metrics, strict=True))

    def compiled(self, options: dict[str, Any]) -> ProgramStep:
        """The same step, whose calls ``torch.compile`` makes one of. The checks stay as they are, and so does each
        first run on some sizes."""
        other = copy.copy(self)
        other._run = torch.compile(run, options=options)
        return other

    def _tensors(self, batch: Any) -> Sequence[Tensor]:
        if type(batch) is self._plain:
            plain: Sequence[Tensor] = batch
            if len(plain) == self._num_tensors and all(type(item) is Tensor for item in plain):
                return plain
        structure, tensors = flatten(batch)
        if structure != self._program.structure:
            raise ProgramRefused("the batch has another structure, or other numbers and strings, than was traced")
        return tensors

    def _first(self, tensors: Sequence[Tensor], given: Sequence[Tensor]) -> tuple[Tensor, tuple[Any, ...]]:
        """A run on sizes that are new."""
        bound = self._find(tensors)
        measured = self._measure(bound.graph, [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])
        outcome = run(bind(self._program, bound.graph, self._device, held=measured.held), given)
        if len(self._known) >= _MAX_KNOWN:  # whoever sends new sizes without end waits for new checks
            self._known.clear()
        self._known[tuple([(tensor.shape, tensor.dtype) for tensor in tensors])] = bound
        return outcome

    def _find(self, tensors: Sequence[Tensor]) -> Bound:
        for bound in self._bound:
            if fits(bound.graph, tensors):
                return bound
        shapes = ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
        raise ProgramRefused(f"the program was not traced for a batch of {shapes}; workers with --job compute it")

    def _measure(self, graph: Any, batch: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> Measured:
        return measure(
            self._program, graph, self._entries, batch, memory_bytes=self._memory_bytes, autocast=self._autocast
        )


def _plain_type(program: Program) -> type | None:
    """tuple or list where a batch is just that of its tensors, as most are."""
    tensors = [torch.empty(0)] * len(program.graphs[0].inputs)
    return next((kind for kind in (tuple, list) if program.structure == flatten(kind(tensors))[0]), None)


@dataclass(frozen=True, slots=True)
class ProgramJob:
    """What an engine computes with in place of a job."""

    model: nn.Module
    layout: Layout
    step: Callable[[nn.Module, Any], tuple[Tensor, dict[str, Any]]]
    statistics: tuple[int, ...]

    @classmethod
    def of(
        cls, program: Program, layout: Layout, device: torch.device, *, precision: str, memory_bytes: int
    ) -> ProgramJob:
        """Build the model's tensors (zeros: the values come as PARAMS) and ready the program. Raises ProgramRefused."""
        needed = layout.state_bytes + 2 * layout.vector_bytes
        if needed > memory_bytes:
            raise ProgramRefused(f"the model needs {needed} bytes, this machine has {memory_bytes}")
        step = ProgramStep(program, layout, device, memory_bytes=memory_bytes, precision=precision)
        return cls(skeleton(layout), layout, step, program.statistics)


def skeleton(
    layout: Layout, entries: Iterable[int] | None = None, device: torch.device | str | None = None
) -> nn.Module:
    """Nested modules with the layout's parameters and buffers (or these) under all their names; zeros.

    Raises ProgramRefused.
    """
    root, num_modules = nn.Module(), 0
    for index in range(len(layout.entries)) if entries is None else entries:
        entry = layout.entries[index]
        tensor = torch.zeros(entry.shape, dtype=entry.dtype, device=device)
        parameter = (
            nn.Parameter(tensor, requires_grad=entry.role == "grad") if entry.role in ("grad", "frozen") else None
        )
        for name in entry.names:
            parts = name.split(".")
            if len(parts) > _MAX_PARTS or not all(0 < len(part) <= _MAX_PART and part.isprintable() for part in parts):
                raise ProgramRefused(
                    f"a tensor of the model is called {name[:80]!r}; names have at most {_MAX_PARTS} parts of at most "
                    f"{_MAX_PART} printable characters"
                )
            try:
                owner = root
                for part in parts[:-1]:
                    if part not in owner._modules:
                        num_modules += 1
                        if num_modules > _MAX_MODULES:
                            raise ProgramRefused(f"the model has more than {_MAX_MODULES} modules")
                        owner.add_module(part, nn.Module())
                    owner = cast(nn.Module, owner._modules[part])
                if parameter is not None:
                    owner.register_parameter(parts[-1], parameter)
                else:
                    owner.register_buffer(parts[-1], tensor)
            except (KeyError, AttributeError, TypeError) as error:
                raise ProgramRefused(f"a tensor of the model is called {name[:80]!r} ({error})") from None
    return root


def device_memory_bytes(device: torch.device) -> int:
    """All memory of a device, or of this machine where it is the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory_bytes()
