"""Steps handed out one by one: each in one place, done once, whatever comes back and in what order."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from w5xde_async.plan.leases import FailedWork, LeaseTerms
from w5xde_async.plan.stream import DoneSteps, StreamLedger

WORKERS = ("a", "b", "c")
ACTS = st.lists(
    st.tuples(st.sampled_from("grant carry ask submit settle refuse give lose fail back-up".split()),
              st.sampled_from(WORKERS)),
    max_size=120,
)  # fmt: skip


@given(ACTS)
def test_every_step_is_in_one_place(acts: list[tuple[str, str]]) -> None:
    ledger = StreamLedger(LeaseTerms(max_failures=1000, max_deaths=1000), total_steps=12)
    waiting: list[int] = []
    backed: set[int] = set()
    now = 0.0
    for act, worker in acts:
        now += 1.0
        steps = [grant for grant in ledger.held(worker) if grant.step >= 0]
        asks = [grant for grant in ledger.held(worker) if grant.step < 0]
        if act == "grant":
            ledger.grant(worker, now=now, deadline_s=5.0, others=WORKERS)
        elif act == "back-up":
            late = [grant for grant, _ in ledger.unbacked() if ledger.may_back_up(worker, grant)]
            if late:
                second = ledger.back_up(late[0].lease, worker, now=now, deadline_s=5.0)
                backed.update({late[0].lease, second.lease})
        elif act == "carry" and steps and steps[0].lease not in backed:
            ledger.carry(steps[0].lease, now)
        elif act == "ask":
            ledger.ask(worker, now=now)
        elif act == "submit" and (asks or steps):
            lease = (asks or steps)[0].lease
            _, other = ledger.submitted(lease, now)
            assert other is None or (ledger.get(other.lease) is None and ledger.is_duplicate(other.lease))
            waiting.append(lease)
        elif act in ("settle", "refuse") and waiting:
            ledger.settle(waiting.pop(0), accepted=act == "settle")
        elif act == "give" and steps:
            ledger.give_back(steps[0].lease)
        elif act == "fail" and steps:
            ledger.fail(steps[0].lease)
        elif act == "lose":
            ledger.lose(worker)
        ledger.validate()
    # Whatever happened, the rest can be done, and then every step is done once.
    for worker in WORKERS:
        ledger.lose(worker)
    for lease in waiting:
        ledger.settle(lease, accepted=False)
    while (grant := ledger.grant("d", now=now, deadline_s=5.0)) is not None:
        ledger.submitted(grant.lease, now)
        ledger.settle(grant.lease, accepted=True)
    assert ledger.complete
    assert ledger.num_open == 0
    assert ledger.done.state_dict() == {"floor": 12, "above": []}


def test_what_a_lost_worker_carried_is_done_by_others() -> None:
    ledger = StreamLedger(total_steps=3)
    for _ in range(2):
        grant = ledger.grant("a", now=0.0, deadline_s=5.0)
        assert grant is not None
        ledger.carry(grant.lease, 1.0)
    assert ledger.carried("a") == (0, 1)
    assert ledger.lose("a")[0] == 2
    again = ledger.grant("b", now=2.0, deadline_s=5.0)
    assert again is not None
    assert again.step == 0


def test_a_submission_has_no_deadline_and_the_oldest_lease_of_a_worker_has() -> None:
    ledger = StreamLedger(total_steps=3)
    first = ledger.grant("a", now=0.0, deadline_s=5.0)
    second = ledger.grant("a", now=0.0, deadline_s=5.0)
    asked = ledger.ask("b", now=0.0)
    assert first is not None
    assert second is not None
    assert ledger.overdue(4.9) == []
    assert ledger.overdue(5.0) == [first]
    ledger.carry(first.lease, 5.0)
    assert ledger.overdue(9.9) == []  # the second could begin only then
    assert ledger.overdue(10.0) == [second]
    assert asked not in ledger.overdue(1e9)


@pytest.mark.parametrize("accepted", [True, False])
def test_a_step_that_was_overdue_may_take_twice_as_long(accepted: bool) -> None:
    """A submission is no step: who is asked for another one does not wait for it any longer."""
    ledger = StreamLedger(total_steps=2)
    first = ledger.grant("a", now=0.0, deadline_s=5.0)
    assert first is not None
    assert ledger.overran(first) == 2.0
    assert ledger.lose("a")[0] == 1
    again, other = ledger.grant("b", now=0.0, deadline_s=5.0), ledger.grant("c", now=0.0, deadline_s=5.0)
    assert again is not None
    assert (again.step, ledger.overdue(9.9)) == (0, [other])
    assert ledger.overdue(10.0) == [again, other]
    asked = ledger.ask("d", now=0.0, deadline_s=5.0)
    assert ledger.overran(asked) == 1.0
    assert asked in ledger.overdue(5.0)
    ledger.submitted(again.lease, 11.0)
    if accepted:
        ledger.settle(again.lease, accepted=True)
    else:
        assert ledger.refuse(again.lease, "b", 1.0, most=1, most_finite=1) == {0: 1}
    assert not ledger._overran


def test_the_time_of_a_lease_begins_when_its_version_is_there() -> None:
    waits = True
    ledger = StreamLedger(total_steps=3, waits=lambda lease: waits)
    grant = ledger.grant("a", now=0.0, deadline_s=5.0)
    assert ledger.overdue(100.0) == []
    waits = False
    assert ledger.overdue(104.9) == []
    assert ledger.overdue(105.0) == [grant]


def test_a_step_that_failed_on_a_worker_is_left_to_others() -> None:
    ledger = StreamLedger(LeaseTerms(max_failures=3), total_steps=1)
    grant = ledger.grant("a", now=0.0, deadline_s=5.0)
    assert grant is not None
    assert ledger.fail(grant.lease) is None
    assert ledger.grant("a", now=0.0, deadline_s=5.0, others=["a", "b"]) is None
    assert ledger.grant("b", now=0.0, deadline_s=5.0, others=["a", "b"]) is not None


def test_a_worker_that_loses_its_link_time_and_again_blames_no_step() -> None:
    ledger = StreamLedger(LeaseTerms(max_deaths=2), total_steps=1)
    for worker in "aaaabbb":
        ledger.returned("a")  # it is here again: it had not died
        assert ledger.grant(worker, now=0.0, deadline_s=5.0) is not None
        assert ledger.lose(worker)[1] is None
    ledger.grant("c", now=0.0, deadline_s=5.0)
    assert ledger.lose("c")[1] == FailedWork(0, 0, 2, died=True)


def test_no_step_is_to_blame_while_a_place_is_there_that_has_not_tried_it() -> None:
    ledger = StreamLedger(LeaseTerms(max_failures=2, present=lambda: "abc"), total_steps=1)
    for worker, place in zip("abc", ("here", "here", "there"), strict=True):
        ledger.places.joined(worker, place)
    for worker in "ab":
        grant = ledger.grant(worker, now=0.0, deadline_s=5.0)
        assert grant is not None
        assert ledger.fail(grant.lease) is None
    assert ledger.grant("b", now=0.0, deadline_s=5.0, others="abc") is None
    grant = ledger.grant("c", now=0.0, deadline_s=5.0, others="abc")
    assert grant is not None
    assert ledger.fail(grant.lease) == FailedWork(0, 0, 3, died=False)


def test_workers_that_fail_on_everything_end_no_run_while_one_that_delivers_has_not_tried() -> None:
    """All at one place: of three nothing is known but that they fail."""
    ledger = StreamLedger(LeaseTerms(max_failures=3, present=lambda: "abch"), total_steps=1)
    for worker in "abch":
        ledger.places.joined(worker, "here")
    ledger.places.delivered("h")
    for worker in "abc":
        grant = ledger.grant(worker, now=0.0, deadline_s=5.0, others="abch")
        assert grant is not None
        assert ledger.fail(grant.lease) is None
    assert ledger.grant("a", now=0.0, deadline_s=5.0, others="abch") is None
    grant = ledger.grant("h", now=0.0, deadline_s=5.0, others="abch")
    assert grant is not None
    assert ledger.fail(grant.lease) == FailedWork(0, 0, 4, died=False)


def test_a_step_is_done_once() -> None:
    done = DoneSteps.of_state({"floor": 2, "above": [4]})
    done.add(2)
    assert (done.floor, done.above(), len(done)) == (3, [4], 4)
    done.add(3)
    assert (done.floor, done.above()) == (5, [])
    with pytest.raises(ValueError, match="done already"):
        done.add(4)


def test_results_that_are_all_too_large_vouch_for_each_other() -> None:
    ledger = StreamLedger(total_steps=1)

    def submit(worker: str) -> int:
        grant = ledger.grant(worker, now=0.0, deadline_s=5.0)
        assert grant is not None
        ledger.submitted(grant.lease, 0.0)
        return grant.lease

    for norm in (3.0, 8.0, math.inf):  # one alone vouches for nothing, and what is not finite for nobody
        lease = submit("a")
        assert ledger.vouched(lease, "a", present=2) == 0.0
        ledger.refuse(lease, "a", norm, most=9, most_finite=9)
    lease = submit("b")
    assert ledger.vouched(lease, "b", present=2) == 16.0  # twice the last that "a" came to
    assert ledger.vouched(lease, "b", present=4) == 0.0  # two of four are not most of them
    ledger.refuse(lease, "b", 5.0, most=9, most_finite=9)
    lease = submit("c")
    assert ledger.vouched(lease, "c", present=4) == 10.0  # twice the smallest: one of them is honest
    ledger.refuse(lease, "c", 70.0, most=9, most_finite=9)
    lease = submit("c")
    assert ledger.vouched(lease, "c", present=3) == ledger.vouched(lease, "c", present=1) == 10.0


def test_who_is_alone_vouches_for_itself_by_coming_to_the_same() -> None:
    ledger = StreamLedger(total_steps=1)
    for norm, said in ((math.inf, 0.0), (3.0, 0.0), (8.0, 6.0), (1.0, 16.0)):  # twice the one before, if it was finite
        grant = ledger.grant("a", now=0.0, deadline_s=5.0)
        assert grant is not None
        ledger.submitted(grant.lease, 0.0)
        assert ledger.vouched(grant.lease, "a", present=2) == 0.0
        assert ledger.vouched(grant.lease, "a", present=1) == said
        ledger.refuse(grant.lease, "a", norm, most=9, most_finite=9)


@pytest.mark.parametrize(
    ("norms", "given_up_after"),
    [
        ([math.inf] * 9, 3),
        ([1.0] * 9, 5),
        ([math.inf, 1.0, math.inf, math.inf, math.nan] + [1.0] * 4, 9),  # it is not the step that makes them so
        ([math.inf, 1.0] + [math.nan] * 7, 6),  # who came to a number is gone: it ends all the same
    ],
)
def test_a_step_that_somebody_came_to_a_number_on_is_not_given_up_for_others_that_do_not(
    norms: list[float], given_up_after: int
) -> None:
    ledger = StreamLedger(total_steps=1)
    tried = 0
    while not ledger.complete:
        grant = ledger.grant("a", now=0.0, deadline_s=5.0)
        assert grant is not None
        ledger.submitted(grant.lease, 0.0)
        given_up = ledger.refuse(grant.lease, "a", norms[tried], most=3, most_finite=5)
        tried += 1
    assert (tried, given_up) == (given_up_after, {0: given_up_after})


def test_nobody_vouches_for_a_result_without_steps_of_its_own() -> None:
    """Where fragments stream, another fragment's result had them."""
    ledger = StreamLedger(total_steps=1)
    grant = ledger.grant("a", now=0.0, deadline_s=5.0)
    assert grant is not None
    ledger.carry(grant.lease, 0.0)
    first, second = ledger.ask("a", now=0.0), ledger.ask("a", now=0.0)
    assert ledger.submitted(first.lease, 0.0)[0] == (0,)
    assert ledger.submitted(second.lease, 0.0)[0] == ()
    assert ledger.vouched(second.lease, "a", present=1) == 0.0
