"""The server's routes: the page, its settings, and the two requests with pictures."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

import trident
from trident.data.decoding_process import DecodingProcesses, decoders
from trident.data.images import Target
from trident.errors import TridentError
from trident.web.answers import label, show_latents
from trident.web.limits import Check, Limits, RefusedError, RequestQueue
from trident.web.networks import Network
from trident.web.serve import client_of
from trident.web.service import Metrics
from trident.web.uploads import PageDecoder, Receiver, Upload, at_pace, drain

STATIC = Path(__file__).parent / "static"
Work = Callable[[Network, Upload, Check], dict[str, Any]]


def make_routes(network: Network, limits: Limits, metrics: Metrics, processes: DecodingProcesses = decoders) -> ASGIApp:
    """What the server answers to those who are let in."""
    limits = limits.for_pictures_of(network.size**2 * network.channels)
    queue = RequestQueue(limits.at_once, limits.per_client)
    metrics.queue_length = queue.length
    target = Target(
        network.size, network.channels, reduced=network.reduced, centre_crop=network.centre_crop, pixels=limits.pixels
    )
    receiver = Receiver(limits, target, PageDecoder(processes))

    async def answer(request: Request, work: Work) -> Response:
        stream = request.stream()
        client = client_of(request.client.host if request.client else "")
        try:
            with queue.place(client):
                upload = await _received(request, stream, receiver)
                return await _unless_gone(request, lambda: _worked_on(upload, work))
        except TridentError as error:
            await drain(stream)
            refused = error if isinstance(error, RefusedError) else RefusedError(422, str(error))
            return JSONResponse({"error": str(error), **refused.details}, refused.status)
        except ClientDisconnect:
            return Response(status_code=400)  # the client is gone

    async def _worked_on(upload: Upload, work: Work) -> Response:
        try:
            async with asyncio.timeout(limits.seconds):
                return JSONResponse(await queue.work(lambda check: work(network, upload, check)))
        except TimeoutError:
            raise RefusedError(
                503, f"this took longer than {limits.seconds:g} seconds and was stopped: send fewer pictures"
            ) from None

    def count_labelled(network: Network, upload: Upload, check: Check) -> dict[str, Any]:
        answered = label(network, upload, check)
        metrics.pictures += sum(picture.pixels is not None for picture in upload.pile)
        return answered

    async def about(request: Request) -> Response:
        facts = {"version": trident.__version__, "weights": network.described(), "hint": network.hint}
        return JSONResponse(facts | {"limits": asdict(limits)})

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": f"this request is not supported: {error.detail}"}, error.status_code)

    routes = [
        Route("/api/about", about),
        Route("/api/label", partial(answer, work=count_labelled), methods=["POST"]),
        Route("/api/look", partial(answer, work=show_latents), methods=["POST"]),
        Mount("/", StaticFiles(directory=STATIC, html=True)),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: refused})


async def _received(request: Request, stream: AsyncIterator[bytes], receiver: Receiver) -> Upload:
    headers, limits = request.headers, receiver.limits
    seconds = limits.upload_seconds
    body = at_pace(stream, limits.grace_seconds, limits.bytes_per_second)
    try:
        async with asyncio.timeout(seconds):
            return await receiver.receive(body, headers.get("content-type", ""), headers.get("content-length"))
    except TimeoutError:
        raise RefusedError(408, f"sending the pictures took longer than {seconds:g} seconds: send fewer") from None


async def _unless_gone(request: Request, work: Callable[[], Coroutine[Any, Any, Response]]) -> Response:
    """The work's response. If the client disconnects first, the work is stopped."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.create_task(gone())
    await asyncio.sleep(0)  # it runs: who left while the pictures were decoded is noticed before the work begins
    if watching.done():
        raise ClientDisconnect
    working = asyncio.create_task(work())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.wait({working, watching})
