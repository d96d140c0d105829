"""Graphs of the images of a task, and labels that spread over them: EPNet and TPN."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, Losses, Parameters, Task, cross_entropy, tunable
from trident.methods.transductive.base import TransductiveHead
from trident.nn.classes import members_of
from trident.nn.linear import Linear
from trident.settings import require
from trident.tasks.task import Labels, all_labels


def pairwise_squared_distances(features: Tensor) -> Tensor:
    """Squared distances between all images of a task: (task, image, feature) -> (task, image, image)."""
    lengths = features.square().sum(2)
    return (lengths[:, :, None] + lengths[:, None] - 2 * features @ features.mT).clamp(min=0)


def propagator(weights: Tensor, flow: float) -> Tensor:
    """(I - flow * S)^-1 with S = D^-1/2 W D^-1/2, where D has the row sums of W: (task, image, image), the same shape.

    `flow` must be below 1, and W symmetric and not negative. Then the eigenvalues of flow * S are below 1, and the
    inverse exists. So no error needs to be raised, for which the CPU would have to wait for a GPU.
    """
    scales = (weights.sum(2) + 1e-4).rsqrt()  # (task, image)
    normalised = scales[:, :, None] * weights * scales[:, None]
    n = weights.shape[1]
    system = torch.eye(n, dtype=weights.dtype, device=weights.device) - flow * normalised
    # Beyond these sizes torch hands batches to the library MAGMA, whose calls a CUDA graph cannot record.
    parts = torch.split(system, 16 if n <= 128 else 1)
    return torch.cat([torch.linalg.inv_ex(part).inverse for part in parts])


def nearest(similarities: Tensor, k: int) -> Tensor:
    """1 where column j is among the k largest entries of row i, otherwise 0: (task, image, image), the same shape."""
    k = min(k, similarities.shape[2])
    return torch.zeros_like(similarities).scatter_(2, similarities.topk(k, 2).indices, 1.0)


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
        spread = F.normalize(self._propagator(features, self.label_flow), p=1, dim=2)
        members = members_of(task.support_labels, task.n_way, features)  # (task, n_way, n_support)
        shares = members / members.sum(2, keepdim=True)
        return torch.log(spread[:, task.queries, task.support] @ shares.mT + TINY)

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


WIDTH = 8  # of the network for the length scales


@dataclass(frozen=True)
class Tpn(TransductiveHead):
    """Labels spread from the support set over a graph of all images; the network learns which images are near.

    Learned, end to end: the backbone, and a small network that gives each image a length scale s. At test nothing is
    adapted. Over all images of a task, support and queries,

        length scale   s_i  = exp(3 tanh(g_i / 3)),  g_i = linear(mean over cells of ReLU(linear(cell)))
        graph          W_ij = exp(-1/2 mean over features of (f_i / s_i - f_j / s_j)^2),  where j is one of the
                       `neighbours` nearest of i or i of j, itself counted;  otherwise 0
        scores         F    = (I - flow * D^-1/2 W D^-1/2)^-1 Y,   D the row sums of W

    with rows of Y one-hot for support images, 0 for queries. p(y_i = c) ~ exp(F_ic). The loss is the mean cross-entropy
    of support images and queries. The published network for s has two 3x3 convolutions with batch norm and its output
    has no bounds; here it looks at each cell by itself, so that it takes maps of any size,
    and starts with length scales near 0.2.
    """

    takes_cells: ClassVar[bool] = True
    about = About(
        "TPN",
        "Liu et al. 2019",
        "Learning to Propagate Labels: Transductive Propagation Network for Few-Shot Learning",
        transductive=True,
    )
    flow: float = tunable(0.99, "how far labels spread: from 0 to below 1")
    neighbours: int = tunable(20, "nearest images of each image in the graph, itself counted", most=10_000, least=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.flow < 1, f"method.flow is {self.flow}: it must be 0 or more, and below 1")

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        hidden, last = Linear("lengths.0", n_features, WIDTH), Linear("lengths.1", WIDTH, 1)
        # Features have a variance near 1. With longer length scales, all images would be equally near at first.
        return hidden.initial(generator) | last.initial(generator) | {"lengths.1.bias": torch.tensor([-2.0])}

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        return self._scores(parameters, features, task)[:, task.queries]

    def training(self, parameters: Parameters, features: Tensor, task: Task, labels: Labels) -> tuple[Tensor, Losses]:
        scores = self._scores(parameters, features, task)
        return scores[:, task.queries], {"total": cross_entropy(scores, all_labels(task, labels))}

    def _scores(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        """F above: (task, image, cell, channel) -> (task, image, n_way)."""
        hidden = F.relu(F.linear(features, parameters["lengths.0.weight"], parameters["lengths.0.bias"]))
        g = F.linear(hidden.mean(2), parameters["lengths.1.weight"], parameters["lengths.1.bias"])  # (task, image, 1)
        flat = features.flatten(2)
        scaled = flat * torch.exp(-3 * torch.tanh(g / 3))
        closeness = -pairwise_squared_distances(scaled) / (2 * flat.shape[2])  # (task, image, image)
        near = nearest(closeness.detach(), self.neighbours)
        weights = torch.maximum(near, near.mT) * closeness.exp()
        spread = propagator(weights, self.flow)[:, :, task.support]
        return spread @ F.one_hot(task.support_labels, task.n_way).to(features)
