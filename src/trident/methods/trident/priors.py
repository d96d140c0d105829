"""Priors over the latents. To add one, write a class and enter it in `PRIORS`; both engines use it.

A prior may have parameters of its own. They are trained with everything else.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trident.nn.gaussian import Gaussian
from trident.nn.parameters import Parameters


class Prior(Protocol):
    def initial(self, generator: torch.Generator) -> Parameters:
        """Its parameters, if it has any; their names must begin with the prior's own name."""

    def divergence(self, parameters: Parameters, posterior: Gaussian, sample: Tensor) -> Tensor:
        """KL(posterior || prior) of each image, or an estimate of it from one sample of the posterior.

        `posterior` and `sample` are (task, image, latent), parameters (task, ...); the result is (task, image).
        """


@dataclass(frozen=True)
class StandardNormal:
    """N(0, I), the paper's prior. Its divergence is known exactly, so the sample is not used."""

    name: str  # "label_prior" or "semantic_prior"
    latents: int

    def initial(self, generator: torch.Generator) -> Parameters:
        return {}

    def divergence(self, parameters: Parameters, posterior: Gaussian, sample: Tensor) -> Tensor:
        return posterior.kl_to_standard_normal()


PRIORS = {"standard_normal": StandardNormal}
