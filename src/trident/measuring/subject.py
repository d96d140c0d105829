"""What can be measured: trained weights, or any Python function that predicts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from trident.backbones.conv4 import Conv4Backbone
from trident.backbones.frozen import FrozenBackbone
from trident.backbones.pretrained import BATCH, Compute, in_batches
from trident.data.store import ImageStore, positions_of
from trident.engines.execution import Execution, execution_for, make_learner
from trident.engines.learner import Learner
from trident.errors import TridentError, one_line
from trident.learning.checkpoint import Checkpoint
from trident.learning.frozen_weights import PREFIX, conv4_features, without_conv4
from trident.measuring.prediction import predict, predict_one_by_one
from trident.methods.base import HeadModel, HeadOnFeatures
from trident.nn.parameters import Parameters, on_device
from trident.recipes.recipe import Recipe
from trident.settings import EpisodeSpec, Protocol, Views
from trident.tasks.episodes import EpisodeSampler
from trident.tasks.images import Images
from trident.tasks.source import NoiseShapes, TaskSource
from trident.tasks.task import Task, queries_alone
from trident.tasks.views import views_of

# Support images (n_support, height, width, channel) uint8, their labels (n_support,) from 0 to n_way - 1, and query
# images (n_query, height, width, channel) uint8 -> probabilities (n_query, n_way).
Function = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]

NUMBERS_AT_ONCE = 400_000  # pixels or features in a chunk of tasks, on a CPU
TASKS_AT_ONCE = 16
IMAGES_AT_ONCE = 1_760  # in a chunk of tasks on a GPU: 16 tasks of up to 110 images, fewer larger ones, to save memory
FEATURE_TASKS_AT_ONCE = 128  # tasks on a GPU: features are small, and starting a kernel takes longer than running it


class Sample(TypedDict):
    """Which tasks a model is measured on, and on which device. These are passed on to `evaluate`."""

    split: str
    tasks: int
    seed: int
    device: NotRequired[torch.device | str]
    engine: NotRequired[str]
    precision: NotRequired[str]
    tasks_per_chunk: NotRequired[int | None]


def execution_of(sample: Sample, recipe: Recipe) -> Execution:
    device, engine = str(sample.get("device", "cpu")), sample.get("engine", "auto")
    return execution_for(device, engine, sample.get("precision", "auto"), recipe)


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

    def prepare(self, store: ImageStore, sample: Sample, stream: str | None = None) -> Prepared:
        recipe, protocol, split = self.recipe, self.recipe.protocol, sample["split"]
        execution = execution_of(sample, recipe)
        device = execution.device
        source = self.source(store, split, sample["seed"], device, stream)
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

    def _with_cached_features(self, store: ImageStore, split: str) -> "tuple[TrainedModel, CachedFeatures]":
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

    def prepare(self, store: ImageStore, sample: Sample, stream: str | None = None) -> Prepared:
        source = task_source(self, store, sample["split"], sample["seed"], "cpu", stream, {})
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
        output = self.function(images[task.support], labels, images[task.queries])
        wanted = (task.n_queries, task.n_way)
        try:
            array = np.asarray(output.detach().cpu() if isinstance(output, Tensor) else output, np.float64)
        except (TypeError, ValueError) as error:
            kind = type(output).__name__
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
        model = TrainedModel(model.recipe, model.parameters, model.running)
    return model if protocol is None else model.with_protocol(protocol)


def protocol_in_words(
    dataset: str, split: str, of: Subject | Recipe, tasks: int | None = None, seed: int | None = None
) -> str:
    """How something was measured; without a number of tasks, it was a single one."""
    spec = of.episode
    words = f"{one_line(dataset)} {split}, {spec.describe()}, {spec.describe_queries()}, {of.describe_protocol()}"
    return words if tasks is None else f"{words}, {tasks} tasks, 95 % interval, seed {seed}"


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


MOST_NUMBERS = 2**29  # in the features of all images: 2 GiB of float32


def can_be_cached(recipe: Recipe, execution: Execution, n_images: int) -> bool:
    """Whether caching the features of so many images changes nothing and pays off. On a GPU it does not."""
    backbone = recipe.backbone
    # In a backbone of another package, an image's features may depend on the task.
    if type(backbone) is not Conv4Backbone or not isinstance(recipe.method, HeadOnFeatures):
        return False
    numbers = n_images * recipe.views.number * backbone.n_features
    on_cpu = torch.device(execution.device).type == "cpu"
    return recipe.protocol.batch_norm == "running" and on_cpu and numbers <= MOST_NUMBERS


class CachedFeatures(Images):
    """Features of the images of one split, in some views, each cached at its first use. Threads may share it."""

    def __init__(self, store: ImageStore, split: str, compute: Compute, n_features: int, views: Views):
        super().__init__(store, "cpu")
        self.compute = compute
        self.views = views
        positions = positions_of(store.classes_of(split))
        self._row_of = np.full(len(store.images), len(positions))  # of `_features`; too large in other splits
        self._row_of[positions] = np.arange(len(positions))
        self._known = np.zeros(len(store.images), bool)
        self._features = np.empty((len(positions), views.number * n_features), np.float32)

    def at(self, positions: np.ndarray) -> Tensor:
        """(...) -> (..., view * feature) float32."""
        needed = np.unique(positions)
        missing = needed[~self._known[needed]]
        for start in range(0, len(missing), BATCH):
            part = missing[start : start + BATCH]
            self.store.check(part)
            self._features[self._row_of[part]] = self._computed(np.asarray(self.store.images[part]))
            self._known[part] = True
        return torch.from_numpy(self._features[self._row_of[positions]])

    def _computed(self, images: np.ndarray) -> np.ndarray:
        shown = views_of(torch.from_numpy(images)[None], self.views)  # (1, image, size, size, channel) each
        return np.concatenate([in_batches(self.compute, view[0].numpy()) for view in shown], 1)
