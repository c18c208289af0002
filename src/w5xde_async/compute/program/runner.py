"""What the sandbox's child does: it computes what opens files or starts threads once (``warm_up``), and then, behind
closed doors, the blocks of a stranger's program (``serve``).

Imported before the doors are closed; nothing here may import, or open a file, after that.
"""

from __future__ import annotations

import codecs
import socket
from contextlib import closing, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.block import LeafSpec, Task, autocast
from w5xde_async.compute.engine import Engine, LeafError, use_deterministic_kernels
from w5xde_async.compute.program import channel
from w5xde_async.compute.program.channel import SlotPool
from w5xde_async.compute.program.form import DEVICE, Document, Graph, Input, Node, Program, Ref, encode, parse
from w5xde_async.compute.program.operators import NAMES, RECOMPUTE, find
from w5xde_async.compute.program.program_job import ProgramJob
from w5xde_async.compute.program.switches import Switched
from w5xde_async.compute.transfer import Lent
from w5xde_async.errors import ProgramRefused, W5xdeError
from w5xde_async.params.flat import FlatState, ResultVector
from w5xde_async.params.layout import Layout


def warm_up(device: str, threads: int, precision: str, *, deterministic: bool = False) -> None:
    """Whatever opens files, loads libraries or starts threads at its first use is used once."""

    torch.set_num_threads(threads)
    if deterministic:
        use_deterministic_kernels()
    if torch.device(device).type == "cuda":  # whatever names no device would make a context on the first one
        torch.cuda.set_device(device)

    for encoding in ("ascii", "utf-8", "latin-1"):
        codecs.lookup(encoding)
    for name in NAMES:
        find(name)
    big = torch.randn(1 << 21, requires_grad=True)
    torch.autograd.backward((big.exp() * big.tanh()).sum())
    modules: list[tuple[nn.Module, torch.Tensor]] = [
        (nn.Linear(300, 300), torch.randn(300, 300)), (nn.LSTM(16, 16), torch.randn(9, 8, 16)),
        (nn.GRU(16, 16), torch.randn(9, 8, 16)),
        (nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.1)), torch.randn(8, 8, 24, 24)),
        (nn.Conv1d(8, 8, 3), torch.randn(4, 8, 24)), (nn.ConvTranspose2d(8, 8, 3), torch.randn(4, 8, 12, 12)),
        (nn.Conv3d(4, 4, 3), torch.randn(2, 4, 8, 8, 8)), (nn.GroupNorm(2, 8), torch.randn(4, 8, 9)),
        (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.randn(4, 16, 32)),
    ]  # fmt: skip
    in_precision = autocast(precision) or nullcontext
    for module, given in modules:
        with suppress(RuntimeError):  # not every machine has every kernel in half precision
            with in_precision():
                out = module(given)
            torch.autograd.backward((out[0] if isinstance(out, tuple) else out).float().sum())
    functional.cross_entropy(torch.randn(600, 600), torch.randint(600, (600,)))
    torch.sort(torch.randn(70_000)), torch.topk(torch.randn(70_000), 9), torch.cumsum(torch.randn(300, 300), 0)
    torch.einsum("ij,jk->ik", torch.randn(64, 64), torch.randn(64, 64))

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)
            self.register_buffer("seen", torch.zeros(3))

    model = Tiny()
    layout = Layout.of(model)
    index = {entry.name: number for number, entry in enumerate(layout.entries)}

    def node(name: str, *arguments: Any, **named: Any) -> Node:
        operator = find(name)
        assert operator is not None
        return Node(operator, arguments, tuple(named.items()))

    first = len(layout.entries) + 2
    nodes = (
        node(RECOMPUTE, 2, True, False),
        node("linear.default", Ref(first - 2), Ref(index["head.weight"]), Ref(index["head.bias"])),
        node("dropout.default", Ref(first + 1), 0.1, True),
        node("zeros.default", (3,), dtype=torch.float32, device=DEVICE),
        node("add_.Tensor", Ref(index["seen"]), Ref(first + 3)),
        node(RECOMPUTE, 1, True, True),
        node("mul.Tensor", Ref(first + 2), 1.0),
        node("cross_entropy_loss.default", Ref(first + 6), Ref(first - 1)),
    )
    inputs = (Input(torch.float32, ((0, 2, 1 << 20, 8), 4)), Input(torch.int64, ((0, 2, 1 << 20, 8),)))

    structure, tensors = flatten((torch.randn(8, 4), torch.randint(3, (8,))))
    graph = Graph(inputs, nodes, first + 7, ())
    document = encode(Program(layout.fingerprint, structure, (), (), (), (graph,), len(layout.entries)))
    replica = ProgramJob.of(
        parse(document, layout), layout, torch.device(device), precision=precision, memory_bytes=1 << 30
    )
    engine = Engine(replica, LeafSpec(1, precision, 4, 2), device=device)
    task = Task(step=0, start=0, samples=(8,), loss_scale=1.0, structure=structure, packed=False, tensors=tensors)
    for _ in range(2):
        engine.load(range(len(layout.buckets)))
        engine.counted(task, lambda bucket, vector: None)
    engine.close()
    with suppress(ProgramRefused):  # an error's own way, once
        parse(Document(b"", ()), layout)


def serve(control: socket.socket) -> None:
    """Build what the worker sends, then compute what it asks for, until it hangs up."""

    descriptor, switched = control.fileno(), Switched()
    with closing(switched), suppress(EOFError, OSError):
        runner: _Runner | None = None
        while True:
            order = channel.order_of(descriptor)
            if isinstance(order, channel.Build):
                try:
                    runner = _Runner(control, order, switched)
                except ProgramRefused as error:
                    channel.send(descriptor, channel.Refused(error.reason[:1000], error.node, error.operator[:100]))
                except (W5xdeError, RuntimeError, ValueError, TypeError, MemoryError) as error:
                    channel.send(descriptor, channel.Refused(f"{type(error).__name__}: {error}"[:1000], -1, ""))
                else:
                    channel.send(descriptor, channel.Ready())
            elif runner is not None and isinstance(order, channel.Load):
                runner.engine.load(order.buckets)
            elif runner is not None and isinstance(order, channel.Compute):
                runner.compute(order)


class _Runner:
    """An engine over the memory that the worker has too."""

    def __init__(self, control: socket.socket, build: channel.Build, switched: Switched) -> None:

        torch.set_num_threads(build.threads)
        self._control = control.fileno()
        texts, state, slots, self._batches = channel.receive_regions(control, build.regions)
        text = bytes(texts[: build.layout_bytes + build.text_bytes].numpy())
        layout = Layout.parse(text[: build.layout_bytes])
        document = Document(text[build.layout_bytes :], tuple(place.tensor(texts).clone() for place in build.constants))
        device, program = torch.device(build.device), parse(document, layout)
        switched.say(program.said)
        replica = ProgramJob.of(
            program, layout, device, precision=build.spec.precision, memory_bytes=build.memory_bytes
        )
        self._pool = SlotPool(layout, slots)
        self.engine = Engine(replica, build.spec, device=device, lent=Lent(FlatState(layout, memory=state), self._pool))

    def compute(self, order: channel.Compute) -> None:

        pool, engine, control = self._pool, self.engine, self._control
        for number in order.released:
            pool.give_number(number)
        task = Task(
            step=order.step,
            start=order.start,
            samples=order.samples,
            loss_scale=order.loss_scale,
            structure=order.structure,
            packed=order.packed,
            tensors=[place.tensor(self._batches) for place in order.tensors],
        )

        def emit(bucket: int, vector: ResultVector) -> None:
            channel.send(control, channel.Emit(bucket, pool.number_of(vector)))

        try:
            outcome, flops = engine.counted(task, emit) if order.counting else (engine.compute(task, emit), 0)
        except LeafError as error:
            slots = pool.numbers_of(error.vectors)
            channel.send(control, channel.Failed(error.leaf, error.error, error.traceback, slots, error.device_lost))
            return
        done = channel.Done(
            losses=outcome.losses,
            metric_names=outcome.metric_names,
            metrics=outcome.metrics,
            untouched=outcome.untouched,
            absent=outcome.absent,
            splits=outcome.splits,
            slots=pool.numbers_of(outcome.vectors),
            flops=flops,
            drew=outcome.drew,
        )
        channel.send(control, done)
