"""Access to the latents of models that have them."""

from dataclasses import replace
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from trident.data.store import ImageStore
from trident.engines.execution import execution_for
from trident.engines.learner import Learner
from trident.errors import TridentError
from trident.learning.checkpoint import Checkpoint
from trident.measuring.subject import TrainedModel
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


class Setup(NamedTuple):
    """A model with latents and its tasks, all on one device."""

    learner: LatentLearner
    parameters: Parameters
    source: TaskSource
    recipe: Recipe  # as it is measured: with latent means


def as_array(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor.double().cpu().numpy())


def check_latents(method: Method) -> None:
    if "latents" not in method.about.analyses:
        raise TridentError(f"{method.about.title} has no latents and no decoder: there is nothing to look at")


def with_latents(learner: Learner) -> LatentLearner:
    check_latents(learner.model.method)
    return cast(LatentLearner, learner)


def set_up(
    checkpoint: Checkpoint,
    store: ImageStore,
    split: str,
    seed: int,
    device: torch.device | str,
    engine: str = "auto",
    precision: str = "auto",
) -> Setup:
    """The model and the tasks of a split, with latent means."""
    recipe = checkpoint.recipe
    check_latents(recipe.method)
    recipe.check_all_at_once()
    require(not recipe.episode.n_unlabelled, "episode.n_unlabelled must be 0 here: unlabelled images have no class")
    recipe = replace(recipe, protocol=replace(recipe.protocol, latents="mean"))
    model = TrainedModel(recipe, checkpoint.parameters, checkpoint.running)
    learner = with_latents(model.learner(execution_for(device, engine, precision, recipe)))
    source = model.source(store, split, seed, str(device))
    return Setup(learner, on_device(checkpoint.parameters, device), source, recipe)


def query_latents(learner: LatentLearner, adapted: Parameters, task: Task) -> Latents:
    """Latents of the queries; those of support images may come first. `adapted` has a task axis."""
    with torch.no_grad():
        found, _ = learner.model.infer(adapted, Inputs(task, learner.statistics(task)))
    return found


def latents_and_images(learner: LatentLearner, parameters: Parameters, task: Task) -> tuple[Tensor, Tensor]:
    """z_label and reconstructions of all images of a task after adaptation, the support set first."""
    model, statistics = learner.model, learner.statistics(task)
    adapted, _ = learner.adapt(parameters, task)[-1]
    with torch.no_grad():
        found, _ = model.infer(adapted, Inputs(task, statistics))
        z_label, codes = found.z_label, model.codes(found)
        if found.n_context == 0:  # the support images are not included
            support, _ = model.infer(adapted, Inputs(task, statistics, "support"))
            z_label, codes = torch.cat([support.z_label, z_label], 1), torch.cat([model.codes(support), codes], 1)
        images, _ = model.decoder(adapted, codes, statistics)
    return z_label, images
