"""The same blocks by two engines: one that does everything in turn, and one whose order of events varies.

Blocks of several sizes, versions of which the memory is received into again at once, results that are read late, lack
of memory at the worst moment. What each engine gave is compared to the last bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from tests.support import jobs
from torch import Tensor

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import ComputedBlock, Task
from w5xde_async.compute.engine import Engine
from w5xde_async.job import Job
from w5xde_async.params.flat import FlatState, ResultVector, bytes_of

NAMES = ("mlp_sgd", "cnn_adamw", "gpt_adamw", "odd", "accumulated", "metrics")  #: of jobs whose blocks ``task`` makes
BUCKET_BYTES = 4 << 10
GARBAGE = 0xAB  # as float32 about -1e-12, as int64 a large negative number: neither neutral nor plausible


class Hunger:
    """Lack of memory at the end of a block's last backward pass, when most of its buckets have left."""

    left = 0  #: passes until then; 0: none

    class _Pass(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            Hunger.left -= 1
            if Hunger.left == 0:
                raise torch.OutOfMemoryError("no memory left")
            return gradient

    class GPT(jobs.GPT):
        def __init__(self) -> None:
            super().__init__()
            self.embed.register_forward_hook(lambda module, args, output: Hunger._Pass.apply(output))


@dataclass
class Block:
    """What an engine gave for one block."""

    outcome: ComputedBlock
    buckets: dict[int, bytes]
    order: list[int]


class Line:
    """Takes what an engine emits, as a network does: it reads it at once, or much later, and releases it then.

    ``left``: buckets that it takes from the device, as a codec does: at once."""

    def __init__(self, engine: Engine, late: random.Random | None = None, left: Collection[int] = frozenset()) -> None:
        self.engine, self._late, self._left = engine, late, left
        engine.leave_on_device(left)
        self._held: list[tuple[Block, dict[int, ResultVector]]] = []

    def block(self, task: Task) -> Block:
        found: dict[int, ResultVector] = {}
        order: list[int] = []
        taken: dict[int, bytes] = {}

        def emit(bucket: int, vector: ResultVector) -> None:
            assert bucket not in order
            order.append(bucket)
            if bucket in self._left:
                taken[bucket] = bytes(bytes_of(vector.buckets[bucket].cpu()))
            else:
                found[bucket] = vector

        block = Block(self.engine.compute(task, emit), taken, order)
        self._held.append((block, found))
        while self._held and (self._late is None or self._late.random() < 0.5 or len(self._held) > 3):
            self._read(*self._held.pop(0))
        return block

    def close(self) -> None:
        for held in self._held:
            self._read(*held)
        self.engine.close()

    def _read(self, block: Block, found: dict[int, ResultVector]) -> None:
        for bucket, vector in found.items():
            block.buckets[bucket] = bytes(bytes_of(vector.buckets[bucket]))
        for vector in block.outcome.vectors:
            self.engine.release(vector)


def task(job: Job, leaves: int, step: int = 0) -> Task:
    """A block of a job whose samples are tensors."""
    count = leaves * job.leaf_samples
    samples = [job.dataset[(step * 7 + index) % len(job.dataset)] for index in range(count)]
    batch = tuple(torch.stack([torch.as_tensor(value) for value in column]) for column in zip(*samples, strict=True))
    structure, tensors = flatten(batch)
    return Task(
        step=step, start=0, samples=(job.leaf_samples,) * leaves, loss_scale=1.0, structure=structure, packed=True,
        tensors=tensors,
    )  # fmt: skip


def new_values(state: FlatState, seed: int) -> list[int]:
    """A version of the parameters: some buckets have others. Their numbers."""
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    buckets = state.layout.buckets
    changed = draw.sample(buckets, draw.randint(1, len(buckets)))
    for bucket in changed:
        values = state.bucket(bucket)
        if values.is_floating_point():
            values.mul_(1 + 0.01 * torch.rand(values.shape, generator=generator).to(values.dtype))
    return [bucket.index for bucket in changed]


def spoil(state: FlatState) -> None:
    """The next version is being received into the same memory."""
    for group in state.groups:
        bytes_of(group)[:] = bytes([GARBAGE]) * (group.numel() * group.element_size())


class Turn(NamedTuple):
    """What an engine is to do next. ``is_new``: it loads a version first; ``hungry``: memory lacks once."""

    step: int
    leaves: int
    is_new: bool
    hungry: bool


def turns(seed: int, blocks: int) -> list[Turn]:
    """Blocks of one to eight leaves."""
    draw = random.Random(seed)
    return [
        Turn(step, draw.choice((1, 1, 2, 3, 4, 5, 8)), draw.random() < 0.4, step == blocks // 2)
        for step in range(blocks)
    ]  # fmt: skip


class Played(NamedTuple):
    """What an engine gave; ``versions``: the values that were loaded at a step, by bucket."""

    blocks: list[Block]
    versions: dict[int, dict[int, bytes]]


def play(engine: Engine, job: Job, plan: list[Turn]) -> Played:
    """One after the other. Closes the engine."""
    versions: dict[int, dict[int, bytes]] = {}
    line, blocks = Line(engine), []
    for turn in plan:
        if turn.is_new:
            changed = new_values(engine.incoming, turn.step)
            engine.load(changed)
            versions[turn.step] = {bucket: bytes(engine.incoming.bucket_bytes[bucket]) for bucket in changed}
        Hunger.left = turn.leaves if turn.hungry else 0
        blocks.append(line.block(task(job, turn.leaves, turn.step)))
    line.close()
    return Played(blocks, versions)


def play_again(
    engine: Engine, job: Job, plan: list[Turn], versions: dict[int, dict[int, bytes]], seed: int,
    left: Collection[int] = frozenset(),
) -> Played:  # fmt: skip
    """The same, while results are read late and the next version is received where the last one was."""
    line, blocks = Line(engine, random.Random(seed), left), []
    for turn in plan:
        if turn.is_new:
            for bucket, values in versions[turn.step].items():
                engine.incoming.bucket_bytes[bucket][:] = values
            engine.load(versions[turn.step])
            if engine.live is not engine.incoming:
                spoil(engine.incoming)
        Hunger.left = turn.leaves if turn.hungry else 0
        blocks.append(line.block(task(job, turn.leaves, turn.step)))
    line.close()
    return Played(blocks, versions)


@contextmanager
def one_after_the_other(engine: Engine) -> Iterator[Engine]:
    """On CUDA nothing overlaps: the host waits for the device before each copy of a result and after it."""
    send = engine._transfer.send

    def sent(*arguments: Any) -> None:
        torch.cuda.synchronize(engine.device)
        send(*arguments)
        torch.cuda.synchronize(engine.device)

    if engine.device.type == "cuda":
        engine._transfer.send = sent  # type: ignore[method-assign]
    yield engine


@contextmanager
def delayed_at_random(engine: Engine, seed: int, *, most_cycles: int = 1 << 22) -> Iterator[Engine]:
    """On CUDA either stream stands still now and then, for up to ``most_cycles`` of the device's clock."""
    draw, step, send = random.Random(seed), engine._step, engine._transfer.send

    def pause() -> None:
        if draw.random() < 0.3:
            torch.cuda._sleep(draw.randrange(most_cycles))

    def stepped(*arguments: Any) -> Any:
        pause()
        result = step(*arguments)
        pause()
        return result

    def sent(*arguments: Any) -> None:
        with torch.cuda.stream(engine._transfer._side):
            pause()
        send(*arguments)

    if engine.device.type == "cuda":
        engine._step = stepped
        engine._transfer.send = sent  # type: ignore[method-assign]
    yield engine


def differences(expected: list[Block], actual: list[Block]) -> list[str]:
    """What differs, to the last bit."""
    found = []
    for number, (mine, theirs) in enumerate(zip(expected, actual, strict=True)):
        fields = ("losses", "metric_names", "metrics", "untouched", "absent", "splits")
        others = [f for f in fields if repr(getattr(mine.outcome, f)) != repr(getattr(theirs.outcome, f))]
        found += [f"block {number}: {field}" for field in others]
        if sorted(mine.order) != sorted(theirs.order):
            found.append(f"block {number}: other buckets")
        found += [f"block {number}: bucket {b}" for b in mine.buckets if mine.buckets[b] != theirs.buckets.get(b)]
    return found


def hungry() -> Job:
    return replace(jobs.gpt_adamw(), model=Hunger.GPT)


#: Jobs to play, by name.
JOBS: dict[str, Callable[[], Job]] = {**{name: jobs.ALL[name] for name in NAMES}, "hungry": hungry}
