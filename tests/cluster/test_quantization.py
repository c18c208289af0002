"""Quantization-aware training by torch's own means: its kernels change buffers without counting, some only later."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from tests.support.cluster import train
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async.errors import LeafFailed
from w5xde_async.job import Job

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # of deprecations, and it imports a second long
STEPS = 12


def prepared(engine: str, *, run_once: bool) -> nn.Module:
    from torch.ao import quantization as q

    model = nn.Sequential(q.QuantStub(), nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1), q.DeQuantStub()).train()
    model.qconfig = q.get_default_qat_qconfig(engine)  # type: ignore[assignment]
    made: nn.Module = q.prepare_qat(model)
    if run_once:
        made(torch.zeros(2, 6))
    return made


def job(engine: str, *, run_once: bool) -> Job:
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(0))
    return Job(
        model=partial(prepared, engine, run_once=run_once), dataset=TensorDataset(x, x.sum(1, keepdim=True)),
        loss=nn.functional.mse_loss, optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.05), batch_size=32,
        microbatch_size=8, max_steps=STEPS,
    )  # fmt: skip


# With the weights as they were when the model was run once, the first leaf changes nothing of what observes them; and
# what observes by "qnnpack" begins at infinity.
@pytest.mark.parametrize(("engine", "run_once"), [("fbgemm", True), ("qnnpack", False), ("qnnpack", True)])
async def test_the_same_bits_with_any_number_of_workers_and_after_a_stop(
    tmp_path: Path, engine: str, run_once: bool
) -> None:
    make = partial(job, engine, run_once=run_once)
    alone = await train(make, run_dir=tmp_path / "whole")
    both = await train(make, workers=2)
    await train(make, run_dir=tmp_path / "run", max_steps=5)
    again = await train(make, workers=2, run_dir=tmp_path / "run")
    assert alone.step == again.step == STEPS
    assert alone.digest == both.digest == again.digest
    from safetensors.torch import load_file

    began, ended = make().model().state_dict(), load_file(str(tmp_path / "whole" / "model.safetensors"))  # type: ignore[operator]
    moved = [name for name, value in began.items() if name.endswith("scale") and not torch.equal(value, ended[name])]
    assert len(moved) >= 3


async def test_a_buffer_that_forward_resizes_is_named() -> None:
    """By channels ("fbgemm") it does so in its first call."""
    one = r"'1\.weight_fake_quant\.scale' from \[1\] to \[12\]"
    resized = rf"forward resized buffer {one}, '.*' from .* and \d+ more; a buffer keeps"
    with pytest.raises(LeafFailed, match=resized):
        await train(partial(job, "fbgemm", run_once=False))
