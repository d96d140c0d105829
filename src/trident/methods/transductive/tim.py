"""TIM-GD and TIM-ADM (Boudiaf et al. 2020): class weights that make the queries' labels informative."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, Parameters, Task, tunable
from trident.methods.transductive.base import TransductiveHead
from trident.methods.transductive.information import InformationLoss
from trident.nn.classes import class_means, span_coordinates

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
