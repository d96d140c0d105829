"""The answers to requests: a label or an error for each picture of the pile; or latents in two dimensions, and the
reconstructions.
"""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from trident.errors import NotFiniteError, TridentError
from trident.labelling.labeller import CHUNK
from trident.measuring.latents import as_array, latents_and_images, with_latents
from trident.report.figures import picture
from trident.web.limits import Check
from trident.web.networks import Network, WeightStore
from trident.web.uploads import Upload


def label(network: Network, upload: Upload, check: Check) -> dict[str, Any]:
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


def show_latents(network: Network, upload: Upload, check: Check) -> dict[str, Any]:
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
