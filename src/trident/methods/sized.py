"""Heads whose weights have a place for each class or image of a task, so that they take tasks of one shape only."""

from abc import abstractmethod
from dataclasses import dataclass

import torch

from trident.backbones.base import Backbone
from trident.methods.base import HeadModel, HeadOnFeatures, Method
from trident.methods.nearest_mean import NearestMean
from trident.nn.parameters import Parameters
from trident.settings import EpisodeSpec


@dataclass(frozen=True)
class SizedHead(HeadOnFeatures):
    """Base of heads whose parameters depend on the number of classes. It takes no other number after training."""

    @abstractmethod
    def initial_for(self, n_features: int, episode: EpisodeSpec, generator: torch.Generator) -> Parameters:
        """The head's own parameters, for tasks of this shape."""

    @property
    def any_way(self) -> bool:
        return False

    def for_few_queries(self) -> Method:
        return NearestMean()

    def model(self, backbone: Backbone, episode: EpisodeSpec) -> "SizedModel":
        return SizedModel(self, backbone, episode)


@dataclass(frozen=True)
class SizedModel(HeadModel):
    method: SizedHead
    episode: EpisodeSpec

    def initial(self, generator: torch.Generator) -> Parameters:
        own = self.method.initial_for(self.n_features, self.episode, generator)
        return self.backbone.initial(generator) | own
