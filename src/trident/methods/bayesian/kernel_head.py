"""Base classes of methods with Gaussian processes on deep features: the kernel, and the training objective."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trident.methods.base import Losses, NormalisedHead, Parameters, cross_entropy, setting, tunable
from trident.nn.classes import members_of
from trident.tasks.task import Labels, Task, all_labels


@dataclass(frozen=True)
class KernelHead(NormalisedHead):
    """Base of heads whose kernel is v <g(x), g(x')>, with normalised features g and one learned v > 0.

    With L2N this is a cosine. CL2N is the cosine of features that are centred on the training images, which is close
    to the published kernel with batch norm (it divides by the standard deviations too).
    """

    normalisation: Literal["UN", "L2N", "CL2N"] = setting(
        "L2N", "normalisation of features in the kernel: linear kernel, cosine, or cosine of centred features"
    )
    initial_scale: float = setting(1.0, "start of the kernel's learned scale v", above=0)

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        return {"log_scale": torch.tensor(math.log(self.initial_scale))}

    def kernel(self, parameters: Parameters, features: Tensor) -> Tensor:
        """The kernel between all images of a task: (task, image, image)."""
        features = self.normalised(parameters, features)
        return parameters["log_scale"].exp() * features @ features.mT


@dataclass(frozen=True)
class MeanFieldKernelHead(KernelHead):
    """Base of those whose posterior is found by mean-field updates, with a choice of what training maximises."""

    objective: Literal["marginal", "predictive"] = setting(
        "marginal", "what training maximises: the evidence of a task's labels, or the queries' probabilities"
    )
    rounds: int = tunable(8, "mean-field updates of the posterior", most=1000, least=1)

    @abstractmethod
    def evidence(self, kernel: Tensor, truth: Tensor) -> Tensor:
        """A lower bound of the log marginal likelihood (task,), with one-hot labels (task, n_way, image)."""

    def training(self, parameters: Parameters, features: Tensor, task: Task, labels: Labels) -> tuple[Tensor, Losses]:
        if self.objective == "predictive":
            logits = self.head(parameters, features, task)
            return logits, {"total": cross_entropy(logits, labels.queries)}
        with torch.no_grad():  # only to count how many are right
            logits = self.head(parameters, features, task)
        truth = members_of(all_labels(task, labels), task.n_way, features)
        evidence = self.evidence(self.kernel(parameters, features), truth)
        return logits, {"total": -evidence / truth.shape[2]}
