"""``--init-from``: a run that begins with a file's weights, which the coordinator alone has."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import math
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.support import jobs
from tests.support.cluster import QUICK_WORKER, settings, train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from w5xde_async.coordinator.run.warm_start import begin_with
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import UsageError
from w5xde_async.job import Job
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.telemetry.events import Event, Warned
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.service import Departure, Worker


def pretrained() -> nn.Linear:
    model = nn.Linear(10, 4)
    with torch.no_grad():
        model.weight.copy_(torch.arange(40.0).view(4, 10).sin())
        model.bias.fill_(0.25)
    return model


def job() -> Job:
    return replace(jobs.metrics(), max_steps=3, epochs=None)


def saved(path: Path) -> Path:
    safetensors.torch.save_file(pretrained().state_dict(), path)
    return path


async def test_the_run_is_that_of_a_model_made_with_these_weights(tmp_path: Path) -> None:
    """To the bit; and the job that workers load knows nothing of the file."""
    events: list[Event] = []
    expected = await train(lambda: replace(job(), model=pretrained))
    result = await train(job, workers=2, events=events, init_from=saved(tmp_path / "a.safetensors"))
    assert result.digest == expected.digest != (await train(job)).digest
    assert f"the run begins with the weights of {tmp_path}/a.safetensors" in texts(events)


def texts(events: list[Event]) -> str:
    return "\n".join(event.text for event in events if isinstance(event, Warned))


@pytest.mark.parametrize("rule", ["async", "local", "streaming", "async-local"])
async def test_under_other_rules_too_nothing_falls_back_to_the_models_own_beginning(tmp_path: Path, rule: str) -> None:
    """Outer optimizers and links keep copies of the parameters: with a rate of 0 the run ends where it begins."""

    def still() -> Job:
        return replace(job(), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0))

    update = UpdateConfig(rule=rule, **({} if rule == "async" else {"inner_steps": 1}))
    result = await train(still, run_dir=tmp_path / "run", update=update, init_from=saved(tmp_path / "a.safetensors"))
    assert result.model_path is not None
    weights = safetensors.torch.load_file(result.model_path)
    torch.testing.assert_close(weights, dict(pretrained().state_dict()))


async def test_workers_without_the_code_begin_there_too(tmp_path: Path) -> None:
    plain = replace(job(), step=None, loss=nn.functional.cross_entropy)
    config = settings(code_free=True, init_from=saved(tmp_path / "a.safetensors"))
    async with Coordinator(plain, config=config) as coordinator:
        worker = asyncio.create_task(Worker(coordinator.address, job=None, config=QUICK_WORKER).run())
        result, departure = await asyncio.gather(coordinator.wait(), worker)
    assert departure is Departure.FINISHED
    assert result.digest == (await train(lambda: replace(plain, model=pretrained))).digest


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
async def test_a_resume_goes_on_from_its_checkpoint_and_needs_no_file(tmp_path: Path, durability: str) -> None:
    path, run, events = saved(tmp_path / "a.safetensors"), tmp_path / "run", []  # type: list[Event]
    whole = await train(job, init_from=path)
    await train(job, run_dir=run, max_steps=2, init_from=path, durability=durability)
    path.unlink()
    result = await train(job, run_dir=run, init_from=path, durability=durability, events=events)
    assert result.digest == whole.digest
    assert "--init-from is for the beginning of a run; this one goes on from its checkpoint" in texts(events)
    with pytest.raises(UsageError, match="cannot be read"):
        await train(job, run_dir=run, resume="never", init_from=path)


async def test_the_best_of_one_run_begins_another(tmp_path: Path) -> None:
    scored = replace(job(), evaluate=lambda model: {"loss": 1.0}, evaluate_every=1, keep_best="loss")
    first = await train(lambda: scored, run_dir=tmp_path / "run")
    assert first.best is not None
    model = nn.Linear(10, 4)
    safetensors.torch.load_model(model, first.best.path)
    again = await train(job, init_from=first.best.path)
    assert again.digest == (await train(lambda: replace(job(), model=lambda: copy.deepcopy(model)))).digest


# -- what a file may hold


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5)
        self.head.weight = self.embed.weight


def state_of(model: nn.Module) -> FlatState:
    state = FlatState(Layout.of(model))
    state.copy_from(model)
    state.adopt(model)
    return state


def begun(tensors: dict[str, Tensor], path: Path) -> Tied:
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    model = Tied()
    begin_with(state_of(model), path)
    return model


def test_tied_weights_stand_in_a_file_under_either_name_and_precisions_are_cast(tmp_path: Path) -> None:
    given = {name: tensor.clone() for name, tensor in Tied().state_dict().items()}
    del given["embed.weight"]
    given["head.bias"] = given["head.bias"].to(torch.float64)
    given["norm.num_batches_tracked"].fill_(7)
    model = begun(given, tmp_path / "a.safetensors")
    assert torch.equal(model.embed.weight, given["head.weight"])
    assert model.head.weight is model.embed.weight
    assert model.head.bias.dtype == torch.float32
    assert model.norm.num_batches_tracked == 7


def test_tied_weights_that_are_two_in_a_file_are_refused(tmp_path: Path) -> None:
    given = {name: tensor.clone() for name, tensor in Tied().state_dict().items()}
    given["embed.weight"][0, 0] = math.nan
    given["head.weight"] = given["embed.weight"].clone()
    begun(given, tmp_path / "a.safetensors")
    given["head.weight"][1, 1] += 1
    with pytest.raises(UsageError, match=r"one tensor of the model's is two in it: embed\.weight and head\.weight$"):
        begun(given, tmp_path / "a.safetensors")


def test_the_first_differences_are_named_in_one_line_and_nothing_changes(tmp_path: Path) -> None:
    path, model = tmp_path / "a.safetensors", Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    given = {name: tensor.clone() + 1 for name, tensor in before.items() if not name.startswith("norm")}
    given["head.bias"] = torch.zeros(7)
    given["head.weight"] = given.pop("embed.weight").to(torch.int64)
    safetensors.torch.save_file(given | {f"fc.{number}": torch.zeros(1) for number in range(5)}, path)
    with pytest.raises(UsageError) as caught:
        begin_with(state_of(model), path)
    assert str(caught.value) == (
        f"--init-from: {path} is of another model: it lacks norm.weight, norm.bias, norm.running_mean and 2 more; "
        "the model lacks fc.0, fc.1, fc.2 and 2 more; embed.weight is int64 [5, 3], the model's is float32 [5, 3], "
        "head.bias is float32 [7], the model's is float32 [5]"
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("legacy", [False, True])
def test_what_torch_saved_is_refused_unread_with_the_command_that_converts_it(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "a.pt"
    torch.save(OrderedDict(pretrained().state_dict()), path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UsageError, match=r"is a file of torch\.save, which may run code") as caught:
        begin_with(state_of(nn.Linear(10, 4)), path)
    command = str(caught.value).partition('python -c "')[2].rstrip('"')
    exec(command)
    model = nn.Linear(10, 4)
    begin_with(state_of(model), path.with_suffix(".safetensors"))
    assert torch.equal(model.weight, pretrained().weight)


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", hashlib.sha256(b"").digest() * 9])
def test_a_file_of_no_kind_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="is no whole safetensors file") as caught:
        begin_with(state_of(nn.Linear(1, 1)), path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="cannot be read"):
        begin_with(state_of(nn.Linear(1, 1)), tmp_path)


def test_a_header_of_any_length_is_not_taken_for_a_pickle(tmp_path: Path) -> None:
    """The first byte of a file is the lowest of its header's length, which may be a pickle's 0x80."""
    seen = set()
    for padding in range(0, 512, 8):
        path = tmp_path / "a.safetensors"
        safetensors.torch.save_file(pretrained().state_dict(), path, {"note": "x" * padding})
        seen.add(path.read_bytes()[0])
        begin_with(state_of(nn.Linear(10, 4)), path)
    assert 0x80 in seen


async def test_what_followed_from_the_arithmetic_is_kept_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves, and threads of local workers: counted anew, or by other rules, they would change the bits."""
    given = replace(jobs.mlp_sgd(), microbatch_size=None, max_steps=4, epochs=None)
    found = []
    for steps, worth in ((2, 1), (4, 10**12)):
        for limit in ("WORTH_FLOPS", "WORTH_SHARING_FLOPS", "WORTH_FLOPS_A_PARAMETER"):
            monkeypatch.setattr(f"w5xde_async.compute.leaf_size.{limit}", worth)  # as of another version
        config = settings(max_steps=steps)
        async with Coordinator(given, run_dir=tmp_path / "run", config=config) as coordinator:
            worker = asyncio.create_task(Worker(coordinator.address, job=given, config=QUICK_WORKER).run())
            await coordinator.wait()
            await worker
            assert coordinator._prepared is not None
            spec = coordinator._prepared.spec
            found.append((coordinator.has_short_leaves, spec.step_flops, spec.job.microbatch_size))
    assert found[0] == found[1]
    assert found[0][0]
    assert found[0][1] > 0
    assert found[0][2] == -(-given.batch_size // 8)


@pytest.mark.parametrize(("rows", "width", "given", "one"), [
    (1, 8, None, True), (1, 900, None, True), (2_000_000, 8, None, False), (1, 2048, None, False), (1, 8, 4, False),
])  # fmt: skip
async def test_whether_one_thread_computes_a_leaf(rows: int, width: int, given: int | None, one: bool) -> None:
    """Not where there is much to compute, nor much to clear and to add, nor where nothing was counted."""

    def model() -> nn.Module:
        wide = nn.Linear(width, width, bias=False).requires_grad_(False)
        return nn.Sequential(nn.Embedding(rows, width), wide, nn.Linear(width, 4))

    data = TensorDataset(torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64))
    told = Job(
        model=model, dataset=data, loss=nn.functional.cross_entropy, batch_size=64, max_steps=1, microbatch_size=given,
        optimizer=lambda model: torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1),
    )  # fmt: skip
    async with Coordinator(told, config=settings()) as coordinator:
        assert coordinator.has_short_leaves == one
