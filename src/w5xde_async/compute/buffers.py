"""The merge of buffers: what a step makes of batch norm's statistics and the like.

Every leaf starts at the step's values b0 and leaves b_i behind. Floating buffers become
``b0 + sum(n_i (b_i - b0)) / sum(n_i)``, summed through the tree in float32 (a buffer that nobody changed keeps its
bits); integer and bool buffers become the elementwise maximum. So batch norm's running statistics move as after
one batch with the mean of the leaves' statistics, and its counter goes up by one a step.

A change is found by the tensor's version counter. Batch norm's own kernel changes its statistics without counting:
they are taken as changed by every leaf. Other operators that do so are found by comparing values in the first leaf of
an engine's life.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from w5xde_async.params.flat import ResultVector, state_of
from w5xde_async.params.layout import Layout

__all__ = ["BufferMerge", "statistics"]


class BufferMerge:
    """Restores and collects one replica's buffers. ``origin`` holds one tensor per entry: the step's values."""

    def __init__(
        self, layout: Layout, model: nn.Module, origin: Sequence[Tensor], silent: Iterable[int] | None = None
    ) -> None:
        """``silent``: entries that change without a version count; None reads them off the model."""
        self.layout = layout
        self._entries = [i for i, e in enumerate(layout.entries) if e.role in ("mean", "max")]
        live = list(state_of(model, layout))
        self._live = {index: live[index] for index in self._entries}
        self._origin = origin
        self._silent = set(statistics(layout, model) if silent is None else silent)
        self._compared = False
        self._dirty: set[int] = set(self._entries)
        self._versions: dict[int, int] = {}

    def refresh(self, entries: Iterable[int]) -> None:
        """These entries have new values at their origin."""
        self._dirty.update(index for index in entries if index in self._live)

    def restore(self) -> None:
        """Put the step's values back where a leaf changed them."""
        if self._dirty:
            with torch.no_grad():
                for index in self._dirty:
                    self._live[index].copy_(self._origin[index])
            self._dirty.clear()
        for index in self._entries:
            self._versions[index] = self._live[index]._version

    def collect(self, vector: ResultVector, samples: int, changed: set[int]) -> None:
        """Add the leaf's changes to ``vector`` and note the entries in ``changed``."""
        if not self._entries:
            return
        if not self._compared:
            self._compared = True
            self._silent |= {
                i
                for i in self._entries
                if self._live[i]._version == self._versions[i] and not torch.equal(self._live[i], self._origin[i])
            }
        moved = [i for i in self._entries if i in self._silent or self._live[i]._version != self._versions[i]]
        with torch.no_grad():
            for index in moved:
                entry = self.layout.entries[index]
                target = vector.group(entry.group)[entry.offset : entry.offset + entry.numel].view(entry.shape)
                live, origin = self._live[index], self._origin[index]
                if entry.role == "max":
                    torch.maximum(target, live.to(torch.int64), out=target)
                else:
                    target.add_((live.float() - origin.float()).mul_(samples))
        changed.update(moved)
        self._dirty.update(moved)


def statistics(layout: Layout, model: nn.Module) -> tuple[int, ...]:
    """The model's buffers that batch norm's kernels change, which count no versions."""
    return tuple(i for i, e in enumerate(layout.entries) if e.role == "mean" and _is_statistic(model, e.name))


def _is_statistic(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf in ("running_mean", "running_var") and isinstance(model.get_submodule(owner), _NormBase)
