"""Methods that adapt their weights to each task by gradient steps on its support set.

Such a method defines its loss, the start of adaptation and which parameters adapt. `engines/plain/inner_loop.py` has
the steps and the exact meta-gradient.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from trident.methods.base import Labels, Losses, Method, Model, Parameters, Task, tunable
from trident.nn.batch_norm import BatchNormStatistics

Target = Literal["support", "query"]
Encodings = Mapping[str, Tensor]  # what encoders make of all images of a task: (task, image, ...) each

ADAM_BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8
ADAM_EPSILON_ROOT = 1e-16  # under the root, so that the step can be differentiated where a gradient is exactly zero


class Evaluated(NamedTuple):
    """The loss of one set of each task."""

    losses: Losses
    logits: Tensor  # (task, image, n_way)
    seen: Parameters  # batch-norm statistics, (task, channel) each


class Inputs(NamedTuple):
    """What a model computes from, besides its parameters."""

    task: Task
    statistics: BatchNormStatistics
    target: Target = "query"  # the set that is meant
    labels: Labels | None = None  # of the queries: in training only
    draw: int | str = 0  # which of the draws of the noise
    encodings: Encodings | None = None  # the result of `encode`, if it was already called
    reused: Any = None  # what `start` returned, for the first step

    @property
    def rows(self) -> slice:
        """The images of the set."""
        return self.task.support if self.target == "support" else self.task.queries

    @property
    def truth(self) -> Tensor:
        """The labels of the set: (task, image)."""
        return self.task.support_labels if self.target == "support" or self.labels is None else self.labels.queries


class InnerLoopModel(Model):
    """An `InnerLoopMethod` on a backbone. All parameters have a task axis here: each task has its own weights."""

    method: "InnerLoopMethod"

    def start(self, parameters: Parameters, inputs: Inputs) -> tuple[Parameters, Any]:
        """Parameters of each task before its first step, and what this step can reuse. Only training has labels."""
        return parameters, None

    @abstractmethod
    def loss(self, parameters: Parameters, inputs: Inputs) -> Evaluated:
        """The loss of the support set, or of the queries, whose labels are then given."""

    @abstractmethod
    def encode(self, parameters: Parameters, inputs: Inputs) -> Encodings:
        """Encodings that several predictions with the same parameters can share."""

    @abstractmethod
    def logits(self, parameters: Parameters, inputs: Inputs) -> list[Tensor]:
        """Query logits (task, query, n_way), once for each draw of the noise; the predictions are averaged."""


class InnerState(NamedTuple):
    """The inner optimiser's state. Plain gradient steps have none."""

    first_moment: Parameters
    second_moment: Parameters


Adapted = tuple[Parameters, InnerState]  # what an inner step takes and returns


@dataclass(frozen=True)
class InnerLoopMethod(Method):
    adapts_to_support_alone: ClassVar[bool] = False  # whether no query changes the adapted parameters

    inner_optimizer: Literal["sgd", "adam"] = tunable(
        "sgd", "optimiser of the inner steps: plain gradient steps, or Adam"
    )
    inner_rate: float = tunable(1e-3, "learning rate of the inner steps", least=0)
    inner_steps: int = tunable(5, "inner steps", most=100, least=0)
    inner_order: Literal["second", "first"] = tunable(
        "second", "second: differentiate through the inner steps; first: do not, which is cheaper"
    )

    def adapts(self, parameter: str) -> bool:
        """Whether inner steps change this parameter."""
        return True

    def describe(self) -> str:
        return f"{self.inner_steps or 'no'} inner step{'' if self.inner_steps == 1 else 's'}"

    def initial_state(self, parameters: Parameters) -> InnerState:
        if self.inner_optimizer == "sgd":
            return InnerState({}, {})
        zeros = {key: torch.zeros_like(value) for key, value in parameters.items() if self.adapts(key)}
        return InnerState(zeros, zeros)

    def update(self, parameters: Parameters, state: InnerState, gradient: Parameters, step: int) -> Adapted:
        """One step of the inner optimiser on the parameters that have a gradient; the others stay as they are."""
        if self.inner_optimizer == "sgd":
            return parameters | {key: parameters[key] - self.inner_rate * g for key, g in gradient.items()}, state
        moved, state = adam_step(parameters, state, gradient, step, self.inner_rate)
        return parameters | moved, state


def adam_step(parameters: Parameters, state: InnerState, gradient: Parameters, step: int, rate: float) -> Adapted:
    beta1, beta2 = ADAM_BETAS
    first = {key: beta1 * state.first_moment[key] + (1 - beta1) * g for key, g in gradient.items()}
    second = {key: beta2 * state.second_moment[key] + (1 - beta2) * g.square() for key, g in gradient.items()}
    correction1, correction2 = 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)

    def moved(key: str) -> Tensor:
        scale = torch.sqrt(second[key] / correction2 + ADAM_EPSILON_ROOT) + ADAM_EPSILON
        return parameters[key] - rate * (first[key] / correction1) / scale

    return {key: moved(key) for key in gradient}, InnerState(first, second)
