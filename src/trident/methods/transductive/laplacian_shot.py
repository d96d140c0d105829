"""LaplacianShot (Ziko et al. 2020): the nearest class mean, if near queries agree."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trident.methods.base import About, NormalisedHead, Parameters, Task, tunable
from trident.methods.transductive.base import TransductiveHead
from trident.methods.transductive.bd_cspn import rectified_means, shifted_queries
from trident.methods.transductive.propagation import nearest
from trident.nn.classes import squared_distances


@dataclass(frozen=True)
class LaplacianShot(TransductiveHead, NormalisedHead):
    """Nearest class mean, with the wish that a query has the same class as the queries nearest to it.

    Nothing is learned. Features f are normalised (`NormalisedHead`), queries are shifted, and class means w_c are
    rectified with them (`bd_cspn.py`). W_ij is 1 if query j is one of the nearest neighbours of query i, otherwise 0.
    In each round

        q_ic ~ exp(-||f_i - w_c||^2 + smoothness * sum_j W_ij q_jc)

    starting without the sum. The shift moves the queries' mean onto the support set's. A single query is moved exactly
    there, so every single query gets the same class. Without the shift accuracy was higher by 0.2 ± 0.2 points with
    one shot and 0.0 ± 0.1 with five (1,000 balanced tasks, Conv4 features of miniImageNet's validation classes), and by
    1.2 ± 0.3 and 2.3 ± 0.2 on Dirichlet tasks. The published code stops when the objective no longer changes, and takes
    smoothness from validation: 0.7 for one shot, 0.3 for five.
    """

    about = About(
        "LaplacianShot",
        "Ziko et al. 2020",
        "Laplacian Regularized Few-Shot Learning",
        trained_on="nothing",
        transductive=True,
    )
    smoothness: float = tunable(0.7, "weight of the neighbours' labels", least=0)
    neighbours: int = tunable(2, "nearest neighbours of each query, itself not counted", most=10_000, least=1)
    rounds: int = tunable(20, "how often probabilities are computed anew", most=1000, least=0)

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = self.normalised(parameters, features)
        means, queries = rectified_means(features, task), shifted_queries(features, task)
        # Of the squared distances between queries, a row's own squared length changes no order.
        near = 2 * queries @ queries.mT - queries.square().sum(2)[:, None]
        near.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
        graph = nearest(near, min(self.neighbours, task.n_queries - 1))  # (task, query, query)
        own = -squared_distances(queries, means)  # (task, query, n_way)
        logits = own
        for _ in range(self.rounds):
            logits = own + self.smoothness * graph @ torch.softmax(logits, 2)
        return logits
