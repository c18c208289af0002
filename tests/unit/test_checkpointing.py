"""Gradient checkpointing without the model's code: as little is kept for backward as the model itself keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from shutil import which
from typing import Any

import pytest
import torch
from tests.support.programs import document, load, v
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import TensorDataset

from w5xde_async.compute.program.form import Document, Program, parse
from w5xde_async.compute.program.interpreter import measure
from w5xde_async.compute.program.program_job import ProgramStep
from w5xde_async.compute.program.tracing import probe_batches, trace
from w5xde_async.errors import ProgramRefused
from w5xde_async.job import Job, StepFunction, build_model, step_function
from w5xde_async.params.layout import Layout

CPU = torch.device("cpu")
WIDTH, SAMPLES, DEPTH = 64, 32, 6
ONE = SAMPLES * WIDTH * 4  #: bytes of one layer's result

pytestmark = pytest.mark.timeout(90)  # tracing takes seconds where other processes compute


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Dropout(0.1))


class Deep(nn.Module):
    """``how``: "plain", "not reentrant", "reentrant", "sequential" or "nested"."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(WIDTH, WIDTH), nn.Sequential(*[block() for _ in range(DEPTH)])
        self._how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        if self._how == "plain":
            x = self.blocks(x)
        elif self._how == "sequential":
            x = checkpoint_sequential(self.blocks, 3, x, use_reentrant=False)
        elif self._how == "nested":
            x = checkpoint(self._both, x, use_reentrant=False)
        else:
            for one in self.blocks:
                x = checkpoint(one, x, use_reentrant=self._how == "reentrant")
        return x

    def _both(self, x: Tensor) -> Tensor:
        for one in self.blocks:
            x = checkpoint(one, x, use_reentrant=False)
        return x


@cache
def made(how: str) -> tuple[nn.Module, Job, Layout, Document]:
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH))
    job = Job(
        model=lambda: Deep(how), dataset=data, loss=F.mse_loss, batch_size=SAMPLES, max_steps=2, seed=3,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
    )  # fmt: skip
    model = build_model(job)
    layout = Layout.of(model)
    return model, job, layout, trace(job, model, layout, probe_batches(job, [SAMPLES]))


def program_step(document: Document, layout: Layout, memory_bytes: int = 1 << 30) -> ProgramStep:
    return ProgramStep(parse(document, layout), layout, CPU, memory_bytes=memory_bytes)


def kept(model: nn.Module, step: StepFunction | ProgramStep, batch: Any) -> int:
    """Bytes of results that forward keeps for backward: what autograd saves outside of regions."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = step(model, batch)
    loss.backward()
    return sum(storages.values())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["not reentrant", "reentrant", "sequential", "nested"])
def test_as_little_is_kept_as_the_model_keeps(how: str) -> None:
    model, job, layout, document = made(how)
    batch = job.dataset.tensors
    own = kept(model, step_function(job), batch)
    without_code = kept(model, program_step(document, layout), batch)
    plain_model, _, plain_layout, plain = made("plain")
    everything = kept(plain_model, program_step(plain, plain_layout), batch)
    assert everything > 3 * DEPTH * ONE
    assert own < everything / 2
    assert without_code <= own


def bound(document: Document, layout: Layout) -> int:
    program: Program = parse(document, layout)
    entries = [(entry.dtype, entry.shape) for entry in layout.entries]
    batch = [(torch.float32, (SAMPLES, WIDTH))] * 2
    return measure(program, program.graphs[0], entries, batch, memory_bytes=1 << 40).total


@pytest.mark.slow
def test_a_worker_with_too_little_memory_for_all_activations_takes_a_program_that_keeps_few() -> None:
    *_, plain_layout, plain = made("plain")
    *_, layout, regions = made("not reentrant")
    needed = bound(regions, layout)
    assert needed < bound(plain, plain_layout) / 2
    program_step(regions, layout, memory_bytes=needed)
    with pytest.raises(ProgramRefused, match="need more than"):
        program_step(plain, plain_layout, memory_bytes=needed)
    with pytest.raises(ProgramRefused, match="need more than"):
        program_step(regions, layout, memory_bytes=needed - 1)


def test_a_region_that_backward_needs_counts_beside_what_was_kept_before_and_after_it() -> None:
    """Two regions one after the other: the larger is back when all the rest is there."""
    zeros = ("zeros.default", [[5, [1 << 20]]])  # 4 MiB
    calls = [("recompute", [2, True, False]), zeros, ("sum.default", [v(8)]), zeros]
    load(document(*calls), memory_bytes=9 << 20)
    with pytest.raises(ProgramRefused, match="need more than"):
        load(document(*calls), memory_bytes=7 << 20)
    load(document(*calls[:3], *calls[:2], ("sum.default", [v(11)])), memory_bytes=5 << 20)


_PEAKS = """
import torch
from tests.support.resident import forget_peak, peak_bytes
from tests.unit import test_checkpointing as test
test.DEPTH, test.WIDTH = 12, 256
batch = tuple(torch.randn(4096, 256) for _ in range(2))
for how in ("not reentrant", "plain"):
    model, _, layout, document = test.made(how)
    step = test.program_step(document, layout, memory_bytes=1 << 34)
    before = forget_peak()
    for _ in range(2):
        loss, _ = step(model, batch)
        loss.backward()
    print(peak_bytes() - before)
"""


_COMPILED = """
import torch
from tests.unit import test_checkpointing as test
test.DEPTH = 2
model, job, layout, document = test.made("not reentrant")
step, batch = test.program_step(document, layout), job.dataset.tensors
options = {"fallback_random": True, "compile_threads": 1, "cpp.simdlen": 1}  # no vectors: g++ takes half as long
compiled, losses = step.compiled(options), []
assert test.kept(model, compiled, batch) <= test.kept(model, step, batch)
for one in (step, compiled):
    torch.manual_seed(1)
    losses.append(one(model, batch)[0].detach())
assert torch.allclose(*losses)  # the same random numbers
print("as little")
"""


def printed(script: str, **environment: str) -> str:
    """What ``script`` prints, in a process of its own."""
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, "-c", script]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=80, env=environment).stdout


@pytest.mark.slow
@pytest.mark.skipif(not any(map(which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler")
def test_compiled_it_keeps_as_little() -> None:
    assert printed(_COMPILED, TORCHINDUCTOR_VEC_ISA_OK="1").split()[-2:] == ["as", "little"]


@pytest.mark.slow
def test_a_process_without_the_code_takes_less_memory() -> None:
    """Large tensors get pages of their own: what glibc keeps of freed ones would hide what is in use."""
    with_regions, plain = map(int, printed(_PEAKS, MALLOC_MMAP_THRESHOLD_="1000000").split())
    assert with_regions < 0.5 * plain
    assert plain > 3 * 12 * (4096 * 256 * 4)  # else nothing was measured
