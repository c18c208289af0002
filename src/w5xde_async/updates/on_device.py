"""The trainable parameters on an accelerator, where their optimizer steps, while ``state`` stays what everybody reads.

An optimizer does a few operations for each number that it reads: what it costs is moving memory, of which a GPU moves
ten times as much in a second. Gradients go there once a step and parameters come back; what the optimizer keeps stays.
Device memory: parameters and gradients beside the optimizer's own, for AdamW in float32 16 bytes a parameter in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from w5xde_async.job import copied_model
from w5xde_async.params.flat import FlatState, ResultVector, finite_norm, state_of
from w5xde_async.params.layout import Layout, runs
from w5xde_async.params.slots import slot_bytes
from w5xde_async.pinning import pin, pin_around
from w5xde_async.segments import is_mapped


class OnDevice:
    """One thread at a time. ``model`` is what the job's optimizer is made for, ``tensors`` are its, in layout order."""

    def __init__(self, model: nn.Module, layout: Layout, state: FlatState, device: torch.device) -> None:
        """``model``'s tensors are views of ``state``. What is not trained stays in host memory, and is the same."""
        self.layout, self.device, self._state = layout, device, state
        kept = [
            tensor for entry, tensor in zip(layout.entries, state_of(model, layout), strict=True)
            if entry.role != "grad"
        ]  # fmt: skip
        self.model = copied_model(model, {id(tensor): tensor for tensor in kept})
        self.tensors: list[Tensor] = list(state_of(self.model, layout))
        groups = [group.index for group in layout.groups if group.role == "grad"]
        self._buckets = [bucket.index for bucket in layout.result_buckets if bucket.group in groups]
        self._there = {group: torch.empty_like(state.groups[group], device=device) for group in groups}
        for index in layout.trainable:
            entry = layout.entries[index]
            flat = self._there[entry.group][entry.offset : entry.offset + entry.numel]
            self.tensors[index].data = flat.view(entry.shape)
        self.vector = ResultVector(layout, device)  #: what a step's gradients are divided and clipped in
        self._cuda: Any = torch.cuda if device.type == "cuda" else None
        self._pins = self._cuda is not None
        self._brought: dict[int, Tensor] = {}  # what a bucket of ``vector`` was copied from ahead of its step
        if self._cuda is not None:
            for group in groups:
                pin(state.groups[group], device)
        self.refresh()

    def refresh(self) -> None:
        """``state`` has values from elsewhere."""
        with torch.no_grad():
            for group, there in self._there.items():
                there.copy_(self._state.groups[group])

    def make_vector(self, layout: Layout) -> ResultVector:
        """Host memory for a sum that is brought there."""
        return ResultVector(layout, pinned=self._cuda is not None)

    @torch.no_grad()
    def bring(self, bucket: int, summed: Tensor) -> None:
        """``summed`` may become a step's sum: if the next ``divide`` is given this very tensor, it is what is there now
        that is divided. Its memory is to stay as it is until ``norms`` or ``divide`` has returned."""
        self._brought[bucket] = summed
        self._bring(bucket, summed)

    @torch.no_grad()
    def norms(self, pieces: Mapping[int, Tensor]) -> dict[int, float]:
        """Of each of these that was brought, by bucket, as it was."""
        there = [bucket for bucket, piece in pieces.items() if self._brought.get(bucket) is piece]
        norms = [torch.linalg.vector_norm(self.vector.buckets[bucket]) for bucket in there]
        known = zip(there, torch.stack(norms).tolist() if norms else [], strict=True)
        return {bucket: finite_norm(norm, self.vector.buckets[bucket]) for bucket, norm in known}

    def bring_nothing(self) -> None:
        """The next ``divide`` reads all that it is given."""
        self._brought.clear()

    @torch.no_grad()
    def divide(self, sums: Sequence[Tensor], present: Sequence[bool], divisor: float) -> float:
        """Bring each bucket's sum here, into ``vector``, and divide it; the square of the gradients' norm.

        All are brought, then all are divided: a copy as a bucket comes costs the worker's process nothing, while each
        kernel takes the device from it.
        """
        for bucket in self._buckets:
            if present[bucket]:
                if self._brought.get(bucket) is not sums[bucket]:
                    self._bring(bucket, sums[bucket])
            else:
                self.vector.buckets[bucket].zero_()
        self._brought.clear()
        flat = [self.vector.group(group).div_(divisor) for group in self._there]
        # What waits for the device.
        return sum(finite_norm(float(torch.linalg.vector_norm(group)), group) ** 2 for group in flat)

    def _bring(self, bucket: int, summed: Tensor) -> None:
        if self._pins and is_mapped(summed) and not summed.is_pinned():
            self._pins = pin_around(summed, slot_bytes(self.layout), self.device)
        self.vector.buckets[bucket].copy_(summed, non_blocking=True)

    def publish(self, buckets: Iterable[int]) -> None:
        """The optimizer has stepped: ``state`` gets the new values of these buckets, which hold parameters."""
        with torch.no_grad():
            for group, begin, end in runs(self.layout, buckets):
                self._state.groups[group][begin:end].copy_(self._there[group][begin:end], non_blocking=True)
        if self._cuda is not None:
            self._cuda.current_stream(self.device).synchronize()
