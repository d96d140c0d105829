"""Diagonal Gaussian posteriors: the heads that infer them, sampling, and the KL divergence from the prior."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trident.nn.linear import Linear
from trident.nn.parameters import Parameters

LOG_VAR_BOUND = 8.0  # of methods that squash log-variances into (-8, 8), so that none overflows


class Gaussian(NamedTuple):
    loc: Tensor  # (task, image, latent)
    log_var: Tensor  # (task, image, latent)

    def sample(self, noise: Tensor) -> Tensor:
        """The reparameterisation trick. `noise` is standard normal, or zero for the mean."""
        return torch.addcmul(self.loc, noise, torch.exp(0.5 * self.log_var))

    def kl_to_standard_normal(self) -> Tensor:
        """KL(q || N(0, I)) of each image: (task, image)."""
        return 0.5 * (self.loc.square() + self.log_var.exp() - 1 - self.log_var).sum(-1)

    def kl_to(self, other: "Gaussian") -> Tensor:
        """KL(self || other) of each image: (task, image)."""
        scaled = ((self.loc - other.loc).square() + self.log_var.exp()) * torch.exp(-other.log_var)
        return 0.5 * (scaled - 1 + other.log_var - self.log_var).sum(-1)


@dataclass(frozen=True)
class GaussianHead:
    """Two linear layers: one for the mean, one for the logarithm of the variance."""

    name: str
    inputs: int
    latents: int
    initial_log_var: float | None
    log_var_bound: float | None

    @property
    def loc(self) -> Linear:
        return Linear(f"{self.name}.loc", self.inputs, self.latents)

    @property
    def log_var(self) -> Linear:
        return Linear(f"{self.name}.log_var", self.inputs, self.latents)

    def initial(self, generator: torch.Generator) -> Parameters:
        start = self.loc.initial(generator) | self.log_var.initial(generator)
        if self.initial_log_var is not None:
            start[f"{self.log_var.name}.bias"] = torch.full((self.latents,), float(self.initial_log_var))
        return start

    def __call__(self, parameters: Parameters, features: Tensor) -> Gaussian:
        # Both layers in one product: half the calls, which counts in second derivatives.
        weight = torch.cat([parameters[f"{layer.name}.weight"] for layer in (self.loc, self.log_var)], 1)
        bias = torch.cat([parameters[f"{layer.name}.bias"] for layer in (self.loc, self.log_var)], 1)
        both = torch.baddbmm(bias.unsqueeze(1), features, weight.transpose(1, 2))  # (task, image, 2 * latents)
        loc, log_var = both[..., : self.latents], both[..., self.latents :]
        if self.log_var_bound is not None:
            log_var = self.log_var_bound * torch.tanh(log_var / self.log_var_bound)
        return Gaussian(loc, log_var)
