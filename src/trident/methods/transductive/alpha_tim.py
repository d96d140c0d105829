"""Alpha-TIM (Veilleux et al. 2021): TIM with an entropy that allows classes of unequal size."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, Parameters, Task, tunable
from trident.methods.transductive.base import TransductiveHead
from trident.methods.transductive.information import InformationLoss


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
