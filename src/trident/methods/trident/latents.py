"""What is inferred from a set of images: latents, and all inputs of the loss."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from trident.nn.gaussian import Gaussian


class Latents(NamedTuple):
    """Latents of `n_context` support images, followed by those of the target images."""

    semantic: Gaussian
    label: Gaussian
    z_semantic: Tensor  # (task, n_context + image, semantic_latents)
    z_label: Tensor  # (task, n_context + image, label_latents)
    n_context: int


@dataclass(frozen=True)
class Inferred:
    """The network's outputs for a set of images, and the labels: all that a term of the loss can use."""

    latents: Latents  # may begin with `latents.n_context` support images, which nothing below is about
    logits: Tensor  # (task, image, n_way)
    labels: Tensor  # (task, image) int64
    squared_error: Tensor  # (task,): of the decoded images, summed over pixels, mean over images
    label_divergence: Tensor  # (task, image): of q(z_label) from its prior
    semantic_divergence: Tensor  # (task, image): of q(z_semantic) from its prior
    training_class_logits: Tensor | None = None  # (task, image, training class), where there is a head for them
    training_classes: Tensor | None = None  # (task, image) int64, where they are known
