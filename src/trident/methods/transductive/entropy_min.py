"""Entropy minimisation (Dhillon et al. 2020): class weights that make the queries' probabilities surer."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, Parameters, Task, tunable
from trident.methods.transductive.base import TransductiveHead
from trident.methods.transductive.information import InformationLoss


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
