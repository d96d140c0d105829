"""Conv4 with a linear layer on top, all or part of which adapts to each task: the network of MAML and its relatives."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from trident.backbones.conv4 import NAME, Conv4Backbone, single_conv4
from trident.methods.base import Backbone, EpisodeSpec, Parameters, cross_entropy, setting, tunable
from trident.methods.inner_loop.base import Encodings, Evaluated, InnerLoopMethod, InnerLoopModel, Inputs
from trident.nn.batch_norm import WithStatistics
from trident.nn.linear import Linear

HEAD = "head"  # of the linear layer's parameters
SUPPORT_FEATURES = "support_features"


@dataclass(frozen=True)
class AdaptedConv4(InnerLoopMethod):
    """Base of MAML and its relatives: their settings.

    The linear layer has a learned row for each class of a task, so the weights are for one number of classes, and the
    order of a task's classes matters a little. Training tasks draw their classes in random order.
    """

    adapts_to_support_alone: ClassVar[bool] = True
    inner_rate: float = tunable(0.01, "learning rate of the inner steps")
    inner_steps: int = tunable(10, "inner steps at test", most=100)
    training_inner_steps: int | None = setting(
        5, "inner steps in training; 'none' takes as many as at test", most=100, least=0
    )

    def in_training(self) -> Self:
        steps = self.inner_steps if self.training_inner_steps is None else self.training_inner_steps
        return replace(self, inner_steps=steps)

    def model(self, backbone: Backbone, episode: EpisodeSpec) -> "AdaptedConv4Model":
        return AdaptedConv4Model(self, single_conv4(backbone, self.about.title), episode)


@dataclass(frozen=True)
class AdaptedConv4Model(InnerLoopModel):
    """The network. With transductive batch norm, support images and queries are normalised apart, as published."""

    method: AdaptedConv4
    backbone: Conv4Backbone
    episode: EpisodeSpec

    @property
    def head(self) -> Linear:
        return Linear(HEAD, self.backbone.n_features, self.episode.n_way)

    def initial(self, generator: torch.Generator) -> Parameters:
        return self.backbone.initial(generator) | self.head.initial(generator)

    def initial_running(self) -> Parameters:
        return self.backbone.initial_running()

    def features(self, parameters: Parameters, inputs: Inputs) -> WithStatistics:
        """Features (task, image, feature) of one set, and the batch-norm statistics."""
        task, rows = inputs.task, inputs.rows
        if inputs.encodings:
            return inputs.encodings["features"][:, rows], {}
        if inputs.target == "support" and SUPPORT_FEATURES in parameters:
            return parameters[SUPPORT_FEATURES], {}
        if inputs.target == "query" and inputs.statistics.source == "support":
            maps, seen = self.backbone(parameters, task, inputs.statistics)
            return maps[:, rows].flatten(2), seen
        maps, seen = self.backbone(parameters, task, inputs.statistics, rows)
        return maps.flatten(2), seen

    def start(self, parameters: Parameters, inputs: Inputs) -> tuple[Parameters, Any]:
        """If the backbone does not adapt, the support features are the same in all steps, so they are made once."""
        if self.method.adapts(NAME) or inputs.encodings is not None:
            return parameters, None
        return parameters | {SUPPORT_FEATURES: self.features(parameters, inputs._replace(target="support"))[0]}, None

    def loss(self, parameters: Parameters, inputs: Inputs) -> Evaluated:
        features, seen = self.features(parameters, inputs)
        logits = self.head(parameters, features)
        return Evaluated({"total": cross_entropy(logits, inputs.truth)}, logits, seen)

    def encode(self, parameters: Parameters, inputs: Inputs) -> Encodings:
        task, statistics = inputs.task, inputs.statistics
        if self.method.inner_steps:
            return {}  # adapted networks differ from task to task, so that nothing can be shared
        if statistics.source != "transductive" or 0 in (task.n_support, task.n_queries):
            return {"features": self.backbone(parameters, task, statistics)[0].flatten(2)}
        parts = [self.backbone(parameters, task, statistics, rows)[0] for rows in (task.support, task.queries)]
        return {"features": torch.cat(parts, 1).flatten(2)}

    def logits(self, parameters: Parameters, inputs: Inputs) -> list[Tensor]:
        return [self.head(parameters, self.features(parameters, inputs)[0])]
