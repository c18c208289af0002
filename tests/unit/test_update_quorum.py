"""When rounds close: K of M, the learned grace, late and lost workers."""

from __future__ import annotations

import pytest

from w5xde_async.updates.quorum import Quorum, QuorumConfig


def taught(*ages: float, **knobs: float) -> Quorum:
    quorum = Quorum(QuorumConfig(**knobs))  # type: ignore[arg-type]
    for age in ages:
        quorum.open(0.0, ["before"])
        quorum.arrived("before", age)
    quorum.open(0.0, ["before"])  # it is at its next work, and in no round after this one
    return quorum


def test_no_quorum_no_close_whatever_the_time() -> None:
    quorum = taught(1.0, part=0.5)
    quorum.open(0.0, ["a", "b", "c"])
    quorum.arrived("a", 1.0)
    decision = quorum.decide(1e9)
    assert not decision.close
    assert decision.look_again is None
    assert decision.reason == "1 of 3 results, 2 are a quorum"


def test_a_quorum_is_the_part_that_was_written() -> None:
    """Also where its product in floats is a little more."""
    for percent in range(1, 101):
        quorum = Quorum(QuorumConfig(part=percent / 100))
        for workers in (1, 7, 25, 50, 64):
            quorum.open(0.0, [f"{workers} {number}" for number in range(workers)])
            assert quorum.needed == -(-percent * workers // 100)


def test_the_grace_is_median_and_mad_of_the_ages() -> None:
    quorum = taught(1.0, 2.0, 4.0, 9.0, 100.0, deviations=3.0, window=5)
    assert quorum.grace_s == 4.0 + 3.0 * 3.0  # nothing is repeated: the window is as long
    quorum = taught(10.0, 10.0, 10.0, 10.0, part=0.5, deviations=4.0)
    quorum.open(100.0, "abcd")
    quorum.arrived("a", 103.0)
    quorum.arrived("b", 104.0)
    # as many of each: 10, 3, 4, so median 4, MAD 1
    decision = quorum.decide(104.0)
    assert (decision.close, decision.look_again) == (False, 108.0)
    assert "grace" in decision.reason
    assert not quorum.decide(107.999).close
    assert quorum.decide(108.0).close


def test_all_results_close_at_once() -> None:
    quorum = taught(50.0)
    quorum.open(0.0, "ab")
    quorum.arrived("a", 1.0)
    assert not quorum.decide(1.0).close
    quorum.arrived("b", 1.5)
    assert quorum.decide(1.5).close


def test_a_quorum_after_the_grace_closes_when_it_is_there() -> None:
    quorum = taught(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, part=1.0)
    quorum.open(0.0, "ab")
    quorum.arrived("a", 1.0)
    assert not quorum.decide(70.0).close
    quorum.arrived("b", 80.0)
    assert quorum.decide(80.0).close


def test_an_empty_round_never_closes() -> None:
    quorum = Quorum()
    assert quorum.decide(5.0).reason == "no worker is in the round"
    quorum.open(0.0, "a")
    quorum.left("a")
    assert not quorum.decide(1e9).close
    quorum.joined("b", 10.0)
    assert not quorum.decide(10.0).close
    assert quorum.arrived("b", 11.0)
    assert quorum.decide(11.0).close
    assert not quorum.arrived("stranger", 12.0)


def test_those_who_leave_are_not_waited_for_and_what_they_gave_counts() -> None:
    quorum = taught(3.0, 3.0, part=0.5)
    quorum.open(0.0, "abcd")
    quorum.arrived("a", 1.0)
    quorum.left("a")
    assert quorum.needed == 2
    quorum.left("c")
    quorum.left("d")
    assert (quorum.needed, quorum.decide(1.0).close) == (1, False)  # b may still come within the grace
    quorum.left("b")
    assert quorum.decide(1.0).reason == "all 1 results are in"


def rounds(quorum: Quorum, seconds: dict[str, float], count: int) -> tuple[list[float], list[str]]:
    """Workers that always take their time, over ``count`` rounds: the rounds' lengths, and who was late."""
    now, lengths, late = 0.0, [], []
    done: dict[str, float] = {}
    for _ in range(count):
        quorum.open(now, list(seconds))
        opened = now
        for worker, takes in seconds.items():
            done.setdefault(worker, now + takes)
        while True:
            decision = quorum.decide(now)
            if decision.close:
                break
            worker = min(done, key=done.__getitem__)
            if decision.look_again is not None and decision.look_again < done[worker]:
                now = decision.look_again
                continue
            now = done.pop(worker)
            if not quorum.arrived(worker, now):
                late.append(worker)
                quorum.joined(worker, now)
                done[worker] = now + seconds[worker]
        lengths.append(now - opened)
    return lengths, late


def test_equal_workers_are_all_waited_for_and_a_slow_one_is_not() -> None:
    even = {name: 10.0 + index * 0.1 for index, name in enumerate("abcdef")}
    lengths, late = rounds(Quorum(), even, 20)
    assert late.count("f") <= 1  # only while nothing was known
    assert lengths[-1] == pytest.approx(10.5)
    lengths, late = rounds(Quorum(), even | {"slow": 100.0}, 40)
    assert set(late[3:]) == {"slow"}
    assert max(lengths) < 12.0


def test_late_and_rare_ages_are_counted_or_the_grace_would_shrink() -> None:
    """Most workers are twice as slow as the quorum, and answer half as often while nobody waits for them."""
    quorum = Quorum(QuorumConfig(part=0.4))
    lengths, late = rounds(quorum, {"a": 1.0, "b": 1.01, "c": 1.99, "d": 2.0, "e": 2.01}, 20)
    assert lengths[0] < 1.1
    assert lengths[-1] == pytest.approx(2.01)
    assert quorum.grace_s > 2.01
    assert sorted(late[:3]) == ["c", "d", "e"]
    assert len(late) < 10  # while nothing was known; then all are in step


def test_ages_of_those_who_are_gone_are_forgotten() -> None:
    quorum, took = Quorum(), {"a": 1.0, "b": 9.0, "c": 30.0, "d": 5.0}
    for now, workers in ((0.0, "abc"), (100.0, "ab"), (200.0, "ad")):
        quorum.open(now, workers)
        for worker in workers:
            quorum.arrived(worker, now + took[worker])
    assert quorum.grace_s == 3.0 + 4.0 * 2.0  # as many of 1 and 5: median 3, MAD 2
    quorum.left("d")
    assert quorum.grace_s == 1.0


def test_one_that_joins_late_has_its_whole_grace() -> None:
    quorum = taught(2.0, 2.0, 2.0, 2.0, 2.0)
    quorum.open(0.0, "ab")
    quorum.joined("c", 1.5)
    quorum.arrived("a", 2.0)
    quorum.arrived("b", 2.0)
    assert quorum.decide(2.0).look_again == 3.5
    assert quorum.decide(3.5).close
