"""The plain learner of every method that is a `HeadOnFeatures`, with torch's autograd."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trident.engines.learner import Gradient, Learner, accuracy_of, computing, matrix_products
from trident.methods.base import HeadModel
from trident.methods.inner_loop.base import Encodings
from trident.nn.parameters import Parameters, as_leaves, gradients
from trident.nn.probabilities import mean_prediction
from trident.tasks.task import Batch, Task


@dataclass(frozen=True)
class HeadLearner(Learner):
    model: HeadModel

    def log_probabilities(self, parameters: Parameters, task: Task) -> Tensor:
        return self.log_probabilities_from(parameters, task, self.encode(parameters, task))

    def log_probabilities_from(self, parameters: Parameters, task: Task, encodings: Encodings) -> Tensor:
        with computing(self.precision, task.device):
            parameters = self.model.with_running_statistics(parameters, self.running)
            return mean_prediction([self.model.method.head(parameters, encodings["features"], task)])

    @property
    def encodes_alone(self) -> bool:
        return self.batch_norm == "running" or not self.model.backbone.has_batch_norm

    def encode(self, parameters: Parameters, task: Task) -> Encodings:
        with computing(self.precision, task.device):
            known = self.model.with_running_statistics(parameters, self.running)
            return {"features": self.model.method.image_features(known, self.features(parameters, task))}

    def features(self, parameters: Parameters, task: Task) -> Tensor:
        """Features of all images, as the head takes them."""
        return self.model.encode(parameters, task, self.statistics(task))[0]

    def gradient(self, parameters: Parameters, batch: Batch) -> Gradient:
        leaves = as_leaves(parameters)
        with matrix_products(self.precision, batch.task.device), torch.enable_grad():
            step = self.model.method.training_step(self.model, leaves, batch, self.statistics(batch.task))
            total = step.losses["total"]
            gradient = gradients(total.sum(), leaves)
        return Gradient(
            gradient,
            {name: part.detach() for name, part in step.losses.items()},
            accuracy_of(step.logits, step.truth),
            step.statistics,
            total.detach().isfinite(),
        )
