"""How much, for whom, until when.

Blocks are sized as in guided self-scheduling (Polychronopoulos & Kuck 1987), weighted by measured speed: a worker
gets half of its fair share of what is left, so blocks shrink towards the step's end and all finish together. Two floors
keep a lease from costing more than its work: ``target_lease_s``, and four times what its result takes on its way, while
every worker can still have a block of that size, and ``min_lease_s`` as long as it is no more than a fair share of the
whole step, by the quickest of the worker's last leases: a leaf that waits for a processor takes longer, but a lease
costs no less. A step that takes a worker no longer than ``whole_step_s`` is one lease: to share it would cost more.
With those that are ``near`` it costs half of that; where nobody is to share it, for want of workers or leaves, one that
takes twice as long is one lease.

A result is as large as the model, however small its block. Where it takes longer on its way than a leaf to compute, its
worker has one lease a step, sized by both (``plan.sharing``).

Deadlines are learned: a multiple of the 95th percentile of what the worker's last leases took, from when it could begin
to when their results had come: computing by the leaf, the rest by the lease. One of which nothing is known is taken
for as slow as the slowest of the others, as soon as one of those is known, and for twice as slow after each lease in a
row that it has overrun. A lease that is late by less than that is given to a second worker as well, when one has
nothing else to do (backup tasks: Dean & Ghemawat 2004, section 3.6).

Whoever takes work is known here by name, and what is asked of all of them (how fast together, who is fastest, slowest,
in the middle) is kept as measurements come in: no question costs more for more workers.
Pure: speeds come in as measurements, time is an argument.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field, replace

from w5xde_async.config import TIME, TIME_OR_0, Config, number, one_of, setting, whole
from w5xde_async.errors import need
from w5xde_async.plan.membership import Departed
from w5xde_async.plan.sharing import Cost

_ROUNDING = 1e-6  # of sums of speeds
_ALIKE = 1.5  # speeds that differ by less count as equal
_MOST_KNOWN = 4096  # workers that are remembered, those that have left among them
_NEGLIGIBLE_S = 0.005  # no line is slow on which a result takes less
_COMPUTES = 4.0  # times as long as its result is on its way: a lease, as long as that is no more than a share
_ALONE_S = 5.0  # of work that who computes alone has at once: nobody else is to have some of it
_COLLAPSED = 2.0  # times slower
_NEAR = 0.5  # what a lease costs such a worker, beside one over a line
_LONE = 2.0  # times as long is a step that nobody is to share, and still one lease
_FADES = 0.95  # what is believed of a line's slowness after each step in which it was not used


@dataclass(frozen=True, kw_only=True)
class PacingConfig(Config):
    """Knobs of the pace.

    ``target_lease_s`` and ``min_lease_s``: work that a lease should hold, see above. ``whole_step_s``: what takes less
    is not shared out, so that workers take turns; 0: every step is. ``short_steps`` is about these steps, and about
    leaves that take less; ``here`` does not befit a guest in somebody's loop, which then has such a one in each of its
    turns. ``min_deadline_s`` and
    ``max_deadline_s`` clamp ``deadline_factor`` x the 95th percentile of the last ``window`` leases;
    ``first_deadline_s`` serves while nothing is known of any worker (a first step may compile kernels), and is the
    longest for one of which nothing is known.
    ``backup_factor``: a lease that takes longer than this many times that percentile, and at least ``min_backup_s``,
    may be backed up.
    """

    target_lease_s: float = setting(0.03, "", TIME_OR_0)
    min_lease_s: float = setting(0.005, "", TIME_OR_0)
    whole_step_s: float = setting(0.004, "", TIME_OR_0)
    short_steps: str = setting(
        "workers", "who computes steps, or leaves, that take less time than their way to a worker: here, the "
        "coordinator in place of a worker on its machine, or workers", one_of("here", "workers", metavar="WHO"),
        "workers", shown="here",
    )  # fmt: skip
    leases_ahead: int = setting(
        2, "leases that a worker has at once, the one it computes included; more where they come late over a slow line",
        whole(1, 256), "workers",
    )  # fmt: skip
    smoothing: float = 0.3
    deadline_factor: float = 8.0
    min_deadline_s: float = setting(5.0, "", TIME)
    max_deadline_s: float = setting(3600.0, "", TIME)
    first_deadline_s: float = setting(600.0, "", TIME)
    window: int = setting(64, "", whole(1))
    backup_factor: float = setting(1.5, "", number(">= 1", lambda x: x >= 1))
    min_backup_s: float = setting(0.2, "", TIME_OR_0)

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.min_deadline_s <= self.max_deadline_s, "min_deadline_s is longer than max_deadline_s")


class _Window:
    """The last values, and their 95th percentile."""

    __slots__ = ("_in_order", "_values")

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._in_order: list[float] = []

    def add(self, value: float) -> None:
        if len(self._values) == self._values.maxlen:
            del self._in_order[bisect_left(self._in_order, self._values[0])]
        self._values.append(value)
        insort(self._in_order, value)

    @property
    def least(self) -> float:
        return self._in_order[0]

    @property
    def p95(self) -> float:
        return self._in_order[(len(self._in_order) * 19) // 20]


class _Taken:
    """What a worker's last leases took: computing by the leaf; data, results and waiting by the lease."""

    __slots__ = ("_leaf_s", "_rest_s")

    def __init__(self, window: int) -> None:
        self._leaf_s, self._rest_s = _Window(window), _Window(window)

    def add(self, leaves: int, computed_s: float, taken_s: float) -> None:
        self._leaf_s.add(computed_s / leaves)
        self._rest_s.add(max(taken_s - computed_s, 0.0))

    @property
    def least_leaf_s(self) -> float:
        return self._leaf_s.least

    @property
    def longest(self) -> Cost:
        return Cost(self._leaf_s.p95, self._rest_s.p95)


class _InOrder(list[float]):
    """Numbers, ascending. (A list's ``insort`` moves memory: 32 KB at most for 4096 workers, a microsecond.)"""

    def put(self, number: float) -> None:
        insort(self, number)

    def take(self, number: float) -> None:
        del self[bisect_left(self, number)]


@dataclass(slots=True)
class Pacing:
    """Measured speeds and what follows from them."""

    config: PacingConfig
    _leaf_s: dict[str, float] = field(default_factory=dict)
    _result_s: dict[str, float] = field(default_factory=dict)  # worker -> seconds that a result is on its way
    _taken: dict[str, _Taken] = field(default_factory=dict)
    _floor: dict[str, float] = field(default_factory=dict)  # worker -> seconds a leaf that it takes at least, as seen
    _overrun: dict[str, int] = field(default_factory=dict)  # worker -> leases in a row whose deadline passed
    _workers: dict[str, float | None] = field(default_factory=dict)  # that take work -> seconds a leaf that count
    _speeds: _InOrder = field(default_factory=_InOrder)  # these in order
    _gone: Departed = field(default_factory=lambda: Departed(_MOST_KNOWN))
    _longest: dict[str, Cost] = field(default_factory=dict)  # of the others -> 95th percentile of what leases took
    _longest_leaf_s: _InOrder = field(default_factory=_InOrder)  # these in order
    _longest_rest_s: _InOrder = field(default_factory=_InOrder)
    _slow: set[str] = field(default_factory=set)  # of those that take work, whose results take longer than leaves
    _results: dict[str, float] = field(default_factory=dict)  # of these -> seconds that a result is on its way
    _results_s: _InOrder = field(default_factory=_InOrder)  # these in order
    _least: dict[str, int] = field(default_factory=dict)  # of islands -> leaves that a lease should have
    _most_s: dict[str, float] = field(default_factory=dict)  # worker -> seconds that a lease of its may take
    shares_short: bool = True  #: whether steps that one could take are shared out with those that are ``near``
    _near: set[str] = field(default_factory=set)
    _leaves_per_s: float = 0.0  # all of those together
    _changes: int = 0  # since that was added up anew

    def lead(self, leases: int) -> None:
        """Workers hold at least ``leases`` leases from now on, the one that they compute included."""
        self.config = replace(self.config, leases_ahead=max(leases, self.config.leases_ahead))

    def takes_work(self, worker: str, does: bool = True) -> None:
        """``worker`` is one of those that share the work from now on, or is not."""
        if does:
            self._gone.returned(worker)
            self._workers.setdefault(worker, None)
            self._count(worker)
        elif worker in self._workers:
            self._uncount(worker)
            del self._workers[worker]
            self._slow.discard(worker)

    def _uncount(self, worker: str) -> None:
        leaf_s, self._workers[worker] = self._workers[worker], None
        if leaf_s is not None:
            self._speeds.take(leaf_s)
            self._leaves_per_s -= 1 / leaf_s
        self._changes += 1
        if self._changes > len(self._workers):  # what is added and taken away again leaves something behind
            self._leaves_per_s, self._changes = math.fsum(1 / leaf_s for leaf_s in self._speeds), 0

    def _count(self, worker: str) -> None:
        """Its measurements are new, or gone, or it takes work from now on."""
        self._compare(worker)
        if worker in self._workers:
            self._uncount(worker)
            leaf_s = self._leaf_s.get(worker)
            if leaf_s is not None:
                leaf_s = self._workers[worker] = max(leaf_s, self._floor.get(worker, 0.0))
                self._speeds.put(leaf_s)
                self._leaves_per_s += 1 / leaf_s
                (self._slow.add if self.one_lease(worker) else self._slow.discard)(worker)

    def _compare(self, worker: str) -> None:
        """Others are compared with what is known of it now, unless it has left."""
        longest, result_s = self._longest.pop(worker, None), self._results.pop(worker, None)
        if longest is not None:
            self._longest_leaf_s.take(longest.leaf_s)
            self._longest_rest_s.take(longest.lease_s)
        if result_s is not None:
            self._results_s.take(result_s)
        if worker in self._gone:
            return
        taken, result_s = self._taken.get(worker), self._result_s.get(worker)
        if taken is not None:
            longest = self._longest[worker] = taken.longest
            self._longest_leaf_s.put(longest.leaf_s)
            self._longest_rest_s.put(longest.lease_s)
        if result_s is not None:
            self._results[worker] = result_s
            self._results_s.put(result_s)

    def observe(
        self, worker: str, leaves: int, seconds: float, *, taken_s: float | None = None, result_s: float | None = None
    ) -> None:
        """``worker`` computed ``leaves`` leaves in ``seconds`` (finite).

        ``taken_s``: from when it could begin until the results had come, data and results on their way included.
        ``result_s``: that the results alone were on their way, where that is known.
        """
        self._gone.returned(worker)
        taken = self._taken.get(worker)
        if taken is None:
            taken = self._taken[worker] = _Taken(self.config.window)
        taken.add(leaves, seconds, taken_s or 0.0)
        self._overrun.pop(worker, None)
        if result_s is not None:
            known = self._result_s.get(worker)
            collapsed = known is not None and result_s > _COLLAPSED * known  # that is believed at once
            self._result_s[worker] = result_s if collapsed else self._smoothed(known, result_s)
        floor = self._floor.get(worker)
        if floor is not None:  # it takes no longer than until its results have come
            beside_s = self._result_s.get(worker, 0.0)
            self._floor[worker] = min(floor, max(seconds, (taken_s or 0.0) - beside_s, 1e-9) / leaves)
        self._leaf_s[worker] = self._smoothed(self._leaf_s.get(worker), max(seconds, 1e-9) / leaves)
        self._count(worker)

    def _smoothed(self, known: float | None, measured: float) -> float:
        a = self.config.smoothing
        return measured if known is None else (1 - a) * known + a * measured

    def overtaken(self, worker: str, leaves: int, elapsed_s: float) -> None:
        """Another worker finished a lease of ``leaves`` leaves that this one had had for ``elapsed_s``.

        Whatever it says of its speed, it gets no larger blocks than that until it has been seen to be faster. How much
        of a step's end it may take is judged by its own word, or it could never show it.
        """
        elapsed_s -= self._result_s.get(worker, 0.0)
        if elapsed_s <= 0:
            return
        self._floor[worker] = max(self._floor.get(worker, 0.0), elapsed_s / leaves)
        self._count(worker)

    def observe_late(
        self, worker: str, leaves: int, seconds: float, taken_s: float, *, result_s: float | None = None
    ) -> None:
        """A lease whose time was over was done after all, ``taken_s`` after it was given.

        It may have been stopped for a day: one such lease lengthens the deadline to twice what it was, no further.
        """
        config = self.config
        most_s = 2 * self.deadline_s(worker, leaves) / (config.deadline_factor * config.leases_ahead)
        self.observe(worker, leaves, min(seconds, most_s), taken_s=min(taken_s, most_s), result_s=result_s)

    def left(self, worker: str) -> None:
        """The worker is gone: nobody is compared with it. What is known of it is kept, since it may come back."""
        forgotten = self._gone.left(worker)
        self._least.pop(worker, None)  # an island never comes back
        self._most_s.pop(worker, None)
        self._near.discard(worker)
        self._compare(worker)
        if forgotten is not None:
            for known in (self._leaf_s, self._result_s, self._floor, self._taken):
                known.pop(forgotten, None)

    def left_out(self, worker: str) -> None:
        """A step went on without this worker, for its line. That is believed less now, so that it is tried again: as
        one of which nothing is known, so that nobody waits long for it."""
        if (result_s := self._result_s.get(worker)) is not None:
            self._result_s[worker] = max(result_s * _FADES, self._leaf_s.get(worker, 0.0))
            self._taken.pop(worker, None)
            self._compare(worker)

    def overran(self, worker: str) -> None:
        """A lease of this worker was taken from it because its deadline had passed.

        The next may take twice as long: a worker that is slow and not hung gets there, however often it comes anew.
        """
        self._overrun[worker] = self._overrun.pop(worker, 0) + 1
        if len(self._overrun) > _MOST_KNOWN:
            del self._overrun[next(iter(self._overrun))]

    def leaf_s(self, worker: str) -> float | None:
        """Smoothed seconds per leaf, None before the first measurement."""
        return self._leaf_s.get(worker)

    @property
    def num_known(self) -> int:
        """Those that take work and have finished a lease before."""
        return len(self._speeds)

    @property
    def fastest_leaf_s(self) -> float | None:
        """Smoothed seconds per leaf of the fastest of those that take work, None where nobody's are known."""
        return self._speeds[0] if self._speeds else None

    def at_least(self, worker: str, leaves: int) -> None:
        """A lease of this worker should have ``leaves`` leaves: with less, some of its ranks have nothing to do."""
        self._least[worker] = 1 << (leaves - 1).bit_length()

    def at_most(self, worker: str, seconds: float) -> None:
        """No lease of this worker is to have work for more than ``seconds``, or else one leaf. math.inf: as all."""
        if math.isinf(seconds):
            self._most_s.pop(worker, None)
        else:
            self._most_s[worker] = seconds

    def least_leaves(self, worker: str) -> int:
        """What ``at_least`` said (a power of two), else 1."""
        return self._least.get(worker, 1)

    def block_leaves(self, worker: str, free_leaves: int, *, step_leaves: int = 0) -> int:
        """Most leaves (a power of two) of the next block for ``worker``.

        ``free_leaves`` are left for those that take work, of the step's ``step_leaves``.
        """
        leaf_s = self._expected_leaf_s(worker)
        if leaf_s is None:
            return 1  # nothing is known: find out with one leaf
        if self.takes_whole(worker, step_leaves):
            return 1 << max(free_leaves - 1, 0).bit_length()
        fair = self._fair_part(leaf_s)
        share = free_leaves * fair
        wanted = max(
            share / 2,
            min(share, max(self.config.target_lease_s, _COMPUTES * self._expected_result_s(worker)) / leaf_s),
            min(step_leaves * fair, self.config.min_lease_s / self._least_leaf_s(worker, leaf_s)),
            min(share, _ALONE_S / leaf_s) if len(self._workers) == 1 else 0,
        )
        wanted = min(wanted, self._most_s.get(worker, math.inf) / leaf_s)
        return 1 << max(int(wanted), 1).bit_length() - 1

    def near(self, worker: str) -> None:
        """Parameters and results are its own as soon as they are told of, until it has ``left``: it shares the
        coordinator's memory, or its machine and they are small."""
        self._near.add(worker)

    def whole_step_s(self, worker: str, step_leaves: int) -> float:
        """A step of so many leaves that takes ``worker`` less than this is one lease."""
        if len(self._workers) == 1 or step_leaves == 1:
            return self.config.whole_step_s * _LONE
        return self.config.whole_step_s * (_NEAR if self.shares_short and worker in self._near else 1.0)

    def takes_whole(self, worker: str, step_leaves: int) -> bool:
        """Whether a step of so many leaves is so short for ``worker`` that it is not shared out."""
        leaf_s = self._expected_leaf_s(worker)
        return leaf_s is not None and 0 < step_leaves * leaf_s < self.whole_step_s(worker, step_leaves)

    def fair_leaves(self, worker: str, step_leaves: int) -> int:
        """Leaves of a step that are ``worker``'s share of it, rounded up."""
        leaf_s = self._expected_leaf_s(worker)
        part = 1 / max(len(self._workers), 1) if leaf_s is None else self._fair_part(leaf_s)
        return math.ceil(step_leaves * part - _ROUNDING)

    @property
    def slow_lines(self) -> bool:
        """Whether some of those that take work have one lease a step."""
        return bool(self._slow)

    def one_lease(self, worker: str) -> bool:
        """Whether a result of this worker takes longer on its way than a leaf to compute, and than what a lease should
        hold, as far as is known."""
        leaf_s = self._leaf_s.get(worker)
        if leaf_s is None:
            leaf_s = self._expected_leaf_s(worker)
        least_s = max(self.config.target_lease_s, _NEGLIGIBLE_S)
        return leaf_s is not None and self._expected_result_s(worker) >= max(leaf_s, least_s)

    def cost(self, worker: str) -> Cost:
        """What work costs a worker, as far as is known of it, and else of the others."""
        return Cost(self._expected_leaf_s(worker) or 1e-9, self._expected_result_s(worker))

    def _expected_result_s(self, worker: str) -> float:
        known = self._result_s.get(worker)
        if known is not None:
            return known
        return self._results_s[len(self._results_s) // 2] if self._results_s else 0.0

    def _expected_leaf_s(self, worker: str) -> float | None:
        """What a leaf takes ``worker``, or, where that is not known, one in the middle; None where nobody is known."""
        leaf_s = self._leaf_s.get(worker)
        if leaf_s is not None:
            return max(leaf_s, self._floor.get(worker, 0.0))
        return self._speeds[len(self._speeds) // 2] if self._speeds else None

    def _least_leaf_s(self, worker: str, leaf_s: float) -> float:
        """What a leaf takes ``worker`` at best, of late; ``leaf_s``, what it takes mostly, where that is not known."""
        taken = self._taken.get(worker)
        return leaf_s if taken is None else min(leaf_s, max(taken.least_leaf_s, self._floor.get(worker, 1e-9)))

    def _fair_part(self, leaf_s: float) -> float:
        """Of the work that all do, the part of one that takes so long for a leaf."""
        speed = 1 / leaf_s
        unknown = len(self._workers) - len(self._speeds)  # those are taken to be as fast as this one
        return speed / max(self._leaves_per_s + unknown * speed, speed)

    @property
    def unequal(self) -> bool:
        """Whether some of those that take work are much faster than others."""
        return len(self._speeds) > 1 and self._speeds[-1] > _ALIKE * self._speeds[0]

    def in_time(
        self, worker: str, held: int, held_by_others: int, free_leaves: int, step_leaves: int, elapsed_s: float
    ) -> int:
        """Most leaves that ``worker`` can still take of a step without being the last to finish it.

        ``held``: leaves of the step that it has already. A much slower worker leaves the end of a step to those who
        have it done sooner (earliest finish time, as in list scheduling: Graham 1969), unless they take twice as long
        as they should.
        """
        own, counted = self._leaf_s.get(worker), self._workers.get(worker)
        if own is None or counted is None or own <= _ALIKE * self._speeds[0]:
            return free_leaves
        total, fastest = self._leaves_per_s, 1 / self._speeds[0]
        if elapsed_s > 2 * step_leaves / total:
            return free_leaves
        rest_s = (free_leaves + held_by_others) / (total - 1 / counted) + 1 / fastest
        return max(0, int(rest_s / own) - held)

    def deadline_s(self, worker: str, leaves: int) -> float:
        """How long a lease of ``leaves`` leaves may take, the leases before it included."""
        config, taken = self.config, self._taken.get(worker)
        if taken is not None:
            taken_s = taken.longest.of(leaves) * config.leases_ahead
            return min(max(taken_s * config.deadline_factor, config.min_deadline_s), config.max_deadline_s)
        if not self._longest:
            return config.first_deadline_s
        allowed_s = max(self._slowest_s(leaves) * config.leases_ahead * config.deadline_factor, config.min_deadline_s)
        return min(allowed_s * 2.0 ** min(self._overrun.get(worker, 0), 32), config.first_deadline_s)

    def allowed_s(self, worker: str, leaves: int, given_s: float) -> float:
        """How long a lease that was given ``given_s`` may take by what is known now: less, where that was given when
        nothing was known of its worker, and it has finished one meanwhile, or others have."""
        known = worker in self._taken and given_s != self.config.first_deadline_s
        return given_s if known else min(given_s, self.deadline_s(worker, leaves))

    def late_s(self, worker: str, leaves: int) -> float | None:
        """After how long a lease of ``leaves`` leaves is worth a backup; None where no worker's speed is known.

        However slow its worker has been, or has made itself look, the step waits for it ``deadline_factor`` times
        as long as the others take, no longer.
        """
        taken, others = self._taken.get(worker), self._others_longest(worker)
        if taken is not None:
            lease_s = taken.longest.of(leaves)
            if others is not None:
                lease_s = min(lease_s, self.config.deadline_factor * others.of(leaves))
        elif self._longest:
            lease_s = self._slowest_s(leaves)
        else:
            return None
        return max(lease_s * self.config.backup_factor, self.config.min_backup_s)

    def _slowest_s(self, leaves: int) -> float:
        """What a lease takes the slowest of those that are known."""
        return Cost(self._longest_leaf_s[-1], self._longest_rest_s[-1]).of(leaves)

    def _others_longest(self, worker: str) -> Cost | None:
        """The 95th percentiles over the others of what their leases take; None where nobody else is known."""
        own = self._longest.get(worker)
        count = len(self._longest) - (own is not None)
        if not count:
            return None
        at = (count * 19) // 20
        leaf_s, rest_s = self._longest_leaf_s, self._longest_rest_s
        if own is None:
            return Cost(leaf_s[at], rest_s[at])
        return Cost(
            leaf_s[at + (at >= bisect_left(leaf_s, own.leaf_s))], rest_s[at + (at >= bisect_left(rest_s, own.lease_s))]
        )
