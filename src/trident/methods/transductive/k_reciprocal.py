"""K-reciprocal re-ranking (Zhong et al. 2017): the nearest class mean, by shared neighbours."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, NormalisedHead, Parameters, Task, tunable
from trident.methods.transductive.base import TransductiveHead
from trident.methods.transductive.propagation import nearest
from trident.nn.classes import class_means
from trident.settings import require


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
