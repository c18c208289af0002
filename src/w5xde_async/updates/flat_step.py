"""Steps of torch's own optimizers over stretches of the flat vectors, in place of parameter by parameter.

On the CPU such an optimizer takes one parameter after the other, each in a dozen passes over memory. Where each value's
update is of that value alone, it does not matter in which tensor it lies. So the parameters of a group that are
neighbours in the flat vector are given to the optimizer as one tensor: many small ones cost what one does. Long
stretches are given in pieces, whose intermediate values the allocator has at hand. The optimizer is the job's own
object, with its own groups, rates and code; only its lists of parameters and its state are others while it steps.
A large model's pieces are stepped by several threads, each piece by one, in whose cache it stays from operation to
operation, and which waits for no other thread at any of them. There, stand-ins step: that object several times.

The bits are those of a step over the parameters: every value goes through the same operations. That the kernels of this
machine see it so, wherever in a tensor a value lies, and that the zeros between parameters stay zeros, is tried for
each group before the first such step. (Of fused steps it is not so: what is left of a tensor behind its last vector is
rounded otherwise.)

The optimizer's state lies in flat vectors from then on, of which its own entries are views. What it keeps beside, a
number for each parameter (``step``), is brought up to date by ``settle``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from w5xde_async.openmp import side_by_side
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.params.layout import ALIGN_BYTES, Layout

_PIECE, _MOST_PIECE = 1 << 20, 1 << 21  # values: for each thread, which may sleep between operations; and at most
_OWN_PIECE = 1 << 18  # where a piece is one thread's: of smaller ones Python takes longer, of larger ones memory
_SHARES = 2  # of the pieces, for each thread: others are not to wait for one that is late
_WORTH_APART = 8 << 20  # bytes of parameters: threads are begun, and waited for
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})  # of a state: not of a value each
_MOST_WAIT = 64
_ALIGN = ALIGN_BYTES // 4  # values
_TRIED = (141, 64, *[31] * 16)  # values of parameters on which the kernels are tried: mostly what is left of a vector
_TRIED_PIECE = 96
_TRIED_IDLE = 0.25  # of the values
_TRIED_STEPS, _TRIED_RATE = 7, 0.1  # RAdam's sixth is the first that divides

_Kind = tuple[tuple[str, torch.dtype | None, float], ...]
#: What is untouched in a step, and by group, whether it has momentum: SGD's state begins when it has.
_Way = tuple[frozenset[int], tuple[bool, ...]]


@dataclass(slots=True)
class _Stretch:
    """Neighbours in the flat vector of one group of parameters."""

    group: int
    begin: int
    entries: list[int]
    pieces: list[nn.Parameter] = field(default_factory=list)


class _StandIn(NamedTuple):
    """An optimizer that makes a part of the job's optimizer's step. ``groups``: what it steps, by that one's groups."""

    made: torch.optim.Optimizer
    groups: Mapping[int, list[nn.Parameter]]


class FlatStep:
    """Makes an optimizer's steps over stretches of the parameters, once the optimizer has made one itself; in the
    thread that owns it. The parameters are views of ``state``."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, layout: Layout, state: FlatState,
        parameters: Sequence[tuple[int, Tensor]],
    ) -> None:  # fmt: skip
        """``parameters``: those that are trained, with their places in the layout."""
        self._optimizer, self._layout, self._state = optimizer, layout, state
        self._parameters = dict(parameters)
        trained = [group.index for group in layout.groups if group.role == "grad"]
        self._group = trained[0] if len(trained) == 1 else -1
        self._possible = len(trained) == 1 and self._is_possible()
        self._flats: dict[str, Tensor] = {}  # the state's values, by name, as the parameters lie
        self._stretches: list[_Stretch] = []
        self._of_pieces: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        self._apart: list[_StandIn] = []  # who steps the pieces, if it is not the optimizer
        self._for: _Way | None = None  # steps that ``_stretches`` are for, if any
        self._next: _Way = frozenset(), ()  # the step that ``ready`` was asked for
        self._last: _Way = frozenset(), ()  # the optimizer's last own step
        self._alike = 0  # own steps in a row that were such
        self._wait = 1  # so many of them come before steps over stretches
        self._unsettled = False

    def _is_possible(self) -> bool:
        groups = self._optimizer.param_groups
        if any(group.get("differentiable") or group.get("fused") for group in groups):
            return False
        if any(isinstance(eps := group.get("eps"), float | int) and _is_zero(eps) for group in groups):
            return False  # the zeros between parameters would be divided by themselves
        held = [id(parameter) for group in groups for parameter in group["params"]]
        if len(held) > len(set(held)):  # one that is named twice is stepped twice
            return False
        return all(
            parameter.dtype is torch.float32 and parameter.device.type == "cpu" and parameter.is_contiguous()
            and parameter.data_ptr() == self._state.views[index].data_ptr()
            for index, parameter in self._parameters.items()
        )  # fmt: skip

    def ready(self, untouched: Collection[int]) -> bool:
        """Whether the next step may be ``step``. Else it is to be the optimizer's own, whose state is whole now."""
        if not self._possible:
            return False
        momenta = tuple(bool(group.get("momentum")) for group in self._optimizer.param_groups)
        self._next = frozenset(untouched), momenta
        if self._for is not None:
            if self._for == self._next:
                return True
            self.forget()
            self._wait = min(2 * self._wait, _MOST_WAIT)
        if self._alike < self._wait or self._last != self._next:
            return False
        self._build(self._next)
        return self._possible

    def note_own_step(self) -> None:
        """The optimizer has made the step itself that was not ``ready``, by way of which its state is there."""
        self._alike = self._alike + 1 if self._alike and self._last == self._next else 1
        self._last = self._next  # as it was asked for: a scheduler has set what the next one is by now

    def step(self, gradients: ResultVector) -> None:
        """The optimizer's step, with these gradients."""
        flat = gradients.group(self._group)
        given: list[list[nn.Parameter]] = [[] for _ in self._optimizer.param_groups]
        for stretch in self._stretches:
            at = stretch.begin
            for piece in stretch.pieces:
                end = at + piece.numel()
                piece.grad = flat[at:end]
                at = end
            given[stretch.group] += stretch.pieces
        self._unsettled = True
        if self._apart:
            side_by_side(self._step_apart, self._apart, flat.nbytes)
        else:
            with _in_place_of(self._optimizer, given, self._of_pieces):
                self._optimizer.step()
        for pieces in given:
            for piece in pieces:
                piece.grad = None

    def _step_apart(self, stand_in: _StandIn) -> None:
        made, groups = stand_in
        made.param_groups = [
            {**self._optimizer.param_groups[group], "params": given} for group, given in groups.items()
        ]
        made.step()

    @torch.no_grad()
    def settle(self) -> None:
        """Bring the optimizer's own state up to date."""
        if not self._unsettled:
            return
        self._unsettled = False
        for stretch in self._stretches:
            now = self._of_pieces.get(stretch.pieces[0], {})
            numbers = [name for name in now if name in _NUMBERS]
            for index in stretch.entries if numbers else ():
                own = self._optimizer.state[self._parameters[index]]
                for name in numbers:
                    own[name].copy_(now[name])

    def forget(self) -> None:
        """The next steps are the optimizer's own: its state may be another then."""
        self.settle()
        self._stretches, self._apart, self._for, self._alike = [], [], None, 0
        self._of_pieces.clear()

    # -- building ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _build(self, way: _Way) -> None:
        stretches = self._neighbours(way[0])
        self._possible = stretches is not None and _same_bits(self._optimizer)
        if stretches is None or not self._possible:
            return
        for name in sorted(
            {name for stretch in stretches for index in stretch.entries for name in self._values(index)}
        ):
            self._flatten(name, stretches)
        whole, threads = self._state.groups[self._group], torch.get_num_threads()
        apart = threads > 1 and whole.nbytes >= _WORTH_APART
        length = _OWN_PIECE if apart else min(_PIECE * threads, _MOST_PIECE)
        for stretch in stretches:
            last = self._layout.entries[stretch.entries[-1]]
            stop, values = last.offset + last.numel, self._values(stretch.entries[0])
            kept = self._optimizer.state.get(self._parameters[stretch.entries[0]], {})
            for begin in range(stretch.begin, max(stop, stretch.begin + 1), length):
                end = min(begin + length, stop)
                piece = nn.Parameter(whole[begin:end])
                stretch.pieces.append(piece)
                for name, value in kept.items():
                    own = value.clone() if name in _NUMBERS else value
                    self._of_pieces[piece][name] = self._flats[name][begin:end] if name in values else own
        self._stretches, self._for = stretches, way
        if apart:
            pieces = [(stretch.group, piece) for stretch in stretches for piece in stretch.pieces]
            each = max(1, -(-len(pieces) // (_SHARES * threads)))  # none, where nothing that it steps has a gradient
            self._apart = [self._stand_in(pieces[begin : begin + each]) for begin in range(0, len(pieces), each)]

    def _stand_in(self, pieces: Sequence[tuple[int, nn.Parameter]]) -> _StandIn:
        """The optimizer as it steps these alone: what it is made of, but for a step that a scheduler has put there."""
        kind = type(self._optimizer)
        made = kind.__new__(kind)
        vars(made).update({name: value for name, value in vars(self._optimizer).items() if name != "step"})
        made.state = self._of_pieces
        groups = defaultdict[int, list[nn.Parameter]](list)
        for group, piece in pieces:
            groups[group].append(piece)
        return _StandIn(made, groups)

    def _neighbours(self, untouched: frozenset[int]) -> list[_Stretch] | None:
        """The stretches, in order; None where the optimizer's state is not as torch's are."""
        group_of = {
            id(parameter): number
            for number, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        }
        found: list[_Stretch] = []
        before: tuple[int, _Kind] | None = None
        for index in sorted(self._parameters, key=lambda index: self._layout.entries[index].offset):
            group = group_of.get(id(self._parameters[index]))
            if group is None or index in untouched:
                before = None
                continue
            kind = self._kind(index)
            if kind is None:
                return None
            if (group, kind) == before:
                found[-1].entries.append(index)
            else:
                found.append(_Stretch(group, self._layout.entries[index].offset, [index]))
            before = group, kind
        return found

    def _kind(self, index: int) -> _Kind | None:
        """What the states of neighbours have to have in common; None where one is not as torch's are."""
        parameter = self._parameters[index]
        kind: list[tuple[str, torch.dtype | None, float]] = []
        for name, value in self._optimizer.state.get(parameter, {}).items():
            if name in _NUMBERS and isinstance(value, Tensor) and value.numel() == 1:
                kind.append((name, value.dtype, float(value)))
            elif value is None:
                kind.append((name, None, 0.0))
            elif (
                isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype is torch.float32
                and value.is_contiguous() and value.device.type == "cpu"
            ):  # fmt: skip
                kind.append((name, value.dtype, 0.0))
            else:
                return None
        return tuple(kind)

    def _values(self, index: int) -> dict[str, Tensor]:
        """What the state holds for each value of a parameter."""
        state = self._optimizer.state.get(self._parameters[index], {})
        return {name: value for name, value in state.items() if name not in _NUMBERS and value is not None}

    def _flatten(self, name: str, stretches: Sequence[_Stretch]) -> None:
        """Have a state's values of one name lie as the parameters do; what they were before is free at once."""
        if name not in self._flats:
            self._flats[name] = torch.zeros_like(self._state.groups[self._group])
        for stretch in stretches:
            for index in stretch.entries:
                value, entry = self._values(index).get(name), self._layout.entries[index]
                view = self._flats[name][entry.offset : entry.offset + entry.numel].view(entry.shape)
                if value is not None and value.data_ptr() != view.data_ptr():
                    view.copy_(value)
                    self._optimizer.state[self._parameters[index]][name] = view


@contextmanager
def _in_place_of(
    optimizer: torch.optim.Optimizer, parameters: Sequence[list[nn.Parameter]], state: defaultdict[Any, Any]
) -> Iterator[None]:
    """The optimizer has these parameters, by group, and this state."""
    groups, own = optimizer.param_groups, (optimizer.state, [group["params"] for group in optimizer.param_groups])
    try:
        optimizer.state = state
        for group, given in zip(groups, parameters, strict=True):
            group["params"] = given
        yield
    finally:
        optimizer.state = own[0]
        for group, kept in zip(groups, own[1], strict=True):
            group["params"] = kept


def _is_zero(value: float) -> bool:
    return not torch.tensor(value, dtype=torch.float32)


def _switches(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a group says by which of its operations an optimizer steps it."""
    return tuple(
        tuple(map(bool, value)) if isinstance(value, tuple) else bool(value)
        for name, value in group.items()
        if name != "params"
    )


def _same_bits(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a few steps over pieces of a stretch come to the bits of those over its parameters, and leave the zeros
    between these alone. This is tried with every kind of group, as it is set now, but for its learning rate, which may
    be next to nothing at first. The optimizer is as before."""
    generator = torch.Generator().manual_seed(0)

    def drawn(zeros: float) -> Tensor:
        """Of many sizes, so that rounding shows in what is added; some are zeros of either sign, always the same."""
        sizes = torch.rand(numel, generator=generator).mul_(5.0).sub_(4.0)
        values = torch.randn(numel, generator=generator).mul_(10.0**sizes)
        return torch.where(idle, values.mul(0.0), values).masked_fill_(between, zeros)

    places, numel = [], 0
    for size in _TRIED:
        places.append(slice(numel, numel + size))
        numel += -(-size // _ALIGN) * _ALIGN
    between = torch.ones(numel, dtype=torch.bool)
    for place in places:
        between[place] = False
    idle = torch.rand(numel, generator=generator) < _TRIED_IDLE
    flats: dict[tuple[Any, ...], Tensor] = {}  # by what switches an optimizer's code
    apart: list[list[nn.Parameter]] = []
    pieces: list[list[nn.Parameter]] = []
    for group in optimizer.param_groups:
        way = _switches(group)
        known = way in flats
        flat = flats.setdefault(way, drawn(0.0))
        apart.append([] if known else [nn.Parameter(flat[place].clone()) for place in places])
        pieces.append([] if known else [nn.Parameter(piece) for piece in torch.split(flat, _TRIED_PIECE)])
    tried = [(own, cut) for own, cut in zip(apart, pieces, strict=True) if own]
    states: tuple[defaultdict[Any, Any], defaultdict[Any, Any]] = defaultdict(dict), defaultdict(dict)
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = torch.full_like(rate, _TRIED_RATE) if isinstance(rate, Tensor) else _TRIED_RATE
        for _ in range(_TRIED_STEPS):
            for own, cut in tried:
                gradient = drawn(-0.0)
                for parameter, place in zip(own, places, strict=True):
                    parameter.grad = gradient[place].clone()
                for piece, part in zip(cut, torch.split(gradient, _TRIED_PIECE), strict=True):
                    piece.grad = part
            for parameters, state in zip((apart, pieces), states, strict=True):
                with _in_place_of(optimizer, parameters, state):
                    optimizer.step()
    except KeyError:  # its constructor makes the state, as Adagrad's does in torch 2.11
        return False
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    return all(
        not flat[between].any()
        and all(flat[place].numpy().tobytes() == parameter.detach().numpy().tobytes()
                for place, parameter in zip(places, own, strict=True))
        for flat, (own, _) in zip(flats.values(), tried, strict=True)
    )  # fmt: skip
