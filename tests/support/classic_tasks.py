"""Random tasks and weights for the classic heads."""

import numpy as np
import pytest
import torch
from torch import Tensor

from head_examples import CLASSICS
from tiny import doubles, tiny_store, tiny_tasks
from trident.methods.base import HeadOnFeatures
from trident.nn.parameters import Parameters
from trident.tasks.source import ClassSource
from trident.tasks.task import Batch, Task

Array = np.ndarray
N_WAY = 3
LABELS = torch.tensor([[0, 2, 1, 1, 2, 0, 2], [1, 0, 0, 2, 0, 1, 0]])  # unequal shots, in no order
N, N_QUERIES = LABELS.shape[1], 5
heads = pytest.mark.parametrize("name", list(CLASSICS))


def some_task(cells: int = 1, channels: int = 12, seed: int = 7) -> tuple[Tensor, Task]:
    """Random features (task, image, cell, channel) in float64 and their task, without pictures."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(2, N + N_QUERIES, cells, channels, generator=generator, dtype=torch.float64)
    return features, Task(torch.zeros(2, N + N_QUERIES, 1, 1, 1), LABELS, N_WAY)


def random_parameters(method: HeadOnFeatures, n_features: int) -> Parameters:
    """Not the usual start, at which some of them are 0 or 1."""
    generator = torch.Generator().manual_seed(3)
    start = method.initial(n_features, generator)
    return {key: value + 0.3 * torch.randn(value.shape, generator=generator) for key, value in doubles(start).items()}


def training_batch(method: HeadOnFeatures) -> Batch:
    """What the method is trained on, in float64."""
    if method.about.trained_on == "episodes":
        return tiny_tasks()
    task, labels = ClassSource(tiny_store(), 12, 0, noise_shapes=method.batch_noise()).batch([0, 1])
    return Batch(task.with_images(task.images.double() / 255), labels)
