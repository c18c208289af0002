"""A stranger's program in a process of its own: the worker's side.

``Sandbox`` starts the process (``child``), which closes its own doors before it is told of any program. ``Sandboxed``
is an engine whose computing happens there: parameters, batches and results lie in memory that both have, and a few
short messages a block go through a socket. On the CPU the bits are those of an engine in this process.

The child is not believed: its answers are checked for form and range, and what it writes into the shared memory is
read as numbers, or copied before anything but additions and sending is done with it. Where it dies, ProgramKilled says
by what, and this process goes on.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgpack
import torch
from torch import Tensor, nn

from w5xde_async.compute.block import ComputedBlock, Emit, Task
from w5xde_async.compute.engine import LeafError
from w5xde_async.compute.program import sealing
from w5xde_async.compute.program.channel import (
    MAX_ANSWER,
    NUM_SLOTS,
    Region,
    SlotPool,
    aligned,
    receive,
    send,
    send_regions,
    slot_bytes,
)
from w5xde_async.compute.program.form import Document
from w5xde_async.compute.program.program_job import skeleton
from w5xde_async.errors import LocalError, ProgramKilled, ProgramRefused
from w5xde_async.params.flat import FlatState, ResultVector, state_of
from w5xde_async.params.layout import Layout
from w5xde_async.params.reducer import VectorPool
from w5xde_async.wire.messages import METRIC_NAME, MOST_METRICS

__all__ = ["Sandbox", "Sandboxed", "unsupported"]

logger = logging.getLogger(__name__)

#: Names of the environment that the child gets: they change how fast or in which bits it computes.
_ENVIRONMENT = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_", "OPENBLAS_", "CUDA_", "CUBLAS_", "NVIDIA_",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES",
)  # fmt: skip
_START_S, _BUILD_S, _END_S = 120.0, 300.0, 5.0
_IN_FLIGHT = NUM_SLOTS // 2


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
            str(self._memory_bytes),
        ]  # fmt: skip
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=True,
                pass_fds=(theirs.fileno(),), env=environment, cwd="/",
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise LocalError(f"the sandbox's process cannot be started: {error}") from error
        finally:
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
            self.say("warm", precision)
            answer = self.hear(_START_S)
        except ProgramKilled as error:
            raise LocalError(f"the sandbox's process ended before it was ready: {error.reason}") from None
        if answer[0] != "sealed":
            said = str(answer[1])[:1000] if len(answer) > 1 else ""
            self.end()
            raise LocalError(f"the sandbox cannot be closed on this machine: {said}; see --sandbox")
        self._sealed = True

    def say(self, *message: Any) -> None:
        """Raises ProgramKilled."""
        try:
            send(self.control.fileno(), message)
        except OSError:
            raise self._death() from None

    def hear(self, seconds: float | None = None) -> tuple[Any, ...]:
        """The next answer. Raises ProgramKilled: it died, or was ended for taking longer than ``seconds``."""
        timer = None
        if seconds is not None:
            timer = threading.Timer(seconds, self._kill)
            timer.daemon = True
            timer.start()
        try:
            return receive(self.control.fileno(), MAX_ANSWER)
        except (EOFError, OSError):
            raise self._death() from None
        except ValueError as error:
            self.end()
            raise ProgramKilled(f"its process said what it never says ({error})") from None
        finally:
            if timer is not None:
                timer.cancel()

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
    """An engine (``compute.engine``) whose child computes. All methods but ``release`` belong to one thread.

    To others it is an engine on the CPU: what it takes and gives lies in host memory, also where the child drives a
    GPU. ``copies``: results are copied out of the shared memory before anybody has them; for those who do more with
    them than add and send (codecs sort and index).
    """

    def __init__(
        self,
        sandbox: Sandbox,
        document: Document,
        layout: Layout,
        *,
        seed: int,
        precision: str,
        microbatch_samples: int,
        accumulate: int,
        bucket_bytes: int,
        batch_bytes: int,
        memory_bytes: int,
        copies: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises ProgramRefused (ProgramKilled among them), LocalError. Blocks for as long as the check takes."""
        self.layout, self.device, self.clock = layout, torch.device("cpu"), clock
        needed = layout.state_bytes + 2 * layout.vector_bytes
        if needed > memory_bytes:
            raise ProgramRefused(f"the model needs {needed} bytes, this machine has {memory_bytes}")
        self._sandbox, self._seed = sandbox, seed
        sandbox.wait(precision)
        described = layout.describe()
        constants: list[list[Any]] = []
        at = aligned(len(described) + len(document.text))
        for constant in document.constants:
            constants.append([str(constant.dtype).removeprefix("torch."), list(constant.shape), at])
            at += aligned(constant.numel() * constant.element_size())
        regions = [
            Region("program", at), Region("state", FlatState.nbytes(layout)),
            Region("results", NUM_SLOTS * slot_bytes(layout)), Region("batches", aligned(batch_bytes) + (1 << 20)),
        ]  # fmt: skip
        texts, state, slots, self._batches = (region.memory for region in regions)
        text = described + document.text
        texts[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        for constant, (_, _, place) in zip(document.constants, constants, strict=True):
            if constant.numel():
                flat = constant.contiguous().view(-1).view(torch.uint8)
                texts[place : place + flat.numel()] = flat
        said = msgpack.packb([
            str(sandbox.device), seed, precision, microbatch_samples, accumulate, bucket_bytes, memory_bytes,
            [region.nbytes for region in regions], len(described), len(document.text), constants,
        ])  # fmt: skip
        try:
            sandbox.say("build", said)
            send_regions(sandbox.control, regions)
        except OSError:
            raise ProgramKilled("its process ended before it was told of it") from None
        finally:
            for region in regions:
                region.close()
        answer = sandbox.hear(_BUILD_S)
        if answer[0] == "refused":
            _, reason, node, operator = _of_form(answer, str, int, str)
            sandbox.end()
            raise ProgramRefused(reason[:1000], node=node, operator=operator[:100])
        if answer[0] != "ready":
            raise self._liar()
        self.live = self.incoming = FlatState(layout, memory=state)
        self.model: nn.Module = skeleton(layout)
        self.incoming.adopt(self.model, buffers=False)
        self.tensors: list[Tensor] = list(state_of(self.model, layout))
        self._slots = SlotPool(layout, slots)
        self._copies = VectorPool(layout) if copies else None
        self._freed = threading.Condition()
        self._released: list[int] = []  # to be told to the child
        self._given: set[int] = set()  # slots that the child has filled and that are not released

    # -- as an engine's --------------------------------------------------------------------------------------

    def load(self, buckets: Iterable[int]) -> None:
        """``incoming`` holds a new version, of which ``buckets`` came."""
        self._sandbox.say("load", list(buckets))

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
            assert self._copies is not None
            self._copies.give(vector)
            return
        with self._freed:
            self._released.append(number)
            self._given.discard(number)
            self._freed.notify()

    @property
    def child(self) -> int:
        """The process that computes."""
        return self._sandbox.pid

    def close(self) -> None:
        """End the child."""
        self._sandbox.end()

    # -- a block ---------------------------------------------------------------------------------------------

    def _compute(self, task: Task, emit: Emit, *, counting: bool) -> tuple[ComputedBlock, int]:
        began = self.clock()
        with self._freed:
            while len(self._given) >= _IN_FLIGHT:  # the line is slower than computing: what it holds is bounded
                self._freed.wait()
            released, self._released = self._released, []
        self._sandbox.say(
            "compute", task.step, task.start, task.samples, task.loss_scale, task.structure, task.packed,
            self._placed(task.tensors), released, counting,
        )  # fmt: skip
        copy = None if self._copies is None else self._copies.take()
        emitted: set[int] = set()
        while True:
            answer = self._sandbox.hear()
            if answer[0] != "emit":
                break
            _, bucket, number = _of_form(answer, int, int)
            self._need(0 <= bucket < len(self.layout.result_buckets) and bucket not in emitted)
            self._need(0 <= number < NUM_SLOTS)
            emitted.add(bucket)
            vector = self._slots.vectors[number]
            if copy is not None:
                copy.buckets[bucket].copy_(vector.buckets[bucket])
                vector = copy
            emit(bucket, vector)
        if answer[0] == "failed":
            _, leaf, error, told, numbers = _of_form(answer, int, str, str, tuple)
            raise LeafError.told(leaf, error, told, self._spent(numbers, copy))
        return self._outcome(task, answer, emitted, copy, began)

    def _placed(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Copy a batch to where the child reads it; dtype, shape and place of each tensor."""
        placed, at = [], 0
        for tensor in tensors:
            flat = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
            nbytes = tensor.numel() * tensor.element_size()
            if at + nbytes > self._batches.numel():
                raise LocalError(f"a batch of more than {self._batches.numel()} bytes")
            if nbytes:
                self._batches[at : at + nbytes] = flat
            placed.append([str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at])
            at += aligned(nbytes)
        return placed

    def _outcome(
        self, task: Task, answer: tuple[Any, ...], emitted: set[int], copy: ResultVector | None, began: float
    ) -> tuple[ComputedBlock, int]:
        if answer[0] != "done":
            raise self._liar()
        _, losses, names, metrics, untouched, absent, splits, _, numbers, flops = _of_form(
            answer, tuple, tuple, tuple, tuple, tuple, int, float, tuple, int
        )  # fmt: skip
        buckets = range(len(self.layout.result_buckets))
        entries = range(len(self.layout.entries))
        self._need(len(losses) == len(task.samples) and _all(losses, float))
        self._need(len(names) <= MOST_METRICS and _all(names, str))
        self._need(all(len(name) <= METRIC_NAME and name.isprintable() for name in names))
        self._need(len(metrics) == len(names) * len(losses) and _all(metrics, float))
        self._need(len(untouched) <= len(entries) and _all(untouched, int) and all(i in entries for i in untouched))
        self._need(absent == tuple(b for b in buckets if b not in emitted))
        self._need(0 <= splits <= 64 and 0 <= flops < 1 << 62)
        vectors = self._spent(numbers, copy)
        outcome = ComputedBlock(
            losses=losses, metric_names=names, metrics=metrics, untouched=untouched, absent=absent, splits=splits,
            compute_s=self.clock() - began, vectors=vectors,
        )  # fmt: skip
        return outcome, flops

    def _spent(self, numbers: tuple[Any, ...], copy: ResultVector | None) -> tuple[ResultVector, ...]:
        """The vectors that the child has given away with a block's results: to be released, whatever became of it."""
        self._need(_all(numbers, int) and len(set(numbers)) == len(numbers) <= NUM_SLOTS)
        self._need(all(0 <= number < NUM_SLOTS for number in numbers))
        with self._freed:
            self._need(not any(number in self._given for number in numbers))
            self._given.update(numbers)
        vectors = tuple(self._slots.vectors[number] for number in numbers)
        if copy is None:
            return vectors
        for vector in vectors:
            self.release(vector)
        return (copy,)

    def _need(self, holds: bool) -> None:
        if not holds:
            raise self._liar()

    def _liar(self) -> ProgramKilled:
        self._sandbox.end()
        return ProgramKilled("its process said what it never says")


def _of_form(answer: tuple[Any, ...], *kinds: type) -> tuple[Any, ...]:
    """``answer`` behind its name; ints stand for floats. Raises ProgramKilled for another form."""
    parts = answer[1:]
    if len(parts) != len(kinds) or not all(
        type(part) is kind or (kind is float and type(part) is int) for part, kind in zip(parts, kinds, strict=True)
    ):
        raise ProgramKilled("its process said what it never says")
    return answer


def _all(parts: tuple[Any, ...], kind: type) -> bool:
    return all(type(part) is kind for part in parts)
