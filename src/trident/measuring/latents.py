"""The latents of models that have them, and the images that they decode to."""

from dataclasses import replace
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from trident.data.store import ImageStore
from trident.engines.learner import Learner
from trident.errors import NotFiniteError, TridentError
from trident.learning.checkpoint import Checkpoint
from trident.measuring.subject import Sample, TrainedModel, execution_of, protocol_in_words
from trident.methods.base import Method
from trident.methods.inner_loop.base import InnerState, Inputs
from trident.methods.trident.network import Network
from trident.methods.trident.objective import Latents
from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.parameters import Parameters, on_device
from trident.recipes.recipe import Recipe
from trident.settings import require
from trident.tasks.source import TaskSource
from trident.tasks.task import Task


class LatentLearner(Protocol):
    """A learner of a model with latents and a decoder."""

    @property
    def model(self) -> Network: ...

    def statistics(self, task: Task) -> BatchNormStatistics: ...

    def adapt(self, parameters: Parameters, task: Task) -> list[tuple[Parameters, InnerState]]: ...


def as_array(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor.double().cpu().numpy())


def check_latents(method: Method) -> None:
    if "latents" not in method.about.analyses:
        raise TridentError(f"{method.about.title} has no latents and no decoder: there is nothing to look at")


def with_latents(learner: Learner) -> LatentLearner:
    check_latents(learner.model.method)
    return cast(LatentLearner, learner)


def set_up(
    checkpoint: Checkpoint, store: ImageStore, sample: Sample
) -> tuple[LatentLearner, Parameters, TaskSource, Recipe]:
    """A model and the tasks of a split on one device, and the recipe as it is measured: with latent means."""
    recipe = checkpoint.recipe
    check_latents(recipe.method)
    recipe.check_all_at_once()
    require(not recipe.episode.n_unlabelled, "episode.n_unlabelled must be 0 here: unlabelled images have no class")
    recipe = replace(recipe, protocol=replace(recipe.protocol, latents="mean"))
    model = TrainedModel(recipe, checkpoint.parameters, checkpoint.running)
    execution = execution_of(sample, recipe)
    source = model.source(store, sample["split"], sample["seed"], execution.device)
    parameters = on_device(checkpoint.parameters, execution.device)
    return with_latents(model.learner(execution)), parameters, source, recipe


def query_latents(learner: LatentLearner, adapted: Parameters, task: Task) -> Latents:
    """Latents of the queries; those of support images may come first. `adapted` has a task axis."""
    with torch.no_grad():
        latents, _ = learner.model.infer(adapted, Inputs(task, learner.statistics(task)))
    return latents


def latents_and_images(learner: LatentLearner, parameters: Parameters, task: Task) -> tuple[Tensor, Tensor]:
    """z_label and reconstructions of all images of a task after adaptation, the support set first."""
    model, statistics = learner.model, learner.statistics(task)
    adapted, _ = learner.adapt(parameters, task)[-1]
    with torch.no_grad():
        latents = query_latents(learner, adapted, task)
        z_label, codes = latents.z_label, model.codes(latents)
        if latents.n_context == 0:  # the support images are not included
            support, _ = model.infer(adapted, Inputs(task, statistics, "support"))
            z_label, codes = torch.cat([support.z_label, z_label], 1), torch.cat([model.codes(support), codes], 1)
        images, _ = model.decoder(adapted, codes, statistics)
    return z_label, images


class Reconstructions(NamedTuple):
    """Decoded queries of one task after adaptation, from latent means; values in 0 .. 1."""

    images: np.ndarray  # (query, h, w, c)
    reconstructed: np.ndarray  # (query, h, w, c)
    labels: np.ndarray  # (query,)
    swapped: np.ndarray  # (chosen, chosen, h, w, c): z_label of the row's image, z_semantic of the column's
    chosen: np.ndarray  # (chosen,) which queries: the first of each class
    squared_error: float  # summed over an image, mean over the queries
    squared_error_of_mean: float  # if every image is replaced by the mean query image, for comparison
    protocol: str

    def describe(self) -> str:
        better = "better" if self.squared_error < self.squared_error_of_mean else "worse"
        return (
            f"Squared error of an image, summed over its pixels: {self.squared_error:.1f} on average over this task's "
            f"queries. Replacing each by the mean query image gives {self.squared_error_of_mean:.1f}, "
            f"so the decoder does {better} than that"
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
    sample = Sample(split=split, tasks=1, seed=seed, device=device, engine="plain", precision="fp32")
    learner, parameters, source, recipe = set_up(checkpoint, store, sample)
    batch = source.batch([task])
    adapted, _ = learner.adapt(parameters, batch.task)[-1]
    latents = query_latents(learner, adapted, batch.task)
    labels = batch.labels.queries[0].cpu().numpy()
    chosen = np.sort(np.unique(labels, return_index=True)[1])
    context, n = latents.n_context, len(chosen)

    def decode(label: Tensor, semantic: Tensor) -> Tensor:
        """Decode latents (task, image, latent) of queries."""
        whole = latents._replace(
            z_label=torch.cat([latents.z_label[:, :context], label], 1),
            z_semantic=torch.cat([latents.z_semantic[:, :context], semantic], 1),
        )
        with torch.no_grad():
            images, _ = learner.model.decode(adapted, whole, learner.statistics(batch.task))
        return images[0]

    def squared_error(images: Tensor, others: Tensor) -> float:
        return float((images - others).square().sum((1, 2, 3)).mean())

    z_label, z_semantic = latents.z_label[:, context:], latents.z_semantic[:, context:]
    images, reconstructed = batch.task.pixels[0, batch.task.queries], decode(z_label, z_semantic)
    swapped = decode(z_label[:, np.repeat(chosen, n)], z_semantic[:, np.tile(chosen, n)])
    error = squared_error(images, reconstructed)
    if not np.isfinite(error):
        raise NotFiniteError(f"{split} task {task}: the reconstruction is not finite")
    return Reconstructions(
        as_array(images),
        as_array(reconstructed),
        labels,
        as_array(swapped.reshape(n, n, *swapped.shape[1:])),
        chosen,
        error,
        squared_error(images, images.mean(0, keepdim=True)),
        protocol_in_words(store.dataset, split, recipe),
    )
