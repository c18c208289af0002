"""The merge of buffers: what a step makes of batch norm's statistics and the like.

Every leaf starts at the step's values b0 and leaves b_i behind. Floating buffers become
``b0 + sum(n_i (b_i - b0)) / sum(n_i)``, summed through the tree in float32 (a buffer that nobody changed keeps its
bits); integer and bool buffers become the elementwise maximum. So batch norm's running statistics move as after
one batch with the mean of the leaves' statistics, and its counter goes up by one a step.

Forward may write into a buffer, or assign it (``self.average = 0.9 * self.average + ...``): b_i is what the module's
attribute holds after the leaf, and the next leaf finds the replica's own tensor there again. A write is found by the
tensor's version counter. The kernels of batch norm and of quantization-aware training change theirs without counting:
they are taken as changed by every leaf. Other operators that do so are found by comparing values in the first leaf of
an engine's life.

A model has many small buffers, and on a device each operation is a launch: those of one dtype are done together
(``torch._foreach_*``), with the bits of one after the other.

An element whose b0 is not finite has no difference: it becomes ``sum(n_i b_i) / sum(n_i)`` over the leaves that changed
it, the others counting as zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from w5xde_async.compute.modes import Modes
from w5xde_async.params.flat import isfinite, ordered
from w5xde_async.params.layout import Layout, named_state, submodule


class Sums(Protocol):
    """Where a leaf's changes are added: float32, int64 for role ``max``."""

    def entry(self, index: int) -> Tensor:
        """The flat piece of one entry."""


class BufferMerge:
    """Restores and collects one replica's buffers. ``origin`` holds one tensor per entry: the step's values. The modes
    of the replica's modules are put back with them."""

    def __init__(
        self, layout: Layout, model: nn.Module, origin: Sequence[Tensor], silent: Iterable[int] | None = None
    ) -> None:
        """``model`` may be a part of the layout's. ``silent``: entries that change without a version count; None reads
        them off the model."""
        self.layout = layout
        live = {name: tensor for name, tensor, is_parameter in named_state(model) if not is_parameter}
        self.entries = [i for i, e in enumerate(layout.entries) if e.role in ("mean", "max") and e.name in live]
        self._modes = Modes(model)
        self._live = {index: live[layout.entries[index].name] for index in self.entries}
        self._slots = _slots(layout, model, self.entries)
        self._origin = origin
        self._silent = set(statistics(layout, model) if silent is None else silent)
        self._compared = False
        self._unfinished = False  # a leaf has begun, and nothing is known of what it changed
        self._dirty: set[int] = set(self.entries)
        self._fresh: set[int] = set(self.entries)  # new at their origin since the last leaf
        self._infinite: set[int] = set()  # entries whose values at the step's start are not all finite
        self._versions: dict[int, int] = {}

    def refresh(self, entries: Iterable[int]) -> None:
        """These entries have new values at their origin."""
        fresh = [index for index in entries if index in self._live]
        self._dirty.update(fresh)
        self._fresh.update(fresh)

    def restore(self) -> None:
        """Put the step's values back where a leaf changed them."""
        self._modes.restore()
        if not self.entries:
            return
        if self._unfinished:
            self._dirty.update(self.entries)
        self._unfinished = True
        for buffers, name, index in self._slots:
            if buffers.get(name) is not self._live[index]:
                buffers[name] = self._live[index]
                self._dirty.add(index)
        if self._fresh:
            self._look_for_infinite()
        if self._dirty:
            with torch.no_grad():
                for indices in self._by_dtype(self._dirty):
                    torch._foreach_copy_([self._live[i] for i in indices], [self._origin[i] for i in indices])
            self._dirty.clear()
        for index in self.entries:
            self._versions[index] = self._live[index]._version

    def collect(self, vector: Sums, samples: int, changed: set[int]) -> None:
        """Add the leaf's changes to ``vector`` and note the entries in ``changed``.

        Raises TypeError where forward has left something in a buffer's place that cannot be merged.
        """
        if not self.entries:
            return
        assigned = self._assigned()
        if not self._compared:
            self._compared = True
            self._silent |= {
                i
                for i in self.entries
                if self._live[i]._version == self._versions[i] and not torch.equal(self._live[i], self._origin[i])
            }
        moved = [
            i for i in self.entries if i in self._silent or i in assigned or self._live[i]._version != self._versions[i]
        ]
        self._refuse_resized([index for index in moved if index not in assigned])
        with torch.no_grad():
            for indices in self._by_dtype(moved):
                self._add(vector, indices, [assigned.get(i, self._live[i]) for i in indices], samples)
        for index in moved:
            if self._live[index].requires_grad:  # written in place by what depends on parameters: the graph is used up
                self._free(index)
        changed.update(moved)
        self._dirty.update(moved)
        self._unfinished = False

    def _refuse_resized(self, indices: Sequence[int]) -> None:
        """Give all that have another shape their own back, or the next leaf could not begin; then raise TypeError."""
        said = []
        for index in indices:
            own, entry = self._live[index], self.layout.entries[index]
            if (resized := own.shape) != entry.shape:
                said.append(f"{entry.name!r} from {list(entry.shape)} to {list(resized)}")
                with torch.no_grad():
                    own.resize_(entry.shape)
        if said:
            more = f" and {len(said) - 3} more" if len(said) > 3 else ""
            raise TypeError(
                f"forward resized buffer {', '.join(said[:3])}{more}; a buffer keeps its shape through a run: have the "
                "model's constructor run it once, on a batch like those of the run"
            )

    def _add(self, vector: Sums, indices: Sequence[int], values: list[Tensor], samples: int) -> None:
        """Add one leaf's ``values`` of entries of one dtype."""
        entries = [self.layout.entries[index] for index in indices]
        targets = [vector.entry(i).view(e.shape) for i, e in zip(indices, entries, strict=True)]
        origins = [self._origin[index] for index in indices]
        if entries[0].role == "max":
            if entries[0].dtype == torch.uint64:
                for entry, value, origin in zip(entries, values, origins, strict=True):
                    if bool(((value == 0) & (origin != 0)).any()):
                        raise TypeError(
                            f"forward set an element of the uint64 buffer {entry.name!r} to 0; buffers of integers "
                            "become the largest value of all leaves, in which that is lost; keep it as int64"
                        )
            torch._foreach_maximum_(targets, [ordered(value) for value in values])
        elif entries[0].dtype == torch.float32 and self._infinite.isdisjoint(indices):
            changes = torch._foreach_sub(values, origins)
            torch._foreach_mul_(changes, samples)
            torch._foreach_add_(targets, changes)
        else:
            for index, target, value, origin in zip(indices, targets, values, origins, strict=True):
                target.add_(change(value, origin, samples, finite=index not in self._infinite))

    def _by_dtype(self, indices: Iterable[int]) -> list[list[int]]:
        found: dict[torch.dtype, list[int]] = {}
        for index in indices:
            found.setdefault(self.layout.entries[index].dtype, []).append(index)
        return list(found.values())

    def _assigned(self) -> dict[int, Tensor]:
        """What forward has put in the place of a replica's own tensor, by entry."""
        found: dict[int, Tensor] = {}
        for buffers, name, index in self._slots:
            value, own = buffers.get(name), self._live[index]
            if value is own and index not in found:
                continue
            entry = self.layout.entries[index]
            if not isinstance(value, Tensor):
                raise TypeError(f"forward left {type(value).__name__} in place of buffer {entry.name!r}")
            if value.shape != own.shape or value.dtype != own.dtype or value.layout is not torch.strided:
                raise TypeError(
                    f"forward assigned buffer {entry.name!r}, {_described(own)}, a tensor {_described(value)}; "
                    "a buffer keeps shape and dtype through a run (register_buffer(..., persistent=False) for scratch)"
                )
            if found.setdefault(index, value) is not value:
                raise TypeError(
                    f"forward assigned one of the names {', '.join(entry.names)}, which are one buffer; register two"
                )
        for buffers, name, index in self._slots:
            if index in found and buffers.get(name) is not found[index]:
                raise TypeError(
                    f"forward assigned one of the names {', '.join(self.layout.entries[index].names)}, which are one "
                    "buffer; register two"
                )
        return {index: value.detach() for index, value in found.items()}

    def _free(self, index: int) -> None:
        own = self._live[index]
        free = self._live[index] = freed(own)
        for buffers, name, at in self._slots:
            if at == index and buffers.get(name) is own:
                buffers[name] = free

    def _look_for_infinite(self) -> None:
        asked = [index for index in sorted(self._fresh) if self.layout.entries[index].role == "mean"]
        self._fresh.clear()
        if asked:  # one question for all: the device may be another
            alike = self._by_dtype(asked)
            finite = torch.cat([self._are_finite(indices) for indices in alike]).tolist()
            self._infinite.difference_update(asked)
            self._infinite.update(index for index, holds in zip(chain(*alike), finite, strict=True) if not holds)

    def _are_finite(self, indices: Sequence[int]) -> Tensor:
        """A flag for each of these entries of one dtype."""
        origins = [self._origin[index] for index in indices]
        if origins[0].dtype == torch.float32 and all(origin.numel() for origin in origins):
            return torch.stack(torch._foreach_norm(origins, math.inf)).isfinite()  # the largest magnitude of each
        return torch.stack([isfinite(origin).all() for origin in origins])


def change(value: Tensor, origin: Tensor, samples: int, *, finite: bool = False) -> Tensor:
    """A leaf's part of a floating buffer's sum, in float32: ``samples * (value - origin)``.

    Where the origin is not finite it is ``samples * value`` and never -0.0, or -0.0 where that did not change.
    ``finite`` says that there are no such elements. The difference of float64 buffers is taken in float64.
    """
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    value, origin = value.to(wide), origin.to(wide)
    difference = (value - origin).float().mul_(samples)
    if finite:
        return difference
    same = (value == origin) | (value.isnan() & origin.isnan())
    begun = torch.where(same, -0.0, value.float() * samples + 0.0)
    return torch.where(torch.isfinite(origin), difference, begun)


def freed(buffer: Tensor) -> Tensor:
    """``buffer`` without the graph that it came from: the same tensor, which others may hold, but for a view."""
    return buffer.detach() if buffer._is_view() else buffer.detach_()


def statistics(layout: Layout, model: nn.Module) -> tuple[int, ...]:
    """The model's buffers that kernels change which count no versions: those of batch norm, and of the fused form in
    which quantization-aware training observes and quantizes."""
    observing = tuple(f"{name}." for name, module in model.named_modules() if _observes(module))
    return tuple(
        index
        for index, entry in enumerate(layout.entries)
        if entry.role in ("mean", "max") and (_is_statistic(model, entry.name) or entry.name.startswith(observing))
    )


def _is_statistic(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    kinds = (_NormBase, torch.jit.ScriptModule)  # what is in TorchScript has its class as a name alone
    return leaf in ("running_mean", "running_var") and isinstance(submodule(model, owner), kinds)


def _observes(module: nn.Module) -> bool:
    """By name: what needs quantization has imported it, others need not."""
    return any(kind.__name__ == "FusedMovingAvgObsFakeQuantize" for kind in type(module).__mro__)


class _Scripted(dict[str, Tensor | None]):
    """The buffers of a module in TorchScript, whose own lacks much of what a dictionary has."""

    def __init__(self, buffers: Any) -> None:
        self._given = buffers

    def get(self, name: str, default: Any = None) -> Any:
        return self._given[name] if name in self._given else default

    def __setitem__(self, name: str, value: Tensor | None) -> None:
        self._given[name] = value


def _slots(layout: Layout, model: nn.Module, entries: Sequence[int]) -> list[tuple[dict[str, Tensor | None], str, int]]:
    """Where each buffer hangs in the model: (dictionary of its module, name in it, entry), each place once."""
    found: dict[tuple[int, str], tuple[dict[str, Tensor | None], str, int]] = {}
    for index in entries:
        for name in layout.entries[index].names:
            owner, _, leaf = name.rpartition(".")
            buffers = submodule(model, owner)._buffers
            held = buffers if isinstance(buffers, dict) else _Scripted(buffers)
            found[id(buffers), leaf] = (held, leaf, index)
    return list(found.values())


def _described(tensor: Tensor) -> str:
    return f"of {str(tensor.dtype).removeprefix('torch.')} and shape {list(tensor.shape)}"
