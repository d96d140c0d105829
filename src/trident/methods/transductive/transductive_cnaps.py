"""The classifier of Simple CNAPS and Transductive CNAPS (Bateni et al. 2020, 2022)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, Parameters, Task, tunable
from trident.methods.transductive.base import TransductiveHead
from trident.nn.classes import span_coordinates, weighted_means


@dataclass(frozen=True)
class TransductiveCnaps(TransductiveHead):
    """Each class is a Gaussian with a covariance of its own; queries refine the Gaussians for some rounds.

    Nothing is learned. All features are scaled to one length. With labels y_ic, 0 or 1 for support images and
    probabilities for queries, n_c = sum_i y_ic, and S the covariance of all images that have labels,

        mean          m_c = sum_i y_ic f_i / n_c
        covariance    S_c = sum_i y_ic (f_i - m_c)(f_i - m_c)' / n_c
        shrunk        Q_c = I + a_c S_c + (1 - a_c) S,    a_c = n_c / (n_c + 1)
        answer        p(y_i = c) ~ exp(-(f_i - m_c)' Q_c^-1 (f_i - m_c))

    First only support images have labels: with rounds = 0 that is the answer, as in Simple CNAPS. In each round the
    queries get theirs from the answer before. The published networks adapt the backbone to the task by layers (FiLM)
    that are learned on episodes, so that features suit the identity I; frozen features have any size, hence `length`.
    The published code ends the rounds, 2 to 4, when no label changes.
    """

    about = About(
        "Transductive CNAPS' classifier",
        "Bateni et al. 2022",
        "Enhancing Few-Shot Image Classification with Unlabelled Examples",
        trained_on="nothing",
        transductive=True,
    )
    rounds: int = tunable(4, "how often queries refine the classes; 0 is Simple CNAPS", most=1000, least=0)
    length: float = tunable(3.0, "length that features are scaled to: how much their covariance counts", above=0)

    @property
    def classifies_together(self) -> bool:
        return self.rounds > 0

    def describe(self) -> str:
        return f"{self.rounds} rounds" if self.rounds else "each query alone"

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = span_coordinates(self.length * F.normalize(features, dim=2))  # which changes no answer
        support, queries = features[:, task.support], features[:, task.queries]
        labels = F.one_hot(task.support_labels, task.n_way).to(features)
        logits = _gaussian_logits(support, labels, queries)
        for _ in range(self.rounds):
            all_labels = torch.cat([labels, torch.softmax(logits, 2)], 1)
            logits = _gaussian_logits(features, all_labels, queries)
        return logits


def _gaussian_logits(features: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """Query logits (task, query, n_way), from images (task, image, feature) and labels (task, image, n_way)."""
    counts = labels.sum(1)[..., None, None]  # (task, n_way, 1, 1)
    means = weighted_means(labels.mT, features)  # (task, n_way, feature)
    centred = features[:, None] - means[:, :, None]  # (task, n_way, image, feature)
    own = (labels.mT[..., None] * centred).mT @ centred / counts
    around = features - features.mean(1, keepdim=True)
    common = (around.mT @ around)[:, None] / max(1, features.shape[1] - 1)
    identity = torch.eye(features.shape[2]).to(features)
    covariance = identity + counts / (counts + 1) * own + 1 / (counts + 1) * common
    root = torch.linalg.cholesky(covariance)  # (task, n_way, feature, feature)
    differences = queries[:, None] - means[:, :, None]  # (task, n_way, query, feature)
    whitened: Tensor = torch.linalg.solve_triangular(root, differences.mT, upper=False)  # (task, n_way, feature, query)
    return -whitened.square().sum(2).mT
