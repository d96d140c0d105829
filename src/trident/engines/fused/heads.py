"""Methods with a head on backbone features: fused forward and backward in the backbone, autograd in the head."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trident.backbones.conv4 import Conv4Backbone, conv4_of
from trident.engines.fused.encoder import Encoded, FusedEncoder
from trident.engines.fused.layout import Layout
from trident.engines.fused.replay import Recordings, computing
from trident.engines.fused.storage import PRODUCTS, pictures_of, slope_of
from trident.engines.learner import Gradient, LearnerFields, accuracy_of
from trident.methods.base import HeadModel
from trident.methods.inner_loop.base import Encodings
from trident.nn.parameters import Parameters, as_leaves, for_each_task
from trident.nn.probabilities import mean_prediction
from trident.tasks.task import Batch, Task


@dataclass(frozen=True)
class FusedHeadLearner(LearnerFields):
    model: HeadModel
    recordings: Recordings = field(init=False, default_factory=Recordings, compare=False, repr=False)

    @property
    def _backbone(self) -> Conv4Backbone:
        return conv4_of(self.model.backbone, "the fused engine")

    @property
    def encoders(self) -> list[FusedEncoder]:
        """One for each branch."""
        slope, product = slope_of(self._backbone), PRODUCTS[self.precision]
        return [FusedEncoder(network.name, slope, product) for network in self._backbone.networks]

    def _encode(self, parameters: Parameters, task: Task) -> list[Encoded]:
        """Encode all images of the tasks, by every branch. Parameters are (task, ...)."""
        rows = pictures_of(task, self.precision, self._backbone.channels).rows(0, task.images.shape[1])
        return [encoder.forward(parameters, rows) for encoder in self.encoders]

    def log_probabilities(self, parameters: Parameters, task: Task) -> Tensor:
        return self.log_probabilities_from(parameters, task, self.encode(parameters, task))

    def encode(self, parameters: Parameters, task: Task) -> Encodings:
        with computing(self.precision, task.device):
            maps = _joined(self._encode(for_each_task(parameters, task.n_tasks), task))
            known = self.model.with_running_statistics(parameters, self.running)
            return {"features": self.model.method.image_features(known, self.model.features(maps))}

    def log_probabilities_from(self, parameters: Parameters, task: Task, encodings: Encodings) -> Tensor:
        with computing(self.precision, task.device):
            parameters = self.model.with_running_statistics(parameters, self.running)
            return mean_prediction([self.model.method.head(parameters, encodings["features"], task)])

    def gradient(self, parameters: Parameters, batch: Batch) -> Gradient:
        return self.recordings(self.compute, parameters, batch)

    def compute(self, parameters: Parameters, batch: Batch) -> Gradient:
        """The gradient, without a CUDA graph."""
        task, labels = batch
        method = self.model.method
        with computing(self.precision, task.device):
            names = self.model.backbone.names
            own = {key: value.detach() for key, value in parameters.items() if key in names}
            own = for_each_task(own, task.n_tasks)
            encoded = self._encode(own, task)
            with torch.enable_grad():
                maps = _joined(encoded).requires_grad_()
                head = as_leaves({key: value for key, value in parameters.items() if key not in own})
                features = self.model.features(maps)
                complete = self.model.with_batch_statistics(head, features)
                logits, losses = method.training(complete, features, task, labels)
                leaves = [maps, *head.values()]
                for_maps, *for_head = torch.autograd.grad(losses["total"].sum(), leaves, materialize_grads=True)
            layout = Layout(own)
            flat = layout.zeros(task.n_tasks, for_maps.device)
            statistics = Parameters()
            of_branches = torch.split(for_maps, self._backbone.map_size, 2)
            for encoder, branch, for_branch in zip(self.encoders, encoded, of_branches, strict=True):
                encoder.backward(own, branch, for_branch.contiguous(), layout.split(flat))
                statistics |= encoder.statistics(own, branch)
            summed = {key: value[0] for key, value in layout.split(flat.sum(0, keepdim=True)).items()}
            total = losses["total"].detach()
            return Gradient(
                {key: (summed | dict(zip(head, for_head, strict=True)))[key] for key in parameters},
                {name: part.detach() for name, part in losses.items()},
                accuracy_of(logits, labels.queries),
                statistics | method.labelled_statistics(features.detach(), labels),
                total.isfinite(),
            )


def _joined(encoded: list[Encoded]) -> Tensor:
    """The maps of all branches, one below the other: (task, image, height, width, channel)."""
    return encoded[0].features if len(encoded) == 1 else torch.cat([branch.features for branch in encoded], 2)
