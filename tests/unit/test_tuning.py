"""Socket options on this platform's real sockets and, through a fake, on the others'."""

from __future__ import annotations

import socket
import sys

import pytest

from w5xde_async.net import tuning
from w5xde_async.net.tuning import BUFFER_BYTES, KEEPALIVE_IDLE_S, tune, tune_listener


class FakeSocket:
    """Remembers what is set; refuses the options in ``lacking``."""

    def __init__(self, lacking: set[int] = frozenset()) -> None:
        self.options: dict[tuple[int, int], int] = {}
        self.controls: list[tuple[int, tuple[int, int, int]]] = []
        self.lacking = lacking

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if option in self.lacking:
            raise OSError(92, "Protocol not available")
        self.options[level, option] = value

    def ioctl(self, code: int, value: tuple[int, int, int]) -> None:
        self.controls.append((code, value))


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch):
    """``named(NAME=7, OTHER=None)`` gives or takes away a name of the socket module."""

    def put(**names: int | None) -> None:
        for name, value in names.items():
            if value is None:
                monkeypatch.delattr(socket, name, raising=False)
            else:
                monkeypatch.setattr(socket, name, value, raising=False)

    return put


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's options back")
def test_linux_sets_what_it_says():
    with socket.socket() as sock:
        default = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        done = tune(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == done["TCP_NODELAY"] == 1
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == done["SO_KEEPALIVE"] == 1
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT"):
            assert sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == done[name]
        assert done["TCP_QUICKACK"] == 1
        # A size of our own would switch the kernel's tuning off.
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == default
        assert "SO_RCVBUF" not in done
        assert "SO_SNDBUF" not in done


def test_the_peer_is_given_up_when_its_silence_is_certain():
    """The kernel's two deadlines agree, so neither hides the other."""
    silence_s = KEEPALIVE_IDLE_S + tuning.KEEPALIVE_INTERVAL_S * tuning.KEEPALIVE_COUNT
    assert silence_s * 1000 == tuning.USER_TIMEOUT_MS


def test_macos_names_its_idle_time_otherwise(named):
    named(TCP_KEEPALIVE=None, TCP_KEEPIDLE=None, TCP_USER_TIMEOUT=18)
    sock = FakeSocket()
    done = tune(sock, platform="darwin")
    assert sock.options[socket.IPPROTO_TCP, 0x10] == done["TCP_KEEPALIVE"] == KEEPALIVE_IDLE_S
    assert sock.options[socket.SOL_SOCKET, socket.SO_RCVBUF] == done["SO_RCVBUF"] == BUFFER_BYTES
    assert sock.options[socket.SOL_SOCKET, socket.SO_SNDBUF] == done["SO_SNDBUF"] == BUFFER_BYTES
    assert "TCP_USER_TIMEOUT" not in done
    assert not sock.controls


def test_windows_sets_keepalive_in_one_call(named):
    named(SIO_KEEPALIVE_VALS=0x98000004)
    sock = FakeSocket()
    done = tune(sock, platform="win32")
    assert sock.controls == [(0x98000004, (1, 20_000, 5_000))]
    assert done["SIO_KEEPALIVE_VALS"] == KEEPALIVE_IDLE_S
    assert done["TCP_NODELAY"] == 1
    assert not {"TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_USER_TIMEOUT"} & done.keys()


def test_windows_without_the_call_goes_on(named):
    named(SIO_KEEPALIVE_VALS=None)
    assert "SIO_KEEPALIVE_VALS" not in tune(FakeSocket(), platform="win32")


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32", "freebsd14"])
def test_what_is_absent_or_refused_is_skipped(platform: str, named):
    named(TCP_KEEPCNT=None, TCP_USER_TIMEOUT=None, TCP_QUICKACK=None)
    sock = FakeSocket(lacking={socket.TCP_NODELAY})
    done = tune(sock, platform=platform)
    assert not {"TCP_KEEPCNT", "TCP_USER_TIMEOUT", "TCP_QUICKACK", "TCP_NODELAY"} & done.keys()
    assert done["SO_KEEPALIVE"] == 1


def test_listeners_own_their_address(named):
    named(SO_EXCLUSIVEADDRUSE=-5)
    posix, windows = FakeSocket(), FakeSocket()
    tune_listener(posix, platform="linux")
    tune_listener(windows, platform="win32")
    assert posix.options == {(socket.SOL_SOCKET, socket.SO_REUSEADDR): 1}
    assert windows.options == {(socket.SOL_SOCKET, -5): 1}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's tcp_info")
def test_the_kernel_tells_the_round_trip():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        peer, _ = listener.accept()
        with peer:
            found = tuning.figures(sock)
            assert found is not None
            assert 0 < found.rtt_s < 1
            assert found.retransmits == 0
            assert tuning.figures(sock, platform="darwin") is None
    pair = socket.socketpair()
    assert tuning.figures(pair[0]) is None  # no TCP
    for end in pair:
        end.close()
