"""docs/protocol.md says what the code does: every message, field, type, number, state, cap and code."""

from __future__ import annotations

import re
import struct
from enum import IntEnum
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from w5xde_async.errors import RefusalCode
from w5xde_async.wire.frame import DTYPE_BYTES, HANDSHAKE_CAPS, SESSION_CAPS, BufferSpec, encode
from w5xde_async.wire.handshake import COORDINATOR, WORKER, Table, prove
from w5xde_async.wire.messages import MESSAGES, PROTOCOL_VERSION, ByeCode, Message, Refusal, Result, VerdictCode

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
_TITLE = re.compile(r"### (\d+) ([A-Z]+) \(`(\w+)`\): (.+)")
_TYPES: dict[Any, str] = {
    int: "int", float: "float", bool: "bool", str: "str", bytes: "bytes", tuple[int, ...]: "[int]",
    tuple[float, ...]: "[float]", tuple[str, ...]: "[str]",
}  # fmt: skip


def wire_name(cls: type[Message]) -> str:
    return "REFUSED" if cls is Refusal else cls.__name__.upper()


def section(title: str) -> str:
    """The text below a heading, up to the next of any level."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/protocol.md has no heading {title!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The rows of a table, without its two head lines."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def titles() -> list[re.Match[str]]:
    return list(_TITLE.finditer(TEXT))


def test_protocol_version() -> None:
    assert re.findall(r"Protocol version (\d+)\.", TEXT) == [str(PROTOCOL_VERSION)]


def test_every_message_stands_there_under_its_number() -> None:
    documented = [(int(t[1]), t[2], t[3]) for t in titles()]
    assert documented == [(number, wire_name(cls), cls.__name__) for number, cls in sorted(MESSAGES.items())]


def test_fields_and_types() -> None:
    for cls in MESSAGES.values():
        title = next(t[0] for t in titles() if t[3] == cls.__name__)
        documented = [(row[0], row[1]) for row in rows(section(title.removeprefix("### ")))]
        typed = [(name, _TYPES[hint]) for name, hint in get_type_hints(cls).items() if name != "TYPE"]
        assert documented == typed, cls


def test_direction() -> None:
    for cls in MESSAGES.values():
        to_coordinator = any(kind is cls for _, kind in COORDINATOR)
        to_worker = any(kind is cls for _, kind in WORKER)
        expected = "both ways" if to_coordinator and to_worker else "worker -> coordinator"
        if not to_coordinator:
            expected = "coordinator -> worker"
        assert next(t[4] for t in titles() if t[3] == cls.__name__) == expected, cls


@pytest.mark.parametrize(
    ("title", "table"), [("The coordinator receives", COORDINATOR), ("The worker receives", WORKER)]
)
def test_states(title: str, table: Table) -> None:
    said = [[state.value, wire_name(cls), following.value] for (state, cls), following in table.items()]
    assert sorted(rows(section(title))) == sorted(said)


@pytest.mark.parametrize(
    ("title", "codes"), [("Refusal codes", RefusalCode), ("Verdict codes", VerdictCode), ("Bye codes", ByeCode)]
)
def test_codes(title: str, codes: type[IntEnum]) -> None:
    assert rows(section(title)) == [[str(code.value), code.name] for code in codes]


def test_caps_and_dtypes() -> None:
    assert [[int(cell) for cell in row[1:]] for row in rows(section("Caps"))] == [
        list(pair) for pair in zip(HANDSHAKE_CAPS, SESSION_CAPS, strict=True)
    ]
    assert {row[0]: int(row[1]) for row in rows(section("Dtypes"))} == DTYPE_BYTES


def test_the_frame_in_hex() -> None:
    found = re.search(r"```hex\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    documented = bytes.fromhex("".join(line.split("   ")[0] for line in found[1].splitlines()))
    spec = BufferSpec("", "float32", (2,), "raw", 8)
    assert documented == b"".join(encode(Result(7, 0), [(spec, struct.pack("<2f", 1.5, -0.0))]))


def test_the_proofs() -> None:
    nonces = bytes(range(32)), bytes(range(32, 64))
    documented = {row[0]: row[1] for row in rows(section("Handshake"))}
    assert documented == {role: prove(b"correct horse", role, *nonces).hex() for role in ("coordinator", "worker")}
