"""A stranger's program in a process of its own: the worker's side.

``Sandbox`` starts the process (``child``), which closes its own doors before it is told of any program. ``Sandboxed``
is an engine whose computing happens there: parameters, batches and results lie in memory that both have, and a few
short messages a block go through a socket. On the CPU the bits are those of an engine in this process.

The child is not believed: its answers are checked for form and range, and what it writes into the shared memory is
read as numbers, or copied before anything but additions and sending is done with it. Where it dies, ProgramKilled says
by what, and this process goes on.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import NoReturn

import torch
from torch import Tensor, nn

from w5xde_async.compute.block import ComputedBlock, Emit, LeafSpec, Task
from w5xde_async.compute.engine import Engine, LeafError
from w5xde_async.compute.program import channel, sealing
from w5xde_async.compute.program.channel import SlotPool, num_slots, put, results_bytes
from w5xde_async.compute.program.form import Document
from w5xde_async.compute.program.program_job import skeleton
from w5xde_async.errors import LocalError, ProgramKilled, ProgramRefused
from w5xde_async.params.flat import FlatState, ResultVector, state_of
from w5xde_async.params.layout import ALIGN_BYTES, Layout
from w5xde_async.params.reducer import VectorPool
from w5xde_async.params.slots import slot_bytes
from w5xde_async.segments import Opened, Region, aligned

logger = logging.getLogger(__name__)

#: Names of the environment that the child gets: they change how fast or in which bits it computes.
_ENVIRONMENT = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_", "OPENBLAS_", "CUDA_", "CUBLAS_", "NVIDIA_",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES",
)  # fmt: skip
_START_S, _BUILD_S, _END_S = 120.0, 300.0, 5.0


def unsupported(device: torch.device) -> str:
    """Why there is no sandbox for this device on this machine; empty where there is."""
    if device.type == "mps":
        return "there is none for MPS"
    if device.type == "cuda" and not sealing.landlock_abi():
        return "for CUDA it needs Landlock, which this kernel has not, or not switched on"
    return sealing.unsupported()


class Sandbox:
    """The process. ``start`` returns at once; the first that waits for it waits for its imports too.

    Its methods block and belong to one thread, ``end`` aside.
    """

    module = "w5xde_async.compute.program.child"

    def __init__(self, device: torch.device, *, threads: int, memory_bytes: int) -> None:
        self.device, self._threads, self._memory_bytes = device, threads, memory_bytes
        self._deterministic = torch.are_deterministic_algorithms_enabled()  # as in this process
        self._process: subprocess.Popen[bytes] | None = None
        self._sealed = False

    def start(self) -> None:
        """Start it. Raises LocalError where no process can be started."""
        ours, theirs = socket.socketpair()
        self.control = ours
        places = os.pathsep.join(place for place in sys.path if place)
        environment = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
        environment |= {"PYTHONPATH": places, "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}
        command = [
            sys.executable, "-P", "-s", "-m", self.module, str(theirs.fileno()), str(self.device), str(self._threads),
            str(self._memory_bytes), str(int(self._deterministic)),
        ]  # fmt: skip
        # Who stops a worker may send the signal to all of its group, or its service. The process, which is the worker's
        # to end, begins with what this thread does not heed.
        heeded = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=True,
                pass_fds=(theirs.fileno(),), env=environment, cwd="/",
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise LocalError(f"the sandbox's process cannot be started: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heeded)
            theirs.close()

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def wait(self, precision: str = "fp32") -> None:
        """Until it is warm for computing in ``precision`` and its doors are closed. Raises LocalError for a failure."""
        if self._sealed:
            return
        if self._process is None:
            self.start()
        try:
            self.say(channel.Warm(precision))
            answer = self.hear(_START_S)
        except ProgramKilled as error:
            raise LocalError(f"the sandbox's process ended before it was ready: {error.reason}") from None
        if not isinstance(answer, channel.Sealed):
            self.end()
            said = answer.reason[:1000] if isinstance(answer, channel.Unsealed) else ""
            raise LocalError(f"the sandbox cannot be closed on this machine: {said}; see --sandbox")
        self._sealed = True

    def say(self, message: channel.Warm | channel.Build | channel.Load | channel.Compute) -> None:
        """Raises ProgramKilled."""
        try:
            channel.send(self.control.fileno(), message)
        except OSError:
            raise self._death() from None

    def hear(self, seconds: float | None = None) -> channel.Answer:
        """The next answer. Raises ProgramKilled: it died, or was ended for taking longer than ``seconds``."""
        timer = None
        if seconds is not None:
            timer = threading.Timer(seconds, self._kill)
            timer.daemon = True
            timer.start()
        try:
            answer = channel.answer_of(self.control.fileno())
        except (EOFError, OSError):
            raise self._death() from None
        except ValueError as error:
            self.lied(str(error))
        finally:
            if timer is not None:
                timer.cancel()
        if isinstance(answer, channel.Broken):
            self.end()
            raise ProgramKilled(f"its process failed: {answer.reason[:1000]}")
        return answer

    def lied(self, what: str) -> NoReturn:
        """End it for what it said. Raises ProgramKilled."""
        self.end()
        raise ProgramKilled(f"its process said what it never says ({what})")

    def watch(self) -> int:
        """A descriptor that is readable once the process has ended; it is the caller's to close.

        Raises OSError: this kernel or this Python has none, or the process was waited for already.
        """
        if not hasattr(os, "pidfd_open"):  # Python was built where there is none
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return os.pidfd_open(self.pid)

    def find_out(self) -> NoReturn:
        """What the process, which has ended, has died of. Raises ProgramKilled."""
        self.hear()
        self.lied("an answer that nobody has asked for")

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _death(self) -> ProgramKilled:
        assert self._process is not None
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it has hung up and lives
            self._process.kill()
            code = self._process.wait()
        self.end()
        if code >= 0:
            return ProgramKilled(f"its process ended with code {code}")
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hints = {
            "SIGSYS": "it asked the kernel for what the sandbox forbids",
            "SIGKILL": "too much memory, or too long a check, or somebody ended it",
        }
        return ProgramKilled(f"its process was killed by {name}" + (f" ({hints[name]})" if name in hints else ""))

    def end(self) -> None:
        """End the process. It is gone when this returns."""
        process = self._process
        if process is None:
            return
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        self.control.close()


class Sandboxed:
    """An engine (``compute.engine``) whose child computes. But for ``release`` and ``died`` it is one thread's.

    To others it is an engine on the CPU: what it takes and gives lies in host memory, also where the child drives a
    GPU. A block is begun only while it ``has_room``. ``copies``: results are copied out of the shared memory before
    anybody has them; for those who do more with them than add and send (codecs sort and index).
    """

    def __init__(
        self,
        sandbox: Sandbox,
        document: Document,
        layout: Layout,
        spec: LeafSpec,
        *,
        batch_bytes: int,
        memory_bytes: int,
        copies: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises ProgramRefused (ProgramKilled among them), LocalError. Blocks for as long as the check takes."""
        self.layout, self.device, self.clock = layout, torch.device("cpu"), clock
        room = num_slots(layout, memory_bytes)
        needed = layout.state_bytes + layout.vector_bytes + room * slot_bytes(layout)
        if needed > memory_bytes:
            raise ProgramRefused(f"the model needs {needed} bytes, this machine has {memory_bytes}")
        self._sandbox = sandbox
        sandbox.wait(spec.precision)
        described = layout.describe()
        text = described + document.text
        constants_at = aligned(len(text), ALIGN_BYTES)
        constant_bytes = sum(aligned(constant.nbytes, ALIGN_BYTES) for constant in document.constants)
        regions = [
            Region("program", constants_at + constant_bytes),
            Region("state", FlatState.nbytes(layout)),
            Region("results", results_bytes(layout, room)),
            Region("batches", aligned(batch_bytes, ALIGN_BYTES) + (1 << 20)),
        ]
        program, state, slots, self._batches = (region.memory for region in regions)
        program[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        build = channel.Build(
            device=str(sandbox.device),
            spec=spec,
            threads=torch.get_num_threads(),  # of the thread that computes, which this is
            memory_bytes=memory_bytes,
            regions=[region.nbytes for region in regions],
            layout_bytes=len(described),
            text_bytes=len(document.text),
            constants=put(document.constants, program, constants_at),
        )
        try:
            sandbox.say(build)
            channel.send_regions(sandbox.control, regions)
        except OSError:
            raise ProgramKilled("its process ended before it was told of it") from None
        finally:
            for region in regions:
                region.close()
        answer = sandbox.hear(_BUILD_S)
        if isinstance(answer, channel.Refused):
            sandbox.end()
            raise ProgramRefused(answer.reason[:1000], node=answer.node, operator=answer.operator[:100])
        if not isinstance(answer, channel.Ready):
            sandbox.lied("an answer that is none to what it was told to make")
        self.live = self.incoming = FlatState(layout, memory=state)
        self.model: nn.Module = skeleton(layout)
        self.incoming.adopt(self.model, buffers=False)
        self.tensors: list[Tensor] = list(state_of(self.model, layout))
        self._slots = SlotPool(layout, slots)
        self._in_flight = max(1, room // 4)  # the others are a block's under way
        self._copies = VectorPool(layout)
        self._copied = copies
        self._theirs: FlatState | None = None  # the coordinator's parameters, where they are shared
        self._lock = threading.Lock()
        self._released: list[int] = []  # to be told to the child
        self._given: set[int] = set()  # slots that the child has filled and that are not released

    # -- as an engine's --------------------------------------------------------------------------------------

    can_share = True

    def share(self, parameters: Opened | None, vectors: Sequence[ResultVector] = ()) -> None:
        """As ``Engine.share``; here they are copied, both ways: the child has memory with nobody but its worker."""
        mapped = None if parameters is None else parameters.map()
        self._theirs = None if mapped is None else FlatState(self.layout, memory=mapped)
        self._copies.lend(vectors)

    def load(self, buckets: Iterable[int]) -> None:
        """``incoming`` holds a new version, of which ``buckets`` came."""
        buckets = list(buckets)
        if self._theirs is not None:
            for bucket in map(self.layout.buckets.__getitem__, buckets):
                self.incoming.bucket(bucket).copy_(self._theirs.bucket(bucket))
        self._sandbox.say(channel.Load(buckets))

    def refresh(self, buckets: Iterable[int]) -> None:
        """``live`` has new values in these buckets."""
        self.load(buckets)

    def keep_results(self) -> None:
        """Results are in host memory in any case."""

    def unbind(self) -> None:
        """The child's gradients are its own."""

    def compute(self, task: Task, emit: Emit) -> ComputedBlock:
        """Compute one block; as ``Engine.compute``. Raises LeafError, ProgramKilled."""
        return self._compute(task, emit, counting=False)[0]

    def counted(self, task: Task, emit: Emit) -> tuple[ComputedBlock, int]:
        """``compute``, and the floating-point operations that it took, as the child says."""
        return self._compute(task, emit, counting=True)

    def release(self, vector: ResultVector) -> None:
        """A block's vector has been sent; it may be written again. Any thread."""
        number = self._slots.number_of(vector)
        if number < 0:
            self._copies.give(vector)
            return
        with self._lock:
            self._released.append(number)
            self._given.discard(number)

    @property
    def has_room(self) -> bool:
        """Whether a block may be computed: on a line that is slower than computing, what waits for it is bounded."""
        return len(self._given) < self._in_flight

    @property
    def child(self) -> int:
        """The process that computes."""
        return self._sandbox.pid

    async def died(self, pool: Executor) -> None:
        """Wait on the event loop until the child has died, whether a block is under way or not. Raises ProgramKilled.

        ``pool``: the thread that the other methods belong to.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        try:
            descriptor = self._sandbox.watch()
        except OSError:
            await ended.wait()  # forever: the next block tells
        try:
            loop.add_reader(descriptor, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        await loop.run_in_executor(pool, self._sandbox.find_out)

    def close(self) -> None:
        """End the child."""
        self.share(None)
        self._sandbox.end()

    # -- a block ---------------------------------------------------------------------------------------------

    def _compute(self, task: Task, emit: Emit, *, counting: bool) -> tuple[ComputedBlock, int]:
        began = self.clock()
        with self._lock:
            released, self._released = self._released, []
        try:
            tensors = put(task.tensors, self._batches)
        except MemoryError as error:
            raise LocalError(f"a batch that is too large: {error}") from None
        self._sandbox.say(
            channel.Compute(
                step=task.step,
                start=task.start,
                samples=task.samples,
                loss_scale=task.loss_scale,
                structure=task.structure,
                packed=task.packed,
                tensors=tensors,
                released=released,
                counting=counting,
            )
        )
        copy = self._copies.take() if self._copied or self._theirs is not None else None
        emitted: set[int] = set()
        while isinstance(answer := self._sandbox.hear(), channel.Emit):
            self._need(answer.bucket < len(self.layout.result_buckets) and answer.bucket not in emitted)
            self._need(answer.slot < len(self._slots.vectors))
            emitted.add(answer.bucket)
            vector = self._slots.vectors[answer.slot]
            if copy is not None:
                copy.buckets[answer.bucket].copy_(vector.buckets[answer.bucket])
                vector = copy
            emit(answer.bucket, vector)
        if isinstance(answer, channel.Failed):
            self._need(task.start <= answer.leaf < task.start + len(task.samples))
            spent = self._spent(answer.slots, copy)
            raise LeafError.told(answer.leaf, answer.error, answer.traceback, spent, device_lost=answer.device_lost)
        if not isinstance(answer, channel.Done):
            self._sandbox.lied("an answer that is none to a block")
        return self._outcome(task, answer, emitted, copy, began), answer.flops

    def _outcome(
        self, task: Task, done: channel.Done, emitted: set[int], copy: ResultVector | None, began: float
    ) -> ComputedBlock:
        names, num_entries = done.metric_names, len(self.layout.entries)
        self._need(len(done.losses) == len(task.samples) and len(done.metrics) == len(names) * len(done.losses))
        self._need(all(map(str.isprintable, names)))
        self._need(len(done.untouched) <= num_entries and all(index < num_entries for index in done.untouched))
        self._need(done.absent == tuple(b for b in range(len(self.layout.result_buckets)) if b not in emitted))
        return ComputedBlock(
            losses=done.losses,
            metric_names=names,
            metrics=done.metrics,
            untouched=done.untouched,
            absent=done.absent,
            splits=done.splits,
            compute_s=self.clock() - began,
            vectors=self._spent(done.slots, copy),
            drew=done.drew,
        )

    def _spent(self, numbers: tuple[int, ...], copy: ResultVector | None) -> tuple[ResultVector, ...]:
        """The vectors that the child has given away with a block's results: to be released, whatever became of it."""
        with self._lock:
            self._need(len(set(numbers)) == len(numbers) and self._given.isdisjoint(numbers))
            self._need(all(number < len(self._slots.vectors) for number in numbers))
            self._given.update(numbers)
        vectors = tuple(self._slots.vectors[number] for number in numbers)
        if copy is None:
            return vectors
        for vector in vectors:
            self.release(vector)
        return (copy,)

    def _need(self, holds: bool) -> None:
        if not holds:
            self._sandbox.lied("numbers that cannot be")


Computing = Engine | Sandboxed
"""What computes blocks: in this process, or in one of its own. One thread."""
