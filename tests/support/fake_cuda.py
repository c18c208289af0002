"""CUDA played on the CPU: an engine on ``cuda:0`` whose compute stream is eager and whose side stream is late.

While it is installed, memory asked for on the device, or pinned, is ordinary memory; ``torch.cuda``'s streams and
events are those below, and the copy thread is a queue that this thread works off. The side stream keeps its order and
lags behind by a generated time; memory that nobody may look at is filled with garbage. So every order of events that
CUDA allows is one that some seed plays, and everything is decided by the seed.

What was done wrong is noted in ``hazards``, or shows in the bits: a copy out of the device whose source was different
between the earliest and the latest moment at which CUDA could have read it; host memory that changed while a copy into
the device could have read it. ``counts`` has what costs time on a device: launches, copies, events, waits.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from tests.support.blocks import GARBAGE
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from w5xde_async import pinning
from w5xde_async.codecs import codec
from w5xde_async.compute import transfer
from w5xde_async.params.flat import bytes_of
from w5xde_async.params.reducer import VectorPool

DEVICE = torch.device("cuda", 0)
ASSERTED = "CUDA error: device-side assert triggered"
_READS = {torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__}
_MAKES = {torch.tensor, torch.as_tensor}


@dataclass
class Counts:
    """What was asked of the device.

    ``launches`` are kernels, ``events`` recordings; ``waits`` is how often the host waited for the device, ``spinning``
    how many of those kept a core busy.
    """

    launches: int = 0
    copies_in: int = 0
    copies_out: int = 0
    events: int = 0
    events_made: int = 0
    waits: int = 0
    spinning: int = 0

    def copy(self) -> Counts:
        return replace(self)

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*[getattr(self, f.name) - getattr(other, f.name) for f in fields(self)])


class _Copy:
    """One copy of the side stream that may run at any time from now to its turn."""

    def __init__(self, target: Tensor, source: Tensor, earliest: bytes | None) -> None:
        self.target, self.source, self.earliest = target, source, earliest


class _Recording:
    """What one call of ``record`` stands for."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.done = stream, not stream.late


class Stream:
    """The compute stream is eager. Another one holds copies and recordings until they are due."""

    def __init__(self, cuda: FakeCuda, *, late: bool) -> None:
        self.cuda, self.late = cuda, late
        self.queue: deque[_Copy | _Recording] = deque()
        self.sees: dict[int, bytes] = {}  # the device's memory as it was when what this stream waited for was recorded

    def wait_event(self, event: Event) -> None:
        self.cuda.check()
        recording = event.recording
        if recording is None:
            return  # CUDA does not wait for an event that was never recorded
        if self.late:
            self.sees = event.memory
        elif recording.stream.late:
            recording.stream.run_until(recording)

    def synchronize(self) -> None:
        self.cuda.waited(spinning=True)
        if self.late:
            self.run_until(None)
        else:
            self.cuda.host_copies_are_done()

    def run_one(self) -> None:
        entry = self.queue.popleft()
        if isinstance(entry, _Recording):
            entry.done = True
            return
        with self.cuda.uncounted():
            now = bytes(bytes_of(entry.source))
            bytes_of(entry.target)[:] = now
        if entry.earliest is None:
            self.cuda.hazards.append("a copy that waited for nothing")
        elif entry.earliest != now:
            self.cuda.hazards.append("the source of a copy changed while it could be read")

    def run_until(self, recording: _Recording | None) -> None:
        while self.queue and not (recording is not None and recording.done):
            self.run_one()


class Event:
    """As torch's: it stands for what was recorded last."""

    def __init__(self, cuda: FakeCuda, *, blocking: bool = False, **_: Any) -> None:
        self.cuda, self.blocking = cuda, blocking
        self.recording: _Recording | None = None
        self.memory: dict[int, bytes] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.cuda.check()
        stream = self.cuda.current if stream is None else stream
        self.recording = _Recording(stream)
        self.cuda.counts.events += 1
        if stream.late:
            stream.queue.append(self.recording)
        else:
            self.memory = self.cuda.memory()

    def query(self) -> bool:
        self.cuda.check()
        return self.recording is None or self.recording.done

    def synchronize(self) -> None:
        self.cuda.waited(spinning=not self.blocking)
        if self.recording is None:
            return
        if self.recording.stream.late:
            self.recording.stream.run_until(self.recording)
        else:
            self.cuda.host_copies_are_done()


class Copier:
    """The copy thread: its jobs run in order, at generated times, or when somebody waits for them."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.busy = False
        cuda.copiers.append(self)

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
        copier = self

        class Waited(Future[Any]):
            def result(self, timeout: float | None = None) -> Any:
                while not self.done():
                    copier.run_one()
                return super().result(0)

        future: Future[Any] = Waited()
        self.queue.append((future, lambda: job(*arguments)))
        return future

    def run_one(self) -> None:
        future, job = self.queue.popleft()
        self.busy = True
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        finally:
            self.busy = False

    def shutdown(self, wait: bool = True) -> None:
        while self.queue:
            self.run_one()


class _Functions(TorchFunctionMode):
    """Whatever names the device gets ordinary memory; copies and reads are seen here."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        cuda = self.cuda
        if func is torch.device:
            return func(*args, **kwargs)
        if func is torch.Tensor.copy_:
            return cuda.copied(args[0], args[1], bool(kwargs.get("non_blocking", len(args) > 2 and args[2])))
        if func is torch.Tensor.pin_memory:
            return cuda.pin(args[0].clone())
        if func in _READS and isinstance(args[0], Tensor):
            if not cuda.is_pinned(args[0]):
                cuda.waited(spinning=True)
                cuda.host_copies_are_done()
            with cuda.uncounted():
                return func(*args, **kwargs)
        pinned = bool(kwargs.pop("pin_memory", False))
        wants = [value for value in (*args, kwargs.get("device")) if isinstance(value, torch.device)]
        on_device = any(value.type == "cuda" for value in wants)
        if not on_device and not pinned:
            return func(*args, **kwargs)
        cpu = torch.device("cpu")
        args = tuple(cpu if isinstance(value, torch.device) else value for value in args)
        if "device" in kwargs:
            kwargs["device"] = cpu
        if func is torch.Tensor.to:
            with cuda.uncounted():
                made = func(*args, **kwargs)
                made = made.clone() if made is args[0] else made
            cuda.check()
            cuda.counts.copies_in += 1
            return made
        if func in _MAKES and not (isinstance(args[0], Tensor)):
            cuda.waited(spinning=True)  # from memory that is not pinned
            cuda.counts.copies_in += 1
            with cuda.uncounted():
                return func(*args, **kwargs)
        made = func(*args, **kwargs)
        if on_device and isinstance(made, Tensor) and func is not torch.as_tensor:
            with cuda.uncounted():
                cuda.on_device[made.untyped_storage().data_ptr()] = made, bytes_of(made)
        return cuda.pin(made) if pinned else made


class _Kernels(TorchDispatchMode):
    """Every operator that is no view is a launch, and a moment at which the side stream may get on."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cuda = self.cuda
        if cuda.counting and not func.is_view and not func.name().startswith(("aten::empty", "aten::detach")):
            cuda.check()
            cuda.counts.launches += 1
            cuda.by_name[func.name()] = cuda.by_name.get(func.name(), 0) + 1
            if func.name() in ("aten::equal", "aten::_local_scalar_dense"):
                cuda.waited(spinning=True)
        result = func(*args, **(kwargs or {}))
        cuda.get_on()
        return result


class FakeCuda:
    """See the module. ``pace``: how likely the side stream, and the copy thread, get on at each operator."""

    def __init__(self, seed: int = 0, *, pace: float = 0.2) -> None:
        self.counts, self.by_name = Counts(), dict[str, int]()
        self.hazards: list[str] = []
        self.outlives: set[int] = set()  # memory that is not used again before the side stream is done, by address
        self.counting = True
        self.copiers: list[Copier] = []
        self.on_device: dict[int, tuple[Tensor, memoryview]] = {}  # what lives as long as an engine, by address
        self._pinned: dict[int, Tensor] = {}
        self.registered: dict[int, int] = {}  # address and bytes of ordinary memory that copies go straight to
        self.refuses = False  # to register any
        self._reading: list[tuple[Tensor, bytes]] = []  # sources of copies into the device that may be under way
        self._random, self._pace = random.Random(seed), pace
        self.compute = Stream(self, late=False)
        self.current = self.compute
        self.sides: list[Stream] = []
        self._left: int | None = None  # calls until a device that has asserted says so; None: it is well

    def enter(self) -> None:
        """This thread's work goes to the device too, from now on."""
        _Functions(self).__enter__()
        _Kernels(self).__enter__()

    # -- what torch.cuda has -------------------------------------------------------------------------------------

    def Stream(self, device: Any = None) -> Stream:
        self.sides.append(Stream(self, late=True))
        return self.sides[-1]

    def Event(self, **options: Any) -> Event:
        self.counts.events_made += 1
        return Event(self, **options)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def current_stream(self, device: Any = None) -> Any:
        return self.current

    def set_device(self, device: Any) -> None:
        """There is one."""

    def synchronize(self, device: Any = None) -> None:
        self.waited(spinning=True)
        for side in self.sides:
            side.run_until(None)
        self.host_copies_are_done()

    def empty_cache(self) -> None:
        self.check()

    def device(self, device: Any) -> Any:
        return nullcontext()

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.refuses:
            return 801
        assert address not in self.registered
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.host_copies_are_done()
        assert all(not side.queue for side in self.sides), "a copy is under way"
        del self.registered[address]
        return 0

    # -- an error that stays ---------------------------------------------------------------------------------------

    def trip(self, *, calls: int = 0) -> None:
        """A kernel that was launched now asserts: nothing launched after it is done, and every call raises, the first
        ``calls`` ones excepted: they find nothing yet."""
        self._left = calls

    @property
    def broken(self) -> bool:
        return self._left is not None

    def check(self, *, waits: bool = False) -> None:
        if self._left is None:
            return
        if self._left > 0 and not waits:
            self._left -= 1
            return
        self._left = 0
        raise torch.AcceleratorError(ASSERTED)

    # -- inside ----------------------------------------------------------------------------------------------------

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        before, self.counting = self.counting, False
        try:
            yield
        finally:
            self.counting = before

    def waited(self, *, spinning: bool) -> None:
        self.check(waits=True)
        self.counts.waits += 1
        self.counts.spinning += spinning

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        there = any(address <= at < address + nbytes for address, nbytes in self.registered.items())
        return there or tensor.untyped_storage().data_ptr() in self._pinned

    def memory(self) -> dict[int, bytes]:
        return {address: bytes(view) for address, (_, view) in self.on_device.items()}

    def copied(self, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        self.check()
        inward = target.untyped_storage().data_ptr() in self.on_device and self.is_pinned(source)
        outward = self.is_pinned(target) and not self.is_pinned(source)
        if not inward and not outward:
            return target.copy_(source)
        with self.uncounted():
            self.counts.copies_in += inward
            self.counts.copies_out += outward
            if not non_blocking:
                self.waited(spinning=True)
            if inward:
                self._reading.append((source, bytes(bytes_of(source))))
            if self.current.late:
                if source.untyped_storage().data_ptr() not in self.outlives:
                    self.hazards.append("the source of a copy could be freed and used again while it is read")
                bytes_of(target)[:] = bytes([GARBAGE]) * (target.numel() * target.element_size())
                self.current.queue.append(_Copy(target, source, self._earliest(source)))
                return target
            return target if self.broken else target.copy_(source)

    def _earliest(self, source: Tensor) -> bytes | None:
        storage = source.untyped_storage()
        seen = self.current.sees.get(storage.data_ptr())
        begin = source.storage_offset() * source.element_size()
        return None if seen is None else seen[begin : begin + source.numel() * source.element_size()]

    def host_copies_are_done(self) -> None:
        with self.uncounted():
            if any(bytes(bytes_of(source)) != then for source, then in self._reading):
                self.hazards.append("host memory changed while it was copied into the device")
        self._reading.clear()

    def get_on(self) -> None:
        """A moment passes."""
        if self._random.random() >= self._pace:
            return
        with self.uncounted():
            for side in self.sides:
                if side.queue:
                    side.run_one()
            for copier in self.copiers:
                if copier.queue and not copier.busy:
                    copier.run_one()


@contextmanager
def fake_cuda(seed: int = 0, *, pace: float = 0.2, here: bool = True) -> Iterator[FakeCuda]:
    """What goes to ``cuda:0`` goes to a FakeCuda meanwhile: this thread's (``here``), and of those that ``enter``."""
    cuda = FakeCuda(seed, pace=pace)

    class Poisoned(VectorPool):
        """What is given back, and what is handed out, holds garbage."""

        def take(self) -> Any:
            return self._spoiled(super().take())

        def give(self, vector: Any) -> None:
            super().give(self._spoiled(vector))

        def _spoiled(self, vector: Any) -> Any:
            if cuda.is_pinned(vector.memory):
                vector.memory.numpy()[:] = GARBAGE
            return vector

    with pytest.MonkeyPatch.context() as patch, ExitStack() as modes:
        if here:
            modes.enter_context(_Functions(cuda))
            modes.enter_context(_Kernels(cuda))
        patch.setattr(transfer, "_cuda", cuda)
        patch.setattr(pinning, "_cuda", cuda)
        patch.setattr(transfer, "VectorPool", Poisoned)
        # Here what codecs read on the device is host memory to them: they make no copies, and theirs is not pinned.
        patch.setattr(codec.BytePool, "_new", lambda _, size: torch.empty(size, dtype=torch.uint8))
        patch.setattr(transfer, "ThreadPoolExecutor", lambda *_, **__: Copier(cuda))
        patch.setattr(
            torch.Tensor, "record_stream", lambda tensor, _: cuda.outlives.add(tensor.untyped_storage().data_ptr())
        )
        patch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
        yield cuda
