"""Heads whose parameters depend on the shape of a task, so that they take tasks of one shape only."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from trident.backbones.base import Backbone
from trident.methods.base import HeadModel, Method
from trident.methods.metric.nearest_mean import NearestMean
from trident.methods.metric.normalised import NormalisedHead
from trident.nn.parameters import Parameters
from trident.settings import EpisodeSpec, setting


@dataclass(frozen=True)
class FixedShapeHead(NormalisedHead):
    """Base of heads whose parameters depend on the number of classes. They take no other number after training."""

    normalisation: Literal["UN", "L2N", "CL2N"] = setting(
        "L2N", "normalisation of features: none, unit length, or centred on the training images and unit length"
    )

    @abstractmethod
    def initial_for(self, n_features: int, episode: EpisodeSpec, generator: torch.Generator) -> Parameters:
        """The head's own parameters, for tasks of this shape."""

    @property
    def any_way(self) -> bool:
        return False

    def for_few_queries(self) -> Method:
        return NearestMean()

    def model(self, backbone: Backbone, episode: EpisodeSpec) -> "FixedShapeModel":
        return FixedShapeModel(self, backbone, episode)


@dataclass(frozen=True)
class FixedShapeModel(HeadModel):
    method: FixedShapeHead
    episode: EpisodeSpec

    def initial(self, generator: torch.Generator) -> Parameters:
        own = self.method.initial_for(self.n_features, self.episode, generator)
        return self.backbone.initial(generator) | own
