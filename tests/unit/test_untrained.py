"""What an update changes beside what its optimizer steps. Runs with target networks are in tests/cluster."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from w5xde_async.params.flat import FlatState, state_of, sum_of_bits
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

    def counted(tensor: Tensor) -> Tensor:
        read.append(tensor.data_ptr())
        return sum_of_bits(tensor)

    monkeypatch.setattr(untrained, "sum_of_bits", counted)
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
