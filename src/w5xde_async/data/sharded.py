"""A dataset of many shards (files, URLs), each of which is read from its beginning: tar, parquet, JSON lines, ..."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import PurePath
from typing import Any

from torch.utils.data import IterableDataset

from w5xde_async.errors import JobError, noted, utf8
from w5xde_async.plan.sampler import epoch_order
from w5xde_async.users_code import users_code

logger = logging.getLogger(__name__)


class ShardedStream(IterableDataset[Any]):
    """Samples of one shard after the other. It knows where it is by (shard, offset), and goes on there.

    ``shards``: whatever ``open`` takes; the same ones in the same order at every start (sort what was listed).
    ``open(shard)`` gives the shard's records, the same ones in the same order each time. ``decode(record)`` makes a
    sample of one: what it raises is that sample's fault alone, and records that a resume passes over are not decoded.
    ``length``: samples of all shards, where it is known: then ``epochs`` may end a run. ``shuffle_shards``: in an order
    drawn from ``seed`` and the epoch. Raises JobError where there are no shards.

    >>> ShardedStream(sorted(glob("data/*.jsonl")), open=open, decode=json.loads)
    """

    def __init__(
        self,
        shards: Sequence[Any],
        open: Callable[[Any], Iterable[Any]],
        *,
        decode: Callable[[Any], Any] | None = None,
        length: int | None = None,
        shuffle_shards: bool = True,
        seed: int = 0,
    ) -> None:
        if not shards:
            raise JobError("ShardedStream", "there are no shards", "look at what lists them")
        if isinstance(shards, str | bytes):
            raise JobError("ShardedStream", f"its shards are one text, {shards!r:.200}", "give a list of them")
        self.shards, self._open, self._decode = list(shards), open, decode
        self._length, self._shuffle, self._seed = length, shuffle_shards, seed
        self._epoch = 0
        self._begin = (0, 0)  # the next iteration begins there: which shard of the epoch's order, and offset in it
        self._iteration: _Iteration | None = None

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("how many samples the shards have is not known")
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch."""
        self._epoch = epoch

    def order(self) -> list[int]:
        """The shards of the epoch, by their numbers."""
        count = len(self.shards)
        return epoch_order(count, self._seed, self._epoch).tolist() if self._shuffle else list(range(count))

    def state_dict(self) -> dict[str, int]:
        """Where the last iteration is: ``shard`` by number, ``turn`` in the order ``of`` so many, ``offset`` in it."""
        turn, offset = (0, 0) if self._iteration is None else self._iteration.at
        order = self.order()
        shard = order[turn] if turn < len(order) else -1
        return {"turn": turn, "of": len(order), "shard": shard, "offset": offset}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next iteration goes on there. Raises ValueError where the shards are others."""
        turn, order = state["turn"], self.order()
        if state["of"] != len(order) or (turn < len(order) and state["shard"] != order[turn]):
            raise ValueError(f"there were {state['of']} shards and are {len(order)}: the list of shards has changed")
        self._begin = (turn, state["offset"])

    def __iter__(self) -> Iterator[Any]:
        begin, self._begin = self._begin, (0, 0)
        self._iteration = _Iteration([self.shards[number] for number in self.order()], self._open, self._decode, begin)
        return self._iteration


class _Iteration:
    """``at``: which shard in turn, and how many of its records have been read."""

    def __init__(
        self, shards: list[Any], open: Callable[[Any], Iterable[Any]], decode: Callable[[Any], Any] | None,
        begin: tuple[int, int],
    ) -> None:  # fmt: skip
        self._shards, self._open, self._decode = shards, open, decode
        self.at = begin
        self.goes_on_after_errors = True  #: a record that cannot be decoded is the only one that is lost
        self.unopened = False  #: what ended it was ``open``, not a record
        self.tried_again = False  #: a record could be decoded only at the second attempt
        self._opened: Any = None
        self._records: Iterator[Any] | None = None

    def close(self) -> None:
        """Let go of the shard that is open, as by its own ``close``, if it has one."""
        opened, self._opened, self._records = self._opened, None, None
        if hasattr(opened, "close"):
            with users_code():
                opened.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        turn, offset = self.at
        while turn < len(self._shards) and self.goes_on_after_errors:
            try:
                if self._records is None:
                    with users_code():  # a StopIteration of its own ends no shard
                        self._opened = self._open(self._shards[turn])
                        self._records = islice(iter(self._opened), offset, None)
                record = next(self._records)
            except StopIteration:
                self.close()
                turn, offset = self.at = (turn + 1, 0)
                continue
            except Exception as error:
                self.goes_on_after_errors, self.unopened = False, self._opened is None
                self.close()
                error = noted(error, self._place(turn, offset))
                raise error
            self.at = (turn, offset + 1)
            if self._decode is None:
                return record
            return self._decoded(record, self._place(turn, offset))
        raise StopIteration

    def _decoded(self, record: Any, place: str) -> Any:
        """A record that cannot change is at fault only if it raises a second time, as a sample is that is read by
        index. Others may be used up by the first attempt, as a file is, or changed: of what is left of them another
        sample would be made."""
        assert self._decode is not None
        try:
            with users_code():
                return self._decode(record)
        except MemoryError:
            raise
        except Exception as error:
            if not _never_changes(record):
                error = noted(error, place)
                raise error
            why = utf8(f"{type(error).__name__}: {error}"[:200])
        try:
            with users_code():
                found = self._decode(record)
        except Exception as error:
            error = noted(error, place)
            raise error
        self.tried_again = True
        logger.warning("a record could not be decoded, %s (%s); decoded once more it was there", place, why)
        return found

    def _place(self, turn: int, offset: int) -> str:
        return f"at record {offset} of shard {self._shards[turn]!r:.200}"


def _never_changes(record: object) -> bool:
    """Whether decoding it leaves it as it is, whatever it does."""
    if type(record) is tuple:
        return all(map(_never_changes, record))
    return record is None or type(record) in (bool, bytes, complex, float, int, str) or isinstance(record, PurePath)
