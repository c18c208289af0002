"""What an update changes beside what its optimizer steps: a target network, an average in a buffer.

Code of the user's that is called with the update, a hook of the optimizer or an optimizer or a scheduler of their own,
has the whole model. What it changes belongs to the step: workers are sent it with the new version, and a checkpoint has
it. It may write into a tensor, give it other memory (``p.data = ...``), or put another tensor or module in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from w5xde_async.params.flat import FlatState, fingerprints
from w5xde_async.params.layout import Layout, submodule


class _Named(NamedTuple):
    """A tensor of the model by one of its names."""

    owner: str
    leaf: str
    role: str
    own: Tensor  # the one that was there when the run began
    place: Tensor  # its memory


class Untrained:
    """Everything in ``state`` that is not trained. One thread at a time."""

    def __init__(self, model: nn.Module, layout: Layout, state: FlatState, tensors: Sequence[Tensor]) -> None:
        """``tensors``: the model's, in layout order; those that are not trained are views of ``state``."""
        self._model, self._state = model, state
        self._buckets = [bucket for bucket in layout.buckets if layout.groups[bucket.group].role != "grad"]
        self._moving = [  # with every result
            number for number, bucket in enumerate(self._buckets) if layout.groups[bucket.group].role != "frozen"
        ]
        self._before: list[int] = []
        self._named: list[_Named] = []
        for entry, own in zip(layout.entries, tensors, strict=True):
            for name in entry.names:
                owner, _, leaf = name.rpartition(".")
                self._named.append(_Named(owner, leaf, entry.role, own, own.data))

    def look(self) -> None:
        """The update is about to be made."""
        if not self._before:
            self._before = self._marks(range(len(self._buckets)))
            return
        # Nobody else writes what is frozen, which may be large.
        for number, mark in zip(self._moving, self._marks(self._moving), strict=True):
            self._before[number] = mark

    @torch.no_grad()
    def changed(self) -> list[int]:
        """Buckets that have other values since ``look``. Every name is its first tensor's again, in its first memory,
        with the values that were found there. Raises RuntimeError where a name is gone, is of a tensor of another shape
        or, where it is trained, of another tensor."""
        for owner, leaf, role, own, place in self._named:
            try:
                module = submodule(self._model, owner)
                tensors: dict[str, Any] = module._parameters if role in ("grad", "frozen") else module._buffers
                found = tensors[leaf]
            except (AttributeError, KeyError):
                found = None
            if found is not own:
                name = f"{owner}.{leaf}" if owner else leaf
                if role == "grad":
                    raise RuntimeError(
                        f"the update has put another tensor in place of parameter {name!r}, which the optimizer does "
                        "not step; change its values in place (with torch.no_grad(): weight.clamp_(-1, 1))"
                    )
                if found is None or found.shape != place.shape:
                    raise RuntimeError(f"the update has left no tensor of its shape in place of {name!r}")
                place.copy_(found)
                tensors[leaf] = own
            if own.data_ptr() != place.data_ptr():
                if found is own:
                    place.copy_(own)
                own.data = place
        before, self._before = self._before, self._marks(range(len(self._buckets)))
        asked = zip(self._buckets, before, self._before, strict=True)
        return [bucket.index for bucket, was, now in asked if was != now]

    def _marks(self, numbers: Iterable[int]) -> list[int]:
        return fingerprints([self._state.bucket(self._buckets[number]) for number in numbers]).tolist()
