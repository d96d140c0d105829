"""Made-up features of tasks, for tests of heads."""

import math

import numpy as np
import torch

from trident.backbones.frozen import FrozenBackbone
from trident.methods.base import HeadOnFeatures
from trident.nn.parameters import Parameters
from trident.settings import EpisodeSpec
from trident.tasks.task import Task

Array = np.ndarray
N_WAY, N_FEATURES, N_QUERIES = 4, 10, 16
SUPPORT_LABELS = [0, 1, 1, 2, 3, 3, 3, 0, 1]  # unequal shots, in no order


def some_features(
    n_tasks: int = 2, n_queries: int = 14, seed: int = 0, n_features: int = N_FEATURES
) -> tuple[Array, Array]:
    """Noisy clusters (task, image, feature), the support set first, and the labels of the support sets."""
    generator = np.random.default_rng(seed)
    labels = np.stack([generator.permutation(SUPPORT_LABELS) for _ in range(n_tasks)])
    of_queries = generator.integers(0, N_WAY - 1, (n_tasks, n_queries))  # the last class is absent
    centres = generator.normal(1, 1, (n_tasks, N_WAY, n_features))
    of_all = np.concatenate([labels, of_queries], 1)
    features = np.take_along_axis(centres, of_all[..., None], 1) + generator.normal(0, 0.8, (*of_all.shape, n_features))
    return features, labels


def logits_of(
    head: HeadOnFeatures, features: Array, labels: Array, n_way: int = N_WAY, parameters: Parameters | None = None
) -> Array:
    """With random weights, unless they are given."""
    images = torch.from_numpy(features)
    task = Task(images, torch.from_numpy(labels), n_way)
    known = {key: value.to(images) for key, value in (parameters or random_weights(head, task)).items()}
    as_cells = images[:, :, None] if head.takes_cells and images.dim() == 3 else images
    return head.head(known, as_cells, task).numpy()


def random_weights(head: HeadOnFeatures, task: Task) -> Parameters:
    """Parameters and statistics of a trained head, for tasks with `N_QUERIES` queries."""
    if head.about.trained_on == "nothing":
        return {}
    generator = torch.Generator().manual_seed(5)
    model = head.model(FrozenBackbone(size=task.images.shape[2]), EpisodeSpec(task.n_way, 1, N_QUERIES // task.n_way))
    statistics = head.initial_statistics(task.images.shape[2])
    return model.initial(generator) | {
        key: torch.randn(value.shape, generator=generator) for key, value in statistics.items()
    }


def probabilities(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(raised / raised.sum(-1, keepdims=True))


def length(vector: Array) -> float:
    return math.sqrt(sum(float(number) ** 2 for number in vector))
