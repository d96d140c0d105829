"""Connections that only wait give way to others, so that idle and slow clients cannot lock the server."""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0  # for a whole request's header; uvicorn has no such limit
READ_SECONDS = 60.0  # for the client to read what is ready for it


class FairProtocol(H11Protocol):
    """Uvicorn's protocol with two limits more: on the time that a connection waits for its client, and on their number.

    A connection waits while its client has yet to send a request's header, or to read an answer. If there are too
    many connections, one that waits is closed.
    """

    waiting_since: float | None = None
    _deadline: asyncio.TimerHandle | None = None
    _unread = False  # whether much of an answer waits to be read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.owner = client_of(self.client[0] if self.client else "")
        limit = self.limit_concurrency
        if limit is not None and len(self.connections) >= limit:
            others: Iterable[Any] = self.connections - {self}
            longest = longest_waiting(others)
            if longest is not None:
                longest.drop()
        self._wait(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self._stop_waiting_if_answering()

    def on_response_complete(self) -> None:
        if not self._unread:
            self._wait(HEADER_SECONDS)
        super().on_response_complete()  # it may begin with the next request

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = True
        self._wait(READ_SECONDS)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread = False
        self._wait(HEADER_SECONDS)
        self._stop_waiting_if_answering()

    def drop(self) -> None:
        """Close at once, without waiting until the client has read what was sent."""
        self.connections.discard(self)
        self.transport.abort()

    def _stop_waiting_if_answering(self) -> None:
        """While the server works on an answer, its client is not waited for."""
        if self.cycle is not None and not self.cycle.response_complete and not self._unread:
            self._stop_waiting()

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self.waiting_since = self.loop.time()
        self._deadline = self.loop.call_later(seconds, self.drop)

    def _stop_waiting(self) -> None:
        self.waiting_since = None
        if self._deadline is not None:
            self._deadline.cancel()


def longest_waiting(connections: Iterable[FairProtocol]) -> FairProtocol | None:
    """The connection that waits longest, of the client with the most waiting connections."""
    waiting = [(one.waiting_since, one) for one in connections if one.waiting_since is not None]
    held = Counter(one.owner for _, one in waiting)
    if not waiting:
        return None
    return min(waiting, key=lambda pair: (-held[pair[1].owner], pair[0]))[1]


def client_of(address: str) -> str:
    """The client that an address belongs to. With IPv6, a client is a /64 network of addresses."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(parsed.ipv4_mapped or ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
    return str(parsed)
