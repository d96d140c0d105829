"""The Prototypical Network by the fused passes of its encoder."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trident.engines.fused.encoder import Encoded, FusedEncoder
from trident.engines.fused.layout import Layout
from trident.engines.fused.network import PRODUCTS, pictures_of, slope_of
from trident.engines.fused.replay import Recordings, computing
from trident.learning.inner_loop import MetaGradient, TaskBatch, for_each_task
from trident.methods.protonet import ProtoNetLearner, as_meta_gradient, query_loss
from trident.nn.parameters import Parameters

SCALE = "classifier.scale"


@dataclass(frozen=True)
class FusedProtoNetLearner(ProtoNetLearner):
    recordings: Recordings = field(init=False, default_factory=Recordings, compare=False, repr=False)

    @property
    def encoder(self) -> FusedEncoder:
        return FusedEncoder(self.model.encoder.name, slope_of(self.model.settings), PRODUCTS[self.precision])

    def _encode(self, parameters: Parameters, tasks: TaskBatch) -> Encoded:
        pictures = pictures_of(tasks, self.precision, self.model.settings)
        return self.encoder.forward(parameters, pictures.rows(0, tasks.images.stored.shape[1]))

    def logits(self, parameters: Parameters, tasks: TaskBatch) -> list[Tensor]:
        with computing(self.precision, tasks.query_labels.device):
            own = for_each_task(parameters, tasks)
            logits = self.model.classify(own[SCALE], self._encode(own, tasks).features, tasks.images)
        return [logits] * len(tasks.query_noise)

    def meta_gradient(self, parameters: Parameters, tasks: TaskBatch) -> MetaGradient:
        return self.recordings(self.compute, parameters, tasks)

    def compute(self, parameters: Parameters, tasks: TaskBatch) -> MetaGradient:
        with computing(self.precision, tasks.query_labels.device):
            own = for_each_task({key: value.detach() for key, value in parameters.items()}, tasks)
            encoded = self._encode(own, tasks)
            with torch.enable_grad():
                features, scale = encoded.features.requires_grad_(), own[SCALE].detach().requires_grad_()
                logits = self.model.classify(scale, features, tasks.images)
                loss = query_loss(logits, tasks)
                gradient, of_scale = torch.autograd.grad(loss.sum(), [features, scale])
            layout = Layout(own)
            flat = layout.zeros(tasks.n_tasks, gradient.device)
            out = layout.split(flat)
            out[SCALE].copy_(of_scale)
            self.encoder.backward(own, encoded, gradient, out)
            summed = {key: value[0] for key, value in layout.split(flat.sum(0, keepdim=True)).items()}
            return as_meta_gradient(summed, loss, logits, tasks, self.encoder.statistics(own, encoded))
