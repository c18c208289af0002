"""Programs for islands: traced by one rank, read by all."""

from __future__ import annotations

from collections.abc import Sequence

import safetensors.torch
import torch
from tests.support.islands import BUCKET_BYTES

from w5xde_async.compute.program.atoms import Atoms, cut
from w5xde_async.compute.program.form import Document, parse
from w5xde_async.compute.program.tracing import probe_batches, trace
from w5xde_async.job import Job, build_model
from w5xde_async.parallel.group import Group
from w5xde_async.params.layout import Layout

_traced: dict[tuple[object, ...], tuple[bytes, bytes]] = {}  # what cases before have had traced


def atoms_of(job: Job, group: Group, sizes: Sequence[int] = (4, 3, 2), bucket_bytes: int = BUCKET_BYTES) -> Atoms:
    """A job's program for microbatches of these sizes, in atoms."""
    model = build_model(job, replica=True)
    layout = Layout.of(model, bucket_bytes=bucket_bytes)
    text, constants = b"", b""
    if group.rank == 0:
        key = (job.model, job.step, job.loss, job.precision, *sizes, bucket_bytes)  # the same objects: the same program
        if key not in _traced:
            document = trace(job, model, layout, probe_batches(job, list(sizes)))
            held_by = {str(n): t.contiguous() for n, t in enumerate(document.constants)}
            _traced[key] = document.text, safetensors.torch.save(held_by)
        text, constants = _traced[key]
    text, constants = group.bytes_of_all(text)[0], group.bytes_of_all(constants)[0]
    held = safetensors.torch.load(constants)
    tensors: list[torch.Tensor] = [held[str(number)] for number in range(len(held))]
    return cut(parse(Document(text, tuple(tensors)), layout), layout, memory_bytes=1 << 32)
