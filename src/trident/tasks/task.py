"""Few-shot tasks as tensors: what a method sees, and the labels that only its training loss may see."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from trident.nn.convolution import patches_of

Noise = Mapping[str, Tensor]  # names begin with what the noise is for: "support/" or "query/" for the images of that
# set, "task/" for the task as a whole


@dataclass(frozen=True)
class Task:
    """Some tasks of one shape, as a method sees them. No prediction can depend on query labels: they are not here."""

    images: Tensor  # (task, n_support + n_queries, height, width, channel): uint8, or floating point in 0 .. 1;
    # or features of a frozen backbone (task, n_support + n_queries, feature)
    support_labels: Tensor  # (task, n_support) int64
    n_way: int
    noise: Noise = field(default_factory=dict)  # (task, images of the set, size) each, as the method asked for

    @property
    def n_tasks(self) -> int:
        return len(self.images)

    @property
    def n_support(self) -> int:
        return self.support_labels.shape[1]

    @property
    def n_queries(self) -> int:
        return self.images.shape[1] - self.n_support

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def support(self) -> slice:
        return slice(self.n_support)

    @property
    def queries(self) -> slice:
        return slice(self.n_support, None)

    @cached_property
    def pixels(self) -> Tensor:
        """The images with values in 0 .. 1."""
        return self.images.float() / 255 if self.images.dtype == torch.uint8 else self.images

    @cached_property
    def patches(self) -> Tensor:
        """The neighbourhood of every pixel, which the first layer of a Conv4 takes in all inner steps."""
        return patches_of(self.pixels)

    def with_images(self, images: Tensor) -> "Task":
        return replace(self, images=images)


class Labels(NamedTuple):
    """The true labels of the queries, only for the training loss and for scoring."""

    queries: Tensor  # (task, n_queries) int64: indices among the task's classes
    training_classes: Tensor | None = None  # (task, n_queries) int64: indices among all training classes


def all_labels(task: Task, labels: Labels) -> Tensor:
    """The labels of the support set and of the queries, for a training loss: (task, image)."""
    return torch.cat([task.support_labels, labels.queries], 1)


class Batch(NamedTuple):
    """Tasks and their labels."""

    task: Task
    labels: Labels


def tensors_of(batch: Batch) -> list[Tensor]:
    """All tensors of a batch."""
    task, labels = batch
    truth = [part for part in labels if part is not None]
    return [task.images, task.support_labels, *task.noise.values(), *truth]


def queries_alone(task: Task, index: int, queries: Sequence[int], fill: bool = False) -> Task:
    """Some queries of one task, each as the only query of its own task with the same support set.

    Positional methods need an image at every position: `fill` puts copies of the support images at the positions of
    the other queries, after the query itself.
    """
    n, rows = len(queries), rows_alone(task.n_support, queries)
    n_fillers = task.n_queries - 1 if fill else 0
    rows = torch.cat([rows, (torch.arange(n_fillers) % max(1, task.n_support)).expand(n, -1)], 1)

    def noise_of(name: str, values: Tensor) -> Tensor:
        if not name.startswith("query/"):
            return values[index].expand(n, *values.shape[1:])
        own = values[index, list(queries)][:, None]  # (query, 1, size)
        return torch.cat([own, own.new_zeros(n, n_fillers, own.shape[2])], 1)

    return Task(
        task.images[index][rows],
        task.support_labels[index].expand(n, -1),
        task.n_way,
        {name: noise_of(name, values) for name, values in task.noise.items()},
    )


def rows_alone(n_support: int, queries: Sequence[int]) -> Tensor:
    """Indices of a task's support images and of one query each: (query, n_support + 1)."""
    support = torch.arange(n_support).expand(len(queries), -1)
    return torch.cat([support, n_support + torch.tensor(list(queries))[:, None]], 1)
