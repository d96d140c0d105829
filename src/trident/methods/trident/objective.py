"""The negative evidence lower bound of one set of a task, and its parts."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.trident.network import Output
from trident.settings import ObjectiveSettings


class LossParts(NamedTuple):
    """Means over a set's images, unweighted but for the total; (task,) each."""

    total: Tensor
    classification: Tensor  # cross-entropy, -ln p(y | z_label)
    reconstruction: Tensor  # summed squared error of an image
    label_kl: Tensor
    semantic_kl: Tensor
    training_classes: Tensor  # cross-entropy of the head for all training classes; 0 where there is none


def loss_parts(
    output: Output, images: Tensor, labels: Tensor, settings: ObjectiveSettings, training_classes: Tensor | None = None
) -> LossParts:
    """Equation (3) of the paper. `images` (task, image, h, w, c) and `labels` (task, image) are the target set's.

    So are `training_classes` (task, image), its images' places among all training classes.
    """
    if output.reconstruction is None:
        raise ValueError("the objective needs the reconstruction, and this output has none")
    reconstruction = (output.reconstruction - images).square().sum((2, 3, 4)).mean(1)
    return weighed_parts(output, reconstruction, labels, settings, training_classes)


def weighed_parts(
    output: Output,
    reconstruction: Tensor,
    labels: Tensor,
    settings: ObjectiveSettings,
    training_classes: Tensor | None = None,
) -> LossParts:
    """The same, where the images' mean summed squared error is known: (task,)."""
    classification = _cross_entropy(output.logits, labels)
    label_kl = output.label.kl_to_standard_normal().mean(1)
    semantic_kl = output.semantic.kl_to_standard_normal().mean(1)
    of_training_classes = torch.zeros_like(classification)
    if output.training_class_logits is not None and training_classes is not None:
        of_training_classes = _cross_entropy(output.training_class_logits, training_classes)
    total = (
        settings.classification_weight * classification
        + settings.reconstruction_weight * reconstruction
        + settings.label_kl_weight * label_kl
        + settings.semantic_kl_weight * semantic_kl
        + settings.training_classes_weight * of_training_classes
    )
    return LossParts(total, classification, reconstruction, label_kl, semantic_kl, of_training_classes)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over images: (task,)."""
    return F.nll_loss(torch.log_softmax(logits, -1).transpose(1, 2), labels, reduction="none").mean(1)
