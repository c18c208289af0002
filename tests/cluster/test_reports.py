"""Failures that others reported, one test each, named after the report. None of them may happen here.

The last word of a name and its number are the project and the issue. Those that need processes of their own are in
tests/process/test_reports.py.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme
from safetensors.torch import load_file
from tests.support import jobs, reference
from tests.support.cluster import QUICK_WORKER, Commits, settings, train
from tests.support.proxy import FaultProxy
from tests.support.scripted import Run, Scripted, scripted, settle
from torch import nn
from torch.utils.data import TensorDataset

import w5xde_async
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import LeafFailed
from w5xde_async.job import Job
from w5xde_async.net import endpoint
from w5xde_async.net.endpoint import connect, listen
from w5xde_async.net.link import Link
from w5xde_async.params.flat import named_digest
from w5xde_async.params.layout import Layout
from w5xde_async.plan.ledger import Ledger
from w5xde_async.plan.pacing import Pacing, PacingConfig
from w5xde_async.telemetry.events import Event, StepCommitted, Warned
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.wire.frame import LENGTH_BYTES, SESSION_CAPS, BufferSpec, decode_header, encode, header_length
from w5xde_async.wire.messages import Heartbeat, Lease, Params, Result
from w5xde_async.worker.service import Departure, Worker


@cache
def expected(name: str) -> tuple[str, list[float]]:
    job = jobs.ALL[name]()
    model, losses = reference.train(job, job.max_steps or 0)
    return named_digest(model), losses


def worker(coordinator: Coordinator, job: Callable[[], Job], port: int | None = None) -> asyncio.Task[Departure]:
    address = coordinator.address if port is None else f"127.0.0.1:{port}"
    return asyncio.create_task(Worker(address, job=job(), config=QUICK_WORKER).run())


# -- joining and leaving


async def compute_step(run: Run, able: Scripted) -> None:
    """One worker does all of the step under way; leases of the next one it lets lie."""
    step, number = run.training.version, 0
    while not run.training.version > step and not run.training.ledger.complete(step):
        lease = await able.lease(number)
        number += 1
        if lease.step == step:
            await able.compute(lease)
    await run.commits(step + 1)


async def test_join_stalls_nobody_horovod_2652() -> None:
    """One joins and never becomes ready: steps are committed all the same, and no time has to pass for that."""
    async with scripted() as run:
        able = await run.worker("able")
        await run.worker("building", ready=False)
        for _ in range(3):
            await compute_step(run, able)
        assert run.applied() == {3.0}
        assert run.now == 1000.0


@pytest.mark.slow
async def test_leaving_does_not_deadlock_horovod_3494() -> None:
    """Two of three leave in the middle of a step, one in good order and one without a word."""
    commits = Commits()
    async with Coordinator(jobs.cnn_sgd(), config=settings(min_workers=3), bus=commits.bus) as coordinator:
        leaver = Worker(coordinator.address, job=jobs.cnn_sgd(), config=QUICK_WORKER)
        leaving, dying, staying = asyncio.create_task(leaver.run()), *(worker(coordinator, jobs.cnn_sgd) for _ in "ab")
        await commits.reach(6)
        leaver.drain()
        dying.cancel()
        result = await coordinator.wait()
        assert await leaving is Departure.DRAINED
        assert await staying is Departure.FINISHED
        await asyncio.gather(dying, return_exceptions=True)
    assert result.digest == expected("cnn_sgd")[0]


async def test_peer_dies_in_the_middle_of_a_state_transfer_prime_diloco_156() -> None:
    """Newcomers are cut off after some kilobytes of parameters; the run goes on, and the next one gets all of them."""
    async with scripted() as run:
        able = await run.worker("able", limit_bytes=16 << 10)
        for number in range(3):
            newcomer = await run.worker(f"newcomer-{number}", ready=False, limit_bytes=4 << 10)
            newcomer.link.cut(after_bytes=1 << 10)
            await newcomer.ready()
            newcomer.link.cut()
            await settle()
            assert newcomer.ended()
            assert len(newcomer.all(Params)) < len(run.prepared.spec.layout.buckets)
        await compute_step(run, able)
        last = await run.worker("last")
        await last.version(1)
        assert run.applied() == {1.0}


@pytest.mark.slow
async def test_loss_does_not_jump_when_a_worker_rejoins_hivemind_417_torchtitan_1213() -> None:
    """A worker is cut off for a while and comes back: every step's loss is the plain loop's."""
    commits, losses = Commits(), []
    commits.bus.subscribe(lambda event: losses.append(event.loss) if isinstance(event, StepCommitted) else None)
    async with Coordinator(jobs.gpt_sgd(), config=settings(min_workers=2), bus=commits.bus) as coordinator:
        proxy = FaultProxy((coordinator.host, coordinator.port))
        await proxy.start()
        tasks = [worker(coordinator, jobs.gpt_sgd), worker(coordinator, jobs.gpt_sgd, proxy.port)]
        for step in (5, 12):
            await commits.reach(step)
            assert proxy.reset() == 1
        result = await coordinator.wait()
        assert await asyncio.gather(*tasks) == [Departure.FINISHED] * 2
        await proxy.aclose()
    digest, plain = expected("gpt_sgd")
    assert losses == pytest.approx(plain, rel=1e-6)
    assert result.digest == digest


async def test_no_endless_recovery_torchft_217_166() -> None:
    """Workers that come and die at once, again and again, take nothing back; a leaf that always fails ends the run."""
    async with scripted() as run:
        able = await run.worker("able")
        versions = []
        for number in range(12):
            doomed = await run.worker(f"doomed-{number}")
            doomed.link.abort()
            await settle()
            assert doomed.ended()
            if number % 4 == 3:
                await compute_step(run, able)
            versions.append(run.training.version)
        assert versions == sorted(versions)
        assert run.applied() == {3.0}

    def broken() -> Job:
        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("always")

        return replace(jobs.mlp_sgd(), loss=loss)

    with pytest.raises(LeafFailed, match="failed 3 time"):
        await train(broken, workers=2)


async def test_a_lone_worker_trains_right_hivemind_450() -> None:
    assert (await train(jobs.cnn_adamw, workers=1)).digest == expected("cnn_adamw")[0]


async def test_restart_counters_are_no_ids_pytorch_135712() -> None:
    """Neither names nor counters tell workers apart, and no lease of an earlier start is taken for one of this."""
    first, second = (Worker("127.0.0.1:1", job=jobs.mlp_sgd(), config=replace(QUICK_WORKER, name="w")) for _ in "ab")
    assert first.name == second.name
    assert first.worker_id != second.worker_id
    for one in (first, second):
        one.drain()
        assert await one.run() is Departure.DRAINED
    numbers: list[set[int]] = []
    for term in (1, 2, 3):
        async with scripted(term=term) as run:
            able = await run.worker("able")
            numbers.append({(await able.lease(number)).lease for number in range(1)})
            await able.compute(await able.lease())
            numbers[-1] |= {lease.lease for lease in able.all(Lease)}
    assert sum(map(len, numbers)) == len(set().union(*numbers))


# -- memory


def held_objects(ledger: Ledger) -> int:
    """Everything that the ledger keeps, counted."""
    return sum(len(value) for value in vars(ledger).values() if hasattr(value, "__len__"))


@pytest.mark.slow
def test_memory_does_not_grow_with_timeouts_hivemind_654_flower_4934() -> None:
    """A hundred thousand leases that nobody answers: what the ledger holds stays as it is after the first thousands."""
    ledger = Ledger()
    ledger.open(0, 8, 0.0)
    ledger.begin(0, 0.0)
    now, sizes = 0.0, []
    for number in range(100_000):
        grant = ledger.grant(f"worker-{number}", 0, 4, now=now, deadline_s=1.0)
        assert grant is not None
        now += 2.0
        assert [late.lease for late in ledger.overdue(now)] == [grant.lease]
        ledger.give_back(grant.lease)
        if number % 10_000 == 9_999:
            sizes.append(held_objects(ledger))
    assert sizes == [sizes[0]] * len(sizes)
    assert sizes[0] < 20_000
    ledger.validate()


async def test_silent_tls_clients_free_their_descriptors_cpython_74156(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "HANDSHAKE_S", 0.05)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)

    async def nobody(link: Link) -> None:
        raise AssertionError("a silent client was let in")

    listener = await listen("127.0.0.1", 0, nobody, ssl=context)
    before = len(os.listdir("/proc/self/fd"))
    silent = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(50)]
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        for sock in silent:
            sock.setblocking(False)
            assert await loop.sock_recv(sock, 1) == b""
            sock.close()
    await settle()
    assert listener.num_links == 0
    assert len(os.listdir("/proc/self/fd")) <= before
    await listener.aclose()


async def test_a_peer_that_does_not_read_grows_no_buffer_cve_2024_12254() -> None:
    """A send to it waits, on plain and TLS links; and nothing in the package calls a transport's writelines().

    ``net.link`` calls that of its pair's writer, and ``net.stream`` that of a channel, which is our own.
    """
    for path in Path(w5xde_async.__file__).parent.rglob("*.py"):
        calls = ".writelines(" in path.read_text(encoding="utf-8")
        fine = "telemetry" in path.parts or path.parts[-2:] in (("net", "link.py"), ("net", "stream.py"))
        assert not calls or fine, f"{path.name}: a file's is fine, a transport's is not"
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server)
    authority.configure_trust(client)
    payload = bytes(1 << 20)
    frame = encode(Result(1, 0), [(BufferSpec("", "uint8", (len(payload),), "raw", len(payload)), payload)])
    for contexts in ((None, None), (server, client)):
        accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()

        async def keep(link: Link, accepted: asyncio.Future[Link] = accepted) -> None:
            accepted.set_result(link)
            await asyncio.Event().wait()

        listener = await listen("127.0.0.1", 0, keep, ssl=contexts[0])
        reader = await connect("localhost", listener.port, timeout_s=5, ssl=contexts[1])
        writer = await accepted
        sent = 0
        while True:
            sending = asyncio.create_task(writer.send(frame))
            await settle(200)
            if not sending.done():
                break
            await sending
            sent += 1
            assert sent < 64, "64 MiB went somewhere"
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        reader.abort()
        await listener.aclose()


# -- time and the network


async def test_idle_links_carry_heartbeats_both_ways_dask_2524() -> None:
    """Where nothing is to be said for minutes, something is: no address translator forgets the connection."""
    async with scripted(min_workers=2) as run:
        waiting = await run.worker("waiting")
        for minute in range(10):
            heard, seen = len(waiting.all(Heartbeat)), waiting.session.link.bytes_received
            await waiting.beat()
            await run.pass_time(run.config.heartbeat_s)
            assert len(waiting.all(Heartbeat)) > heard, f"nothing was said in interval {minute}"
            assert waiting.session.link.bytes_received > seen
        assert not waiting.ended()
        assert run.config.heartbeat_s <= 30, "shorter than any translator's memory"


async def test_a_workers_heartbeats_come_by_themselves_dask_2524() -> None:
    beats: list[str] = []
    async with Coordinator(jobs.mlp_sgd(), config=settings(min_workers=2, heartbeat_s=0.02)) as coordinator:
        one = worker(coordinator, jobs.mlp_sgd)
        other = await connect(coordinator.host, coordinator.port, timeout_s=5)
        training = coordinator._training
        assert training is not None
        async with asyncio.timeout(10):
            while len(beats) < 3:
                beats += [session.last_message for session in training.roster.sessions.values() if session.last_message]
                for session in training.roster.sessions.values():
                    session.last_message = ""
                await asyncio.sleep(0.005)
        other.abort()
        coordinator.request_stop()
        await coordinator.wait()
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
    assert "waiting for work" in beats


async def test_the_port_is_held_from_pick_to_use_pytorch_91940() -> None:
    """Port 0: the system picks while binding, and what is printed is what listens. Twenty at once all differ."""
    listeners = await asyncio.gather(*(listen("127.0.0.1", 0, lambda link: link.aclose()) for _ in range(20)))
    assert len({listener.port for listener in listeners}) == 20
    async with Coordinator(jobs.mlp_sgd(), config=settings(port=0)) as coordinator:
        link = await connect(coordinator.host, coordinator.port, timeout_s=5)
        link.abort()
        coordinator.request_stop()
    await asyncio.gather(*(listener.aclose() for listener in listeners))


async def test_clocks_that_are_wrong_do_no_harm_flower_4899(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock jumps by up to a day, forth and back, at every look."""
    now, jumps = time.time, random.Random(1)
    looks = []

    def wrong() -> float:
        looks.append(1)
        return now() + jumps.uniform(-86400.0, 86400.0)

    monkeypatch.setattr(time, "time", wrong)
    events: list[Event] = []
    result = await train(jobs.cnn_sgd, workers=2, events=events)
    assert result.digest == expected("cnn_sgd")[0]
    assert not [event for event in events if isinstance(event, Warned)]
    source = Path(w5xde_async.__file__).parent
    deciding = [path for room in ("plan", "net", "wire", "worker", "compute") for path in (source / room).glob("*.py")]
    looking = [path.name for path in deciding if "time.time" in path.read_text(encoding="utf-8")]
    # A certificate has dates, and is trusted by its hash; files of residuals that are weeks old are removed.
    assert set(looking) <= {"tls.py", "residuals.py"}


def test_timeouts_are_learned_hivemind_676() -> None:
    """A deadline follows what the worker's leases took: a slow one gets more, a fast one the least that is given."""
    config = PacingConfig()
    pacing = Pacing(config)
    for _ in range(20):
        pacing.observe("fast", 1, 0.01)
        pacing.observe("slow", 1, 30.0)
    assert pacing.deadline_s("fast", 1) == config.min_deadline_s
    assert 30.0 * 2 < pacing.deadline_s("slow", 1) < config.max_deadline_s
    assert pacing.deadline_s("slow", 4) == pytest.approx(4 * pacing.deadline_s("slow", 1))
    for _ in range(config.window):
        pacing.observe("slow", 1, 0.3)
    assert pacing.deadline_s("slow", 1) == pytest.approx(config.min_deadline_s, rel=0.1)


# -- what is on disk


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
async def test_a_torn_checkpoint_is_passed_over_lightning_688_19970(damage: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    await train(jobs.cnn_sgd, run_dir=run, checkpoint_every=4, max_steps=10)
    newest = sorted((run / "checkpoints").iterdir())[-1]
    victim = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    if damage == "gone":
        victim.unlink()
    else:
        data[len(data) // 2] ^= 1
        victim.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
    events: list[Event] = []
    result = await train(jobs.cnn_sgd, run_dir=run, checkpoint_every=4, events=events)
    assert result.digest == expected("cnn_sgd")[0]
    said = "\n".join(event.text for event in events if isinstance(event, Warned))
    assert newest.name in said, "it says which one it passed over"


#: 64 samples in steps of 24: three steps an epoch, the last of 16.
STOPS = {
    "in the middle of an epoch": (1, 2),
    "at its edge": (3,),
    "in the middle of the second": (4, 5),
    "after every step": tuple(range(1, 12)),
}


@pytest.mark.parametrize("where", STOPS)
async def test_resume_repeats_and_skips_nothing_accelerate_2016_torchdata_1439(where: str, tmp_path: Path) -> None:
    """The order is a function of seed and epoch: losses and digest are those of a run that never stopped."""
    events: list[Event] = []
    for last in (*STOPS[where], None):
        result = await train(jobs.words, run_dir=tmp_path / "run", max_steps=last, events=events)
    job = jobs.words()
    total = (job.epochs or 0) * -(-len(job.dataset) // job.batch_size)
    model, losses = reference.train(job, total)
    done = [event for event in events if isinstance(event, StepCommitted)]
    assert [event.step for event in done] == list(range(1, total + 1)), where
    assert [event.loss for event in done] == pytest.approx(losses, rel=1e-6)
    assert result.digest == named_digest(model)


# -- size


def test_models_over_2_gb_flower_3236() -> None:
    """Shown on sizes alone, nothing of it is allocated: layout, buckets and frames of a model of 5.4 GB, and a single
    buffer of 6 GiB on the wire. No length in a frame counts buffers, so none of them wraps."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(30_000, 30_000), nn.Linear(30_000, 15_000))
    layout = Layout.of(model, bucket_bytes=64 << 20)
    total = sum(entry.numel for entry in layout.entries)
    assert total * 4 > 5 << 30
    assert sum(bucket.numel for bucket in layout.buckets) >= total
    assert max(layout.result_nbytes(bucket) for bucket in layout.result_buckets) <= 64 << 20
    assert Layout.parse(layout.describe()).fingerprint == layout.fingerprint

    class Sparse(bytes):
        """Says that it is 6 GiB long."""

        def __len__(self) -> int:
            return 6 << 30

    spec = BufferSpec("", "float32", ((6 << 30) // 4,), "raw", 6 << 30)
    header = encode(Result(1 << 40, 3), [(spec, Sparse())])[0]
    length = header_length(header[:LENGTH_BYTES], SESSION_CAPS)
    message, specs = decode_header(header[LENGTH_BYTES : LENGTH_BYTES + length], SESSION_CAPS)
    assert (message, specs) == (Result(1 << 40, 3), (spec,))
    assert math.prod(specs[0].shape) * 4 > 1 << 32


def test_every_report_has_a_test() -> None:
    """The list is the specification's."""
    reports = {
        "horovod_2652", "horovod_3494", "prime_diloco_156", "hivemind_654", "flower_4934", "cpython_74156",
        "dask_2524", "pytorch_91940", "pytorch_135712", "lightning_688", "19970", "hivemind_417", "torchtitan_1213",
        "torchft_217", "166", "accelerate_2016", "torchdata_1439", "flower_4899", "hivemind_676", "hivemind_450",
        "flower_3236", "rl_swarm_64", "cve_2024_12254",
    }  # fmt: skip
    here = Path(__file__)
    text = here.read_text() + (here.parents[1] / "process" / "test_reports.py").read_text()
    tests = [line for line in text.splitlines() if line.startswith(("def test_", "async def test_"))]
    assert {report for report in reports if not any(report in line for line in tests)} == set()


# -- metrics


def some_metrics(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Leaves are of 2 samples: "low" is returned for samples 0, 1, 4, 5, ..., "high" for 8 to 15."""
    first = int(batch[1][0])
    metrics = {"low": float(first)} if first % 4 == 0 else {"all": 1.0}
    return model(batch[0]).square().mean(), metrics | ({"high": float(first)} if first >= 8 else {})


@pytest.mark.parametrize("update", ["sync", "async", "local"])
async def test_metrics_are_means_over_the_leaves_that_have_them(update: str) -> None:
    def job() -> Job:
        data = TensorDataset(torch.ones(16, 3), torch.arange(16))
        return Job(
            model=lambda: nn.Linear(3, 1), dataset=data, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            step=some_metrics, batch_size=8, microbatch_size=2, max_steps=2, shuffle=False,
        )  # fmt: skip

    events: list[Event] = []
    await train(job, events=events, update=UpdateConfig(rule=update, inner_steps=2))
    steps = [event.metrics for event in events if isinstance(event, StepCommitted)]
    if len(steps) == 1:  # a round of both
        assert steps == [{"low": 6.0, "all": 1.0, "high": 11.0}]
    else:
        assert steps == [{"low": 2.0, "all": 1.0}, {"low": 10.0, "high": 11.0, "all": 1.0}]


@pytest.mark.parametrize(
    ("update", "told"),
    [({"downlink": "topk:0.1"}, 1), ({"downlink": "sparseloco"}, 1), ({"codec": "topk:0.1"}, 0),
     ({"downlink": "int4"}, 0)],
    ids=str,
)  # fmt: skip
async def test_a_downlink_that_leaves_values_out_is_told_of(update: dict[str, Any], told: int) -> None:
    commits, warned = Commits(), list[str]()
    commits.bus.subscribe(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)
    async with Coordinator(jobs.mlp_sgd(), config=settings(update=UpdateConfig(**update)), bus=commits.bus):
        pass
    assert len([text for text in warned if "lag behind" in text]) == told


@pytest.mark.parametrize(("rows", "sparse", "told"), [(1 << 14, True, 1), (1 << 14, False, 0), (16, True, 0)])
async def test_a_large_table_whose_sparse_gradients_save_nothing_is_told_of(rows: int, sparse: bool, told: int) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(rows, 32, sparse=sparse), nn.Linear(32, 2)
            self.again = self.table  # one table, told of once

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(x).mean(1))

    job = Job(
        model=Bag, dataset=TensorDataset(torch.zeros(8, 4, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), loss=nn.functional.cross_entropy, batch_size=4,
        max_steps=1,
    )  # fmt: skip
    commits, warned = Commits(), list[str]()
    commits.bus.subscribe(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)
    async with Coordinator(job, config=settings(), bus=commits.bus):
        pass
    assert [text.partition(":")[0] for text in warned if "2.1 MB" in text] == ["embedding 'table'"] * told


@pytest.mark.parametrize(("max_norm", "hooked", "told"), [(1.0, False, 1), (1.0, True, 0), (None, False, 0)])
async def test_a_table_whose_norms_are_bounded_while_it_is_read_alone_is_told_of(
    tmp_path: Path, max_norm: float | None, hooked: bool, told: int
) -> None:
    @torch.no_grad()
    def bound(weight: torch.Tensor, *_: object) -> None:
        weight.copy_(torch.renorm(weight, 2, 0, 1.0))

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made, weight = torch.optim.SGD(model.parameters(), lr=8.0), next(model.parameters())
        if hooked:
            made.register_step_post_hook(lambda *_: bound(weight))
        return made

    x = torch.arange(64).remainder(8).reshape(16, 4)
    job = Job(
        model=lambda: nn.Sequential(nn.Embedding(8, 4, max_norm=max_norm), nn.Flatten(), nn.Linear(16, 2)),
        dataset=TensorDataset(x, x[:, 0] // 4), optimizer=optimizer, loss=nn.functional.cross_entropy, batch_size=4,
        max_steps=8,
    )  # fmt: skip
    events: list[Event] = []
    ended = await train(lambda: job, events=events, run_dir=tmp_path)
    assert ended.model_path is not None
    norm = load_file(ended.model_path)["0.weight"].norm(dim=1).max().item()
    assert (norm < 1.001) == hooked, "what is saved has other norms than is said of it"
    assert (
        len([event for event in events if isinstance(event, Warned) and "max_norm holds while" in event.text]) == told
    )
