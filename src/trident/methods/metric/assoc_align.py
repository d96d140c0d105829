"""Associative alignment (Afrasiyabi et al. 2020)."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, Labels, Losses, Parameters, Task, tunable
from trident.methods.metric.baseline_plus_plus import BaselinePlusPlus, cosines
from trident.methods.metric.fitted_classifiers import balanced_targets, fit_cosine
from trident.nn.classes import members_of
from trident.settings import require, setting

SUMS = "class_features"  # the mean feature of each training class, times the class's share of the training images
DISTANCE_SCALE = 2.0  # ||a - b||^2 of unit vectors is 2 - 2 cos(a, b)


@dataclass(frozen=True)
class AssociativeAlignment(BaselinePlusPlus):
    """The training classes that look most like a new class help to place it.

    Learned: the backbone, as a classifier of all training classes by cosine, with a margin m between the classes:

        p(y = c | x)  ~  exp(s cos(angle(w_c, f(x)) + m [c is the right class]))

    and the mean feature of every training class. At test the features stay as they are:

        1. a cosine classifier is fitted to the support set, as in Baseline++ (`baseline_plus_plus.py`)
        2. each training class goes, by its mean feature z, to the class that this classifier finds for it; of those
           that go to a class, the `related` ones that it is most sure of are kept
        3. the classifier is fitted further, to the support set and, with weight `alignment`, to these z:
           mean of -ln softmax over c of (-||z - w_c||^2), at the class that z went to, all vectors of unit length

    The published method aligns images of the training classes, and fine-tunes the backbone with them in every task.
    Here features are frozen, a training class is its mean feature, and it is the new classes that move; a large
    `alignment` does harm then. As published, the margin applies to angles below 90 degrees only; s is learned here.
    """

    about = About(
        "Associative alignment",
        "Afrasiyabi et al. 2020",
        "Associative Alignment for Few-shot Image Classification",
        trained_on="classes",
    )
    initial_scale: float = setting(20.0, "start of the learned scale of the cosine in training")
    margin: float = setting(0.01, "additive angular margin between the training classes, in radians")
    related: int = tunable(10, "training classes that are aligned with each class, at most", most=1000, least=0)
    alignment: float = tunable(0.03, "weight of the alignment in the second fit", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.margin < math.pi / 2, f"method.margin is {self.margin}: it must be from 0 to pi / 2")

    def initial_statistics(self, n_features: int) -> Parameters:
        return {SUMS: torch.zeros(self.training_classes, n_features)}

    def labelled_statistics(self, features: Tensor, labels: Labels) -> Parameters:
        return {SUMS: members_of(labels.queries, self.training_classes, features) @ features / features.shape[1]}

    def training(self, parameters: Parameters, features: Tensor, task: Task, labels: Labels) -> tuple[Tensor, Losses]:
        cosine = cosines(features, parameters["classes.weight"])
        sine = (1 - cosine.square()).clamp(min=1e-6).sqrt()
        moved = torch.where(cosine > 0, cosine * math.cos(self.margin) - sine * math.sin(self.margin), cosine)
        right = F.one_hot(labels.queries, self.training_classes).bool()
        scale = self.training_scale(parameters)
        return scale * cosine, self.losses(scale * torch.where(right, moved, cosine), labels)

    def class_weights(self, parameters: Parameters, support: Tensor, task: Task) -> Tensor:
        coefficients = self.fitted_coefficients(support, task)
        means, of_means = self._related(parameters, coefficients @ support)
        features = torch.cat([support, means], 1)  # (task, n_support + n_way * related, feature)
        of_support = balanced_targets(task.support_labels, task.n_way, support)
        scales = features.new_full((1, features.shape[1], 1), DISTANCE_SCALE)
        scales[:, task.support] = self.scale
        start = torch.cat([coefficients, torch.zeros_like(of_means.mT)], 2)
        targets = torch.cat([of_support, self.alignment * of_means], 1)
        return fit_cosine(features, targets, scales, start, self.steps, self.rate) @ features

    def _related(self, parameters: Parameters, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Mean features of unit length of the related training classes, and their targets, for `fit_cosine`.

        Weights (task, n_way, feature) -> (task, n_way * related, feature) and (task, n_way * related, n_way).
        """
        n_way = weights.shape[1]
        means = F.normalize(parameters[SUMS], dim=1)  # (class, feature)
        p = torch.softmax(self.scale * cosines(means, weights), 2)  # (task, class, n_way)
        seen = means.any(1)[:, None]  # in training
        largest = torch.where((p == p.amax(2, keepdim=True)) & seen, p, 0.0).mT  # (task, n_way, class)
        nearest = largest.topk(min(self.related, largest.shape[2]), 2)
        kept = (nearest.values > 0).to(weights)  # (task, n_way, related)
        own = torch.eye(n_way, dtype=weights.dtype, device=weights.device)[:, None]
        targets = kept[..., None] * own / kept.sum((1, 2)).clamp(min=1)[:, None, None, None]
        return means[nearest.indices.flatten(1)], targets.flatten(1, 2)
