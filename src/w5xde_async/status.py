"""``python -m w5xde_async.status``: a running coordinator as a table in the terminal, once or live.

It asks the dashboard, found by its address or by the run directory, and needs neither torch nor the job. Exit codes are
those of the other programs: 2 wrong usage, 3 nobody answers, or not that run, 4 the token or the certificate is wrong.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import math
import os
import ssl
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from socket import SHUT_RDWR
from typing import Any
from urllib.parse import parse_qs, urlsplit

from w5xde_async.config import Kind, Parser, duration_s
from w5xde_async.errors import ExitCode, Unreachable, UsageError, W5xdeError, need
from w5xde_async.net.endpoint import valid_host
from w5xde_async.process import note, say, without_loop
from w5xde_async.store.filesystem import read_regular
from w5xde_async.telemetry import wording
from w5xde_async.telemetry.links import LINK_FILE, DashboardLink
from w5xde_async.telemetry.records import number

_LINK = "W5XDE_DASHBOARD_LINK"  # the link as it was printed, with its token and its certificate's hash
_DEFAULT_PORT = 5556
_TIMEOUT_S = 5.0
_ANSWERED_S = 15.0  # whatever keeps coming, all that is shown once has come by then
_PATIENCE_S = 15.0  # while watching, nobody may answer for so long
_AGAIN_S = 1.0  # so long between attempts
_SILENT_S = 40.0  # a dashboard says something every 15 s
_ENDED = ("finished", "stopped", "failed")
_MOST_BYTES = 64 << 20  # of one answer: two thousand workers with their timelines are a quarter of that
_SHOWN = ("run", "status", "workers")
#: Of these, what is shown as a number.
_COUNTS = ("step", "total_steps", "leaves", "leaves_in_vain", "bad_samples")
_OF_STATUS = ("loss", "samples_per_s", "sample_bytes", "uptime_s")
_OF_WORKER = (
    "busy", "leaves_per_s", "share", "rtt_s", "bytes_sent", "bytes_received", "device_bytes", "host_bytes"
)  # fmt: skip
_NOT_FINITE = ("nan", "inf", "-inf")  # of which JSON has no word
_DISPENSABLE = (
    "data from",
    "link",
    "device",
    "memory",
    "received",
    "sent",
    "round trip",
    "share",
    "waits for",
)  # the first go first
_APART = 3  # spaces between columns
_LEAST_WAITS = 10  # columns of what a worker waits for, which may take several lines
_WIDE = 160  # columns where no terminal says how many there are: nothing is cut off

_INTERVAL = Kind("a time from 0.1s to 1h, like 2s", "TIME", duration_s, lambda seconds: 0.1 <= seconds <= 3600)

_NO_DASHBOARD = (
    "is no dashboard (perhaps that is the workers' port, or a tunnel to nothing); the line `dashboard` of the "
    "coordinator's start names its address, and --run-dir DIR finds it"
)

_Worker = dict[str, Any]


class _Denied(W5xdeError):
    """The dashboard's token or certificate is not the right one."""

    exit_code = ExitCode.AUTHENTICATION


class _NoDashboard(ValueError):
    """What was answered is not what a dashboard of this project says."""


class _HungUp(Unreachable):
    """Somebody listens there and ends the connection: no dashboard, or one that ends just now."""

    def __init__(self, peer: str, reason: str, otherwise: str = "") -> None:
        super().__init__(peer, reason, _TIMEOUT_S)
        self.args = (f"what listens at {peer} {reason}: it {_NO_DASHBOARD}{otherwise}",)


class _NotRunning(W5xdeError):
    """Another run is where the run directory says that its own is: that one was killed, and its port taken."""

    exit_code = ExitCode.UNREACHABLE


def parser(prog: str) -> Parser:
    """Of the command line; its ``read`` raises UsageError."""
    parser = Parser(prog=prog, description=(__doc__ or "").split("\n\n")[0].split(": ", 1)[-1].capitalize())
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--server", metavar="ADDRESS", help="the dashboard, HOST:PORT; where it needs a token, set W5XDE_DASHBOARD_LINK"
    )
    where.add_argument(
        "--run-dir", metavar="DIR", type=lambda text: Path(os.path.expanduser(text)),
        help="directory of the run; default: the newest in runs/",
    )  # fmt: skip
    parser.add_argument("--watch", action="store_true", help="show it again and again, until the run ends")
    parser.add_argument("--interval", metavar="TIME", default="2s", help="how often, with --watch [2s]")
    parser.add_argument("--json", action="store_true", help="print what the dashboard answers, as JSON")
    return parser


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m w5xde_async.status") -> int:
    """Show the run; the result is the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return without_loop(prog, lambda: _show(parser(prog).read(arguments)))


def _show(given: Namespace) -> int:
    interval_s = _INTERVAL.value_at("--interval", given.interval)
    need(not (given.json and given.watch), "--json prints once: leave out --watch")
    if isinstance(sys.stdout, TextIOWrapper):
        with suppress(OSError):  # a file that has become a pipe
            sys.stdout.reconfigure(errors="replace")  # a name may have what the terminal's encoding has not
    dashboard = _Dashboard(_of_server(given.server)) if given.server else _of_run(given.run_dir)
    if given.json:
        say(json.dumps(dashboard.read()) + "\n")
    elif given.watch:
        _watch(dashboard, interval_s)
    else:
        _Screen().show(dashboard.read())
    return ExitCode.OK


# -- where


def _of_server(server: str) -> DashboardLink:
    if "token=" in server:
        raise UsageError(
            f"--server: others can read the token in the list of processes; give --run-dir, or set {_LINK}"
        )
    told, url = _told(), _url(server)
    scheme, _, address = url.partition("://")
    if told is None or scheme not in ("http", "https"):
        return DashboardLink(url)
    # The way to it is another one from here (a tunnel's end): the rest is as it was told.
    parts = urlsplit(told.url)
    query = f"/?{parts.query}" if parts.query else ""
    return told._replace(url=f"{parts.scheme}://{address.rstrip('/')}{query}")


def _told() -> DashboardLink | None:
    """What the environment says; None where that is nothing."""
    told = os.environ.get(_LINK)
    if not told:
        return None
    try:
        link = DashboardLink.parse(told)
        if urlsplit(link.url).scheme in ("http", "https"):
            return link
    except ValueError:
        pass
    raise UsageError(f"{_LINK} is no link of a dashboard: copy all of what the coordinator prints, from http on")


def _url(server: str) -> str:
    if "://" in server:
        return server
    host = server if server.startswith("[") or server.count(":") < 2 else f"[{server}]"
    return f"http://{host}" if host.rpartition("]")[2].count(":") else f"http://{host}:{_DEFAULT_PORT}"


def _of_run(run_dir: Path | None) -> _Dashboard:
    if run_dir is None and (told := _told()) is not None:
        return _Dashboard(told)
    if run_dir is None:
        found = sorted(Path("runs").glob(f"*/{LINK_FILE}"), key=_written_at)
        if not found:
            raise UsageError("no run in ./runs shows a dashboard; give --run-dir DIR or --server HOST:PORT")
        path = found[-1]
    else:
        need(run_dir.is_dir(), f"--run-dir: there is no directory {run_dir}")
        path = run_dir / LINK_FILE
    try:
        link = DashboardLink.parse(read_regular(path).decode())
    except FileNotFoundError:
        raise UsageError(f"{path.parent} shows no dashboard: it does not run, or runs with --no-dashboard") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    return _Dashboard(link, path.parent)


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # its coordinator ends just now
        return 0.0


def _run_id(run_dir: Path) -> str | None:
    """As the store writes it; None where that cannot be read."""
    try:
        return str(json.loads(read_regular(run_dir / "run.json"))["run_id"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


class _Dashboard:
    """Asks over one short connection at a time; of ``run_dir`` nothing but the run that is kept there."""

    def __init__(self, link: DashboardLink, run_dir: Path | None = None) -> None:
        self._run_dir, self._run_id = run_dir, None if run_dir is None else _run_id(run_dir)
        place = "--server" if run_dir is None else str(run_dir / LINK_FILE)
        wrong = UsageError(f"{place}: {link.url[:200]!r} is no address; it looks like 127.0.0.1:{_DEFAULT_PORT}")
        try:
            parts = urlsplit(link.url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise wrong from None
        if parts.scheme not in ("http", "https") or not host:
            raise wrong
        self._host, self._port = valid_host(host, place=place), port or (443 if parts.scheme == "https" else 80)
        self._secure, self._certificate = parts.scheme == "https", link.certificate
        self._token = (parse_qs(parts.query).get("token") or [""])[0]

    def read(self) -> dict[str, Any]:
        """Raises Unreachable, or what ends the program with 3 or 4."""
        with self._asking() as connection, _hung_up(connection, _ANSWERED_S):
            found = {}
            for name in _SHOWN:
                with self._get(connection, f"/api/v1/{name}") as answer:
                    found[name] = _parsed(answer.read(_MOST_BYTES))
            found = _checked(found)
            self._compare(found["run"])
            return found

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The snapshot and the updates to it, until the dashboard ends or does not answer. Raises as ``read`` does."""
        with self._asking() as connection:
            connection.sock.settimeout(_SILENT_S)
            kind, begun = "", False
            with self._get(connection, "/events") as answer:
                while line := answer.readline(_MOST_BYTES):
                    name, _, value = line.decode().rstrip("\n").partition(": ")
                    if name == "event":
                        kind = value
                    elif name == "data":
                        data = _parsed(value)
                        if kind == "snapshot":
                            self._compare(_checked(data)["run"])
                            begun = True
                        elif not begun or not isinstance(data, dict):
                            raise _NoDashboard
                        else:
                            _checked({"run": {}, "workers": [], **data})
                        yield kind, data

    def _compare(self, run: dict[str, Any]) -> None:
        told = run.get("run_id")
        if self._run_dir is not None and told != self._run_id:
            self._run_id = _run_id(self._run_dir)  # the run there may have begun anew
        known = self._run_id
        if known and told and known != told:
            name = run.get("run_name", "")
            raise _NotRunning(f"{self._run_dir} is not running: another run, {name}, answers at its address")

    @contextmanager
    def _asking(self) -> Iterator[http.client.HTTPConnection]:
        where = f"{self._host}:{self._port}"
        try:
            with closing(self._connect()) as connection:
                yield connection
        except ssl.SSLCertVerificationError as error:
            text = (
                f"its certificate cannot be verified ({error.verify_message}); its hash is in the link that the "
                f"coordinator prints (set {_LINK}), and in its run directory (--run-dir)"
            )
            raise _Denied(text) from None
        except (ConnectionResetError, ConnectionAbortedError, BrokenPipeError):
            tls = f"; or it speaks TLS: then set {_LINK} to the link that the coordinator prints"
            raise _HungUp(where, "hung up without a whole answer", "" if self._secure else tls) from None
        except ssl.SSLError as error:
            raise _HungUp(where, f"does not speak TLS as a dashboard does ({error.reason})") from None
        except (http.client.BadStatusLine, http.client.UnknownProtocol, _NoDashboard):  # what it said: for no eyes
            raise UsageError(f"what listens at {where} {_NO_DASHBOARD}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(where, str(error) or type(error).__name__, _TIMEOUT_S) from None

    def _connect(self) -> http.client.HTTPConnection:
        if not self._secure:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
            connection.connect()
            return connection
        context = ssl.create_default_context()
        if self._certificate:  # its own: known by its hash
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        secure = http.client.HTTPSConnection(self._host, self._port, timeout=_TIMEOUT_S, context=context)
        secure.auto_open = 0  # a connection that breaks is not made anew without a look at the certificate
        secure.connect()
        if self._certificate:
            seen = secure.sock.getpeercert(binary_form=True) or b""
            if not hmac.compare_digest(hashlib.sha256(seen).digest(), self._certificate):
                secure.close()
                raise _Denied("the dashboard's certificate is not the one that its link names")
        return secure

    def _get(self, connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        if answer.status in (401, 403, 503):
            body = answer.read(_MOST_BYTES).decode(errors="replace")
            said = f"the dashboard says: {body.strip()[:200] or f'{answer.status} {answer.reason}'}"
            raise ValueError(said) if answer.status == 503 else _Denied(said)  # that many look at it already
        if answer.status != 200:
            raise ValueError(f"it answers {answer.status} {answer.reason}: no dashboard of this project?")
        return answer


@contextmanager
def _hung_up(connection: http.client.HTTPConnection, seconds: float) -> Iterator[None]:
    """Within, the connection ends after so long: a socket's timeout counts from the last byte on.

    Raises Unreachable then.
    """
    over, socket = threading.Event(), connection.sock

    def hang_up() -> None:
        over.set()
        with suppress(OSError):  # it has ended by itself
            socket.shutdown(SHUT_RDWR)

    timer = threading.Timer(seconds, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError):
        if not over.is_set():
            raise
        where = f"{connection.host}:{connection.port}"
        raise Unreachable(where, "no whole answer came", seconds) from None
    finally:
        timer.cancel()


def _parsed(text: str | bytes) -> Any:
    """Raises _NoDashboard."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _NoDashboard from None


def _checked(found: Any) -> dict[str, Any]:
    """What is shown, of the right kinds. Raises _NoDashboard."""
    if not isinstance(found, dict) or not all(name in found for name in _SHOWN):
        raise _NoDashboard
    run, status, workers = (found[name] for name in _SHOWN)
    if not isinstance(run, dict) or not isinstance(status, dict) or "state" not in status:
        raise _NoDashboard
    if not isinstance(workers, list) or not all(isinstance(worker, dict) for worker in workers):
        raise _NoDashboard
    removed = found.get("removed", [])
    if not isinstance(removed, list):
        raise _NoDashboard
    ids = (*removed, *(worker.get("worker_id") for worker in workers))
    numbers = [*map(status.get, _OF_STATUS), *(worker.get(name) for worker in workers for name in _OF_WORKER)]
    right = (
        all(isinstance(one, str) for one in ids)
        and all(map(_is_count, map(status.get, _COUNTS)))
        and all(_is_count(value) or isinstance(value, float) or value in _NOT_FINITE for value in numbers)
        and math.isfinite(number(status.get("uptime_s") or 0))
    )
    if not right:
        raise _NoDashboard
    return found


def _is_count(value: object) -> bool:
    """Or nothing."""
    return value is None or (isinstance(value, int) and abs(value) < 1 << 63)


class _Following(threading.Thread):
    """Reads the dashboard's events as they come: the last one says how the run ended, just before nobody answers."""

    def __init__(self, dashboard: _Dashboard) -> None:
        super().__init__(name="w5xde-status", daemon=True)
        self._dashboard = dashboard
        self.found: dict[str, Any] | None = None  #: what is to be shown; replaced as a whole
        self.error: Exception | None = None
        self.news, self.ended = threading.Event(), threading.Event()

    def run(self) -> None:
        """Until the run ends, or nobody answers for long (``error``)."""
        try:
            self._follow()
        except Exception as error:
            self.error = error
        finally:
            self.ended.set()
            self.news.set()

    def _follow(self) -> None:
        answered = time.monotonic()
        while True:
            try:
                for kind, data in self._dashboard.events():
                    self.found, answered = _folded(self.found, kind, data), time.monotonic()
                    self.news.set()
                    if self.found["status"].get("state") in _ENDED:
                        return
            except Unreachable as error:
                if self.found is None:
                    raise
                if (tried_s := time.monotonic() - answered) > _PATIENCE_S:
                    raise Unreachable(error.peer, error.reason, tried_s) from None
            time.sleep(_AGAIN_S)


def _folded(known: dict[str, Any] | None, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """A snapshot, or what was known with an update to it, as ``_Dashboard.read`` answers."""
    if known is None or kind == "snapshot":
        return {name: data[name] for name in _SHOWN}
    removed = data.get("removed", ())
    stayed = [worker for worker in known["workers"] if worker["worker_id"] not in removed]
    workers = {worker["worker_id"]: worker for worker in (*stayed, *data.get("workers", ()))}
    return {"run": known["run"], "status": data["status"], "workers": list(workers.values())}


# -- what is shown


def _summary(found: dict[str, Any]) -> list[str]:
    run, status = found["run"], found["status"]
    step, total = status.get("step") or 0, status.get("total_steps") or 0
    share = f" of {total:,} ({100 * step // total} %)" if total else ""
    lines = [f"{run.get('run_name', '')}: {status.get('state')}, step {step:,}{share}"]
    parts = []
    if status.get("loss") is not None:
        parts.append(f"loss {float(status['loss']):.4f}")
    if status.get("samples_per_s") is not None:
        parts.append(f"{wording.short(float(status['samples_per_s']))} samples/s")
    vain, leaves = status.get("leaves_in_vain") or 0, status.get("leaves") or 0
    if vain:
        parts.append(f"{100 * vain / (vain + leaves):.1f} % wasted")
    if size := status.get("sample_bytes"):
        parts.append(f"{wording.size(size)} a sample")
    if bad := status.get("bad_samples"):
        parts.append(f"{bad:,} bad samples left out")
    parts.append(f"up {wording.duration(float(status.get('uptime_s') or 0))}")
    lines.append(" · ".join(parts))
    if status.get("waits_for"):
        lines.append(f"waiting: {status['waits_for']}")
    return [wording.clean(line) for line in lines]


def _text(name: str) -> Callable[[_Worker], str]:
    return lambda worker: str(worker.get(name) or "")


def _figure(name: str, show: Callable[[float], str]) -> Callable[[_Worker], str]:
    return lambda worker: "-" if worker.get(name) is None else show(float(worker[name]))


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _memory(worker: _Worker) -> str:
    used = worker.get("device_bytes") or worker.get("host_bytes")
    return wording.size(float(used)) if used else "-"


#: The table's columns: what stands in each of a worker.
_COLUMNS: dict[str, Callable[[_Worker], str]] = {
    "worker": _text("name"),
    "state": _text("state"),
    "device": _text("device"),
    "busy": _figure("busy", _percent),
    "leaves/s": _figure("leaves_per_s", wording.short),
    "share": _figure("share", _percent),
    "link": _text("link"),
    "round trip": _figure("rtt_s", wording.brief),
    "sent": _figure("bytes_sent", wording.size),
    "received": _figure("bytes_received", wording.size),
    "memory": _memory,
    "data from": _text("data_from"),
    "waits for": _text("waits_for"),
}
_WORDS = ("worker", "state", "device", "link", "data from", "waits for")  # the other columns are numbers


def _rows(workers: Sequence[_Worker]) -> Iterator[dict[str, str]]:
    """A cell for each column, by its name; who has left comes last."""
    for worker in sorted(workers, key=lambda worker: (bool(worker.get("left")), str(worker.get("name")))):
        yield {name: wording.clean(of(worker).replace("\n", " "), limit=100) for name, of in _COLUMNS.items()}


def _fitting(rows: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns that fit beside each other, whole."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in _COLUMNS}
    last = "waits for"
    words = [word for row in rows for word in row[last].split()]
    widths[last] = max(min(widths[last], _LEAST_WAITS), *map(len, ("waits", *words)))
    for name in _DISPENSABLE:
        if sum(widths.values()) + _APART * len(widths) <= width:
            break
        del widths[name]
    return list(widths)


class _Screen:
    """Text to standard output: by rich where it is installed, plain otherwise."""

    def __init__(self) -> None:
        try:
            from rich.console import Console
        except ImportError:
            self._console = None
            note("plain text: rich is not installed (pip install 'w5xde-async[dashboard]')")
        else:
            width = None if sys.stdout.isatty() else _WIDE
            self._console = Console(no_color=bool(os.environ.get("NO_COLOR")) or None, highlight=False, width=width)

    @property
    def live(self) -> bool:
        """Whether what was shown can be replaced."""
        console = self._console
        return console is not None and console.is_terminal and not console.is_dumb_terminal

    def show(self, found: dict[str, Any]) -> bool:
        """Whether anybody reads it."""
        if self._console is not None:
            with self._console.capture() as printed:  # it has words and an exit code of its own for a closed pipe
                self._console.print(self.content(found))
            return say(printed.get())
        rows = [tuple(_COLUMNS), *(tuple(row.values()) for row in _rows(found["workers"]))]
        return say("\n".join([*_summary(found), *wording.table(rows, words=len(_COLUMNS))]) + "\n")

    def content(self, found: dict[str, Any]) -> Any:
        """For rich."""
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        title, *rest = _summary(found)
        assert self._console is not None
        rows = list(_rows(found["workers"]))
        if not rows:
            return Group(Text(title, style="bold"), *(Text(line) for line in [*rest, "no worker has joined"]), Text(""))
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        shown = _fitting(rows, self._console.width)
        for name in shown:
            table.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=name != "waits for")
        for row in rows:
            gone = row["state"] in ("left", "lost")
            table.add_row(*(Text(row[name]) for name in shown), style="dim" if gone else None)
        left_out = ", ".join(name for name in _COLUMNS if name not in shown)
        more = [Text(f"a wider terminal also shows {left_out}", style="dim")] if left_out else []
        return Group(Text(title, style="bold"), *(Text(line) for line in rest), table, *more)


def _watch(dashboard: _Dashboard, interval_s: float) -> None:
    screen = _Screen()
    if not screen.live:
        for found in _again(dashboard, interval_s):
            if not screen.show(found):
                return
        return
    from rich.live import Live

    with Live(console=screen._console, auto_refresh=False) as live:
        for found in _again(dashboard, interval_s):
            live.update(screen.content(found), refresh=True)


def _again(dashboard: _Dashboard, interval_s: float) -> Iterator[dict[str, Any]]:
    """What is new, every ``interval_s`` and at the end of the run. Raises Unreachable where that is not seen."""
    following = _Following(dashboard)
    following.start()
    while not following.ended.is_set():
        while not following.news.wait(1.0):  # in pieces: Ctrl-C ends it everywhere
            pass
        following.news.clear()
        if not following.ended.is_set() and following.found is not None:
            yield following.found
            following.ended.wait(interval_s)
    if following.error is not None:
        raise following.error
    if following.found is not None:
        yield following.found


if __name__ == "__main__":
    sys.exit(main())
