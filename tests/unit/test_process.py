"""What programs do with signals before anybody listens to them."""

from __future__ import annotations

import signal

import pytest

from w5xde_async.errors import ExitCode
from w5xde_async.process import _Early


class Ended(BaseException):
    pass


def test_a_second_stop_before_the_beginning_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr("os._exit", end)
    stops = _Early(stops=True)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        stops(signal.SIGTERM, None)
    with pytest.raises(Ended) as ended:
        stops(signal.SIGINT, None)
    assert ended.value.args == (ExitCode.INTERRUPTED_TWICE,)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has no SIGUSR1")
def test_a_warning_before_it_is_not_the_first() -> None:
    """As Slurm sends SIGUSR1 some time before SIGTERM."""
    stops = _Early(stops=True)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        with pytest.raises(KeyboardInterrupt):
            stops(number, None)
