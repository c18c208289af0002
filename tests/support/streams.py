"""Streams of every kind that a job may read, and the order in which a run has to read them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from w5xde_async.data.sharded import ShardedStream
from w5xde_async.job import Job
from w5xde_async.plan.sampler import epoch_order, seed_for

__all__ = ["KINDS", "in_order", "stream"]

#: ``counted``: it has a len(). ``epochs``: another order each epoch. ``stateful``: it says where it is; ``buffered``:
#: not all of it, as one that shuffles in a buffer of its own. ``asks``: its methods of these names do something else.
KINDS = ("plain", "counted", "epochs", "stateful", "asks", "buffered", "sharded", "sharded counted")


class _Plain(IterableDataset[Any]):
    """Whatever ``items`` has, from its beginning."""

    def __init__(self, items: Any, num: int) -> None:
        self.items, self.num, self.read = items, num, 0

    def order(self) -> Sequence[int]:
        return range(self.num)

    def __iter__(self) -> Iterator[Any]:
        for index in self.order():
            self.read += 1
            yield self.items[index]


class _Counted(_Plain):
    def __len__(self) -> int:
        return self.num


class _Epochs(_Plain):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> Sequence[int]:
        return epoch_order(self.num, 11, self.epoch).tolist()


class _Stateful(_Epochs):
    """As ``datasets`` streams: the state is of the last iteration, and the next one begins at it."""

    begin = at = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begin = self.begin, 0
        order = self.order()
        while self.at < len(order):
            self.at += 1
            self.read += 1
            yield self.items[order[self.at - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["epoch"] == self.epoch
        self.begin = state["at"]


class _Asks(_Epochs):
    """As MosaicML's: whoever asks says how many samples were read."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        raise AssertionError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class _Buffered(_Stateful):
    """What it says of where it is leaves out its buffer of three: going on there gives other samples."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for item in super().__iter__():
            buffer.append(item)
            if len(buffer) == 3:
                yield buffer.pop(1)
        yield from buffer


def _sharded(items: Any, num: int, length: int | None) -> ShardedStream:
    """Shards of 0, 1, 2, ... samples."""
    shards, begin = [], 0
    while begin < num:
        shards.append(range(begin, min(num, begin + len(shards))))
        begin += len(shards) - 1
    return ShardedStream(shards, open=iter, decode=items.__getitem__, length=length, seed=2)


def stream(kind: str, items: Any, num: int) -> Any:
    """A dataset of that kind over ``items[0]`` to ``items[num - 1]``."""
    if kind.startswith("sharded"):
        return _sharded(items, num, num if kind.endswith("counted") else None)
    kinds: dict[str, Any] = {
        "plain": _Plain, "counted": _Counted, "epochs": _Epochs, "stateful": _Stateful, "asks": _Asks,
        "buffered": _Buffered,
    }  # fmt: skip
    return kinds[kind](items, num)


def in_order(job: Job, epochs: int) -> list[Any]:
    """The samples of so many epochs as a run takes them: by the definition (docs/data.md), without its reader."""
    found: list[Any] = []
    size = job.shuffle_buffer if job.shuffle else 1
    for epoch in range(epochs):
        dataset = copy.copy(job.dataset)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        samples = list(dataset)
        for begin in range(0, len(samples), size):
            window = samples[begin : begin + size]
            order = epoch_order(len(window), seed_for("window", job.seed, epoch), begin)
            found += [window[at] for at in order.tolist()]
    return found
