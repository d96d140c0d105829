"""Features centred on the training images and scaled to unit length, as many methods want them."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import HeadOnFeatures, Parameters, setting

MEAN = "mean_feature"  # of all training images


@dataclass(frozen=True)
class NormalisedHead(HeadOnFeatures):
    """Base of heads that call `normalised` on their features first.

        UN     f(x)
        L2N    f(x) / ||f(x)||
        CL2N   (f(x) - m) / ||f(x) - m||,   m = mean of the training features

    Trained weights bring m. Methods that are not trained take it from the training classes of the store that they are
    measured on. Where there are none, as for the pictures of a user, m is 0.
    """

    normalisation: Literal["UN", "L2N", "CL2N"] = setting(
        "CL2N",
        "normalisation of features: none, unit length, or centred on the training images and unit length",
        after_training=True,
    )

    def initial_statistics(self, n_features: int) -> Parameters:
        return {MEAN: torch.zeros(n_features)}

    def statistics(self, features: Tensor) -> Parameters:
        return {MEAN: features.mean(1)}

    def normalised(self, parameters: Parameters, features: Tensor) -> Tensor:
        if self.normalisation == "CL2N" and MEAN in parameters:
            features = features - parameters[MEAN]
        return features if self.normalisation == "UN" else F.normalize(features, dim=2)
