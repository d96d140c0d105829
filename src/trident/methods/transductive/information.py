"""Class weights fitted to each task by information maximisation: TIM, alpha-TIM and entropy minimisation."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, Parameters, Task, tunable
from trident.methods.transductive.base import TransductiveHead
from trident.nn.classes import class_means, span_coordinates

_DECAYS = 0.9, 0.999  # of Adam's two running means
_TINY = 1e-12


@dataclass(frozen=True)
class InformationLoss:
    """The loss that class weights w_c minimise, with three weights:

        cross_entropy * cross-entropy of the support set
            + conditional_entropy * mean of H(p_i)  -  marginal_entropy * H(mean of p_i)

    The means are over the queries; p_ic ~ exp(-scale/2 ||f_i - w_c||^2); H is Tsallis's entropy with this alpha,
    (1 - sum_c p_c^alpha) / (alpha - 1), which is Shannon's for alpha = 1.
    """

    cross_entropy: float
    conditional_entropy: float
    marginal_entropy: float
    scale: float
    alpha: float = 1.0

    def logits(self, features: Tensor, weights: Tensor) -> Tensor:
        """(task, image, feature) and (task, n_way, feature) -> (task, image, n_way).

        An image's squared length is left out: it is the same for all classes.
        """
        products = weights @ features.mT  # (task, n_way, image): faster than the other way round
        return self.scale * (products - weights.square().sum(2, keepdim=True) / 2).mT

    def gradient(self, features: Tensor, one_hot: Tensor, weights: Tensor) -> Tensor:
        """The gradient of the loss with respect to the weights. `one_hot`: the labels of the first images."""
        n_support = one_hot.shape[1]
        log_p = torch.log_softmax(self.logits(features, weights), 2)
        p = log_p.exp()
        of_queries = p[:, n_support:]
        mean = of_queries.mean(1, keepdim=True).clamp(min=_TINY)
        if self.alpha == 1:  # p times the derivative of the loss by p; a constant in the derivative changes nothing
            by_p = of_queries * (self.marginal_entropy * mean.log() - self.conditional_entropy * log_p[:, n_support:])
        else:
            slope = self.alpha / (self.alpha - 1)
            by_p = of_queries * (self.marginal_entropy * slope * mean ** (self.alpha - 1))
            by_p = by_p - self.conditional_entropy * slope * (self.alpha * log_p[:, n_support:]).exp()
        by_query_logits = (by_p - of_queries * by_p.sum(2, keepdim=True)) / of_queries.shape[1]
        by_support_logits = (p[:, :n_support] - one_hot) * (self.cross_entropy / n_support)
        by_logits = torch.cat([by_support_logits, by_query_logits], 1)  # (task, image, n_way)
        return self.scale * (by_logits.mT @ features - by_logits.sum(1)[..., None] * weights)

    def fitted(self, features: Tensor, labels: Tensor, n_way: int, steps: int, rate: float) -> Tensor:
        """Class weights after these steps of Adam from the class means: (task, n_way, feature).

        `labels` (task, n_support) are those of the first images.
        """
        features = features.detach()
        one_hot = F.one_hot(labels, n_way).to(features)
        weights = class_means(features[:, : labels.shape[1]], labels, n_way)
        first, second = torch.zeros_like(weights), torch.zeros_like(weights)
        for step in range(1, steps + 1):
            gradient = self.gradient(features, one_hot, weights)
            first.lerp_(gradient, 1 - _DECAYS[0])
            second.mul_(_DECAYS[1]).addcmul_(gradient, gradient, value=1 - _DECAYS[1])
            length = second.sqrt().div_(math.sqrt(1 - _DECAYS[1] ** step)).add_(1e-8)
            weights.addcdiv_(first, length, value=-rate / (1 - _DECAYS[0] ** step))
        return weights


PUBLISHED_STEPS = {"gradient": 1000, "alternating": 150}


@dataclass(frozen=True)
class Tim(TransductiveHead):
    """Class weights that make the queries' labels informative: sure for each query, equally frequent over all.

    Nothing is learned before a task comes. All features have unit length. The class weights w_c start at the class
    means. With p_ic ~ exp(-scale/2 ||f_i - w_c||^2) and Shannon's entropy H, they minimise

        fit * cross-entropy of the support set  +  sure * mean H(p_i)  -  spread * H(mean of p_i)

    The last term pulls the classes towards equal sizes, so it does harm where they are not (see alpha-TIM).
    solver "gradient" is TIM-GD: Adam. solver "alternating" is TIM-ADM, which is faster: in each step

        q_ic ~ p_ic^(1 + sure) / (sum over queries of p_ic^(1 + sure))^(spread / (1 + spread)),    of sum 1 over c
        w_c  = (  a * sum over support of ( y_ic f_i + p_ic (w_c - f_i) )
                + b * sum over queries of ( q_ic f_i + p_ic (w_c - f_i) )  )  /  (a * sum of y_ic + b * sum of q_ic)

    with labels y, a = fit / (1 + sure) and b = n_support / n_queries.
    """

    about = About(
        "TIM",
        "Boudiaf et al. 2020",
        "Transductive Information Maximization For Few-Shot Learning",
        trained_on="nothing",
        transductive=True,
    )
    solver: Literal["gradient", "alternating"] = tunable("gradient", "solver for the class weights: TIM-GD or TIM-ADM")
    scale: float = tunable(15.0, "scale of squared distances in the logits", above=0)
    fit: float = tunable(0.1, "weight of the cross-entropy of the support set", above=0)
    sure: float = tunable(0.1, "weight of the mean entropy of the queries' probabilities", least=0)
    spread: float = tunable(1.0, "weight of the entropy of the queries' mean probabilities", least=0)
    steps: int | None = tunable(
        None,
        "steps of the solver; 'none' takes as many as published: 1000 gradient or 150 alternating",
        most=10_000,
        least=0,
    )
    rate: float = tunable(1e-4, "learning rate of Adam, for the gradient solver", above=0)

    def describe(self) -> str:
        return f"{self.solver} solver"

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = F.normalize(features, dim=2)
        loss = InformationLoss(self.fit, self.sure, self.spread, self.scale)
        steps = PUBLISHED_STEPS[self.solver] if self.steps is None else self.steps
        if self.solver == "gradient":  # Adam depends on the coordinates, the other solver does not
            weights = loss.fitted(features, task.support_labels, task.n_way, steps, self.rate)
        else:
            features = span_coordinates(features)
            weights = self._alternating(loss, features, task, steps)
        return loss.logits(features[:, task.queries], weights)

    def _alternating(self, loss: InformationLoss, features: Tensor, task: Task, steps: int) -> Tensor:
        """Class weights (task, n_way, feature)."""
        one_hot = F.one_hot(task.support_labels, task.n_way).to(features)  # (task, n_support, n_way)
        of_support, of_queries = self.fit / (1 + self.sure), task.n_support / task.n_queries
        importance = features.new_full((task.n_support + task.n_queries, 1), of_queries)
        importance[task.support] = of_support  # of each image
        weights = class_means(features[:, task.support], task.support_labels, task.n_way)
        for _ in range(steps):
            log_p = torch.log_softmax(loss.logits(features, weights), 2)
            powers = (1 + self.sure) * log_p[:, task.queries]
            frequent = powers.logsumexp(1, keepdim=True)  # (task, 1, n_way)
            q = torch.softmax(powers - self.spread / (1 + self.spread) * frequent, 2)
            labels = importance * torch.cat([one_hot, q], 1)  # (task, image, n_way)
            p = importance * log_p.exp()
            total = (labels - p).mT @ features + p.sum(1)[..., None] * weights
            weights = total / labels.sum(1)[..., None]
        return weights


@dataclass(frozen=True)
class AlphaTim(TransductiveHead):
    """Class weights are moved by gradient steps until the queries' probabilities are sure, but not all of one class.

    Nothing is learned before a task comes. All features have unit length. The class weights start at the class means,
    and Adam minimises

        cross-entropy of the support set  +  mean H_a(p_i)  -  H_a(mean of p_i),     p_i ~ exp(-scale/2 ||f_i - w_c||^2)

    with the Tsallis entropy H_a(p) = (1 - sum_c p_c^a) / (a - 1). With a above 1 the last term asks less strongly for
    classes of equal size than Shannon's entropy (a = 1) does.
    """

    about = About(
        "Alpha-TIM",
        "Veilleux et al. 2021",
        "Realistic Evaluation of Transductive Few-Shot Learning",
        trained_on="nothing",
        transductive=True,
    )
    alpha: float = tunable(
        2.0, "order of the Tsallis entropies; the paper has 2 with one shot and 7 with five", above=0
    )
    scale: float = tunable(15.0, "scale of squared distances in the logits", above=0)
    steps: int = tunable(1000, "gradient steps", most=10_000, least=0)
    rate: float = tunable(1e-4, "learning rate of Adam", above=0)

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = F.normalize(features, dim=2)
        loss = InformationLoss(1, 1, 1, self.scale, self.alpha)
        weights = loss.fitted(features, task.support_labels, task.n_way, self.steps, self.rate)
        return loss.logits(features[:, task.queries], weights)


@dataclass(frozen=True)
class EntropyMin(TransductiveHead):
    """Class weights are moved by a few gradient steps until the queries' probabilities are surer.

    Nothing is learned before a task comes. All features have unit length. The class weights start at the class means,
    and Adam minimises

        cross-entropy of the support set  +  mean entropy of p_i over the queries,   p_i ~ exp(-scale/2 ||f_i - w_c||^2)

    Nothing keeps all queries from becoming one class, so there must be few steps. The published method fine-tunes the
    whole network in this way; here features are frozen and only the class weights move. Rate and number of steps are
    the published ones. On frozen features with one shot it is worse than the class means it starts from.
    """

    about = About(
        "Entropy minimisation",
        "Dhillon et al. 2020",
        "A Baseline for Few-Shot Image Classification",
        trained_on="nothing",
        transductive=True,
    )
    scale: float = tunable(15.0, "scale of squared distances in the logits", above=0)
    steps: int = tunable(25, "gradient steps", most=10_000, least=0)
    rate: float = tunable(5e-5, "learning rate of Adam", above=0)

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = F.normalize(features, dim=2)
        loss = InformationLoss(1, 1, marginal_entropy=0, scale=self.scale)
        weights = loss.fitted(features, task.support_labels, task.n_way, self.steps, self.rate)
        return loss.logits(features[:, task.queries], weights)
