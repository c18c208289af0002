"""Gradient checkpointing: regions of a step whose activations are computed again in backward in place of being kept.

``marked`` notes, while a step is exported, which calls a region holds; ``computed`` runs such calls as a region again.
Both go through ``torch.utils.checkpoint``, so what is kept, drawn and computed is what the model's own regions keep,
draw and compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.fx.traceback
from torch.utils import checkpoint as torchs

_NOTE = "w5xde_checkpoint"
#: The function itself: what torch wraps around it, which its compiler knows, imports that compiler at the first call.
_checkpoint: Callable[..., Any] = getattr(torchs.checkpoint, "__wrapped__", torchs.checkpoint)


class Region(NamedTuple):
    """One call of ``checkpoint``. ``preserve_random``: the second computation draws what the first one drew."""

    number: int
    preserve_random: bool
    reentrant: bool


@contextmanager
def marked() -> Iterator[None]:
    """Within, calls of ``checkpoint`` compute once, and what ``torch.export`` traces of them, keeping nodes' metadata,
    knows its regions."""
    annotate: Any = getattr(torch.fx.traceback, "annotate", None)
    if annotate is None:  # torch before it: the step is traced without its regions
        yield
        return
    numbers = itertools.count()
    around: list[Region] = []

    @contextmanager
    def region(preserve: bool, reentrant: bool) -> Iterator[None]:
        around.append(Region(next(numbers), bool(preserve), reentrant))
        try:
            with annotate({_NOTE: tuple(around)}):
                yield
        finally:
            around.pop()

    def once(function: Any, preserve: bool = True, *_: Any, **__: Any) -> Iterator[None]:
        with region(preserve, False):
            yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *arguments: Any) -> Any:
            with region(preserve, True):
                return function(*arguments)

    # Users' modules hold the function itself; these two it looks up at each call.
    parts = {"_checkpoint_without_reentrant_generator": once, "CheckpointFunction": Reentrant}
    before = {name: getattr(torchs, name) for name in parts}
    try:
        vars(torchs).update(parts)
        yield
    finally:
        vars(torchs).update(before)


def regions_of(meta: Mapping[str, Any]) -> tuple[Region, ...]:
    """The regions that a traced call lies in, outermost first."""
    found: tuple[Region, ...] = (meta.get("custom") or {}).get(_NOTE, ())
    return found


def computed(
    function: Callable[..., Any], given: Sequence[Any], *, preserve_random: bool, reentrant: bool
) -> tuple[Any, ...]:
    """``function(*given)``, of which nothing but ``given`` and the results is kept for backward."""
    call = torchs.checkpoint if torch.compiler.is_compiling() else _checkpoint
    results: tuple[Any, ...] = call(function, *given, use_reentrant=reentrant, preserve_rng_state=preserve_random)
    return results
