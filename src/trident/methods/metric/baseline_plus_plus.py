"""Baseline++ (Chen et al. 2019): a cosine classifier is fitted to each task."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, ClassifierHead, Parameters, Task, setting, tunable
from trident.methods.metric.fitted_classifiers import balanced_targets, fit_cosine
from trident.nn.classes import members_of
from trident.nn.linear import Linear


@dataclass(frozen=True)
class BaselinePlusPlus(ClassifierHead):
    """A cosine classifier is fitted to the support features of every task.

    Learned: the backbone, as a cosine classifier of all training classes, which is not used afterwards:

        p(y = c | x)  ~  exp(s cos(w_c, f(x)))

    At test the features stay as they are, and gradient steps with momentum minimise the mean cross-entropy of the
    support set for new w_c, with s = `scale`. The published s is 2, and the length of w_c counts too; here s is learned
    in training, and the length does not count. The published steps take four images at a time, and w_c starts at
    random. Here every step takes the whole support set and w_c starts at the class's mean feature of unit length, so
    that the same task always gets the same answer; classes with more support images than others count no more.
    """

    about = About(
        "Baseline++", "Chen et al. 2019", "A Closer Look at Few-shot Classification", trained_on="classes"
    )  # fmt: skip
    initial_scale: float = setting(10.0, "start of the learned scale of the cosine in training", above=0)
    scale: float = tunable(20.0, "scale of the cosine in the classifier that is fitted to a task", above=0)
    steps: int = tunable(200, "gradient steps that fit the classifier to a task", most=10_000, least=0)
    rate: float = tunable(0.01, "learning rate of these steps", above=0)

    def describe(self) -> str:
        return f"cosine classifier fitted in {self.steps} steps"

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        classes = Linear("classes", n_features, self.training_classes, bias=False)
        return {**classes.initial(generator), "log_scale": torch.zeros(())}

    def training_logits(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        return self.training_scale(parameters) * cosines(features, parameters["classes.weight"])

    def training_scale(self, parameters: Parameters) -> Tensor:
        """s in training. Weight decay pulls it to its start, and not to 0."""
        return self.initial_scale * parameters["log_scale"].exp()

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        support = F.normalize(features[:, task.support], dim=2)
        return self.scale * cosines(features[:, task.queries], self.class_weights(parameters, support, task))

    def class_weights(self, parameters: Parameters, support: Tensor, task: Task) -> Tensor:
        """The fitted classifier: support features of unit length -> (task, n_way, feature)."""
        return self.fitted_coefficients(support, task) @ support

    def fitted_coefficients(self, support: Tensor, task: Task) -> Tensor:
        """The classifier's weights, as coefficients of the support features: (task, n_way, n_support)."""
        targets = balanced_targets(task.support_labels, task.n_way, support)
        return fit_cosine(support, targets, self.scale, coefficients_of_means(support, task), self.steps, self.rate)


def coefficients_of_means(support: Tensor, task: Task) -> Tensor:
    """The classes' mean features of unit length, as coefficients of the support features: (task, n_way, image)."""
    members = members_of(task.support_labels, task.n_way, support)
    lengths: Tensor = torch.linalg.vector_norm(members @ support, dim=2, keepdim=True)  # (task, n_way, 1)
    return members / lengths.clamp(min=1e-3)


def cosines(features: Tensor, weights: Tensor) -> Tensor:
    """(task, image, feature) and (class, feature), or (task, class, feature) -> (task, image, class)."""
    return F.normalize(features, dim=-1) @ F.normalize(weights, dim=-1).mT
