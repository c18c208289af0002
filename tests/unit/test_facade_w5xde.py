"""W5XDE's interface: every argument does what it says, in threads of one process."""

from __future__ import annotations

import asyncio
import copy
import logging
import queue
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.facade import Data, Model, calls, model, no_secret_of_this_machine, node_for, serve, server_of
from tests.support.proxy import ProxyThread
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from w5xde_async.coordinator.run.startup import sampler_of
from w5xde_async.coordinator.sync.batch_growth import BatchGrowth
from w5xde_async.errors import CheckpointMismatch, JobError, PortInUse, Refused, Unreachable, UsageError
from w5xde_async.facade.calling import NodeLines, where_to_join
from w5xde_async.facade.neighbours import is_here, join_file_here
from w5xde_async.facade.reading import BatchLoss, class_loss
from w5xde_async.facade.w5xde import _WORDS, CentralServer, TrainingNode, _reporting
from w5xde_async.job import ENDLESS, shown_progress
from w5xde_async.net.join import Invitation, new_secret, write_private_line
from w5xde_async.net.outbox import Outbox
from w5xde_async.net.own_addresses import own_addresses
from w5xde_async.plan.sampler import Sampler
from w5xde_async.telemetry.events import CheckpointSaved, RunStarted, StepCommitted, Warned, WorkerJoined
from w5xde_async.telemetry.writer import flush_all
from w5xde_async.wire.frame import LENGTH_BYTES, SESSION_CAPS, decode_header
from w5xde_async.wire.messages import Done, Lease, Message, Params, Result, Welcome
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.hooks import LeaseAnswered
from w5xde_async.worker.service import Worker

__all__ = ["calls", "no_secret_of_this_machine"]

WELCOME = Welcome("0" * 16, "digits", 1, 0, "fp32", 1, 1, 64, b"0" * 16, 1.0, 2.0)

pytestmark = pytest.mark.usefixtures("no_secret_of_this_machine")


def plain_loop(steps: int, batch_size: int = 16, **kwargs: Any) -> nn.Module:
    """The same training without any of this: the order is the sampler's."""
    trained, data = model(), Data()
    optimizer = torch.optim.Adam(trained.parameters(), **kwargs)
    sampler = Sampler(num_samples=len(data), batch_size=batch_size, leaf_samples=2, seed=0)
    for step in range(steps):
        indices = sampler.plan(step).indices.tolist()
        optimizer.zero_grad()
        F.cross_entropy(trained(data.x[indices]), data.y[indices]).backward()
        optimizer.step()
    return trained


def same(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


# -- training ----------------------------------------------------------------------------------------------


def test_the_server_trains_with_nodes_of_instances_and_classes(calls: Any, tmp_path: Path) -> None:
    """One model instance may be the server's and a node's: the seeds' own example does so."""
    given = model()
    server = server_of(None, model=given, optimizer_kwargs={"lr": 0.05}, num_epochs=2, max_steps=None)
    running, events = serve(calls, server)
    losses: dict[str, list[tuple[float, str]]] = {"given": [], "class": []}
    nodes = {"given": node_for(server, model=given), "class": node_for(server)}
    working = [
        calls(node.train, lambda loss, batch_id, name=name: losses[name].append((loss, batch_id)))
        for name, node in nodes.items()
    ]
    result = running.result(15)
    for work in working:
        work.result(5)
    assert (result.outcome, result.step) == ("finished", 12)
    assert same(given, plain_loop(12, lr=0.05))  # trained in place, with Adam, as a plain loop would
    steps = [event for event in events if isinstance(event, StepCommitted)]
    assert {event.samples for event in steps} == {16}
    assert steps[-1].loss < steps[0].loss
    reported = [entry for of_node in losses.values() for entry in of_node]
    assert {int(batch_id.partition("_batch")[0]) for _, batch_id in reported} == set(range(12))
    trained = nodes["given"].model
    assert trained is not given
    versions = {int(batch_id.partition("_batch")[0]) for _, batch_id in losses["given"]}
    # The last that it was sent: where the other node computed the last steps, or all of them, not the last of all.
    assert any(same(trained, plain_loop(version, lr=0.05)) for version in range(max(versions, default=0), 13))


def test_callbacks_get_what_an_observer_of_the_socket_counts(calls: Any) -> None:
    server = server_of(None)
    running, events = serve(calls, server)
    proxy = ProxyThread(("127.0.0.1", server.port))
    try:
        proxy.call(lambda p: [setattr(flow, "tape", bytearray()) for flow in (p.up, p.down)])
        node = node_for(server, server_address=("127.0.0.1", proxy.port), collect_metrics=True)
        pieces: list[list[Any]] = []
        node.train(lambda loss, batch_id: pieces.append([loss, batch_id]), lambda *args: pieces[-1].extend(args))
        running.result(10)
        up, down = proxy.call(lambda p: (p.up.nbytes, p.down.nbytes))
        tape, answers = proxy.call(lambda p: (bytes(p.up.tape or b""), bytes(p.down.tape or b"")))
    finally:
        proxy.close()
    assert (node.bytes_sent, node.bytes_received) == (up, down)
    frames = list(messages(tape))
    answered = [at for at, (message, _, _) in enumerate(frames) if type(message) is Done]
    assert len(answered) == len(pieces)
    leased, overtaken = told(answers)
    begin, received_so_far, steps = 0, 0, {event.step: event for event in events if isinstance(event, StepCommitted)}
    by_step: dict[int, list[float]] = {}
    for at, (loss, batch_id, sent, received, comp_time, net_time, orig_size, comp_size) in zip(
        answered, pieces, strict=True
    ):
        passed = frames[begin : at + 1]
        assert sent == sum(nbytes for _, _, nbytes in passed)
        gradients = sum(spec.nbytes for message, specs, _ in passed for spec in specs if type(message) is Result)
        assert orig_size == comp_size == gradients > 0
        assert comp_time == 0.0
        assert net_time > 0.0
        message = frames[at][0]
        assert isinstance(message, Done)
        received_so_far += received
        step = int(batch_id.partition("_batch")[0])
        # All up to the lease it answers, and nothing of what the server sends when this step is done.
        assert leased[message.lease] <= received_so_far <= overtaken.get(step + 1, down)
        assert loss == pytest.approx(sum(message.losses) / len(message.losses))  # leaves of two samples each
        by_step.setdefault(int(batch_id.partition("_batch")[0]), []).extend(message.losses)
        begin = at + 1
    for step, losses in by_step.items():
        assert steps[step + 1].loss == pytest.approx(sum(losses) / len(losses))


def told(tape: bytes) -> tuple[dict[int, int], dict[int, int]]:
    """Of what a server sent: where each lease ends, and where each version of the parameters begins."""
    at, leased, versions = 0, {}, {}
    for message, _, nbytes in messages(tape):
        if type(message) is Params:
            versions.setdefault(message.version, at)
        at += nbytes
        if type(message) is Lease:
            leased[message.lease] = at
    return leased, versions


def test_times_are_no_less_than_the_wires_and_no_more_than_the_clocks(calls: Any) -> None:
    server = server_of(None, model=Model(1000), max_steps=3)
    running, _ = serve(calls, server)
    proxy = ProxyThread(("127.0.0.1", server.port))
    rate, slice_bytes = 200_000, 2000
    state_bytes = sum(4 * parameter.numel() for parameter in Model(1000).parameters())
    wire_s = (state_bytes - slice_bytes) / rate  # for what follows the slice with which parameters begin to come
    try:
        proxy.call(lambda p: [setattr(p.down, "bytes_per_s", rate), setattr(p.down, "slice_bytes", slice_bytes)])
        node = node_for(server, model=lambda: Model(1000), server_address=("127.0.0.1", proxy.port),
                        collect_metrics=True, compress_gradients=True)  # fmt: skip
        spent: list[tuple[float, float, float]] = []
        began = time.perf_counter()
        node.train(network_callback=lambda *args: spent.append((time.perf_counter() - began, args[2], args[3])))
        running.result(15)
    finally:
        proxy.close()
    comp_s = net_s = 0.0
    for elapsed_s, comp_time, net_time in spent:
        assert 0 < comp_time
        comp_s, net_s = comp_s + comp_time, net_s + net_time
        assert comp_s < elapsed_s
        assert net_s < 2 * elapsed_s  # it sends and receives at once
    assert net_s > 3 * 0.5 * wire_s  # three versions; a late wake-up of the proxy makes the next slice seem early


class Sparse(nn.Module):
    """Most of its gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(400, 64)
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed((x * 10).long().clamp(0, 399)).mean(1))
        return out


def test_compressed_gradients_are_fewer_bytes_and_the_same_bits(calls: Any) -> None:
    digests, sent = set(), {}
    for compressed in (False, True):
        torch.manual_seed(3)
        server = server_of(None, model=Sparse())
        running, _ = serve(calls, server)
        node = node_for(server, model=Sparse, collect_metrics=True, compress_gradients=compressed)
        pieces: list[tuple[Any, ...]] = []
        node.train(network_callback=lambda *args, pieces=pieces: pieces.append(args))
        digests.add(running.result(10).digest)
        sent[compressed] = node.bytes_sent
        numel = sum(parameter.numel() for parameter in Sparse().parameters())
        for bytes_sent, _, comp_time, _, orig_size, comp_size in pieces:
            assert 4 * numel <= orig_size < 4 * numel + 256  # entries begin at multiples of 64 bytes
            assert (comp_time > 0) == compressed
            assert comp_size < orig_size / 3 if compressed else comp_size == orig_size
            assert comp_size < bytes_sent < comp_size + 2000
    assert len(digests) == 1
    assert sent[True] < sent[False] / 3


def messages(tape: bytes) -> Iterator[tuple[Message, Any, int]]:
    at = 0
    while at < len(tape):
        end = at + LENGTH_BYTES + int.from_bytes(tape[at : at + LENGTH_BYTES], "big")
        message, specs = decode_header(tape[at + LENGTH_BYTES : end], SESSION_CAPS)
        end += sum(spec.nbytes for spec in specs)
        yield message, specs, end - at
        at = end


def test_a_piece_whose_gradients_the_server_had_is_told_with_the_next() -> None:
    """Its bytes would be 0, by which the documents' own callbacks divide."""
    ratios: list[float] = []
    told: list[tuple[int, int]] = []

    def documented(sent: int, received: int, comp_time: float, net_time: float, orig_size: int, comp_size: int) -> None:
        ratios.append(orig_size / comp_size)
        told.append((sent, received))

    losses: list[float] = []
    report = _reporting(lambda loss, batch_id: losses.append(loss), documented)
    assert report is not None
    for gradient_bytes in (8, 0, 0, 8):
        report(
            LeaseAnswered(step=1, start=0, samples=(2,), losses=(1.0,), sent_bytes=10, received_bytes=100,
                          network_s=0.1, gradient_bytes=gradient_bytes, encoded_bytes=gradient_bytes // 2, encode_s=0.0)
        )  # fmt: skip
    assert (ratios, told, len(losses)) == ([2.0, 2.0], [(10, 100), (30, 300)], 4)


def test_network_callback_needs_collect_metrics(calls: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = server_of(None, max_steps=1)
    serve(calls, server)
    called: list[Any] = []
    with caplog.at_level(logging.WARNING):
        node_for(server).train(network_callback=lambda *args: called.append(args))
    assert not called
    assert "collect_metrics=True" in caplog.text


def test_what_a_callback_raises_ends_the_node_and_not_the_server(calls: Any) -> None:
    server = server_of(None)
    running, _ = serve(calls, server)

    def fail(loss: float, batch_id: str) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        node_for(server).train(fail)
    node_for(server).train()
    assert running.result(10).outcome == "finished"


def test_gradients_leave_one_by_one_or_together_with_the_same_result(
    calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[bool] = []

    class Seen(Outbox):  # what that comes to: test_outbox.py
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            gathered.append(kwargs["gather"])
            super().__init__(*args, **kwargs)

    monkeypatch.setattr("w5xde_async.worker.connection.connection.Outbox", Seen)
    digests = set()
    for batched in (True, False):
        server = server_of(None)
        running, _ = serve(calls, server)
        node_for(server, batch_gradients=batched).train()
        digests.add(running.result(10).digest)
    assert len(digests) == 1
    assert gathered == [True, False]


# -- the server's arguments --------------------------------------------------------------------------------


def test_defaults_are_the_originals() -> None:
    server = CentralServer(model(), Data())
    job, config = server._job, server._config
    assert (job.batch_size, config.host, config.port, config.prefetch_leaves) == (16, "localhost", 5555, 1000)
    assert server._directory == Path("checkpoints")
    assert config.checkpoint_time_s == 300
    assert job.step._criterion is class_loss  # type: ignore[union-attr]
    assert type(job.optimizer(model())) is torch.optim.Adam
    assert server.address == "localhost:5555"
    assert not server.running


def test_optimizer_queue_and_seed(calls: Any) -> None:
    made: dict[str, torch.optim.Optimizer] = {}

    def sgd(parameters: Any, **kwargs: Any) -> torch.optim.Optimizer:
        made["it"] = torch.optim.SGD(parameters, **kwargs)
        return made["it"]

    server = server_of(None, optimizer_class=sgd, optimizer_kwargs={"lr": 0.0}, queue_size=3, seed=9, model=Model)
    assert server._config.prefetch_leaves == 3
    assert server._job.seed == 9
    assert isinstance(server.model, Model)
    before = copy.deepcopy(server.model)
    running, _ = serve(calls, server)
    node_for(server).train()
    running.result(10)
    assert type(made["it"]) is torch.optim.SGD
    assert same(server.model, before)  # at a rate of 0
    again = server_of(None, seed=9, model=Model)
    assert isinstance(again.model, nn.Module)
    assert same(again.model, before)


DOCUMENTED_PLANS = {
    "lossy": {"compression": "int8"},
    "sparse, with feedback": {"compression": "topk:0.25"},
    "without feedback": {"compression": "int4", "error_feedback": False},
    "adaptive": {"compression": "auto"},
    "asynchronous": {"asynchronous_updates": True},
    "asynchronous and lossy": {"asynchronous_updates": True, "compression": "bf16"},
    "accumulated": {"gradient_accumulation": 2},
    "adaptive batch": {"adaptive_batch": 64},
    "adaptive batch, to the dataset": {"adaptive_batch": "auto"},
}


@pytest.mark.parametrize("plan", DOCUMENTED_PLANS)
def test_what_the_documents_planned(plan: str, calls: Any) -> None:
    server = server_of(None, max_steps=60, optimizer_kwargs={"lr": 0.02}, **DOCUMENTED_PLANS[plan])
    running, events = serve(calls, server)
    node_for(server).train()
    result = running.result(30)
    assert result.outcome == "finished"
    steps = [event for event in events if isinstance(event, StepCommitted)]
    tenth = max(len(steps) // 10, 1)
    assert sum(step.loss for step in steps[-tenth:]) < 0.8 * sum(step.loss for step in steps[:tenth])
    if plan == "accumulated":
        assert {step.samples for step in steps} == {32}
    if "lossy" in plan:
        assert result.encoded_bytes < 0.7 * result.raw_bytes
    started = next(event for event in events if isinstance(event, RunStarted))
    assert started.update_rule == ("async" if "asynchronous" in plan else "sync")


def test_an_accumulated_step_is_that_of_a_larger_batch(calls: Any) -> None:
    server = server_of(None, gradient_accumulation=3, batch_size=16, max_steps=2, optimizer_kwargs={"lr": 0.05})
    assert (server._job.microbatch_samples, server._job.accumulate_grad_batches, server._job.leaf_samples) == (2, 3, 6)
    running, _ = serve(calls, server)
    node_for(server).train()
    running.result(20)
    wanted, data = model(), Data()
    optimizer = torch.optim.Adam(wanted.parameters(), lr=0.05)
    sampler = Sampler(num_samples=len(data), batch_size=48, leaf_samples=6, seed=0)
    for step in range(2):
        indices = sampler.plan(step).indices.tolist()
        optimizer.zero_grad()
        F.cross_entropy(wanted(data.x[indices]), data.y[indices]).backward()
        optimizer.step()
    assert isinstance(server.model, nn.Module)
    assert same(server.model, wanted)


@pytest.mark.slow
def test_checkpoints_by_the_clock_and_going_on_from_them(calls: Any, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    server = server_of(directory, checkpoint_interval=1e-4, max_steps=150)  # every six milliseconds
    running, events = serve(calls, server)
    node_for(server).train()
    assert running.result(15).step == 150
    saved = {event.step for event in events if isinstance(event, CheckpointSaved)}
    assert 150 in saved
    assert len(saved) > 1
    more = server_of(directory, max_steps=153, resume="auto")
    running, events = serve(calls, more)
    node_for(more).train()
    assert running.result(10).step == 153
    assert next(event for event in events if isinstance(event, RunStarted)).resumed_step == 150
    assert {event.step for event in events if isinstance(event, CheckpointSaved)} == {153}  # the interval is long
    assert (directory / "model.safetensors").exists()
    with pytest.raises(CheckpointMismatch, match="another model"):
        server_of(directory, model=Model(7), resume="auto").start()
    afresh = server_of(directory, model=Model(7), max_steps=1)
    running, _ = serve(calls, afresh)
    with pytest.raises(Refused, match="model differs"):
        node_for(afresh).train()
    node_for(afresh, model=Model(7)).train()
    assert running.result(10).step == 1
    assert (tmp_path / "checkpoints.old-1" / "checkpoints").exists()


def test_without_an_end_it_trains_until_it_is_stopped(calls: Any) -> None:
    server = server_of(None, max_steps=None)
    running, _ = serve(calls, server)
    assert server.running
    with pytest.raises(UsageError, match="runs already"):
        server.start()
    reached = threading.Event()
    node = node_for(server, timeout_s=0.3)
    working = calls(node.train, lambda loss, batch_id: reached.set() if batch_id.startswith("9_") else None)
    assert reached.wait(60)
    server.running = False
    result = running.result(10)
    assert (result.outcome, result.reason) == ("stopped", "stopped")
    assert result.step >= 9
    assert not server.running
    working.result(5)  # the server has gone, and does not come back
    with pytest.raises(UsageError, match=r"start\(\)"):
        server.running = True


def test_a_stop_before_the_start_counts(calls: Any) -> None:
    server = server_of(None, max_steps=None)
    server.stop()
    assert server.start().outcome == "stopped"


def test_a_stop_after_the_end_is_not_kept_for_the_next_start(calls: Any) -> None:
    server = server_of(None, max_steps=2)
    for _ in range(2):
        running, _ = serve(calls, server)
        calls(node_for(server).train)
        result = running.result(10)
        assert (result.outcome, result.step) == ("finished", 2)
        server.stop()  # in a script's finally, say


def test_a_stop_after_a_start_that_could_not_begin_is_not_kept_for_the_next_one(calls: Any) -> None:
    server = server_of(None, max_steps=None)
    server.stop()
    assert server.start().outcome == "stopped"

    async def cell() -> None:
        with pytest.raises(UsageError):
            server.start()

    asyncio.run(cell())
    server.stop("nothing runs")
    running = calls(server.start)
    assert server.listening.wait(10)
    server.stop("while it runs")
    assert running.result(10).reason == "while it runs"


def test_a_stop_of_a_server_that_prepares_its_run_counts(calls: Any) -> None:
    prepares, asked = threading.Event(), threading.Event()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        prepares.set()
        assert asked.wait(10)
        return torch.optim.SGD(parameters, lr=0.1)

    server = server_of(None, max_steps=None, optimizer_class=optimizer)
    running = calls(server.start)
    assert prepares.wait(10)
    server.stop("seen enough")
    asked.set()
    result = running.result(10)
    assert (result.outcome, result.reason, result.step) == ("stopped", "seen enough", 0)


# -- who may join ------------------------------------------------------------------------------------------


def test_secure_is_tls(calls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "run"
    server = server_of(directory, secure=True, max_steps=2)
    running, events = serve(calls, server)
    assert next(event for event in events if isinstance(event, RunStarted)).security.startswith("TLS 1.3")
    proxy = ProxyThread(("127.0.0.1", server.port))
    try:
        proxy.call(lambda p: setattr(p.down, "tape", bytearray()))
        monkeypatch.setenv("W5XDE_JOIN_FILE", str(directory / "join"))
        node_for(server, secure=True, server_address=f"localhost:{proxy.port}").train()
        tape = proxy.call(lambda p: bytes(p.down.tape or b""))
    finally:
        proxy.close()
    assert running.result(10).outcome == "finished"
    assert b"Model" not in tape  # the run's name, in plain text otherwise
    assert len(tape) > 1000


def test_open_to_others_it_is_tls_with_or_without_a_token(calls: Any, tmp_path: Path) -> None:
    server = server_of(tmp_path / "one", ip="0.0.0.0", max_steps=1)
    running, events = serve(calls, server)
    assert next(event for event in events if isinstance(event, RunStarted)).security.startswith("TLS 1.3")
    told = Invitation.parse((tmp_path / "one" / "join").read_text(), place="test")
    assert told.port == server.port
    node_for(server, join_file=tmp_path / "one" / "join", server_address=("127.0.0.1", server.port)).train()
    assert running.result(10).outcome == "finished"


@pytest.mark.parametrize(
    ("of_server", "of_node"),
    [
        ({"ip": "0.0.0.0"}, {}),
        ({"ip": "0.0.0.0", "token": new_secret()}, {}),
        ({"secure": True}, {"secure": True}),
        ({"secure": True}, {}),
        ({}, {}),
    ],
    ids=["open", "token", "secure", "told", "plain"],
)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_on_one_machine_it_just_works(
    of_server: dict[str, Any], of_node: dict[str, Any], late: bool, calls: Any, tmp_path: Path
) -> None:
    """Neither is told where the join file is, and the node may come first."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    server = server_of(tmp_path / "run", max_steps=2, port=port, **of_server)
    node = node_for(server, timeout_s=20.0, **of_node)
    if late:
        running, _ = serve(calls, server)
        working = calls(node.train)
    else:
        working = calls(node.train)
        running, _ = serve(calls, server)
    assert running.result(20).outcome == "finished"
    working.result(10)
    left = join_file_here("localhost", port)
    assert left is not None
    assert not left.exists()  # nobody listens


def test_the_secret_of_a_machine_is_its_owners(calls: Any, tmp_path: Path) -> None:
    server = server_of(tmp_path / "run", max_steps=1, ip="0.0.0.0")
    running, _ = serve(calls, server)
    left = join_file_here("127.0.0.1", server.port)
    assert left is not None
    assert left.stat().st_mode & 0o777 == 0o600
    node_for(server).train()
    running.result(10)


def test_machines_that_share_a_home_do_not_mistake_each_others_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    places = set()
    for name in ("one", "two"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        places |= {join_file_here("localhost", 5555), join_file_here("localhost", 5556)}
    assert len(places) == 4


def test_who_is_here() -> None:
    assert join_file_here("localhost", 0) is None
    assert join_file_here("192.0.2.1", 5555) is None  # for documentation: nobody has it
    assert join_file_here("somewhere.example.org", 5555) is None
    assert is_here("127.0.0.1")
    assert is_here(socket.gethostname())
    assert all(map(is_here, own_addresses("0.0.0.0")))


def test_elsewhere_the_first_second_says_what_is_missing(
    calls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        UsageError, match=r"give the coordinator's join file \(join_file=, W5XDE_JOIN_FILE\), its token"
    ):
        TrainingNode(Model, ("192.0.2.1", 5555)).train()
    server = server_of(tmp_path / "run", ip="0.0.0.0")
    running, _ = serve(calls, server)
    monkeypatch.setenv("HOME", str(tmp_path / "of another user"))
    node = node_for(server, timeout_s=40.0)
    working = calls(node.train)
    deadline, said = time.monotonic() + 30.0, ""
    while "join_file=" not in said:
        assert time.monotonic() < deadline, said
        time.sleep(0.01)
        said += capfd.readouterr().err
    assert float(re.findall(r"gives_up_in_s=(\d+)", said)[0]) > 30  # with the first attempt, not at the end
    node.stop()
    working.result(10)
    with pytest.raises(Unreachable, match="join_file="):
        node_for(server, timeout_s=0.3).train()
    server.stop()
    running.result(10)


def test_a_secure_server_of_another_users_is_looked_for_by_its_join_file(
    calls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No address and no firewall is the cause: at once, and at the end, the join file is what is missing."""
    server = server_of(tmp_path / "run", secure=True)
    running, _ = serve(calls, server)
    monkeypatch.setenv("HOME", str(tmp_path / "of another user"))
    with pytest.raises(Unreachable, match=r"is not there yet\); start the coordinator, .*\(join_file=, ") as raised:
        node_for(server, secure=True, timeout_s=0.3).train()
    assert "firewall" not in str(raised.value)
    assert re.search(r"looking for the server at .*of another user.*join_file=", capfd.readouterr().err)
    server.stop()
    running.result(10)


@pytest.mark.parametrize("given", [{}, {"secure": True}, {"ip": "0.0.0.0"}], ids=["plain", "secure", "open"])
def test_a_server_shows_no_flag(
    given: dict[str, Any], calls: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = server_of(tmp_path / "run", log="verbose", max_steps=3, **given)
    running, _ = serve(calls, server)
    node_for(server).train()
    running.result(10)
    shown = capfd.readouterr().err
    assert "Start a worker" in shown
    assert not re.findall(r"(?<![\w-])--[a-z][a-z-]*", shown)


def test_a_token_on_both_sides(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of(None, token="shared", max_steps=1)
    running, events = serve(calls, server)
    with pytest.raises(Refused, match="token"):
        node_for(server).train()
    monkeypatch.setenv("W5XDE_TOKEN", "shared")
    node_for(server).train()
    assert running.result(10).outcome == "finished"
    assert sum(isinstance(event, WorkerJoined) for event in events) == 1


def test_the_joins_address_counts_where_none_is_given(tmp_path: Path) -> None:
    invitation = Invitation(host="10.1.2.3", port=77, certificate=bytes(32), secret="s")
    path = tmp_path / "join"
    path.write_text(invitation.reveal() + "\n")
    path.chmod(0o600)
    assert Invitation.parse(TrainingNode(Model, join_file=path).server_address, place="x").host == "10.1.2.3"
    assert TrainingNode(Model, join_file=path)._place.address == "10.1.2.3:77"  # what is shown has no secret
    told = Invitation.parse(TrainingNode(Model, ("here", 5), join_file=path).server_address, place="x")
    assert (told.host, told.port, told.secret) == ("here", 5, "s")
    assert TrainingNode(Model).server_address == "localhost:5555"


def test_what_a_killed_server_left_is_no_hindrance(calls: Any, tmp_path: Path) -> None:
    """The next one on its port has no TLS, or another secret."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    left = join_file_here("localhost", port)
    assert left is not None
    for of_server in ({}, {"secure": True}):
        write_private_line(left, Invitation(host="127.0.0.1", port=port, certificate=bytes(32), secret="old").reveal())
        server = server_of(tmp_path / f"run{len(of_server)}", max_steps=1, port=port, **of_server)
        running, _ = serve(calls, server)
        node_for(server).train()
        assert running.result(10).outcome == "finished"


def test_a_node_says_that_it_joined_how_far_it_is_and_how_it_ended(capfd: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = NodeLines("normal", _WORDS, clock=lambda: now)
    worker = Worker("localhost:5555", config=WorkerConfig(name="me", device="cpu"))
    lines.looking(where_to_join(None, ("localhost", 5555), join_file=None, secure=False), worker.config)
    lines.joined(worker, WELCOME)
    for step in range(100):
        now += 1.0
        lines.answered(
            LeaseAnswered(step=step, start=0, samples=(2, 2), losses=(1.0, 2.0), sent_bytes=1, received_bytes=1,
                          network_s=0.0, gradient_bytes=1, encoded_bytes=1, encode_s=0.0)
        )  # fmt: skip
    lines.ended("the run is finished", worker)
    flush_all()
    looks, first, *on_the_way, last = capfd.readouterr().err.splitlines()
    assert looks == "looking for the server at localhost:5555"
    assert first == "joined run digits at localhost:5555 as me, on cpu"
    assert on_the_way[0] == "step 4: loss 1.5000, 4 samples/s"
    assert 15 <= len(on_the_way) <= 20
    assert last == "the run is finished: 100 pieces of batches, 400 samples in 1:40; 0 B sent, 0 B received"
    silent = NodeLines("silent", _WORDS)
    silent.joined(worker, WELCOME)
    silent.ended("the run is finished", worker)
    flush_all()
    assert capfd.readouterr().err == ""


# -- the nodes' arguments ----------------------------------------------------------------------------------


def test_a_criterion_of_the_server_needs_a_word_from_the_nodes(calls: Any) -> None:
    """It is sent as a program where it can be (tests/process); one that cannot is never replaced by another."""

    def odd(output: Tensor, target: Tensor) -> Tensor:
        weight = 2.0 if float(target.sum()) > 3 else 1.0  # looks at values: cannot be traced
        return F.cross_entropy(output, target) * weight

    server = server_of(None, criterion=odd, max_steps=2)
    running, _ = serve(calls, server)
    with pytest.raises(Refused, match=r"its own criterion \(odd\).*same criterion="):
        node_for(server).train()
    node_for(server, criterion=odd).train()
    assert running.result(10).step == 2


def _constant(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.detach(), target)


@pytest.mark.parametrize(
    ("criterion", "said"),
    [
        (lambda output, target: 1 / 0, "ZeroDivisionError"),
        (lambda output, target: 1.0, "the criterion gave float, not the mean loss"),
        (lambda output, target: (output - target[:, None]) ** 2, r"the criterion gave a tensor of shape \[16, 2\]"),
        (_constant, "does not depend on any trainable parameter"),
    ],
)  # fmt: skip
def test_a_node_whose_criterion_computes_nothing_ends_and_the_server_computes_nothing_for_it(
    criterion: Callable[[Any, Any], Any], said: str, calls: Any
) -> None:
    server = server_of(None, max_steps=3)
    running, events = serve(calls, server)
    with pytest.raises(UsageError, match=rf"this node cannot compute .*{said}.*criterion="):
        node_for(server, criterion=criterion).train()
    assert not any(isinstance(event, StepCommitted) for event in events)
    node_for(server).train()
    assert running.result(10).step == 3


class Broken(Model):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("mine")


def test_a_node_whose_model_computes_nothing_ends_too(calls: Any) -> None:
    """Not at the first leaf, which may be the data's fault: then the server ends the run and names the sample."""
    server = server_of(None, max_steps=1000)
    running, _ = serve(calls, server)
    with pytest.raises(UsageError, match=r"this node cannot compute .*mine .*look at its model"):
        node_for(server, model=Broken).train()
    server.stop()
    assert running.result(10).outcome == "stopped"


@pytest.mark.slow
def test_a_node_that_fetches_the_servers_criterion_joins_without_a_warning(calls: Any) -> None:
    server = server_of(None, criterion=nn.CrossEntropyLoss(label_smoothing=0.5), max_steps=2)
    running, events = serve(calls, server)
    node_for(server).train()
    assert running.result(20).step == 2
    assert not [event.text for event in events if isinstance(event, Warned)]


def test_without_an_end_no_end_is_told() -> None:
    """Not what stands for it within (``job.ENDLESS``)."""
    assert shown_progress(7, ENDLESS) == "step 7"
    assert shown_progress(7, 9) == "step 7 of 9"


def test_a_nodes_criterion_counts(calls: Any) -> None:
    server = server_of(None, max_steps=1)
    running, events = serve(calls, server)
    node_for(server, criterion=nn.CrossEntropyLoss(label_smoothing=0.5)).train()
    running.result(10)
    (step,) = [event for event in events if isinstance(event, StepCommitted)]
    fresh, data = model(), Data()
    rows = Sampler(num_samples=96, batch_size=16, leaf_samples=2, seed=0).plan(0).indices.tolist()
    wanted = F.cross_entropy(fresh(data.x[rows]), data.y[rows], label_smoothing=0.5)
    assert step.loss == pytest.approx(wanted.item(), rel=1e-5)


def test_a_node_that_is_stopped_leaves_and_the_server_goes_on(calls: Any) -> None:
    server = server_of(None, max_steps=None)
    running, events = serve(calls, server)
    reached = threading.Event()
    node = node_for(server, name="brief")
    working = calls(node.train, lambda loss, batch_id: reached.set())
    assert reached.wait(60)
    with pytest.raises(UsageError, match="trains already"):
        node.train()
    node.stop()
    assert working.result(10) is None
    node.stop()  # nothing to stop
    assert server.running
    server.stop()
    assert running.result(10).outcome == "stopped"
    assert [event.name for event in events if isinstance(event, WorkerJoined)] == ["brief"]


def test_a_node_is_stopped_before_it_has_looked_for_a_server() -> None:
    """But not by a stop that came when there was nothing to stop any more."""
    begun: list[str] = []

    class Stops(nn.CrossEntropyLoss):
        def __deepcopy__(self, memo: Any) -> nn.Module:  # as train begins
            begun.append("train")
            if len(begun) == 1:
                node.stop()
            return nn.CrossEntropyLoss()

    node = TrainingNode(Model, ("localhost", 9), criterion=Stops(), device="cpu", timeout_s=0.2, log="silent")
    node.train()
    node.stop()
    with pytest.raises(Unreachable):
        node.train()
    assert begun == ["train", "train"]


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unreachable, match=f"127.0.0.1:{port}"):
        TrainingNode(Model, ("127.0.0.1", port), timeout_s=0.2).train()


def test_nobody_answers_a_second_call(calls: Any) -> None:
    """What the first call received is no sign of a server."""
    server = server_of(None, max_steps=1)
    running, _ = serve(calls, server)
    node = node_for(server, timeout_s=0.3)
    node.train()
    running.result(10)
    with pytest.raises(Unreachable, match=f":{server.port}"):
        node.train()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: TrainingNode(3), "^model is 3; give a torch.nn.Module, or"),  # type: ignore[arg-type]
        (lambda: TrainingNode(Model, "host:x"), "no valid port"),
        (lambda: TrainingNode(Model, device="abacus"), "device is 'abacus'"),
        (lambda: TrainingNode(Model, device=torch.device("meta")), "device is 'meta'"),
        (lambda: TrainingNode(Model, join_file="/nowhere/join"), "join file /nowhere/join cannot be read"),
        (lambda: CentralServer(Model(), Data(), checkpoint_interval=0), "give minutes > 0"),
        (lambda: CentralServer(Model(), Data(), secure=True, checkpoint_dir=None), "needs a checkpoint_dir"),
        (lambda: CentralServer(Model(), Data(), ip="0.0.0.0", checkpoint_dir=None), "without a secret"),
        (lambda: CentralServer(Model(), Data(), log="loud"), "log is 'loud'"),  # type: ignore[arg-type]
        (lambda: CentralServer(Model(), Data(), queue_size=0), "^queue_size is 0"),
        (lambda: CentralServer(Model(), Data(), port=70000), "port is 70000"),
        (lambda: CentralServer(Model(), Data(), port="5555"), "^port is '5555'; give a whole number"),  # type: ignore[arg-type]
        (lambda: CentralServer(Model(), Data(), ip=5), "^ip is 5"),  # type: ignore[arg-type]
        (lambda: CentralServer(Model(), Data(), batch_size="8"), "batch_size is '8'"),  # type: ignore[arg-type]
        (lambda: CentralServer(Model(), Data(), checkpoint_interval="5"), "checkpoint_interval is '5'"),  # type: ignore[arg-type]
        (lambda: CentralServer(Model(), Data(), num_epochs=0), "num_epochs is 0"),
        (
            lambda: CentralServer(Model(), Data(), compression="zip"),
            "^compression is 'zip'; give auto, or one of",
        ),
        (lambda: CentralServer(Model(), Data(), compression="topk:0.1", error_feedback=False), "error feedback"),
        (lambda: CentralServer(Model(), Data(), compression="auto", asynchronous_updates=True), "leave out"),
        (lambda: CentralServer(Model(), Data(), gradient_accumulation=0), "gradient_accumulation is 0"),
        (
            lambda: CentralServer(Model(), Data(), adaptive_batch=64, compression="int8"),
            'adaptive_batch=64: codec int8 is lossy, .* use compression="raw" or lz4',
        ),
        (
            lambda: CentralServer(Model(), Data(), adaptive_batch="auto", asynchronous_updates=True),
            r'adaptive_batch="auto": .* under asynchronous_updates=False alone',
        ),
        (
            lambda: CentralServer(nn.BatchNorm1d(4), Data(), adaptive_batch="auto"),
            "^adaptive_batch: .* all 16 samples of a batch together; give gradient_accumulation=2 or more$",
        ),
        (
            lambda: CentralServer(nn.BatchNorm1d(4), Data(), adaptive_batch=64, gradient_accumulation=0),
            "gradient_accumulation is 0",
        ),
        (lambda: CentralServer(Model(), Data(), adaptive_batch="yes"), "^adaptive_batch is 'yes'; give auto or"),  # type: ignore[arg-type]
        (lambda: TrainingNode(Model, ("localhost",)), r"^server_address is \('localhost',\); give \(host, port\)"),  # type: ignore[arg-type]
        (lambda: TrainingNode(Model, ("localhost", "5555")), "^server_address is "),  # type: ignore[arg-type]
        (lambda: TrainingNode(Model, timeout_s=-1.0), "^timeout_s is -1.0"),
        (lambda: TrainingNode(Model, token=b"abc"), "^token is of type bytes; give a text"),  # type: ignore[arg-type]
        (lambda: TrainingNode(Model, criterion=nn.CrossEntropyLoss), r"give an instance: CrossEntropyLoss\(\)"),
        (lambda: TrainingNode(Model, criterion=nn.CrossEntropyLoss(reduction="none")), 'reduction="none"'),
        (
            lambda: CentralServer(Model(), Data(), criterion=nn.MSELoss(reduction="sum")),
            'reduction="sum", a loss that grows with the samples; give reduction="mean"$',
        ),
        (lambda: TrainingNode(Model, criterion="mse"), "^criterion is 'mse'"),  # type: ignore[arg-type]
        (lambda: CentralServer(Model(), Data(), criterion=nn.MSELoss), "give an instance"),
        (lambda: CentralServer(Model(), Data(), timeout_s=4e6), "^timeout_s is 4000000.0; .* to 1000000$"),
        (lambda: CentralServer(Model(), Data(), timeout_s=-1), "^timeout_s is -1;"),
        (lambda: CentralServer(Model(), Data(), checkpoint_dir=""), "^checkpoint_dir is ''; give a path"),
        (lambda: CentralServer(nn.Linear, Data()), r"the function raised TypeError: .* write model=lambda: torch.nn"),
        (lambda: CentralServer(Model(), DataLoader(Data())), "give its dataset=loader.dataset and its batch_size$"),
        (lambda: TrainingNode(Model, log="loud"), "log is 'loud'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_said_at_once(wrong: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        wrong()
    assert "\n" not in str(raised.value)


def test_an_optimizer_that_cannot_be_made_is_told_by_its_arguments() -> None:
    for wrong in ({"optimizer_kwargs": {"lrr": 1}}, {"optimizer_class": lambda parameters: None}):
        with pytest.raises(JobError, match=r"; look at optimizer_class and optimizer_kwargs$") as raised:
            server_of(None, log="silent", **wrong).start()
        assert "lambda model" not in str(raised.value)


def test_who_waits_for_a_server_that_cannot_listen_is_let_go(calls: Any) -> None:
    """As the thread does that ``start`` does not run in."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = server_of(None, port=taken.getsockname()[1])
        starting = calls(server.start)
        assert server.listening.wait(20)
        with pytest.raises(PortInUse):
            starting.result(5)
        assert not server.running
        assert server.listening.is_set()


def test_who_waits_for_a_server_that_is_started_again_waits_until_it_listens(calls: Any) -> None:
    """After a start that failed it was taken for listening, at the port of before."""
    seen: queue.Queue[bool] = queue.Queue()

    class Asking(torch.optim.Adam):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            seen.put(server.listening.is_set())
            super().__init__(*args, **kwargs)

    server = server_of(None, optimizer_class=Asking, max_steps=1)
    server.listening.set()
    starting = calls(server.start)
    assert seen.get(timeout=20) is False
    server.stop()
    starting.result(20)


def test_bad_data_is_said_at_once() -> None:
    with pytest.raises(JobError, match="dataset is empty"):
        CentralServer(Model(), TensorDataset(torch.zeros(0, 4)))


def test_in_a_running_loop_it_says_what_to_use() -> None:
    server, node = server_of(None), TrainingNode(Model)

    async def main() -> None:
        with pytest.raises(UsageError, match=r"use w5xde_async\.Coordinator"):
            server.start()
        with pytest.raises(UsageError, match=r"use w5xde_async\.Worker"):
            node.train()

    asyncio.run(main())


# -- batches -----------------------------------------------------------------------------------------------


def test_how_a_batch_is_read() -> None:
    step = BatchLoss(F.mse_loss)
    doubled = nn.Linear(1, 1)
    nn.init.constant_(doubled.weight, 2.0)
    nn.init.zeros_(doubled.bias)
    x = torch.tensor([[1.0], [2.0]])
    assert step(doubled, {"input_ids": x, "labels": 2 * x}) == 0
    assert step(doubled, {"input_ids": x}) == F.mse_loss(2 * x, x.long())  # its own target
    assert step(doubled, (x, 2 * x)) == 0
    assert step(doubled, {"input": x, "target": 2 * x}) == 0
    assert step(doubled, {"x": x, "y": 2 * x}) == 0
    assert step(doubled, {"label": 2 * x, "image": x}) == 0

    class Masked(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            return type("Output", (), {"logits": input_ids * attention_mask})

    class Named(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"logits": 2 * x}

    for batch in ({"x": x, "y": 2 * x}, {"input_ids": x, "labels": 2 * x}, (x, 2 * x)):
        assert step(Named(), batch) == 0

    masked = {"input_ids": x, "attention_mask": torch.tensor([[0.0], [1.0]]), "labels": torch.tensor([[0.0], [2.0]])}
    assert step(Masked(), masked) == 0
    assert step(doubled, masked) == F.mse_loss(2 * x, masked["labels"])  # it takes none


@pytest.mark.parametrize("name", ["labels", "label", "targets", "target", "y"])
def test_the_target_beside_input_ids_has_any_of_its_names(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Taken for one more input, or for nothing, it left the model to copy its input without a word."""
    words = torch.arange(6).reshape(2, 3)
    scores = nn.Embedding(8, 8)
    expected = F.cross_entropy(scores(words).flatten(0, 1), (words + 1).flatten())
    assert BatchLoss(class_loss)(scores, {"input_ids": words, name: words + 1}) == expected
    assert not caplog.records


class Typed(nn.Module):
    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None, weights: Any = 1.0) -> Tensor:
        return input_ids * weights if token_type_ids is None else input_ids + token_type_ids * weights


class Swapped(nn.Module):
    def forward(self, token_type_ids: Tensor, input_ids: Tensor, weights: Any) -> Tensor:
        return input_ids + token_type_ids * weights


class Unnamed(nn.Module):
    def forward(self, x: Tensor, *, token_type_ids: Tensor, weights: Any) -> Tensor:
        return x + token_type_ids * weights


@pytest.mark.parametrize("kind", [Typed, Swapped, Unnamed])
def test_a_model_is_given_what_its_forward_takes_beside_input_ids(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    x, types = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [1.0]])
    batch = {"token_type_ids": types, "input_ids": x, "weights": 3.0, "labels": x + 3.0 * types}
    assert BatchLoss(F.mse_loss)(kind(), batch) == 0
    assert not caplog.records


class Passes(nn.Module):
    """A wrapper of somebody's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside(*args, **kwargs)


@pytest.mark.parametrize(
    ("wrap", "known"),
    [(Passes, False), (partial(torch.compile, backend="eager"), True), (nn.DataParallel, True)],
    ids=["own", "compiled", "data parallel"],
)  # fmt: skip
def test_a_wrapper_is_given_what_is_known_of_the_model_inside(wrap: Callable[[nn.Module], Any], known: bool) -> None:
    class Plain(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids

    class Masked(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return input_ids if (attention_mask is not None) == known else input_ids + 1

    x = torch.tensor([[1.0], [2.0]])
    batch = {"input_ids": x, "labels": x, "attention_mask": x, "idx": 3}
    for inside in (Plain(), Masked()):
        assert BatchLoss(F.mse_loss)(wrap(inside), dict(batch)) == 0


def test_a_part_in_eval_mode_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.BatchNorm1d(8).eval(), nn.Linear(8, 4))
    server_of(None, model=model)
    assert "0 is in eval mode, and a step begins in training mode" in caplog.text
    assert not model[0].training


def test_a_part_called_module_is_no_wrapper_and_forward_says_what_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    """A mask was left out, with a warning that forward does not take it."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Identity()

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
            return self.module(input_ids if attention_mask is None else input_ids + attention_mask)

    class Open(nn.Module):
        def forward(self, input_ids: Tensor, **others: Any) -> Any:
            return input_ids + others["attention_mask"]

    class OpenToNames(nn.Module):
        def forward(self, scale: float = 1.0, *, input_ids: Tensor, **others: Any) -> Any:
            return scale * input_ids + others["attention_mask"]

    x = torch.tensor([[1.0], [2.0]])
    for kind in (Masked, Open, OpenToNames):
        assert BatchLoss(F.mse_loss)(kind(), {"input_ids": x, "labels": x + 1, "attention_mask": torch.ones(2, 1)}) == 0
    assert not caplog.records


def test_a_forward_of_names_alone_is_given_names() -> None:
    class Named(nn.Module):
        def forward(self, *, input_ids: Tensor) -> Tensor:
            return input_ids

    x = torch.tensor([[1.0], [2.0]])
    assert BatchLoss(F.mse_loss)(Named(), {"input_ids": x, "labels": x}) == 0


def test_what_a_forward_does_not_take_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.tensor([[1.0], [2.0]])
    step, batch = BatchLoss(F.mse_loss), {"x": 0, "input_ids": x, "labels": x, "special": x, "ids": [1, 2]}
    for _ in range(2):
        assert step(Unnamed(), batch | {"token_type_ids": 0 * x, "weights": 1.0}) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "beside input_ids the batches have x, special, ids, which the model's forward does not take: they are left out"
    ]


def test_an_output_of_several_parts_needs_a_criterion() -> None:
    with pytest.raises(TypeError, match=r"the model gave .*tuple.*: give criterion="):
        class_loss((torch.ones(2, 2), torch.ones(())), torch.zeros(2, dtype=torch.int64))


def test_classes_are_the_second_axis_or_the_last() -> None:
    words, labels = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    assert class_loss(words, labels) == F.cross_entropy(words.reshape(6, 5), labels.reshape(6))
    for shape, of in (((2, 5), (2,)), ((2, 5, 3), (2, 3)), ((2, 5, 4, 4), (2, 4, 4)), ((5,), ()), ((3, 3, 2), (3, 2))):
        output, target = torch.randn(shape), torch.randint(3, of)
        assert torch.equal(class_loss(output, target), F.cross_entropy(output, target))
    likely = torch.rand(2, 5)
    assert torch.equal(class_loss(words[:, 0], likely), F.cross_entropy(words[:, 0], likely))


@pytest.mark.parametrize(
    "batch", [torch.zeros(2, 4), [torch.zeros(2, 4)], {"x": torch.zeros(2, 4)}, {"a": 1, "b": 2, "y": 3}, "text"]
)
def test_samples_that_cannot_be_read_are_told_what_to_be(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"^samples .*; give .*dicts of input_ids and labels") as raised:
        BatchLoss(class_loss)(model(), batch)
    assert "step" not in str(raised.value)


def test_batches_without_labels_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    step, words = BatchLoss(class_loss), torch.arange(6).reshape(2, 3)
    echo = nn.Embedding(8, 8)
    for batch in ({"input_ids": words, "labels": words}, {"input_ids": words}, {"input_ids": words}):
        step(echo, batch)
    assert [record.getMessage()[:31] for record in caplog.records] == ["the batches have no labels: inp"]


@pytest.mark.parametrize(("output", "target"), [((2, 3, 3), (2, 3)), ((2, 3, 3, 3), (2, 3, 3)), ((4, 4, 4), (4, 4))])
def test_shapes_that_fit_classes_on_two_axes_are_refused(output: tuple[int, ...], target: tuple[int, ...]) -> None:
    """A sequence as long as the vocabulary: either guess would train another objective without a word."""
    logits, labels = torch.randn(output), torch.randint(2, target)
    with pytest.raises(ValueError, match=r"two ways: give criterion=torch\.nn\.CrossEntropyLoss\(\) .* last") as raised:
        class_loss(logits, labels)
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(
        "criterion=lambda output, target: torch.nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())"
    )


def test_one_class_axis_is_one_whatever_the_other_axes() -> None:
    last, second = torch.randn(2, 7, 5), torch.randn(2, 5, 7)
    labels = torch.randint(5, (2, 7))
    assert class_loss(last, labels) == F.cross_entropy(last.flatten(0, 1), labels.flatten())
    assert class_loss(second, labels) == F.cross_entropy(second, labels)


class Words(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = (torch.arange(6) + index) % 8
        return {"x": words, "y": (words + 1) % 8}


def test_a_server_trains_on_words_and_samples_of_x_and_y_without_a_criterion(calls: Any) -> None:
    torch.manual_seed(2)
    given = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))
    server = server_of(
        None, model=given, dataset=Words(), max_steps=None, num_epochs=4, optimizer_kwargs={"lr": 0.05}
    )  # fmt: skip
    running, events = serve(calls, server)
    node_for(server, model=lambda: nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))).train()
    running.result(15)
    losses = [event.loss for event in events if isinstance(event, StepCommitted)]
    assert losses[-1] < 0.2 * losses[0]


def test_a_server_takes_a_timeout_and_shows_a_dashboard(calls: Any) -> None:
    for wrong in (0, -1.0):
        with pytest.raises(UsageError, match="timeout_s"):
            server_of(None, timeout_s=wrong)
    with pytest.raises(UsageError, match="dashboard"):
        server_of(None, dashboard="localhost:99999")
    server = server_of(None, timeout_s=2.0, dashboard="127.0.0.1:0", max_steps=None)
    running, events = serve(calls, server)
    (started,) = [event for event in events if isinstance(event, RunStarted)]
    with urllib.request.urlopen(started.dashboard, timeout=5) as page:
        assert page.status == 200
    node = node_for(server, timeout_s=0.5)
    working = calls(node.train, lambda loss, batch_id: server.stop() if int(batch_id.partition("_")[0]) > 4 else None)
    running.result(15)
    working.result(10)
    assert server._config.silence_s == 2.0


def test_batch_norm_has_whole_batches_where_they_grow() -> None:
    data = TensorDataset(torch.randn(65, 4), torch.zeros(65, dtype=torch.int64))
    server = CentralServer(nn.BatchNorm1d(4), data, 16, checkpoint_dir=None, gradient_accumulation=2, adaptive_batch=64)
    job = server._job
    assert (job.batch_size, job.leaf_samples, job.microbatch_samples, job.drop_last) == (32, 16, 16, True)
    BatchGrowth(sampler_of(job), torch.optim.SGD([torch.zeros(1)]), target=64, patience=1, epochs=1, max_steps=None)
    rateless = torch.optim.Optimizer([torch.zeros(1)], {})
    with pytest.raises(UsageError, match="--target-batch multiplies the learning rate"):
        BatchGrowth(sampler_of(job), rateless, target=64, patience=1, epochs=1, max_steps=None)


@pytest.mark.parametrize(
    ("samples", "batch", "accumulation", "dropped"),
    [
        (1797, 16, 1, False),
        (17, 16, 1, True),
        (33, 16, 1, True),
        (16, 16, 1, False),
        (65, 16, 2, True),
        (80, 16, 2, False),
    ],
)
def test_batch_norm_sees_whole_batches_and_never_one_sample(
    samples: int, batch: int, accumulation: int, dropped: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(samples, 4), torch.zeros(samples, dtype=torch.int64))
    server = CentralServer(model, data, batch, checkpoint_dir=None, gradient_accumulation=accumulation)
    assert (server._job.microbatch_samples, server._job.drop_last) == (batch, dropped)
    plain = CentralServer(nn.Linear(4, 2), data, batch, checkpoint_dir=None, gradient_accumulation=accumulation)
    assert (plain._job.microbatch_samples < batch, plain._job.drop_last) == (True, False)
