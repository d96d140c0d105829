"""Matching Networks (Vinyals et al. 2016), without full context embeddings."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, HeadOnFeatures, Parameters, Task, setting
from trident.nn.classes import members_of

TINY = 1e-12  # keeps the logarithm finite where a class gets no attention at all


@dataclass(frozen=True)
class MatchingNetwork(HeadOnFeatures):
    """A query takes the labels of the support images that it attends to.

    Learned: the backbone, and one scale s of the cosine. At test nothing is adapted:

        a(x, x_i) = softmax over all support images of  s cos(f(x), f(x_i))
        p(y = c | x) = sum of a(x, x_i) over the support images x_i of class c

    The paper's full context embeddings, two LSTMs over the support set, are left out: they depend on the order of the
    support images. The paper fixes s at 1, common re-implementations at 100; here it starts at 10 and is learned.
    """

    about = About("Matching Networks", "Vinyals et al. 2016", "Matching Networks for One Shot Learning")
    initial_scale: float = setting(10.0, "start of the learned scale of the cosine", above=0)

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        return {"scale": torch.tensor(self.initial_scale)}

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = F.normalize(features, dim=2)
        support, queries = features[:, task.support], features[:, task.queries]
        attention = torch.softmax(
            parameters["scale"] * queries @ support.transpose(1, 2), -1
        )  # (task, query, n_support)
        members = members_of(task.support_labels, task.n_way, features)  # (task, n_way, n_support)
        return torch.log(attention @ members.transpose(1, 2) + TINY)
