"""TRIDENT with the fused passes: the same meta-gradient as in `engines/plain/inner_loop.py`.

An inner step caches the results of its forward and backward passes. The Hessian-vector product that pulls the
meta-gradient back through the step then needs only the two tangent passes. Task parameters are one flat matrix,
(task, parameter), so that a step of the inner optimiser is one operation.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from trident.engines.cuda_graphs import RecordedLearner
from trident.engines.fused.network import FusedEncodings, FusedNetwork, Images, Pass
from trident.engines.fused.storage import Layout
from trident.engines.learner import Gradient, accuracy_of, computing, only_finite
from trident.methods.inner_loop.base import InnerState
from trident.methods.trident.network import Network
from trident.nn.parameters import Parameters, for_each_task
from trident.nn.probabilities import mean_prediction
from trident.tasks.task import Batch, Task


class Start(NamedTuple):
    parameters: Parameters  # (task, ...) each
    encodings: FusedEncodings | None  # of the support sets, if needed
    leaves: Parameters
    made: Parameters  # the classifier's last layer, with graph


@dataclass
class Step:
    """The state before an inner step, and its gradient."""

    flat: Tensor
    state: InnerState
    gradient: Tensor
    record: Pass | None


@dataclass(frozen=True)
class FusedTridentLearner(RecordedLearner):
    model: Network

    @cached_property
    def network(self) -> FusedNetwork:
        return FusedNetwork(self.model, self.precision)

    def _start(self, parameters: Parameters, task: Task, images: Images) -> Start:
        """The parameters of each task before its first step."""
        own = for_each_task({key: value.detach() for key, value in parameters.items()}, task.n_tasks)
        if self.model.method.classifier_start == "learned":
            return Start(own, None, {}, {})
        encodings = self.network.encode(own, images, "support")
        with torch.enable_grad():
            leaves = self.network.leaves(own, encodings)
            latents = self.network.posteriors(leaves, task, "support", 0)
            made = self.model.prototype_classifier(leaves, latents, task)
        return Start(own, encodings, leaves, made)

    def _steps(
        self, start: Start, task: Task, images: Images, differentiable: bool
    ) -> tuple[Layout, list[Step], Tensor, InnerState]:
        """Run all inner steps. Also returns the flat parameters and the optimiser's state after the last."""
        method = self.model.method
        begun = start.parameters | {key: value.detach() for key, value in start.made.items()}
        layout = Layout(begun)
        flat = layout.join(begun)
        state = method.initial_state({"": flat})
        steps = []
        for number in range(method.inner_steps):
            gradient = layout.zeros(task.n_tasks, flat.device)
            record = self.network.first_order(
                layout.split(flat),
                layout.split(gradient),
                task,
                images,
                "support",
                None,
                number,
                start.encodings if number == 0 else None,
                differentiable,
            )
            steps.append(Step(flat, state, gradient, record if differentiable else None))
            after, state = method.update({"": flat}, state, {"": gradient}, number)
            flat = after[""]
        return layout, steps, flat, state

    def adapt(self, parameters: Parameters, task: Task) -> list[tuple[Parameters, InnerState]]:
        """The parameters of each task before each inner step, and after the last."""
        with computing(self.precision, task.device):
            images = self.network.images(task)
            layout, steps, flat, state = self._steps(self._start(parameters, task, images), task, images, False)

            def named(state: InnerState) -> InnerState:
                return InnerState(*(layout.split(moment[""]) if moment else {} for moment in state))

            return [
                (layout.split(at), named(kept)) for at, kept in [*((s.flat, s.state) for s in steps), (flat, state)]
            ]

    def log_probabilities(self, parameters: Parameters, task: Task) -> Tensor:
        adapted, _ = self.adapt(parameters, task)[-1]
        with computing(self.precision, task.device):
            layout = Layout(adapted)
            adapted = layout.split(layout.join(adapted))  # adjacent in memory, as the kernels need
            encodings = self.network.encode(adapted, self.network.images(task), "query")
            leaves = adapted | {"/semantic": encodings.semantic_features, "/label": encodings.label.features}
            draws = range(self.model.n_draws(task))
            latents = [self.network.posteriors(leaves, task, "query", draw) for draw in draws]
            return mean_prediction([self.model.classify(leaves, found, task) for found in latents])

    def compute(self, parameters: Parameters, batch: Batch) -> Gradient:
        task, labels = batch
        with computing(self.precision, task.device):
            images = self.network.images(task)
            start = self._start(parameters, task, images)
            second_order = self.model.method.inner_order == "second"
            layout, steps, flat, state = self._steps(start, task, images, second_order)
            adapted = layout.split(flat)
            pulled = layout.zeros(task.n_tasks, flat.device)
            known = None if steps else start.encodings
            outer = self.network.first_order(
                adapted,
                layout.split(pulled),
                task,
                images,
                "query",
                labels,
                0,
                self.network.encode(adapted, images, "query", known),
            )
            statistics = self.network.semantic_encoder.statistics(adapted, outer.encodings.semantic[-1])
            statistics |= self.network.label_encoder.statistics(adapted, outer.encodings.label)
            statistics |= self.network.decoder.statistics(adapted, outer.decoded)
            if second_order:
                moments = InnerState(*({key: torch.zeros_like(x) for key, x in m.items()} for m in state))
                for number in reversed(range(len(steps))):
                    pulled, moments = self._pull_back(pulled, moments, steps[number], number, layout)
                    steps[number].record = None  # frees its memory
            finite = outer.losses["total"].detach().isfinite() & pulled.isfinite().all(1)
            return Gradient(
                self._pull_back_through_start(layout, only_finite(pulled, finite), start),
                {name: part.detach() for name, part in outer.losses.items()},
                accuracy_of(outer.logits, labels.queries),
                statistics,
                finite,
            )

    def _pull_back(
        self, pulled: Tensor, moments: InnerState, step: Step, number: int, layout: Layout
    ) -> tuple[Tensor, InnerState]:
        """The vector-Jacobian product of an inner step, through the optimiser and the Hessian."""

        def hessian(direction: Tensor) -> Tensor:
            assert step.record is not None
            return self.network.hessian_product(step.record, direction, layout)

        method = self.model.method
        if method.inner_optimizer == "sgd":
            return torch.add(pulled, hessian(pulled), alpha=-method.inner_rate), moments
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (step.flat, step.gradient, *(m[""] for m in step.state))]
            flat, gradient, first, second = inputs
            after, state = method.update({"": flat}, InnerState({"": first}, {"": second}), {"": gradient}, number)
            outputs = [after[""], *(m[""] for m in state)]
            cotangents = [pulled, *(m[""] for m in moments)]
            direct, through, *rest = torch.autograd.grad(outputs, inputs, cotangents, materialize_grads=True)
        return direct + hessian(through), InnerState(*({"": moment} for moment in rest))

    def _pull_back_through_start(self, layout: Layout, pulled: Tensor, start: Start) -> Parameters:
        """Sum over tasks. If the last layer was made from prototypes, backpropagate its gradient through them."""
        summed = {key: value[0] for key, value in layout.split(pulled.sum(0, keepdim=True)).items()}
        if start.encodings is None:
            return summed
        cotangents = {key: value for key, value in layout.split(pulled).items() if key in start.made}
        gradients = torch.autograd.grad(
            list(start.made.values()),
            list(start.leaves.values()),
            [cotangents[key] for key in start.made],
            materialize_grads=True,
        )
        named = dict(zip(start.leaves, gradients, strict=True))
        own = Layout(start.parameters)
        more = own.zeros(len(pulled), pulled.device)
        out = own.split(more)
        self.network.write_gradients(named, out)
        self.network.semantic_backward(start.parameters, start.encodings, named["/semantic"], out)
        self.network.label_encoder.backward(start.parameters, start.encodings.label, named["/label"], out)
        return {key: summed[key] + value[0] for key, value in own.split(more.sum(0, keepdim=True)).items()}
