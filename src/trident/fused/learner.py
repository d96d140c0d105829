"""The meta-gradient of `trident.adapt`, by the fused passes.

An inner step's gradient keeps what its forward and backward passes made, so that the Hessian-vector product which
pulls the meta-gradient back through that step only needs the two tangent passes. Task parameters are one flat matrix,
(task, parameter), so that a step of the inner optimiser is one operation.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trident.adapt import InnerState, Learner, MetaGradient, TaskBatch, matrix_products
from trident.fused.decoder import Decoded, FusedDecoder
from trident.fused.encoder import Encoded, FusedEncoder
from trident.fused.replay import Replay, signature
from trident.fused.scaling import TANGENT_SIZE, largest_of, power_of_two
from trident.model import Latents, Noise, Output, Target
from trident.nn.activation import LEAKY_SLOPE
from trident.nn.gaussian import Gaussian
from trident.nn.kernels.first_layer import PictureRows, Pictures
from trident.nn.parameters import Parameters
from trident.objective import LossParts, weighed_parts

STORAGE = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Layout:
    """Where each parameter lies in a flat matrix (task, parameter)."""

    def __init__(self, parameters: Parameters):
        """`parameters` carry a task axis."""
        self.shapes = {key: value.shape[1:] for key, value in parameters.items()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]

    def split(self, flat: Tensor) -> Parameters:
        pieces = torch.split_with_sizes(flat, self.sizes, 1)
        return {
            key: piece.view(len(piece), *shape) for (key, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def part(self, flat: Tensor, prefix: str) -> tuple[Tensor, "Layout"]:
        """The columns of the parameters whose names begin alike, which lie side by side."""
        found = [i for i, key in enumerate(self.shapes) if key.startswith(prefix)]
        first, last = found[0], found[-1] + 1
        start, size = sum(self.sizes[:first]), sum(self.sizes[first:last])
        part = Layout({})
        part.shapes = dict(list(self.shapes.items())[first:last])
        part.sizes = self.sizes[first:last]
        return flat[:, start : start + size], part

    def join(self, parameters: Parameters, tasks: int, device: torch.device) -> Tensor:
        """What is missing is zero."""
        return torch.cat(
            [
                parameters[key].reshape(tasks, -1) if key in parameters else torch.zeros(tasks, size, device=device)
                for key, size in zip(self.shapes, self.sizes, strict=True)
            ],
            1,
        )


class Images(NamedTuple):
    """A task's images as the stacks read them."""

    all: PictureRows
    support: PictureRows
    query: PictureRows

    def target(self, target: Target) -> PictureRows:
        return self.support if target == "support" else self.query


class Encodings(NamedTuple):
    semantic: Encoded  # of the target images
    label: Encoded  # of all images


@dataclass
class Pass:
    """The loss of one set of each task and its gradient, with all that a Hessian-vector product needs."""

    parameters: Parameters
    encodings: Encodings
    decoded: Decoded
    leaves: dict[str, Tensor]  # what autograd's part starts from: features and parameters
    gradients: dict[str, Tensor]  # of the leaves, with their graph
    hidden: Tensor  # what the decoder reads, with its graph
    hidden_gradient: Tensor  # a leaf
    parts: LossParts
    logits: Tensor


@dataclass(frozen=True)
class FusedLearner(Learner):
    recordings: dict[tuple[Any, ...], Replay] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def label_encoder(self) -> FusedEncoder:
        return FusedEncoder("label_encoder", self._slope, self._products)

    @cached_property
    def semantic_encoder(self) -> FusedEncoder:
        return FusedEncoder("semantic_encoder", self._slope, self._products)

    @cached_property
    def decoder(self) -> FusedDecoder:
        decoder, settings = self.model.decoder, self.model.settings
        return FusedDecoder(
            "decoder",
            decoder.sizes[1:],
            settings.image_channels,
            settings.decoder_batch_norm,
            self._slope,
            self._products,
        )

    @property
    def _slope(self) -> float:
        return 0.0 if self.model.settings.activation == "relu" else LEAKY_SLOPE

    @property
    def _products(self) -> str:
        return "tf32x3" if self.precision == "fp32" else "tf32"

    def _images(self, tasks: TaskBatch) -> Images:
        pictures = Pictures(tasks.images.stored, STORAGE[self.precision], self._products)
        n, total = tasks.images.n_support, tasks.images.stored.shape[1]
        return Images(pictures.rows(0, total), pictures.rows(0, n), pictures.rows(n, total - n))

    def _encode(self, parameters: Parameters, images: Images, target: Target) -> Encodings:
        return Encodings(
            self.semantic_encoder.forward(parameters, images.target(target)),
            self.label_encoder.forward(parameters, images.all),
        )

    def _leaves(self, parameters: Parameters, encodings: Encodings) -> dict[str, Tensor]:
        inside = {key: value for key, value in parameters.items() if not self._is_outside(key)}
        features = {"/semantic": encodings.semantic.features, "/label": encodings.label.features}
        return {key: value.detach().requires_grad_() for key, value in (features | inside).items()}

    @staticmethod
    def _is_outside(key: str) -> bool:
        """Whether a parameter belongs to a fused stack."""
        part = key.split(".")[0]
        return part.endswith("_encoder") or (part == "decoder" and not key.startswith("decoder.linear"))

    def _posteriors(self, leaves: Parameters, tasks: TaskBatch, target: Target, noise: Noise) -> Latents:
        return self.model.posteriors(leaves, leaves["/semantic"], leaves["/label"], tasks.images.rows(target), noise)

    def _first_order(
        self,
        parameters: Parameters,
        tasks: TaskBatch,
        images: Images,
        target: Target,
        noise: Noise,
        encodings: Encodings | None = None,
        differentiable: bool = False,
    ) -> tuple[Parameters, Pass]:
        """The gradient of the summed losses, (task, ...) each, and how it came about."""
        encodings = encodings or self._encode(parameters, images, target)
        labels = tasks.support_labels if target == "support" else tasks.query_labels
        with torch.enable_grad():
            leaves = self._leaves(parameters, encodings)
            latents = self._posteriors(leaves, tasks, target, noise)
            logits = self.model.classify(leaves, latents)
            hidden = self.model.decoder.hidden(leaves, latents.codes)
            output = Output(logits, Gaussian(*latents.label), Gaussian(*latents.semantic), None)
            decoded = self.decoder.forward(parameters, hidden.detach(), images.target(target))
            n = labels.shape[1]
            parts = weighed_parts(output, decoded.error / n, labels, self.objective)
            share = self.objective.reconstruction_weight / n
            hidden_gradient, found = self.decoder.backward(parameters, decoded, share)
            hidden_gradient.requires_grad_(differentiable)
            gradients = torch.autograd.grad(
                [parts.total.sum(), hidden],
                list(leaves.values()),
                [torch.ones_like(parts.total[0]), hidden_gradient],
                create_graph=differentiable,
                materialize_grads=True,
            )
        named = dict(zip(leaves, gradients, strict=True))
        found |= {key: value.detach() for key, value in named.items() if not key.startswith("/")}
        found |= self.semantic_encoder.backward(parameters, encodings.semantic, named["/semantic"].detach())
        found |= self.label_encoder.backward(parameters, encodings.label, named["/label"].detach())
        record = Pass(parameters, encodings, decoded, leaves, named, hidden, hidden_gradient, parts, logits.detach())
        return found, record

    def _hessian_product(self, at: Pass, direction: Tensor, layout: Layout, share: float) -> Parameters:
        """The Hessian of the support loss at a pass's parameters, times a direction."""
        semantic = self.semantic_encoder.tangent(
            at.parameters, at.encodings.semantic, *self._scaled(direction, layout, "semantic_encoder.")
        )
        label = self.label_encoder.tangent(
            at.parameters, at.encodings.label, *self._scaled(direction, layout, "label_encoder.")
        )
        moves = layout.split(direction) | {"/semantic": semantic.features, "/label": label.features}
        *moved, hidden1 = torch.autograd.grad(
            list(at.gradients.values()),
            [*at.leaves.values(), at.hidden_gradient],
            [moves[key] for key in at.gradients],
            retain_graph=True,
            materialize_grads=True,
        )
        decoder = self.decoder.tangent(
            at.parameters, at.decoded, hidden1, *self._scaled(direction, layout, "decoder.", hidden1)
        )
        hidden_gradient1, found = self.decoder.tangent_backward(at.parameters, at.decoded, decoder, share)
        pulled = torch.autograd.grad(at.hidden, list(at.leaves.values()), hidden_gradient1, materialize_grads=True)
        total = dict(zip(at.leaves, torch._foreach_add(moved, list(pulled)), strict=True))
        found |= {key: value for key, value in total.items() if not key.startswith("/")}
        found |= self.semantic_encoder.tangent_backward(
            at.parameters, at.encodings.semantic, semantic, total["/semantic"]
        )
        found |= self.label_encoder.tangent_backward(at.parameters, at.encodings.label, label, total["/label"])
        return found

    @staticmethod
    def _scaled(direction: Tensor, layout: Layout, prefix: str, *others: Tensor) -> tuple[Parameters, Tensor]:
        """A stack's share of a direction, in the range of 16 bits, and the scale that brought it there."""
        columns, part = layout.part(direction, prefix)
        scale = power_of_two(largest_of(columns, *others), TANGENT_SIZE)
        return part.split(columns * scale[:, None]), scale

    def _start(self, parameters: Parameters, tasks: TaskBatch, images: Images) -> "Start":
        """The parameters as each task finds them before its first step."""
        own = {key: value.detach().expand(tasks.n_tasks, *value.shape) for key, value in parameters.items()}
        if self.model.settings.classifier_start == "learned":
            return Start(own, None, {}, {})
        encodings = self._encode(own, images, "support")
        with torch.enable_grad():
            leaves = self._leaves(own, encodings)
            latents = self._posteriors(leaves, tasks, "support", tasks.support_noise[0])
            made = self.model.prototype_classifier(leaves, latents, tasks.support_labels)
        return Start(own, encodings, leaves, made)

    def _steps(
        self, start: "Start", tasks: TaskBatch, images: Images, differentiable: bool
    ) -> tuple[Layout, list["Step"], Tensor, InnerState]:
        """All inner steps; the flat parameters and the optimiser's state after the last."""
        begun = start.parameters | {key: value.detach() for key, value in start.made.items()}
        layout = Layout(begun)
        flat = layout.join(begun, tasks.n_tasks, tasks.support_labels.device)
        state = self.initial_state({"": flat})
        steps = []
        for number in range(self.adaptation.steps):
            found, record = self._first_order(
                layout.split(flat),
                tasks,
                images,
                "support",
                tasks.support_noise[number],
                start.encodings if number == 0 else None,
                differentiable,
            )
            gradient = layout.join(found, tasks.n_tasks, flat.device)
            steps.append(Step(flat, state, gradient, record if differentiable else None))
            after, state = self.update({"": flat}, state, {"": gradient}, number)
            flat = after[""]
        return layout, steps, flat, state

    def adapt(self, parameters: Parameters, tasks: TaskBatch) -> list[tuple[Parameters, InnerState]]:
        with torch.no_grad(), matrix_products(self.precision):
            images = self._images(tasks)
            layout, steps, flat, state = self._steps(self._start(parameters, tasks, images), tasks, images, False)

            def named(state: InnerState) -> InnerState:
                return InnerState(*(layout.split(moment[""]) if moment else {} for moment in state))

            return [
                (layout.split(at), named(kept)) for at, kept in [*((s.flat, s.state) for s in steps), (flat, state)]
            ]

    def query_logits(self, adapted: Parameters, tasks: TaskBatch, noise: Noise) -> Tensor:
        with torch.no_grad(), matrix_products(self.precision):
            encodings = self._encode(adapted, self._images(tasks), "query")
            leaves = adapted | {"/semantic": encodings.semantic.features, "/label": encodings.label.features}
            return self.model.classify(leaves, self._posteriors(leaves, tasks, "query", noise))

    def meta_gradient(self, parameters: Parameters, tasks: TaskBatch) -> MetaGradient:
        if tasks.support_labels.device.type != "cuda":
            return self.compute(parameters, tasks)
        shape = signature(tasks)
        if shape not in self.recordings:
            self.recordings[shape] = Replay(self.compute, parameters, tasks)
        return self.recordings[shape](parameters, tasks)

    def compute(self, parameters: Parameters, tasks: TaskBatch) -> MetaGradient:
        """The meta-gradient, kernel after kernel."""
        with torch.no_grad(), matrix_products(self.precision):
            images = self._images(tasks)
            start = self._start(parameters, tasks, images)
            second_order = self.adaptation.order == "second"
            layout, steps, flat, state = self._steps(start, tasks, images, second_order)
            adapted = layout.split(flat)
            found, outer = self._first_order(adapted, tasks, images, "query", tasks.query_noise[0])
            pulled = layout.join(found, tasks.n_tasks, flat.device)
            statistics = self.semantic_encoder.statistics(adapted, outer.encodings.semantic)
            statistics |= self.label_encoder.statistics(adapted, outer.encodings.label)
            statistics |= self.decoder.statistics(adapted, outer.decoded)
            if second_order:
                moments = InnerState(*({key: torch.zeros_like(x) for key, x in m.items()} for m in state))
                for number in reversed(range(len(steps))):
                    pulled, moments = self._pull(pulled, moments, steps[number], number, layout)
                    steps[number].record = None  # lets its memory go
            return MetaGradient(
                self._pull_through_start(layout, pulled, start),
                LossParts(*(part.detach() for part in outer.parts)),
                (outer.logits.argmax(-1) == tasks.query_labels).float().mean(1),
                statistics,
            )

    def _pull(
        self, pulled: Tensor, moments: InnerState, step: "Step", number: int, layout: Layout
    ) -> tuple[Tensor, InnerState]:
        """The vector-Jacobian product of an inner step: the optimiser's share, and the Hessian's."""
        assert step.record is not None
        n = self.model.episode.n_support
        share = self.objective.reconstruction_weight / n

        def hessian(direction: Tensor) -> Tensor:
            found = self._hessian_product(step.record, direction, layout, share)  # type: ignore[arg-type]
            return layout.join(found, len(direction), direction.device)

        if self.adaptation.optimizer == "sgd":
            return torch.add(pulled, hessian(pulled), alpha=-self.adaptation.rate), moments
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (step.flat, step.gradient, *(m[""] for m in step.state))]
            flat, gradient, first, second = inputs
            after, state = self.update({"": flat}, InnerState({"": first}, {"": second}), {"": gradient}, number)
            outputs = [after[""], *(m[""] for m in state)]
            cotangents = [pulled, *(m[""] for m in moments)]
            direct, through, *rest = torch.autograd.grad(outputs, inputs, cotangents, materialize_grads=True)
        return direct + hessian(through), InnerState(*({"": moment} for moment in rest))

    def _pull_through_start(self, layout: Layout, pulled: Tensor, start: "Start") -> Parameters:
        """Summed over tasks; what belongs to a last layer made from prototypes goes on to what made it."""
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
        more = dict(zip(start.leaves, gradients, strict=True))
        more |= self.semantic_encoder.backward(start.parameters, start.encodings.semantic, more["/semantic"])
        more |= self.label_encoder.backward(start.parameters, start.encodings.label, more["/label"])
        return {key: summed[key] + more[key].sum(0) if key in more else summed[key] for key in start.parameters}


class Start(NamedTuple):
    parameters: Parameters  # (task, ...) each
    encodings: Encodings | None  # of the support sets, where they were needed
    leaves: Parameters
    made: Parameters  # the last layer, with its graph


@dataclass
class Step:
    """Where an inner step began, and how its gradient came about."""

    flat: Tensor
    state: InnerState
    gradient: Tensor
    record: Pass | None
