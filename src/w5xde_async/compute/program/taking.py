"""Which leaves a program takes, told by the sizes of their batches before anybody is sent them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from w5xde_async.compute.batch import flatten, leaves_of, microbatches
from w5xde_async.compute.program.form import Program
from w5xde_async.compute.program.interpreter import fits
from w5xde_async.wire.frame import BufferSpec

_MOST_KNOWN = 4096


class Taking:
    """What ``program`` takes of batches that are computed ``microbatch`` samples at a time."""

    def __init__(self, program: Program, microbatch: int) -> None:
        self._graphs, self._structure, self._microbatch = program.graphs, program.structure, microbatch
        self._known: dict[tuple[object, ...], tuple[tuple[int, str], ...]] = {}

    def refused(
        self, structure: bytes, specs: Sequence[BufferSpec], samples: Sequence[int]
    ) -> tuple[tuple[int, str], ...]:
        """Leaves of a lease, numbered from its first on, that no graph takes, and what they are.

        The batch is as in LEASE, and not packed: rows of one kind of tensor have the sizes that were traced.
        """
        key = (structure, tuple(samples), tuple([(spec.dtype, spec.shape) for spec in specs]))
        if (known := self._known.get(key)) is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = self._find(structure, specs, samples)
        return known

    def _find(
        self, structure: bytes, specs: Sequence[BufferSpec], samples: Sequence[int]
    ) -> tuple[tuple[int, str], ...]:
        tensors = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs]
        found = []
        for number, (count, batch) in enumerate(leaves_of(structure, tensors, samples, packed=False)):
            for _, _, piece in microbatches(batch, count, self._microbatch):
                own, parts = flatten(piece)
                if own != self._structure:
                    found.append((number, "with another structure, or other numbers and strings, than was traced"))
                    break
                if not any(fits(graph, parts) for graph in self._graphs):
                    sizes = [f"{str(part.dtype).removeprefix('torch.')}{list(part.shape)}" for part in parts]
                    found.append((number, f"of {', '.join(sizes)}"))
                    break
        return tuple(found)
