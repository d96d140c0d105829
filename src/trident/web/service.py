"""The server around its routes: who is let in, health and metrics, and the wait until the network is loaded."""

import asyncio
from collections.abc import Callable, Iterable

from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from trident.web.access import TokenGate
from trident.web.guard import Guard
from trident.web.metrics import Metrics, MetricsMiddleware

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
        self._app = MetricsMiddleware(Guard(inner, names), self.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            await self._health()(scope, receive, send)
        elif scope["path"] == "/metrics":
            await PlainTextResponse(self.metrics.text(), media_type=_CONTENT_TYPE)(scope, receive, send)
        else:
            while self.routes is None:
                await asyncio.sleep(0.05)
            await self.routes(scope, receive, send)

    def _health(self) -> JSONResponse:
        status = "stopping" if self.stopping else "loading" if self.routes is None else "ready"
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)
