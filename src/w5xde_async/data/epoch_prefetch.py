"""The next epoch's order, computed in a thread while this epoch goes on: where it is long that takes seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from w5xde_async.plan.sampler import Steps


class EpochPrefetch:
    """Has orders computed half an epoch ahead of need, one at a time."""

    def __init__(
        self,
        steps: Steps,
        on_ready: Callable[[], None] = lambda: None,
        on_error: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """``on_ready`` is called on the loop's thread when an order has been computed, ``on_error`` if that raised."""
        self._steps, self._on_ready, self._on_error = steps, on_ready, on_error
        self._computing: asyncio.Future[None] | None = None

    def ready(self, step: int, total_steps: int) -> bool:
        """Whether ``step`` can be planned at once; if not, ``on_ready`` tells when to ask again."""
        steps = self._steps
        epoch = steps.epoch_of(step)
        if ready := steps.ready(epoch):
            # Not sooner: until the half of an epoch, what is left of the one before may still be asked about.
            ahead = min(step + steps.steps_per_epoch // 2, total_steps - 1)
            epoch = max(epoch, steps.epoch_of(ahead))
        if not steps.ready(epoch) and self._computing is None:
            self._computing = asyncio.get_running_loop().run_in_executor(None, steps.prepare, epoch)
            self._computing.add_done_callback(self._computed)
        return ready

    async def wait(self, step: int, total_steps: int) -> None:
        """Return when ``step`` can be planned at once. Raises what computing raised."""
        while not self.ready(step, total_steps):
            computing = self._computing
            assert computing is not None
            await asyncio.wait([computing])
            computing.result()

    def _computed(self, computing: asyncio.Future[None]) -> None:
        self._computing = None
        if computing.cancelled():
            return
        if (error := computing.exception()) is not None:
            self._on_error(error)
        else:
            self._on_ready()
