"""The owner of the parameters under a rule that takes contributions as they come.

What ``aggregator`` is to the synchronous tree: one thread in which results are decoded, offered to the rule, committed
and encoded for the workers. What others submit to that thread sees the parameters between two of these, never inside.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from w5xde_async.coordinator.parameters.delta_publisher import DeltaPublisher, Piece
from w5xde_async.coordinator.parameters.receive_buffers import Part, ReceiveBuffers
from w5xde_async.errors import UpdateFailed
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.params.reducer import VectorPool
from w5xde_async.store.failpoints import failpoint
from w5xde_async.updates.admission import Outcome
from w5xde_async.updates.outer import Contribution, OuterRule
from w5xde_async.updates.sync import Applied
from w5xde_async.users_code import users_code

__all__ = ["Submission", "Updating"]

_T = TypeVar("_T")


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


class Updating:
    """Rule, parameters and what is published of them."""

    def __init__(
        self, layout: Layout, state: FlatState, rule: OuterRule, intake: ReceiveBuffers, publisher: DeltaPublisher, *,
        clock: Callable[[], float] = time.monotonic, executor: Executor | None = None,
    ) -> None:  # fmt: skip
        """``executor`` runs one call at a time, in order; it belongs to this object from now on."""
        self.layout, self.state, self.rule, self.publisher = layout, state, rule, publisher
        self.torn = False  # an update broke off: the parameters are not those of any version
        self.apply_s = self.decode_s = 0.0  #: seconds since the last commit
        self._intake, self._clock = intake, clock
        self._pool = VectorPool(layout, spare=1)
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="w5xde-aggregate")

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
                self.decode_s += self._clock() - began
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
            self.apply_s += self._clock() - began
            return applied, pieces

        try:
            return await self.submit(call)
        except Exception as error:
            raise await self._failed(step, error) from error

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What is done in it is done whole, or the rule and its parameters count as ``torn``."""
        try:
            yield
        except BaseException:
            self.torn = True
            raise

    async def _failed(self, step: int, error: Exception) -> UpdateFailed:
        lines = await self.submit(partial(traceback.format_exception, error))  # reads source files
        return UpdateFailed(step, error, "".join(lines)[-8000:])

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of every tensor, by entry name. To be submitted."""
        with torch.no_grad():
            return {entry.name: view.clone() for entry, view in zip(self.layout.entries, self.state.views, strict=True)}

    def submit(self, call: Callable[[], _T]) -> asyncio.Future[_T]:
        """Run ``call`` in the thread that owns the parameters."""
        return asyncio.wrap_future(self._executor.submit(call))

    async def aclose(self) -> None:
        """Wait for the thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._executor.shutdown)
