"""The yardstick: a Prototypical Network (Snell et al. 2017) on the same Conv4, trained and measured the same way.

Queries are classified by their squared distance to the mean features of the support classes. There is nothing to adapt,
nothing to sample and nothing to reconstruct. Distances are multiplied by a learned scale, as TRIDENT's to its
prototypes are: without it most of the training goes into shrinking sixteen hundred features.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.learning.inner_loop import MetaGradient, TaskBatch, for_each_task, matrix_products
from trident.methods.trident.network import TaskImages
from trident.methods.trident.objective import LossParts
from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.classes import class_means, members_of
from trident.nn.conv4 import Conv4
from trident.nn.parameters import Parameters
from trident.settings import EpisodeSpec, ModelSettings

SCALE = 6.4  # start of the learned scale of distances, over the number of features


@dataclass(frozen=True)
class ProtoNet:
    settings: ModelSettings
    episode: EpisodeSpec

    @property
    def encoder(self) -> Conv4:
        s = self.settings
        return Conv4("label_encoder", s.image_channels, s.label_encoder_channels, s.activation, s.block_order)

    def initial(self, seed: int) -> Parameters:
        scale = torch.tensor(SCALE / self.encoder.n_features(self.settings.image_size))
        return self.encoder.initial(torch.Generator().manual_seed(seed)) | {"classifier.scale": scale}

    def initial_running(self) -> Parameters:
        return {key: value for layer in self.encoder.layers for key, value in layer.initial_running().items()}

    def __call__(self, parameters: Parameters, images: TaskImages, statistics: BatchNormStatistics) -> Tensor:
        """Logits of the queries: (task, query, n_way)."""
        features = self.encoder(parameters, images.for_encoders, statistics)
        return self.classify(parameters["classifier.scale"], features, images)

    def classify(self, scale: Tensor, features: Tensor, images: TaskImages) -> Tensor:
        """The same, from the scale (task,) and the feature maps of all images (task, image, h, w, channel)."""
        features, n = features.flatten(2), images.n_support  # (task, image, feature)
        members = members_of(images.support_labels, self.episode.n_way, features)
        prototypes = class_means(members, features[:, :n])  # (task, n_way, feature)
        return -scale[:, None, None] * (features[:, n:, None] - prototypes[:, None]).square().sum(3)


@dataclass(frozen=True)
class ProtoNetLearner:
    """To be trained and measured as `trident.learning.inner_loop.Learner` is."""

    model: ProtoNet
    batch_norm: str = "transductive"
    running: Parameters | None = None
    precision: str = "fp32"

    def statistics(self, images: TaskImages | None = None) -> BatchNormStatistics:
        """For these images; classes may have other numbers of shots in them than the episode says."""
        n_support = self.model.episode.n_support if images is None else images.n_support
        return BatchNormStatistics(self.batch_norm, n_support, self.running or {})

    def logits(self, parameters: Parameters, tasks: TaskBatch) -> list[Tensor]:
        """Of the queries: (task, query, n_way). There is no noise, so whichever draw it is."""
        with torch.no_grad(), matrix_products(self.precision, tasks.query_labels.device):
            logits = self.model(for_each_task(parameters, tasks), tasks.images, self.statistics(tasks.images))
        return [logits] * len(tasks.query_noise)

    def meta_gradient(self, parameters: Parameters, tasks: TaskBatch) -> MetaGradient:
        leaves = {key: value.detach().requires_grad_() for key, value in parameters.items()}
        statistics = self.statistics(tasks.images)
        with matrix_products(self.precision, tasks.query_labels.device), torch.enable_grad():
            logits = self.model(for_each_task(leaves, tasks), tasks.images, statistics)
            loss = query_loss(logits, tasks)
            found = torch.autograd.grad(loss.sum(), list(leaves.values()), materialize_grads=True)
        return as_meta_gradient(dict(zip(leaves, found, strict=True)), loss, logits, tasks, statistics.seen)


def query_loss(logits: Tensor, tasks: TaskBatch) -> Tensor:
    """Mean cross-entropy of each task's queries: (task,)."""
    return F.cross_entropy(logits.transpose(1, 2), tasks.query_labels, reduction="none").mean(1)


def as_meta_gradient(
    gradient: Parameters, loss: Tensor, logits: Tensor, tasks: TaskBatch, seen: Parameters
) -> MetaGradient:
    loss, none = loss.detach(), torch.zeros_like(loss.detach())
    accuracy = (logits.detach().argmax(-1) == tasks.query_labels).float().mean(1)
    return MetaGradient(gradient, LossParts(loss, loss, none, none, none, none), accuracy, seen, loss.isfinite())
