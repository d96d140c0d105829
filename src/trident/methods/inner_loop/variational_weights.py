"""Random weights: each task has a Gaussian over all weights of Conv4 and its linear layer, which inner steps adapt.

The mean of a weight has the weight's own name, and the logarithm of its variance has that name after "log_var.". The
latents of a protocol are the weights here: latents=mean predicts with the means, latents=average averages the
predictions of many samples.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trident.backbones.conv4 import single_conv4
from trident.methods.base import Backbone, Losses, NoiseShapes, Task, tunable
from trident.methods.inner_loop.adapted_conv4 import AdaptedConv4, AdaptedConv4Model
from trident.methods.inner_loop.base import Encodings, Evaluated, Inputs, Target
from trident.nn.gaussian import Gaussian
from trident.nn.parameters import Parameters, count, joined, split_as
from trident.nn.probabilities import mean_prediction
from trident.settings import EpisodeSpec, require_at_least, setting

LOG_VAR = "log_var."


@dataclass(frozen=True)
class RandomWeights(AdaptedConv4):
    """Base of the methods with a Gaussian over the weights: their settings."""

    kl_weight: float = tunable(1e-6, "weight of the KL divergence, which is summed over all weights", least=0)
    initial_log_var: float = setting(-10.0, "start of the logarithm of every weight's variance", least=-30)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, "method", 1, "inner_steps", "training_inner_steps")


@dataclass(frozen=True)
class RandomWeightsModel(AdaptedConv4Model):
    method: RandomWeights

    @cached_property
    def shapes(self) -> Parameters:
        """The weights of the network, without values."""
        with torch.device("meta"):
            return super().initial(torch.Generator())

    @property
    def n_weights(self) -> int:
        return count(self.shapes)

    def log_variances(self, prefix: str = LOG_VAR) -> Parameters:
        start = self.method.initial_log_var
        return {prefix + key: torch.full(value.shape, start) for key, value in self.shapes.items()}

    def initial(self, generator: torch.Generator) -> Parameters:
        return super().initial(generator) | self.log_variances()

    def joined(self, parameters: Parameters, prefix: str = "") -> Tensor:
        """One row with the parameters of this kind of all weights, for each task: (task, 1, n_weights)."""
        return joined({key: parameters[prefix + key] for key in self.shapes})[:, None]

    def weights(self, rows: Tensor) -> list[Parameters]:
        """(task, sample, n_weights) -> the network's weights, for each sample."""
        return [split_as(row, self.shapes) for row in rows.unbind(1)]

    def network_loss(self, weights: Parameters, inputs: Inputs) -> Evaluated:
        """The cross-entropy with certain weights."""
        return super().loss(weights, inputs)

    @abstractmethod
    def weights_for_prediction(self, parameters: Parameters, task: Task) -> list[Parameters]:
        """The network's weights in each draw, with which it predicts."""

    def logits(self, parameters: Parameters, inputs: Inputs) -> list[Tensor]:
        sampled = self.weights_for_prediction(parameters, inputs.task)
        return [logits for weights in sampled for logits in super(RandomWeightsModel, self).logits(weights, inputs)]

    def encode(self, parameters: Parameters, inputs: Inputs) -> Encodings:
        return {}  # every sample of the weights encodes the images anew


@dataclass(frozen=True)
class VariationalWeights(RandomWeights):
    """Base of the methods whose inner steps change a Gaussian over the weights, means and variances alike."""

    samples: int = tunable(2, "samples of the weights in each inner step, and in the training loss", most=100, least=1)

    def model(self, backbone: Backbone, episode: EpisodeSpec) -> "VariationalWeightsModel":
        return VariationalWeightsModel(self, single_conv4(backbone, self.about.title), episode)


@dataclass(frozen=True)
class VariationalWeightsModel(RandomWeightsModel):
    method: VariationalWeights

    def penalties(self, parameters: Parameters, posterior: Gaussian, target: Target) -> Losses:
        """What is added to the cross-entropy, (task,) each: by default the divergence from a standard normal."""
        return {"kl": self.method.kl_weight * posterior.kl_to_standard_normal()[:, 0]}

    def posterior(self, parameters: Parameters) -> Gaussian:
        return Gaussian(self.joined(parameters), self.joined(parameters, LOG_VAR))

    def noise_shapes(self, episode: EpisodeSpec, predictions: int) -> NoiseShapes:
        """A prediction takes the first sample of each draw, the training loss all samples of the first."""
        s, n = self.method, self.n_weights
        steps = {f"task/support/{i}": (s.samples, n) for i in range(s.inner_steps)}
        return steps | {f"task/query/{i}": (1 if i else s.samples, n) for i in range(predictions)}

    def loss(self, parameters: Parameters, inputs: Inputs) -> Evaluated:
        posterior = self.posterior(parameters)
        samples = self.weights(posterior.sample(inputs.task.noise[f"task/{inputs.target}/{inputs.draw}"]))
        evaluated = [self.network_loss(weights, inputs) for weights in samples]
        parts = {"classification": torch.stack([one.losses["total"] for one in evaluated]).mean(0)}
        parts |= self.penalties(parameters, posterior, inputs.target)
        seen = {key: torch.stack([one.seen[key] for one in evaluated]).mean(0) for key in evaluated[0].seen}
        return Evaluated(with_total(parts), mean_prediction(one.logits for one in evaluated), seen)

    def weights_for_prediction(self, parameters: Parameters, task: Task) -> list[Parameters]:
        draws = [values[:, :1] for name, values in task.noise.items() if name.startswith("task/query/")]
        return self.weights(self.posterior(parameters).sample(torch.cat(draws, 1)))


def with_total(parts: Losses) -> Losses:
    return {"total": torch.stack(list(parts.values())).sum(0), **parts}
