"""Every rule, and every codec that claims it, brings the digits to the accuracy of exact sync; the rest is refused.

First the rooms (``updates``, ``codecs``) in a loop of one process that stands for coordinator and three workers, which
take turns, results and parameters through the codec both ways, feedback by verdict. All use the same samples, the
same number of times. What a codec must not do without is switched off, so that a test that cannot fail shows.
Then some of them in a real run, where the order of arrival is chance: within 3 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import pytest
import torch
from tests.support import jobs
from tests.support.cluster import train
from tests.support.turns import strided, taking_turns
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from w5xde_async.codecs.codec import BytePool
from w5xde_async.codecs.feedback import Feedback
from w5xde_async.codecs.registry import codec, refuse_divergence
from w5xde_async.errors import UsageError
from w5xde_async.job import Job
from w5xde_async.updates.asynchronous import AsynchronousConfig, AsynchronousRule
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.updates.delayed import DelayedNesterovConfig, DelayedNesterovRule
from w5xde_async.updates.local import LocalStepsConfig, LocalStepsRule
from w5xde_async.updates.streaming import StreamingReplica, StreamingRule

WORKERS, LEAF, STEPS, HELD_OUT = 3, 32, 300, 360
RATE, MOMENTUM = 0.4, 0.5
SLACK = 0.01
#: Codecs and the rule they are tried with: the sparsest is made for the Deltas of local steps.
CODECS = {
    "bf16": "sync", "fp16": "sync", "lz4:int8": "sync", "int8": "sync", "int4": "sync", "sign": "sync",
    "topk:0.01": "sync", "sparseloco": "local",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """More than one costs more than it brings at this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, held-out images and labels."""
    images, labels = jobs.digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(2024))
    images, labels = images[order], labels[order]
    return images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]


def rate(part: float) -> float:
    """The learning rate when ``part`` of the run is done."""
    return RATE * (1 - 0.9 * part)


class Replica:
    """An MLP whose parameters and gradients are views of flat vectors."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
        parameters = list(self.model.parameters())
        self.values = torch.cat([p.detach().flatten() for p in parameters])
        self.gradient = torch.zeros_like(self.values)
        self.matrices: list[int] = []  # where they begin
        at = 0
        for p in parameters:
            if p.dim() > 1:
                self.matrices.append(at)
            p.data = self.values[at : at + p.numel()].view_as(p)
            p.grad = self.gradient[at : at + p.numel()].view_as(p)
            at += p.numel()

    def backward(self, number: int) -> Tensor:
        """The mean gradient of leaf ``number`` of the run."""
        images, labels, _, _ = digits()
        rows = torch.randint(len(images), (LEAF,), generator=torch.Generator().manual_seed(number))
        self.gradient.zero_()
        nn.functional.cross_entropy(self.model(images[rows]), labels[rows]).backward()
        return self.gradient

    def accuracy(self) -> float:
        _, _, images, labels = digits()
        with torch.no_grad():
            return (self.model(images).argmax(1) == labels).float().mean().item()


class Uplink:
    """Results of every worker through a codec, with or without feedback."""

    def __init__(self, name: str, numel: int, *, feedback: bool = True) -> None:
        self._codec, self._pool, self._feedback = codec(name), BytePool(), feedback
        self._workers = [Feedback(self._codec, {0: numel}, pool=self._pool) for _ in range(WORKERS)]
        self._key = 0

    def send(self, worker: int, values: Tensor) -> Tensor:
        """What the coordinator decodes."""
        self._key += 1
        sender = self._workers[worker]
        encoded = sender.encode(self._key, 0, values) if self._feedback else self._codec.encode(values, self._pool)
        decoded = torch.empty_like(values)
        encoded.codec.decode(encoded.data, decoded)
        sender.settle(self._key, applied=True)
        return decoded


class Downlink:
    """What workers hold: every version adds the encoded difference, so that its error is in the next difference."""

    def __init__(self, name: str, start: Tensor) -> None:
        self._codec, self._pool = codec(name), BytePool()
        self.published = start.clone()

    def publish(self, values: Tensor) -> None:
        encoded = self._codec.encode(values - self.published, self._pool)
        encoded.codec.add_to(encoded.data, self.published)
        self._pool.give(encoded.data)


@dataclass
class Run:
    """The coordinator's parameters, the workers' replica (they take turns), the links."""

    theta: Replica
    replica: Replica
    up: Uplink
    down: Downlink

    @classmethod
    def begin(cls, uplink: str, downlink: str, *, feedback: bool = True) -> Run:
        theta, replica = Replica(), Replica()
        up = Uplink(uplink, theta.values.numel(), feedback=feedback)
        return cls(theta, replica, up, Downlink(downlink, theta.values))

    def gradient(self, worker: int, number: int, at: Tensor | None = None) -> Tensor:
        self.replica.values.copy_(self.down.published if at is None else at)
        return self.up.send(worker, self.replica.backward(number))


def sgd(theta: Replica) -> Callable[[Tensor, float], None]:
    momentum = torch.zeros_like(theta.values)

    def step(gradient: Tensor, part: float) -> None:
        momentum.mul_(MOMENTUM).add_(gradient)
        theta.values.sub_(momentum, alpha=rate(part))

    return step


def sync(run: Run) -> None:
    step = sgd(run.theta)
    for number in range(STEPS):
        total = torch.zeros_like(run.theta.values)
        for worker in range(WORKERS):
            total += run.gradient(worker, number * WORKERS + worker)
        step(total / WORKERS, number / STEPS)
        run.down.publish(run.theta.values)


def asynchronous(run: Run) -> None:
    """Speeds 1:2:4; every result is applied as it comes, at the parameters that have become of the lease's."""
    rule = AsynchronousRule(run.theta.values.numel(), AsynchronousConfig())
    step = sgd(run.theta)
    held = [(run.down.published.clone(), 0) for _ in range(WORKERS)]
    order: Iterator[int] = (worker for _ in range(STEPS * WORKERS) for worker in (0, 1, 0, 2, 0, 1, 0))
    for version in range(STEPS * WORKERS):
        worker = next(order)
        leased, base = held[worker]
        total = run.gradient(worker, version, leased) * LEAF
        staleness = version - base
        assert rule.offer(total, samples=LEAF, staleness=staleness).accepted
        step(rule.take() / WORKERS, version / STEPS / WORKERS)
        run.down.publish(run.theta.values)
        held[worker] = (run.down.published.clone(), version + 1)


INNER = 10


def steps_of(run: Run, worker: int, first: int, start: Tensor) -> Tensor:
    """``INNER`` steps of a worker's own from ``start``; its Delta."""
    run.replica.values.copy_(start)
    for number in range(first, first + INNER):
        run.replica.values.sub_(run.replica.backward(number * WORKERS + worker), alpha=2 * rate(number / STEPS))
    return start - run.replica.values


def local(run: Run) -> None:
    rule = LocalStepsRule(run.theta.values, LocalStepsConfig(learning_rate=0.7, momentum=0.5))
    for first in range(0, STEPS, INNER):
        for worker in range(WORKERS):
            delta = run.up.send(worker, steps_of(run, worker, first, run.down.published))
            assert rule.offer(delta, samples=INNER * LEAF).accepted
        rule.close()
        run.down.publish(run.theta.values)


def delayed(run: Run) -> None:
    """Deltas count as they come; each worker's base is a version older than what it adds to."""
    rule = DelayedNesterovRule(
        run.theta.values, DelayedNesterovConfig(period=WORKERS, learning_rate=0.7, momentum=0.5)
    )  # fmt: skip
    held = [run.down.published.clone() for _ in range(WORKERS)]
    for first in range(0, STEPS, INNER):
        for worker in range(WORKERS):
            delta = run.up.send(worker, steps_of(run, worker, first, held[worker]))
            assert rule.offer(delta, samples=INNER * LEAF, staleness=1).accepted
            run.down.publish(run.theta.values)
            held[worker] = run.down.published.clone()


def streaming(run: Run) -> None:
    """Two fragments in turns, half a round apart, used one inner step late. Their Deltas travel as whole vectors."""
    edges = run.theta.matrices
    fragments = strided([*zip(edges, [*edges[1:], run.theta.values.numel()], strict=True)], 2)
    turns = taking_turns(2, INNER)
    rule = StreamingRule(run.theta.values, fragments, LocalStepsConfig(learning_rate=0.7, momentum=0.5))
    locals_ = [run.theta.values.clone() for _ in range(WORKERS)]
    replicas = [StreamingReplica(values, fragments) for values in locals_]
    for number in range(1, STEPS + 1):
        for worker, values in enumerate(locals_):
            run.replica.values.copy_(values)
            values.sub_(run.replica.backward(number * WORKERS + worker), alpha=2 * rate(number / STEPS))
        for fragment in next(turns):
            piece, version = fragments[fragment], rule.versions[fragment]
            for worker, replica in enumerate(replicas):
                whole = torch.zeros_like(run.theta.values)
                piece.scatter_(whole, replica.send(fragment, number))
                sent = piece.gather(run.up.send(worker, whole))
                assert rule.offer(fragment, sent, samples=1, version=version).accepted
            rule.close(fragment)
            run.down.publish(run.theta.values)
            for replica in replicas:
                replica.deliver(fragment, piece.gather(run.down.published))
        for replica in replicas:
            replica.mix(number)


RULES: dict[str, Callable[[Run], None]] = {
    "sync": sync, "asynchronous": asynchronous, "local": local, "delayed": delayed, "streaming": streaming,
}  # fmt: skip


def accuracy(rule: str, uplink: str = "raw", downlink: str = "raw", *, feedback: bool = True) -> float:
    run = Run.begin(uplink, downlink, feedback=feedback)
    RULES[rule](run)
    return run.theta.accuracy()


@lru_cache(maxsize=1)
def exact() -> float:
    found = accuracy("sync")
    assert found > 0.93
    return found


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "sync"])
def test_every_rule_comes_to_the_accuracy_of_exact_sync(rule: str) -> None:
    assert accuracy(rule) >= exact() - SLACK


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_every_codec_comes_to_the_accuracy_of_exact_sync(name: str) -> None:
    assert accuracy(CODECS[name], name) >= exact() - SLACK


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["asynchronous", "local", "delayed", "streaming"])
def test_rules_with_codecs_both_ways(rule: str) -> None:
    assert accuracy(rule, "int8", "int8") >= exact() - SLACK
    assert accuracy(rule, "topk:0.1", "int4") >= exact() - SLACK


@pytest.mark.slow
def test_what_does_not_converge_is_refused_and_would_not() -> None:
    """Without feedback the top hundredth of each gradient is all that is ever learnt from it."""
    for name in ("topk:0.01", "sign", "sparseloco", "lz4:topk:0.01"):
        with pytest.raises(UsageError, match="error feedback"):
            refuse_divergence(codec(name), feedback=False)
        refuse_divergence(codec(name), feedback=True)
    assert accuracy("sync", "topk:0.01", feedback=False) < exact() - 3 * SLACK


def test_with_a_fifth_refused_nothing_is_lost_where_workers_learn_their_verdicts() -> None:
    """What counted + residuals = what was computed and not refused; bench/feedback.py has what that costs."""
    missing = {}
    for told in (True, False):
        run, chance, key, refused = Run.begin("topk:0.05", "raw"), Random(5), 0, 0
        workers = [Feedback(codec("topk:0.05"), {0: run.theta.values.numel()}, pool=BytePool()) for _ in range(WORKERS)]
        kept = torch.zeros(run.theta.values.numel(), dtype=torch.float64)
        computed = torch.zeros_like(kept)
        for number in range(60):
            run.replica.values.copy_(run.theta.values)
            gradient = run.replica.backward(number)
            encoded = workers[number % WORKERS].encode(key := key + 1, 0, gradient)
            decoded = torch.zeros_like(gradient)
            encoded.codec.add_to(encoded.data, decoded)
            counts = chance.random() >= 0.2
            refused += not counts
            if counts:
                kept += decoded
                run.theta.values.sub_(decoded, alpha=RATE)
                computed += gradient
            workers[number % WORKERS].settle(key, applied=counts or not told)
        kept += sum(residual.double() for worker in workers if (residual := worker.residual(0)) is not None)
        missing[told] = float((kept - computed).norm() / computed.norm())
        assert 6 <= refused <= 18
    assert missing[True] < 1e-6
    assert missing[False] > 0.02


def job() -> Job:
    """Steps of one leaf: under the rules of local steps each is one worker's."""
    images, labels, held_images, held_labels = digits()
    steps = WORKERS * STEPS // 2

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"accuracy": (model(held_images).argmax(1) == held_labels).float().mean().item()}

    return Job(
        model=lambda: nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)),
        dataset=TensorDataset(images, labels),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda at: 1 - 0.9 * min(at / steps, 1)
        ),
        batch_size=LEAF,
        microbatch_size=LEAF,
        max_steps=steps,
        evaluate=evaluate,
        evaluate_every=1 << 30,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "update",
    [
        {"rule": "local", "codec": "int8"},
        {"rule": "streaming", "codec": "int4", "fragments": 2, "outer_lr": 0.7},
        {"rule": "async-local", "codec": "int8"},
        {"rule": "local", "codec": "fp16", "average": "radial"},
        {"rule": "local", "codec": "lz4:int8", "average": "median"},
        {"rule": "local", "average": "median"},
    ],
    ids=lambda update: "-".join(str(value) for value in update.values()),
)
async def test_in_a_run(update: dict[str, Any]) -> None:
    config = UpdateConfig(**{"inner_steps": 10, "outer_momentum": 0.5, **update})
    result = await train(job, workers=WORKERS, update=config)
    assert result.metrics["accuracy"] >= exact() - 3 * SLACK
