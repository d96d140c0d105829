"""What can be measured: trained weights, or any Python function that predicts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trident.backbones.frozen import FrozenBackbone
from trident.data.store import ImageStore, positions_of
from trident.engines.execution import Execution, execution_for, make_learner
from trident.engines.learner import Learner
from trident.errors import TridentError, one_line
from trident.learning.checkpoint import Checkpoint
from trident.learning.frozen_weights import PREFIX, conv4_features, without_conv4
from trident.measuring.cached_features import CachedFeatures, can_be_cached
from trident.measuring.prediction import predict, predict_one_by_one
from trident.methods.base import HeadModel
from trident.nn.parameters import Parameters, on_device
from trident.recipes.recipe import Recipe
from trident.settings import EpisodeSpec, Protocol
from trident.tasks.episodes import EpisodeSampler
from trident.tasks.source import NoiseShapes, TaskSource
from trident.tasks.task import Task, queries_alone

# Support images (n_support, height, width, channel) uint8, their labels (n_support,) from 0 to n_way - 1, and query
# images (n_query, height, width, channel) uint8 -> probabilities (n_query, n_way).
Function = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]

NUMBERS_AT_ONCE = 400_000  # pixels or features in a chunk of tasks, on a CPU
TASKS_AT_ONCE = 16
IMAGES_AT_ONCE = 1_760  # in a chunk of tasks on a GPU: 16 tasks of up to 110 images, fewer larger ones, to save memory
FEATURE_TASKS_AT_ONCE = 128  # tasks on a GPU: features are small, and starting a kernel takes longer than running it


class Prepared(NamedTuple):
    """A subject and its tasks, all on one device."""

    source: TaskSource
    log_probabilities: Callable[[Task], Tensor]  # of the queries: (task, query, n_way)
    at_once: int  # tasks
    execution: Execution
    in_parallel: bool  # whether several chunks of tasks may be predicted at the same time


@dataclass(frozen=True)
class TrainedModel:
    """Weights and the recipe they were trained by."""

    recipe: Recipe
    parameters: Parameters
    running: Parameters

    @property
    def episode(self) -> EpisodeSpec:
        return self.recipe.episode

    @property
    def protocol(self) -> Protocol:
        return self.recipe.protocol

    def with_protocol(self, protocol: Protocol) -> "TrainedModel":
        return replace(self, recipe=replace(self.recipe, protocol=protocol))

    def effective(self, protocol: Protocol) -> Protocol:
        """The protocol, with defaults for settings that this model ignores."""
        if not self.recipe.backbone.has_batch_norm:
            protocol = replace(protocol, batch_norm=Protocol().batch_norm)
        return protocol if self.recipe.model.noise_shapes(self.episode, 1) else without_latents(protocol)

    def describe_protocol(self) -> str:
        return self.recipe.describe_protocol()

    def settings_json(self) -> dict[str, Any]:
        return {"method": self.recipe.method.describe(), "views": vars(self.recipe.views)}

    def learner(self, execution: Execution) -> Learner:
        return make_learner(self.recipe, execution, on_device(self.running, execution.device))

    def source(self, store: ImageStore, split: str, seed: int, device: str, stream: str | None = None) -> TaskSource:
        """The tasks of a split, with the noise that the model needs."""
        self.recipe.backbone.check_store(store)
        predictions = self.protocol.latent_samples if self.protocol.latents == "average" else 1
        shapes = self.recipe.model.noise_shapes(self.episode, predictions)
        return task_source(self, store, split, seed, device, stream, shapes)

    def prepare(
        self, store: ImageStore, split: str, seed: int, device: str, engine: str, precision: str, stream: str | None
    ) -> Prepared:
        recipe, protocol = self.recipe, self.recipe.protocol
        execution = execution_for(device, engine, precision, recipe)
        source = self.source(store, split, seed, device, stream)
        complete = replace(self, running=self.running or training_statistics(recipe, store))
        if can_be_cached(recipe, execution, sum(entry.count for entry in store.classes_of(split))):
            complete, source.images = complete._with_cached_features(store, split)
        learner, parameters = complete.learner(execution), on_device(complete.parameters, device)
        at_once = default_chunk(complete.recipe, device)

        def log_probabilities(task: Task) -> Tensor:
            if protocol.queries_at_once == "one":
                return predict_one_by_one(learner, parameters, task, at_once, recipe.views)
            return predict(learner, parameters, task, recipe.views)

        return Prepared(source, log_probabilities, at_once, execution, in_parallel=True)

    def _with_cached_features(self, store: ImageStore, split: str) -> tuple["TrainedModel", CachedFeatures]:
        """The method without its Conv4, and a cache of the features that this Conv4 computes."""
        whole = Checkpoint(self.recipe, self.parameters, self.running, 0)
        method = without_conv4(whole, f"{PREFIX}{self.recipe.name}")
        n_features = method.recipe.backbone.n_features
        cache = CachedFeatures(store, split, conv4_features(whole), n_features, self.recipe.views)
        return TrainedModel(method.recipe, method.parameters, method.running), cache


@dataclass(frozen=True)
class PredictFunction:
    """Wraps any function predict(support_images, support_labels, query_images) -> probabilities."""

    function: Function
    episode: EpisodeSpec = EpisodeSpec()
    protocol: Protocol = Protocol()

    def with_protocol(self, protocol: Protocol) -> "PredictFunction":
        return replace(self, protocol=protocol)

    def effective(self, protocol: Protocol) -> Protocol:
        return replace(without_latents(protocol), batch_norm=Protocol().batch_norm)

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def describe_protocol(self) -> str:
        return f"{self.protocol.describe(latents=False, batch_norm=False)}, function {self.name}"

    def settings_json(self) -> dict[str, Any]:
        return {"function": self.name}

    def prepare(
        self, store: ImageStore, split: str, seed: int, device: str, engine: str, precision: str, stream: str | None
    ) -> Prepared:
        source = task_source(self, store, split, seed, "cpu", stream, {})
        return Prepared(source, self._log_probabilities, 1, Execution(), in_parallel=False)

    def _log_probabilities(self, task: Task) -> Tensor:
        classify = self._one_by_one if self.protocol.queries_at_once == "one" else self._of_task
        return torch.stack([classify(task, i) for i in range(task.n_tasks)])

    def _one_by_one(self, task: Task, index: int) -> Tensor:
        each = queries_alone(task, index, range(task.n_queries))
        return torch.cat([self._of_task(each, i) for i in range(each.n_tasks)])

    def _of_task(self, task: Task, index: int) -> Tensor:
        # Copies, so that a function that writes into its arguments does not change those of its next call.
        images, labels = task.images[index].numpy().copy(), task.support_labels[index].numpy().copy()
        found = self.function(images[task.support], labels, images[task.queries])
        wanted = (task.n_queries, task.n_way)
        try:
            array = np.asarray(found.detach().cpu() if isinstance(found, Tensor) else found, np.float64)
        except (TypeError, ValueError) as error:
            kind = type(found).__name__
            raise TridentError(f"{self.name} must return an array of shape {wanted}, not {kind}") from error
        if array.shape != wanted:
            raise TridentError(f"{self.name} returned an array of shape {array.shape}: it must be {wanted}")
        if not np.isfinite(array).all() or array.min() < 0 or not np.allclose(array.sum(1), 1, atol=1e-3):
            raise TridentError(f"{self.name} must return probabilities: every row from 0 to 1, and its sum 1")
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(array))


Subject = TrainedModel | PredictFunction
Measurable = Checkpoint | TrainedModel | PredictFunction


def subject_of(model: Measurable, protocol: Protocol | None = None) -> Subject:
    """The model as a subject, under its own protocol or another."""
    if isinstance(model, Checkpoint):
        found: Subject = TrainedModel(model.recipe, model.parameters, model.running)
    else:
        found = model
    return found if protocol is None else found.with_protocol(protocol)


def protocol_in_words(
    dataset: str, split: str, of: Subject | Recipe, tasks: int | None = None, seed: int | None = None
) -> str:
    """How something was measured; without a number of tasks, it was a single one."""
    spec = of.episode
    told = f"{one_line(dataset)} {split}, {spec.describe()}, {spec.describe_queries()}, {of.describe_protocol()}"
    return told if tasks is None else f"{told}, {tasks} tasks, 95 % interval, seed {seed}"


def task_source(
    subject: Subject,
    store: ImageStore,
    split: str,
    seed: int,
    device: str,
    stream: str | None,
    noise_shapes: NoiseShapes,
) -> TaskSource:
    """The tasks of a split; `stream` is the random stream that draws them, by default the split's own."""
    return TaskSource(
        EpisodeSampler(store, split, subject.episode, subject.protocol),
        noise_shapes,
        seed,
        stream or ("train-evaluation" if split == "train" else split),
        sampled=subject.protocol.latents != "mean",
        device=device,
    )


def needs_training_statistics(recipe: Recipe) -> bool:
    return recipe.method.about.trained_on == "nothing" and bool(recipe.model.initial_running())


def training_statistics(recipe: Recipe, store: ImageStore) -> Parameters:
    """Statistics of training features, for untrained methods that need them; none if there are no training classes."""
    if not needs_training_statistics(recipe):
        return {}
    model = recipe.model
    assert isinstance(model, HeadModel)
    training = [entry for entry in store.classes if entry.split == "train"]
    if not training:
        return {}
    rows = positions_of(training)
    store.check(rows)
    features = torch.from_numpy(np.asarray(store.images[rows]))  # (image, feature)
    return {key: value[0] for key, value in model.method.statistics(model.features(features[None])).items()}


def without_latents(protocol: Protocol) -> Protocol:
    default = Protocol()
    return replace(protocol, latents=default.latents, latent_samples=default.latent_samples)


def default_chunk(recipe: Recipe, device: torch.device | str) -> int:
    """Default number of tasks to compute at once."""
    if torch.device(device).type != "cpu":
        if isinstance(recipe.backbone, FrozenBackbone):
            return FEATURE_TASKS_AT_ONCE
        return max(1, min(TASKS_AT_ONCE, IMAGES_AT_ONCE // recipe.episode.n_images))
    numbers = recipe.episode.n_images * recipe.backbone.numbers_per_image
    return max(1, min(TASKS_AT_ONCE, NUMBERS_AT_ONCE // numbers))
