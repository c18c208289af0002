"""The owner of the parameters under a rule that takes contributions as they come.

What ``aggregator`` is to the synchronous tree: results are decoded, offered to the rule, committed and encoded for the
workers, all in the owner's thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from w5xde_async.coordinator.parameters.owner import ParameterOwner
from w5xde_async.coordinator.parameters.publisher import Piece, Publisher
from w5xde_async.coordinator.parameters.receive_buffers import Parts, ReceiveBuffers
from w5xde_async.coordinator.training import RunContext
from w5xde_async.params.reducer import VectorPool
from w5xde_async.store.failpoints import failpoint
from w5xde_async.updates.admission import Outcome
from w5xde_async.updates.outer import Contribution, OuterRule
from w5xde_async.updates.sync import Applied
from w5xde_async.users_code import users_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A result that waits to be judged. ``samples`` is its weight; the rest as in ``updates.outer.Contribution``."""

    lease: int
    worker: str
    steps: tuple[int, ...]
    samples: int
    path: float
    parts: Parts
    version: int
    fragment: int
    untouched: tuple[int, ...]
    workers: int
    gone: tuple[str, ...] = ()
    """Workers that have left since the submission before."""


class OuterAggregator(ParameterOwner):
    """Rule, parameters and what is published of them."""

    def __init__(self, context: RunContext, rule: OuterRule, intake: ReceiveBuffers, publisher: Publisher) -> None:
        super().__init__(context)
        self.rule, self.publisher = rule, publisher
        self._decode_s = self._apply_s = 0.0
        self._intake = intake
        self._pool = VectorPool(context.layout, spare=1)

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
                    steps=given.steps, counted=counted, samples=given.samples, path=given.path, version=given.version,
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
