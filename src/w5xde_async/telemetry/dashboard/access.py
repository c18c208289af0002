"""Who may look: on loopback whoever is on this machine, elsewhere whoever has the token.

The token comes once in the address (``?token=``), is taken from there into a cookie and leaves the address bar by a
redirect; programs may send it as ``Authorization: Bearer``. It is compared in constant time and never logged. On
loopback the Host header must name this machine, so that a page elsewhere cannot point its own name here and read along
(DNS rebinding). Everything is read-only: methods other than GET and HEAD are refused.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from urllib.parse import urlencode

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from w5xde_async.telemetry.links import HASH_NAME

_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::[0-9]*)?")
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_OPEN_PATHS = {"/health"}  # says nothing about the run
_HEADERS: Mapping[bytes, bytes] = {
    b"content-security-policy": (
        b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
}


class Access:
    """ASGI middleware. ``token`` empty: loopback."""

    def __init__(self, app: ASGIApp, *, token: str, host: str, secure: bool) -> None:
        self._app, self._token, self._secure = app, token.encode(), secure
        self._hosts = _LOOPBACK | {host.strip("[]").lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = self._judge(scope)

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS.items()]
            await send(message)

        await (answer or self._app)(scope, receive, dressed)

    def _judge(self, scope: Scope) -> Response | None:
        """None lets the request through."""
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("read-only\n", 405, {"allow": "GET, HEAD"})
        asked = HTTPConnection(scope)
        if not self._token:
            if (name := _name_of(asked.headers.get("host", ""))) and name in self._hosts:
                return None
            return PlainTextResponse("this dashboard answers to the names of its own machine only\n", 403)
        if scope["path"] in _OPEN_PATHS:
            return None
        # Named after the port, since cookies are shared by all ports of a host.
        cookie = f"w5xde_{(scope.get('server') or ('', 0))[1]}"
        if self._equal(asked.query_params.get("token", "")):
            return self._let_in(asked, cookie)
        bearer = asked.headers.get("authorization", "")
        if bearer[:7].lower() == "bearer " and self._equal(bearer[7:].strip()):
            return None
        if self._equal(asked.cookies.get(cookie, "")):
            return None
        return PlainTextResponse("a token is needed: open the link that the coordinator has printed\n", 401)

    def _let_in(self, asked: HTTPConnection, cookie: str) -> Response | None:
        if asked.scope["path"] != "/":
            return None  # a program: it sends the token each time
        given = asked.query_params.multi_items()
        rest = urlencode([(name, value) for name, value in given if name not in ("token", HASH_NAME)])
        answer = RedirectResponse("/" + (f"?{rest}" if rest else ""), 303)
        # lax: strict keeps it back where the link was clicked on another site's page, and nothing here can be changed.
        answer.set_cookie(cookie, self._token.decode(), path="/", httponly=True, samesite="lax", secure=self._secure)
        return answer

    def _equal(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token)


def _name_of(host: str) -> str:
    """``localhost:5556`` -> ``localhost``, ``[::1]:5556`` -> ``::1``; "" for what is no host and no port."""
    found = _HOST.fullmatch(host)
    return "" if found is None else (found[1] or found[2]).lower()
