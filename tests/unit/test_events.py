"""The event bus: who is told, when, and in what order."""

from __future__ import annotations

import pytest
from tests.support.events import committed

from w5xde_async.telemetry.events import Bus, Event, StepCommitted, Warned


def steps(events: list[Event]) -> list[object]:
    return [event.step if isinstance(event, StepCommitted) else type(event).__name__ for event in events]


def test_who_may_be_told_later_is_told_in_order_and_of_everything() -> None:
    bus, seen, other = Bus(), list[Event](), list[Event]()
    bus.subscribe(seen.append, prompt=False)
    bus.subscribe(other.append, prompt=False)
    for step in (1, 2):
        bus.publish_later(committed(step))
    assert not seen
    bus.publish(Warned(text="something else"))
    assert steps(seen) == steps(other) == [1, 2, "Warned"]
    bus.publish_later(committed(3))
    bus.deliver()
    bus.deliver()
    assert steps(seen) == steps(other) == [1, 2, "Warned", 3]


def test_where_one_is_prompt_all_are_told_at_once() -> None:
    bus, seen, late = Bus(), list[Event](), list[Event]()
    bus.subscribe(late.append, prompt=False)
    assert not bus.prompt
    bus.publish_later(committed(1))
    leave = bus.subscribe(seen.append)  # what was before it is not for it
    assert bus.prompt
    bus.publish_later(committed(2))
    assert (steps(seen), steps(late)) == ([2], [1, 2])
    leave()
    assert not bus.prompt
    bus.publish_later(committed(3))
    assert (steps(seen), steps(late)) == ([2], [1, 2])
    bus.deliver()
    assert (steps(seen), steps(late)) == ([2], [1, 2, 3])


def test_who_raises_is_named_and_left_out_and_others_are_told_of_all(caplog: pytest.LogCaptureFixture) -> None:
    bus, seen, before = Bus(), list[Event](), list[Event]()

    def broken(event: Event) -> None:
        before.append(event)
        if len(before) == 2:
            raise RuntimeError("no such column")

    bus.subscribe(broken, prompt=False)
    bus.subscribe(seen.append, prompt=False)
    for step in (1, 2, 3):
        bus.publish_later(committed(step))
    bus.deliver()
    bus.publish(committed(4))
    assert (steps(before), steps(seen)) == ([1, 2], [1, 2, 3, 4])
    assert "StepCommitted" in caplog.text


def test_who_publishes_when_it_is_told_is_told_of_that_too() -> None:
    bus, seen = Bus(), list[Event]()

    def tell(event: Event) -> None:
        if isinstance(event, StepCommitted):
            bus.publish(Warned(text=str(event.step)))

    bus.subscribe(seen.append, prompt=False)
    bus.subscribe(tell, prompt=False)
    for step in (1, 2):
        bus.publish_later(committed(step))
    bus.deliver()
    assert steps(seen) == [1, 2, "Warned", "Warned"]
