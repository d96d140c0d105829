"""A web page for labelling pictures: `trident web`."""

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trident.cli import options as opt
from trident.cli.app import app
from trident.errors import TridentError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

PER_CLIENT = 4  # requests at a time, beyond localhost
NOT_ONLY_HERE = (
    "--host {} lets other machines connect, and what they send is not encrypted, pictures and token alike: "
    "use a network that you trust, or a proxy that speaks HTTPS (docs/deploy.md)"
)


@app.command(short_help="Label pictures in the browser.")
def web(
    backbone: opt.Backbone = "auto",
    weights: opt.Weights = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on; by default only this machine can connect.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--public-name", "--allow-host", metavar="NAME", help="Also accept this host name; may be repeated."
        ),
    ] = None,
    pictures: Annotated[int, typer.Option(min=3, help="Maximum number of pictures in one request.")] = 300,
    megabytes: Annotated[float, typer.Option(min=0.001, max=1e6, help="Maximum size of one picture's file.")] = 20,
    request_megabytes: Annotated[float, typer.Option(min=0.001, max=1e6, help="Maximum size of one request.")] = 500,
    megapixels: Annotated[float, typer.Option(min=0.001, max=89, help="Maximum size of one picture.")] = 50,
    seconds: Annotated[
        float, typer.Option(min=0.01, max=1e6, help="Maximum time for one request, including waiting.")
    ] = 120,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    device: opt.Device = "auto",
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the token; instead of $TRIDENT_TOKEN."),
    ] = None,
    proxies: Annotated[
        list[str] | None,
        typer.Option(
            "--proxy",
            metavar="ADDRESS",
            help="Believe X-Forwarded-For and -Proto headers from this address or network, that of a reverse proxy; "
            "may be repeated.",
        ),
    ] = None,
    per_client: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of open requests of one client.",
            show_default=f"{PER_CLIENT}; where no token is needed, no limit",
        ),
    ] = None,
    drain: Annotated[
        float,
        typer.Option(min=0, max=3600, help="Seconds to go on after SIGTERM, with /health answering 503."),
    ] = 0,
) -> None:
    """Serve a web page for labelling pictures from a few examples. Needs the 'web' extra.

    It labels as 'trident predict' does. The pictures stay in the visitor's browser. Each request sends them, and the
    server stores nothing.

    Beyond localhost ('--host 0.0.0.0', or behind a '--proxy') visitors need a token: that of $TRIDENT_TOKEN or
    --token-file, or a new one, which is printed as a part of the address.
    """
    try:
        import python_multipart  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise TridentError("trident web needs the web extra: pip install 'trident-fewshot[web]'") from error
    from trident.data.decoding_process import DecodingProcesses
    from trident.web.limits import MEGA, Limits
    from trident.web.serve import address_of, check_proxies, listen, make_server, run
    from trident.web.service import Service, chosen_token, is_loopback

    token = chosen_token(token_file)
    check_proxies(proxies or ())
    with listen(host, port) as listening:  # before loading torch, so that a busy port fails fast
        address = address_of(listening)
        if token is None and (proxies or not is_loopback(listening.getsockname()[0])):
            token = secrets.token_urlsafe(32)
            address += f"?token={token}"
        limits = Limits(
            pictures=pictures,
            file_bytes=int(megabytes * MEGA),
            request_bytes=int(request_megabytes * MEGA),
            pixels=int(megapixels * MEGA),
            seconds=seconds,
            per_client=per_client or (Limits.per_client if token is None else PER_CLIENT),
        )
        service = Service(names or (), token)
        processes = DecodingProcesses()
        service.on_stop = processes.close
        if not is_loopback(listening.getsockname()[0]):
            print(f"trident: warning: {NOT_ONLY_HERE.format(host)}", file=sys.stderr, flush=True)

        def load() -> "ASGIApp":
            from trident.web.app import make_routes
            from trident.web.networks import open_network

            network = open_network(backbone, weights, opt.device_of(device))
            if network.hint is not None:
                print(network.hint, file=sys.stderr)
            return make_routes(network, limits, service.metrics, processes)

        def ready() -> None:
            print(f"{address} is ready; Ctrl-C stops it", flush=True)
            if browser:
                import webbrowser

                webbrowser.open(address)

        run(make_server(service, proxies or (), drain), listening, load, ready)
