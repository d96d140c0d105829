"""Nearest mean on frozen features (Wang et al. 2019)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, HeadOnFeatures, Parameters, Task, tunable
from trident.nn.classes import class_means


@dataclass(frozen=True)
class NearestMean(HeadOnFeatures):
    """A query belongs to the class whose mean support feature has the largest cosine with its own.

    Nothing is learned, so it works on any features.

        p(y = c | x)  ~  exp(scale * cos(f(x), mean of f / ||f|| over the support images of class c))
    """

    about = About(
        "Nearest mean",
        "Wang et al. 2019",
        "SimpleShot: Revisiting Nearest-Neighbor Classification for Few-Shot Learning",
        trained_on="nothing",
    )
    scale: float = tunable(20.0, "scale of cosines in the logits: how confident the probabilities are", above=0)

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = F.normalize(features, dim=2)
        prototypes = class_means(features[:, task.support], task.support_labels, task.n_way)  # (task, n_way, feature)
        return self.scale * features[:, task.queries] @ F.normalize(prototypes, dim=2).mT
