"""Bases of heads that classify the queries together."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from trident.methods.base import Backbone, EpisodeSpec, HeadModel, HeadOnFeatures, Method, Parameters, setting
from trident.methods.metric.nearest_mean import NearestMean
from trident.methods.metric.normalised import NormalisedHead


@dataclass(frozen=True)
class TransductiveHead(HeadOnFeatures):
    """Base of heads that learn from the queries. A few queries go to the nearest class mean instead."""

    def for_few_queries(self) -> Method:
        return NearestMean()


@dataclass(frozen=True)
class FixedShapeHead(TransductiveHead, NormalisedHead):
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

    def model(self, backbone: Backbone, episode: EpisodeSpec) -> "FixedShapeModel":
        return FixedShapeModel(self, backbone, episode)


@dataclass(frozen=True)
class FixedShapeModel(HeadModel):
    method: FixedShapeHead
    episode: EpisodeSpec

    def initial(self, generator: torch.Generator) -> Parameters:
        own = self.method.initial_for(self.n_features, self.episode, generator)
        return self.backbone.initial(generator) | own
