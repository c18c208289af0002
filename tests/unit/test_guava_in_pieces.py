"""Guava's configuration of a model in pieces: what each field comes to, and what is refused by its name."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch
from tests.support import jobs
from tests.support.cluster import settings
from tests.support.facade import no_secret_of_this_machine
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import UsageError
from w5xde_async.facade.calling import NodeLines
from w5xde_async.facade.guava import DistributedConfig, NetworkWorker, Orchestrator
from w5xde_async.facade.guava.config import WORDS
from w5xde_async.facade.guava.loaders import reading_of
from w5xde_async.parallel.shape import IslandShape
from w5xde_async.runtime import Runtime
from w5xde_async.settings import WorkerSettings, read
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.dialing import Dialer

__all__ = ["no_secret_of_this_machine"]


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(48, 4), torch.zeros(48, dtype=torch.int64)), batch_size=8)


@pytest.mark.parametrize(
    ("fields", "island", "batches"),
    [
        ({}, "", 4),
        ({"model_parallel": True}, "pp=4", 1),
        ({"model_parallel": True, "micro_batches": 4}, "pp=4", 1),
        ({"pipeline_parallel": True}, "pp=4", 4),
        ({"pipeline_parallel": True, "micro_batches": 6}, "pp=4", 6),
        ({"model_parallel": True, "pipeline_parallel": True, "micro_batches": 2}, "pp=4", 2),
        ({"pipeline_parallel": True, "data_parallel": False, "micro_batches": 2}, "pp=4", 2),
        ({"tensor_parallel": True}, "tp=2", 2),
        ({"tensor_parallel": True, "tensor_parallel_size": 4}, "tp=4", 1),
        ({"tensor_parallel": True, "model_parallel": True}, "tp=4", 1),
        ({"tensor_parallel": True, "pipeline_parallel": True, "micro_batches": 3}, "tp=4", 3),
    ],
)
def test_what_the_workers_form_and_how_many_batches_make_a_step(
    fields: dict[str, Any], island: str, batches: int
) -> None:
    """As in Guava's document: a step is ``batch_size * micro_batches`` samples under pipeline parallelism."""
    config = DistributedConfig(num_workers=4, batch_size=8, **fields)
    job = Orchestrator(config)._job(nn.Linear(4, 2), reading_of(loader(), config, seed=0), 1, None, None)
    assert (job.batch_size, job.microbatch_size) == (8 * batches, 8)
    settings = config.coordinator_config()
    assert settings.island == island
    ranks = IslandShape.parse(island).ranks if island else 1
    assert settings.min_workers == 4 // ranks  # an island is one worker
    assert config.island_of_all == ("dp=2,tp=2" if island == "tp=2" else island)
    assert settings.max_workers == (256 if config.data_parallel else 1)


def test_batches_in_their_own_order_make_steps_of_as_many() -> None:
    config = DistributedConfig(num_workers=2, pipeline_parallel=True, micro_batches=3)
    given = reading_of(
        DataLoader(loader().dataset, batch_size=2, sampler=SubsetRandomSampler(range(14))), config, seed=0
    )
    assert given.steps_per_epoch == 3  # 7 batches, 3 a step


def test_a_pipeline_has_a_whole_step_in_one_lease() -> None:
    """In smaller leases its stages would wait for each other."""
    split = DistributedConfig(num_workers=2, pipeline_parallel=True).coordinator_config()
    assert split.pacing.target_lease_s >= 3600
    assert DistributedConfig(num_workers=2).coordinator_config().pacing.target_lease_s < 1


@pytest.mark.parametrize("kind", ["model_parallel", "pipeline_parallel"])
def test_one_worker_has_nothing_to_share_a_model_with(kind: str) -> None:
    with pytest.raises(UsageError, match=f"^{kind}=True with num_workers=1: .* give num_workers=2 or more"):
        Orchestrator(DistributedConfig(**{kind: True}))
    NetworkWorker(0, DistributedConfig(**{kind: True}))  # how many there are is the orchestrator's to say


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_workers": 1}, "with num_workers=1: .* give num_workers=2 or more"),
        ({"num_workers": 3}, "num_workers=3 with tensor_parallel_size=2: .* a multiple of it"),
        ({"num_workers": 4, "tensor_parallel_size": 1}, "with tensor_parallel_size=1: "),
        (
            {"num_workers": 4, "data_parallel": False},
            "data_parallel=False .* give num_workers=2, or data_parallel=True",
        ),
    ],
)
def test_islands_of_tensor_parallel_size_come_out_even(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Orchestrator(DistributedConfig(tensor_parallel=True, **fields))


@pytest.mark.parametrize("fields", [{"codec": "int8"}, {"codec": "auto"}, {"downlink": "fp16"}])
def test_islands_send_everything_as_it_is(fields: dict[str, str]) -> None:
    ((name, value),) = fields.items()
    with pytest.raises(UsageError, match=f"^{name}='{value}' with model_parallel=True: "):
        Orchestrator(DistributedConfig(num_workers=2, model_parallel=True, **fields))  # type: ignore[arg-type]


def test_a_device_for_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DistributedConfig(num_workers=4, model_parallel=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match=r"num_workers=4 parts .* 2 GPUs: give num_workers=2"):
        Orchestrator(config)
    Orchestrator(config, mode="orchestrator")  # they are on other machines
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    Orchestrator(config)


def test_what_a_whole_model_takes_is_not_told_of_one_in_pieces() -> None:
    orchestrator = Orchestrator(DistributedConfig(num_workers=2, model_parallel=True))
    orchestrator.register_model(nn.Linear(4, 2))
    with pytest.raises(UsageError, match=r"w5xde memory .*docs/islands\.md"):
        orchestrator.predict(loader())


def test_fields_without_an_effect_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Orchestrator(DistributedConfig(num_workers=2, model_parallel=True, micro_batches=8))
    assert "micro_batches has no effect without pipeline_parallel: leave it out; " in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        Orchestrator(DistributedConfig(num_workers=2, pipeline_parallel=True, micro_batches=8))
    assert "micro_batches" not in caplog.text
    with caplog.at_level(logging.WARNING):
        Orchestrator(DistributedConfig(num_workers=3, tensor_parallel=True, tensor_parallel_size=3))
        assert "tensor_parallel_size" not in caplog.text
        Orchestrator(
            DistributedConfig(num_workers=2, tensor_parallel=True, tensor_parallel_size=3, model_parallel=True)
        )
    assert "tensor_parallel_size has no effect: leave it out; " in caplog.text


class Elsewhere:
    """A dialer that knows an orchestrator of another machine."""

    is_here = False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, 'give sandbox="off" where you trust'),
        ({"sandbox": "on"}, "have no sandbox"),
        ({"sandbox": "off"}, 'interface="NAME"'),
    ],
)
def test_off_the_orchestrators_machine_a_member_is_asked_whom_it_trusts(words: dict[str, Any], said: str) -> None:
    worker = NetworkWorker(0, DistributedConfig(master_ip="10.0.0.1"), **words)
    with pytest.raises(UsageError, match=said) as refused:
        asyncio.run(worker._as_member(IslandShape("pp", 2), Elsewhere(), NodeLines("silent", WORDS)))  # type: ignore[arg-type]
    assert "2 workers together (pp=2)" in str(refused.value)
    assert "\n" not in str(refused.value)


async def test_a_worker_hears_what_the_run_wants() -> None:
    for island in ("", "pp=2"):
        async with Coordinator(jobs.mlp_sgd(), config=settings(island=island)) as coordinator:
            dialer = Dialer(coordinator.address, WorkerConfig(), Runtime())
            assert await dialer.island() == island
            assert coordinator.num_workers == 0


def test_its_secrets_are_in_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the process that computes; the environment of this one names none but those given."""
    monkeypatch.setenv("W5XDE_TOKEN_FILE", "/somewhere")
    worker = NetworkWorker(0, DistributedConfig(), token="a token that is long enough 1234", sandbox="off")
    arguments, environment = worker._of_rank(IslandShape("pp", 2), "localhost:29500")
    assert "a token that is long enough 1234" not in arguments
    assert environment["W5XDE_TOKEN"] == "a token that is long enough 1234"
    assert "W5XDE_TOKEN_FILE" not in environment
    given, _ = read(WorkerSettings, arguments, prog="worker")
    assert (given.island_member, given.server) == ("pp=2", "localhost:29500")
