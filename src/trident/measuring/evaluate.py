"""Evaluation: accuracy over many tasks, with its interval and the protocol it was obtained under."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, NotRequired, TypedDict, Unpack

import numpy as np
import torch

from trident.data.store import ImageStore
from trident.engines.execution import AnyLearner, Execution, execution_for, make_learner
from trident.engines.workers import side_by_side
from trident.errors import NotFiniteError, TridentError
from trident.learning.checkpoint import Checkpoint
from trident.measuring.prediction import predict, predict_one_by_one
from trident.nn.parameters import Parameters
from trident.settings import AdaptationSettings, EpisodeSpec, Protocol, Recipe
from trident.tasks.episodes import EpisodeSampler
from trident.tasks.source import TaskSource

Progress = Callable[[int, int], None]
# Pixels of a chunk of tasks on a CPU: enough to make little of each call's overhead, few enough for the caches.
_PIXELS_AT_ONCE = 400_000
_TASKS_AT_ONCE = 16


@dataclass(frozen=True)
class Predictions:
    """What a model said of the queries of some tasks, and the truth beside it."""

    log_probabilities: np.ndarray  # (task, query, n_way) float64
    labels: np.ndarray  # (task, query) int64

    @property
    def accuracies(self) -> np.ndarray:
        """Of each task, in percent: (task,)."""
        hits = self.log_probabilities.argmax(2) == self.labels
        return np.asarray(100 * hits.mean(1))


@dataclass(frozen=True)
class Evaluation:
    """An accuracy and everything needed to obtain it again."""

    accuracy: float  # percent
    ci95: float  # half width, percent
    tasks: int
    dataset: str
    split: str
    fingerprint: str
    episode: EpisodeSpec
    protocol: Protocol
    adaptation: AdaptationSettings
    seed: int
    execution: Execution
    predictions: Predictions = field(repr=False, compare=False)

    def describe_protocol(self) -> str:
        spec = self.episode
        return (
            f"{self.dataset} {self.split}, {spec.describe()}, {spec.n_query} queries per class, "
            f"{self.protocol.describe()}, {self.adaptation.describe()}, {self.tasks} tasks, 95 % interval, "
            f"seed {self.seed}"
        )

    def to_json(self) -> dict[str, Any]:
        protocol = {
            "dataset": self.dataset,
            "split": self.split,
            "fingerprint": self.fingerprint,
            **asdict(self.episode),
            **asdict(self.protocol),
            "tasks": self.tasks,
            "seed": self.seed,
            "adaptation": asdict(self.adaptation),
        }
        execution = {"engine": self.execution.engine, "precision": self.execution.precision}
        return {"accuracy": self.accuracy, "ci95": self.ci95, "protocol": protocol, "execution": execution}


def mean_and_interval(values: np.ndarray) -> tuple[float, float]:
    """Mean and half width of its 95 % interval, by the normal approximation."""
    if len(values) < 2:
        return float(values.mean()), math.inf
    return float(values.mean()), float(1.96 * values.std(ddof=1) / math.sqrt(len(values)))


class Sample(TypedDict):
    """Which tasks a model is measured on, and where: what every way of measuring hands on to `evaluate`."""

    split: str
    tasks: int
    seed: int
    device: NotRequired[torch.device | str]
    engine: NotRequired[str]
    precision: NotRequired[str]
    tasks_per_chunk: NotRequired[int | None]


class Setup(NamedTuple):
    """A model and the tasks it is to be tried on, all on one device."""

    learner: AnyLearner
    parameters: Parameters
    source: TaskSource


def set_up(
    recipe: Recipe,
    parameters: Parameters,
    running: Parameters,
    store: ImageStore,
    *,
    split: str,
    seed: int,
    device: torch.device | str = "cpu",
    engine: str = "auto",
    precision: str = "auto",
    stream: str | None = None,
) -> Setup:
    """Check that the images fit, then bring together what the recipe's episode, protocol and adaptation ask for."""
    check_images(recipe, store)
    protocol = recipe.protocol
    learner = make_learner(recipe, execution_for(device, engine, precision, recipe), _on(running, device))
    source = TaskSource(
        EpisodeSampler(store, split, recipe.episode, protocol),
        recipe.model,
        recipe.adaptation,
        seed,
        stream or ("train-evaluation" if split == "train" else split),
        protocol.latents,
        protocol.latent_samples if protocol.latents == "average" else 1,
        device,
    )
    return Setup(learner, _on(parameters, device), source)


def evaluate(
    recipe: Recipe,
    parameters: Parameters,
    running: Parameters,
    store: ImageStore,
    *,
    split: str,
    tasks: int,
    seed: int,
    device: torch.device | str = "cpu",
    engine: str = "auto",
    precision: str = "auto",
    tasks_per_chunk: int | None = None,
    progress: Progress | None = None,
    stream: str | None = None,
) -> Evaluation:
    """Accuracy of a model on tasks from one split, under the recipe's episode and protocol.

    `stream` is the random stream that draws the tasks, by default the split's own.
    """
    learner, parameters, source = set_up(
        recipe,
        parameters,
        running,
        store,
        split=split,
        seed=seed,
        device=device,
        engine=engine,
        precision=precision,
        stream=stream,
    )
    at_once = tasks_per_chunk or default_chunk(recipe, device)

    def predicted(indices: range) -> tuple[np.ndarray, np.ndarray]:
        batch = source.batch(indices)
        if recipe.protocol.queries_at_once == "one":
            found = predict_one_by_one(learner, parameters, batch, at_once, recipe.adaptation.views)
        else:
            found = predict(learner, parameters, batch, recipe.adaptation.views)
        return found.double().cpu().numpy(), batch.query_labels.cpu().numpy()

    log_probabilities, labels = [], []
    chunks = chunks_of(tasks, at_once)
    for indices, (found, truth) in zip(chunks, side_by_side(predicted, chunks, device), strict=True):
        finite = np.isfinite(found.max(2)).all(1)  # (task,); a probability of exactly 0 is fine
        if not finite.all():
            task = indices[int(finite.argmin())]
            raise NotFiniteError(f"{split} task {task}: the prediction is not finite, so it has no accuracy")
        log_probabilities.append(found)
        labels.append(truth)
        if progress:
            progress(indices.stop, tasks)
    predictions = Predictions(np.concatenate(log_probabilities), np.concatenate(labels))
    accuracy, ci95 = mean_and_interval(predictions.accuracies)
    return Evaluation(
        accuracy,
        ci95,
        tasks,
        store.dataset,
        split,
        store.fingerprint,
        recipe.episode,
        recipe.protocol,
        recipe.adaptation,
        seed,
        execution_for(device, engine, precision, recipe),
        predictions,
    )


def evaluate_checkpoint(
    checkpoint: Checkpoint,
    store: ImageStore,
    protocol: Protocol | None = None,
    progress: Progress | None = None,
    **sample: Unpack[Sample],
) -> Evaluation:
    """The same of a checkpoint's weights, under its own protocol or another."""
    recipe = replace(checkpoint.recipe, protocol=protocol or checkpoint.recipe.protocol)
    return evaluate(recipe, checkpoint.parameters, checkpoint.running, store, progress=progress, **sample)


def default_chunk(recipe: Recipe, device: torch.device | str) -> int:
    """Tasks to compute at once, where nobody says how many."""
    if torch.device(device).type != "cpu":
        return _TASKS_AT_ONCE
    return max(1, min(_TASKS_AT_ONCE, _PIXELS_AT_ONCE // (recipe.episode.n_images * recipe.model.image_size**2)))


def chunks_of(tasks: int, at_once: int) -> list[range]:
    return [range(start, min(start + at_once, tasks)) for start in range(0, tasks, at_once)]


def check_all_at_once(protocol: Protocol) -> None:
    """For what looks at all queries of a task together."""
    if protocol.queries_at_once == "one":
        raise TridentError("protocol.queries_at_once is 'one': it has a meaning for accuracy and calibration only")


def check_images(recipe: Recipe, store: ImageStore) -> None:
    wanted = (recipe.model.image_size, recipe.model.image_channels)
    found = (store.image_size, store.image_channels)
    if wanted != found:
        raise TridentError(
            f"the images of {store.dataset} are {found[0]}x{found[0]} with {_channels(found[1])}, but the model takes "
            f"{wanted[0]}x{wanted[0]} with {_channels(wanted[1])}"
            + (f": prepare the store with --image-size {wanted[0]}" if wanted[0] != found[0] else "")
        )


def check_episode(recipe: Recipe, episode: EpisodeSpec) -> None:
    """Some weights are made for one shape of task; say so before torch does, or before positions are mixed up."""
    trained, model = recipe.episode, recipe.model
    if model.method == "protonet":
        return
    if episode.n_way != trained.n_way and model.classifier_start == "learned":
        raise TridentError(f"these weights classify {trained.n_way} ways, not {episode.n_way}")
    if model.positional and episode != trained:
        raise TridentError(
            f"the positional AttFEX of these weights takes {trained.describe()} tasks with {trained.n_query} queries "
            f"per class, not {episode.describe()} with {episode.n_query}"
        )


def _channels(number: int) -> str:
    return f"{number} channel{'s' if number > 1 else ''}"


def _on(parameters: Parameters, device: torch.device | str) -> Parameters:
    return {key: value.to(device) for key, value in parameters.items()}
