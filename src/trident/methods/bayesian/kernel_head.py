"""Gaussian processes on deep features: their kernel, for all methods that have one."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trident.methods.base import NormalisedHead, Parameters, setting


@dataclass(frozen=True)
class KernelHead(NormalisedHead):
    """Base of heads whose kernel is v <g(x), g(x')>, with normalised features g and one learned v > 0.

    With L2N this is a cosine. CL2N is the cosine of features that are centred on the training images, which is close
    to the published kernel with batch norm (it divides by the standard deviations too).
    """

    normalisation: Literal["UN", "L2N", "CL2N"] = setting(
        "L2N", "normalisation of features in the kernel: linear kernel, cosine, or cosine of centred features"
    )
    initial_scale: float = setting(1.0, "start of the kernel's learned scale v", above=0)

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        return {"log_scale": torch.tensor(math.log(self.initial_scale))}

    def kernel(self, parameters: Parameters, features: Tensor) -> Tensor:
        """The kernel between all images of a task: (task, image, image)."""
        features = self.normalised(parameters, features)
        return parameters["log_scale"].exp() * features @ features.mT


def solve(factor: Tensor, values: Tensor) -> Tensor:
    """The inverse of the matrix with this Cholesky factor, (..., n, n), times values (..., n, m)."""
    # No CUDA graph can record how torch.cholesky_solve allocates memory.
    half = torch.linalg.solve_triangular(factor, values, upper=False)
    solution: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return solution
