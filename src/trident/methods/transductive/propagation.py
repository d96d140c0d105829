"""Graphs of the images of a task: labels that spread over them (EPNet, TPN), and k-reciprocal re-ranking."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, Losses, NormalisedHead, Parameters, Task, cross_entropy, tunable
from trident.methods.transductive.base import TransductiveHead
from trident.nn.classes import class_means, members_of
from trident.nn.linear import Linear, linear
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
        hidden = F.relu(linear(parameters, "lengths.0", features))
        g = linear(parameters, "lengths.1", hidden.mean(2))  # (task, image, 1)
        flat = features.flatten(2)
        scaled = flat * torch.exp(-3 * torch.tanh(g / 3))
        closeness = -pairwise_squared_distances(scaled) / (2 * flat.shape[2])  # (task, image, image)
        near = nearest(closeness.detach(), self.neighbours)
        weights = torch.maximum(near, near.mT) * closeness.exp()
        propagated = propagator(weights, self.flow)[:, :, task.support]
        return propagated @ F.one_hot(task.support_labels, task.n_way).to(features)


@dataclass(frozen=True)
class KReciprocal(TransductiveHead, NormalisedHead):
    """A query belongs to the class whose mean has the same neighbours as the query, and is near to it.

    Nothing is learned. Features are normalised (`NormalisedHead`). The nodes of a graph are the class means of the
    support set and all queries. d_ij is the distance 1 - cosine, divided by the largest one of node i. N(i, k) are the
    k nearest nodes of i, and i.

        reciprocal    R(i, k) = the j in N(i, k) that have i in N(j, k)
        extended      R*(i)   = R(i, k), and R(j, k/2) for every j in it if more than 2/3 of R(j, k/2) are in R(i, k)
        weights       v_ij ~ exp(-d_ij) for j in R*(i), otherwise 0, of sum 1;  then v_i = mean of v_j over the
                      `averaged` nearest nodes j of i, i among them
        Jaccard       J_ij    = 1 - sum_l min(v_il, v_jl) / sum_l max(v_il, v_jl)
        answer        p(y_i = c) ~ exp(-scale * ((1 - blend) J_ic + blend d_ic))

    The paper re-ranks a gallery of person images; Shen et al. 2021 report this step as a few-shot baseline.
    """

    about = About(
        "K-reciprocal re-ranking",
        "Zhong et al. 2017",
        "Re-ranking Person Re-identification with k-reciprocal Encoding",
        trained_on="nothing",
        transductive=True,
    )
    neighbours: int = tunable(20, "k: nearest neighbours of each node", most=10_000, least=1)
    averaged: int = tunable(6, "nearest nodes, itself among them, whose weights are averaged", most=1000, least=1)
    blend: float = tunable(0.3, "weight of the cosine distance beside the Jaccard distance")
    scale: float = tunable(10.0, "scale of distances in the logits: how confident the probabilities are", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.blend <= 1, f"method.blend is {self.blend}: it must be from 0 to 1")

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = self.normalised(parameters, features)
        means = class_means(features[:, task.support], task.support_labels, task.n_way)
        nodes = F.normalize(torch.cat([means, features[:, task.queries]], 1), dim=2)
        distances = (1 - nodes @ nodes.mT).clamp(min=0)  # (task, node, node)
        distances = distances / distances.amax(2, keepdim=True).clamp(min=1e-12)
        # A node comes first among its own neighbours, whatever rounding says.
        order = torch.diagonal_scatter(-distances, torch.ones_like(distances[:, 0]), dim1=1, dim2=2)
        whole, half = (self._reciprocal(order, k) for k in (self.neighbours, round(self.neighbours / 2)))
        inside = whole @ half  # (task, node i, node j): how many of R(j, k/2) are in R(i, k); both are symmetric
        extends = whole * (inside > 2 / 3 * half.sum(2)[:, None])
        extended = whole + extends @ half > 0
        weights = torch.softmax(torch.where(extended, -distances, -torch.inf), 2)
        graph = nearest(order, self.averaged)
        weights = graph @ weights / graph.sum(2, keepdim=True)
        of_classes, of_queries = weights[:, : task.n_way], weights[:, task.n_way :]
        shared = torch.minimum(of_queries[:, :, None], of_classes[:, None]).sum(3)  # (task, query, n_way)
        jaccard = 1 - shared / (2 - shared)  # minima and maxima together sum up to 2
        near = distances[:, task.n_way :, : task.n_way]
        return -self.scale * ((1 - self.blend) * jaccard + self.blend * near)

    @staticmethod
    def _reciprocal(order: Tensor, k: int) -> Tensor:
        graph = nearest(order, k + 1)
        return graph * graph.mT
