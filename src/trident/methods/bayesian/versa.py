"""VERSA (Gordon et al. 2019): a network infers the distribution of each class's linear classifier."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, HeadModel, HeadOnFeatures, NoiseShapes, Task, tunable
from trident.nn.classes import class_means, members_of
from trident.nn.gaussian import LOG_VAR_BOUND, Gaussian, GaussianHead
from trident.nn.linear import Linear, linear
from trident.nn.parameters import Parameters, for_each_task
from trident.nn.probabilities import mean_prediction
from trident.settings import EpisodeSpec, setting


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

    def layers(self, n_features: int) -> tuple[Linear, ...]:
        hidden = (Linear(f"network.{place}", self.width, self.width) for place in range(2))
        return (Linear("features", n_features, self.width), *hidden)

    @property
    def classifier(self) -> GaussianHead:
        """The head that infers the distribution of weights and bias."""
        return GaussianHead("classifier", self.width, self.width + 1, self.initial_log_var, LOG_VAR_BOUND)

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        parts: list[Linear | GaussianHead] = [*self.layers(n_features), self.classifier]
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
