"""PT-MAP (Hu et al. 2021): optimal transport of queries to classes of equal size."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, Parameters, Task, tunable
from trident.methods.transductive.base import TransductiveHead
from trident.methods.transductive.transport import power, sinkhorn
from trident.nn.classes import class_means, weighted_means


@dataclass(frozen=True)
class PtMap(TransductiveHead):
    """Queries are dealt out to the classes by optimal transport, in equal numbers; class means follow, for some rounds.

    Nothing is learned. Features f become g: the square root of each feature (`power`), of unit length, less the
    mean of the support set for support images and the mean of the queries for queries, again of unit length. The class
    means w_c start as those of the support set. In each round

        queries      p_ic ~ exp(-scale ||g_i - w_c||^2),  scaled by Sinkhorn's iteration to sum_c p_ic = 1 and
                            sum_i p_ic = n_queries / n_way
        class means  w_c  moves by `step` towards the mean of the support images of c and all queries, weighted by p_ic

    So it needs to know that all classes have equally many queries. Where they do not, or nobody knows, it still runs,
    but it deals out equal numbers all the same. The published code also rotates the features into fewer dimensions,
    which changes no distance, and makes up to 1,000 of Sinkhorn's iterations.
    """

    about = About(
        "PT-MAP",
        "Hu et al. 2021",
        "Leveraging the Feature Distribution in Transfer-based Few-Shot Learning",
        trained_on="nothing",
        transductive=True,
    )
    exponent: float = tunable(0.5, "exponent of the power transform of features", above=0)
    scale: float = tunable(10.0, "scale of squared distances in the logits", above=0)
    rounds: int = tunable(20, "how often class means move", most=1000, least=0)
    step: float = tunable(0.2, "how far class means move towards their new place: 1 is all the way", above=0)
    iterations: int = tunable(100, "Sinkhorn iterations in each round", most=1000, least=1)

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = F.normalize(power(features, self.exponent), dim=2)
        support, queries = features[:, task.support], features[:, task.queries]
        support = F.normalize(support - support.mean(1, keepdim=True), dim=2)
        queries = F.normalize(queries - queries.mean(1, keepdim=True), dim=2)
        features = torch.cat([support, queries], 1)
        means = class_means(support, task.support_labels, task.n_way)
        one_hot = F.one_hot(task.support_labels, task.n_way).to(features)
        sizes = features.new_full((len(features), task.n_way), task.n_queries / task.n_way)
        for step in range(self.rounds + 1):
            # The squared length of a query is the same for all classes, so it is left out.
            logits = self.scale * (2 * queries @ means.mT - means.square().sum(2)[:, None])
            logits = sinkhorn(logits, sizes, self.iterations)
            if step < self.rounds:
                belongs = torch.cat([one_hot, logits.exp()], 1)  # (task, image, n_way)
                means = means + self.step * (weighted_means(belongs.mT, features) - means)
        return logits
