"""The negative evidence lower bound of one set of a task, and its parts."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.model import Output
from trident.settings import ObjectiveSettings


class LossParts(NamedTuple):
    """Means over a set's images, unweighted but for the total; (task,) each."""

    total: Tensor
    classification: Tensor  # cross-entropy, -ln p(y | z_label)
    reconstruction: Tensor  # summed squared error of an image
    label_kl: Tensor
    semantic_kl: Tensor


def loss_parts(output: Output, images: Tensor, labels: Tensor, settings: ObjectiveSettings) -> LossParts:
    """Equation (3) of the paper. `images` (task, image, h, w, c) and `labels` (task, image) are the target set's."""
    if output.reconstruction is None:
        raise ValueError("the objective needs the reconstruction: call the model with reconstruct=True")
    reconstruction = (output.reconstruction - images).square().sum((2, 3, 4)).mean(1)
    return weighed_parts(output, reconstruction, labels, settings)


def weighed_parts(output: Output, reconstruction: Tensor, labels: Tensor, settings: ObjectiveSettings) -> LossParts:
    """The same, where the images' mean summed squared error is known: (task,)."""
    log_probabilities = torch.log_softmax(output.logits, -1)
    classification = F.nll_loss(log_probabilities.transpose(1, 2), labels, reduction="none").mean(1)
    label_kl = output.label.kl_to_standard_normal().mean(1)
    semantic_kl = output.semantic.kl_to_standard_normal().mean(1)
    total = (
        settings.classification_weight * classification
        + settings.reconstruction_weight * reconstruction
        + settings.label_kl_weight * label_kl
        + settings.semantic_kl_weight * semantic_kl
    )
    return LossParts(total, classification, reconstruction, label_kl, semantic_kl)
