"""The memory report on CUDA: PyTorch's snapshot, looked at without unpickling anything."""

from __future__ import annotations

import pickletools
from pathlib import Path

import pytest
import torch

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
