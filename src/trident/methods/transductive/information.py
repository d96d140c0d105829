"""Class weights fitted to each task by information maximisation, for TIM, alpha-TIM and entropy minimisation."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.nn.classes import class_means

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
        """(task, image, feature), (task, n_way, feature) -> (task, image, n_way), without the squares of the images."""
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
        """Class weights (task, n_way, feature) after steps of Adam from the class means of the first images."""
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
