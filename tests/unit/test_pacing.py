"""How much, for whom, until when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from w5xde_async.errors import UsageError
from w5xde_async.plan.pacing import Pacing, PacingConfig


def paced(**leaf_s: float) -> Pacing:
    pacing = Pacing(PacingConfig(target_lease_s=0.0))
    for worker, seconds in leaf_s.items():
        pacing.takes_work(worker)
        pacing.observe(worker, 1, seconds)
    return pacing


def among(pacing: Pacing, *workers: str) -> Pacing:
    """These take work as well."""
    for worker in workers:
        pacing.takes_work(worker)
    return pacing


def test_nothing_known_means_one_leaf() -> None:
    assert among(paced(), "a", "b").block_leaves("a", 1000) == 1


def test_half_of_the_fair_share_as_a_power_of_two() -> None:
    assert paced(a=1.0, b=1.0).block_leaves("a", 64) == 16
    assert paced(a=1.0, b=1.0, c=2.0).block_leaves("c", 160) == 16  # half of 32
    assert paced(a=1.0, b=1.0).block_leaves("a", 63) == 8


def test_a_fast_worker_gets_more() -> None:
    pacing = paced(fast=0.1, slow=0.4)
    assert pacing.block_leaves("fast", 100) == 32  # half of 80
    assert pacing.block_leaves("slow", 100) == 8  # half of 20


def test_a_new_worker_is_taken_for_a_middling_one() -> None:
    pacing = paced(a=0.1, b=0.2, c=0.9)
    among(pacing, "new")
    assert pacing.block_leaves("new", 100) == pacing.block_leaves("b", 100)


def test_blocks_shrink_towards_the_end() -> None:
    pacing = paced(a=1.0, b=1.0)
    sizes, free = [], 64
    while free:
        size = min(pacing.block_leaves("a", free), free)
        sizes.append(size)
        free -= size
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (16, 1)


def test_a_lease_is_worth_its_cost_but_not_more_than_the_share() -> None:
    pacing = Pacing(PacingConfig(target_lease_s=0.004))
    for worker in "abcd":
        pacing.takes_work(worker)
        pacing.observe(worker, 1, 0.001)
    assert pacing.block_leaves("a", 16) == 4  # 4 ms of work, all of a share
    assert pacing.block_leaves("a", 8) == 2  # every worker still gets one
    assert pacing.block_leaves("a", 1) == 1


def test_waiting_for_a_processor_is_not_work_that_pays_for_a_lease() -> None:
    """Ten workers on two cores take five times as long for a leaf as they work on it."""
    pacing = Pacing(PacingConfig(target_lease_s=0.0, min_lease_s=0.005))
    for worker in map(str, range(10)):
        pacing.takes_work(worker)
        pacing.observe(worker, 10, 0.001)
        for _ in range(30):
            pacing.observe(worker, 10, 0.005)
    assert pacing.block_leaves("0", 20, step_leaves=1280) == 32  # 50 by the quickest, and not 10
    assert pacing.block_leaves("0", 20, step_leaves=160) == 16  # as long as that is no more than a share
    pacing.overtaken("0", 10, 0.005)  # whatever it said
    assert pacing.block_leaves("0", 20, step_leaves=1280) == 8
    for _ in range(PacingConfig().window):
        pacing.observe("1", 10, 0.005)
    assert pacing.block_leaves("1", 20, step_leaves=1280) == 8  # it is slow by now


def test_who_is_alone_has_seconds_of_work_at_once() -> None:
    pacing = paced(a=0.25)
    assert pacing.block_leaves("a", 16) == 16  # a result is as large as the model, whatever it is of
    assert pacing.block_leaves("a", 32) == 16  # half of it, which others may come for
    assert pacing.block_leaves("a", 64) == 32
    assert among(pacing, "b").block_leaves("a", 16) == 4


def test_a_step_that_is_short_is_one_lease() -> None:
    pacing = Pacing(PacingConfig(target_lease_s=0.004, whole_step_s=0.01))
    for worker in "abcd":
        pacing.takes_work(worker)
        pacing.observe(worker, 1, 0.001)
    assert pacing.takes_whole("a", 9)
    assert pacing.block_leaves("a", 9, step_leaves=9) == 16  # which holds all
    assert pacing.block_leaves("a", 3, step_leaves=9) == 4  # and of the rest all
    assert not pacing.takes_whole("a", 10)
    assert pacing.block_leaves("a", 16, step_leaves=16) == 4
    pacing.observe("a", 1, 0.1)
    assert not pacing.takes_whole("a", 9)  # it is slower now


def test_a_step_is_shared_out_sooner_with_those_whose_memory_is_shared() -> None:
    pacing = Pacing(PacingConfig(whole_step_s=0.01))
    for worker in "ab":
        pacing.takes_work(worker)
        pacing.observe(worker, 1, 0.001)
    pacing.near("a")
    assert [pacing.whole_step_s("a", leaves) for leaves in (1, 2)] == [0.02, 0.005]  # one leaf cannot be shared
    assert pacing.takes_whole("a", 4)
    assert not pacing.takes_whole("a", 5)
    assert pacing.takes_whole("b", 9)
    pacing.takes_work("b", False)
    assert pacing.takes_whole("a", 19)  # there is nobody to share with
    assert not pacing.takes_whole("a", 20)
    pacing.takes_work("b")
    pacing.left("a")
    assert pacing.takes_whole("a", 9)  # it may come back by another way


seconds = st.floats(1e-9, 1e6)


@given(st.lists(st.none() | seconds, min_size=1, max_size=8), st.integers(1, 10_000))
def test_every_worker_gets_a_power_of_two(speeds: list[float | None], free: int) -> None:
    pacing = Pacing(PacingConfig())
    workers = [str(number) for number in range(len(speeds))]
    for worker, leaf_s in zip(workers, speeds, strict=True):
        pacing.takes_work(worker)
        if leaf_s is not None:
            pacing.observe(worker, 1, leaf_s)
    for worker in workers:
        leaves = pacing.block_leaves(worker, free)
        assert 1 <= leaves <= max(free, 1)
        assert leaves & (leaves - 1) == 0
        assert 5.0 <= pacing.deadline_s(worker, leaves) <= 3600.0


def test_measurements_are_smoothed_and_per_leaf() -> None:
    pacing = paced(a=1.0)
    pacing.observe("a", 4, 8.0)
    assert pacing.leaf_s("a") == pytest.approx(0.7 * 1.0 + 0.3 * 2.0)
    pacing.observe("b", 10, 0.0)
    assert pacing.leaf_s("b") == pytest.approx(1e-10)


def test_deadlines_are_clamped() -> None:
    pacing = paced(a=1.0)
    assert pacing.deadline_s("a", 4) == 4 * 2 * 8  # leaves x leases ahead x factor
    assert pacing.deadline_s("a", 1) == 16.0
    assert paced(a=0.01).deadline_s("a", 1) == 5.0
    assert pacing.deadline_s("a", 10_000) == 3600.0
    assert Pacing(PacingConfig()).deadline_s("unknown", 1) == 600.0


def test_who_has_finished_no_lease_is_taken_for_as_slow_as_the_slowest() -> None:
    pacing = paced(a=1.0, b=4.0)
    assert pacing.deadline_s("new", 1) == 4.0 * 2 * 8
    assert pacing.deadline_s("new", 100) == 600.0
    assert paced(a=1e-3).deadline_s("new", 1) == 5.0
    pacing.left("b")
    assert pacing.deadline_s("new", 1) == 1.0 * 2 * 8


def test_a_first_deadline_gets_shorter_when_others_are_known() -> None:
    pacing = Pacing(PacingConfig())
    given = pacing.deadline_s("new", 1)
    assert pacing.allowed_s("new", 1, given) == given == 600.0
    pacing.observe("a", 1, 1.0)
    assert pacing.allowed_s("new", 1, given) == 16.0
    assert pacing.allowed_s("new", 1, 7.0) == 7.0
    assert pacing.allowed_s("a", 1, 7.0) == 7.0  # of this one something was known when it was given


def test_a_first_deadline_gets_shorter_when_its_worker_has_finished_another_lease() -> None:
    """It was given several at once: a worker that hangs in the second held up the end of a run for ten minutes."""
    pacing = Pacing(PacingConfig())
    given = pacing.deadline_s("new", 1)
    pacing.observe("new", 1, 1.0)
    assert pacing.allowed_s("new", 1, given) == pacing.deadline_s("new", 1) == 16.0


def test_who_overruns_first_leases_gets_longer_each_time() -> None:
    """A worker a hundred times slower than the others gets there, though it comes anew after every lease."""
    pacing = paced(a=1.0)
    for expected in (16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 600.0, 600.0):
        assert pacing.deadline_s("slow", 1) == expected
        pacing.overran("slow")
        pacing.left("slow")
    assert pacing.deadline_s("other", 1) == 16.0
    pacing.observe("slow", 1, 100.0)
    pacing.left("slow")
    assert pacing.deadline_s("slow", 1) == 100.0 * 2 * 8  # it may come back
    assert pacing.deadline_s("other", 1) == 16.0  # nobody is compared with one that is gone


def test_deadlines_follow_the_95th_percentile_of_the_last_leases() -> None:
    pacing = Pacing(PacingConfig(window=20, min_deadline_s=1e-3))
    for _ in range(30):
        pacing.observe("a", 2, 2.0, taken_s=4.0)  # 1 s a leaf computed, 2 s until the results are here
    assert pacing.deadline_s("a", 1) == (1.0 + 2.0) * 2 * 8  # what is not computing is by the lease
    assert pacing.deadline_s("a", 100) == (100.0 + 2.0) * 2 * 8
    pacing.observe("a", 1, 1.0, taken_s=9.0)  # one in twenty is an outlier
    assert pacing.deadline_s("a", 1) == 9.0 * 2 * 8
    for _ in range(20):
        pacing.observe("a", 1, 1.0, taken_s=3.0)  # the window has moved on
    assert pacing.deadline_s("a", 1) == 3.0 * 2 * 8


def test_a_backup_is_due_sooner_than_the_deadline() -> None:
    pacing = paced(a=1.0, b=4.0)
    assert pacing.late_s("a", 2) == 1.0 * 2 * 1.5
    assert pacing.late_s("new", 2) == 4.0 * 2 * 1.5
    assert paced().late_s("new", 2) is None
    assert paced(a=1e-6).late_s("a", 1) == 0.2


def test_who_comes_back_is_known() -> None:
    pacing = paced(a=1.0, b=1.0)
    pacing.observe("a", 1, 1.0, taken_s=41.0, result_s=40.0)
    assert pacing.one_lease("a")
    before = pacing.cost("a"), pacing.deadline_s("a", 2), pacing.block_leaves("a", 64)
    pacing.takes_work("a", False)
    pacing.left("a")
    pacing.left("never seen")
    assert pacing.late_s("new", 1) == 1.5  # as b: nobody is compared with one that is gone
    pacing.takes_work("a")
    assert (pacing.cost("a"), pacing.deadline_s("a", 2), pacing.block_leaves("a", 64)) == before


def test_those_that_left_are_not_remembered_without_end() -> None:
    pacing = paced()
    for number in range(5000):
        pacing.takes_work(f"w{number}")
        pacing.observe(f"w{number}", 1, 1.0, taken_s=3.0, result_s=2.0)
        pacing.takes_work(f"w{number}", False)
        pacing.left(f"w{number}")
    assert pacing.leaf_s("w0") is None
    assert pacing.leaf_s("w4999") == 1.0
    sizes = {name: len(getattr(pacing, name)) for name in pacing.__slots__ if hasattr(getattr(pacing, name), "__len__")}
    assert max(sizes.values()) <= 4096, sizes


def test_a_line_that_was_left_out_is_tried_again() -> None:
    pacing = paced(a=1.0)
    pacing.observe("a", 1, 1.0, result_s=100.0)
    for _ in range(100):
        pacing.left_out("a")
    assert pacing.cost("a") == (1.0, 1.0)
    pacing.takes_work("b")
    pacing.observe("b", 1, 1.0)
    assert pacing.late_s("a", 1) == 1.5  # nobody waits for it longer than for another


def test_a_lease_computes_for_longer_than_its_result_is_on_its_way() -> None:
    pacing = paced(a=1.0, b=1.0)
    pacing.observe("a", 1, 1.0, result_s=0.9)
    assert not pacing.one_lease("a")
    assert [pacing.block_leaves("a", free) for free in (64, 16, 8, 4, 2)] == [16, 4, 2, 2, 1]
    assert [pacing.block_leaves("b", free) for free in (64, 16, 8, 4, 2)] == [16, 4, 2, 2, 1]  # as the others' lines


def test_a_line_that_collapses_is_believed_at_once_and_recovers_by_and_by() -> None:
    pacing = paced(a=1.0)
    for result_s in (1.0, 40.0, 1.0):
        pacing.observe("a", 1, 1.0, result_s=result_s)
        assert pacing.cost("a").lease_s == pytest.approx({1.0: 1.0, 40.0: 40.0}[result_s]) or result_s == 1.0
    assert 20.0 < pacing.cost("a").lease_s < 40.0


def test_smaller_blocks_over_a_slow_line_are_not_late_sooner() -> None:
    """Blocks of eight leaves are computed in a second and sent in twenty: one leaf takes hardly less."""
    pacing = paced()
    pacing.takes_work("a")
    for _ in range(8):
        pacing.observe("a", 8, 1.0, taken_s=21.0, result_s=20.0)
    late_s = pacing.late_s("a", 1)
    assert late_s is not None
    assert late_s > 20.0


@pytest.mark.parametrize("wrong", [{"leases_ahead": 0}, {"min_deadline_s": 0.0}, {"max_deadline_s": 1.0}])
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"leases_ahead|min_deadline_s"):
        PacingConfig(**wrong)  # type: ignore[arg-type]


def test_a_slow_worker_leaves_the_end_of_a_step_to_the_fast_ones() -> None:
    """Speeds 1:4:10, 96 leaves: 6.4 s when shared fairly. Each takes what it can finish in time, to the end."""
    pacing = Pacing(PacingConfig())
    seconds = {"slow": 1.0, "middle": 0.25, "fast": 0.1}
    for worker, leaf_s in seconds.items():
        pacing.takes_work(worker)
        pacing.observe(worker, 1, leaf_s)
    assert pacing.unequal
    free, now, taken = 96, 0.0, dict.fromkeys(seconds, 0)
    busy_until = dict.fromkeys(seconds, 0.0)
    while free:
        ready = [worker for worker in seconds if busy_until[worker] <= now]
        for worker in ready:
            held = {other: round(max(busy_until[other] - now, 0.0) / seconds[other]) for other in seconds}
            others = sum(held.values()) - held[worker]
            leaves = min(1, free, pacing.in_time(worker, held[worker], others, free, 96, now))
            busy_until[worker] = now + leaves * seconds[worker]
            free, taken[worker] = free - leaves, taken[worker] + leaves
        now = min((at for at in busy_until.values() if at > now), default=now + 0.05)
    assert max(busy_until.values()) <= 6.4 + 0.15
    assert taken["slow"] == 6


def test_nobody_holds_back_among_equals_or_when_the_fast_ones_hang() -> None:
    equals = paced(a=1.0, b=1.2)
    assert not equals.unequal
    assert equals.in_time("b", 1, 1, 1, 10, 0.0) == 1
    unequal = among(paced(slow=1.0, fast=0.1), "new")
    assert unequal.in_time("slow", 0, 1, 1, 11, 1.0) == 0
    assert unequal.in_time("slow", 0, 1, 1, 11, 2.1) == 1  # the step takes twice what it should
    assert unequal.in_time("new", 0, 1, 1, 11, 0.0) == 1


def test_who_takes_no_work_counts_for_nothing() -> None:
    pacing = paced(a=1.0, b=1.0, hung=0.01)
    assert pacing.block_leaves("a", 64) == 1
    assert pacing.unequal
    pacing.takes_work("hung", False)
    assert (pacing.block_leaves("a", 64), pacing.unequal, pacing.fastest_leaf_s) == (16, False, 1.0)
    pacing.observe("hung", 1, 0.01)  # what comes of it later is kept for when it is back
    assert not pacing.unequal
    pacing.takes_work("hung")
    assert pacing.unequal


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.none() | seconds, st.booleans()), max_size=200))
def test_what_is_kept_is_what_counting_anew_would_give(changes: list[tuple[str, float | None, bool]]) -> None:
    kept, last = Pacing(PacingConfig()), Pacing(PacingConfig())
    takes: dict[str, bool] = {}
    for worker, leaf_s, does in changes:
        kept.takes_work(worker, does)
        takes[worker] = does
        if leaf_s is None:
            kept.takes_work(worker, False)
            takes[worker] = False
            kept.left(worker)
            last.left(worker)
        else:
            kept.observe(worker, 1, leaf_s)
            last.observe(worker, 1, leaf_s)  # nobody takes work there: nothing is counted yet
    for worker, does in takes.items():
        last.takes_work(worker, does)
    assert (kept.unequal, kept.fastest_leaf_s) == (last.unequal, last.fastest_leaf_s)
    for worker in "abcd":
        assert kept.late_s(worker, 3) == last.late_s(worker, 3)
        found, anew = kept.block_leaves(worker, 1 << 20), last.block_leaves(worker, 1 << 20)
        assert found / anew in (0.5, 1.0, 2.0)  # a sum in another order may fall on the other side of a power of two


def test_a_late_lease_lengthens_the_deadline_to_twice_what_it_was() -> None:
    pacing = paced(a=0.1)
    for expected in (10.0, 20.0, 40.0):
        pacing.observe_late("a", 1, 86_400.0, 86_400.0)
        assert pacing.deadline_s("a", 1) == pytest.approx(expected)


def test_who_was_overtaken_gets_no_larger_blocks_by_what_it_says() -> None:
    """A worker that needs 1 s a leaf and says that it needs a microsecond."""
    pacing = paced(a=0.1, b=0.1, liar=1e-6)
    assert pacing.block_leaves("liar", 1024) >= 256
    pacing.overtaken("liar", 64, 64.0)
    honest = paced(a=0.1, b=0.1, liar=1.0)
    assert pacing.block_leaves("liar", 1024) == honest.block_leaves("liar", 1024)
    for _ in range(100):
        pacing.observe("liar", 2, 1e-6, taken_s=2.0)
        assert pacing.block_leaves("liar", 1024) == honest.block_leaves("liar", 1024)


def test_who_was_overtaken_once_is_believed_again_when_it_was_seen_to_be_fast() -> None:
    pacing = paced(a=0.1, b=0.1)
    pacing.overtaken("b", 1, 86_400.0)  # its machine slept
    assert pacing.block_leaves("b", 1024) == 1
    pacing.observe("b", 1, 0.1, taken_s=0.1)
    assert pacing.block_leaves("b", 1024) == pacing.block_leaves("a", 1024)


def test_a_slow_lease_is_late_by_what_others_take() -> None:
    pacing = paced(a=0.1, b=0.2)
    for _ in range(64):
        pacing.observe("slow", 1, 0.1, taken_s=3600.0)
    config = pacing.config
    others_s = 0.2 * 4
    assert pacing.late_s("slow", 4) == pytest.approx(others_s * config.deadline_factor * config.backup_factor)
    assert pacing.late_s("b", 4) == pytest.approx(0.2 * 4 * config.backup_factor)
    alone = paced(only=7.0)
    assert alone.late_s("only", 1) == pytest.approx(7.0 * config.backup_factor)


def test_the_slowest_of_many_others_does_not_count() -> None:
    pacing = paced(**{f"w{number}": 1.0 + number / 100 for number in range(100)})
    pacing.observe("liar", 1, 1e-6, taken_s=1e5)
    assert pacing.late_s("liar", 1) == pytest.approx(1.95 * pacing.config.deadline_factor * pacing.config.backup_factor)
