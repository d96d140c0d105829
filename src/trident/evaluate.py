"""Evaluation: accuracy over many tasks, with its interval and the protocol it was obtained under."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trident.adapt import Learner, TaskBatch
from trident.checkpoint import Checkpoint
from trident.data.store import ImageStore
from trident.episodes import EpisodeSampler, EpisodeSpec, Protocol
from trident.errors import TridentError
from trident.model import Trident
from trident.nn.parameters import Parameters
from trident.settings import AdaptationSettings, Recipe
from trident.tasks import TaskSource

Progress = Callable[[int, int], None]
TASKS_PER_CHUNK = 16


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

    def describe_protocol(self) -> str:
        spec = self.episode
        return (
            f"{self.dataset} {self.split}, {spec.describe()}, {spec.n_query} queries per class, "
            f"{self.protocol.describe()}, {self.tasks} tasks, 95 % interval, seed {self.seed}"
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
        return {"accuracy": self.accuracy, "ci95": self.ci95, "protocol": protocol}


def predict(learner: Learner, parameters: Parameters, tasks: TaskBatch) -> Tensor:
    """Class probabilities of the queries after adaptation, averaged over the noise draws: (task, query, n_way)."""
    adapted, _ = learner.adapt(parameters, tasks)[-1]
    total: Tensor | None = None
    with torch.no_grad():
        for noise in tasks.query_noise:
            output = learner.model(adapted, tasks.images, "query", noise, learner.statistics(), reconstruct=False)
            probabilities = torch.softmax(output.logits, -1)
            total = probabilities if total is None else total + probabilities
    assert total is not None
    return total / len(tasks.query_noise)


def mean_and_interval(values: np.ndarray) -> tuple[float, float]:
    """Mean and half width of its 95 % interval, by the normal approximation."""
    if len(values) < 2:
        return float(values.mean()), math.inf
    return float(values.mean()), float(1.96 * values.std(ddof=1) / math.sqrt(len(values)))


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
    tasks_per_chunk: int = TASKS_PER_CHUNK,
    progress: Progress | None = None,
) -> Evaluation:
    """Accuracy of a model on tasks from one split, under the recipe's episode and protocol."""
    protocol, adaptation = recipe.protocol, recipe.adaptation
    check_images(recipe, store)
    model = Trident(recipe.model, recipe.episode)
    learner = Learner(model, recipe.objective, adaptation, protocol.batch_norm, _on(running, device))
    source = TaskSource(
        EpisodeSampler(store, split, recipe.episode, protocol),
        recipe.model,
        adaptation,
        seed,
        "train-evaluation" if split == "train" else split,
        protocol.latents,
        protocol.latent_samples if protocol.latents == "average" else 1,
        device,
    )
    parameters = _on(parameters, device)
    accuracies = []
    for start in range(0, tasks, tasks_per_chunk):
        batch = source.batch(range(start, min(start + tasks_per_chunk, tasks)))
        probabilities = predict(learner, parameters, batch)
        finite = probabilities.isfinite().all(-1).all(-1)  # (task,)
        if not bool(finite.all()):
            task = start + int(finite.logical_not().nonzero()[0])
            raise TridentError(f"{split} task {task}: the prediction is not finite, so there is no accuracy to report")
        hits = probabilities.argmax(-1) == batch.query_labels
        accuracies.append(hits.double().mean(1).cpu().numpy())
        if progress:
            progress(min(start + tasks_per_chunk, tasks), tasks)
    accuracy, ci95 = mean_and_interval(np.concatenate(accuracies) * 100)
    return Evaluation(
        accuracy, ci95, tasks, store.dataset, split, store.fingerprint, recipe.episode, protocol, adaptation, seed
    )


def check_images(recipe: Recipe, store: ImageStore) -> None:
    wanted = (recipe.model.image_size, recipe.model.image_channels)
    found = (store.image_size, store.image_channels)
    if wanted != found:
        raise TridentError(
            f"the images of {store.dataset} are {found[0]}x{found[0]} with {_channels(found[1])}, but the model takes "
            f"{wanted[0]}x{wanted[0]} with {_channels(wanted[1])}"
            + (f": prepare the store with --image-size {wanted[0]}" if wanted[0] != found[0] else "")
        )


def check_episode(checkpoint: Checkpoint, episode: EpisodeSpec) -> None:
    """Some weights are made for one shape of task; say so before torch does, or before positions are mixed up."""
    trained, model = checkpoint.recipe.episode, checkpoint.recipe.model
    if episode.n_way != trained.n_way and model.classifier_start == "learned":
        raise TridentError(f"these weights classify {trained.n_way} ways, not {episode.n_way}")
    if model.attfex == "positional" and episode != trained:
        raise TridentError(
            f"the positional AttFEX of these weights takes {trained.describe()} tasks with {trained.n_query} queries "
            f"per class, not {episode.describe()} with {episode.n_query}"
        )


def _channels(number: int) -> str:
    return f"{number} channel{'s' if number > 1 else ''}"


def _on(parameters: Parameters, device: torch.device | str) -> Parameters:
    return {key: value.to(device) for key, value in parameters.items()}
