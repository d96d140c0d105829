"""The server and its socket."""

import asyncio
import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from trident.errors import TridentError
from trident.web.connections import FairProtocol
from trident.web.service import Service

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
