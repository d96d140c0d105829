"""MetaQDA (Zhang et al. 2021)."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, NormalisedHead, Task
from trident.nn.classes import members_of, weighted_means
from trident.nn.parameters import Parameters, normal
from trident.settings import require, setting

LEAST = 1e-6  # of kappa, of nu - (d - 1), and added to the diagonal of S


@dataclass(frozen=True)
class MetaQda(NormalisedHead):
    """Each class is a Gaussian with its own covariance, whose prior is learned: a Bayesian quadratic discriminant.

    Learned: the prior (m, kappa, nu, S = L L^T) of a class's mean and covariance, and a linear projection to d numbers;
    the backbone too, unless it is frozen, as published. At test, with the n support images x_i of a class:

        mu   =  (kappa m + n mean(x)) / (kappa + n)
        S_c  =  S + sum of (x_i - mean(x)) (x_i - mean(x))^T + kappa n / (kappa + n) (mean(x) - m) (mean(x) - m)^T

        logits  -(x - mu)^T ((1 - blend) C^-1 + blend I) (x - mu)    with the most probable C = S_c / (nu + n + d + 2)

    The published method takes the features themselves, whose covariances have no
    room for 1,600 features: the projection is an addition. So is the start of L at `initial_spread` times I instead of
    I, because features have unit length here.
    """

    about = About("MetaQDA", "Zhang et al. 2021", "Shallow Bayesian Meta Learning for Real-World Few-Shot Recognition")
    dimensions: int | None = setting(
        128, "d: numbers that features are projected to; 'none' takes them as they are", most=4096, least=1
    )
    blend: float = setting(0.5, "weight of the identity in the inverse covariance, from 0 to 1")
    initial_spread: float = setting(4.0, "start of L, as a multiple of the identity", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.blend <= 1, f"method.blend is {self.blend}: it must be from 0 to 1")

    def describe(self) -> str:
        return "most probable class Gaussians"

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        start: Parameters = {}
        d = n_features
        if self.dimensions is not None:
            d = self.dimensions
            start["projection"] = normal((d, n_features), 1 / math.sqrt(d), generator)  # keeps lengths, on average
        return start | {
            "prior.mean": torch.zeros(d),
            "prior.kappa": torch.tensor(0.1),
            "prior.nu": torch.tensor(float(d)),
            "prior.lower": torch.zeros(d, d).fill_diagonal_(self.initial_spread),
        }

    def prior(self, parameters: Parameters) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """m (d,), kappa, nu and S (d, d): a class has covariance C ~ IW(S, nu) and mean ~ N(m, C / kappa)."""
        lower = torch.tril(parameters["prior.lower"])
        d = len(lower)
        kappa, nu = parameters["prior.kappa"].abs() + LEAST, parameters["prior.nu"].clamp(min=d - 1 + LEAST)
        scatter = lower @ lower.T + LEAST * torch.eye(d, dtype=lower.dtype, device=lower.device)
        return parameters["prior.mean"], kappa, nu, scatter

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        x = self.normalised(parameters, features)
        if self.dimensions is not None:
            x = F.linear(x, parameters["projection"])
        support, queries = x[:, task.support], x[:, task.queries]
        m, kappa, nu, prior_scatter = self.prior(parameters)
        d = len(m)
        members = members_of(task.support_labels, task.n_way, x)  # (task, n_way, n_support)
        n = members.sum(2)  # (task, n_way)
        means = weighted_means(members, support)
        within = support - members.mT @ means  # each image from its class mean
        away = means - m
        scatter = (members[..., None] * within[:, None]).mT @ within[:, None]  # (task, n_way, d, d)
        scatter = scatter + (kappa * n / (kappa + n))[..., None, None] * away[..., None] * away[..., None, :]
        centres = (kappa * m + n[..., None] * means) / (kappa + n)[..., None]
        size = 1 / (nu + n + d + 2)  # (task, n_way)
        factor: Tensor = torch.linalg.cholesky_ex((prior_scatter + scatter) * size[..., None, None]).L
        apart = queries[:, None] - centres[:, :, None]  # (task, n_way, query, d)
        scaled: Tensor = torch.linalg.solve_triangular(factor, apart.mT, upper=False)  # (task, n_way, d, query)
        curved = scaled.square().sum(2)  # (task, n_way, query)
        return -((1 - self.blend) * curved + self.blend * apart.square().sum(3)).mT
