"""ABPML, amortised Bayesian prototypes (Sun et al. 2021): class prototypes are random."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trident.methods.base import About, HeadModel, HeadOnFeatures, Losses, NoiseShapes, Parameters, cross_entropy
from trident.methods.bayesian.versa import class_noise
from trident.nn.classes import class_means, squared_distances
from trident.nn.gaussian import LOG_VAR_BOUND, Gaussian
from trident.nn.probabilities import mean_prediction
from trident.settings import EpisodeSpec, setting
from trident.tasks.task import Labels, Task, all_labels


@dataclass(frozen=True)
class BayesianPrototypes(HeadOnFeatures):
    """Class prototypes are random: Gaussians that the backbone infers from a few images, as if it had seen many.

    Learned: the backbone, a scale s of squared distances and a shift of log-variances; there is no further network.
    One half of the backbone's channels is the mean m(x) of an image, the other half its log-variance v(x):

        q(z_c | D)      =  N(mean of m, diag(exp(mean of v)))         over the images of class c in D
        p(y = c | x)   ~   exp(-s ||m(x) - z_c||^2 / size of m),      z_c ~ q(z_c | S)

    Training maximises, per query,

        log p(y | x)  -  kl_weight / (number of queries) * sum over classes of KL(q(z_c | S) || q(z_c | S and U))

    so that the support set S alone tells what support set and queries U together do. At test the probabilities are
    averaged over samples of the prototypes, or the prototypes are their means (protocol.latents).

    Written from the paper's description, no code was published. The scale and the shift, and how the backbone's output
    is split in two, are this implementation's.
    """

    takes_cells: ClassVar[bool] = True  # because channels are split, not places of the feature map
    about = About(
        "Amortised Bayesian prototypes",
        "Sun et al. 2021",
        "Amortized Bayesian Prototype Meta-learning: A New Probabilistic Meta-learning Approach to Few-shot "
        "Image Classification",
    )
    initial_scale: float = setting(6.4, "start of the learned scale s of squared distances", above=0)
    initial_log_var: float = setting(-5.0, "start of the learned shift of log-variances")
    kl_weight: float = setting(0.01, "weight of the divergence between the two distributions of a prototype", least=0)

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        return {"scale": torch.tensor(self.initial_scale), "log_var_shift": torch.tensor(self.initial_log_var)}

    def noise_on(self, model: HeadModel, episode: EpisodeSpec, predictions: int) -> NoiseShapes:
        size = model.backbone.n_cells * (model.n_features // 2)
        return {f"support/{draw}/prototype": (episode.n_support, size) for draw in range(predictions)}

    def halves(self, parameters: Parameters, features: Tensor) -> Gaussian:
        """m and v of each image: (task, image, cell, channel) -> (task, image, size) each."""
        half = features.shape[3] // 2
        log_var = features[..., half : 2 * half].flatten(2) + parameters["log_var_shift"]
        return Gaussian(features[..., :half].flatten(2), LOG_VAR_BOUND * torch.tanh(log_var / LOG_VAR_BOUND))

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        images = self.halves(parameters, features)
        posterior = prototypes(images, task.support_labels, task.n_way)
        draws = [posterior.sample(class_noise(noise, task)) for noise in task.noise.values()] or [posterior.loc]
        queries, scale = images.loc[:, task.queries], parameters["scale"] / posterior.loc.shape[2]
        return mean_prediction(-scale * squared_distances(queries, draw) for draw in draws)

    def training(self, parameters: Parameters, features: Tensor, task: Task, labels: Labels) -> tuple[Tensor, Losses]:
        logits = self.head(parameters, features, task)
        images = self.halves(parameters, features)
        few = prototypes(images, task.support_labels, task.n_way)
        many = prototypes(images, all_labels(task, labels), task.n_way)
        fit, divergence = cross_entropy(logits, labels.queries), few.kl_to(many).sum(1) / task.n_queries
        total = fit + self.kl_weight * divergence
        return logits, {"total": total, "classification": fit, "prototype_kl": divergence}


def prototypes(images: Gaussian, labels: Tensor, n_way: int) -> Gaussian:
    """The prototypes' distributions, from the first images, which have these labels (task, image)."""
    loc, log_var = (class_means(part[:, : labels.shape[1]], labels, n_way) for part in images)
    return Gaussian(loc, log_var)
