"""Streaming local steps: one fragment at a time, sent while computing goes on.

Douillard et al. 2025, arXiv:2501.18512, algorithm 2. For fragment p due after inner step t:

    worker       Delta_p = base_p - theta_p,local                       base: the fragment as last received
    coordinator  D_p, m_p, theta_p as in a round of ``local``           eta 0.4, beta 0.9
    worker       tau inner steps later:  base_p = theta_p
                 theta_p,local = alpha theta_p,local + (1 - alpha) theta_p

tau 1 hides a round trip behind one inner step and is safe to about 5; alpha 0 forgets the tau steps taken meanwhile,
alpha 0.5 keeps half of them. Versions and staleness are counted per fragment.

Holds: each sample at most once in each fragment's pseudo-gradients (G1 by fragment). The steps of a worker that dies
between turns have counted in some fragments and not in others. Leasing them again would count them twice in the former.
So the latter lose up to H of its inner steps; whoever leases counts what is lost.

A step counts as done when its worker's first pseudo-gradient with it was judged, accepted or not, for other fragments'
pseudo-gradients have it too. If that one was refused and the worker dies before any other is accepted, the step's
samples are in no fragment. Does not hold: the same bits (G3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from w5xde_async.updates.admission import Outcome, check_vector
from w5xde_async.updates.averages import Average, WeightedMean
from w5xde_async.updates.fragments import Fragment
from w5xde_async.updates.local import LocalStepsConfig, LocalStepsRule
from w5xde_async.updates.norm_gate import NormGate


class StreamingRule:
    """The coordinator's side: an outer optimizer per fragment over ``parameters``, changed in place at ``close``.

    Memory for n parameters: 4 n bytes of momentum, 4 n of sums (or what another average states), and 4 n of the
    fragments' own copy, since a fragment is not contiguous in ``parameters``.
    """

    def __init__(
        self,
        parameters: Tensor,
        fragments: Sequence[Fragment],
        config: LocalStepsConfig | None = None,
        *,
        average: Callable[[Fragment], Average] | None = None,
        gate: Callable[[], NormGate] | None = None,
    ) -> None:
        """``average`` and ``gate`` make one of each fragment's own. Default config: eta 0.4, beta 0.9.

        Raises ValueError where the fragments do not hold each element once.
        """
        check_vector(parameters)
        covered = sorted(piece for fragment in fragments for piece in fragment.ranges)
        edges = [0, *(edge for piece in covered for edge in piece), parameters.numel()]
        if any(edges[at] != edges[at + 1] for at in range(0, len(edges), 2)):
            raise ValueError("the fragments are not the whole vector, each element once")
        config = config or LocalStepsConfig(learning_rate=0.4)
        self.parameters, self.fragments = parameters, tuple(fragments)
        self.versions = [0] * len(self.fragments)
        self._rules = [
            LocalStepsRule(
                fragment.gather(parameters),
                config,
                average=WeightedMean(fragment.numel) if average is None else average(fragment),
                gate=None if gate is None else gate(),
            )
            for fragment in self.fragments
        ]

    def offer(
        self,
        fragment: int,
        pseudo_gradient: Tensor,
        *,
        samples: int,
        version: int,
        path: float | None = None,
        sender: str = "one",
        present: int = 1,
        vouched: float = 0.0,
    ) -> Outcome:
        """Count one worker's pseudo-gradient of a fragment, made from that fragment's ``version``; it is used up."""
        return self._rules[fragment].offer(
            pseudo_gradient,
            samples=samples,
            path=path,
            staleness=self.versions[fragment] - version,
            sender=sender,
            present=present,
            vouched=vouched,
        )

    def left(self, sender: str) -> None:
        """Who sent is not present any more."""
        for rule in self._rules:
            rule.admission.left(sender)

    def pending(self, fragment: int) -> int:
        """Pseudo-gradients in the fragment's open turn."""
        return self._rules[fragment].pending

    def full(self, fragment: int) -> bool:
        """Whether the open turn has room for no more pseudo-gradients: it is to be closed."""
        return self._rules[fragment].full

    def close(self, fragment: int) -> float | None:
        """End the fragment's turn: step, one version more, D's norm. None, and nothing changed, where nothing is in."""
        norm = self._rules[fragment].close()
        if norm is not None:
            self.fragments[fragment].scatter_(self.parameters, self._rules[fragment].parameters)
            self.versions[fragment] += 1
        return norm

    def values(self, fragment: int) -> Tensor:
        """The fragment's parameters one after the other, to be sent; they change at its next ``close``."""
        return self._rules[fragment].parameters

    def state_dict(self) -> dict[str, Any]:
        """Everything but the parameters: plain containers, numbers and tensors, which share memory with this."""
        return {
            "versions": list(self.versions),
            "fragments": [rule.state_dict() for rule in self._rules],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, with the parameters that ``parameters`` holds now (restore them first).

        Raises ValueError where it belongs to another layout or number of fragments.
        """
        if len(state["fragments"]) != len(self._rules):
            raise ValueError(f"the checkpoint has {len(state['fragments'])} fragments, not {len(self._rules)}")
        self.versions = [int(version) for version in state["versions"]]
        for fragment, rule, kept in zip(self.fragments, self._rules, state["fragments"], strict=True):
            rule.parameters.copy_(fragment.gather(self.parameters))
            rule.load_state_dict(kept)


class StreamingReplica:
    """The worker's side over its flat ``local`` parameters, changed in place by ``mix``. One thread at a time.

    After each inner step: ``send`` the fragments that are due, ``deliver`` what came, ``mix``. What has not come by its
    time is not waited for: this worker's delay grows.
    Memory for n parameters: 4 n bytes (base), and what was delivered and not yet mixed.
    """

    def __init__(self, local: Tensor, fragments: Sequence[Fragment], *, delay: int = 1, mixing: float = 0.5) -> None:
        """``delay`` is tau, inner steps between sending and mixing; ``mixing`` is alpha, the part kept of the local."""
        check_vector(local, device=local.device.type)
        self.local, self.fragments, self.delay, self.mixing = local, tuple(fragments), delay, mixing
        self._base = local.clone()
        self._sent: dict[int, int] = {}  # fragment -> inner step after which it was sent
        self._delivered: dict[int, Tensor] = {}
        self._kept: set[int] = set()  # sent, refused, and to be sent again against what comes

    def send(self, fragment: int, step: int) -> Tensor:
        """The fragment's pseudo-gradient after ``step`` inner steps. Raises ValueError while one is under way."""
        if fragment in self._sent:
            raise ValueError(f"fragment {fragment} was sent at step {self._sent[fragment]} and is not back")
        self._sent[fragment] = step
        piece = self.fragments[fragment]
        return piece.gather(self._base).sub_(piece.gather(self.local))

    def is_sent(self, fragment: int) -> bool:
        """Whether a fragment was sent and nothing has been mixed in since."""
        return fragment in self._sent

    def recall(self, fragment: int, counted: Tensor | None = None) -> None:
        """Nothing is waited for any more: what was sent is in the next pseudo-gradient, but for ``counted`` of it."""
        self._sent.pop(fragment, None)
        self._delivered.pop(fragment, None)
        self._kept.discard(fragment)
        if counted is not None:
            piece = self.fragments[fragment]
            piece.scatter_(self._base, piece.gather(self._base).sub_(counted))

    def keep(self, fragment: int, pseudo_gradient: Tensor) -> None:
        """``pseudo_gradient``, sent last, was refused and nobody computes it again: it stays in the next one."""
        if fragment in self._sent:
            self._kept.add(fragment)
        else:  # new values were mixed in before that was known: put back what they took the place of
            piece = self.fragments[fragment]
            piece.scatter_(self.local, piece.gather(self.local).sub_(pseudo_gradient, alpha=1.0 - self.mixing))

    @torch.no_grad()
    def rebase(self, fragment: int, values: Tensor) -> None:
        """New values have come that were made without what was sent, which is still under way: it goes on from them.

        The replica is as far from the new values as it was from the old, so others' progress is in it at once. Nothing
        is mixed: what is under way would count again in part, when it is in the pseudo-gradient after that.
        """
        check_vector(values, self.fragments[fragment].numel, device=self.local.device.type)
        piece = self.fragments[fragment]
        piece.scatter_(self.local, piece.gather(self.local).add_(values).sub_(piece.gather(self._base)))
        piece.scatter_(self._base, values)

    def deliver(self, fragment: int, values: Tensor) -> None:
        """The fragment's new values have come; they are kept until it is their time.

        Raises ValueError where the fragment was not sent.
        """
        check_vector(values, self.fragments[fragment].numel, device=self.local.device.type)
        if fragment not in self._sent:
            raise ValueError(f"fragment {fragment} was not sent")
        self._delivered[fragment] = values

    @torch.no_grad()
    def mix(self, step: int) -> tuple[int, ...]:
        """Mix in what was delivered and is at least ``delay`` inner steps old after ``step``; names the fragments."""
        ready = tuple(index for index in self._delivered if self._sent[index] + self.delay <= step)
        for index in ready:
            piece, values = self.fragments[index], self._delivered.pop(index)
            del self._sent[index]
            mixed = piece.gather(self.local)
            if index in self._kept:
                self._kept.discard(index)
                mixed.add_(values).sub_(piece.gather(self._base))  # as far from the new values as from the old
            else:
                mixed.mul_(self.mixing).add_(values, alpha=1.0 - self.mixing)
            piece.scatter_(self._base, values)
            piece.scatter_(self.local, mixed)
        return ready
