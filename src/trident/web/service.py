"""The server around its routes: who is let in, health and metrics, and the wait until the network is loaded."""

import asyncio
import os
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trident.web.access import Guard, TokenGate

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
