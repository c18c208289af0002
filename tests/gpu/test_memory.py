"""The memory report on CUDA: PyTorch's snapshot, looked at without unpickling anything."""

from __future__ import annotations

import pickletools
from pathlib import Path

import pytest
import torch
from tests.unit.test_checkpointing import WIDTH, made

from w5xde_async.compute.program.form import parse
from w5xde_async.compute.program.program_job import ProgramStep
from w5xde_async.telemetry.memory import MemoryReport, device_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA is not available"),
]


def test_a_snapshot_has_what_the_viewer_reads(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    report = MemoryReport(device)
    assert report.on_cuda
    report.begin()
    report.begin()
    try:
        kept = torch.ones(1 << 20, device=device)
        path = report.write(tmp_path / "reports", "worker-1")
    finally:
        report.end()
        report.end()
    assert path.suffix == ".pickle"
    assert device_memory(device).used_bytes >= kept.nbytes
    texts = [argument for _, argument, _ in pickletools.genops(path.read_bytes()) if isinstance(argument, str)]
    assert {"segments", "device_traces", "alloc"} <= set(texts)
    assert any("test_memory.py" in text for text in texts)  # where it was allocated


def test_a_program_with_gradient_checkpointing_takes_less_memory() -> None:
    """Blocks of 5 results of 16 MiB each: with regions one of them is kept of each block."""
    device, peaks = torch.device("cuda", 0), {}
    for how in ("plain", "not reentrant"):
        model, job, layout, document = made(how)
        step = ProgramStep(parse(document, layout), layout, device, memory_bytes=1 << 34)
        model.to(device)
        batch = tuple(torch.randn(1 << 16, WIDTH, device=device) for _ in job.dataset.tensors)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)  # cuBLAS's workspace, gradients of the one before
        loss, _ = step(model, batch)
        loss.backward()
        peaks[how] = torch.cuda.max_memory_allocated(device) - held
        del loss, step, batch
    assert peaks["not reentrant"] < 0.6 * peaks["plain"]
