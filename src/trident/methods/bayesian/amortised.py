"""A network infers the distribution of a class from its support images: VERSA and ABPML."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, HeadModel, HeadOnFeatures, Losses, NoiseShapes, cross_entropy, tunable
from trident.nn.classes import class_means, members_of, squared_distances
from trident.nn.gaussian import LOG_VAR_BOUND, Gaussian, GaussianHead
from trident.nn.linear import Linear, linear
from trident.nn.parameters import Parameters, for_each_task
from trident.nn.probabilities import mean_prediction
from trident.settings import EpisodeSpec, setting
from trident.tasks.task import Labels, Task, all_labels


@dataclass(frozen=True)
class Versa(HeadOnFeatures):
    """A network turns the mean feature of a class into a distribution of that class's weights in a linear classifier.

    Learned: the backbone, a linear layer g on its features, and the network. At test nothing is adapted:

        q(w_c, b_c)     =  N(mu, diag(sigma^2)),   mu, log sigma^2 = network(mean of g over the support images of c)
        p(y = c | x)    =  mean over sampled classifiers of  softmax_c (w_c . g(x) + b_c)

    With protocol.latents = mean, the classifier is mu itself. Training maximises log p of the queries; there is no
    divergence from a prior.

    Published with five convolution blocks, 256 features, dropout, and one network for each of the four outputs. Here
    they share their first two layers.
    """

    about = About("VERSA", "Gordon et al. 2019", "Meta-Learning Probabilistic Inference for Prediction")
    width: int = setting(128, "features that are classified, and hidden units of the network", most=4096, least=1)
    samples: int = tunable(10, "sampled classifiers in each draw of the latents, in training too", most=100, least=1)
    initial_log_var: float = setting(-5.0, "start of the log-variances of weights and biases")

    def describe(self) -> str:
        return f"{self.samples} classifiers in a sample"

    def layers(self, n_features: int) -> tuple[Linear, Linear, Linear]:
        width = self.width
        return (
            Linear("features", n_features, width),
            Linear("network.0", width, width),
            Linear("network.1", width, width),
        )

    @property
    def classifier(self) -> GaussianHead:
        """The head that infers the distribution of weights and bias."""
        return GaussianHead("classifier", self.width, self.width + 1, self.initial_log_var, LOG_VAR_BOUND)

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        parts = (*self.layers(n_features), self.classifier)
        return {key: value for part in parts for key, value in part.initial(generator).items()}

    def noise_on(self, model: HeadModel, episode: EpisodeSpec, predictions: int) -> NoiseShapes:
        size = self.samples * (self.width + 1)
        return {f"support/{draw}/classifier": (episode.n_support, size) for draw in range(predictions)}

    def posterior(self, parameters: Parameters, codes: Tensor, task: Task) -> Gaussian:
        """The posterior of weights and bias, (task, n_way, width + 1), from g of all images (task, image, width)."""
        hidden = class_means(codes[:, task.support], task.support_labels, task.n_way)
        for name in ("network.0", "network.1"):
            hidden = F.elu(linear(parameters, name, hidden))
        return self.classifier(for_each_task(parameters, task.n_tasks), hidden)

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        codes = linear(parameters, "features", features)
        posterior = self.posterior(parameters, codes, task)
        sampled = [posterior.loc]  # (task, n_way, width + 1) each
        if task.noise:
            noise = torch.cat([class_noise(draw, task) for draw in task.noise.values()], 2)
            sampled = [posterior.sample(each) for each in torch.split(noise, self.width + 1, 2)]
        heads = torch.stack(sampled, 1)  # (task, sample, n_way, width + 1)
        logits = codes[:, None, task.queries] @ heads[..., :-1].mT + heads[..., None, :, -1]
        return mean_prediction(logits.unbind(1))


def class_noise(noise: Tensor, task: Task) -> Tensor:
    """Standard normal noise of each class: (task, n_support, size) -> (task, n_way, size).

    The sum over a class's images, divided by the square root of their number, is standard normal again. It goes with
    the images: neither the order of the classes nor that of the images matters.
    """
    members = members_of(task.support_labels, task.n_way, noise)  # (task, n_way, n_support)
    return (members / members.sum(2, keepdim=True).sqrt()) @ noise


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
