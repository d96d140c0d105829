"""Bayesian MAML (Yoon et al. 2018), with particles of the last layer as in Snell & Zemel (2021)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trident.backbones.conv4 import single_conv4
from trident.methods.base import About, Backbone, Parameters, cross_entropy, tunable
from trident.methods.inner_loop.adapted_conv4 import SUPPORT_FEATURES, AdaptedConv4, AdaptedConv4Model
from trident.methods.inner_loop.base import Adapted, Evaluated, InnerState, Inputs
from trident.nn.linear import Linear
from trident.nn.probabilities import mean_prediction
from trident.settings import EpisodeSpec, require, setting

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
    particles: int = setting(5, "number of particles", most=100, least=2)
    precision: float = tunable(1.0, "precision of the prior of a particle's weights", least=0)
    chaser: bool = setting(False, "train by the chaser loss instead of the queries' cross-entropy")
    leader_steps: int = setting(5, "further steps of the leader, for the chaser loss", most=100, least=1)
    leader_rate: float = setting(0.005, "learning rate of the leader's steps", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.inner_optimizer == "sgd",
            f"method.inner_optimizer is '{self.inner_optimizer}': particles take plain steps only, so it must be sgd",
        )

    def adapts(self, parameter: str) -> bool:
        return parameter == PARTICLES

    def update(self, parameters: Parameters, state: InnerState, gradient: Parameters, step: int) -> Adapted:
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

    def loss(self, parameters: Parameters, inputs: Inputs) -> Evaluated:
        features, seen = self.features(parameters, inputs)
        particles, truth = parameters[PARTICLES], inputs.truth
        mean = mean_prediction(self.particle_logits(particles, features).unbind(1))  # (task, image, n_way)
        if inputs.target == "support":
            return Evaluated({"total": self.negative_log_posterior(particles, features, truth).sum(1)}, mean, seen)
        losses = {"total": cross_entropy(mean, truth)}
        if self.method.chaser:
            both = torch.cat([parameters[SUPPORT_FEATURES], features], 1).detach()
            leader = self.leader(particles.detach(), both, torch.cat([inputs.task.support_labels, truth], 1))
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

    def logits(self, parameters: Parameters, inputs: Inputs) -> list[Tensor]:
        features = self.features(parameters, inputs)[0]
        return list(self.particle_logits(parameters[PARTICLES], features).unbind(1))


def _parts(particles: Tensor, layer: Linear) -> tuple[Tensor, ...]:
    """The weights and the biases in particles (..., number)."""
    return torch.split(particles, [layer.outputs * layer.inputs, layer.outputs], -1)


TINY = 1e-12  # keeps the bandwidth above zero where particles are equal


def svgd_direction(particles: Tensor, gradient: Tensor) -> Tensor:
    """Stein variational gradient descent (Liu & Wang 2016): where particles move, towards a distribution together.

    Takes the gradient of the log density at each particle: (task, particle, number) all.
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
