"""The server and its socket."""

import socket

import uvicorn
from starlette.types import ASGIApp

from trident.errors import TridentError

_LAST_SECONDS = 3  # for open requests when the server is stopped
_CONNECTIONS = 200  # a browser keeps a handful open


def listen(host: str, port: int) -> socket.socket:
    """A socket at that address. With port 0 the system chooses a free one."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise TridentError(f"--host {host[:100]}: {why or 'unknown host'}") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen()
    except OSError as error:
        found.close()
        raise TridentError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from error
    return found


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Requests are not logged: file names are private."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            access_log=False,
            log_level="warning",
            server_header=False,
            ws="none",
            lifespan="off",
            limit_concurrency=_CONNECTIONS,
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
    )
