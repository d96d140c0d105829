"""Decoded images: reconstructions, and images with z_semantic swapped between queries."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trident.data.store import ImageStore
from trident.errors import NotFiniteError
from trident.learning.checkpoint import Checkpoint
from trident.measuring.latents import LatentLearner, as_array, query_latents, set_up
from trident.measuring.subject import protocol_in_words
from trident.nn.parameters import Parameters
from trident.tasks.task import Batch


class Reconstructions(NamedTuple):
    """Decoded queries of one task after adaptation, from latent means; values in 0 .. 1."""

    images: np.ndarray  # (query, h, w, c)
    reconstructed: np.ndarray  # (query, h, w, c)
    labels: np.ndarray  # (query,)
    swapped: np.ndarray  # (chosen, chosen, h, w, c): z_label of the row's image, z_semantic of the column's
    chosen: np.ndarray  # (chosen,) which queries: the first of each class
    squared_error: float  # summed over an image, mean over the queries
    squared_error_of_mean: float  # if every image is replaced by the mean query image, for comparison
    protocol: str = ""

    def describe(self) -> str:
        better = "better" if self.squared_error < self.squared_error_of_mean else "worse"
        return (
            f"Squared error of an image, summed over its pixels: {self.squared_error:.1f} on average over this task's "
            f"queries. Replacing each by the mean query image gives {self.squared_error_of_mean:.1f}, "
            f"so the decoder does {better} than that"
        )


def reconstruct_task(learner: LatentLearner, parameters: Parameters, batch: Batch) -> Reconstructions:
    """For the first task of a batch."""
    task = batch.task
    adapted, _ = learner.adapt(parameters, task)[-1]
    labels = batch.labels.queries[0].cpu().numpy()
    chosen = np.sort(np.unique(labels, return_index=True)[1])
    found = query_latents(learner, adapted, task)
    context, n = found.n_context, len(chosen)

    def decode(label: Tensor, semantic: Tensor) -> Tensor:
        """Decode latents (task, image, latent) of queries."""
        whole = found._replace(
            z_label=torch.cat([found.z_label[:, :context], label], 1),
            z_semantic=torch.cat([found.z_semantic[:, :context], semantic], 1),
        )
        with torch.no_grad():
            images, _ = learner.model.decode(adapted, whole, learner.statistics(task))
        return images[0]

    z_label, z_semantic = found.z_label[:, context:], found.z_semantic[:, context:]
    rows, columns = np.repeat(chosen, n), np.tile(chosen, n)
    reconstructed = decode(z_label, z_semantic)
    swapped = decode(z_label[:, rows], z_semantic[:, columns])
    images = task.pixels[0, task.queries]
    return Reconstructions(
        as_array(images),
        as_array(reconstructed),
        labels,
        as_array(swapped.reshape(n, n, *swapped.shape[1:])),
        chosen,
        _squared_error(images, reconstructed),
        _squared_error(images, images.mean(0, keepdim=True)),
    )


def reconstructions(
    checkpoint: Checkpoint,
    store: ImageStore,
    *,
    split: str,
    seed: int,
    task: int = 0,
    device: torch.device | str = "cpu",
) -> Reconstructions:
    learner, parameters, source, recipe = set_up(checkpoint, store, split, seed, device, "plain", "fp32")
    found = reconstruct_task(learner, parameters, source.batch([task]))
    if not np.isfinite(found.squared_error):
        raise NotFiniteError(f"{split} task {task}: the reconstruction is not finite")
    return found._replace(protocol=protocol_in_words(store.dataset, split, recipe))


def _squared_error(images: Tensor, other: Tensor) -> float:
    return float((images - other).square().sum((1, 2, 3)).mean())
