"""Stein variational gradient descent (Liu & Wang 2016): particles that move towards a distribution together."""

import math

import torch
from torch import Tensor

TINY = 1e-12  # keeps the bandwidth above zero where particles are equal


def svgd_direction(particles: Tensor, gradient: Tensor) -> Tensor:
    """Where each particle moves, given the gradient of the log density at each: (task, particle, number) all.

        phi_p = mean over r of  k(x_r, x_p) gradient_r + grad_(x_r) k(x_r, x_p),   k(x, y) = exp(-||x - y||^2 / h)

    The bandwidth h is the median squared distance of two particles divided by the logarithm of their number, so that
    a particle and all others together have about the same weight. There must be two particles or more.
    """
    n = particles.shape[1]
    distances = (particles[:, :, None] - particles[:, None]).square().sum(3)  # (task, particle, particle)
    above = torch.triu_indices(n, n, 1, device=particles.device)
    median = distances[:, above[0], above[1]].median(1).values
    bandwidth = (median / math.log(n) + TINY)[:, None, None]
    kernel = torch.exp(-distances / bandwidth)
    repulsion = kernel.sum(2, keepdim=True) * particles - kernel @ particles
    return (kernel @ gradient + 2 / bandwidth * repulsion) / n
