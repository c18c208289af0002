"""``--compile``: the faster way stays, and where compiling fails the step goes on with one line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from w5xde_async.compute import compiling
from w5xde_async.compute.compiling import CompiledStep

CPU = torch.device("cpu")


class Clock:
    """Time that a step spends as it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(compiling.time, "perf_counter", lambda: self.now)

    def step(self, seconds: float, name: str, calls: list[str]) -> Callable[[Any, Any], str]:
        def run(model: Any, batch: Any) -> str:
            self.now += seconds
            calls.append(name)
            return name

        return run


@pytest.mark.parametrize(("compiled_s", "stays"), [(1.0, "compiled"), (3.0, "plain")])
def test_the_faster_way_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiled_s: float, stays: str
) -> None:
    caplog.set_level(logging.INFO)
    clock, calls = Clock(monkeypatch), list[str]()
    monkeypatch.setattr(compiling.torch, "compile", lambda step, **_: clock.step(compiled_s, "compiled", calls))
    step = CompiledStep(clock.step(2.0, "plain", calls), CPU)
    for _ in range(40):
        step(None, None)
    assert {"compiled", "plain"} == set(calls[:18])
    assert set(calls[18:]) == {stays}
    assert len(caplog.records) == 1


def test_where_compiling_fails_the_step_goes_on_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler was found\nand much more")

    monkeypatch.setattr(compiling.torch, "compile", lambda step, **_: fails)
    step = CompiledStep(lambda model, batch: batch + 1, CPU)
    assert [step(None, 1) for _ in range(30)] == [2] * 30
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no C++ compiler was found" in line
    assert "and much more" not in line


def test_what_the_job_itself_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Any, batch: Any) -> Any:
        raise ValueError("the job's own")

    monkeypatch.setattr(compiling.torch, "compile", lambda step, **_: step)
    with pytest.raises(ValueError, match="the job's own"):
        CompiledStep(wrong, CPU)(None, None)
