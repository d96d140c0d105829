"""EPNet (Rodríguez et al. 2020): features and labels spread over a graph of the images."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, Parameters, Task, tunable
from trident.methods.transductive.base import TransductiveHead
from trident.methods.transductive.propagation import pairwise_squared_distances, propagator
from trident.nn.classes import members_of
from trident.settings import require

TINY = 1e-6  # keeps the logarithm finite where nothing of a class arrives


@dataclass(frozen=True)
class EpNet(TransductiveHead):
    """Features of a task are blended with those of similar images; then labels spread from image to image.

    Learned: the backbone. The head has no weights. Over all images of a task, support and queries,

        graph         W_ij = exp(-scale * d_ij),  d = squared distances divided by their standard deviation;  W_ii = 0
        propagator    P(a) = (I - a D^-1/2 W D^-1/2)^-1,   D the row sums of W
        features      f'   = P(feature_flow) f
        labels        p(y_i = c) ~ 1e-6 + mean over the support images j of class c of P'_ij / sum_l P'_il

    where P' = P(label_flow) of a graph of f'. The published method first trains its Conv4, averaged to 64 features,
    as a classifier with rotated images, and goes on classifying the training classes during the episodes; here the
    features are the whole 5x5 map, and training on episodes starts from the weights that the recipe names.
    """

    about = About(
        "EPNet",
        "Rodríguez et al. 2020",
        "Embedding Propagation: Smoother Manifold for Few-Shot Classification",
        transductive=True,
    )
    feature_flow: float = tunable(0.5, "how far features spread: from 0 to below 1")
    label_flow: float = tunable(0.2, "how far labels spread: from 0 to below 1")
    scale: float = tunable(1.0, "scale of squared distances in the graph", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("feature_flow", "label_flow"):
            value = getattr(self, name)
            require(0 <= value < 1, f"method.{name} is {value}: it must be 0 or more, and below 1")

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = self._propagator(features, self.feature_flow) @ features
        propagated = F.normalize(self._propagator(features, self.label_flow), p=1, dim=2)
        members = members_of(task.support_labels, task.n_way, features)  # (task, n_way, n_support)
        shares = members / members.sum(2, keepdim=True)
        return torch.log(propagated[:, task.queries, task.support] @ shares.mT + TINY)

    def _propagator(self, features: Tensor, flow: float) -> Tensor:
        """(task, image, feature) -> (task, image, image)."""
        distances = pairwise_squared_distances(features)
        # Only ratios of distances matter. Without this, squares of large distances would overflow.
        distances = distances / distances.detach().amax((1, 2), keepdim=True).clamp(min=1e-30)
        n = distances.shape[1]
        others = 1 - torch.eye(n, dtype=features.dtype, device=features.device)
        mean = distances.sum((1, 2), keepdim=True) / (n * (n - 1))  # distances to itself are 0
        variance = (others * (distances - mean).square()).sum((1, 2), keepdim=True) / (n * (n - 1) - 1)
        deviation = variance.clamp(min=1e-10).sqrt()
        return propagator(others * torch.exp(-self.scale * distances / deviation), flow)
