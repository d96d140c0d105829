"""The plain learner of every method that is a `HeadOnFeatures`, with torch's autograd."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trident.engines.learner import (
    Gradient,
    LearnerFields,
    accuracy_of,
    matrix_products,
)
from trident.methods.base import HeadModel, Losses
from trident.methods.inner_loop.base import Encodings
from trident.nn.parameters import Parameters, as_leaves, for_each_task
from trident.nn.probabilities import mean_prediction
from trident.tasks.task import Batch, Task


@dataclass(frozen=True)
class HeadLearner(LearnerFields):
    model: HeadModel

    def log_probabilities(self, parameters: Parameters, task: Task) -> Tensor:
        return self.log_probabilities_from(parameters, task, self.encode(parameters, task))

    def log_probabilities_from(self, parameters: Parameters, task: Task, encodings: Encodings) -> Tensor:
        with torch.no_grad(), matrix_products(self.precision, task.device):
            parameters = self.model.with_running_statistics(parameters, self.running)
            return mean_prediction([self.model.method.head(parameters, encodings["features"], task)])

    @property
    def encodes_alone(self) -> bool:
        return self.batch_norm == "running" or not self.model.backbone.has_batch_norm

    def encode(self, parameters: Parameters, task: Task) -> Encodings:
        with torch.no_grad(), matrix_products(self.precision, task.device):
            known = self.model.with_running_statistics(parameters, self.running)
            return {"features": self.model.method.image_features(known, self.features(parameters, task)[0])}

    def features(self, parameters: Parameters, task: Task) -> tuple[Tensor, Parameters]:
        """Features of all images, as the head takes them, and the batch-norm statistics."""
        maps, seen = self.model.backbone(for_each_task(parameters, task.n_tasks), task, self.statistics(task))
        return self.model.features(maps), seen

    def gradient(self, parameters: Parameters, batch: Batch) -> Gradient:
        leaves = as_leaves(parameters)
        with matrix_products(self.precision, batch.task.device), torch.enable_grad():
            step = self.training_step(leaves, batch)
            total = step.losses["total"]
            found = torch.autograd.grad(total.sum(), list(leaves.values()), materialize_grads=True)
        return Gradient(
            dict(zip(leaves, found, strict=True)),
            {name: part.detach() for name, part in step.losses.items()},
            step.accuracy,
            step.statistics,
            total.detach().isfinite(),
        )

    def training_step(self, parameters: Parameters, batch: Batch) -> "TrainingStep":
        """The losses of a batch, with autograd."""
        task, labels = batch
        method = self.model.method
        features, seen = self.features(parameters, task)
        logits, losses = method.training(self.model.with_batch_statistics(parameters, features), features, task, labels)
        statistics = seen | method.labelled_statistics(features.detach(), labels)
        return TrainingStep(losses, accuracy_of(logits, labels.queries), statistics)


class TrainingStep(NamedTuple):
    """What a batch gives before the gradient is computed."""

    losses: Losses  # (task,) each
    accuracy: Tensor  # (task,)
    statistics: Parameters  # of batch norm, and the method's own: (task, ...) each
