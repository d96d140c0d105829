"""The network's gradient and Hessian-vector product: fused convolution stacks, autograd for the rest."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from trident.backbones.conv4 import NAME as LABEL_ENCODER
from trident.engines.fused.decoder import Decoded, FusedDecoder
from trident.engines.fused.encoder import Encoded, FusedEncoder
from trident.engines.fused.storage import PRODUCTS, Layout, pictures_of, slope_of
from trident.engines.kernels.first_layer import PictureRows
from trident.engines.kernels.scaling import scale_into_range
from trident.methods.base import Losses
from trident.methods.inner_loop.base import Target
from trident.methods.trident.network import Network
from trident.methods.trident.objective import Latents, negative_evidence_lower_bound
from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.parameters import Parameters, as_leaves
from trident.tasks.task import Labels, Task

TRANSDUCTIVE = BatchNormStatistics("transductive")
TANGENT_SIZE = 2.0**-4  # largest entry of a scaled direction in parameter space


class Images(NamedTuple):
    """A task's images as the stacks read them."""

    all: PictureRows
    support: PictureRows
    query: PictureRows

    def target(self, target: Target) -> PictureRows:
        return self.support if target == "support" else self.query


class FusedEncodings(NamedTuple):
    semantic: tuple[Encoded, ...]  # of the target images; one entry per set if batch norm sees each set separately
    label: Encoded  # of all images

    @property
    def semantic_features(self) -> Tensor:
        parts = [encoded.features for encoded in self.semantic]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@dataclass
class Pass:
    """The loss of each task's support set or queries, its gradient, and all that a Hessian-vector product needs."""

    parameters: Parameters
    encodings: FusedEncodings
    decoded: Decoded
    error_weight: float  # weight of an image's squared error in the loss
    leaves: dict[str, Tensor]  # autograd's inputs: features and parameters
    gradients: dict[str, Tensor]  # of the leaves, with graph
    hidden: Tensor  # the decoder's input, with graph
    hidden_gradient: Tensor  # a leaf
    losses: Losses
    logits: Tensor


@dataclass(frozen=True)
class FusedNetwork:
    model: Network
    precision: str

    @cached_property
    def label_encoder(self) -> FusedEncoder:
        return FusedEncoder(LABEL_ENCODER, self._slope, self._products)

    @cached_property
    def semantic_encoder(self) -> FusedEncoder:
        return FusedEncoder(self.model.semantic_encoder.name, self._slope, self._products)

    @cached_property
    def decoder(self) -> FusedDecoder:
        decoder = self.model.decoder
        return FusedDecoder(
            decoder.name, decoder.sizes[1:], decoder.image_channels, decoder.batch_norm, self._slope, self._products
        )

    @cached_property
    def fused_parameters(self) -> frozenset[str]:
        """The names of the fused stacks' parameters. Autograd differentiates the others."""
        decoder = self.model.decoder
        layers = (*self.model.backbone.network.layers, *self.model.semantic_encoder.layers, *decoder.layers)
        with torch.device("meta"):
            return frozenset(key for layer in layers for key in layer.initial(torch.Generator()))

    @property
    def _slope(self) -> float:
        return slope_of(self.model.backbone)

    @property
    def _products(self) -> str:
        return PRODUCTS[self.precision]

    def images(self, task: Task) -> Images:
        widest = max(self.model.backbone.channels, self.model.semantic_channels)
        pictures = pictures_of(task, self.precision, widest)
        n, total = task.n_support, task.images.shape[1]
        return Images(pictures.rows(0, total), pictures.rows(0, n), pictures.rows(n, total - n))

    def encode(
        self, parameters: Parameters, images: Images, target: Target, known: FusedEncodings | None = None
    ) -> FusedEncodings:
        """`known` are the encodings of the other set with the same parameters, to be reused where possible."""
        if self.model.whole_task and known is not None:
            return known
        if self.model.whole_task:
            of = [images.all]
        elif self._has_context(target):
            of = [images.support, images.query]
        else:
            of = [images.target(target)]
        return FusedEncodings(
            tuple(self.semantic_encoder.forward(parameters, rows) for rows in of),
            known.label if known is not None else self.label_encoder.forward(parameters, images.all),
        )

    def _has_context(self, target: Target) -> bool:
        return self.model.has_context(target, TRANSDUCTIVE)

    def leaves(self, parameters: Parameters, encodings: FusedEncodings) -> dict[str, Tensor]:
        others = {key: value for key, value in parameters.items() if key not in self.fused_parameters}
        features = {"/semantic": encodings.semantic_features, "/label": encodings.label.features}
        return as_leaves(features | others)

    def posteriors(self, leaves: Parameters, task: Task, target: Target, draw: int) -> Latents:
        context, semantic = self._has_context(target), leaves["/semantic"]
        if self.model.whole_task and not context:
            semantic = semantic[:, task.support if target == "support" else task.queries]
        return self.model.posteriors(leaves, semantic, leaves["/label"], task, target, draw, context)

    def first_order(
        self,
        parameters: Parameters,
        out: Parameters,
        task: Task,
        images: Images,
        target: Target,
        labels: Labels | None,
        draw: int,
        encodings: FusedEncodings | None = None,
        differentiable: bool = False,
    ) -> Pass:
        """Write the gradient of the summed losses to `out`, (task, ...) each. Return the intermediate results."""
        encodings = encodings or self.encode(parameters, images, target)
        n = task.n_support if labels is None else task.n_queries
        with torch.enable_grad():
            leaves = self.leaves(parameters, encodings)
            latents = self.posteriors(leaves, task, target, draw)
            hidden = self.model.decoder.hidden(leaves, self.model.codes(latents)[:, latents.n_context :])
            decoded = self.decoder.forward(parameters, hidden.detach(), images.target(target))
            inferred = self.model.inferred(leaves, latents, task, decoded.error / n, labels)
            losses = negative_evidence_lower_bound(inferred, self.model.method)
            share = self.model.method.reconstruction_weight / n
            hidden_gradient = self.decoder.backward(decoded, share, out).requires_grad_(differentiable)
            gradients = torch.autograd.grad(
                [losses["total"].sum(), hidden],
                list(leaves.values()),
                [torch.ones_like(losses["total"][0]), hidden_gradient],
                create_graph=differentiable,
                materialize_grads=True,
            )
        named = dict(zip(leaves, gradients, strict=True))
        self.write_gradients(named, out)
        self.semantic_backward(parameters, encodings, named["/semantic"].detach(), out)
        self.label_encoder.backward(parameters, encodings.label, named["/label"].detach(), out)
        return Pass(
            parameters,
            encodings,
            decoded,
            share,
            leaves,
            named,
            hidden,
            hidden_gradient,
            losses,
            inferred.logits.detach(),
        )

    def semantic_backward(
        self, parameters: Parameters, encodings: FusedEncodings, gradient: Tensor, out: Parameters
    ) -> None:
        """The semantic encoder's gradient, given that of its features. Summed if sets were encoded separately."""
        *others, last = encodings.semantic
        first, earlier = 0, []
        for encoded in others:
            rows = encoded.features.shape[1]
            self.semantic_encoder.backward(parameters, encoded, gradient[:, first : first + rows], out)
            earlier.append({key: out[key].clone() for key in out if key.startswith(f"{self.semantic_encoder.name}.")})
            first += rows
        self.semantic_encoder.backward(parameters, last, gradient[:, first:], out)
        for part in earlier:
            for key, value in part.items():
                out[key].add_(value)

    @staticmethod
    def write_gradients(named: Parameters, out: Parameters) -> None:
        """Copy autograd's gradients of the parameters to `out`."""
        for key, value in named.items():
            if not key.startswith("/"):
                out[key].copy_(value.detach())

    def hessian_product(self, at: Pass, direction: Tensor, layout: Layout) -> Tensor:
        """The Hessian of the support loss, at the parameters of `at`, times a direction: both (task, parameter)."""
        product = layout.zeros(len(direction), direction.device)
        out = layout.split(product)
        semantic = self.semantic_encoder.tangent(
            at.parameters, at.encodings.semantic[0], *self._scaled(direction, layout, f"{self.semantic_encoder.name}.")
        )
        label = self.label_encoder.tangent(
            at.parameters, at.encodings.label, *self._scaled(direction, layout, f"{LABEL_ENCODER}.")
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
        self.write_gradients(total, out)
        self.semantic_encoder.tangent_backward(
            at.parameters, at.encodings.semantic[0], semantic, total["/semantic"], out
        )
        self.label_encoder.tangent_backward(at.parameters, at.encodings.label, label, total["/label"], out)
        return product

    @staticmethod
    def _scaled(
        direction: Tensor, layout: Layout, prefix: str, among: Tensor | None = None
    ) -> tuple[Parameters, Tensor]:
        """A stack's part of a direction, scaled into the range of 16 bits, and the scale."""
        columns, part = layout.part(direction, prefix)
        scaled = scale_into_range(columns, TANGENT_SIZE, torch.float32, "fp32", among=among)
        return part.split(scaled.stored), scaled.factor
