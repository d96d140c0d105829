"""TRIDENT on features: its two latents between a frozen backbone's features and a head that compares class means."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, HeadModel, HeadOnFeatures, Losses, NoiseShapes, cross_entropy, tunable
from trident.methods.metric.nearest_mean import NearestMean
from trident.methods.metric.scikit_learn import LogisticRegressionHead
from trident.methods.transductive.soft_kmeans import SoftKMeans
from trident.methods.trident.objective import Latents
from trident.nn.attfex import N_STATISTICS, TaskFeatures, set_statistics
from trident.nn.gaussian import LOG_VAR_BOUND, Gaussian, GaussianHead
from trident.nn.linear import Linear, activate
from trident.nn.parameters import Parameters, for_each_task
from trident.nn.probabilities import mean_prediction
from trident.settings import EpisodeSpec, require, setting
from trident.tasks.task import Labels, Task

ACTIVATION = "leaky_relu"
IMAGES_AT_ONCE = 4096
TERMS = ("classification", "reconstruction", "label_kl", "semantic_kl")  # of the loss
TRAINING_MEAN = "training_mean"  # of the training images' features of unit length


@dataclass(frozen=True)
class TridentOnFeatures(HeadOnFeatures):
    """A feature is split into what class it shows (z_label) and everything else (z_semantic).

    The features f stay as they are. Learned, with x = f / ||f|| * sqrt(number of features):

        q(z_semantic | f)             a linear layer on x
        q(z_label | f, z_semantic)    mean:  g + trust * network(g, z_semantic),   g = x * (1 + trust * AttFEX's mask)
        p(f | z_label, z_semantic)    a network that reconstructs x

    The mask depends on all images of the task, or on the support images alone, but never on their order. Queries are
    classified by their z_label with one of the other heads. Training minimises the mean of the cross-entropies of
    nearest mean and soft k-means, the error of the reconstruction and both divergences. Before training, mask and
    network are 0: z_label is x, and the predictions are those of the other head.

    What is learned suits the kind of pictures it was trained on, and may do harm to others. So it counts only as far as
    the support images resemble the training images: trust is 0 if their cosines with training images are, in the mean,
    below `trust_from` times the cosines between training images, and 1 above `trust_to` times. In training it is 1.
    """

    about = About(
        "TRIDENT on features",
        "Singh & Jamali-Rad 2022",
        "Transductive Decoupled Variational Inference for Few-Shot Classification",
        transductive=True,
    )
    semantic_latents: int = setting(32, "size of z_semantic; z_label has the size of the features", most=4096, least=1)
    label_width: int = setting(64, "hidden units of the network in the mean of z_label", most=4096, least=1)
    decoder_width: int = setting(64, "hidden units of the decoder", most=4096, least=1)
    attfex_width_m: int = setting(
        16, "feature maps that AttFEX's W_M extracts from the images of a task", most=1024, least=1
    )
    attfex_width_n: int = setting(8, "feature maps that W_N makes of them", most=1024, least=1)
    initial_log_var: float = setting(-5.0, "start of the log-variances; a feature's mean square is 1")
    classification_weight: float = setting(100.0, "weight of the queries' cross-entropy", least=0)
    reconstruction_weight: float = setting(
        0.01, "weight of the squared error of a feature, summed over its numbers", least=0
    )
    label_kl_weight: float = setting(0.001, "weight of the divergence of q(z_label) from a standard normal", least=0)
    semantic_kl_weight: float = setting(
        0.01, "weight of the divergence of q(z_semantic) from a standard normal", least=0
    )
    mask_from: Literal["task", "support"] = tunable(
        "task", "images whose statistics make AttFEX's mask: all of the task, or the support images"
    )
    trust_from: float = tunable(0.6, "similarity to training images from which mask and network count")
    trust_to: float = tunable(0.8, "similarity to training images from which they count fully")
    scale: float = tunable(20.0, "scale of cosines in the logits of nearest-mean", above=0)
    classifier: Literal["soft-kmeans", "nearest-mean", "logistic-regression"] = tunable(
        "soft-kmeans",
        "what classifies z_label (training uses the first two); soft-kmeans classifies the queries together",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            -math.inf < self.trust_from < self.trust_to < math.inf,
            f"method.trust_from is {self.trust_from}: it must be below method.trust_to, which is {self.trust_to}",
        )

    def for_few_queries(self) -> "TridentOnFeatures":
        return replace(self, classifier="nearest-mean", mask_from="support")

    def describe(self) -> str:
        return f"label latents classified by {self.classifier}"

    # The parts. The names of a part's parameters begin with the part's name.

    def semantic_head(self, n_features: int) -> GaussianHead:
        return GaussianHead("semantic", n_features, self.semantic_latents, None, LOG_VAR_BOUND)

    def label_layer(self, n_features: int) -> Linear:
        return Linear("label_network", n_features + self.semantic_latents, self.label_width)

    def label_head(self, n_features: int) -> GaussianHead:
        return GaussianHead("label", self.label_width, n_features, self.initial_log_var, LOG_VAR_BOUND)

    def decoder(self, n_features: int) -> tuple[Linear, Linear]:
        return (
            Linear("decoder.0", n_features + self.semantic_latents, self.decoder_width),
            Linear("decoder.1", self.decoder_width, n_features),
        )

    @property
    def mask_layers(self) -> tuple[Linear, ...]:
        m, n = self.attfex_width_m, self.attfex_width_n
        sizes = {"w_m": (N_STATISTICS, m), "w_n": (m, n), "mask": (n, 1)}
        return tuple(Linear(f"attfex.{name}", *size, bias=False) for name, size in sizes.items())

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        parts: list[GaussianHead | Linear] = [self.semantic_head(n_features), self.label_layer(n_features)]
        parts += [self.label_head(n_features), *self.mask_layers, *self.decoder(n_features)]
        start = {key: value for part in parts for key, value in part.initial(generator).items()}
        zero = ("label.loc.weight", "label.loc.bias", "attfex.mask.weight")
        return start | {key: torch.zeros(start[key].shape) for key in zero}

    def initial_statistics(self, n_features: int) -> Parameters:
        return {TRAINING_MEAN: torch.zeros(n_features)}

    def statistics(self, features: Tensor) -> Parameters:
        return {TRAINING_MEAN: F.normalize(features, dim=2).mean(1)}

    def noise_on(self, model: HeadModel, episode: EpisodeSpec, predictions: int) -> NoiseShapes:
        sizes = {"semantic": self.semantic_latents, "label": model.n_features}
        draws = [("support", 0, episode.n_support)] + [("query", i, episode.n_queries) for i in range(predictions)]
        return {f"{of}/{i}/{latent}": (n, size) for of, i, n in draws for latent, size in sizes.items()}

    # Inference, classification and reconstruction.

    def infer(
        self, parameters: Parameters, images: Tensor, mask: Tensor, trust: Tensor | float, noise: Parameters
    ) -> Latents:
        """Latents of some of a task's images, (task, image, feature), with noise by latent; {}: their means."""
        n_features, of_all = images.shape[2], for_each_task(parameters, 1)
        semantic = Gaussian(*split_tasks(self.semantic_head(n_features)(of_all, merge_tasks(images)), images))
        z_semantic = sample(semantic, noise.get("semantic"))
        masked = images * (1 + trust * mask)
        hidden = self.label_layer(n_features)(of_all, merge_tasks(torch.cat([masked, z_semantic], 2)))
        residual = Gaussian(*split_tasks(self.label_head(n_features)(of_all, activate(hidden, ACTIVATION)), images))
        label = Gaussian(masked + trust * residual.loc, residual.log_var)
        return Latents(semantic, label, z_semantic, sample(label, noise.get("label")))

    def mask(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        """AttFEX's mask (task, 1, feature), without its attention between maps: features have no height and width."""
        images = features if self.mask_from == "task" else features[:, task.support]
        of_task = TaskFeatures(images[:, :, None, None], task.support_labels, task.n_way)
        of_each = for_each_task(parameters, len(features))
        maps = set_statistics(of_task)  # (task, N_STATISTICS, feature)
        for place, layer in enumerate(self.mask_layers):
            maps = torch.bmm(of_each[f"{layer.name}.weight"], activate(maps, ACTIVATION) if place else maps)
        return maps

    def trust(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        """How much mask and network count: (task, 1, 1), from 0 to 1."""
        mean = parameters[TRAINING_MEAN]  # (feature,)
        support = F.normalize(features[:, task.support], dim=2).mean(1)  # (task, feature)
        # Mean cosine with the training images, as a share of the mean cosine between them.
        similarity = support @ mean / mean.square().sum().clamp(min=1e-6)
        return ((similarity - self.trust_from) / (self.trust_to - self.trust_from)).clamp(0, 1)[:, None, None]

    def classify(self, z_label: Tensor, task: Task) -> Tensor:
        """(task, image, feature) -> query logits (task, query, n_way)."""
        heads: dict[str, HeadOnFeatures] = {
            "soft-kmeans": SoftKMeans(),
            "nearest-mean": NearestMean(self.scale),
            "logistic-regression": LogisticRegressionHead(),
        }
        return heads[self.classifier].head({}, z_label, task)

    def label_means(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        """Means of z_label, (task, image, feature), a limited number of images at once."""
        trust = self.trust(parameters, features, task)
        mask = self.mask(parameters, scaled(features), task)
        parts = [features[:, start : start + IMAGES_AT_ONCE] for start in range(0, features.shape[1], IMAGES_AT_ONCE)]
        return torch.cat([self.infer(parameters, scaled(part), mask, trust, {}).label.loc for part in parts], 1)

    def decode(self, parameters: Parameters, latents: Latents) -> Tensor:
        """Features (task, image, feature)."""
        first, last = self.decoder(latents.z_label.shape[2])
        codes, of_all = torch.cat([latents.z_label, latents.z_semantic], 2), for_each_task(parameters, 1)
        decoded = last(of_all, activate(first(of_all, merge_tasks(codes)), ACTIVATION))
        return split_tasks([decoded], codes)[0]

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        draws = sum(name.startswith("query/") and name.endswith("/label") for name in task.noise)
        if not draws:
            return self.classify(self.label_means(parameters, features, task), task)
        features = scaled(features)
        trust, mask = self.trust(parameters, features, task), self.mask(parameters, features, task)
        latents = [self.infer(parameters, features, mask, trust, noise_of(task, draw)) for draw in range(draws)]
        return mean_prediction(self.classify(each.z_label, task) for each in latents)

    def training(self, parameters: Parameters, features: Tensor, task: Task, labels: Labels) -> tuple[Tensor, Losses]:
        features = scaled(features)
        mask = self.mask(parameters, features, task)
        latents = self.infer(parameters, features, mask, 1.0, noise_of(task, 0))
        refined = replace(self, classifier="soft-kmeans").classify(latents.z_label, task)
        alone = replace(self, classifier="nearest-mean").classify(latents.z_label, task)
        queries = latents.of(task.queries)
        errors = (self.decode(parameters, queries) - features[:, task.queries]).square().sum(2)
        parts = {
            "classification": (cross_entropy(refined, labels.queries) + cross_entropy(alone, labels.queries)) / 2,
            "reconstruction": errors.mean(1),
            "label_kl": queries.label.kl_to_standard_normal().mean(1),
            "semantic_kl": queries.semantic.kl_to_standard_normal().mean(1),
        }
        total = torch.stack([getattr(self, f"{name}_weight") * parts[name] for name in TERMS]).sum(0)
        return refined if self.classifier == "soft-kmeans" else alone, {"total": total} | parts


def scaled(features: Tensor) -> Tensor:
    """Features whose mean square is 1."""
    return F.normalize(features, dim=2) * math.sqrt(features.shape[2])


def noise_of(task: Task, draw: int) -> Parameters:
    """Noise (task, image, size) by latent, with draw number `draw` of the queries'; empty without noise."""
    return {
        latent: torch.cat([task.noise[f"support/0/{latent}"], task.noise[f"query/{draw}/{latent}"]], 1)
        for latent in ("semantic", "label")
        if task.noise
    }


def sample(of: Gaussian, noise: Tensor | None) -> Tensor:
    """Without noise, the mean."""
    return of.loc if noise is None else of.sample(noise)


def merge_tasks(rows: Tensor) -> Tensor:
    """The images of all tasks as those of one, since all share the weights: (task, image, ...) -> (1, row, ...)."""
    return rows.flatten(0, 1)[None]


def split_tasks(merged: Iterable[Tensor], like: Tensor) -> list[Tensor]:
    """The reverse, for several tensors: (1, row, ...) -> (task, image, ...), with the tasks and images of `like`."""
    return [each.reshape(*like.shape[:2], -1) for each in merged]
