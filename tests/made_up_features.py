"""Made-up features of tasks, for tests of heads."""

import math

import numpy as np
import torch

from trident.methods.base import HeadOnFeatures
from trident.nn.parameters import Parameters
from trident.tasks.task import Task

Array = np.ndarray
N_WAY, N_FEATURES = 4, 10
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
    images = torch.from_numpy(features)
    return head.head(parameters or {}, images, Task(images, torch.from_numpy(labels), n_way)).numpy()


def probabilities(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(raised / raised.sum(-1, keepdims=True))


def length(vector: Array) -> float:
    return math.sqrt(sum(float(number) ** 2 for number in vector))
