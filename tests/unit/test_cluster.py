"""LocalCluster: scaling, endings, and that it leaves nothing behind (the leak check watches)."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async import Coordinator, CoordinatorConfig, Job, LocalCluster, RunResult, W5xdeError, Worker
from w5xde_async.cluster.task_workers import TaskWorkers
from w5xde_async.compute.engine import Engine
from w5xde_async.errors import JobError, StoreError, UsageError
from w5xde_async.net.endpoint import connect, listen
from w5xde_async.net.join import new_secret
from w5xde_async.runtime import Runtime
from w5xde_async.telemetry.events import Bus, Event, RunStarted
from w5xde_async.updates.config import UpdateConfig


def linear_job(**settings: Any) -> Job:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 2), "dataset": TensorDataset(x, (x.sum(1) > 0).long()),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "loss": nn.functional.cross_entropy,
        "batch_size": 16, "max_steps": 20,
    }  # fmt: skip
    return Job(**(given | settings))


ENDLESS = 10**9


async def run(job: Job, n_workers: int) -> RunResult:
    async with LocalCluster(job, n_workers) as cluster:
        return await cluster.wait()


@pytest.mark.both_loops
async def test_a_job_object_is_trained_by_tasks_of_this_loop() -> None:
    result = await run(linear_job(), 2)
    assert (result.outcome, result.step) == ("finished", 20)
    assert (await run(linear_job(), 1)).digest == result.digest


async def test_workers_of_an_insecure_coordinator_off_loopback_are_told_and_so_is_who_starts_others() -> None:
    """They took an address that is none of loopback for one that speaks TLS."""

    async def listens(host: str, *given: Any, **more: Any) -> Any:
        listener = await listen("127.0.0.1", *given, **more)
        listener.host = host
        return listener

    async def connects(host: str, port: int, **more: Any) -> Any:
        assert host == "192.0.2.7"
        return await connect("127.0.0.1", port, **more)

    events = list[Event]()
    bus = Bus()
    bus.subscribe(events.append)
    config = CoordinatorConfig(host="192.0.2.7", port=0, insecure=True, token=new_secret())
    async with LocalCluster(
        linear_job(), 1, config=config, bus=bus, runtime=Runtime(listen=listens, connect=connects)
    ) as cluster:
        assert (await cluster.wait()).outcome == "finished"
        (command,) = [event.worker_command for event in events if isinstance(event, RunStarted)]
        assert command == f"python -m w5xde_async.worker --server {cluster.address} --insecure --job train.py:job"


async def test_a_ready_made_model_is_trained_in_place_and_every_worker_has_a_replica() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = await run(linear_job(model=model), 3)
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    again = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    again.load_state_dict(start)
    assert (await run(linear_job(model=again), 1)).digest == result.digest


async def test_the_trained_model_is_there_afterwards() -> None:
    cluster = LocalCluster(linear_job(), 1)
    with pytest.raises(UsageError, match="has not been started"):
        _ = cluster.model
    async with cluster:
        result = await cluster.wait()
    torch.manual_seed(0)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(cluster.model(x), (x.sum(1) > 0).long())
    assert result.loss is not None
    assert loss < result.loss + 0.1


async def test_it_is_left_in_good_order_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """Its workers are not to wait for a coordinator that comes back."""
    async with LocalCluster(linear_job(max_steps=ENDLESS), 2) as cluster:
        await cluster.wait_for_workers(2, 10)
        tasks = [task for task in asyncio.all_tasks() if task.get_name().startswith("worker ")]
        assert len(tasks) == 2
        await cluster.coordinator.aclose()
        assert not any(task.done() for task in tasks), "who closes the coordinator alone may start it again"
    assert all(task.done() for task in tasks)
    caplog.clear()
    async with LocalCluster(linear_job(max_steps=ENDLESS), 2) as cluster:
        await cluster.wait_for_workers(2, 10)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_what_a_person_should_read_is_in_the_log_where_no_bus_was_given(caplog: pytest.LogCaptureFixture) -> None:
    def broken(model: nn.Module) -> dict[str, float]:
        raise OSError("no data to evaluate on")

    job = linear_job(evaluate=broken, evaluate_every=10)
    async with LocalCluster(job, 1) as cluster:
        assert (await cluster.wait()).outcome == "finished"
    assert "evaluate raised OSError: no data to evaluate on" in caplog.text
    caplog.clear()
    async with LocalCluster(job, 1, bus=Bus()) as cluster:
        await cluster.wait()
    assert "no data to evaluate on" not in caplog.text, "whoever gives a bus shows what is on it"


def test_what_is_no_job_or_no_number_of_workers_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match=r"LocalCluster takes a Job, not a function; give linear_job\(\)"):
        LocalCluster(linear_job)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Coordinator takes a Job, not a Linear"):
        Coordinator(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Worker takes a Job, not a int"):
        Worker("127.0.0.1:1", job=5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"the server is \('localhost', 5\); give host:port or a join string"):
        Worker(("localhost", 5))  # type: ignore[arg-type]
    number: Any
    for number in (-1, "2", 1.5, None, True):
        with pytest.raises(UsageError, match=f"the number of workers is {number!r}; give a whole number"):
            LocalCluster(linear_job(), number)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
async def test_a_ready_made_model_that_cannot_be_copied_is_refused_with_what_to_do() -> None:
    job = linear_job(model=nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 2))))
    with pytest.raises(
        JobError, match=r"'0\.weight' was computed from parameters.*give a function that makes the model"
    ):
        LocalCluster(job, 1)
    with pytest.raises(JobError, match=r"'0\.weight' was computed"):
        await Coordinator(job, config=CoordinatorConfig(port=0)).start()
    made = linear_job(model=lambda: nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 2))))
    assert (await run(made, 1)).outcome == "finished"


@pytest.mark.parametrize("rule", ["sync", pytest.param("async", marks=pytest.mark.slow)])
async def test_the_short_last_step_of_an_epoch_does_not_blow_up_what_a_codec_left_out(rule: str) -> None:
    """Steps of 64 samples, and one of 2: what they leave out counts there as it would in them."""
    x = torch.randn(258, 32, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :10].argmax(1))

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    async def loss_with(codec: str) -> float:
        job = linear_job(model=make, dataset=data, batch_size=64, microbatch_size=32, max_steps=300)
        update = UpdateConfig(rule=rule, codec=codec)
        config = CoordinatorConfig(port=0, min_workers=1, update=update, norm_gate=0.0)
        async with LocalCluster(job, 1, config=config) as cluster:
            await cluster.wait()
        with torch.no_grad():
            return float(nn.functional.cross_entropy(cluster.model(x), data.tensors[1]))

    exact = await loss_with("raw")
    assert 0.7 * exact < await loss_with("topk:0.01") < 1.5 * exact


async def test_scaling_to_no_number_is_refused() -> None:
    async with LocalCluster(linear_job(max_steps=ENDLESS), 1) as cluster:
        number: Any
        for number in (-1, "2", 1.5):
            with pytest.raises(UsageError, match=f"the number of workers is {number!r}"):
                await cluster.scale(number)


async def test_scaling_up_and_down() -> None:
    async with LocalCluster(linear_job(max_steps=ENDLESS), 1) as cluster:
        await cluster.wait_for_workers(1, 10)
        assert cluster.address == f"127.0.0.1:{cluster.coordinator.port}"
        await cluster.scale(3)
        await cluster.wait_for_workers(3, 10)
        await cluster.scale(1)
        assert cluster.num_workers <= 1
        step = cluster.coordinator.step
        async with asyncio.timeout(10):
            while cluster.coordinator.step == step:  # noqa: ASYNC110  # the one that is left goes on
                await asyncio.sleep(0.01)
    result = await cluster.wait()
    assert (result.outcome, result.reason) == ("stopped", "closed")
    await cluster.aclose()


async def test_waiting_for_workers_that_do_not_come() -> None:
    async with LocalCluster(linear_job(max_steps=ENDLESS), 0) as cluster:
        with pytest.raises(TimeoutError):
            await cluster.wait_for_workers(1, 0.05)
    with pytest.raises(UsageError, match="0 of 9 workers"):
        await cluster.wait_for_workers(9)


async def test_cancelling_leaves_nothing_behind() -> None:
    started = asyncio.Event()

    async def train() -> None:
        async with LocalCluster(linear_job(max_steps=ENDLESS), 2) as cluster:
            await cluster.wait_for_workers(2)
            started.set()
            await cluster.wait()

    task = asyncio.create_task(train())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cluster = LocalCluster(linear_job(), 2, run_dir=tmp_path / "file" / "run")
    with pytest.raises(StoreError, match="file stands"):
        await cluster.__aenter__()
    with pytest.raises(UsageError, match="not running"):
        await cluster.scale(1)
    with pytest.raises(UsageError, match="make a new LocalCluster"):
        await cluster.start()


async def test_a_cluster_that_was_closed_before_its_start_is_not_started() -> None:
    """Nobody would close it again."""
    cluster = LocalCluster(linear_job(), 1)
    await cluster.aclose()
    with pytest.raises(UsageError, match="was closed before; make a new LocalCluster"):
        await cluster.start()
    with pytest.raises(UsageError, match="has not been started"):
        _ = cluster.coordinator


async def test_a_run_whose_workers_all_fail_ends() -> None:
    built = 0

    def only_once() -> nn.Module:
        nonlocal built
        built += 1
        if built > 1:
            raise RuntimeError("no second model")
        return nn.Linear(4, 2)

    async with LocalCluster(linear_job(model=only_once), 2) as cluster:
        with pytest.raises(W5xdeError, match=r"every local worker has failed.*no second model"):
            await cluster.wait()


async def test_a_worker_that_ends_of_an_error_of_torchs_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Engine, "load", load)
    async with LocalCluster(linear_job(), 1) as cluster:
        with pytest.raises(W5xdeError, match=r"every local worker has failed: RuntimeError: CUDA error"):
            await cluster.wait()
    assert "worker local-0 has failed: RuntimeError: CUDA error: out of memory" in caplog.text


async def test_a_worker_that_has_ended_is_none_of_those_that_there_are() -> None:
    async with LocalCluster(linear_job(max_steps=ENDLESS), 2) as cluster:
        await cluster.wait_for_workers(2, 10)
        workers = cluster._workers
        assert isinstance(workers, TaskWorkers)
        (_, ended), (_, left) = workers._running
        ended.cancel()
        await asyncio.wait([ended])
        await cluster.scale(2)
        assert [task.get_name() for _, task in workers._running] == ["worker local-1", "worker local-2"]
        assert not left.done()
    with pytest.raises(UsageError, match="the cluster is closed"):
        await cluster.scale(1)


async def test_a_config_of_ones_own() -> None:
    config = CoordinatorConfig(port=0, token="hush", max_steps=3)
    async with LocalCluster(linear_job(), 2, config=config) as cluster:
        assert (await cluster.wait()).step == 3


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(90)
async def test_a_reference_is_trained_by_processes(tmp_path: Path) -> None:
    (tmp_path / "small_job.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\nfrom w5xde_async import Job\n"
        "def job():\n"
        "    data = TensorDataset(torch.ones(64, 4), torch.ones(64, dtype=torch.int64))\n"
        "    return Job(model=lambda: nn.Linear(4, 2), dataset=data, loss=nn.functional.cross_entropy, epochs=200,\n"
        "               optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))\n"
    )
    async with LocalCluster(f"{tmp_path / 'small_job.py'}:job", 2) as cluster:
        await cluster.wait_for_workers(2)
        assert (await cluster.wait()).outcome == "finished"
