"""PLATIPUS, probabilistic MAML (Finn, Xu & Levine 2018)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trident.backbones.conv4 import single_conv4
from trident.methods.base import About, Backbone, EpisodeSpec, NoiseShapes, Task, setting
from trident.methods.inner_loop.base import Evaluated, Inputs
from trident.methods.inner_loop.variational_weights import LOG_VAR, RandomWeights, RandomWeightsModel, with_total
from trident.nn.gaussian import Gaussian
from trident.nn.parameters import Parameters, gradients, joined

QUERY_LOG_VAR = "query_log_var."
SUPPORT_RATE, QUERY_RATE = "support_rate", "query_rate"
SUPPORT_MEAN, QUERY_MEAN = "support_mean", "query_mean"
SAMPLE = "sample."


@dataclass(frozen=True)
class Platipus(RandomWeights):
    """MAML from a random start, whose distribution depends on the task.

    Learned: for every weight of a Conv4 and of a linear layer on its features a mean m and two variances s^2 and v^2,
    and two step sizes. At test the start is sampled, takes MAML's gradient steps on the support set, and the
    predictions of several such samples are averaged:

        w ~ N(m_S, s^2),   m_S = m - support_rate grad CE(support; m)

    In training the start comes from the labelled queries, and is kept near to what the support set alone would give:

        w ~ N(m_Q, v^2),   m_Q = m - query_rate grad CE(queries; m)
        loss = CE(queries; w after its steps) + kl_weight KL(N(m_Q, v^2) || N(m_S, s^2))

    Differences from the published method: each mean takes one step, where a public implementation takes several; both
    variances start at one value; training starts from random weights instead of MAML's (training.start_from=RUN takes
    the Conv4 of a MAML run).
    """

    about = About("PLATIPUS", "Finn, Xu & Levine 2018", "Probabilistic Model-Agnostic Meta-Learning", any_way=False)
    initial_step: float = setting(0.01, "start of the two learned step sizes", above=0)

    def adapts(self, parameter: str) -> bool:
        return parameter.startswith(SAMPLE)

    def model(self, backbone: Backbone, episode: EpisodeSpec) -> "PlatipusModel":
        return PlatipusModel(self, single_conv4(backbone, self.about.title), episode)


@dataclass(frozen=True)
class PlatipusModel(RandomWeightsModel):
    """The sampled weights of a task are one row of numbers, "sample.0" and so on."""

    method: Platipus

    def initial(self, generator: torch.Generator) -> Parameters:
        rates = {rate: torch.tensor(self.method.initial_step) for rate in (SUPPORT_RATE, QUERY_RATE)}
        return super().initial(generator) | self.log_variances(QUERY_LOG_VAR) | rates

    def noise_shapes(self, episode: EpisodeSpec, predictions: int) -> NoiseShapes:
        return {f"task/start/{i}": (1, self.n_weights) for i in range(predictions)}

    def start(self, parameters: Parameters, inputs: Inputs) -> tuple[Parameters, Any]:
        by_support = self._moved_mean(parameters, inputs._replace(target="support"))
        if inputs.labels is None:
            return parameters | self._samples(by_support, self.joined(parameters, LOG_VAR), inputs.task), None
        by_queries = self._moved_mean(parameters, inputs._replace(target="query"))
        samples = self._samples(by_queries, self.joined(parameters, QUERY_LOG_VAR), inputs.task)
        return parameters | samples | {SUPPORT_MEAN: by_support, QUERY_MEAN: by_queries}, None

    def _moved_mean(self, parameters: Parameters, inputs: Inputs) -> Tensor:
        """The means after one gradient step on one set: (task, 1, n_weights)."""
        means = {key: parameters[key] for key in self.shapes}
        loss = self.network_loss(means, inputs).losses["total"].sum()
        gradient = gradients(loss, means, create_graph=self.method.inner_order == "second")
        rate = parameters[SUPPORT_RATE if inputs.target == "support" else QUERY_RATE][:, None, None]  # (task, 1, 1)
        return self.joined(parameters) - rate * joined(gradient)[:, None]

    def _samples(self, mean: Tensor, log_var: Tensor, task: Task) -> Parameters:
        draws = [values for name, values in task.noise.items() if name.startswith("task/start/")]
        return {f"{SAMPLE}{i}": Gaussian(mean, log_var).sample(noise) for i, noise in enumerate(draws)}

    def weights_for_prediction(self, parameters: Parameters, task: Task) -> list[Parameters]:
        return self.weights(torch.cat([value for key, value in parameters.items() if key.startswith(SAMPLE)], 1))

    def loss(self, parameters: Parameters, inputs: Inputs) -> Evaluated:
        """The loss. That of the support set is the sum over the samples, each of which takes its own steps."""
        weights = self.weights_for_prediction(parameters, inputs.task)
        samples = [self.network_loss(one, inputs) for one in weights]
        if inputs.target == "support":
            total = torch.stack([one.losses["total"] for one in samples]).sum(0)
            return samples[0]._replace(losses={"total": total})
        (only,) = samples  # training draws one sample
        posterior = Gaussian(parameters[QUERY_MEAN], self.joined(parameters, QUERY_LOG_VAR))
        prior = Gaussian(parameters[SUPPORT_MEAN], self.joined(parameters, LOG_VAR))
        parts = {"classification": only.losses["total"], "kl": self.method.kl_weight * posterior.kl_to(prior)[:, 0]}
        return only._replace(losses=with_total(parts))
