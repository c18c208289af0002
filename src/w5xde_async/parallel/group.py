"""The process group of an island: collectives of flat tensors, of numbers and of bytes.

It has three parts, so that whoever uses one never meets another's traffic: ``data`` on the ranks' device (NCCL on CUDA,
gloo elsewhere), numbers and bytes that engines exchange in host memory, and what rank 0 announces to the others. One
thread at a time uses each.

No object collective is called: they pickle. Bytes travel with their length before them, and whoever gets them decodes
them. Nothing here is authenticated or encrypted: the group's interface is the loopback one, or one that the user has
named as trusted.

Ranks wait for hours between two leases, so no collective has a deadline of its own. A rank that dies ends its peers'
collectives with an error; one that stands still does not, and is for its owner to find.
"""

from __future__ import annotations

import copy
import os
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from w5xde_async.errors import UsageError

_TCPStore: Any = vars(dist)["TCPStore"]  # torch's stubs do not export it
# Newer torch warns of the older name.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_PATIENCE = timedelta(days=365)
LANES = 3  #: between two ranks
_MEETING = timedelta(minutes=1)  # for the place where ranks meet to be there
_GATHERING = timedelta(minutes=5)  # for all ranks to come: from a slow disk, or started by hand
_CONNECTING_S = 180.0  # and then for all connections: NCCL takes its time


class Announcement(NamedTuple):
    """What rank 0 tells the others: an operation of the driver's own numbering, and two operands."""

    op: int
    a: int
    b: int


def open_store(host: str, port: int = 0, listening: int | None = None) -> Any:
    """Where ranks meet, a ``TCPStore`` served by this process; its ``port`` is a free one where 0 is asked for.

    ``listening``: the file number of a socket that listens there already, which the store then owns. Raises
    RuntimeError (torch's DistNetworkError) where the port is another's.
    """
    return _TCPStore(host, port, None, True, timeout=_MEETING, wait_for_workers=False, master_listen_fd=listening)


def join_store(host: str, port: int) -> Any:
    """The store that another process serves. Raises RuntimeError where nobody does within a minute."""
    return _TCPStore(host, port, None, False, timeout=_MEETING, wait_for_workers=False)


def loopback() -> str:
    """The name of this machine's loopback interface. Raises UsageError where it has none."""
    for _, name in socket.if_nameindex():
        if name.startswith("lo"):
            return name
    raise UsageError("this machine has no loopback interface; name the interface that the island's ranks are to use")


def is_rank_gone(error: BaseException) -> bool:
    """Whether a collective has raised it since another rank is gone: NCCL's, or gloo's, which names its own source."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def _in_time(connect: Callable[[], None]) -> None:
    """Call it. Raises what it raises, and DistError where it does not end in time.

    A group waits for its connections as long as for its collectives, that is without end for a rank that has just gone.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            connect()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="w5xde-connect", daemon=True)
    thread.start()
    thread.join(_CONNECTING_S)
    if thread.is_alive():
        raise dist.DistError(f"the ranks have met, and are not all connected after {_CONNECTING_S:.0f} s")
    if raised:
        raise raised[0]


class Group:
    """One rank's end. There is one in a process, for ``torch.distributed`` has one default group."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device | str = "cpu",
        *,
        interface: str = "",
    ) -> None:
        """Returns when all ranks are there. ``interface``: for the group's traffic (default: the loopback one).

        Raises RuntimeError (torch's DistError) where they do not come within five minutes, or one goes before all are
        connected; then this process cannot have another group.
        """
        self.rank, self.size, self.device = rank, size, torch.device(device)
        name = interface or loopback()
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        store.set(f"rank {rank}", "here")
        store.wait([f"rank {number}" for number in range(size)], _GATHERING)
        _in_time(partial(self._connect, store))

    def _connect(self, store: Any) -> None:
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.set_device(self.device)  # each thread has its own
        dist.init_process_group(
            "nccl" if on_cuda else "gloo", store=store, rank=self.rank, world_size=self.size, timeout=_PATIENCE,
            device_id=self.device if on_cuda else None,
        )  # fmt: skip
        self._data: Any = None  # the default one
        self._control: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._open(None)

    def _open(self, ranks: Sequence[int] | None) -> None:
        self._numbers: Any = dist.new_group(ranks, backend="gloo", timeout=_PATIENCE)
        # NCCL has no tags, and two ranks that both send first wait for each other: each lane has a group.
        separate = self.device.type == "cuda"
        self._lanes: list[Any] = [
            dist.new_group(ranks, timeout=_PATIENCE) if separate else self._data for _ in range(LANES)
        ]  # fmt: skip

    def divided(self, size: int) -> tuple[Group, Group]:
        """Groups within this one, which is all of a process's: of ``size`` neighbours, and of those that have this
        rank's place among their neighbours. All ranks call this. Nobody announces anything in them."""
        rows = [list(range(first, first + size)) for first in range(0, self.size, size)]
        columns = [list(range(place, self.size, size)) for place in range(size)]
        return self._part(rows), self._part(columns)

    def _part(self, every: Sequence[list[int]]) -> Group:
        found = self
        for ranks in every:  # each process has to make them all
            part = copy.copy(self)
            part._data = dist.new_group(ranks, timeout=_PATIENCE)
            part._open(ranks)
            if self.rank in ranks:
                part.rank, part.size = ranks.index(self.rank), len(ranks)
                found = part
        return found

    # -- what rank 0 says

    def announce(self, op: int, a: int = 0, b: int = 0) -> None:
        """Rank 0: tell the others, who are at ``hear`` or will be."""
        dist.broadcast(torch.tensor((op, a, b), dtype=torch.int64), 0, group=self._control)

    def hear(self) -> Announcement:
        """The others: what rank 0 announces next. Raises RuntimeError where it is gone."""
        told = torch.empty(3, dtype=torch.int64)
        dist.broadcast(told, 0, group=self._control)
        return Announcement(*told.tolist())

    # -- tensors of the data, on the ranks' device, one-dimensional and contiguous

    def all_to_all(self, output: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Pieces of ``given``, ``sent[r]`` elements to rank r, and of all ranks' into ``output``, in their order."""
        width = given.itemsize
        dist.all_to_all_single(
            output.view(torch.uint8), given.view(torch.uint8), [n * width for n in received],
            [n * width for n in sent], group=self._data,
        )  # fmt: skip

    def all_gather(self, output: Tensor, mine: Tensor) -> None:
        """All ranks' ``mine``, of one size, one behind the other; ``mine`` may lie in its place."""
        if self.device.type == "cuda":
            all_gather(output.view(torch.uint8), mine.view(torch.uint8), group=self._data)
        else:
            self._swap(output, mine, self._data)

    def _swap(self, output: Tensor, mine: Tensor, group: Any, patience: timedelta | None = None) -> None:
        """An all-gather in host memory: each rank's part goes straight to each other. gloo's own, a ring, takes twice
        as long for two ranks, and six times for a few numbers. Raises RuntimeError where one does not come."""
        if not output.numel():
            return
        rows = output.view(torch.uint8).view(self.size, -1)
        own, others = rows[self.rank], [(self.rank + n) % self.size for n in range(1, self.size)]
        if own.data_ptr() != mine.data_ptr():
            own.copy_(mine.view(torch.uint8))
        coming = [dist.irecv(rows[rank], group=group, tag=LANES, group_src=rank) for rank in others]
        going = [dist.isend(own, group=group, tag=LANES, group_dst=rank) for rank in others]
        for work in (*coming, *going):
            assert work is not None
            if patience is None:
                work.wait()
            else:
                work.wait(patience)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' ``tensor``, which is contiguous and of any shape, in its place; the same on all."""
        dist.all_reduce(tensor, group=self._data)
        return tensor

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """``tensor`` of rank ``source`` into everybody's."""
        dist.broadcast(tensor.view(torch.uint8), group=self._data, group_src=source)

    # -- from one rank to another; what one sends on a lane another receives in that order

    def send(self, tensor: Tensor, to: int, lane: int) -> Any:
        """Its ``wait`` returns when ``tensor`` may be written again."""
        return dist.isend(tensor.view(torch.uint8), group=self._lanes[lane], tag=lane, group_dst=to)

    def receive(self, tensor: Tensor, source: int, lane: int) -> None:
        """Into ``tensor``."""
        dist.recv(tensor.view(torch.uint8), group=self._lanes[lane], tag=lane, group_src=source)

    def send_numbers(self, numbers: Tensor, to: int, lane: int) -> Any:
        """An int64 tensor in host memory; beside the lane's tensors."""
        return dist.isend(numbers, group=self._numbers, tag=lane, group_dst=to)

    def receive_numbers(self, numbers: Tensor, source: int, lane: int) -> None:
        """Into ``numbers``."""
        dist.recv(numbers, group=self._numbers, tag=lane, group_src=source)

    # -- numbers and bytes, in host memory

    def numbers(self, values: Sequence[int], patience_s: float | None = None) -> list[list[int]]:
        """Each rank's ``values``, of which all give as many; int64.

        Raises TimeoutError where the others do not come within ``patience_s``; then the group cannot go on.
        """
        mine = torch.tensor(values, dtype=torch.int64)
        all_of = torch.empty(self.size * len(mine), dtype=torch.int64)
        if patience_s is None:
            self._swap(all_of, mine, self._numbers)
        else:
            try:
                self._swap(all_of, mine, self._numbers, timedelta(seconds=patience_s))
            except RuntimeError as error:
                raise TimeoutError(f"the other ranks did not answer: {error}") from None
        rows: list[list[int]] = all_of.view(self.size, -1).tolist()
        return rows

    def bytes_of_all(self, data: bytes) -> list[bytes]:
        """Each rank's ``data``."""
        lengths = [row[0] for row in self.numbers([len(data)])]
        longest = max(1, *lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        all_of = torch.empty(self.size * longest, dtype=torch.uint8)
        self._swap(all_of, mine, self._numbers)
        rows = all_of.view(self.size, longest).numpy()
        return [rows[rank, :length].tobytes() for rank, length in enumerate(lengths)]

    def pass_on(self, data: Tensor, source: int) -> None:
        """``data`` of rank ``source``, bytes in host memory, into everybody's."""
        dist.broadcast(data, source, group=self._numbers)

    def close(self) -> None:
        """Leave. Peers that still compute with this rank get errors."""
        dist.destroy_process_group()
