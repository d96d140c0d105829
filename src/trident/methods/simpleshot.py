"""SimpleShot (Wang et al. 2019)."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, ClassifierHead
from trident.nn.classes import class_means, squared_distances
from trident.nn.parameters import Parameters
from trident.settings import require_positive, setting
from trident.tasks.task import Task

MEAN = "mean_feature"  # of all training images


@dataclass(frozen=True)
class SimpleShot(ClassifierHead):
    """Nearest class mean on features that were trained as an ordinary classifier of all training classes.

    Learned: the backbone, with a linear layer that is not used afterwards. At test nothing is adapted: features are
    normalised, and a query belongs to the class whose mean support feature is nearest.

        UN     f(x)
        L2N    f(x) / ||f(x)||
        CL2N   (f(x) - m) / ||f(x) - m||,   m = running mean of the training features
    """

    about = About(
        "SimpleShot",
        "Wang et al. 2019",
        "SimpleShot: Revisiting Nearest-Neighbor Classification for Few-Shot Learning",
        trained_on="classes",
    )
    normalisation: Literal["UN", "L2N", "CL2N"] = setting(
        "CL2N", "of features: none, unit length, or centred on the training images and unit length", after_training=True
    )
    scale: float = setting(
        10.0, "of squared distances in the logits: how sure the probabilities are", after_training=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "method", "scale")

    def describe(self) -> str:
        return f"{self.normalisation} features"

    def initial_statistics(self, n_features: int) -> Parameters:
        return {MEAN: torch.zeros(n_features)}

    def statistics(self, features: Tensor) -> Parameters:
        return {MEAN: features.mean(1)}

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        if self.normalisation == "CL2N":
            features = features - parameters[MEAN]
        if self.normalisation != "UN":
            features = F.normalize(features, dim=2)
        support, queries = features[:, task.support], features[:, task.queries]
        prototypes = class_means(support, task.support_labels, task.n_way)  # (task, n_way, feature)
        return -self.scale * squared_distances(queries, prototypes)
