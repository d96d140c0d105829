"""The network as a sandwich: fused stacks outside, autograd inside. Its gradient, and its Hessian times a direction."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from trident.engines.fused.decoder import Decoded, FusedDecoder
from trident.engines.fused.encoder import Encoded, FusedEncoder
from trident.engines.fused.layout import Layout
from trident.engines.kernels.first_layer import PictureRows, Pictures
from trident.engines.kernels.scaling import enter
from trident.errors import TridentError
from trident.learning.inner_loop import TaskBatch
from trident.methods.trident.network import Latents, Noise, Output, Target, Trident
from trident.methods.trident.objective import LossParts, weighed_parts
from trident.nn.activation import LEAKY_SLOPE
from trident.nn.gaussian import Gaussian
from trident.nn.parameters import Parameters
from trident.settings import ModelSettings, ObjectiveSettings

TANGENT_SIZE = 2.0**-4  # largest entry of a scaled direction in parameter space
STORAGE = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PRODUCTS = {"fp32": "tf32x3", "tf32": "tf32", "fp16": "tf32", "bf16": "tf32"}  # of 32-bit numbers, where there are any


def slope_of(settings: ModelSettings) -> float:
    return 0.0 if settings.activation == "relu" else LEAKY_SLOPE


def pictures_of(tasks: TaskBatch, precision: str, settings: ModelSettings) -> Pictures:
    """The tasks' images, unless they are too many: the kernels count numbers in 32 bits."""
    n_tasks, n, size = tasks.images.stored.shape[:3]
    largest = n_tasks * n * size**2 * max(settings.channels, settings.label_encoder_channels)
    if largest >= 2**31:
        raise TridentError(
            f"{n_tasks} tasks of {n} images of {size}x{size} at once are too many for the fused engine: set "
            f"tasks_per_chunk to {n_tasks * 2**31 // largest} or fewer"
        )
    return Pictures(tasks.images.stored, STORAGE[precision], PRODUCTS[precision])


class Images(NamedTuple):
    """A task's images as the stacks read them."""

    all: PictureRows
    support: PictureRows
    query: PictureRows

    def target(self, target: Target) -> PictureRows:
        return self.support if target == "support" else self.query


class FusedEncodings(NamedTuple):
    semantic: Encoded  # of the target images
    label: Encoded  # of all images


@dataclass
class Pass:
    """The loss of one set of each task and its gradient, with all that a Hessian-vector product needs."""

    parameters: Parameters
    encodings: FusedEncodings
    decoded: Decoded
    error_weight: float  # of an image's squared error in the loss
    leaves: dict[str, Tensor]  # what autograd's part starts from: features and parameters
    gradients: dict[str, Tensor]  # of the leaves, with their graph
    hidden: Tensor  # what the decoder reads, with its graph
    hidden_gradient: Tensor  # a leaf
    parts: LossParts
    logits: Tensor


@dataclass(frozen=True)
class FusedNetwork:
    model: Trident
    objective: ObjectiveSettings
    precision: str

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
        return slope_of(self.model.settings)

    @property
    def _products(self) -> str:
        return PRODUCTS[self.precision]

    def images(self, tasks: TaskBatch) -> Images:
        pictures = pictures_of(tasks, self.precision, self.model.settings)
        n, total = tasks.images.n_support, tasks.images.stored.shape[1]
        return Images(pictures.rows(0, total), pictures.rows(0, n), pictures.rows(n, total - n))

    def encode(
        self, parameters: Parameters, images: Images, target: Target, label: Encoded | None = None
    ) -> FusedEncodings:
        """`label` is the label encoder's part, where the same parameters have made it before."""
        of = images.all if self.model.has_context(target, "transductive") else images.target(target)
        return FusedEncodings(
            self.semantic_encoder.forward(parameters, of), label or self.label_encoder.forward(parameters, images.all)
        )

    def leaves(self, parameters: Parameters, encodings: FusedEncodings) -> dict[str, Tensor]:
        inside = {key: value for key, value in parameters.items() if not self._is_outside(key)}
        features = {"/semantic": encodings.semantic.features, "/label": encodings.label.features}
        return {key: value.detach().requires_grad_() for key, value in (features | inside).items()}

    @staticmethod
    def _is_outside(key: str) -> bool:
        """Whether a parameter belongs to a fused stack."""
        part = key.split(".")[0]
        return part.endswith("_encoder") or (part == "decoder" and not key.startswith("decoder.linear"))

    def posteriors(self, leaves: Parameters, tasks: TaskBatch, target: Target, noise: Noise) -> Latents:
        context = self.model.has_context(target, "transductive")
        return self.model.posteriors(
            leaves, leaves["/semantic"], leaves["/label"], tasks.images, target, noise, context
        )

    def first_order(
        self,
        parameters: Parameters,
        out: Parameters,
        tasks: TaskBatch,
        images: Images,
        target: Target,
        noise: Noise,
        encodings: FusedEncodings | None = None,
        differentiable: bool = False,
    ) -> Pass:
        """Write the gradient of the summed losses to `out`, (task, ...) each, and tell how it came about."""
        encodings = encodings or self.encode(parameters, images, target)
        labels = tasks.support_labels if target == "support" else tasks.query_labels
        with torch.enable_grad():
            leaves = self.leaves(parameters, encodings)
            latents = self.posteriors(leaves, tasks, target, noise)
            logits = self.model.classify(leaves, latents)
            first = latents.n_context
            hidden = self.model.decoder.hidden(leaves, latents.codes[:, first:])
            label, semantic = (Gaussian(*(x[:, first:] for x in of)) for of in (latents.label, latents.semantic))
            output = Output(logits, label, semantic, None, self.model.training_class_logits(leaves, latents))
            decoded = self.decoder.forward(parameters, hidden.detach(), images.target(target))
            n = labels.shape[1]
            classes = None if target == "support" else tasks.query_classes
            parts = weighed_parts(output, decoded.error / n, labels, self.objective, classes)
            share = self.objective.reconstruction_weight / n
            hidden_gradient = self.decoder.backward(decoded, share, out).requires_grad_(differentiable)
            gradients = torch.autograd.grad(
                [parts.total.sum(), hidden],
                list(leaves.values()),
                [torch.ones_like(parts.total[0]), hidden_gradient],
                create_graph=differentiable,
                materialize_grads=True,
            )
        named = dict(zip(leaves, gradients, strict=True))
        self.give_out(named, out)
        self.semantic_encoder.backward(parameters, encodings.semantic, named["/semantic"].detach(), out)
        self.label_encoder.backward(parameters, encodings.label, named["/label"].detach(), out)
        return Pass(
            parameters, encodings, decoded, share, leaves, named, hidden, hidden_gradient, parts, logits.detach()
        )

    @staticmethod
    def give_out(named: Parameters, out: Parameters) -> None:
        """What autograd found of the parameters, to its places."""
        for key, value in named.items():
            if not key.startswith("/"):
                out[key].copy_(value.detach())

    def hessian_product(self, at: Pass, direction: Tensor, layout: Layout) -> Tensor:
        """The Hessian of the support loss at a pass's parameters, times a direction: both (task, parameter)."""
        product = layout.zeros(len(direction), direction.device)
        out = layout.split(product)
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
        decoder = self.decoder.tangent(at.decoded, hidden1, *self._scaled(direction, layout, "decoder.", hidden1))
        hidden_gradient1 = self.decoder.tangent_backward(at.decoded, decoder, at.error_weight, out)
        pulled = torch.autograd.grad(at.hidden, list(at.leaves.values()), hidden_gradient1, materialize_grads=True)
        total = dict(zip(at.leaves, torch._foreach_add(moved, list(pulled)), strict=True))
        self.give_out(total, out)
        self.semantic_encoder.tangent_backward(at.parameters, at.encodings.semantic, semantic, total["/semantic"], out)
        self.label_encoder.tangent_backward(at.parameters, at.encodings.label, label, total["/label"], out)
        return product

    @staticmethod
    def _scaled(
        direction: Tensor, layout: Layout, prefix: str, among: Tensor | None = None
    ) -> tuple[Parameters, Tensor]:
        """A stack's share of a direction, in the range of 16 bits, and the scale that brought it there."""
        columns, part = layout.part(direction, prefix)
        scaled = enter(columns, TANGENT_SIZE, torch.float32, "fp32", among=among)
        return part.split(scaled.stored), scaled.factor
