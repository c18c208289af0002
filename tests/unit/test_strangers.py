"""Which of the connections that nobody has let in goes where another one comes."""

from __future__ import annotations

from typing import Any

import pytest

from w5xde_async.net.strangers import Strangers


class One:
    def __init__(self, name: str, host: str = "a") -> None:
        self.name, self.host, self.heard, self.closed = name, host, 0, False

    def close(self) -> None:
        self.closed = True


def come(strangers: Strangers, *names: str, now: float = 0.0, host: str = "a", says: bool = False) -> list[One]:
    made = [One(name, host) for name in names]
    for one in made:
        strangers.make_room(host, now)
        strangers.add(one, now)
        one.heard = int(says)
    return made


def left(ones: list[One]) -> str:
    return "".join(one.name for one in ones if not one.closed)


def test_the_one_that_has_said_nothing_for_longest_goes() -> None:
    strangers = Strangers(100, 4)
    ones = come(strangers, *"abcd")
    ones[0].heard = 1
    ones += come(strangers, *"ef")
    assert left(ones) == "adef"
    assert (len(strangers), strangers.of("a"), strangers.of("b")) == (4, 4, 0)


def test_who_has_just_come_stays_among_those_that_say_something_now_and_then() -> None:
    strangers = Strangers(100, 4)
    ones = come(strangers, *"abcd", says=True)
    ones += come(strangers, "w", now=5.0)
    assert left(ones) == "bcdw"
    for one in ones[:3]:
        one.heard += 1
    ones += come(strangers, "e", now=5.1)
    assert "w" in left(ones)
    ones += come(strangers, "f", now=6.5)  # by now a worker would have said something
    assert "w" not in left(ones)


def test_those_that_say_nothing_have_half_of_the_places_at_most_where_others_want_them() -> None:
    strangers = Strangers(100, 4)
    ones = come(strangers, *"vw", says=True) + come(strangers, *"abcdefgh")
    assert left(ones) == "vwgh"
    for number in range(100):
        ones[number % 2].heard += 1
        ones += come(strangers, str(number), says=True)
    assert len(left(ones[-4:])) >= 2


def test_whoever_has_said_something_last_stays_longest() -> None:
    strangers = Strangers(100, 3)
    ones = come(strangers, *"abc", says=True)
    come(strangers, "d", says=True)
    assert left(ones) == "bc"
    ones[1].heard += 1
    come(strangers, "e", says=True)
    assert left(ones) == "b"


def test_of_all_addresses_the_one_with_most_gives_up_its_own() -> None:
    strangers = Strangers(6, 5)
    few, many = come(strangers, *"ab", host="few"), come(strangers, *"cdef", host="many")
    more = come(strangers, *"gh", host="others")
    assert (left(few), left(many), left(more)) == ("ab", "ef", "gh")
    for one in (*few, *many, *more):
        strangers.discard(one)
        strangers.discard(one)
    assert len(strangers) == 0
    assert not strangers.close_one(0.0)


@pytest.mark.parametrize("hosts", [1, 1000])
def test_one_more_costs_the_same_however_many_there_are(hosts: int) -> None:
    looked = 0

    class Watched(One):
        heard: Any = property(lambda self: self.look(), lambda self, value: None)

        def look(self) -> int:
            nonlocal looked
            looked += 1
            return 0

    strangers = Strangers(1000, 1000)
    for number in range(5000):
        host = str(number % hosts)
        strangers.make_room(host, 0.0)
        strangers.add(Watched("", host), 0.0)
    assert looked <= 2 * 4000
    assert len(strangers) == 1000


@pytest.mark.parametrize(("now", "goes"), [(0.5, "a"), (1.5, "w")])
def test_who_has_said_nothing_for_a_second_goes_first_however_few_they_are(now: float, goes: str) -> None:
    strangers = Strangers(100, 8)
    ones = come(strangers, *"abcdefg", says=True) + come(strangers, "w")
    strangers.make_room("a", now)
    assert [one.name for one in ones if one.closed] == [goes]
