"""What the sandbox's child may answer: the worker refuses of it what the coordinator would refuse of the worker."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from w5xde_async.compute.program.channel import Done, answer_of, send

DONE = Done((0.5,), ("ab", "cd"), (1.0, 2.0), (), (), 3, (0,), 7, drew=False)


def answered(change: Callable[[bytes], bytes] = lambda text: text) -> object:
    read, write = os.pipe()
    try:
        send(write, DONE)
        text = os.read(read, 4096)
        os.write(write, change(text))
        return answer_of(read)
    finally:
        os.close(read)
        os.close(write)


def test_an_answer_is_read_as_it_was_said() -> None:
    assert answered() == DONE


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"cd", b"ab"), (b"cd", b"c\x07"), (b"\x03", b"\x40")],
    ids=["a name twice", "a name that cannot be printed", "more halvings than a message says"],
)
def test_what_a_message_cannot_say_the_child_cannot_say(before: bytes, after: bytes) -> None:
    def change(text: bytes) -> bytes:
        assert text.count(before) == 1
        return text.replace(before, after)

    with pytest.raises(ValueError, match=r"names of metrics|Expected `int`"):
        answered(change)
