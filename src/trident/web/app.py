"""The server's routes: the page, its settings, and the two requests with pictures.

The answer to pictures is a label or an error for each one of the pile; or latents in two dimensions, and the
reconstructions.
"""

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
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
from trident.errors import NotFiniteError, TridentError
from trident.labelling.labeller import CHUNK
from trident.measuring.latents import as_array, latents_and_images, with_latents
from trident.report.figures import picture
from trident.web.limits import Check, Limits, RefusedError, RequestQueue
from trident.web.networks import Network, WeightStore
from trident.web.serve import client_of
from trident.web.service import Metrics
from trident.web.uploads import Receiver, Upload, at_pace, drain

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
    receiver = Receiver(limits, target, processes)

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
        answered = _label(network, upload, check)
        metrics.pictures += sum(got.pixels is not None for got in upload.pile)
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
        Route("/api/look", partial(answer, work=_show_latents), methods=["POST"]),
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


def _label(network: Network, upload: Upload, check: Check) -> dict[str, Any]:
    check()
    answer = _described(network, upload)
    try:
        labelled = network.label(upload, check)
    except NotFiniteError as error:
        raise NotFiniteError(f"{answer['weights']['name']}: {error}") from error
    pile = []
    for place, got in enumerate(upload.pile):
        readable = got.pixels is not None
        judged = labelled.typicality if readable else None
        pile.append(
            {
                "name": got.name,
                "error": got.error,
                "picture": got.mark,
                "ranking": labelled.ranking(place) if readable else None,
                "none_of_these": labelled.belongs_to_none(place),
                "typicality": None if judged is None else float(judged[place]),
            }
        )
    return answer | {"pile": pile, "expected": labelled.expected.describe() if labelled.expected else None}


def _described(network: Network, upload: Upload) -> dict[str, Any]:
    return {
        "classes": upload.classes,
        "weights": network.described_for(upload),
        "labelled": upload.described_labelled(),
    }


def _show_latents(network: Network, upload: Upload, check: Check) -> dict[str, Any]:
    """Of the labelled pictures and the first pictures of the pile, at most one chunk."""
    if not isinstance(network, WeightStore):
        raise TridentError("features of a frozen network have no latents and no decoder: there is nothing to look at")
    pile = [(place, got.pixels) for place, got in enumerate(upload.pile) if got.pixels is not None][:CHUNK]
    if not pile:
        raise TridentError("there is no picture in the pile that can be read")
    queries = np.stack([pixels for _, pixels in pile])
    check()
    answer = _described(network, upload)
    labeller = network.labeller(upload)
    learner = with_latents(labeller.learner(len(queries)))
    computed = latents_and_images(learner, labeller.parameters, labeller.task(queries))
    latents, painted = (as_array(part)[0] for part in computed)
    if not (np.isfinite(latents).all() and np.isfinite(painted).all()):
        raise NotFiniteError(f"{answer['weights']['name']}: the latents are not finite")
    points, shares = plane(latents)
    readable = [place for place, (_, got) in enumerate(upload.labelled) if got.pixels is not None]
    whose = [("labelled", place) for place in readable] + [("pile", place) for place, _ in pile]
    stored = np.concatenate([labeller.pictures, queries])
    pictures = [
        {
            "from": kind,
            "place": place,
            "point": points[row].round(4).tolist(),
            "seen": _data_url(stored[row] / 255),
            "painted": _data_url(painted[row]),
        }
        for row, (kind, place) in enumerate(whose)
    ]
    return answer | {"pictures": pictures, "shares": shares, "latents": latents.shape[1]}


def plane(latents: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """The first two principal components: points (picture, 2), and each one's share of the variance."""
    centred = latents - latents.mean(0)
    left, scales, _ = np.linalg.svd(centred, full_matrices=False)
    points = np.zeros((len(latents), 2))
    points[:, : min(2, len(scales))] = (left * scales)[:, :2]
    variance = scales**2 / max(float((scales**2).sum()), 1e-12)
    return points, [round(float(share), 4) for share in variance[:2]]


def _data_url(pixels: np.ndarray) -> str:
    """Pixel values in 0 .. 1 as a small picture for the page."""
    file = io.BytesIO()
    Image.fromarray(picture(pixels)).save(file, "JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
