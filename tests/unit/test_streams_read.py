"""Streams: each sample once an epoch, in one order, wherever reading breaks off and whatever is asked for anew."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.support.streams import KINDS, in_order, stream
from torch import nn
from torch.utils.data import IterableDataset

from w5xde_async.data import stream as streams
from w5xde_async.data.reader import LeafReader
from w5xde_async.data.sharded import ShardedStream
from w5xde_async.data.stream import AT_FAULT, Mark, StreamReader
from w5xde_async.errors import JobError
from w5xde_async.job import Job


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LEAST_WINDOW", 8)


def job(dataset: Any, **changes: Any) -> Job:
    return Job(**{
        "model": nn.Identity, "dataset": dataset, "optimizer": lambda m: None, "batch_size": 4, "max_steps": 9,
        "shuffle_buffer": 5, **changes,
    })  # type: ignore[arg-type]  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS), num=st.integers(1, 60), buffer=st.integers(1, 20), shuffle=st.booleans(),
    epochs=st.integers(1, 3), seed=st.integers(0, 1 << 32),
)  # fmt: skip
def test_each_sample_once_an_epoch_wherever_it_is_resumed(
    kind: str, num: int, buffer: int, shuffle: bool, epochs: int, seed: int
) -> None:
    made, rng = job(stream(kind, range(num), num), shuffle=shuffle, shuffle_buffer=buffer), random.Random(seed)
    expected = in_order(made, epochs)
    assert [sorted(expected[at * num : (at + 1) * num]) for at in range(epochs)] == [list(range(num))] * epochs
    reader, done, found, first = StreamReader(made), 0, list[int](), 0
    while done < len(expected):
        count = rng.randint(1, 7)
        found[done:] = reader.read(range(done, min(done + count, len(expected))))
        done = min(done + count, len(expected))
        if rng.random() < 0.3:  # it has read ahead, and dies: what was kept is the mark of a step before
            reader.read(range(done, min(done + 9, len(expected))))
            first = done = rng.randint(max(first, done - 8), done)
            kept = json.loads(json.dumps(reader.mark(done).as_json()))
            reader = StreamReader(job(stream(kind, range(num), num), shuffle=shuffle, shuffle_buffer=buffer))
            reader.restore(Mark.of_json(kept))
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_for_again(kind: str) -> None:
    """Far behind, of an epoch that is over: a lost worker's step."""
    made = job(stream(kind, range(50), 50))
    expected, reader = in_order(made, 2), StreamReader(made)
    assert reader.read(range(80, 90)) == expected[80:90]
    assert reader.read([3, 4, 60, 2]) == [expected[at] for at in (3, 4, 60, 2)]
    reader.forget_before(40)
    assert reader.mark(40).place <= 40
    assert reader.read(range(40, 100)) == expected[40:]


@pytest.mark.parametrize("nested", [0, 100_000])
def test_a_state_that_json_would_change_is_not_kept(nested: int) -> None:
    """It is passed over to where that was: a key that is a number would come back as text; JSON nests not so deeply."""

    class Keyed(IterableDataset[Any]):
        begin = at = 0

        def __iter__(self) -> Iterator[int]:
            self.at, self.begin = self.begin, 0
            while self.at < 40:
                self.at += 1
                yield self.at

        def state_dict(self) -> dict[int, Any]:
            state: dict[int, Any] = {0: self.at}
            for _ in range(nested):
                state = {1: state}
            return state

        def load_state_dict(self, state: dict[int, int]) -> None:
            self.begin = state[0]

    reader = StreamReader(job(Keyed(), shuffle=False))
    expected = reader.read(range(40))
    kept = json.loads(json.dumps(reader.mark(30).as_json()))
    again = StreamReader(job(Keyed(), shuffle=False))
    again.restore(Mark.of_json(kept))
    assert again.read(range(30, 40)) == expected[30:]


@pytest.mark.slow
def test_a_resume_reads_little_where_the_dataset_says_where_it_is() -> None:
    def read_after_resume(kind: str) -> int:
        reader = StreamReader(job(stream(kind, range(4000), 4000)))
        reader.read(range(3000))
        again = stream(kind, range(4000), 4000)
        other = StreamReader(job(again))
        other.restore(reader.mark(3000))
        opened: list[Any] = []
        keep = other._opened
        other._opened = lambda here: opened.append(keep(here)) or opened[-1]  # type: ignore[method-assign, func-returns-value]
        other.read([3000])
        return int(opened[-1][0].read)

    assert read_after_resume("stateful") <= 20
    assert read_after_resume("epochs") > 3000


class Made(IterableDataset[Any]):
    def __init__(self, make: Any) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


def test_what_it_draws_is_seeded() -> None:
    """Its order and its samples: of every generator, at the beginning of an epoch and on the way."""

    def draws() -> Iterator[float]:
        order = random.sample(range(30), 30)
        for index in order:
            yield index + float(torch.rand(())) / 2 + float(np.random.rand()) / 4

    def read(places: range, mark: Mark | None = None) -> tuple[list[Any], StreamReader]:
        reader = StreamReader(job(Made(draws)))
        if mark is not None:
            reader.restore(mark)
        return reader.read(places), reader

    before = torch.get_rng_state()
    whole, reader = read(range(60))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    random.random()
    assert read(range(60))[0] == whole
    assert read(range(47, 60), reader.mark(47))[0] == whole[47:]
    assert [sorted(map(int, whole[:30])), sorted(map(int, whole[30:]))] == [list(range(30))] * 2


@pytest.mark.parametrize("where", ["stream", "collate"])
def test_a_resume_knows_that_something_drew(where: str) -> None:
    """Only the first samples and the last ones draw: none of those with which it goes on."""

    def drawn(number: int) -> float:
        return number + float(torch.rand(())) * (number < 16 or number >= 190)

    def collate(samples: list[float]) -> torch.Tensor:
        return torch.tensor([drawn(number) if where == "collate" else number for number in samples])  # type: ignore[arg-type]

    def decode(number: int) -> Any:
        return drawn(number) if where == "stream" else number

    def read(mark: Mark | None, places: range) -> tuple[list[float], StreamReader]:
        made = job(
            ShardedStream([0], open=lambda _: range(200), decode=decode), shuffle=False, collate=collate,
            microbatch_size=4,
        )  # fmt: skip
        stream = StreamReader(made)
        if mark is not None:
            stream.restore(mark)
        reader, found = LeafReader(made, stream=stream), list[float]()
        try:
            for at in range(places.start, places.stop, 4):
                found += reader._read_here(np.arange(at, at + 4), at).tensors[0].tolist()
        finally:
            reader._threads.shutdown()
        return found, stream

    whole, stream = read(None, range(200))
    assert read(None, range(200))[0] == whole
    kept = json.loads(json.dumps(stream.mark(100).as_json()))
    assert kept["draws"] is True
    assert read(Mark.of_json(kept), range(100, 200))[0] == whole[100:]
    del kept["draws"]  # of an older program
    assert read(Mark.of_json(kept), range(100, 188))[0] == whole[100:188]


def test_a_dataset_that_keeps_and_changes_the_state_that_it_is_given() -> None:
    class Keeps(IterableDataset[int]):
        kept: dict[str, int] | None = None

        def __iter__(self) -> Iterator[int]:
            self.now, self.kept = self.kept or {"at": 0}, None
            while self.now["at"] < 60:
                self.now["at"] += 1
                yield self.now["at"]

        def state_dict(self) -> dict[str, int]:
            return dict(self.now)

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.kept = state

    def reader() -> StreamReader:
        return StreamReader(job(Keeps(), shuffle=False))

    first = reader()
    whole = first.read(range(60))
    mark = first.mark(30)
    before = json.dumps(mark.as_json())
    again = reader()
    again.restore(mark)
    assert again.read(range(30, 60)) == whole[30:]
    assert json.dumps(mark.as_json()) == before
    assert again.read(range(30, 60)) == whole[30:]


def test_a_collate_that_draws_makes_no_other_stream_of_it() -> None:
    """What is read a second time is compared, collated, with what was read first."""
    made = job(
        stream("epochs", range(50), 50), collate=lambda samples: torch.rand(len(samples)) + torch.tensor(samples)
    )
    reader = StreamReader(made)
    first = reader.read(range(50))
    torch.rand(7)
    assert reader.read(range(50)) == first


def test_a_stream_that_is_not_the_same_each_time_is_refused() -> None:
    noise = np.random.default_rng(0)
    said = (
        "job dataset: Made gave other samples from sample 0 of epoch 0 on when it was read a second time; a stream must"
    )
    with pytest.raises(JobError, match=said):
        StreamReader(job(Made(lambda: iter(noise.random(8).tolist())))).read([0])
    reader = StreamReader(job(Made(lambda: iter(range(20)))))
    reader.read(range(14))
    other = StreamReader(job(Made(lambda: iter([*range(8), *range(19, 7, -1)]))))
    other.restore(reader.mark(13))
    with pytest.raises(
        JobError, match=r"Made gave other samples from sample 10 of epoch 0 on than at the .*--resume never"
    ):
        other.read([13])


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num=st.integers(40, 260), at=st.integers(0, 259), count=st.integers(1, 60), way=st.sampled_from(["less", "more"]),
    place=st.integers(0, 259), buffer=st.sampled_from([100, 40]),
)  # fmt: skip
@example(num=100, at=40, count=1, way="less", place=50, buffer=100)  # in the first window
@example(num=100, at=50, count=50, way="less", place=50, buffer=100)
@example(num=110, at=110, count=90, way="more", place=105, buffer=100)  # 10 samples, and 100
def test_a_stream_that_has_changed_where_it_is_read_again_is_refused(
    num: int, at: int, count: int, way: str, place: int, buffer: int
) -> None:
    """Samples are gone or have come: whatever a resume reads again has moved."""
    at, place, items = min(at, num), min(place, num - 1), list(range(num))
    reader = StreamReader(job(Made(lambda: items), shuffle_buffer=buffer))
    expected = reader.read(range(place + 1))
    mark = Mark.of_json(reader.mark(place).as_json())
    changed = items[:at] + items[at + count :] if way == "less" else items[:at] + [-1] * count + items[at:]
    other = StreamReader(job(Made(lambda: changed), shuffle_buffer=buffer))
    other.restore(mark)
    window = slice(mark.offset, mark.offset + buffer)
    if changed[window] != items[window]:
        with pytest.raises(JobError, match=r"gave other samples|the stream is empty|broke off"):
            other.read([place])
    else:
        assert other.read([place]) == expected[place:]


def test_a_window_in_another_order_is_refused() -> None:
    """All but its first samples: as where a shuffled list of shards begins with the same one by chance."""
    items = list(range(100))
    reader = StreamReader(job(Made(lambda: items), shuffle_buffer=100))
    reader.read(range(30))
    other = StreamReader(job(Made(lambda: items[:4] + items[:3:-1]), shuffle_buffer=100))
    other.restore(reader.mark(30))
    with pytest.raises(JobError, match="gave other samples"):
        other.read([30])


def test_other_shards_are_refused() -> None:
    def sharded(*shards: str) -> StreamReader:
        return StreamReader(job(ShardedStream(shards, open=iter), shuffle=False, shuffle_buffer=2))

    streams_of = "abcdefgh" * 64
    reader = sharded(streams_of, "ijkl" * 100, "mnop" * 100)
    reader.read(range(600))
    again = sharded("mnop" * 100, streams_of)
    again.restore(reader.mark(600))
    with pytest.raises(JobError, match="the list of shards has changed"):
        again.read([600])


@pytest.mark.parametrize(
    ("length", "said"), [(6, "more than the 6 samples an epoch"), (9, "has 8 samples an epoch, its len\\(\\) is 9")]
)
def test_a_wrong_len_is_found(length: int, said: str) -> None:
    class Wrong(Made):
        def __len__(self) -> int:
            return length

    with pytest.raises(JobError, match=said):
        StreamReader(job(Wrong(lambda: range(8)))).read(range(12))


def test_an_empty_one_is_found() -> None:
    with pytest.raises(JobError, match="the stream is empty in epoch 0"):
        StreamReader(job(Made(lambda: ()))).read([0])
    once = iter(range(4))
    with pytest.raises(JobError, match=r"when it was read a second time|is empty in epoch 1"):
        StreamReader(job(Made(lambda: once))).read(range(8))


@pytest.mark.parametrize("length", [8, 12])
def test_an_iterator_that_begins_anew_ends_its_epoch_all_the_same(length: int) -> None:
    """As a DataLoader ends it: at StopIteration."""
    told: list[int] = []

    class Cyclic:
        def __init__(self) -> None:
            self._left = length

        def __iter__(self) -> Cyclic:
            return self

        def __next__(self) -> int:
            if not self._left:
                self._left = length
                raise StopIteration
            self._left -= 1
            return self._left

    class Told(Made):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    made = job(Told(Cyclic), shuffle=False)
    assert StreamReader(made).read(range(2 * length)) == [*range(length)][::-1] * 2
    assert told == [0, 0, 1]  # the first samples are read twice


@pytest.mark.parametrize("change", [lambda sample: sample.pop("x"), lambda sample: sample["x"].mul_(2)])
def test_a_collate_that_changes_its_samples_is_given_each_as_it_was_read(change: Any) -> None:
    made = job(Made(lambda: ({"x": torch.ones(1)} for _ in range(40))), collate=lambda samples: change(samples[0]))
    assert [sample["x"] for sample in StreamReader(made).read(range(40))] == [1] * 40


@dataclass(slots=True)
class Text:
    tokens: list[int]
    words: dict[str, int]


def test_long_samples_are_given_as_they_were_read_and_what_all_have_is_not_copied() -> None:
    words, seen = {str(number): number for number in range(2000)}, list[Text]()

    def collate(texts: list[Text]) -> torch.Tensor:
        seen.extend(texts)
        for text in texts:
            text.tokens.append(-1)
        return torch.tensor([text.tokens[-3:] for text in texts])

    reader = StreamReader(
        job(Made(lambda: (Text([n] * 1500, words) for n in range(40))), collate=collate, shuffle=False)
    )
    for _ in range(2):
        assert collate(reader.read(range(4))).tolist() == [[n, n, -1] for n in range(4)]
    assert len(seen) > 8  # and for digests
    assert all(text.words is words for text in seen)


def test_a_record_that_cannot_be_decoded_is_one_sample() -> None:
    def decode(number: int) -> int:
        if number % 10 == 3:
            raise ValueError("corrupt")
        return number

    made = job(ShardedStream([range(10), range(10, 20)], open=iter, decode=decode, shuffle_shards=False), shuffle=False)
    reader = StreamReader(made)
    assert reader.read([0, 2, 4, 19, 20]) == [0, 2, 4, 19, 0]
    with pytest.raises(ValueError, match="corrupt") as caught:
        reader.read([12, 13])
    assert getattr(caught.value, AT_FAULT) == 13


@pytest.mark.parametrize("draws", [False, True])
def test_a_record_that_cannot_be_decoded_once_is_decoded_again(draws: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A file system that is away for a moment: the samples are those of a run in which it was not."""
    fails: set[int] = set()

    def decode(number: int) -> float:
        drawn = float(torch.rand(())) if draws else 0.0
        if number in fails:
            fails.discard(number)
            raise OSError("away")
        if number == 13:
            raise ValueError("corrupt")
        return number + drawn

    def read() -> tuple[list[float], StreamReader]:
        made = job(ShardedStream([range(17), range(17, 40)], open=iter, decode=decode), shuffle=False)
        reader = StreamReader(made)
        bad = in_order_of(13)
        return [reader.read([place])[0] for place in range(80) if place not in bad], reader

    def in_order_of(number: int) -> list[int]:
        made = StreamReader(job(ShardedStream([range(17), range(17, 40)], open=iter), shuffle=False))
        return [place for place in range(80) if made.read([place]) == [number]]

    expected, _ = read()
    assert not caplog.records
    fails |= {3, 12, 14, 22}
    found, reader = read()
    assert found == expected
    assert not fails
    assert len(caplog.records) == 4
    assert "(OSError: away); decoded once more it was there" in caplog.records[0].getMessage()
    with pytest.raises(ValueError, match="corrupt"):
        reader.read(in_order_of(13)[-1:])


def opened(text: bytes) -> io.BytesIO:
    return io.BytesIO(text)


def row(text: bytes) -> Iterator[float]:
    return map(float, text.split())


def entry(text: bytes) -> dict[str, bytes]:
    return {"image": text}


@pytest.mark.parametrize(
    ("record", "decode"),
    [
        (opened, lambda file: [float(one) for one in file.read().split()]),
        (row, list),
        (entry, lambda made: [float(one) for one in made.pop("image").split()]),
    ],
)
def test_what_the_first_attempt_has_used_up_or_changed_is_not_decoded_again(
    record: Any, decode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what is left of it another sample would be made, and another error."""
    stream = ShardedStream([[b"1 2 3", b"4 x 6 7", b"8"]], open=partial(map, record), decode=decode)
    iterator = iter(stream)
    assert next(iterator) == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="could not convert string to float"):
        next(iterator)
    assert next(iterator) == [8.0]
    assert not caplog.records


@pytest.mark.parametrize("draws", [False, True])
def test_records_that_cannot_be_decoded_have_no_shard_read_again(draws: bool) -> None:
    given: list[int] = []

    def records(shard: range) -> Iterator[int]:
        for number in shard:
            given.append(number)
            yield number

    def decode(number: int) -> float:
        if number % 100 == 70:
            raise ValueError("corrupt")
        return float(torch.rand(())) if draws else float(number)

    reader = StreamReader(job(ShardedStream([range(2000)], open=records, decode=decode), shuffle=False))
    for place in range(1900):
        if place % 100 != 70:
            reader.read([place])
            reader.forget_before(place)
    assert len(given) < 2200  # the first ones are read twice, for whether they are stable


async def test_a_collate_that_fails_once_on_a_streams_samples_is_called_again() -> None:
    fails = [True]

    def collate(samples: list[int]) -> torch.Tensor:
        if len(samples) == 3 and fails:
            fails.clear()
            raise OSError("away")
        return torch.tensor(samples)

    made = job(Made(lambda: iter(range(50))), collate=collate, shuffle=False)
    reader = LeafReader(made, stream=StreamReader(made))
    try:
        assert (await reader.read(np.arange(3), 0)).tensors[0].tolist() == [0, 1, 2]
    finally:
        await reader.aclose()


def nothing(_: Any) -> Any:
    return next(iter(()))


def test_a_decode_that_raises_stop_iteration_fails_on_its_record_alone() -> None:
    def decode(number: int) -> Any:
        return nothing(number) if number == 3 else number

    made = job(ShardedStream([range(10), range(10, 20)], open=iter, decode=decode, shuffle_shards=False), shuffle=False)
    reader = StreamReader(made)
    assert reader.read([0, 4, 19, 20]) == [0, 4, 19, 0]
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        reader.read([3])
    assert getattr(caught.value, AT_FAULT) == 3
    assert caught.value.__notes__ == ["at record 3 of shard range(0, 10)"]


@pytest.mark.parametrize("where", ["open", "iter", "close"])
def test_a_shard_whose_code_raises_stop_iteration_ends_no_epoch(where: str) -> None:
    class Shard:
        __iter__ = nothing if where == "iter" else lambda self: iter([1, 2])

        def close(self) -> None:
            if where == "close":
                raise StopIteration

    made = ShardedStream([1, 2], open=nothing if where == "open" else lambda _: Shard(), shuffle_shards=False)
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(made)


@dataclass(frozen=True)
class Frozen(Exception):
    """It lets nobody set an attribute, nor a note."""

    why: str


def test_a_sample_whose_exception_takes_no_attribute_is_at_fault_all_the_same() -> None:
    def decode(number: int) -> int:
        if number == 3:
            raise Frozen("corrupt")
        return number

    made = job(ShardedStream([range(10)], open=iter, decode=decode), shuffle=False)
    with pytest.raises(RuntimeError, match="Frozen") as caught:
        StreamReader(made).read([3])
    assert getattr(caught.value, AT_FAULT) == 3
    assert caught.value.__notes__ == ["at record 3 of shard range(0, 10)"]
    assert isinstance(caught.value.__cause__, Frozen)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_generator_that_raises_ends_the_run(sharded: bool) -> None:
    """Nothing comes after it: what is left of its epoch must not be passed over in silence."""

    def broken(shard: int = 0) -> Iterator[int]:
        yield from range(3)
        raise OSError("unreadable")

    dataset: Any = ShardedStream([1, 2], open=broken, shuffle_shards=False) if sharded else Made(broken)
    with pytest.raises(JobError, match=r"broke off at sample 3 of epoch 0: OSError: unreadable .*decode=") as caught:
        StreamReader(job(dataset, shuffle=False)).read(range(3))
    if sharded:
        assert caught.value.__cause__ is not None
        assert caught.value.__cause__.__notes__ == ["at record 3 of shard 1"]


def test_a_shard_that_cannot_be_opened_is_named_and_nobody_is_told_to_decode() -> None:
    def missing(shard: str) -> Any:
        raise FileNotFoundError(2, "No such file", shard)

    with pytest.raises(JobError) as caught:
        StreamReader(job(ShardedStream(["gone.jsonl"], open=missing, decode=int), shuffle=False)).read(range(3))
    assert "No such file" in str(caught.value)
    assert "at record 0 of shard 'gone.jsonl'" in str(caught.value)
    assert "decode" not in str(caught.value)


def test_shards_are_several() -> None:
    with pytest.raises(JobError, match=r"its shards are one text, 'data\.jsonl'; give a list of them"):
        ShardedStream("data.jsonl", open=open)


def test_marks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_MOST_MARKS", 16)
    made = job(stream("stateful", range(3000), 3000))
    reader, expected = StreamReader(made), in_order(made, 1)
    for place in range(0, 3000, 100):
        reader.read([place])
    assert len(reader._marks) <= 17
    assert reader.read(range(7, 30)) == expected[7:30]
