"""Soft k-means on features, for piles whose class sizes nobody knows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, Parameters, Task, tunable
from trident.methods.transductive.base import TransductiveHead


@dataclass(frozen=True)
class SoftKMeans(TransductiveHead):
    """Class means move towards the queries that look like them, and queries are classified anew, for a few rounds.

    Nothing is learned, so it works on any features. All features have unit length. In each round

        centre       m    = mean over classes of the class's mean feature
        directions   g_i  = (f_i - m) / ||f_i - m||
        class means  w_c ~  support_weight * sum of its support g_i  +  sum over queries of p_ic g_i,   of unit length
        queries      p_ic ~ share_c exp(scale * g_i . w_c)

    share_c is how large a part of the queries class c is expected to be, judged from the sums of p_ic (see
    `expected_shares`). The published method has equal shares and centre 0. With equal shares it spreads the queries
    over all classes even if some classes are rare or absent. The centre is a mean over classes, not over images, so
    that a frequent class does not pull it away. A pile may have images of no class. With `typical`, only the queries
    that are most similar to a class mean count in it, and in the centre of the classes.
    """

    about = About(
        "Soft k-means with class sizes",
        "Ren et al. 2018",
        "Meta-Learning for Semi-Supervised Few-Shot Classification",
        trained_on="nothing",
        transductive=True,
    )
    rounds: int = tunable(8, "how often class means and probabilities are computed anew", most=1000, least=0)
    scale: float = tunable(10.0, "factor of the cosines in the logits", above=0)
    support_weight: float = tunable(1.5, "weight of a support image in its class mean", above=0)
    centre: Literal["classes", "task", "support"] = tunable(
        "classes",
        "subtracted from features: the mean of the class means, of all images, or of the support set's class means",
    )
    class_sizes: Literal["learned", "equal"] = tunable(
        "learned", "shares of the classes among the queries: judged from the queries, or taken as equal"
    )
    typical: float | None = tunable(
        None,
        "for piles with images of no class: how many queries move a class mean, the most similar ones; 0.75 means "
        "0.75 x queries / classes, 'none' means all",
        most=10_000,
        above=0,
    )

    @property
    def classifies_together(self) -> bool:
        return self.rounds > 0 or self.centre == "task"

    def describe(self) -> str:
        typical = "" if self.typical is None else f", method.typical {self.typical:g}"
        return f"{self.rounds} rounds, {self.class_sizes} class sizes{typical}"

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        *_, logits = self.rounds_of(features, task)
        return logits

    def rounds_of(self, features: Tensor, task: Task) -> Iterator[Tensor]:
        """The logits (task, query, n_way) before the first round, and after each."""
        features = F.normalize(features, dim=2)
        one_hot = F.one_hot(task.support_labels, task.n_way).to(features)  # (task, n_support, n_way)
        support = self.support_weight * one_hot
        belongs = F.pad(support, (0, 0, 0, task.n_queries))  # (task, image, n_way): weights in the class means
        mean_of_all = features.mean(1, keepdim=True)  # (task, 1, feature)
        counts = features.new_zeros(len(features), task.n_way)  # queries that each class is expected to have
        for step in range(self.rounds + 1):
            if self.centre == "task":
                centre = mean_of_all
            elif self.centre == "classes" or step == 0:
                centre = (belongs.mT @ features / belongs.sum(1)[..., None]).mean(1, keepdim=True)
            lengths = _distances(features, centre)  # (task, image, 1)
            weights = belongs / lengths
            means = weights.mT @ features - weights.sum(1)[..., None] * centre  # without a copy of all directions
            means = F.normalize(means, dim=2)  # (task, n_way, feature)
            cosines = (features @ means.mT - centre @ means.mT) / lengths  # (task, image, n_way)
            logits = self.scale * cosines[:, task.queries]
            if step and self.class_sizes == "learned":
                logits = logits + expected_shares(counts).log()[:, None]
            yield logits
            probabilities = logits.softmax(2)
            counts = probabilities.sum(1)
            belongs = torch.cat([support, probabilities * self._typical(cosines[:, task.queries])], 1)

    def _typical(self, cosines: Tensor) -> Tensor | float:
        """Whether a query (task, query, n_way) may move a class mean: 1 or 0."""
        if self.typical is None:
            return 1.0
        n_queries, n_way = cosines.shape[1:]
        at_most = min(max(1, round(self.typical * n_queries / n_way)), n_queries)
        return (cosines >= cosines.topk(at_most, 1).values[:, -1:]).to(cosines)


def _distances(features: Tensor, centre: Tensor) -> Tensor:
    """Of unit vectors (task, image, feature) from one point (task, 1, feature): (task, image, 1)."""
    squared = 1 - 2 * features @ centre.mT + (centre * centre).sum(2, keepdim=True)
    return squared.clamp(min=1e-6).sqrt()


_CONCENTRATIONS = torch.logspace(-1.5, 3, 40)  # from "one class has nearly everything" to "all classes are equal"
_TOWARDS_EQUAL = 0.5  # the prior of a concentration a is a ** 0.5 on a logarithmic scale


def expected_shares(counts: Tensor) -> Tensor:
    """The expected share of each class, from soft counts of pictures: both (task, class).

    Shares have a symmetric Dirichlet prior whose concentration is unknown. Each concentration is weighted by how well
    it explains the counts. Nearly equal counts therefore give equal shares, and lopsided counts are taken as they are.
    """
    n_classes = counts.shape[1]
    a = _CONCENTRATIONS.to(counts)  # (concentration,)
    total = counts.sum(1, keepdim=True)  # (task, 1)
    each = torch.lgamma(counts[:, :, None] + a) - torch.lgamma(a)  # (task, class, concentration)
    evidence = torch.lgamma(n_classes * a) - torch.lgamma(total + n_classes * a) + each.sum(1)
    weights = torch.softmax(evidence + _TOWARDS_EQUAL * a.log(), 1)  # (task, concentration)
    shares = (counts[:, :, None] + a) / (total + n_classes * a)[:, None]  # (task, class, concentration)
    return (shares * weights[:, None]).sum(2)
