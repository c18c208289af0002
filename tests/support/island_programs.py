"""Programs for islands: traced by one rank, read by all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import safetensors.torch
import torch
from tests.support.islands import BUCKET_BYTES
from torch import nn

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
            _traced[key] = _kept(job, layout, sizes) or _trace(job, model, layout, sizes)
        text, constants = _traced[key]
    text, constants = group.bytes_of_all(text)[0], group.bytes_of_all(constants)[0]
    held = safetensors.torch.load(constants)
    tensors: list[torch.Tensor] = [held[str(number)] for number in range(len(held))]
    program = parse(Document(text, tuple(tensors)), layout)
    return cut(program, layout, precision=job.precision, memory_bytes=1 << 32)


def _trace(job: Job, model: nn.Module, layout: Layout, sizes: Sequence[int]) -> tuple[bytes, bytes]:
    document = trace(job, model, layout, probe_batches(job, list(sizes)))
    constants = safetensors.torch.save({str(n): t.contiguous() for n, t in enumerate(document.constants)})
    place = _place(job, layout, sizes)
    if place is not None:
        for suffix, data in ((".text", document.text), (".constants", constants)):
            written = place.with_suffix(f".{uuid4().hex}")
            written.write_bytes(data)
            written.rename(place.with_suffix(suffix))
    return document.text, constants


def _kept(job: Job, layout: Layout, sizes: Sequence[int]) -> tuple[bytes, bytes] | None:
    place = _place(job, layout, sizes)
    if place is None or not place.with_suffix(".constants").exists():
        return None
    return place.with_suffix(".text").read_bytes(), place.with_suffix(".constants").read_bytes()


def _place(job: Job, layout: Layout, sizes: Sequence[int]) -> Path | None:
    """Where whoever else traces it in this run of the tests finds it, for models and steps whose names say all.

    The folder is the fork server's, and goes with it.
    """
    made_of = [f"{part.__module__}.{getattr(part, '__qualname__', '<')}" for part in (job.model, job.step or job.loss)]
    if "TESTS_TRACED" not in os.environ or any("<" in name for name in made_of):
        return None
    said = repr((made_of, job.precision, job.seed, tuple(sizes), layout.fingerprint))
    return Path(os.environ["TESTS_TRACED"]) / f"traced-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
