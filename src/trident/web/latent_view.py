"""For the curious: what the network makes of the pictures. Their label latents in the plane, and what it paints."""

import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trident.engines.execution import execution_for, make_learner, with_latents
from trident.errors import NotFiniteError, TridentError
from trident.labelling.labeller import CHUNK, recipe_for
from trident.learning.inner_loop import TaskBatch
from trident.methods.trident.network import Noise, TaskImages
from trident.report.figures import picture
from trident.settings import EpisodeSpec
from trident.web.labels import Task
from trident.web.request_queue import Check


def look(task: Task, device: str, check: Check) -> dict[str, Any]:
    """Of the labelled pictures and of the first of the pile, as many as are ever looked at together."""
    pile = [(place, got.pixels) for place, got in enumerate(task.upload.pile) if got.pixels is not None][:CHUNK]
    if not pile:
        raise TridentError("there is no picture in the pile that can be read")
    stored = np.concatenate([task.pictures, np.stack([pixels for _, pixels in pile])])
    check()
    latents, painted = latents_and_paintings(task, stored, device)
    if not (np.isfinite(latents).all() and np.isfinite(painted).all()):
        raise NotFiniteError(f"weights {task.weights}: the latents are not finite")
    points, shares = plane(latents)
    readable = [place for place, (_, got) in enumerate(task.upload.labelled) if got.pixels is not None]
    whose = [("labelled", place) for place in readable] + [("pile", place) for place, _ in pile]
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
    return task.described() | {"pictures": pictures, "shares": shares, "latents": latents.shape[1]}


def latents_and_paintings(task: Task, stored: np.ndarray, device: str) -> tuple[np.ndarray, np.ndarray]:
    """Of all these pictures (labelled ones first), at their latents' means: (picture, latent), (picture, h, w, c)."""
    episode = EpisodeSpec(len(task.classes), int(np.bincount(task.labels).max()), 1)
    recipe = recipe_for(task.checkpoint.recipe, len(stored) - len(task.labels), len(task.classes))
    recipe = replace(recipe, episode=episode)
    running = {key: value.to(device) for key, value in task.checkpoint.running.items()}
    learner = with_latents(make_learner(recipe, execution_for(device, "plain", "fp32", recipe), running))
    images = TaskImages(
        torch.from_numpy(stored[None]).to(device), torch.from_numpy(np.asarray(task.labels)[None]).to(device)
    )
    n_support, n_queries = len(task.labels), len(stored) - len(task.labels)

    def no_noise(n: int) -> Noise:
        model = recipe.model
        return Noise(*(torch.zeros(1, n, k, device=device) for k in (model.semantic_latents, model.label_latents)))

    steps = max(1, recipe.adaptation.steps)
    nobody_knows = torch.zeros(1, n_queries, dtype=torch.int64, device=device)
    support_noise = tuple(no_noise(n_support) for _ in range(steps))
    tasks = TaskBatch(images, nobody_knows, support_noise, (no_noise(n_queries),))
    parameters = {key: value.to(device) for key, value in task.checkpoint.parameters.items()}
    adapted, _ = learner.adapt(parameters, tasks)[-1]
    with torch.no_grad():
        statistics = learner.statistics(images)
        found = learner.model.infer(adapted, images, "query", no_noise(n_queries), statistics)
        z_label, codes = found.z_label, found.codes
        if found.n_context == 0:  # the labelled pictures did not come along
            support = learner.model.infer(adapted, images, "support", no_noise(n_support), statistics)
            z_label, codes = torch.cat([support.z_label, z_label], 1), torch.cat([support.codes, codes], 1)
        return _array(z_label), _array(learner.model.decoder(adapted, codes, statistics))


def plane(latents: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """The two directions in which the latents differ most: points (picture, 2), and the share of variance of each."""
    centred = latents - latents.mean(0)
    left, scales, _ = np.linalg.svd(centred, full_matrices=False)
    points = np.zeros((len(latents), 2))
    points[:, : min(2, len(scales))] = (left * scales)[:, :2]
    variance = scales**2 / max(float((scales**2).sum()), 1e-12)
    return points, [round(float(share), 4) for share in variance[:2]]


def _array(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor[0].float().cpu().numpy())


def _data_url(pixels: np.ndarray) -> str:
    """Values in 0 .. 1, as a small picture to put into the page."""
    file = io.BytesIO()
    Image.fromarray(picture(pixels)).save(file, "JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
