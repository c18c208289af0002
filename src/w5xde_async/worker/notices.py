"""Notices of a cloud that it takes this machine back, as its metadata service gives them to the machine itself.

Amazon EC2   a session token by PUT (IMDSv2), then ``spot/instance-action``: 404 until the notice, two minutes before
Google       ``instance/preempted``: an answer that waits for the change; half a minute before
Azure        Scheduled Events of this machine that end it: Preempt (half a minute before), Terminate, Reboot, Redeploy

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
https://cloud.google.com/compute/docs/instances/create-use-preemptible
https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events

Nothing is asked unless the person says of whom: these are requests to an address of the local link.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode, urlsplit

from w5xde_async.net.hanging import in_daemon_thread

logger = logging.getLogger(__name__)

_LINK_LOCAL = "http://169.254.169.254"
_TIMEOUT_S = 10.0
_MOST_BYTES = 1 << 20
_TOKEN_S = 6 * 3600
_WAITS_S = 60
_LEAST_S, _AGAIN_S = 1.0, 5.0  # between two looks, whatever is answered; after one in vain
_ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")
_AZURES_TAG = "7783-7084-3265-9085-8269-3286-77"  # of Hyper-V elsewhere it is another


class Service(Protocol):
    """A metadata service. ``every_s``: how long to wait between two looks."""

    every_s: float

    def look(self) -> str:
        """What is announced; "" for nothing. Blocking. Raises whatever a strange answer makes it raise."""


class Amazon:
    """Spot interruption notices of Amazon EC2."""

    every_s = 5.0

    def __init__(self, endpoint: str = "") -> None:
        self._endpoint, self._token = endpoint or _LINK_LOCAL, ""

    def look(self) -> str:
        """As ``Service.look``."""
        path = "/latest/meta-data/spot/instance-action"
        status, body, _ = _ask(self._endpoint, path, headers={"X-aws-ec2-metadata-token": self._given()})
        if status == 401:  # it has run out
            self._token = ""
            status, body, _ = _ask(self._endpoint, path, headers={"X-aws-ec2-metadata-token": self._given()})
        if status == 404:
            return ""
        notice = _object(_good(status, body))
        if not isinstance(notice.get("action"), str):
            raise ValueError("not a notice of EC2's")
        return f"EC2 is to {notice['action']} this machine at {notice.get('time')}"

    def _given(self) -> str:
        if not self._token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            status, body, _ = _ask(self._endpoint, "/latest/api/token", method="PUT", headers=headers)
            self._token = _good(status, body).strip()
        return self._token


class Google:
    """Preemption notices of Google Compute Engine."""

    every_s = 0.0  # an answer waits for the change

    def __init__(self, endpoint: str = "") -> None:
        self._endpoint, self._etag = endpoint or _LINK_LOCAL, ""

    def look(self) -> str:
        """As ``Service.look``; the first look answers at once, the others wait for a change."""
        path = "/computeMetadata/v1/instance/preempted"
        if self._etag:
            path += "?" + urlencode({"wait_for_change": "true", "last_etag": self._etag, "timeout_sec": _WAITS_S})
        answered = _ask(self._endpoint, path, headers={"Metadata-Flavor": "Google"}, timeout_s=_TIMEOUT_S + _WAITS_S)
        status, body, headers = answered
        if headers.get("metadata-flavor") != "Google":
            raise ValueError("whoever answers is not Google's metadata server")
        said = _good(status, body).strip()
        self._etag = headers.get("etag", "")
        if not self._etag:
            raise ValueError("no ETag")
        return "Google preempts this machine" if said == "TRUE" else ""


class Azure:
    """Scheduled events of Azure."""

    every_s = 1.0

    def __init__(self, endpoint: str = "") -> None:
        self._endpoint, self._name = endpoint or _LINK_LOCAL, ""

    def look(self) -> str:
        """As ``Service.look``."""
        if not self._name:
            self._name = self._get("/metadata/instance/compute/name?api-version=2021-02-01&format=text").strip()
        events = _object(self._get("/metadata/scheduledevents?api-version=2020-07-01")).get("Events")
        for event in events if isinstance(events, list) else ():
            if not isinstance(event, dict) or event.get("EventType") not in _ENDS:
                continue
            machines = event.get("Resources")
            if machines is None or (isinstance(machines, list) and self._name in machines):  # others of the set too
                return f"Azure announces {event['EventType']} of this machine, not before {event.get('NotBefore')}"
        return ""

    def _get(self, path: str) -> str:
        status, body, _ = _ask(
            self._endpoint, path, headers={"Metadata": "true"}, timeout_s=130.0
        )  # the first: minutes
        return _good(status, body)


CLOUDS: Mapping[str, Callable[[str], Service]] = {"aws": Amazon, "gcp": Google, "azure": Azure}


def service_of(told: str, machine: Path = Path("/sys/class/dmi/id")) -> Service | None:
    """The service that ``--watch-preemption`` names: ``aws``, ``gcp``, ``azure``, each also with ``=URL`` of who
    answers in its place, or ``auto``: by what ``machine`` says of itself. None where that is no cloud."""
    cloud, _, endpoint = told.partition("=")
    if cloud == "auto":
        cloud = _cloud(machine)
        logger.info("notices of the machine's end cloud=%s", cloud or "none that is known")
    return CLOUDS[cloud](endpoint) if cloud in CLOUDS else None


def _cloud(machine: Path) -> str:
    def said(name: str) -> str:
        try:
            return (machine / name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    vendor = said("sys_vendor")
    if vendor == "Microsoft Corporation" and said("chassis_asset_tag") == _AZURES_TAG:
        return "azure"
    return {"Amazon EC2": "aws", "Google": "gcp"}.get(vendor, "")


async def watch(service: Service, told: Callable[[str], None]) -> None:
    """Call ``told`` with the first notice, and return. A service that does not answer is asked again, and said once."""
    complained = False
    while True:
        began = time.monotonic()
        try:
            if notice := await in_daemon_thread(("notices", id(service)), service.look):
                return told(_shown(notice))
            complained, pause_s = False, max(service.every_s, _LEAST_S - (time.monotonic() - began))
        except Exception as error:  # who answers may be anybody: this is not to end because of what he says
            if not complained:
                logger.warning("no notices of the machine's end are heard, trying again reason=%s", _shown(str(error)))
            complained, pause_s = True, max(service.every_s, _AGAIN_S)
        await asyncio.sleep(pause_s)


def _shown(text: str) -> str:
    return "".join(filter(str.isprintable, text))[:200]


def _ask(
    endpoint: str, path: str, *, method: str = "GET", headers: Mapping[str, str], timeout_s: float = _TIMEOUT_S
) -> tuple[int, str, Mapping[str, str]]:
    """Status, text and headers of an answer, all of which is to be there within ``timeout_s``. No proxy is used."""
    where = urlsplit(endpoint)
    connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=timeout_s)
    over = threading.Event()

    def break_off(sock: socket.socket) -> None:  # its own timeout begins anew with each byte
        over.set()
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    try:
        connection.connect()
        late = threading.Timer(timeout_s, break_off, [connection.sock])
        late.daemon = True
        late.start()
        try:
            connection.request(method, where.path.rstrip("/") + path, headers=dict(headers))
            answer = connection.getresponse()
            text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
        finally:
            late.cancel()
        if over.is_set():
            raise TimeoutError(f"the answer was not complete after {timeout_s:g} s")
        return answer.status, text, {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def _good(status: int, body: str) -> str:
    if status != 200:
        raise ValueError(f"HTTP status {status}: {body.strip()[:100]}")
    return body


def _object(body: str) -> dict[str, object]:
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found
