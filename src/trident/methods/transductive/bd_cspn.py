"""BD-CSPN (Liu et al. 2020): class means rectified once with the queries."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, NormalisedHead, Parameters, Task, tunable
from trident.methods.transductive.base import TransductiveHead
from trident.nn.classes import class_means, squared_distances


@dataclass(frozen=True)
class BdCspn(TransductiveHead, NormalisedHead):
    """Queries are shifted onto the support set, and class means are rectified once with the queries nearest to them.

    Nothing is learned. Features f are normalised (`NormalisedHead`). Then

        shift              f'_i = f_i + mean of the support set - mean of the queries,   for queries
        probabilities      p_ic ~ exp(10 cos(f'_i, w_c)),   w_c the mean of the support images of class c
        rectified means    w'_c = mean of p_ic f'_i over all images, support and queries, whose likeliest class is c
        answer             p(y_i = c) ~ exp(-scale ||f_i - w'_c||^2)

    This is what the public code does, in which a class may lose its own support images; the paper normalises the p_ic
    of a class to sum 1 and compares cosines. A class that is the likeliest of no image keeps its mean.
    """

    about = About(
        "BD-CSPN",
        "Liu et al. 2020",
        "Prototype Rectification for Few-Shot Learning",
        trained_on="nothing",
        transductive=True,
    )
    scale: float = tunable(10.0, "scale of squared distances in the logits", above=0)

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = self.normalised(parameters, features)
        return -self.scale * squared_distances(features[:, task.queries], rectified_means(features, task))


def rectified_means(features: Tensor, task: Task) -> Tensor:
    """w'_c above: (task, image, feature) -> (task, n_way, feature)."""
    support = features[:, task.support]
    means = class_means(support, task.support_labels, task.n_way)
    features = torch.cat([support, shifted_queries(features, task)], 1)
    cosines = F.normalize(features, dim=2) @ F.normalize(means, dim=2).mT  # (task, image, n_way)
    nearest = F.one_hot(cosines.argmax(2), task.n_way).to(features)
    counts = nearest.sum(1)[..., None]  # (task, n_way, 1)
    rectified = (nearest * torch.softmax(10 * cosines, 2)).mT @ features / counts.clamp(min=1)
    return torch.where(counts > 0, rectified, means)


def shifted_queries(features: Tensor, task: Task) -> Tensor:
    """f'_i above: (task, image, feature) -> (task, query, feature)."""
    support, queries = features[:, task.support], features[:, task.queries]
    return queries + support.mean(1, keepdim=True) - queries.mean(1, keepdim=True)
