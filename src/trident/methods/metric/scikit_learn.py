"""Classifiers of scikit-learn on features, to compare with."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.importing import needed
from trident.methods.base import About, HeadOnFeatures, Parameters, Task, tunable


@dataclass(frozen=True)
class ScikitLearnHead(HeadOnFeatures):
    """Base of heads that fit an estimator of scikit-learn to the support set of each task."""

    @abstractmethod
    def estimator(self, n_support: int) -> Any: ...

    def module(self, name: str) -> Any:
        return needed(f"sklearn.{name}", f"{self.about.title.lower()} needs scikit-learn")

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        unit = F.normalize(features.detach(), dim=2)
        rows = unit.cpu().double().numpy()
        probabilities = []
        for one, labels in zip(rows, task.support_labels.cpu().numpy(), strict=True):
            fitted = self.estimator(task.n_support).fit(one[task.support], labels)
            probabilities.append(torch.from_numpy(fitted.predict_proba(one[task.queries])))
        return torch.stack(probabilities).clamp(min=1e-12).log().to(features)


@dataclass(frozen=True)
class LogisticRegressionHead(ScikitLearnHead):
    """Logistic regression on features of unit length, fitted to the support set by scikit-learn.

    It minimises the cross-entropy of the support images plus ||W||^2 / (2 inverse_penalty). All classes have the same
    weight, whatever their numbers of support images. Queries are classified alone.
    """

    about = About(
        "Logistic regression", "Cox 1958", "The Regression Analysis of Binary Sequences", trained_on="nothing"
    )
    inverse_penalty: float = tunable(10.0, "C: the larger, the less the weights are kept small", above=0)

    def estimator(self, n_support: int) -> Any:
        return self.module("linear_model").LogisticRegression(
            C=self.inverse_penalty, class_weight="balanced", max_iter=1000
        )


@dataclass(frozen=True)
class NearestNeighbours(ScikitLearnHead):
    """The most frequent class among the nearest support images, found by scikit-learn.

    Features have unit length, so the nearest images are those with the largest cosine. Queries are classified alone.
    """

    about = About(
        "k nearest neighbours", "Cover & Hart 1967", "Nearest Neighbor Pattern Classification", trained_on="nothing"
    )
    neighbours: int = tunable(1, "how many support images vote; all of them, if there are fewer", most=10_000, least=1)

    def estimator(self, n_support: int) -> Any:
        return self.module("neighbors").KNeighborsClassifier(min(self.neighbours, n_support))
