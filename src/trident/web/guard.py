"""Keeps other sites out: their pages, open in the same browser, can neither send requests here nor read answers."""

import asyncio
import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_REST_SECONDS = 2.0  # for the rest of a request when the server is stopped
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Guard:
    """Passes on requests that are meant for this server, and adds security headers to every answer."""

    def __init__(self, app: ASGIApp, names: Iterable[str] = ()):
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        started, received = False, False

        async def receive_and_note() -> Message:
            nonlocal received
            message = await receive()
            received = not message.get("more_body")  # also when the client is gone
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers["cache-control"] = "no-store" if scope["path"].startswith("/api/") else "no-cache"
            await send(message)

        objection = self._objection(scope["scheme"], scope["method"], Headers(scope=scope))
        app = self._app if objection is None else JSONResponse({"error": objection}, 403)
        try:
            await app(scope, receive_and_note, send_with_headers)
        except asyncio.CancelledError:  # the server is stopping and no longer waits for this request
            if not started:
                with suppress(TimeoutError):  # most clients read the answer only when they have sent everything
                    async with asyncio.timeout(_REST_SECONDS):
                        while not received:
                            await receive_and_note()
                await JSONResponse({"error": "the server is being stopped"}, 503)(scope, receive, send_with_headers)

    def _objection(self, scheme: str, method: str, headers: Headers) -> str | None:
        host = headers.get("host", "")
        if not self._is_known(host):
            # Stops DNS rebinding: a foreign host name that points to this machine.
            return f"unknown host name '{host[:100]}': start the server with --public-name to accept it"
        if method in ("GET", "HEAD"):
            return None
        origin = headers.get("origin")
        if origin is not None and _place(origin) != (scheme, host):
            hint = " (behind a proxy that speaks HTTPS, start the server with --proxy)" if scheme == "http" else ""
            hint = hint if _place(origin) == ("https", host) else ""
            return f"requests from pages of '{origin[:100]}' are not answered{hint}"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "requests from pages of other sites are not answered"
        return None

    def _is_known(self, host: str) -> bool:
        """IP addresses are safe; host names must be known."""
        try:
            parts = urlsplit(f"//{host}")
            name, _ = parts.hostname or "", parts.port  # a port that is none is an error
        except ValueError:
            return False
        if parts.netloc != host or "@" in host:
            return False
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _place(origin: str) -> tuple[str, str] | None:
    try:
        parts = urlsplit(origin)
    except ValueError:  # not an address
        return None
    return parts.scheme, parts.netloc
