"""PEMnE-BMS (Hu et al. 2022): optimal transport of queries to classes of which none is too small."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, Parameters, Task, tunable
from trident.methods.transductive.base import TransductiveHead
from trident.methods.transductive.transport import power, sinkhorn
from trident.nn.classes import class_means


@dataclass(frozen=True)
class Bms(TransductiveHead):
    """Queries are dealt out to the classes so that none is too small; class means follow, for some rounds.

    Nothing is learned. Features f become g: the square root of each feature (`power`), of unit length, less the
    mean of all images of the task, again of unit length. Class means w_c start as those of the support set, of unit
    length. In each round

        queries      p_ic ~ exp(scale * g_i . w_c),  then for some iterations: rows are scaled to sum_c p_ic = 1,
                            and columns with sum_i p_ic < smallest to sum_i p_ic = smallest
        class means  w_c  = mean of the support images of c and all queries, weighted by p_ic, of unit length
        smallest          = number of images in the class with the fewest, if each goes to its likeliest class

    `smallest` starts as the number of shots. Labelled images count in it, as in the published code, although it bounds
    the number of queries: with five shots and 15 queries of each class it soon reaches the mean class size. With
    class_sizes = "equal" (the published BMS*, for tasks that are known to have equally many queries of each class) all
    columns are scaled to n_queries / n_way instead. The published code can also fit w_c by gradient steps in each
    round; by default it does not, and that is left out here.
    """

    about = About(
        "PEMnE-BMS",
        "Hu et al. 2022",
        "Squeezing Backbone Feature Distributions to the Max for Efficient Few-Shot Learning",
        trained_on="nothing",
        transductive=True,
    )
    class_sizes: Literal["lower_bound", "equal"] = tunable(
        "lower_bound",
        "sizes of the classes among the queries: at least as many as of the smallest class so far; or equal",
    )
    scale: float = tunable(8.5, "scale of cosines in the logits", above=0)
    rounds: int = tunable(20, "how often class means and probabilities are computed anew", most=1000, least=1)
    iterations: int = tunable(50, "Sinkhorn iterations in each round", most=1000, least=1)

    def describe(self) -> str:
        return f"{self.class_sizes.replace('_', ' ')} class sizes"

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = F.normalize(power(features, 0.5), dim=2)
        features = F.normalize(features - features.mean(1, keepdim=True), dim=2)
        one_hot = F.one_hot(task.support_labels, task.n_way).to(features)  # (task, n_support, n_way)
        means = class_means(features[:, task.support], task.support_labels, task.n_way)
        smallest = one_hot.sum(1).amin(1, keepdim=True)  # (task, 1)
        known = self.class_sizes == "equal"
        for _ in range(self.rounds):
            logits = self.scale * features[:, task.queries] @ F.normalize(means, dim=2).mT
            sizes = torch.full_like(smallest, task.n_queries / task.n_way) if known else smallest
            logits = sinkhorn(logits, sizes.expand(-1, task.n_way), self.iterations, at_least=not known)
            belongs = torch.cat([one_hot, logits.exp()], 1)  # (task, image, n_way)
            means = belongs.mT @ features  # sums: their length does not matter
            smallest = F.one_hot(belongs.argmax(2), task.n_way).sum(1).amin(1, keepdim=True).to(features)
        return logits
