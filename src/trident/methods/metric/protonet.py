"""Prototypical Networks (Snell et al. 2017)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trident.methods.base import About, HeadOnFeatures, Parameters, Task, setting
from trident.nn.classes import class_means, squared_distances


@dataclass(frozen=True)
class ProtoNet(HeadOnFeatures):
    """A query belongs to the class whose mean support feature is nearest.

    Learned: the backbone, and one scale s of the squared distances. At test nothing is adapted:

        p(y = c | x)  ~  exp(-s ||f(x) - prototype_c||^2),   prototype_c = mean of f over the support images of class c

    The published method has no scale. Without it, most of the training goes into shrinking the features.
    """

    about = About("Prototypical Networks", "Snell et al. 2017", "Prototypical Networks for Few-shot Learning")
    initial_scale: float = setting(
        6.4, "start of the learned scale of squared distances, times the number of features", above=0
    )

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        return {"scale": torch.tensor(self.initial_scale / n_features)}

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        support, queries = features[:, task.support], features[:, task.queries]
        prototypes = class_means(support, task.support_labels, task.n_way)  # (task, n_way, feature)
        return -parameters["scale"] * squared_distances(queries, prototypes)
