"""The inner loop and the exact meta-gradient (Algorithm 2 of the paper), for many tasks at once.

With one inner step written as a function (parameters, state) -> (parameters, state), the meta-gradient is the query
gradient at the adapted parameters, pulled back through the steps one by one, last step first. Each step is computed
again for this, so memory does not grow with their number: only the parameters before each step are kept. For plain
gradient steps of rate a this is  v <- v - a H v  with the Hessian H of the support loss.

All functions here are pure: images, labels and noise come in, new parameters or gradients go out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trident.methods.trident.network import Encodings, Latents, Noise, Target, TaskImages, Trident
from trident.methods.trident.objective import LossParts, loss_parts
from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.parameters import Parameters
from trident.settings import AdaptationSettings, ObjectiveSettings

ADAM_BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8
# Under the root, so that Adam's step can be differentiated where a gradient is exactly zero.
ADAM_EPSILON_ROOT = 1e-16


class TaskBatch(NamedTuple):
    """Some tasks with everything that is random about them."""

    images: TaskImages
    query_labels: Tensor  # (task, n_queries) int64
    support_noise: tuple[Noise, ...]  # one for each inner step, and at least one
    query_noise: tuple[Noise, ...]  # one for each prediction; the first is the outer loss's
    query_classes: Tensor | None = None  # (task, n_queries) int64, their places among all training classes

    @property
    def support_labels(self) -> Tensor:
        return self.images.support_labels  # (task, n_support) int64

    @property
    def n_tasks(self) -> int:
        return len(self.support_labels)


class InnerState(NamedTuple):
    """What an inner optimiser carries from step to step, besides the parameters. Plain steps carry nothing."""

    first_moment: Parameters
    second_moment: Parameters


class MetaGradient(NamedTuple):
    gradient: Parameters  # summed over the finite tasks, without a task axis
    loss: LossParts  # on the queries, after adaptation
    accuracy: Tensor  # (task,)
    statistics: Parameters  # batch-norm statistics of the outer pass, (task, channel) each
    finite: Tensor  # (task,) bool: whether loss and gradient are; now and then a task blows up in its inner steps


@dataclass(frozen=True)
class Learner:
    """A network, its objective and its way of adapting: all that is needed to learn a task."""

    model: Trident
    objective: ObjectiveSettings
    adaptation: AdaptationSettings
    batch_norm: str = "transductive"
    running: Parameters | None = None
    precision: str = "fp32"  # how a GPU multiplies float32 matrices: in full, or as 'tf32'

    def statistics(self, images: TaskImages | None = None) -> BatchNormStatistics:
        """For these images; classes may have other numbers of shots in them than the episode says."""
        n_support = self.model.episode.n_support if images is None else images.n_support
        return BatchNormStatistics(self.batch_norm, n_support, self.running or {})

    def loss(
        self, parameters: Parameters, tasks: TaskBatch, target: Target, noise: Noise, latents: Latents | None = None
    ) -> tuple[LossParts, Tensor, Parameters]:
        """Loss parts, logits (task, image, n_way) and batch-norm statistics of one set of each task.

        `latents`, if given, are what `infer` made of the same parameters and noise; they are not inferred again.
        """
        statistics = self.statistics(tasks.images)
        if latents is None:
            latents = self.model.infer(parameters, tasks.images, target, noise, statistics)
        output = self.model.generate(parameters, latents, statistics)
        labels = tasks.support_labels if target == "support" else tasks.query_labels
        targets = tasks.images.pixels[:, tasks.images.rows(target)]
        classes = None if target == "support" else tasks.query_classes
        parts = loss_parts(output, targets, labels, self.objective, classes)
        return parts, output.logits, statistics.seen

    def inner_step(
        self,
        parameters: Parameters,
        state: InnerState,
        tasks: TaskBatch,
        step: int,
        differentiable: bool,
        latents: Latents | None = None,
    ) -> tuple[Parameters, InnerState]:
        """One gradient step on the support sets. `parameters` must require gradients."""
        parts, _, _ = self.loss(parameters, tasks, "support", tasks.support_noise[step], latents)
        gradient = _gradient(parts.total.sum(), parameters, create_graph=differentiable)
        return self.update(parameters, state, gradient, step)

    def update(
        self, parameters: Parameters, state: InnerState, gradient: Parameters, step: int
    ) -> tuple[Parameters, InnerState]:
        """What the inner optimiser makes of a gradient."""
        rate = self.adaptation.rate
        if self.adaptation.optimizer == "sgd":
            return {key: value - rate * gradient[key] for key, value in parameters.items()}, state
        return _adam_step(parameters, state, gradient, step, rate)

    def initial_state(self, parameters: Parameters) -> InnerState:
        if self.adaptation.optimizer == "sgd":
            return InnerState({}, {})
        zeros = {key: torch.zeros_like(value) for key, value in parameters.items()}
        return InnerState(zeros, zeros)

    def start(
        self, parameters: Parameters, tasks: TaskBatch, encodings: Encodings | None = None
    ) -> tuple[Parameters, Latents | None]:
        """The parameters as each task finds them before its first inner step; they come with a task axis already.

        And the support sets' latents, where they were needed for it: they are those of the first inner step, too.
        """
        if self.model.settings.classifier_start == "learned":
            return parameters, None
        images, noise = tasks.images, tasks.support_noise[0]
        latents = self.model.infer(parameters, images, "support", noise, self.statistics(images), encodings)
        return parameters | self.model.prototype_classifier(parameters, latents, tasks.support_labels), latents

    def adapt(self, parameters: Parameters, tasks: TaskBatch) -> list[tuple[Parameters, InnerState]]:
        """The parameters of each task before each inner step, and after the last: n + 1 entries."""
        with matrix_products(self.precision, tasks.support_labels.device):
            return self._adapt(parameters, tasks)

    def _adapt(self, parameters: Parameters, tasks: TaskBatch) -> list[tuple[Parameters, InnerState]]:
        leaves = _leaves(for_each_task(parameters, tasks))
        with torch.set_grad_enabled(self.adaptation.steps > 0):  # inner steps need gradients, whoever calls
            started, latents = self.start(leaves, tasks)
        # Gradients of inner steps are with respect to a last layer made from prototypes, not through it.
        current = leaves | _leaves({key: value for key, value in started.items() if key not in leaves})
        state = self.initial_state(current)
        trajectory = [(_detached(current), state)]
        for step in range(self.adaptation.steps):
            with torch.enable_grad():
                after, state = self.inner_step(current, state, tasks, step, False, latents if step == 0 else None)
            state = InnerState(*(_detached(moment) for moment in state))
            trajectory.append((_detached(after), state))
            current = _leaves(after)
        return trajectory

    def logits(self, parameters: Parameters, tasks: TaskBatch) -> list[Tensor]:
        """Of the queries after adaptation, (task, query, n_way), for each draw of their noise."""
        if self.adaptation.steps:
            adapted, _ = self.adapt(parameters, tasks)[-1]
            return self._query_logits(adapted, tasks, self.encode(adapted, tasks.images))
        own = for_each_task(parameters, tasks)
        return self.logits_from(own, tasks, self.encode(own, tasks.images))

    def logits_from(self, parameters: Parameters, tasks: TaskBatch, encodings: Encodings) -> list[Tensor]:
        """The same without inner steps: nothing changes the encoders, so their work serves both sets."""
        assert not self.adaptation.steps
        with torch.no_grad(), matrix_products(self.precision, tasks.support_labels.device):
            started, _ = self.start(parameters, tasks, encodings)
        return self._query_logits(started, tasks, encodings)

    def _query_logits(self, adapted: Parameters, tasks: TaskBatch, encodings: Encodings) -> list[Tensor]:
        """What adapted parameters say of the queries, whose images they made these encodings of."""
        with torch.no_grad(), matrix_products(self.precision, tasks.support_labels.device):
            statistics = self.statistics(tasks.images)
            draws = [
                self.model.infer(adapted, tasks.images, "query", noise, statistics, encodings)
                for noise in tasks.query_noise
            ]
            return [self.model.classify(adapted, latents) for latents in draws]

    def encode(self, parameters: Parameters, images: TaskImages) -> Encodings:
        with torch.no_grad(), matrix_products(self.precision, images.stored.device):
            return self.model.encode(parameters, images, self.statistics(images))

    @property
    def encodes_each_alone(self) -> bool:
        """Whether what the encoders make of an image depends on no other image."""
        return self.batch_norm == "running" and not self.adaptation.steps

    def meta_gradient(self, parameters: Parameters, tasks: TaskBatch) -> MetaGradient:
        """Gradient of the summed query losses after adaptation, with respect to the parameters before it."""
        with matrix_products(self.precision, tasks.support_labels.device):
            return self._meta_gradient(parameters, tasks)

    def _meta_gradient(self, parameters: Parameters, tasks: TaskBatch) -> MetaGradient:
        trajectory = self._adapt(parameters, tasks)
        adapted = _leaves(trajectory[-1][0])
        parts, logits, statistics = self.loss(adapted, tasks, "query", tasks.query_noise[0])
        pulled = _gradient(parts.total.sum(), adapted)
        if self.adaptation.order == "second":
            moments = InnerState(*({key: torch.zeros_like(x) for key, x in m.items()} for m in trajectory[-1][1]))
            for step in reversed(range(self.adaptation.steps)):
                pulled, moments = self._pull_back(pulled, moments, *trajectory[step], tasks, step)
        finite = parts.total.isfinite()
        for value in pulled.values():
            finite = finite & value.reshape(len(value), -1).isfinite().all(1)
        pulled = {key: only_finite(value, finite) for key, value in pulled.items()}
        leaves = _leaves(parameters)
        started, _ = self.start(for_each_task(leaves, tasks), tasks)
        gradients = torch.autograd.grad(
            [started[key] for key in pulled], list(leaves.values()), list(pulled.values()), materialize_grads=True
        )
        accuracy = (logits.detach().argmax(-1) == tasks.query_labels).float().mean(1)
        return MetaGradient(
            dict(zip(leaves, gradients, strict=True)),
            LossParts(*(part.detach() for part in parts)),
            accuracy,
            statistics,
            finite,
        )

    def _pull_back(
        self,
        pulled: Parameters,
        pulled_moments: InnerState,
        before: Parameters,
        state: InnerState,
        tasks: TaskBatch,
        step: int,
    ) -> tuple[Parameters, InnerState]:
        """The vector-Jacobian product of one recomputed inner step."""
        before = _leaves(before)
        state = InnerState(*(_leaves(moment) for moment in state))
        after, state_after = self.inner_step(before, state, tasks, step, differentiable=True)
        inputs = [*before.values(), *(x for moment in state for x in moment.values())]
        outputs = [*after.values(), *(x for moment in state_after for x in moment.values())]
        cotangents = [*pulled.values(), *(x for moment in pulled_moments for x in moment.values())]
        results = iter(torch.autograd.grad(outputs, inputs, cotangents, materialize_grads=True))
        pulled = {key: next(results) for key in before}
        return pulled, InnerState(*({key: next(results) for key in moment} for moment in state))


@contextmanager
def matrix_products(precision: str, device: torch.device) -> Iterator[None]:
    """How torch multiplies float32 matrices on a GPU: in full precision or, where less is asked for, as TF32."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _adam_step(
    parameters: Parameters, state: InnerState, gradient: Parameters, step: int, rate: float
) -> tuple[Parameters, InnerState]:
    beta1, beta2 = ADAM_BETAS
    first = {key: beta1 * state.first_moment[key] + (1 - beta1) * g for key, g in gradient.items()}
    second = {key: beta2 * state.second_moment[key] + (1 - beta2) * g.square() for key, g in gradient.items()}
    correction1, correction2 = 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)

    def moved(key: str) -> Tensor:
        scale = torch.sqrt(second[key] / correction2 + ADAM_EPSILON_ROOT) + ADAM_EPSILON
        return parameters[key] - rate * (first[key] / correction1) / scale

    return {key: moved(key) for key in parameters}, InnerState(first, second)


def _gradient(loss: Tensor, parameters: Parameters, create_graph: bool = False) -> Parameters:
    gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=create_graph, materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


def only_finite(values: Tensor, finite: Tensor) -> Tensor:
    """Values (task, ...) with zeros for the tasks that are not finite."""
    return torch.where(finite.view(-1, *(1,) * (values.dim() - 1)), values, 0.0)


def for_each_task(parameters: Parameters, tasks: TaskBatch) -> Parameters:
    return {key: value.expand(tasks.n_tasks, *value.shape) for key, value in parameters.items()}


def _leaves(parameters: Parameters) -> Parameters:
    return {key: value.detach().requires_grad_() for key, value in parameters.items()}


def _detached(parameters: Parameters) -> Parameters:
    return {key: value.detach() for key, value in parameters.items()}
