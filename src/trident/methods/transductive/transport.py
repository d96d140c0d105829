"""Queries dealt out to classes of given sizes by optimal transport: PT-MAP and PEMnE-BMS."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, Parameters, Task, tunable
from trident.methods.transductive.base import TransductiveHead
from trident.nn.classes import class_means, weighted_means


def power(features: Tensor, exponent: float) -> Tensor:
    """(f + 1e-6) ** exponent, which makes the skewed features of a ReLU more like a Gaussian.

    Negative features, which few backbones have, keep their sign.
    """
    return torch.where(features < 0, -1.0, 1.0).to(features) * (features.abs() + 1e-6) ** exponent


def sinkhorn(logits: Tensor, sizes: Tensor, iterations: int, at_least: bool = False) -> Tensor:
    """Sinkhorn's iteration: change probabilities as little as possible until all classes have given sizes.

    Logits (task, query, n_way) -> logarithms of soft labels, whose sums over queries are `sizes` (task, n_way).
    Rows are scaled to sum 1, then columns to these sums, and so on. With `at_least`, only columns with smaller sums are
    scaled. Logarithms can neither overflow nor become 0.
    """
    wanted = sizes.clamp(min=1e-12).log()[..., None]  # (task, n_way, 1)
    logits = logits.mT.contiguous()  # (task, n_way, query): sums over long rows are faster
    for _ in range(iterations):
        logits = torch.log_softmax(logits, 1)
        of_sum_one = torch.log_softmax(logits, 2)
        logits = torch.maximum(logits, wanted + of_sum_one) if at_least else wanted + of_sum_one
    return logits.mT


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
