"""Methods with a head on backbone features: fused forward and backward in the backbone, autograd in the head."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trident.backbones.conv4 import Conv4Backbone, conv4_of
from trident.engines.cuda_graphs import RecordedLearner
from trident.engines.fused.encoder import Encoded, FusedEncoder
from trident.engines.fused.storage import PRODUCTS, Layout, pictures_of, slope_of
from trident.engines.learner import Gradient, accuracy_of, computing
from trident.engines.plain.heads import HeadLearner
from trident.methods.base import HeadModel
from trident.nn.parameters import Parameters, as_leaves, for_each_task
from trident.tasks.task import Batch, Task


@dataclass(frozen=True)
class FusedHeadLearner(RecordedLearner, HeadLearner):
    model: HeadModel

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

    def features(self, parameters: Parameters, task: Task) -> Tensor:
        return self.model.features(_joined(self._encode(for_each_task(parameters, task.n_tasks), task)))

    def compute(self, parameters: Parameters, batch: Batch) -> Gradient:
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
