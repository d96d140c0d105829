"""The inner loop and the exact meta-gradient (Algorithm 2 of the paper), for many tasks at once.

One inner step is a function (parameters, state) -> (parameters, state). The meta-gradient is the gradient of the query
loss at the adapted parameters, pulled back through the steps one by one, last step first. Each step is recomputed for
this, so only the parameters before each step are kept in memory. For plain gradient steps of rate a, pulling back
through one step is  v <- v - a H v  with the Hessian H of the support loss.

All functions here are pure: images, labels and noise come in, new parameters or gradients go out.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trident.engines.cuda_graphs import RecordedLearner
from trident.engines.learner import Gradient, accuracy_of, computing, matrix_products, only_finite
from trident.methods.inner_loop.adapted_conv4 import AdaptedConv4
from trident.methods.inner_loop.base import Adapted, Encodings, InnerLoopMethod, InnerLoopModel, InnerState, Inputs
from trident.nn.parameters import Parameters, as_leaves, for_each_task, gradients
from trident.nn.probabilities import mean_prediction
from trident.tasks.task import Batch, Labels, Task


@dataclass(frozen=True)
class InnerLoopLearner(RecordedLearner):
    """The plain learner of every method with inner steps, with torch's autograd."""

    model: InnerLoopModel

    @property
    def method(self) -> InnerLoopMethod:
        return self.model.method

    def inputs(self, task: Task, **others: Any) -> Inputs:
        return Inputs(task, self.statistics(task), **others)

    # Adaptation.

    def adapt(self, parameters: Parameters, task: Task) -> list[Adapted]:
        """The parameters of each task before each inner step, and after the last: n + 1 entries."""
        with matrix_products(self.precision, task.device):
            return self._adapt(parameters, task)

    def _adapt(self, parameters: Parameters, task: Task, labels: Labels | None = None) -> list[Adapted]:
        """`labels` of the queries: in training only."""
        leaves = as_leaves(for_each_task(parameters, task.n_tasks))
        with torch.set_grad_enabled(self.method.inner_steps > 0):  # inner steps always need gradients
            started, reused = self.model.start(leaves, self.inputs(task, labels=labels))
        # A last layer made from prototypes is a leaf: inner gradients do not flow through the prototypes.
        current = leaves | as_leaves({key: value for key, value in started.items() if key not in leaves})
        state = self.method.initial_state(current)
        trajectory = [(_detached(current), state)]
        for step in range(self.method.inner_steps):
            with torch.enable_grad():
                after, state = self.inner_step(current, state, task, step, False, reused if step == 0 else None)
            state = InnerState(*(_detached(moment) for moment in state))
            trajectory.append((_detached(after), state))
            current = as_leaves(after)
        return trajectory

    def inner_step(
        self, parameters: Parameters, state: InnerState, task: Task, step: int, differentiable: bool, reused: Any = None
    ) -> Adapted:
        """One gradient step on the support sets. `parameters` must require gradients."""
        found = self.model.loss(parameters, self.inputs(task, target="support", draw=step, reused=reused))
        adapted = {key: value for key, value in parameters.items() if self.method.adapts(key)}
        gradient = gradients(found.losses["total"].sum(), adapted, create_graph=differentiable)
        return self.method.update(parameters, state, gradient, step)

    # Prediction.

    def log_probabilities(self, parameters: Parameters, task: Task) -> Tensor:
        if not self.method.inner_steps:
            return self.log_probabilities_from(parameters, task, self.encode(parameters, task))
        return self.log_probabilities_adapted(self.adapted(parameters, task), task)

    @property
    def adapts_once(self) -> bool:
        return self.method.adapts_to_support_alone and self.method.inner_steps > 0 and not self.method.positional

    def adapted(self, parameters: Parameters, task: Task) -> Parameters:
        return self.adapt(parameters, task)[-1][0]

    def log_probabilities_adapted(self, adapted: Parameters, task: Task) -> Tensor:
        with computing(self.precision, task.device):
            inputs = self.inputs(task)
            encodings = self.model.encode(adapted, inputs)
            return mean_prediction(self.model.logits(adapted, inputs._replace(encodings=encodings)))

    @property
    def encodes_alone(self) -> bool:
        return self.batch_norm == "running" and not self.method.inner_steps and not self.method.positional

    def encode(self, parameters: Parameters, task: Task) -> Encodings:
        with computing(self.precision, task.device):
            return self.model.encode(for_each_task(parameters, task.n_tasks), self.inputs(task))

    def log_probabilities_from(self, parameters: Parameters, task: Task, encodings: Encodings) -> Tensor:
        """Without inner steps the encoders do not change, so one encoding serves both sets."""
        assert not self.method.inner_steps
        inputs = self.inputs(task, encodings=encodings)
        with computing(self.precision, task.device):
            started, _ = self.model.start(for_each_task(parameters, task.n_tasks), inputs)
            return mean_prediction(self.model.logits(started, inputs))

    # The meta-gradient.

    def gradient(self, parameters: Parameters, batch: Batch) -> Gradient:
        """The gradient of the summed query losses after adaptation, with respect to the parameters before it."""
        recorded = isinstance(self.method, AdaptedConv4) and torch.version.hip is None
        return super().gradient(parameters, batch) if recorded else self.compute(parameters, batch)

    def compute(self, parameters: Parameters, batch: Batch) -> Gradient:
        with matrix_products(self.precision, batch.task.device):
            return self._meta_gradient(parameters, batch)

    def _meta_gradient(self, parameters: Parameters, batch: Batch) -> Gradient:
        task, labels = batch
        trajectory = self._adapt(parameters, task, labels)
        adapted = as_leaves(trajectory[-1][0])
        with torch.enable_grad():
            outer = self.model.loss(adapted, self.inputs(task, labels=labels))
            pulled = gradients(outer.losses["total"].sum(), adapted)
        if self.method.inner_order == "second":
            moments = InnerState(*({key: torch.zeros_like(x) for key, x in m.items()} for m in trajectory[-1][1]))
            for step in reversed(range(self.method.inner_steps)):
                pulled, moments = self._pull_back(pulled, moments, trajectory[step], task, step)
        finite = outer.losses["total"].detach().isfinite()
        for value in pulled.values():
            finite = finite & value.reshape(len(value), -1).isfinite().all(1)
        pulled = {key: only_finite(value, finite) for key, value in pulled.items()}
        leaves = as_leaves(parameters)
        with torch.enable_grad():
            started, _ = self.model.start(for_each_task(leaves, task.n_tasks), self.inputs(task, labels=labels))
            pulled_back = torch.autograd.grad(
                [started[key] for key in pulled], list(leaves.values()), list(pulled.values()), materialize_grads=True
            )
        return Gradient(
            dict(zip(leaves, pulled_back, strict=True)),
            {name: part.detach() for name, part in outer.losses.items()},
            accuracy_of(outer.logits, labels.queries),
            outer.seen,
            finite,
        )

    def _pull_back(self, pulled: Parameters, moments: InnerState, before: Adapted, task: Task, step: int) -> Adapted:
        """The vector-Jacobian product of one inner step, which is recomputed."""
        parameters, state = as_leaves(before[0]), InnerState(*(as_leaves(moment) for moment in before[1]))
        with torch.enable_grad():
            after, state_after = self.inner_step(parameters, state, task, step, differentiable=True)
            inputs = [*parameters.values(), *(x for moment in state for x in moment.values())]
            outputs = [*after.values(), *(x for moment in state_after for x in moment.values())]
            cotangents = [*pulled.values(), *(x for moment in moments for x in moment.values())]
            results = iter(torch.autograd.grad(outputs, inputs, cotangents, materialize_grads=True))
        pulled = {key: next(results) for key in parameters}
        return pulled, InnerState(*({key: next(results) for key in moment} for moment in state))


def _detached(parameters: Parameters) -> Parameters:
    return {key: value.detach() for key, value in parameters.items()}
