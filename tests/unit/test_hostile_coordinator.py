"""What a hostile coordinator may send a worker besides programs: an error of the RemoteError family, never another."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tests.support.memory_links import memory_pair
from torch import nn

from w5xde_async.codecs.registry import codec
from w5xde_async.compute.program.carriage import Unloading
from w5xde_async.errors import LinkLost, MalformedFrame, Refused, RemoteError
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import Shard
from w5xde_async.wire.frame import DTYPE_BYTES, SESSION_CAPS, BufferSpec, decode_header, encode
from w5xde_async.wire.messages import PROTOCOL_VERSION, Accepted, Challenge, Introduction, Lease, Params, Proof, Welcome
from w5xde_async.worker.connection.handshake import Joined, join
from w5xde_async.worker.connection.inbox import Inbox
from w5xde_async.worker.executors.executor import ParameterReceiver
from w5xde_async.worker.executors.in_place import InPlaceReceiver
from w5xde_async.worker.executors.published import DeltaReceiver

LAYOUT = Layout.of(nn.Linear(8, 4), bucket_bytes=64)
LIMIT = 1 << 20

numbers = st.one_of(st.integers(0, 4), st.integers(0, 1 << 63), st.sampled_from([1 << 20, 1 << 40, 1 << 46, 1 << 62]))
extents = st.lists(numbers, max_size=4)
raw_specs = st.tuples(
    st.sampled_from(["", "layout", "inner", "program"]),
    st.sampled_from([*DTYPE_BYTES, "complex32", ""]),
    extents,
    st.sampled_from(["raw", "int8", "lz4", ""]),
    st.none() | numbers,
)


def parsed(message: Any, raws: list[Any]) -> tuple[BufferSpec, ...]:
    """The specs of a frame, as the wire would let them pass. ``nbytes`` None: as the shape says."""
    rows = []
    for name, dtype, shape, written, nbytes in raws:
        size = DTYPE_BYTES.get(dtype, 1)
        for extent in shape:
            size *= extent
        rows.append([name, dtype, shape, written, size if nbytes is None else nbytes])
    with suppress(OverflowError):  # msgpack has no such number
        return decode_header(msgpack.packb([message.TYPE, structs.astuple(message), rows]), SESSION_CAPS)[1]
    raise MalformedFrame("no number")


@given(st.lists(raw_specs, max_size=3))
def test_any_program_is_placed_or_refused(raws: list[Any]) -> None:
    with suppress(RemoteError):
        Unloading().place(parsed(Params(0, 0, 0, 1.0), [row for row in raws if (row[4] or 0) <= LIMIT]))


leases = st.builds(
    Lease, numbers, st.integers(0, 3), numbers, numbers, st.lists(st.integers(0, 3), max_size=2).map(tuple),
    st.floats(), st.booleans(), st.binary(max_size=4),
)  # fmt: skip
params = st.builds(Params, st.integers(0, 3), numbers, st.integers(0, 3) | numbers, st.floats(), st.booleans())


@given(
    st.sampled_from(["", "int8", "part"]),
    st.lists(st.tuples(leases | params, st.lists(raw_specs, max_size=2)), max_size=6),
)
def test_any_leases_and_parameters_are_held_or_refused(deltas: str, frames: list[Any]) -> None:
    receiver: ParameterReceiver = InPlaceReceiver(LAYOUT, FlatState(LAYOUT))
    if deltas:
        part = Shard.of(LAYOUT, [(0, 0, 8), (0, 16, LAYOUT.groups[0].numel)]) if deltas == "part" else None
        receiver = DeltaReceiver(LAYOUT, codec("int8"), part)
    inbox = Inbox(receiver, LIMIT, exact=True)
    with suppress(RemoteError):
        for message, raws in frames:
            specs = parsed(message, raws)
            if type(message) is Lease:
                views = inbox.place_lease(specs) if specs else []
                inbox.lease(message)
            else:
                views = receiver.place(message, specs) if specs else []
                if specs:  # one without its buffer is refused before
                    inbox.params(message)
            assert [len(view) for view in views] == [spec.nbytes for spec in specs]
            assert inbox.held_bytes <= LIMIT


rows = st.tuples(
    st.lists(st.text(max_size=4), max_size=2) | st.text(max_size=2) | st.none(),
    st.sampled_from(["grad", "mean", "max", "frozen", "", None]),
    st.sampled_from(["float32", "int64", "bool", "nn", "float", None, 3]),
    extents | st.none() | st.just([-1]) | st.just([True]),
)


@given(st.one_of(st.binary(max_size=64), st.lists(rows, max_size=3)), numbers)
def test_any_layout_is_read_or_refused(given_rows: Any, bucket_bytes: int) -> None:
    text = given_rows
    if not isinstance(text, bytes):
        text = json.dumps({"entries": given_rows, "bucket_bytes": bucket_bytes}).encode()
    with suppress(MalformedFrame):
        Layout.parse(text)


@pytest.mark.parametrize("shape", [(0, 1 << 63), (1 << 62, 0), (0, 1 << 40, 1 << 40), (0, (1 << 46) + 1)])
def test_no_extent_hides_behind_a_zero(shape: tuple[int, ...]) -> None:
    with pytest.raises(MalformedFrame, match="shape of buffer"):
        parsed(Params(0, 0, 0, 1.0), [("x", "uint8", shape, "raw", 0)])


def test_what_passes_can_be_made() -> None:
    for shape in ((0, 1 << 46), (1 << 46, 0), (0, 1 << 23, 1 << 23), (0,) * 16):
        (spec,) = parsed(Params(0, 0, 0, 1.0), [("x", "uint8", shape, "raw", 0)])
        assert torch.empty(spec.shape).numel() == 0


WELCOME = Welcome("0" * 16, "hostile", 1, 0, "fp32", 1, 1, 64, LAYOUT.fingerprint, 1.0, 2.0)


async def joined_by(welcome: Welcome, names: tuple[str, ...] = ("layout",)) -> Joined:
    """What a worker makes of this WELCOME, with the layout's text in every buffer."""
    near, far = memory_pair()
    text = LAYOUT.describe()

    async def coordinator() -> None:
        await far.recv()
        await far.send(encode(Challenge(PROTOCOL_VERSION, bytes(32), False, b"")))
        assert type((await far.recv()).message) is Proof
        await far.send(encode(Accepted(b"")))
        assert type((await far.recv()).message) is Introduction
        buffers = [(BufferSpec(name, "uint8", (len(text),), "raw", len(text)), text) for name in names]
        await far.send(encode(welcome, buffers))

    serving = asyncio.create_task(coordinator())
    try:
        return await join(near, key="w", name="w", token="", terms={})
    finally:
        await serving
        near.abort()
        far.abort()


@pytest.mark.parametrize("update", ["sync", "local"])
@pytest.mark.parametrize("names", [(), ("layout",), ("inner",), ("layout", "inner"), ("layout", "inner", "inner")])
async def test_any_welcome_is_taken_or_refused(update: str, names: tuple[str, ...]) -> None:
    try:
        joined = await joined_by(structs.replace(WELCOME, update=update), names)
    except (RemoteError, Refused):
        assert names != (("layout",) if update == "sync" else ("layout", "inner"))
    else:
        assert joined.layout == LAYOUT


async def test_a_precision_that_is_none_is_refused() -> None:
    with pytest.raises(RemoteError, match="the precision 'fp8'"):
        await joined_by(structs.replace(WELCOME, precision="fp8"))


@pytest.mark.parametrize("field", ["microbatch_size", "accumulate"])
@pytest.mark.parametrize("value", [0, 1 << 62])
async def test_sizes_that_are_none_are_refused(field: str, value: int) -> None:
    with pytest.raises(RemoteError, match=f"Welcome.{field}"):
        await joined_by(structs.replace(WELCOME, **{field: value}))


async def test_a_worker_says_nothing_of_itself_before_the_coordinator_has_proved_itself() -> None:
    near, far = memory_pair()
    joining = asyncio.create_task(join(near, key="my key", name="my name", token="secret", terms={}))
    hello = (await far.recv()).message
    assert structs.astuple(hello)[2:] == ("", "", "", "")
    await far.send(encode(Challenge(PROTOCOL_VERSION, bytes(32), True, b"")))
    assert type((await far.recv()).message) is Proof
    await far.send(encode(Accepted(bytes(32))))
    with pytest.raises(Refused, match="does not know this worker's token"):
        await joining
    near.abort()
    with pytest.raises(LinkLost):
        await far.recv()
    far.abort()
