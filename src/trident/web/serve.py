"""The server, its socket and its connections."""

import asyncio
import ipaddress
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from trident.errors import TridentError
from trident.web.service import Service, ip_of

HEADER_SECONDS = 10.0  # for a whole request's header; uvicorn has no such limit
READ_SECONDS = 60.0  # for the client to read what is ready for it


class FairProtocol(H11Protocol):
    """Uvicorn's protocol with two limits more: on the time that a connection waits for its client, and on their number.

    So idle and slow clients cannot lock the server.
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
    ip = ip_of(address)
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ip.ipv4_mapped or ipaddress.IPv6Network((int(ip) >> 64 << 64, 64)))
    return address if ip is None else str(ip)


_LAST_SECONDS = 3  # for open requests when the server is stopped
_ANSWER_SECONDS = 3  # for those that are left, to be told so
_CONNECTIONS = 200  # a browser keeps a handful open


def listen(host: str, port: int) -> socket.socket:
    """A socket at that address. With port 0 the system chooses a free one."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise TridentError(f"--host {host[:100]}: {why or 'unknown host'}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        raise TridentError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from error
    return listening


def check_proxies(proxies: Sequence[str]) -> None:
    """Uvicorn itself would take anything, and then trust nobody."""
    for one in proxies:
        try:
            ipaddress.ip_network(one)
        except ValueError as error:
            raise TridentError(f"--proxy {one[:100]}: it must be an IP address or network: {error}") from error


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


class Server(uvicorn.Server):
    """After SIGTERM it goes on for `drain` seconds, unhealthy, so that a proxy sends new requests elsewhere."""

    def __init__(self, config: uvicorn.Config, service: Service, drain: float):
        super().__init__(config)
        self.service, self._drain, self.exit_code = service, drain, 130

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Uvicorn's own would raise the signal again at the end, and supervisors would read that as a failure."""
        first, self.service.stopping = not self.service.stopping, True
        self.exit_code = 0 if sig == signal.SIGTERM else 130
        if first and sig == signal.SIGTERM and self._drain > 0:
            later = threading.Timer(self._drain, setattr, (self, "should_exit", True))
            later.daemon = True  # another signal ends the wait
            later.start()
        else:
            self.force_exit |= self.should_exit and sig == signal.SIGINT
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Requests that are not answered in time are cancelled, and wait here for their last answer."""
        await super().shutdown(sockets)
        if self.server_state.tasks:
            await asyncio.wait(set(self.server_state.tasks), timeout=_ANSWER_SECONDS)
        self.service.on_stop()


def make_server(service: Service, proxies: Sequence[str] = (), drain: float = 0) -> Server:
    """Requests are not logged: file names are private. `proxies`: addresses whose forwarded headers are believed."""
    config = uvicorn.Config(
        service,
        http=FairProtocol,
        access_log=False,
        log_level="warning",
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        server_header=False,
        ws="none",
        lifespan="off",
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    return Server(config, service, drain)


def run(server: Server, listening: socket.socket, load: Callable[[], ASGIApp], ready: Callable[[], None]) -> None:
    """Serve until a signal comes. The routes are loaded meanwhile; `ready` is called when they are there."""

    def loaded(loading: Future[ASGIApp]) -> None:
        if loading.exception() is not None:
            server.should_exit = True
        elif not server.should_exit:
            server.service.routes = loading.result()
            ready()

    loading = ThreadPoolExecutor(1, "load").submit(load)
    loading.add_done_callback(loaded)
    try:
        server.run(sockets=[listening])
    finally:
        # Python would wait for threads that load the network or label pictures. There is nothing to save.
        if server.service.stopping or not loading.done():
            os._exit(server.exit_code)
    loading.result()  # raises what loading raised
