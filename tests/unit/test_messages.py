"""Messages: every one survives the wire, wrong types never become one, and its bytes are golden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from w5xde_async.errors import MalformedFrame
from w5xde_async.wire import messages
from w5xde_async.wire.frame import SESSION_CAPS, BufferSpec, decode_header, encode
from w5xde_async.wire.messages import MESSAGES, Message, Result

ALL = sorted(MESSAGES.values(), key=lambda cls: cls.TYPE)
by_name = pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)

_ints = st.integers(0, (1 << 63) - 1)
_seconds = st.floats(0.0, 1e9)
_counts = st.integers(0, 1 << 60)
#: Fields whose type alone allows too much.
BOUNDED: dict[tuple[str, str], st.SearchStrategy[Any]] = {
    ("Welcome", "microbatch_size"): st.integers(1, 1 << 31),
    ("Welcome", "accumulate"): st.integers(1, 1 << 31),
    ("Welcome", "heartbeat_s"): st.floats(1e-3, 1e5),
    ("Welcome", "silence_s"): st.floats(1e-3, 1e6),
    ("Welcome", "threads"): st.integers(0, 1 << 20),
    ("Ready", "threads"): st.integers(0, 1 << 16),
    ("Ready", "together"): st.integers(1, 1024),
    ("Ready", "numerics"): st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=20),
    ("Introduction", "rank"): st.integers(0, 3),
    ("Volunteer", "ranks"): st.integers(2, 1024),
    ("Volunteer", "port"): st.integers(1, 65535),
    ("Rendezvous", "rank"): st.integers(0, 1023),
    ("Rendezvous", "port"): st.integers(1, 65535),
    ("Introduction", "ranks"): st.integers(4, 1024),
    ("Done", "metric_names"): st.lists(st.text(st.characters(categories=["L", "N"]), max_size=5), unique=True).map(
        tuple
    ),
    ("Done", "splits"): st.integers(0, 63),
    ("Done", "compute_s"): _seconds,
    ("Done", "wait_s"): _seconds,
    ("Done", "encode_s"): _seconds,
    ("Done", "raw_bytes"): _counts,
    ("Lease", "step_samples"): st.integers(0, 1 << 40),
    ("Drain", "grace_s"): _seconds,
    ("Probe", "wanted"): st.integers(0, 3072),
    ("Probed", "wall"): st.floats(0.0, 1e12),
    ("Probed", "num_values"): _counts,
    ("Probed", "leaf_s"): _seconds,
    ("Report", "host_bytes"): _counts,
    ("Report", "device_bytes"): _counts,
    ("Report", "device_total_bytes"): _counts,
    ("Report", "cpu_s"): _seconds,
    ("Report", "leaf_s"): _seconds,
    ("Report", "flops_per_leaf"): st.floats(0.0, 1e30),
}
#: Values that no such field takes, by its type.
EXTREMES: dict[Any, list[Any]] = {
    float: [float("nan"), float("inf"), float("-inf"), -1.0, -5e-324, 1.7e308],
    int: [(1 << 63) - 1],
    str: ["x" * (1 << 20)],
    bytes: [bytes(1 << 10)],
    tuple[str, ...]: [("a", "a"), ("a\n",), ("x" * 129,), tuple(map(str, range(65)))],
}
#: Fields that any value of their type may stand in: counted, or compared with what is known, before they are used.
FREE = {
    ("Lease", "structure"), ("Lease", "deadline_s"), ("Params", "loss_scale"), ("Hello", "protocol"),
    ("Challenge", "protocol"), ("Refusal", "code"), ("Welcome", "term"), ("Welcome", "seed"),
    ("Welcome", "bucket_bytes"), ("Params", "version"),
    ("Params", "bucket"), ("Params", "num_buckets"), ("Lease", "lease"), ("Lease", "version"), ("Lease", "step"),
    ("Lease", "start"), ("Result", "lease"), ("Result", "bucket"), ("Result", "slot"),
    ("Done", "lease"), ("Done", "version"),
    ("Failed", "lease"), ("Failed", "leaf"), ("Verdict", "code"), ("Revoke", "lease"), ("Bye", "code"),
    ("ProgramRequest", "form"), ("Ready", "share"), ("Submit", "lease"), ("Probe", "filler"), ("Probed", "filler"),
    ("Unread", "lease"),
}  # fmt: skip
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: _ints,
    float: st.floats(),
    bool: st.booleans(),
    str: st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=20),
    bytes: st.binary(max_size=40),
    tuple[int, ...]: st.lists(_ints, max_size=5).map(tuple),
    tuple[float, ...]: st.lists(st.floats(), max_size=5).map(tuple),
    tuple[str, ...]: st.lists(st.text(max_size=5), max_size=5).map(tuple),
}
#: Texts of many lines.
OF_LINES = {("Failed", "error"), ("Failed", "traceback")}
#: For each field type, values that must not pass for it.
WRONG: dict[Any, list[Any]] = {
    int: [-1, 1 << 63, True, 1.0, "1", None],
    float: [True, "1.0", None],
    bool: [0, 1, None, "true"],
    str: [b"x", 1, None],
    bytes: ["x", 1, None],
    tuple[int, ...]: [(-1,), (1.0,), (True,), 1, None, "12"],
    tuple[float, ...]: [("1",), (None,), 1.0, None],
    tuple[str, ...]: [(b"x",), (1,), "xy", None],
}
SAMPLES: dict[Any, Callable[[str, int], Any]] = {
    int: lambda name, i: 7 + i,
    float: lambda name, i: 0.5 + i,
    bool: lambda name, i: True,
    str: lambda name, i: name,
    bytes: lambda name, i: name.encode(),
    tuple[int, ...]: lambda name, i: (i, 300, 70000),
    tuple[float, ...]: lambda name, i: (0.25, float(i)),
    tuple[str, ...]: lambda name, i: (name, "b"),
}


def hints(cls: type[Message]) -> dict[str, Any]:
    found = get_type_hints(cls)
    return {field.name: found[field.name] for field in structs.fields(cls)}


def sample(cls: type[Message]) -> Message:
    """The same instance every time, made of the field names and their places."""
    return cls(*[SAMPLES[kind](name, i) for i, (name, kind) in enumerate(hints(cls).items())])


def over_the_wire(message: Message) -> Message:
    (chunk,) = encode(message)
    return decode_header(memoryview(chunk)[4:], SESSION_CAPS)[0]


@by_name
@given(data=st.data())
def test_round_trip(cls: type[Message], data: st.DataObject):
    fields = hints(cls).items()
    message = cls(*[data.draw(BOUNDED.get((cls.__name__, name), VALUES[kind]), name) for name, kind in fields])
    back = over_the_wire(message)
    assert type(back) is cls
    assert repr(back) == repr(message)  # repr, because NaN is not equal to itself


@by_name
def test_no_text_of_a_peer_steers_a_terminal_or_begins_a_line(cls: type[Message]):
    said = "\x1b[2J\x07a\r\nroot# \x85\u2028\u202eb\tc"
    for place, (name, kind) in enumerate(hints(cls).items()):
        if kind is not str or (cls.__name__, name) in BOUNDED:  # Ready.numerics is refused then, see below
            continue
        values = list(structs.astuple(sample(cls)))
        values[place] = said
        got = getattr(cls.parse(msgpack.packb(values)), name)
        if (cls.__name__, name) in OF_LINES:
            assert got == "\ufffd[2J\ufffda \nroot#   \ufffdb c"
        else:
            assert got == "\ufffd[2J\ufffda  root#   \ufffdb c"


@by_name
def test_a_field_of_the_wrong_type_never_becomes_a_message(cls: type[Message]):
    right = structs.astuple(sample(cls))
    for place, (name, kind) in enumerate(hints(cls).items()):
        for value in WRONG[kind]:
            with pytest.raises(MalformedFrame, match=rf"{cls.__name__}\.{name} "):
                cls.parse(msgpack.packb((*right[:place], value, *right[place + 1 :])))


@by_name
def test_a_value_out_of_bounds_never_becomes_a_message(cls: type[Message]):
    """Every field has bounds, or a reason to have none."""
    right = structs.astuple(sample(cls))
    for place, (name, kind) in enumerate(hints(cls).items()):
        if (cls.__name__, name) in FREE:
            continue
        for value in EXTREMES.get(kind, []):
            with pytest.raises(MalformedFrame, match=rf"{cls.__name__}\.{name} "):
                cls.parse(msgpack.packb((*right[:place], value, *right[place + 1 :])))


@pytest.mark.parametrize("name", ["heartbeat_s", "silence_s"])
def test_no_time_of_nothing_keeps_a_worker_busy(name: str):
    welcome = structs.replace(sample(messages.Welcome), **{name: 0.0})
    with pytest.raises(MalformedFrame, match=name):
        over_the_wire(welcome)


@by_name
def test_too_few_or_too_many_fields_never_become_a_message(cls: type[Message]):
    right = structs.astuple(sample(cls))
    for values in (right[:-1], (*right, 1)):
        with pytest.raises(MalformedFrame, match="fields"):
            cls.parse(msgpack.packb(values))


@by_name
def test_messages_are_frozen_and_have_no_dict(cls: type[Message]):
    message = sample(cls)
    name = next(iter(hints(cls)))
    with pytest.raises(AttributeError):
        setattr(message, name, None)
    assert not hasattr(message, "__dict__")
    assert message == sample(cls)


@by_name
def test_golden_frame(cls: type[Message], golden: Callable[[str, bytes], None]):
    golden(f"frames/{cls.TYPE:02d}-{cls.__name__.lower()}.bin", b"".join(encode(sample(cls))))


def test_golden_frame_with_buffers(golden: Callable[[str, bytes], None]):
    buffers = [
        (BufferSpec("first", "float32", (2, 2), "raw", 16), bytes(range(16))),
        (BufferSpec("none", "int64", (0,), "raw", 0), b""),
        (BufferSpec("coded", "float32", (100,), "topk", 5), b"coded"),
    ]
    golden("frames/buffers.bin", b"".join(encode(Result(3, 1), buffers)))


RETIRED = {21}  # RETUNE; a number is never given again


def test_numbers_are_one_to_n_without_a_gap():
    assert [cls.TYPE for cls in ALL] == [number for number in range(1, ALL[-1].TYPE + 1) if number not in RETIRED]


def test_a_number_is_given_once():
    kinds = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)]
    assert {kind.TYPE: kind for kind in kinds if kind is not Message} == MESSAGES
    assert len(kinds) == len(MESSAGES) + 1


@pytest.mark.parametrize("numerics", ["", "tp=2\n", "\x1b[2J"])
def test_numerics_are_a_name_that_can_be_shown(numerics: str) -> None:
    right = list(structs.astuple(sample(messages.Ready)))
    right[messages.Ready.__struct_fields__.index("numerics")] = numerics
    with pytest.raises(MalformedFrame, match=r"Ready\.numerics "):
        messages.Ready.parse(msgpack.packb(right))
