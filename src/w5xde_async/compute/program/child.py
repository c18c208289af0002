"""``python -P -m w5xde_async.compute.program.child CONTROL DEVICE THREADS``: where a stranger's program runs.

Started fresh by a worker (``sandbox``), with an environment of a few harmless names and no open file but a socket to
the worker. Imports, is told the precision, warms up whatever opens files or starts threads at its first use, closes the
doors (``sealing``), says so, and only then is told of a program. Ends when its standard input does: the worker is gone.

After the doors are closed nothing here may open a file: no import, no line of a traceback's source.
"""

from __future__ import annotations

import codecs
import faulthandler
import importlib
import linecache
import os
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["main", "serve"]

_MOST_TOLD = 1 << 30  # of what the worker says, who is believed
_DESCRIPTORS = 64


def main(then: Callable[[socket.socket], None] | None = None) -> int:
    """Warm up, close the doors, serve. ``then`` takes the place of serving."""
    from w5xde_async.compute.program import sealing

    descriptor, device, threads = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    memory_bytes = int(sys.argv[4])
    control = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with_stdin, name="w5xde-parent", daemon=True).start()
    from w5xde_async.compute.program.channel import receive, send

    cuda = device.startswith("cuda")
    try:
        sealing.restrict_files(_needed_to_import(), _DEVICES if cuda else ("/dev/null",))
        _import()
        _, precision = receive(descriptor, _MOST_TOLD)
        _warm_up(device, threads, precision)
        _shut(control, cuda=cuda, memory_bytes=memory_bytes)
    except EOFError:
        return 0
    except Exception as error:
        with suppress(OSError):
            send(descriptor, ["failed", f"{type(error).__name__}: {error}"[:1000]])
        return 1
    send(descriptor, ["sealed", sealing.landlock_abi() if cuda else 0])
    (then or serve)(control)
    return 0


def _end_with_stdin() -> None:
    with suppress(OSError):
        while os.read(0, 64):
            pass
    os._exit(1)


def _needed_to_import() -> list[str]:
    """Libraries, and what they ask of the system as they start."""
    folders = {path for path in (*sys.path, sys.prefix, sys.base_prefix, sys.exec_prefix) if path}
    return [
        *folders, "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib64", "/opt",
        "/etc/ld.so.cache", "/etc/ld.so.preload", "/proc", "/sys/devices/system", "/sys/fs/cgroup", "/sys/kernel/mm",
        "/dev/urandom", "/nix/store",
    ]  # fmt: skip


def _shut(control: socket.socket, *, cuda: bool, memory_bytes: int) -> None:
    from w5xde_async.compute.program import sealing

    faulthandler.disable()
    warnings.simplefilter("ignore")
    # Messages of errors show lines of source, and imports look for files: both would be the end of this process.
    linecache.checkcache = _nothing
    linecache.updatecache = _no_lines
    if not cuda:
        sealing.close_descriptors([0, 1, 2, control.fileno()])
    sealing.limit(memory_bytes=0 if cuda else memory_bytes, descriptors=1 << 12 if cuda else _DESCRIPTORS)
    sealing.hide()
    if cuda:
        if not sealing.restrict_files(_needed_by_cuda(), _DEVICES):
            raise OSError("this kernel has no Landlock, and without it files cannot be kept from what drives a GPU")
    else:
        sealing.restrict_files()
    sys.meta_path[:] = [_NoImports()]
    sealing.filter_calls(devices=cuda)


_DEVICES = (
    "/dev/null", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset",
    "/dev/nvidia-caps", *[f"/dev/nvidia{number}" for number in range(16)],
)  # fmt: skip


def _needed_by_cuda() -> list[str]:
    """Libraries that the driver loads when it first needs them, and what it asks of the system."""
    import torch

    packages = Path(torch.__file__).parent
    libraries = [packages, packages.parent / "nvidia", packages.parent / "triton"]
    system = ("/usr/lib", "/usr/lib64", "/usr/local/cuda", "/lib", "/lib64", "/etc/ld.so.cache", "/proc/self",
              "/proc/driver/nvidia", "/proc/devices", "/sys/devices", "/sys/bus/pci")  # fmt: skip
    return [*map(str, libraries), *system]


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _no_lines(*_: Any, **__: Any) -> list[str]:
    return []


class _NoImports:
    """Says what an import after sealing is: not found, without looking."""

    def find_spec(self, name: str, *_: Any) -> None:
        raise ImportError(f"{name} was not loaded before the doors were closed")


# -- before the doors close ------------------------------------------------------------------------------------


def _import() -> None:
    """What takes long, while the worker still joins."""
    # Libraries make folders for caches as they are imported, which nothing here may: they get one that is there.
    tempfile.tempdir = os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/"
    for name in ("engine", "program.program_job", "program.channel"):
        importlib.import_module(f"w5xde_async.compute.{name}")


def _warm_up(device: str, threads: int, precision: str) -> None:
    """Whatever opens files, loads libraries or starts threads at its first use is used once."""

    import torch
    from torch import nn
    from torch.nn import functional

    torch.set_num_threads(threads)
    from w5xde_async.compute.block import Task
    from w5xde_async.compute.engine import Engine
    from w5xde_async.compute.program.form import DEVICE, Document, Graph, Input, Node, Program, Ref, encode, parse
    from w5xde_async.compute.program.operators import NAMES, find
    from w5xde_async.compute.program.program_job import ProgramJob
    from w5xde_async.errors import ProgramRefused
    from w5xde_async.params.layout import Layout

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
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    for module, given in modules:
        with suppress(RuntimeError):  # not every machine has every kernel in half precision
            with torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None):
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
        node("linear.default", Ref(first - 2), Ref(index["head.weight"]), Ref(index["head.bias"])),
        node("dropout.default", Ref(first), 0.1, True),
        node("zeros.default", (3,), dtype=torch.float32, device=DEVICE),
        node("add_.Tensor", Ref(index["seen"]), Ref(first + 2)),
        node("cross_entropy_loss.default", Ref(first + 1), Ref(first - 1)),
    )
    inputs = (Input(torch.float32, ((0, 2, 1 << 20, 8), 4)), Input(torch.int64, ((0, 2, 1 << 20, 8),)))
    from w5xde_async.compute.batch import flatten

    structure, tensors = flatten((torch.randn(8, 4), torch.randint(3, (8,))))
    graph = Graph(inputs, nodes, first + 4, ())
    document = encode(Program(layout.fingerprint, structure, (), (), (), (graph,), len(layout.entries)))
    replica = ProgramJob.of(
        parse(document, layout), layout, torch.device(device), precision=precision, memory_bytes=1 << 30
    )
    engine = Engine(replica, device=device, seed=1, precision=precision, microbatch_samples=4, accumulate=2)
    task = Task(step=0, start=0, samples=(8,), loss_scale=1.0, structure=structure, packed=False, tensors=tensors)
    for _ in range(2):
        engine.load(range(len(layout.buckets)))
        engine.counted(task, _nothing)
    engine.close()
    with suppress(ProgramRefused):  # an error's own way, once
        parse(Document(b"", ()), layout)


# -- behind closed doors ---------------------------------------------------------------------------------------


def serve(control: socket.socket) -> None:
    """Build what the worker sends, then compute what it asks for, until it hangs up."""
    from w5xde_async.compute.program.channel import receive, send
    from w5xde_async.errors import ProgramRefused, W5xdeError

    descriptor = control.fileno()
    with suppress(EOFError, OSError):
        runner: _Runner | None = None
        while True:
            kind, *told = receive(descriptor, _MOST_TOLD)
            if kind == "build":
                try:
                    runner = _Runner(control, told[0])
                except ProgramRefused as error:
                    send(descriptor, ["refused", error.reason[:1000], error.node, error.operator[:100]])
                except (W5xdeError, RuntimeError, ValueError, TypeError, MemoryError) as error:
                    send(descriptor, ["refused", f"{type(error).__name__}: {error}"[:1000], -1, ""])
                else:
                    send(descriptor, ["ready"])
            elif runner is not None and kind == "load":
                runner.engine.load(told[0])
            elif runner is not None and kind == "compute":
                runner.compute(*told)


class _Runner:
    """An engine over the memory that the worker has too."""

    def __init__(self, control: socket.socket, said: bytes) -> None:
        import torch

        from w5xde_async.compute.engine import Engine
        from w5xde_async.compute.program.channel import SlotPool, receive_regions
        from w5xde_async.compute.program.form import Document, parse
        from w5xde_async.compute.program.program_job import ProgramJob
        from w5xde_async.compute.transfer import Lent
        from w5xde_async.params.flat import FlatState
        from w5xde_async.params.layout import Layout
        from w5xde_async.wire.packed import unpack

        (device, seed, precision, microbatch, accumulate, bucket_bytes, memory_bytes, sizes, layout_bytes, text_bytes,
         constants) = unpack(said)  # fmt: skip
        self._control = control.fileno()
        texts, state, slots, self._batches = receive_regions(control, sizes)
        layout = Layout.parse(bytes(texts[:layout_bytes].numpy()))
        text = bytes(texts[layout_bytes : layout_bytes + text_bytes].numpy())
        made = tuple(_tensor(texts, dtype, shape, at).clone() for dtype, shape, at in constants)
        del texts
        where = torch.device(device)
        replica = ProgramJob.of(
            parse(Document(text, made), layout), layout, where, precision=precision, memory_bytes=memory_bytes
        )
        self._pool = SlotPool(layout, slots)
        self.engine = Engine(
            replica, device=where, seed=seed, precision=precision, microbatch_samples=microbatch, accumulate=accumulate,
            bucket_bytes=bucket_bytes, lent=Lent(FlatState(layout, memory=state), self._pool),
        )  # fmt: skip

    def compute(
        self, step: int, start: int, samples: tuple[int, ...], loss_scale: float, structure: bytes, packed: bool,
        tensors: tuple[Any, ...], released: tuple[int, ...], counting: bool,
    ) -> None:  # fmt: skip
        from w5xde_async.compute.block import Task
        from w5xde_async.compute.engine import LeafError
        from w5xde_async.compute.program.channel import send

        pool, engine = self._pool, self.engine
        for number in released:
            pool.give_number(number)
        task = Task(
            step=step, start=start, samples=samples, loss_scale=loss_scale, structure=structure, packed=packed,
            tensors=[_tensor(self._batches, *one) for one in tensors],
        )  # fmt: skip

        def emit(bucket: int, vector: Any) -> None:
            send(self._control, ["emit", bucket, pool.number_of(vector)])

        flops = 0
        try:
            if counting:
                outcome, flops = engine.counted(task, emit)
            else:
                outcome = engine.compute(task, emit)
        except LeafError as error:
            numbers = [pool.number_of(vector) for vector in error.vectors]
            send(self._control, ["failed", error.leaf, error.error, error.traceback, numbers])
            return
        send(
            self._control,
            [
                "done", outcome.losses, outcome.metric_names, outcome.metrics, outcome.untouched, outcome.absent,
                outcome.splits, outcome.compute_s, [pool.number_of(vector) for vector in outcome.vectors], flops,
            ],
        )  # fmt: skip


def _tensor(memory: Any, dtype: str, shape: tuple[int, ...], at: int) -> Any:
    import math

    import torch

    of = getattr(torch, dtype)
    return memory[at : at + math.prod(shape) * of.itemsize].view(of).view(shape)


if __name__ == "__main__":
    sys.exit(main())
