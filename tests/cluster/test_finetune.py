"""examples/finetune.py: the loss falls, with a worker that has no code, and transformers loads what is saved."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.support.cluster import QUICK_WORKER, settings
from torch import nn
from tqdm import tqdm

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.job import Job, load_job
from w5xde_async.telemetry.events import Bus, StepCommitted
from w5xde_async.worker.service import Departure, Worker

STEPS = 12
#: peft asks transformers by a name that is to go.
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # the bars of transformers would leave a thread behind


def example(name: str) -> tuple[Job, ModuleType]:
    """A job of the example, and the module that it comes from."""
    job = load_job(f"examples/finetune.py:{name}")
    return replace(job, max_steps=STEPS), sys.modules[job.model.__module__]


async def train(job: Job, run_dir: Path) -> tuple[list[float], nn.Module]:
    """The losses, and the model, that a worker without any code has trained."""
    losses: list[float] = []
    bus = Bus()
    bus.subscribe(lambda event: losses.append(event.loss) if isinstance(event, StepCommitted) else None)
    config = settings(code_free=True, max_time_s=100.0)
    async with Coordinator(job, run_dir=run_dir, config=config, bus=bus) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=None, config=QUICK_WORKER).run())
        assert (await coordinator.wait()).outcome == "finished"
        assert await worker is Departure.FINISHED
        return losses, coordinator.model.eval()


TEXT = torch.arange(40).reshape(2, 20)


@pytest.mark.slow
def test_all_of_a_model_is_trained_and_transformers_loads_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # here: whoever runs other tests need not wait for it

    job, module = example("job")
    losses, model = asyncio.run(train(job, tmp_path / "run"))
    assert losses[-1] < losses[0] - 0.3
    module.save(tmp_path / "run" / "model.safetensors", tmp_path / "tuned", lora=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert torch.equal(loaded(TEXT).logits, model(TEXT).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tuned")
    assert tokenizer("import torch").input_ids == module.tokenizer()("import torch").input_ids


@pytest.mark.slow
def test_lora_trains_the_adapter_alone_and_transformers_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    _, module = example("job")
    module.base().save_pretrained(tmp_path / "base")
    module.tokenizer().save_pretrained(tmp_path / "base")
    monkeypatch.setenv("BASE", str(tmp_path / "base"))

    job, module = example("lora")
    losses, model = asyncio.run(train(job, tmp_path / "run"))
    assert losses[-1] < losses[0] - 0.1
    module.save(tmp_path / "run" / "model.safetensors", tmp_path / "adapted", lora=True)
    base, merged = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("base", "adapted"))
    torch.testing.assert_close(merged(TEXT).logits, model(TEXT).logits)
    # The base and the adapter alone make the trained model: nothing else of it has changed.
    again = PeftModel.from_pretrained(base, tmp_path / "adapted" / "adapter").eval()
    assert torch.equal(again(TEXT).logits, model(TEXT).logits)
