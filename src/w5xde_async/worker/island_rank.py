"""One process of an island: the group that it belongs to, and the engine that it computes with.

Whoever starts the ranks says who they are in the environment, as torchrun does: RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from w5xde_async.compute.block import LeafSpec
from w5xde_async.errors import UsageError
from w5xde_async.job import Job
from w5xde_async.parallel.building import island_engine
from w5xde_async.parallel.engine import IslandEngine, Traced
from w5xde_async.parallel.group import Group, join_store, open_store
from w5xde_async.parallel.shape import STORE_FD, IslandShape
from w5xde_async.worker.executors.island import Rank

logger = logging.getLogger(__name__)

_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_WORD = 62  # bits in a number that travels


def join_group(
    shape: IslandShape, device: torch.device, environment: Mapping[str, str], interface: str, *, schedule: str,
    stages_at: Sequence[str], checkpoint_activations: bool, compiles: bool,
) -> Rank:  # fmt: skip
    """Meet the other ranks. Blocks until all are there. ``schedule`` and on: as for ``island_engine``.

    Raises UsageError where the environment does not fit the shape, RuntimeError where somebody does not come.
    """
    try:
        number, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError):
        told = ", ".join(f"{name}={environment.get(name, '')}" for name in _PLACE)
        raise UsageError(
            "this process is a rank, since RANK is set, and the environment does not say which, or where the others "
            f"are ({told}); torchrun sets these"
        ) from None
    if not 0 <= number < ranks:
        raise UsageError(f"RANK is {number}, and WORLD_SIZE {ranks}")
    if ranks != shape.ranks:
        raise UsageError(f"--island {shape} has {shape.ranks} ranks, and {ranks} were started (WORLD_SIZE)")
    logger.info("rank %d of %d waits for the others at=%s:%d", number, ranks, host, port)
    served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listening = environment.get(STORE_FD)
    if not number and not served:
        store: Any = open_store(host, port, None if listening is None else int(listening))
    else:
        store = join_store(host, port)
    if served:  # the same store after a restart
        store = PrefixStore(f"w5xde {environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    group = Group(store, number, ranks, device, interface=interface)

    def build(source: Job | Traced, spec: LeafSpec, bucket_bytes: int) -> IslandEngine:
        return island_engine(
            shape, source, spec, group, bucket_bytes=bucket_bytes, schedule=schedule, stages_at=stages_at,
            checkpoint_activations=checkpoint_activations, compiles=compiles,
        )  # fmt: skip

    return Rank(
        rank=number, ranks=ranks, key=_key(group), shape=str(shape), lockstep=GroupLockstep(group),
        traced="pp" in shape.axes, build=build,
    )  # fmt: skip


def _key(group: Group) -> str:
    words = [secrets.randbits(_WORD) if not group.rank else 0 for _ in range(2)]
    return "".join(f"{word:016x}" for word in group.numbers(words)[0])


class GroupLockstep:
    """The ranks of a group stay together by what rank 0 announces."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def announce(self, turn: int, number: int) -> None:
        """On rank 0: tell the others."""
        self._group.announce(turn, number)

    def hear(self) -> tuple[int, int]:
        """On the others: wait for what it announces next."""
        return self._group.hear()[:2]

    def union(self, numbers: Sequence[int], count: int) -> list[int]:
        """Which of the numbers below ``count`` any rank has."""
        words = [0] * (count // _WORD + 1)
        for number in numbers:
            words[number // _WORD] |= 1 << number % _WORD
        union = [0] * len(words)
        for row in self._group.numbers(words):
            union = [mine | theirs for mine, theirs in zip(union, row, strict=True)]
        return [number for number in range(count) if union[number // _WORD] >> number % _WORD & 1]

    def bytes_of_all(self, data: bytes) -> list[bytes]:
        """What each rank gives."""
        return self._group.bytes_of_all(data)

    def pass_on(self, data: Tensor, source: int) -> None:
        """Bytes of rank ``source`` into everybody's."""
        self._group.pass_on(data, source)
