"""A dataset that can only be read from its beginning, read by places, and from the middle on after a resume.

A **place** counts the samples of all epochs before it. Samples are read in **windows** of one epoch. Where the job
shuffles, the samples of each ``shuffle_buffer`` in a row are handed out in an order drawn from the seed, the epoch and
where in it they lie. So what lies at a place is a function of the stream's own order and the seed alone, and shuffling
has no state.

A **mark** stands at the beginning of a window: the epoch, how many of its samples came before, what the dataset says
of where it is (``state_dict()``, of ``ShardedStream`` shard and offset), and a digest of the window. A checkpoint has
the mark at or before its first step that is not done; what lies between is read and passed over. A dataset without
``state_dict`` is passed over from the epoch's beginning on. Whatever is read a second time is compared with its mark:
a stream whose order is not stable is found.

One thread reads; ``mark`` and ``restore`` may be called from any.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from w5xde_async.compute.batch import flatten, on_host
from w5xde_async.errors import JobError, LeafFailed, headline, marked
from w5xde_async.job import Job, collated, copy_among, may_change_samples
from w5xde_async.params.flat import bytes_of
from w5xde_async.plan.sampler import epoch_order, seed_for
from w5xde_async.randomness import draws_random, random_state, seed_all
from w5xde_async.users_code import users_code

#: Samples that are read in one go, at least; where a larger number is shuffled together, so many.
LEAST_WINDOW = 64
# Of a window these samples are compared: its first, since a buffer of the stream's own gives one by chance but not so
# many in a row, and some of the others, the last among them: what is gone or has come moves it.
_FIRST, _SPREAD = 4, 12
#: An attribute of what reading raised: the sample that it was raised for.
AT_FAULT = "w5xde_sample"
_MOST_MARKS = 4096
_STEADY_SAMPLES = 64
_NOTHING = "nothing"  # the digest where an epoch is over
_UNSTABLE = (
    "a stream must give the same samples in the same order each time: sort what it lists, draw from the global "
    "generators of torch, random or numpy (they are seeded for it), and read nothing that changes meanwhile"
)
_CHANGED = "; where the data is meant to be other than at the checkpoint: --resume never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where a window begins. ``state``: what the dataset is given to go on there; None: it is passed over."""

    place: int = 0
    epoch: int = 0
    offset: int = 0  # samples of its epoch before it
    state: Any = None
    digest: str = ""  # of the window; without a "/" of its first samples alone; "": not known
    draws: bool | None = None  # what is known of whether random numbers are drawn: ``StreamReader.draws``

    def as_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    @classmethod
    def of_json(cls, kept: Mapping[str, Any]) -> Mark:
        """Raises KeyError, TypeError, ValueError."""
        numbers = {name: int(kept[name]) for name in ("place", "epoch", "offset")}
        draws = kept.get("draws")  # older ones lack it
        draws = None if draws is None else bool(draws)
        return cls(**numbers, state=kept["state"], digest=str(kept["digest"]), draws=draws)


def _close(iterator: Iterator[Any]) -> None:
    """Generators close the files that they read; others may have a ``close`` as well."""
    if hasattr(iterator, "close"):
        with users_code():
            iterator.close()


def _says_where_it_is(dataset: Any) -> bool:
    """Whether it has ``state_dict()`` and ``load_state_dict(state)``; some have such names for something else."""
    try:
        inspect.signature(dataset.state_dict).bind()
        inspect.signature(dataset.load_state_dict).bind({})
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def _copied(dataset: Any) -> Any:
    """A shallow copy with attributes of its own: a state that was loaded once would be begun at again."""
    made = copy.copy(dataset)
    if made.__dict__ is dataset.__dict__:  # as that of ``datasets``, which makes copies of its ``__dict__`` itself
        made.__dict__ = dict(dataset.__dict__)
    return made


class _Unreadable:
    """Stands for a sample whose reading raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error


@dataclass(frozen=True, slots=True)
class _Window:
    place: int
    samples: list[Any]


def stream_of(job: Job) -> StreamReader | None:
    """A reader of the job's dataset, if it is a stream."""
    return StreamReader(job) if job.streamed else None


class StreamReader:
    """Samples of ``job.dataset`` by place."""

    def __init__(self, job: Job) -> None:
        self._dataset, self._collate = job.dataset, job.collate
        self._copies = may_change_samples(job.collate)  # of samples that may be read again
        self._leaf_samples = job.leaf_samples
        self._seed, self._shuffle, self._length = job.seed, job.shuffle, job.num_samples
        self._together = job.shuffle_buffer if job.shuffle else 1
        self._window = self._together * -(-LEAST_WINDOW // self._together)
        # Two steps are open at once under the synchronous rule; what lies further back is read again from a mark.
        self._kept: deque[_Window] = deque(maxlen=2 + 2 * job.batch_size // self._window)
        # Whether its states lead to where they were taken: until one was seen that does not.
        self._trusted = _says_where_it_is(self._dataset)
        self._marks = [Mark()]
        self._lock = threading.Lock()
        self._here, self._restored = Mark(), -1  # what is read next; up to where marks are those of an earlier start
        self._source: Any = None
        self._iterator: Iterator[Any] | None = None
        self._by_state = False  # the iterator began at a state
        self._ended = False  # it has said that the epoch is over: some begin anew after that
        self._failed: Exception | None = None  # what it raised last, if it has given nothing since
        #: Whether the stream or the job's collate draws random numbers; None: not known yet. It is found in the first
        #: 64 samples, and goes with a mark: who resumes there reads as if nothing had happened.
        self.draws: bool | None = None

    def read(self, places: Sequence[int]) -> list[Any]:
        """The samples at ``places``, in their order.

        Raises what reading one of them raised, with its place as the attribute ``AT_FAULT``; JobError where the stream
        is not what it should be.
        """
        found = []
        for place in places:
            window = self._at(place)
            number = place - window.place
            if isinstance(sample := window.samples[number], _Unreadable):
                raise marked(sample.error, AT_FAULT, place)
            found.append(copy_among(window.samples, number) if self._copies else sample)
        return found

    def mark(self, place: int) -> Mark:
        """The last mark at or before ``place``."""
        with self._lock:
            return replace(self._marks[max(0, self._behind(place) - 1)], draws=self.draws)

    def forget_before(self, place: int) -> None:
        """No place before this one will be read any more."""
        with self._lock:
            del self._marks[: max(0, self._behind(place) - 1)]

    def restore(self, mark: Mark) -> None:
        """Go on at a mark of an earlier start. Before the first ``read``."""
        with self._lock:
            self._marks = [mark]
        self._here, self._restored = mark, mark.place
        self.draws = mark.draws

    def close(self) -> None:
        """Let go of what is open. A later ``read`` opens it again."""
        iterator, self._iterator, self._source = self._iterator, None, None
        if iterator is not None:
            _close(iterator)

    def _behind(self, place: int) -> int:
        """How many marks stand at or before a place."""
        return bisect_right(self._marks, place, key=lambda mark: mark.place)

    # -- windows -------------------------------------------------------------------------------------------

    def _at(self, place: int) -> _Window:
        if place < (self._kept[0].place if self._kept else self._here.place):
            self._go(self.mark(place))
        while place >= self._here.place:
            self._advance()
        return next(window for window in reversed(self._kept) if window.place <= place)

    def _go(self, mark: Mark) -> None:
        self.close()
        self._here = mark
        self._kept.clear()

    def _advance(self) -> None:
        """Read the next window, or find that the epoch is over."""
        here = self._here
        if self._iterator is not None:
            here = replace(here, state=self._state())
        elif here.offset and not (self._trusted and here.state is not None):
            here = Mark(place=here.place - here.offset, epoch=here.epoch)  # only its epoch's beginning leads there
        if not here.place and not self._marks[0].digest:
            self._read_twice()
        self._here = here
        samples = self._taken(here)
        if not self._compare(replace(here, digest=self._digest(samples)), len(samples)):
            return
        if not samples:
            self._next_epoch(here)
            return
        end = here.offset + len(samples)
        if self._length is not None and end > self._length:
            raise JobError("dataset", f"the stream has more than the {self._length} samples an epoch of its len()")
        if self._shuffle:
            samples = [
                one for at in range(0, len(samples), self._together) for one in self._shuffled(here, samples, at)
            ]
        self._kept.append(_Window(here.place, samples))
        self._here = Mark(place=here.place + len(samples), epoch=here.epoch, offset=end)

    def _shuffled(self, here: Mark, samples: list[Any], at: int) -> Iterator[Any]:
        some = samples[at : at + self._together]
        order = epoch_order(len(some), seed_for("window", self._seed, here.epoch), here.offset + at)
        return (some[number] for number in order.tolist())

    def _next_epoch(self, here: Mark) -> None:
        if not here.offset:
            raise JobError("dataset", f"the stream is empty in epoch {here.epoch}", "it must begin anew each epoch")
        if self._length is not None and here.offset != self._length:
            raise JobError("dataset", f"the stream has {here.offset} samples an epoch, its len() is {self._length}")
        self.close()
        self._here = Mark(place=here.place, epoch=here.epoch + 1)

    def _compare(self, mark: Mark, count: int) -> bool:
        """Note a mark whose window of ``count`` samples has been read, or compare it with what was noted before.

        False where the window is to be read in another way.
        """
        with self._lock:
            at = self._behind(mark.place)
            known = self._marks[at - 1] if at else None
            ahead = self._marks[at] if at < len(self._marks) else None
            if ahead is not None and ahead.place < mark.place + count:  # a window begins where none can
                other = ahead
            elif known is None or known.place < mark.place:
                if mark.digest != _NOTHING:
                    self._marks.insert(at, mark)
                if len(self._marks) > _MOST_MARKS:
                    del self._marks[1::2]
                return True
            elif mark.digest == _NOTHING and (known.epoch, known.offset) == (mark.epoch + 1, 0):
                return True
            elif (known.epoch, known.offset) == (mark.epoch, mark.offset) and self._agree(known, mark):
                if "/" in mark.digest:
                    self._marks[at - 1] = mark
                return True
            else:
                other = known
        if self._by_state:  # what the dataset says of where it is is not all: it may shuffle in a buffer of its own
            self._trusted = False
            self._go(other)
            return False
        name = type(self._dataset).__qualname__
        where = f"{name} gave other samples from sample {other.offset} of epoch {other.epoch} on"
        restored = other.place <= self._restored
        again = "than at the checkpoint" if restored else "when it was read a second time"
        raise JobError("dataset", f"{where} {again}", _UNSTABLE + _CHANGED * restored)

    @staticmethod
    def _agree(known: Mark, found: Mark) -> bool:
        """Whether nothing is known of one of them, or what is known is the same."""
        if not known.digest or not found.digest or "/" in known.digest:
            return not known.digest or not found.digest or found.digest == known.digest
        return found.digest.partition("/")[0] == known.digest

    # -- samples -------------------------------------------------------------------------------------------

    def _take(self, here: Mark) -> list[Any]:
        """A window's samples in the stream's order; fewer at the epoch's end."""
        samples: list[Any] = []
        with users_code():
            if self._iterator is None:
                self._by_state, self._failed, self._ended = bool(here.offset), None, False
                self._source, self._iterator = self._opened(here)
            while len(samples) < self._window and not self._ended:
                try:
                    samples.append(next(self._iterator))
                    self._failed = None
                except StopIteration:
                    if self._failed is not None and not getattr(self._iterator, "goes_on_after_errors", False):
                        unopened = getattr(self._iterator, "unopened", False)
                        raise self._broke_off(here, len(samples), self._failed, unopened=unopened) from self._failed
                    self._ended = True
                except MemoryError:
                    raise
                except Exception as error:
                    self._failed = error
                    samples.append(_Unreadable(error))
        return samples

    def _opened(self, here: Mark) -> tuple[Any, Iterator[Any]]:
        source = _copied(self._dataset) if hasattr(self._dataset, "load_state_dict") else self._dataset
        if hasattr(source, "set_epoch"):
            source.set_epoch(here.epoch)
        if here.offset:
            try:
                source.load_state_dict(copy.deepcopy(here.state))  # it may keep it, and change it
                return source, iter(source)
            except Exception as error:
                self._trusted = False
                raise JobError("dataset", f"it cannot go on at its state {here.state!r:.200}: {error}") from error
        return source, iter(source)

    @staticmethod
    def _broke_off(here: Mark, taken: int, error: Exception, *, unopened: bool) -> JobError:
        said = headline(LeafFailed.shown(error))
        hint = (
            ""
            if unopened
            else "a generator gives nothing after it has raised; have ShardedStream decode its records (decode=...)"
        )
        if notes := getattr(error, "__notes__", []):  # as ShardedStream's: at which record of which shard
            said = f"{said}, {notes[-1]}"
        return JobError(
            "dataset", f"the stream broke off at sample {here.offset + taken - 1} of epoch {here.epoch}: {said}", hint
        )

    def _state(self) -> Any:
        """What the dataset says of where it is; None where that cannot be kept, or read back as it was."""
        if not self._trusted:
            return None
        with users_code():
            state = self._source.state_dict()
        try:
            kept = json.loads(json.dumps(state, allow_nan=False))
            return kept if kept == state else None
        except (TypeError, ValueError, RecursionError):
            return None

    def _taken(self, here: Mark) -> list[Any]:
        """A window's samples. Where a record of ``ShardedStream`` was decoded at the second attempt, and random numbers
        are drawn, it is read once more: the first attempt may have drawn some."""
        samples = self._seeded(partial(self._take, here), here)
        begins_again = not here.offset or (self._trusted and here.state is not None)
        if self.draws is False or not begins_again or not getattr(self._iterator, "tried_again", False):
            return samples
        self.close()
        return self._seeded(partial(self._take, here), here)

    def _seeded(self, take: Callable[[], list[Any]], here: Mark) -> list[Any]:
        """What ``take`` gives; if the stream draws random numbers, the same whenever it is read."""
        seed, found = seed_for("stream", self._seed, here.epoch, here.offset), list[Any]()
        if self.draws is None:

            def look() -> None:
                found.extend(take())
                self._collate_all(found)

            if draws_random(look, seed):
                self.draws = True
            elif here.place + len(found) >= _STEADY_SAMPLES:
                self.draws = False
            return found
        if not self.draws and here.offset:  # many draw an order at the beginning of an epoch, and nothing else
            return take()
        with random_state():
            seed_all(seed)
            return take()

    def _collate_all(self, samples: Sequence[Any]) -> None:
        """Collate them by leaves, to see whether that draws."""
        if not may_change_samples(self._collate):
            return
        readable = [sample for sample in samples if not isinstance(sample, _Unreadable)]
        for at in range(0, len(readable), self._leaf_samples):
            with users_code(), suppress(Exception):  # it is told where a leaf is read
                collated(self._collate, readable, range(at, min(at + self._leaf_samples, len(readable))))

    def _read_twice(self) -> None:
        """Read the first samples once before all others: that a stream is not stable is better known now."""
        with random_state(), users_code():
            seed_all(seed_for("stream", self._seed, 0, 0))
            iterator = self._opened(Mark())[1]
            try:
                first = list(islice(iterator, _FIRST))
            except Exception:
                return
            finally:
                _close(iterator)
        with self._lock:
            self._marks[0] = Mark(digest=self._digest(first).partition("/")[0] if len(first) == _FIRST else "")

    def _digest(self, samples: Sequence[Any]) -> str:
        """Of a window: of its first samples, of some others too, and how many it has; "" where that is not possible.

        Each sample is collated alone.
        """
        if not samples:
            return _NOTHING
        digest, of_first, last = hashlib.blake2b(digest_size=16), "", len(samples) - 1
        spread = (
            {_FIRST + (last - _FIRST) * number // (_SPREAD - 1) for number in range(_SPREAD)} if last >= _FIRST else ()
        )
        with random_state(), users_code():  # once: to take the state and to put it back takes longer than all of this
            for at in (*range(min(_FIRST, len(samples))), *sorted(spread)):
                if at == _FIRST:
                    of_first = digest.hexdigest()
                if isinstance(samples[at], _Unreadable):
                    continue
                try:
                    seed_all(0)
                    structure, tensors = flatten(collated(self._collate, samples, [at]))
                except Exception:
                    return ""
                digest.update(structure)
                for tensor in map(on_host, tensors):
                    digest.update(bytes_of(tensor))
        return f"{of_first or digest.hexdigest()}/{digest.hexdigest()}/{len(samples)}"
