"""``torch.compile`` around a step, where it pays.

The first call compiles. Then some calls run compiled and as many as they are, and the faster way stays; where compiling
fails, the step goes on as it is. Either way one line says so. Compiled kernels give other bits than the model's own:
a run with such a worker is not the same to the last bit, dropout stays seeded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from w5xde_async.compute.halving import lacks_memory

logger = logging.getLogger(__name__)

_TIMED_CALLS = 8  # of each way
_OPTIONS: dict[str, Any] = {"fallback_random": True, "compile_threads": 1}


class CompiledStep:
    """The step ``(model, batch) -> (loss, metrics)``, compiled while that is faster. One thread."""

    def __init__(self, step: Callable[..., Any], device: torch.device) -> None:
        self._step, self._device = step, device
        # A program's step checks its batches in ways that cannot be compiled; what it runs then can.
        compiled = getattr(step, "compiled", None)
        self._compiled: Callable[..., Any] | None = (
            torch.compile(step, options=_OPTIONS) if compiled is None else compiled(_OPTIONS)
        )
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._calls = 0
        self._decided = False

    def __call__(self, model: Any, batch: Any) -> Any:
        if self._decided:
            return (self._compiled or self._step)(model, batch)
        self._calls += 1
        compiled = self._calls % 2 == 1
        began = self._now()
        try:
            result = (self._compiled if compiled and self._compiled else self._step)(model, batch)
        except Exception as error:
            if not compiled or lacks_memory(error):
                raise
            self._decided, self._compiled = True, None
            first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            logger.warning("not compiled, the step runs as it is reason=%s: %s", type(error).__name__, first)
            return self._step(model, batch)  # what the job itself raises is raised here
        if self._calls > 2:  # the first two compile, and warm up
            self._times[compiled].append(self._now() - began)
        if len(self._times[False]) == _TIMED_CALLS:
            self._decide()
        return result

    def _decide(self) -> None:
        compiled_s, plain_s = (sorted(self._times[way])[_TIMED_CALLS // 2] for way in (True, False))
        self._decided = True
        if compiled_s >= plain_s:
            self._compiled = None
        way = "compiled" if self._compiled else "as it is"
        logger.info("the step runs %s compiled_ms=%.3f plain_ms=%.3f", way, compiled_s * 1e3, plain_s * 1e3)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
