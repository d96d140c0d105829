"""ABML, amortised Bayesian meta-learning (Ravi & Beatson 2019)."""

from dataclasses import dataclass
from typing import Any

import torch

from trident.backbones.conv4 import single_conv4
from trident.methods.base import About, Backbone, EpisodeSpec, Losses, Parameters, setting
from trident.methods.inner_loop.base import Inputs, Target
from trident.methods.inner_loop.variational_weights import LOG_VAR, VariationalWeights, VariationalWeightsModel
from trident.nn.gaussian import Gaussian

PRIOR = "prior."
PRECISION_RATE = 0.01  # of the Gamma distribution over precisions, whose mean is 100


@dataclass(frozen=True)
class Abml(VariationalWeights):
    """A Gaussian over the weights is learned: it is the prior of every task, and where its posterior starts.

    Learned: the mean and the variance of every weight of a Conv4 and of a linear layer on its features. At test a copy
    of this Gaussian p, the task's posterior q, takes gradient steps on the support set, then the predictions of
    weights sampled from q are averaged. Training minimises the same loss of the queries, after the steps, over p:

        E_q[cross-entropy] + kl_weight KL(q || p),   the expectation by samples w = mean + std * noise

    and a hyper-prior of p: N(0, 1) on the means, Gamma(1, 0.01) on the precisions. Differences from the published
    method: the Conv4 has batch norm, whose gains and shifts are random like all weights; steps are taken on the
    logarithm of the variance; the weights of KL and hyper-prior are those of a public implementation.
    """

    about = About("ABML", "Ravi & Beatson 2019", "Amortized Bayesian Meta-Learning", any_way=False)
    hyper_prior_weight: float = setting(5e-8, "weight of the hyper-prior, which is summed over all weights", least=0)

    def adapts(self, parameter: str) -> bool:
        return not parameter.startswith(PRIOR)

    def model(self, backbone: Backbone, episode: EpisodeSpec) -> "AbmlModel":
        return AbmlModel(self, single_conv4(backbone, self.about.title), episode)


@dataclass(frozen=True)
class AbmlModel(VariationalWeightsModel):
    method: Abml

    def start(self, parameters: Parameters, inputs: Inputs) -> tuple[Parameters, Any]:
        """Inner steps change the parameters themselves, the posterior. A copy of them stays: the prior."""
        return parameters | {PRIOR + key: value for key, value in parameters.items()}, None

    def penalties(self, parameters: Parameters, posterior: Gaussian, target: Target) -> Losses:
        prior = Gaussian(self.joined(parameters, PRIOR), self.joined(parameters, PRIOR + LOG_VAR))
        penalties = {"kl": self.method.kl_weight * posterior.kl_to(prior)[:, 0]}
        if target == "query":
            penalties["hyper_prior"] = self.method.hyper_prior_weight * negative_log_hyper_prior(prior)[:, 0]
        return penalties


def negative_log_hyper_prior(prior: Gaussian) -> torch.Tensor:
    """The negative log density of the means and precisions, up to a constant, summed over the weights."""
    return (0.5 * prior.loc.square() + PRECISION_RATE * torch.exp(-prior.log_var)).sum(-1)
