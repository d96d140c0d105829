"""Alpha-TIM (Veilleux et al. 2021)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, HeadOnFeatures, Method
from trident.methods.nearest_mean import NearestMean
from trident.nn.classes import class_means, squared_distances
from trident.nn.parameters import Parameters
from trident.settings import require_at_least, require_positive, setting
from trident.tasks.task import Task


@dataclass(frozen=True)
class AlphaTim(HeadOnFeatures):
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
    alpha: float = setting(2.0, "of the entropies; the paper has 2 with one shot and 7 with five", after_training=True)
    scale: float = setting(15.0, "of squared distances in the logits", after_training=True)
    steps: int = setting(1000, "gradient steps", after_training=True)
    rate: float = setting(1e-4, "learning rate of Adam", after_training=True)

    def __post_init__(self) -> None:
        require_positive(self, "method", "alpha", "scale", "rate")
        require_at_least(self, "method", 0, "steps")

    def for_few_queries(self) -> Method:
        return NearestMean()

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = F.normalize(features.detach(), dim=2)
        support, queries = features[:, task.support], features[:, task.queries]
        with torch.enable_grad():
            weights = class_means(support, task.support_labels, task.n_way).requires_grad_()
            optimizer = torch.optim.Adam([weights], self.rate)
            for _ in range(self.steps):
                known = torch.log_softmax(self._logits(support, weights), 2)
                p = torch.softmax(self._logits(queries, weights), 2)
                fit = F.nll_loss(known.flatten(0, 1), task.support_labels.flatten(), reduction="sum") / task.n_support
                loss = fit + self._entropy(p).mean(1).sum() - self._entropy(p.mean(1)).sum()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return self._logits(queries, weights.detach())

    def _logits(self, features: Tensor, weights: Tensor) -> Tensor:
        return -self.scale / 2 * squared_distances(features, weights)

    def _entropy(self, p: Tensor) -> Tensor:
        """(..., class) -> (...)"""
        p = p.clamp(min=1e-12)
        if self.alpha == 1:
            return -(p * p.log()).sum(-1)
        return (1 - (p**self.alpha).sum(-1)) / (self.alpha - 1)
