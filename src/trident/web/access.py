"""The token: beyond localhost, only those who know it are answered."""

import ipaddress
import os
import re
import secrets
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

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
            return self._cookie(request, in_address) if self._is_right(in_address) else _unauthorized("is wrong")
        kind, _, sent = request.headers.get("authorization", "").partition(" ")
        bearer = sent.strip() if kind.lower() == "bearer" else None
        given = [one for one in (bearer, request.cookies.get(COOKIE)) if one]
        if any(self._is_right(one) for one in given):
            return None
        return _unauthorized("is wrong" if given else "is missing")

    def _is_right(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self._token)

    def _cookie(self, request: Request, token: str) -> Response:
        answer = HTMLResponse(_GO_ON)
        https = request.scope["scheme"] == "https"
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=https)
        return answer


def _unauthorized(what: str) -> Response:
    said = f"the token {what}: open the page with ?token=... in its address, or send 'Authorization: Bearer ...'"
    return JSONResponse({"error": said}, 401, {"www-authenticate": "Bearer"})


def _is_local(request: Request) -> bool:
    """Requests that a proxy on this machine passes on for others are not local."""
    forwarded = {"forwarded", "x-forwarded-for"} & set(request.headers)
    return request.client is not None and not forwarded and is_loopback(request.client.host)


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


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


def new_token() -> str:
    return secrets.token_urlsafe(32)
