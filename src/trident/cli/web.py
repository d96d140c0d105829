"""A web page for labelling pictures: `trident web`."""

import sys
from typing import Annotated

import typer

from trident.cli.app import app
from trident.cli.label_inputs import Backbone, Weights
from trident.cli.options import Device, device_of
from trident.errors import TridentError


@app.command(short_help="Label pictures in the browser.")
def web(
    backbone: Backbone = "auto",
    weights: Weights = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on; by default only this machine can connect.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    names: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="Also accept this host name; may be repeated."),
    ] = None,
    pictures: Annotated[int, typer.Option(min=3, help="Maximum number of pictures in one request.")] = 300,
    megabytes: Annotated[float, typer.Option(min=0.001, max=1e6, help="Maximum size of one picture's file.")] = 20,
    request_megabytes: Annotated[float, typer.Option(min=0.001, max=1e6, help="Maximum size of one request.")] = 500,
    megapixels: Annotated[float, typer.Option(min=0.001, max=89, help="Maximum size of one picture.")] = 50,
    seconds: Annotated[
        float, typer.Option(min=0.01, max=1e6, help="Maximum time for one request, including waiting.")
    ] = 120,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    device: Device = "auto",
) -> None:
    """Serve a web page for labelling pictures from a few examples. Needs the 'web' extra.

    It labels as 'trident predict' does. The pictures stay in the visitor's browser. Each request sends them, and the
    server stores nothing.
    """
    try:
        import fastapi  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise TridentError("trident web needs the web extra: pip install 'trident-fewshot[web]'") from error
    from trident.web.limits import MEGA, Limits
    from trident.web.serve import address_of, listen, make_server

    limits = Limits(
        pictures=pictures,
        file_bytes=int(megabytes * MEGA),
        request_bytes=int(request_megabytes * MEGA),
        pixels=int(megapixels * MEGA),
        seconds=seconds,
    )
    with listen(host, port) as listening:  # before loading torch, so that a busy port fails fast
        from trident.web.app import make_app
        from trident.web.networks import open_network

        network = open_network(backbone, weights, device_of(device))
        if network.hint is not None:
            print(network.hint, file=sys.stderr)
        server = make_server(make_app(network, limits, names or ()))
        address = address_of(listening)
        print(f"{address} is ready; Ctrl-C stops it", flush=True)
        if browser:
            import webbrowser

            webbrowser.open(address)
        server.run(sockets=[listening])
        raise typer.Exit(130)  # stopped by Ctrl-C; the event loop may swallow the KeyboardInterrupt
