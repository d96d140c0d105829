"""Bayesian MAML (Yoon et al. 2018), with particles of the last layer as in Snell & Zemel (2021)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trident.backbones.base import Backbone
from trident.backbones.conv4 import single_conv4
from trident.methods.base import About, cross_entropy
from trident.methods.inner_loop.adapted_conv4 import SUPPORT_FEATURES, AdaptedConv4, AdaptedConv4Model, labels_of
from trident.methods.inner_loop.base import Encodings, Evaluated, InnerState, Target
from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.linear import Linear
from trident.nn.parameters import Parameters
from trident.nn.probabilities import mean_prediction
from trident.nn.svgd import svgd_direction
from trident.settings import EpisodeSpec, require, require_at_least, require_positive, setting
from trident.tasks.task import Labels, Task

PARTICLES = "particles"


@dataclass(frozen=True)
class BayesianMaml(AdaptedConv4):
    """Several linear layers, the particles, stand for the distribution of the linear layer given the support set.

    Learned: a Conv4, and the start of the particles: linear layers w on its features. At test all particles take steps
    of Stein variational gradient descent together, which moves them towards large posterior density and away from each
    other, then their predictions are averaged:

        log p(w | support) = log p(support labels | w) + log N(w; 0, 1 / precision) + constant

    Training minimises the queries' cross-entropy with the averaged prediction; or, with `chaser`, the squared distance
    of the particles from where further steps with support set and labelled queries would lead them (the leader, which
    counts as fixed). In the published method all weights are particles; here, as in Snell & Zemel's version, only the
    last layer is, so that all steps share the features. Their precision of the prior is random; here it is a setting.
    """

    about = About("Bayesian MAML", "Yoon et al. 2018", "Bayesian Model-Agnostic Meta-Learning", any_way=False)
    particles: int = setting(5, "number of particles", most=100)
    precision: float = setting(1.0, "precision of the prior of a particle's weights", True)
    chaser: bool = setting(False, "train by the chaser loss instead of the queries' cross-entropy")
    leader_steps: int = setting(5, "further steps of the leader, for the chaser loss", most=100)
    leader_rate: float = setting(0.005, "learning rate of the leader's steps")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, "method", 2, "particles")
        require_at_least(self, "method", 1, "leader_steps")
        require_at_least(self, "method", 0, "precision")
        require_positive(self, "method", "leader_rate")
        require(
            self.inner_optimizer == "sgd",
            f"method.inner_optimizer is '{self.inner_optimizer}': particles take plain steps only, so it must be sgd",
        )

    def adapts(self, parameter: str) -> bool:
        return parameter == PARTICLES

    def update(
        self, parameters: Parameters, state: InnerState, gradient: Parameters, step: int
    ) -> tuple[Parameters, InnerState]:
        """`gradient` is that of the negative log posterior."""
        particles = parameters[PARTICLES]
        moved = particles + self.inner_rate * svgd_direction(particles, -gradient[PARTICLES])
        return parameters | {PARTICLES: moved}, state

    def model(self, backbone: Backbone, episode: EpisodeSpec) -> "BayesianMamlModel":
        return BayesianMamlModel(self, single_conv4(backbone, self.about.title), episode)


@dataclass(frozen=True)
class BayesianMamlModel(AdaptedConv4Model):
    """A particle is one row: the weight of the linear layer, then its bias."""

    method: BayesianMaml

    def initial(self, generator: torch.Generator) -> Parameters:
        start = self.backbone.initial(generator)
        layer = self.head
        particles = torch.empty(self.method.particles, layer.outputs * (layer.inputs + 1))
        for row in particles:
            # Not torch.cat: for shapes alone it would import torch's compiler, which takes a second.
            for part, value in zip(_parts(row, layer), layer.initial(generator).values(), strict=True):
                part.copy_(value.flatten())
        return start | {PARTICLES: particles}

    def particle_logits(self, particles: Tensor, features: Tensor) -> Tensor:
        """(task, particle, number) and (task, image, feature) -> (task, particle, image, n_way)."""
        layer = self.head
        weight, bias = _parts(particles, layer)
        weight = weight.reshape(*weight.shape[:2], layer.outputs, layer.inputs)
        return features[:, None] @ weight.transpose(2, 3) + bias[:, :, None]

    def negative_log_posterior(self, particles: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """The negative log posterior of each particle, up to a constant: (task, particle)."""
        logits = self.particle_logits(particles, features)
        likelihood = torch.log_softmax(logits, -1).gather(3, labels[:, None, :, None].expand(*logits.shape[:3], 1))
        return 0.5 * self.method.precision * particles.square().sum(2) - likelihood.sum((2, 3))

    def loss(
        self,
        parameters: Parameters,
        task: Task,
        target: Target,
        labels: Labels | None,
        draw: int,
        statistics: BatchNormStatistics,
        reused: Any = None,
    ) -> Evaluated:
        features, seen = self.features(parameters, task, target, statistics)
        particles, truth = parameters[PARTICLES], labels_of(task, labels)
        mean = mean_prediction(self.particle_logits(particles, features).unbind(1))  # (task, image, n_way)
        if target == "support":
            return Evaluated({"total": self.negative_log_posterior(particles, features, truth).sum(1)}, mean, seen)
        losses = {"total": cross_entropy(mean, truth)}
        if self.method.chaser:
            both = torch.cat([parameters[SUPPORT_FEATURES], features], 1).detach()
            leader = self.leader(particles.detach(), both, torch.cat([task.support_labels, truth], 1))
            losses = {"total": (particles - leader).square().sum((1, 2)), "classification": losses["total"]}
        return Evaluated(losses, mean, seen)

    def leader(self, particles: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """The particles after further steps, with these features and labels."""
        for _ in range(self.method.leader_steps):
            particles = particles.detach().requires_grad_()
            loss = self.negative_log_posterior(particles, features, labels).sum()
            (gradient,) = torch.autograd.grad(loss, [particles])
            with torch.no_grad():
                particles = particles + self.method.leader_rate * svgd_direction(particles, -gradient)
        return particles.detach()

    def logits(
        self, parameters: Parameters, task: Task, encodings: Encodings, statistics: BatchNormStatistics
    ) -> list[Tensor]:
        features = self.query_features(parameters, task, encodings, statistics)
        found = self.particle_logits(parameters[PARTICLES], features)
        return list(found.unbind(1))


def _parts(particles: Tensor, layer: Linear) -> tuple[Tensor, ...]:
    """The weights and the biases in particles (..., number)."""
    return torch.split(particles, [layer.outputs * layer.inputs, layer.outputs], -1)
