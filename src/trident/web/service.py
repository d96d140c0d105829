"""The server around its routes: who is let in, health and metrics, and the wait until the network is loaded.

`Guard` keeps other sites out: their pages, open in the same browser, can neither send requests here nor read answers.
`TokenGate`: beyond localhost, only those who know the token are answered.
"""

import asyncio
import ipaddress
import os
import re
import secrets
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trident.errors import TridentError
from trident.files import read_regular

COOKIE = "trident-token"
_SHAPE = re.compile(r"[A-Za-z0-9._~-]{16,200}")  # safe in addresses, cookies and headers; too long to guess
# Not a redirect: after a link from another site, browsers would follow it without a cookie that is SameSite=Strict.
_GO_ON = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>trident</title><link rel="icon" href="data:,">'
    '<meta http-equiv="refresh" content="0; url=./"></head><body><a href="./">Go on to the page</a></body></html>'
)


class TokenGate:
    """Passes on requests with the token: in the cookie, or in the header `Authorization: Bearer`.

    The page's address may have it as `?token=`. The answer is the cookie, and the browser goes on to the address
    without the token. `/health` needs no token, and `/metrics` none on the machine itself.
    """

    def __init__(self, app: ASGIApp, token: str):
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http":
            app = self._refusal(Request(scope)) or app
        await app(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        """The answer to a request that is not passed on."""
        path, in_address = request.scope["path"], request.query_params.get("token")
        if path == "/health" or (path == "/metrics" and _is_local(request)):
            return None
        if path == "/" and request.method == "GET" and in_address is not None:
            if not self._is_right(in_address):
                return _unauthorized("is wrong")
            answer, https = HTMLResponse(_GO_ON), request.scope["scheme"] == "https"
            answer.set_cookie(COOKIE, in_address, httponly=True, samesite="strict", secure=https)
            return answer
        kind, _, sent = request.headers.get("authorization", "").partition(" ")
        bearer = sent.strip() if kind.lower() == "bearer" else None
        given = [one for one in (bearer, request.cookies.get(COOKIE)) if one]
        if any(self._is_right(one) for one in given):
            return None
        return _unauthorized("is wrong" if given else "is missing")

    def _is_right(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self._token)


def _unauthorized(what: str) -> Response:
    said = f"the token {what}: open the page with ?token=... in its address, or send 'Authorization: Bearer ...'"
    return JSONResponse({"error": said}, 401, {"www-authenticate": "Bearer"})


def _is_local(request: Request) -> bool:
    """Requests that a proxy on this machine passes on for others are not local."""
    forwarded = {"forwarded", "x-forwarded-for"} & set(request.headers)
    return request.client is not None and not forwarded and is_loopback(request.client.host)


def ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for what is not an IP address, such as a host name."""
    with suppress(ValueError):
        return ipaddress.ip_address(address)
    return None


def is_loopback(address: str) -> bool:
    ip = ip_of(address)
    return ip is not None and ip.is_loopback


def chosen_token(file: Path | None) -> str | None:
    """The token from a file, or from the environment; None if there is neither."""
    if file is not None:
        try:
            return _checked(read_regular(file).decode().strip(), f"--token-file {file}")
        except OSError as error:
            raise TridentError(f"--token-file {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise TridentError(f"--token-file {file}: it is not a text file") from error
    token = os.environ.get("TRIDENT_TOKEN")
    return None if token is None else _checked(token, "TRIDENT_TOKEN")


def _checked(token: str, source: str) -> str:
    if not _SHAPE.fullmatch(token):
        raise TridentError(f"{source}: a token must have 16 to 200 characters, of A-Z a-z 0-9 . _ ~ -")
    return token


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
        return parts.netloc == host and "@" not in host and (name in self._names or ip_of(name) is not None)


def _place(origin: str) -> tuple[str, str] | None:
    try:
        parts = urlsplit(origin)
    except ValueError:  # not an address
        return None
    return parts.scheme, parts.netloc


_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of the Prometheus text format


class Service:
    """Answers `/health` and `/metrics` at any time. Other requests wait until there are `routes`."""

    def __init__(self, names: Iterable[str] = (), token: str | None = None):
        """`names`: accepted host names besides localhost and IP addresses. Without a token everyone is let in."""
        self.metrics = Metrics()
        self.routes: ASGIApp | None = None
        self.stopping = False
        self.on_stop: Callable[[], None] = lambda: None  # called when every request has its answer
        inner = self._answer if token is None else TokenGate(self._answer, token)
        self._guarded = Guard(inner, names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every request is added to the metrics, also those that are refused."""
        began, status = time.monotonic(), 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._guarded(scope, receive, send_and_note)
        finally:
            self.metrics.add(scope.get("path", ""), status, time.monotonic() - began)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            status = "stopping" if self.stopping else "loading" if self.routes is None else "ready"
            await JSONResponse({"status": status}, 200 if status == "ready" else 503)(scope, receive, send)
        elif scope["path"] == "/metrics":
            await PlainTextResponse(self.metrics.text(), media_type=_CONTENT_TYPE)(scope, receive, send)
        else:
            while self.routes is None:
                await asyncio.sleep(0.05)
            await self.routes(scope, receive, send)


_KINDS = {"/": "page", "/api/about": "about", "/api/label": "label", "/api/look": "look"}
_KINDS |= {"/health": "health", "/metrics": "metrics"}
_SECONDS = (0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 240)  # upper ends of the histogram's buckets


class Metrics:
    """Counts and times of requests, as text that Prometheus reads. Nothing in it comes from what visitors send."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()  # (kind, status)
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(_SECONDS) + 1))
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.pictures = 0
        self.queue_length: Callable[[], int] = lambda: 0

    def add(self, path: str, status: int, seconds: float) -> None:
        kind = _KINDS.get(path, "other")
        self._requests[kind, status] += 1
        self._buckets[kind][bisect_left(_SECONDS, seconds)] += 1
        self._seconds[kind] += seconds

    def text(self) -> str:
        return "\n".join([*self._lines(), ""])

    def _lines(self) -> Iterator[str]:
        yield from _head("trident_requests_total", "counter", "Answered requests, by kind and HTTP status.")
        for (kind, status), n in sorted(self._requests.items()):
            yield f'trident_requests_total{{kind="{kind}",status="{status}"}} {n}'
        name = "trident_request_seconds"
        yield from _head(name, "histogram", "Seconds from a request's header to the end of its answer.")
        for kind, buckets in sorted(self._buckets.items()):
            for place, end in enumerate((*_SECONDS, "+Inf")):
                yield f'{name}_bucket{{kind="{kind}",le="{end}"}} {sum(buckets[: place + 1])}'
            yield f'{name}_sum{{kind="{kind}"}} {self._seconds[kind]:.6f}'
            yield f'{name}_count{{kind="{kind}"}} {sum(buckets)}'
        yield from _head("trident_pictures_labelled_total", "counter", "Pictures of piles that were labelled.")
        yield f"trident_pictures_labelled_total {self.pictures}"
        yield from _head("trident_queue_length", "gauge", "Requests that are received, waiting or worked on.")
        yield f"trident_queue_length {self.queue_length()}"
        statm = Path("/proc/self/statm")  # Linux only
        if statm.exists():
            yield from _head("process_resident_memory_bytes", "gauge", "Memory of this process.")
            yield f"process_resident_memory_bytes {int(statm.read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')}"


def _head(name: str, kind: str, described: str) -> Iterator[str]:
    yield f"# HELP {name} {described}"
    yield f"# TYPE {name} {kind}"
