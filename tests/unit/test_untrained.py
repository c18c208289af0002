"""What an update changes beside what its optimizer steps. Runs with target networks are in tests/cluster."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from w5xde_async.params.flat import FlatState, fingerprints, state_of
from w5xde_async.params.layout import Layout
from w5xde_async.updates import untrained
from w5xde_async.updates.untrained import Untrained


def test_what_is_frozen_is_read_once_an_update_and_what_results_change_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.BatchNorm1d(4), nn.Linear(4, 2))
    layout = Layout.of(model)
    state = FlatState(layout)
    state.copy_from(model)
    state.adopt(model)
    seen, read = Untrained(model, layout, state, list(state_of(model, layout))), list[int]()

    def counted(tensors: Sequence[Tensor]) -> Tensor:
        read.extend(tensor.data_ptr() for tensor in tensors)
        return fingerprints(tensors)

    monkeypatch.setattr(untrained, "fingerprints", counted)
    buckets = {bucket.index: layout.groups[bucket.group].role for bucket in layout.buckets}
    (frozen,) = [index for index, role in buckets.items() if role == "frozen"]
    others = [index for index, role in buckets.items() if role not in ("frozen", "grad")]
    for number in range(6):
        read.clear()
        with torch.no_grad():
            model[1].running_mean += 1.0  # type: ignore[operator]  # by workers' results
            seen.look()
            if number % 2:
                model[0].weight += 1.0  # type: ignore[operator]
        assert seen.changed() == ([frozen] if number % 2 else [])
        assert len(read) == (1 if number else 2) + 2 * len(others)


def test_values_that_have_only_moved_are_other_values() -> None:
    model = nn.Linear(4, 2)
    model.mask = nn.Buffer(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    model.order = nn.Buffer(torch.arange(8))
    model.fixed = nn.Parameter(torch.arange(4.0), requires_grad=False)
    layout = Layout.of(model)
    state = FlatState(layout)
    state.copy_from(model)
    state.adopt(model)
    seen = Untrained(model, layout, state, list(state_of(model, layout)))
    for name in ("mask", "order", "fixed"):
        seen.look()
        tensor = getattr(model, name)
        with torch.no_grad():
            tensor.copy_(tensor.roll(1))
        (changed,) = seen.changed()
        (index,) = [index for index, entry in enumerate(layout.entries) if entry.name == name]
        assert index in layout.buckets[changed].entries
