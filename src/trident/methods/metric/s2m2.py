"""S2M2 (Mangla et al. 2020)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.backbones.base import Backbone
from trident.backbones.conv4 import single_conv4
from trident.methods.base import About
from trident.methods.metric.baseline_plus_plus import BaselinePlusPlus
from trident.nn.linear import Linear
from trident.nn.parameters import Parameters
from trident.settings import require, require_at_least, setting
from trident.tasks.source import NoiseShapes

MIXING = "query/mixing"  # noise: three numbers for the share, one for the place
ROTATIONS = 4


@dataclass(frozen=True)
class S2M2(BaselinePlusPlus):
    """Baseline++ on features that were trained with rotated pictures and mixed feature maps.

    Learned: the backbone, with a cosine classifier of all training classes and a linear layer that tells by how much a
    picture is rotated; both are not used afterwards. A training step minimises the sum of

        mixed      the cross-entropy of all images when what a random block of the network takes is
                   u (maps of an image) + (1 - u) (maps of another),   u ~ Beta(2, 2);   both classes count, u and 1 - u
        rotated    the cross-entropies of class and rotation, with weight `rotation_weight` each,
                   of a quarter of the images, turned by 0, 90, 180 and 270 degrees

    At test a cosine classifier is fitted to the support set as in Baseline++ (`baseline_plus_plus.py`).

    The published training first minimises `rotated` alone, on all images, and adds `mixed` later; here both are
    minimised all the time. The statistics that batch norm uses at test are those of rotated pictures, not of mixtures.
    """

    about = About(
        "S2M2", "Mangla et al. 2020", "Charting the Right Manifold: Manifold Mixup for Few-shot Learning", "classes"
    )  # fmt: skip
    learners: ClassVar[Mapping[str, str]] = {"plain": "trident.learning.manifold_mixup:ManifoldMixupLearner"}
    rotation_weight: float = setting(0.5, "weight of each of the two losses of rotated pictures")
    blocks: int = setting(4, "number of the network's first blocks whose inputs may be mixed", most=4)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, "method", 0, "rotation_weight")
        require(1 <= self.blocks <= 4, f"method.blocks is {self.blocks}: it must be from 1 to 4")

    def check_training(self, backbone: Backbone) -> None:
        single_conv4(backbone, self.about.title)  # training reaches into the network

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        rotations = Linear("rotations", n_features, ROTATIONS)
        return super().initial(n_features, generator) | rotations.initial(generator)

    def batch_noise(self) -> NoiseShapes:
        return {MIXING: (1, 4)}

    def mixing(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The share u and the block, (task,) each, from standard normal noise (task, 1, 4)."""
        uniform = torch.special.ndtr(noise[:, 0])  # (task, 4)
        share = (
            uniform[:, :3].median(1).values
        )  # the middle one of three uniform numbers has the distribution Beta(2, 2)
        return share, (uniform[:, 3] * self.blocks).long().clamp(max=self.blocks - 1)

    def rotation_logits(self, parameters: Parameters, features: Tensor) -> Tensor:
        return F.linear(features, parameters["rotations.weight"], parameters["rotations.bias"])
