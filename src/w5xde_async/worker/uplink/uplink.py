"""The way of a worker's results to the run: its encoder, kept over links, and over processes where there is a place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from w5xde_async.codecs.registry import codec
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import Shard
from w5xde_async.wire.messages import Welcome
from w5xde_async.worker.uplink.residual_store import forget, keep, take_up
from w5xde_async.worker.uplink.result_encoder import ResultEncoder

logger = logging.getLogger(__name__)


class Uplink:
    """Belongs to the event loop; an encoder, and what is done with its files, belongs to the compute thread: all of it
    comes in its order there, and after what was being encoded. It is done to its end where its caller is cancelled, as
    with a link that is lost meanwhile."""

    def __init__(
        self, data_dir: Path | None, *, name: str, worker_id: str, device: str, pool: Executor,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """``data_dir``: where residuals are kept between processes. ``device``: the type of what the worker computes
        with. ``pool``: the compute thread."""
        self._pool = pool
        self._data_dir, self._name, self._worker_id, self._clock = data_dir, name, worker_id, clock
        self._device = device
        self._key: tuple[object, ...] = ()
        self._run_id = ""
        self.encoder: ResultEncoder | None = None  #: of the run served last; None where that takes results as they are

    async def encoder_for(self, welcome: Welcome, layout: Layout, shard: Shard | None = None) -> ResultEncoder:
        """The encoder of this run: kept over its links, with what it has left out. ``shard``: of an island's rank."""
        key = (welcome.run_id, welcome.update, welcome.feedback, layout.fingerprint)
        if self.encoder is not None and self._key == key:
            await self._do(partial(self.encoder.change, codec(welcome.codec)), self._pool)
            return self.encoder
        if self.encoder is not None:  # what follows takes up what was kept of its own run
            before, self.encoder = self.encoder, None
            await self._keep(before, self._data_dir if self._run_id != welcome.run_id else None)
        self._key, self._run_id = key, welcome.run_id
        self.encoder = encoder = ResultEncoder(
            layout, codec(welcome.codec), feedback=welcome.feedback, shard=shard, device=self._device, clock=self._clock
        )
        take = partial(
            take_up, encoder, self._data_dir, run_id=welcome.run_id, name=self._name, worker_id=self._worker_id
        )
        await self._do(take, self._pool)
        return encoder

    async def close(self, *, finished: bool, kept: bool, abandoned: bool) -> None:
        """The worker leaves. ``finished``: the run needs no residuals any more. ``kept``: another worker of the run
        may have them. ``abandoned``: the compute thread may never end what it is at."""
        if self.encoder is None:
            return
        if finished:
            self.encoder = None
            await self._do(partial(forget, self._data_dir, self._run_id), None if abandoned else self._pool)
        elif abandoned:
            if self.encoder.feedback is not None:
                logger.warning("what the codec left out is dropped: the compute thread has not ended its block")
        else:
            await self._keep(self.encoder, self._data_dir if kept else None)

    async def _keep(self, encoder: ResultEncoder, data_dir: Path | None) -> None:
        call = partial(keep, encoder, data_dir, run_id=self._run_id, name=self._name, worker_id=self._worker_id)
        await self._do(call, self._pool)

    async def _do(self, call: Callable[[], None], pool: Executor | None) -> None:
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(pool, call))
