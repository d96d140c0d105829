"""TPN, transductive propagation networks (Liu et al. 2019): labels spread over a learned graph of the images."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, Losses, Parameters, Task, cross_entropy, tunable
from trident.methods.transductive.base import TransductiveHead
from trident.methods.transductive.propagation import nearest, pairwise_squared_distances, propagator
from trident.nn.linear import Linear, linear
from trident.settings import require
from trident.tasks.task import Labels, all_labels

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
