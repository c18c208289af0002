"""The owner of the parameters under a rule that takes contributions as they come.

What ``aggregator`` is to the synchronous tree: results are decoded, offered to the rule, committed and encoded for the
workers, all in the owner's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass

from w5xde_async.coordinator.parameters.delta_publisher import DeltaPublisher, Piece
from w5xde_async.coordinator.parameters.owner import ParameterOwner
from w5xde_async.coordinator.parameters.receive_buffers import Part, ReceiveBuffers
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.params.reducer import VectorPool
from w5xde_async.store.failpoints import failpoint
from w5xde_async.updates.admission import Outcome
from w5xde_async.updates.outer import Contribution, OuterRule
from w5xde_async.updates.sync import Applied
from w5xde_async.users_code import users_code

__all__ = ["OuterAggregator", "Submission"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A result that waits to be judged. ``samples`` is its weight; the rest as in ``updates.outer.Contribution``."""

    lease: int
    worker: str
    steps: tuple[int, ...]
    samples: int
    parts: Mapping[int, Part]
    version: int
    fragment: int
    untouched: tuple[int, ...]
    workers: int
    gone: tuple[str, ...] = ()
    """Workers that have left since the submission before."""


class OuterAggregator(ParameterOwner):
    """Rule, parameters and what is published of them."""

    def __init__(
        self, layout: Layout, state: FlatState, rule: OuterRule, intake: ReceiveBuffers, publisher: DeltaPublisher, *,
        clock: Callable[[], float] = time.monotonic, executor: Executor | None = None,
    ) -> None:  # fmt: skip
        """``executor`` runs one call at a time, in order; it belongs to this object from now on."""
        super().__init__(layout, state, clock=clock, executor=executor)
        self.rule, self.publisher = rule, publisher
        self._decode_s = self._apply_s = 0.0
        self._intake = intake
        self._pool = VectorPool(layout, spare=1)

    async def offer(self, given: Submission, counted: int, vouched: float = 0.0) -> Outcome:
        """Decode a result and offer it to the rule; ``counted``: samples of its steps; ``vouched``: as there.

        Raises MalformedFrame (nothing has changed), UpdateFailed.
        """
        untouched = frozenset(given.untouched)

        def call() -> Outcome:
            began = self._clock()
            vector = self._pool.take()
            for worker in given.gone:
                self.rule.left(worker)
            try:
                present = self._intake.decode(given.parts, vector)
                self._decode_s += self._clock() - began
                contribution = Contribution(
                    steps=given.steps, counted=counted, samples=given.samples, version=given.version,
                    fragment=given.fragment, vector=vector, present=present, untouched=untouched,
                    workers=given.workers, sender=given.worker, vouched=vouched,
                )  # fmt: skip
                with self._whole(), users_code():  # the optimizer and the scheduler
                    return self.rule.offer(contribution)
            finally:
                self._pool.give(vector)
                self._intake.release(given.parts)

        try:
            return await self.submit(call)
        except Exception as error:
            if self.torn:
                raise await self._failed(len(self.rule.done), error) from error
            raise

    async def commit(self, fragment: int, step: int) -> tuple[Applied | None, list[Piece]]:
        """The next version: what was applied, and what tells workers of it. Raises UpdateFailed."""

        def call() -> tuple[Applied | None, list[Piece]]:
            began = self._clock()
            failpoint("apply.before")
            with self._whole():
                with users_code():
                    applied = self.rule.commit(fragment)
                failpoint("apply.after")
                pieces = [] if applied is None else self.publisher.advance(applied.changed)
            self._apply_s += self._clock() - began
            return applied, pieces

        try:
            return await self.submit(call)
        except Exception as error:
            raise await self._failed(step, error) from error

    def take_times(self) -> tuple[float, float]:
        """Seconds spent decoding and applying since the last call."""
        times, self._decode_s, self._apply_s = (self._decode_s, self._apply_s), 0.0, 0.0
        return times

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What is done in it is done whole, or the rule and its parameters count as ``torn``."""
        try:
            yield
        except BaseException:
            self.torn = True
            raise
