"""Baseline, or Feature Transfer, and Baseline++ (Chen et al. 2019), and how their classifiers are fitted.

The classifiers are fitted to the support set by gradient descent, for all tasks at once. The weights of a class stay a
linear combination of the support features, so only its coefficients are fitted: (task, n_way, image), as in a dual
problem. A step then costs no more for long features than for short ones. In terms of the weights these are exactly the
steps of SGD with momentum 0.9 and dampening 0.9, with all images in every step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, ClassifierHead, Parameters, Task, setting, tunable
from trident.nn.classes import members_of
from trident.nn.linear import Linear

MOMENTUM = 0.9
SHORTEST = 0.1  # weights of a cosine classifier start with length 1 and only grow, unless all features are 0


def balanced_targets(labels: Tensor, n_way: int, like: Tensor) -> Tensor:
    """(task, image) -> (task, image, n_way): one-hot labels times the image's weight in the loss.

    All classes have the same weight in all, however many images they have.
    """
    members = members_of(labels, n_way, like)
    return (members / members.sum(2, keepdim=True) / n_way).mT


def fit_linear(features: Tensor, targets: Tensor, steps: int, rate: float, weight_decay: float) -> Tensor:
    """The coefficients (task, n_way, image) of a linear layer's weights, which start at 0; its biases are their sums.

    Minimises the cross-entropy of softmax(W f + b) with weighted targets (task, image, n_way), and weight decay.
    """
    products = features @ features.mT + 1  # the bias is the weight of a feature that is always 1

    def gradient(coefficients: Tensor) -> Tensor:
        return _slopes(products @ coefficients.mT, targets).mT + weight_decay * coefficients

    return _descend(torch.zeros_like(targets.mT), gradient, steps, rate)


def fit_cosine(
    features: Tensor, targets: Tensor, scale: Tensor | float, start: Tensor, steps: int, rate: float
) -> Tensor:
    """The coefficients (task, n_way, image) of the weights w of a cosine classifier, from a start of this shape.

    Minimises the cross-entropy of softmax(scale cos(w, f)) with weighted targets. Features must have unit length. The
    scale may differ between images: (task, image, 1).
    """
    products = features @ features.mT  # (task, image, image)

    def gradient(coefficients: Tensor) -> Tensor:
        inner = products @ coefficients.mT  # (task, image, n_way): w . f
        squares = (coefficients.mT * inner).sum(1, keepdim=True)  # (task, 1, n_way): ||w||^2
        lengths = squares.clamp(min=SHORTEST**2).sqrt()
        cosines = inner / lengths
        slopes = scale * _slopes(scale * cosines, targets)
        along = (slopes * cosines).sum(1, keepdim=True)  # (task, 1, n_way): the part that would only change ||w||
        return ((slopes - along / lengths * coefficients.mT) / lengths).mT

    return _descend(start, gradient, steps, rate)


def _slopes(logits: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the cross-entropy with respect to the logits: (task, image, n_way)."""
    return targets.sum(2, keepdim=True) * torch.softmax(logits, 2) - targets


def _descend(start: Tensor, gradient: Callable[[Tensor], Tensor], steps: int, rate: float) -> Tensor:
    coefficients = start
    velocity = torch.zeros_like(start)
    for step in range(steps):
        now = gradient(coefficients)
        velocity = torch.lerp(now, velocity, MOMENTUM) if step else now
        coefficients = coefficients - rate * velocity
    return coefficients


@dataclass(frozen=True)
class Baseline(ClassifierHead):
    """A linear classifier is fitted to the support features of every task.

    Learned: the backbone, as an ordinary linear classifier of all training classes; that layer is not used afterwards.
    At test the features stay as they are, and gradient steps with momentum minimise, for a new linear layer W, b,

        mean over the support images of  -ln softmax(W f(x) + b)_y  +  weight_decay/2 (||W||^2 + ||b||^2)

    The published steps take four images at a time in random order, and W starts at random. Here every step takes the
    whole support set and W starts at 0, so that the same task always gets the same answer; classes with more support
    images than others count no more.
    """

    about = About(
        "Baseline (Feature Transfer)",
        "Chen et al. 2019",
        "A Closer Look at Few-shot Classification",
        trained_on="classes",
    )
    steps: int = tunable(500, "gradient steps that fit the linear layer to a task", most=10_000, least=0)
    rate: float = tunable(0.01, "learning rate of these steps", above=0)
    weight_decay: float = tunable(0.001, "weight decay of these steps", least=0)

    def describe(self) -> str:
        return f"linear layer fitted in {self.steps} steps"

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        support, queries = features[:, task.support], features[:, task.queries]
        targets = balanced_targets(task.support_labels, task.n_way, features)
        # (task, n_way, n_support)
        coefficients = fit_linear(support, targets, self.steps, self.rate, self.weight_decay)
        weights = coefficients @ support  # (task, n_way, feature)
        return queries @ weights.mT + coefficients.sum(2)[:, None]


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
