"""A `Learner` runs a method: it predicts the queries of tasks and computes the training gradient."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from trident.methods.base import Losses, Model
from trident.methods.inner_loop.base import Encodings
from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.parameters import Parameters
from trident.tasks.task import Batch, Task


class Gradient(NamedTuple):
    """The result of one training step on a batch of tasks."""

    gradient: Parameters  # summed over the tasks (with an inner loop: over the finite ones), without a task axis
    losses: Losses  # on the queries, (task,) each
    accuracy: Tensor  # (task,)
    statistics: Parameters  # of batch norm, and the method's own: (task, ...) each
    finite: Tensor  # (task,) bool: whether loss and gradient are finite; a few tasks diverge in their inner steps


@dataclass(frozen=True)
class Learner(ABC):
    """Runs a method on one engine. Parameters have no task axis. `execution.make_learner` builds learners."""

    model: Model
    batch_norm: str = "transductive"
    running: Parameters | None = None
    precision: str = "fp32"

    @abstractmethod
    def log_probabilities(self, parameters: Parameters, task: Task) -> Tensor:
        """Of the queries' classes: (task, query, n_way). Probabilities are averaged over the draws of noise."""

    @abstractmethod
    def gradient(self, parameters: Parameters, batch: Batch) -> Gradient:
        """The gradient of the summed losses of the queries."""

    def statistics(self, task: Task) -> BatchNormStatistics:
        return BatchNormStatistics(self.batch_norm, task.n_support, self.running or {})


@runtime_checkable
class Encodes(Protocol):
    """A learner that encodes images first, and predicts from the encodings."""

    @property
    def encodes_alone(self) -> bool:
        """Whether, with these settings, no image changes the encoding of another, so that encodings can be cached."""

    def encode(self, parameters: Parameters, task: Task) -> Encodings: ...

    def log_probabilities_from(self, parameters: Parameters, task: Task, encodings: Encodings) -> Tensor:
        """Same as `log_probabilities`. Of the task's images only their number is used."""


@runtime_checkable
class AdaptsOnce(Protocol):
    """A learner that can adapt to a support set without the queries, so that many predictions can share the result."""

    @property
    def adapts_once(self) -> bool:
        """Whether that holds with these settings."""

    def adapted(self, parameters: Parameters, task: Task) -> Parameters:
        """The parameters of each task, (task, ...) each."""

    def log_probabilities_adapted(self, adapted: Parameters, task: Task) -> Tensor:
        """Same as `log_probabilities`, from the tasks' own parameters."""


def only_finite(values: Tensor, finite: Tensor) -> Tensor:
    """Values (task, ...) with zeros for the tasks that are not finite."""
    return torch.where(finite.view(-1, *(1,) * (values.dim() - 1)), values, 0.0)


def accuracy_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of queries whose largest logit is their class: (task,)."""
    return (logits.detach().argmax(-1) == labels).float().mean(1)


@contextmanager
def computing(precision: str, device: torch.device) -> Iterator[None]:
    """Turn autograd off and make the tasks' GPU current, because Triton launches on the current GPU."""
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with current, torch.no_grad(), matrix_products(precision, device):
        yield


@contextmanager
def matrix_products(precision: str, device: torch.device) -> Iterator[None]:
    """Multiply and convolve float32 numbers on a GPU in full precision for fp32, else as TF32; always reproducibly."""
    if device.type != "cuda":
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic)
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "fp32"
    cudnn.deterministic = True  # by default, cuDNN adds up some gradients in any order
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = before
