"""The way of a worker's results to the run: its encoder, kept over links, and over processes where there is a place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from w5xde_async.codecs.registry import codec
from w5xde_async.params.layout import Layout
from w5xde_async.params.shard import Shard
from w5xde_async.wire.messages import Welcome
from w5xde_async.worker.uplink.residual_store import forget, keep, take_up
from w5xde_async.worker.uplink.result_encoder import ResultEncoder


class Uplink:
    """Belongs to the event loop; what reads and writes files goes to threads."""

    def __init__(
        self, data_dir: Path | None, *, name: str, worker_id: str, device: str, clock: Callable[[], float]
    ) -> None:
        """``data_dir``: where residuals are kept between processes. ``device``: the type of what the worker computes
        with."""
        self._data_dir, self._name, self._worker_id, self._clock = data_dir, name, worker_id, clock
        self._device = device
        self._key: tuple[object, ...] = ()
        self._run_id = ""
        self.encoder: ResultEncoder | None = None  #: of the run served last; None where that takes results as they are

    async def encoder_for(self, welcome: Welcome, layout: Layout, shard: Shard | None = None) -> ResultEncoder:
        """The encoder of this run: kept over its links, with what it has left out. ``shard``: of an island's rank."""
        key = (welcome.run_id, welcome.update, welcome.feedback, layout.fingerprint)
        if self.encoder is not None and self._key == key:
            self.encoder.change(codec(welcome.codec))
            return self.encoder
        self._key, self._run_id = key, welcome.run_id
        self.encoder = encoder = ResultEncoder(
            layout, codec(welcome.codec), feedback=welcome.feedback, shard=shard, device=self._device, clock=self._clock
        )
        take = partial(
            take_up, encoder, self._data_dir, run_id=welcome.run_id, name=self._name, worker_id=self._worker_id
        )
        await asyncio.get_running_loop().run_in_executor(None, take)
        return encoder

    async def close(self, *, finished: bool, kept: bool) -> None:
        """The worker leaves. ``finished``: the run needs no residuals any more. ``kept``: another worker of the run
        may have them."""
        if self.encoder is None:
            return
        encoder = self.encoder
        if finished:
            self.encoder = None
            end = partial(forget, self._data_dir, self._run_id)
        else:
            data_dir = self._data_dir if kept else None
            end = partial(keep, encoder, data_dir, run_id=self._run_id, name=self._name, worker_id=self._worker_id)
        await asyncio.get_running_loop().run_in_executor(None, end)
