"""Baseline, or Feature Transfer (Chen et al. 2019): a linear classifier is fitted to each task."""

from dataclasses import dataclass

from torch import Tensor

from trident.methods.base import About, ClassifierHead, Parameters, Task, tunable
from trident.methods.metric.fitted_classifiers import balanced_targets, fit_linear


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
