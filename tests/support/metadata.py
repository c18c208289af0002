"""Metadata services of clouds that speak as they are documented to, on loopback.

Amazon EC2    IMDSv2 alone: 401 without a session token, 400 for a token without a lifetime; 404 until the notice
Google        403 without ``Metadata-Flavor``; an ETag; ``wait_for_change`` with ``last_etag`` is answered when the
              value is another one or ``timeout_sec`` is over
Azure         400 without ``Metadata: true`` or a version
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

KINDS = ("aws", "gcp", "azure")
NAME = "vm-0"


class Metadata:
    """What one service has to say. ``announce`` gives the notice; ``asked`` counts requests by path."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.asked: list[str] = []
        self.url = ""
        self.tokens: set[str] = set()
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self.noticed = self.ended = False

    def announce(self) -> None:
        """The machine is to be taken back."""
        with self._changed:
            self.noticed = True
            self.events.append(event("Preempt", NAME))
            self._changed.notify_all()

    def end(self) -> None:
        """Answer everybody who waits."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def answer(self, method: str, target: str, headers: Any) -> tuple[int, str, dict[str, str]]:
        """Status, body and headers."""
        path, asked = urlsplit(target).path, parse_qs(urlsplit(target).query)
        self.asked.append(f"{method} {path}")
        return getattr(self, f"_{self.kind}")(method, path, asked, headers)  # type: ignore[no-any-return]

    def _aws(self, method: str, path: str, asked: Any, headers: Any) -> tuple[int, str, dict[str, str]]:
        if (method, path) == ("PUT", "/latest/api/token"):
            lifetime = headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if not lifetime.isdecimal() or not 1 <= int(lifetime) <= 21600:
                return 400, "", {}
            self.tokens.add(token := f"token {len(self.asked)}")
            return 200, token, {}
        if headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return 401, "", {}
        if (method, path) != ("GET", "/latest/meta-data/spot/instance-action") or not self.noticed:
            return 404, "not found", {}
        return 200, json.dumps({"action": "terminate", "time": "2017-09-18T08:22:00Z"}), {}

    def _gcp(self, method: str, path: str, asked: Any, headers: Any) -> tuple[int, str, dict[str, str]]:
        flavor = {"Metadata-Flavor": "Google"}
        if headers.get("Metadata-Flavor") != "Google":
            return 403, "Missing Metadata-Flavor:Google header.", flavor
        if (method, path) != ("GET", "/computeMetadata/v1/instance/preempted"):
            return 404, "", flavor
        with self._changed:
            if asked.get("wait_for_change") == ["true"]:
                (last,), (seconds,) = asked["last_etag"], asked["timeout_sec"]
                self._changed.wait_for(lambda: self.ended or self._etag() != last, float(seconds))
            return 200, "TRUE" if self.noticed else "FALSE", flavor | {"ETag": self._etag()}

    def _etag(self) -> str:
        return "eb" if self.noticed else "ea"

    def _azure(self, method: str, path: str, asked: Any, headers: Any) -> tuple[int, str, dict[str, str]]:
        if headers.get("Metadata") != "true" or "api-version" not in asked:
            return 400, json.dumps({"error": "Bad request. Required metadata header not specified"}), {}
        if path == "/metadata/instance/compute/name" and asked.get("format") == ["text"]:
            return 200, NAME, {}
        if path == "/metadata/scheduledevents":
            return 200, json.dumps({"DocumentIncarnation": len(self.events), "Events": self.events}), {}
        return 404, "", {}


def event(kind: str, *machines: str) -> dict[str, Any]:
    """One of Azure's scheduled events."""
    return {
        "EventId": "A123BC45-1234-5678-AB90-ABCDEF123456", "EventType": kind, "ResourceType": "VirtualMachine",
        "Resources": list(machines), "EventStatus": "Scheduled", "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT",
        "Description": "", "EventSource": "Platform", "DurationInSeconds": -1,
    }  # fmt: skip


@contextmanager
def metadata(kind: str) -> Iterator[Metadata]:
    """One of them, at ``url``."""
    service = Metadata(kind)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, text, headers = service.answer(self.command, self.path, self.headers)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(text))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        service.url = f"http://127.0.0.1:{server.server_address[1]}"
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield service
        finally:
            service.end()
            server.shutdown()
            serving.join()
