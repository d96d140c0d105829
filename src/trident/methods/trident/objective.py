"""The negative evidence lower bound of one set of a task, as a weighted sum of named terms (equation 3 of the paper).

To add a term, write a function NAME with the decorator `loss_term`, and add its weight to `ObjectiveSettings` as the
field NAME_weight. It is then part of the loss on both engines, and is logged, plotted and reported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trident.methods.base import Losses, cross_entropy
from trident.nn.gaussian import Gaussian
from trident.settings import setting


class Latents(NamedTuple):
    """Latents of `n_context` support images, followed by those of the target images."""

    semantic: Gaussian
    label: Gaussian
    z_semantic: Tensor  # (task, n_context + image, semantic_latents)
    z_label: Tensor  # (task, n_context + image, label_latents)
    n_context: int = 0

    def of(self, rows: slice) -> "Latents":
        """The latents of some of the images."""
        semantic, label = (Gaussian(*(part[:, rows] for part in each)) for each in (self.semantic, self.label))
        return Latents(semantic, label, self.z_semantic[:, rows], self.z_label[:, rows])

    @property
    def targets(self) -> "Latents":
        """Those of the target images."""
        return self.of(slice(self.n_context, None))


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


Term = Callable[[Inferred], Tensor]
TERMS: dict[str, Term] = {}
SMALL = 1e-6
OPTIONAL = {"decorrelation"}  # terms that are computed only where their weight is not 0


def loss_term(function: Term) -> Term:
    """Register a term: a function from the values inferred for a set to one number for each task, (task,)."""
    TERMS[function.__name__] = function
    return function


@dataclass(frozen=True)
class ObjectiveSettings:
    """The weights of the terms. Each term is a mean over the images of a set."""

    classification_weight: float = setting(100.0, "weight of the cross-entropy, the paper's alpha_2")
    reconstruction_weight: float = setting(
        0.01, "weight of an image's squared reconstruction error, summed over its pixels; the paper's alpha_1"
    )
    label_kl_weight: float = setting(1.0, "weight of the divergence of q(z_label) from its prior")
    semantic_kl_weight: float = setting(1.0, "weight of the divergence of q(z_semantic) from its prior")
    training_class_weight: float = setting(
        100.0, "weight of the cross-entropy over all training classes, where method.training_classes is not 0"
    )

    decorrelation_weight: float = setting(
        0.0, "weight of the mean squared correlation between the dimensions of z_label and those of z_semantic"
    )

    def weight(self, term: str) -> float:
        value: float = getattr(self, f"{term}_weight")
        return value


@loss_term
def classification(of: Inferred) -> Tensor:
    """-ln p(y | z_label)."""
    return cross_entropy(of.logits, of.labels)


@loss_term
def reconstruction(of: Inferred) -> Tensor:
    """Squared error of the decoded images, summed over their pixels."""
    return of.squared_error


@loss_term
def label_kl(of: Inferred) -> Tensor:
    return of.label_divergence.mean(1)


@loss_term
def semantic_kl(of: Inferred) -> Tensor:
    return of.semantic_divergence.mean(1)


@loss_term
def training_class(of: Inferred) -> Tensor:
    """Cross-entropy of a second head, which tells all training classes apart; 0 outside of training."""
    if of.training_class_logits is None or of.training_classes is None:
        return torch.zeros_like(of.squared_error)
    return cross_entropy(of.training_class_logits, of.training_classes)


@loss_term
def decorrelation(of: Inferred) -> Tensor:
    """The mean squared correlation, over a set's images, between a dimension of z_label and one of z_semantic."""
    latents = of.latents.targets
    label, semantic = _standardised(latents.label.loc), _standardised(latents.semantic.loc)
    correlations = label.mT @ semantic / label.shape[1]  # (task, label latent, semantic latent)
    return correlations.square().mean((1, 2))


def _standardised(values: Tensor) -> Tensor:
    """(task, image, latent), with mean 0 and variance 1 over the images."""
    centred = values - values.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + SMALL).sqrt()


def negative_evidence_lower_bound(of: Inferred, settings: ObjectiveSettings) -> Losses:
    """Every term, unweighted, and their weighted sum as "total": (task,) each."""
    parts = {name: term(of) for name, term in TERMS.items() if name not in OPTIONAL or settings.weight(name)}
    total = torch.stack([settings.weight(name) * part for name, part in parts.items()]).sum(0)
    return {"total": total} | parts
