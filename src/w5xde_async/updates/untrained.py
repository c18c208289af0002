"""What an update changes beside what its optimizer steps: a target network, an average in a buffer.

Code of the user's that is called with the update, a hook of the optimizer or a scheduler of their own, has the whole
model. What it changes belongs to the step: workers are sent it with the new version, and a checkpoint has it. It may
write into a tensor, or give it other memory (``p.data = ...``), or assign a buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from w5xde_async.params.flat import FlatState, sum_of_bits
from w5xde_async.params.layout import Layout


class Untrained:
    """Everything in ``state`` that is not trained; ``model``'s tensors are views of it. One thread at a time."""

    def __init__(self, model: nn.Module, layout: Layout, state: FlatState) -> None:
        self._state = state
        self._buckets = [bucket for bucket in layout.buckets if layout.groups[bucket.group].role != "grad"]
        self._before: list[int] = []
        self._parameters: list[tuple[Tensor, Tensor]] = []  # the model's, and where its values belong
        self._slots: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []  # the same of buffers, by module
        for entry, view in zip(layout.entries, state.views, strict=True):
            for name in entry.names if entry.role != "grad" else ():
                owner, _, leaf = name.rpartition(".")
                module = model.get_submodule(owner)
                if entry.role == "frozen":
                    self._parameters.append((module.get_parameter(leaf), view))
                else:
                    buffer = module._buffers[leaf]
                    assert buffer is not None
                    self._slots.append((module._buffers, leaf, buffer, view))

    def look(self) -> None:
        """The update is about to be made."""
        self._before = self._values()

    @torch.no_grad()
    def changed(self) -> list[int]:
        """Buckets that have other values since ``look``. Raises RuntimeError where a tensor has another shape now."""
        for parameter, view in self._parameters:
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter)
                parameter.data = view
        for buffers, name, own, view in self._slots:
            found = buffers.get(name)
            if found is not own:
                if found is None or found.shape != own.shape:
                    raise RuntimeError(f"the update has left no tensor of its shape in place of buffer {name!r}")
                view.copy_(found)
                buffers[name] = own
            elif own.data_ptr() != view.data_ptr():
                view.copy_(own)
                own.data = view
        asked = zip(self._buckets, self._before, self._values(), strict=True)
        return [bucket.index for bucket, was, now in asked if was != now]

    def _values(self) -> list[int]:
        return [int(sum_of_bits(self._state.bucket(bucket))) for bucket in self._buckets]
