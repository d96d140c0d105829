"""Several classifiers side by side (after Dvornik et al. 2019), and soft k-means on the features of all of them."""

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.backbones.conv4 import Conv4Backbone
from trident.methods.base import About, Backbone, ClassifierHead, HeadModel, Losses, cross_entropy, tunable
from trident.methods.transductive.soft_kmeans import SoftKMeans
from trident.nn.linear import Linear
from trident.nn.parameters import Parameters, normal, stacked, uniform
from trident.settings import EpisodeSpec, require, setting
from trident.tasks.task import Labels, Task

NEVER = -1e4  # logit of a class without other images in the batch
TINY = 1e-6
RANK = 4  # of a direction, as a matrix of cells and channels: it has few parameters then
LENGTH = 0.5  # of the vectors that make up a direction, at the start
LOG_NOISE = -8.0  # at the start
HEADS = 4
POSITIONS = 0.02  # standard deviation of the position vectors at the start


@dataclass(frozen=True)
class Ensemble(SoftKMeans, ClassifierHead):
    """Soft k-means on the features of several networks, each trained as a classifier of all training classes.

    Learned: the branches of the backbone, each with a linear layer that is not used afterwards. They share nothing but
    the batches. A branch with features f minimises

        classes      the cross-entropy of all training classes, by its linear layer
        prototypes   prototype_weight * the cross-entropy of p_ic ~ exp(prototype_scale * cos(f_i, m_c)),
                     where m_c is the mean of f / ||f|| over the other images of class c in the batch

    With attention, a branch has a layer of self-attention between the cells of its map, and f is what comes out of
    it. With variation, a Gaussian model of f / ||f|| within a class is learned beside it. The branch gets no gradient
    from its loss:

        variation    the negative log-likelihood of the images' differences from the mean of their class in the batch

    Networks that differ only in their random start make different mistakes, so that together they are better than each
    of them. At test the features of each branch are scaled to unit length, damped along the directions of the variation
    and joined; soft k-means classifies them (`soft_kmeans.py`). A query alone is classified without damping; for it
    `trident predict` takes the nearest class mean. The published ensemble averages probabilities, and its networks are
    also trained to agree, or to disagree, with each other.
    """

    about = About(
        "Ensemble of classifiers",
        "Dvornik et al. 2019",
        "Diversity with Cooperation: Ensemble Methods for Few-Shot Classification",
        trained_on="classes",
        transductive=True,
    )
    branches: int = setting(1, "networks that the features come from: backbone.branches", most=64, least=1)
    attention: bool = setting(False, "whether the cells of each branch's feature map attend to each other")
    prototype_weight: float = setting(0.0, "weight of the loss of prototypes in training", least=0)
    prototype_scale: float = setting(10.0, "factor of the cosines in the loss of prototypes", above=0)
    variation: int = setting(0, "directions in which images of a class differ, found in training", most=4096, least=0)
    damping: float = tunable(10.0, "how much features are shortened along these directions (method.variation)", least=0)

    @property
    def classifies_together(self) -> bool:
        return super().classifies_together or self._damped  # a query alone is classified without damping

    def describe(self) -> str:
        branches = f"{self.branches} branch{'' if self.branches == 1 else 'es'}"
        attention = " with attention" if self.attention else ""
        damped = f"damping {self.damping:g}, " if self._damped else ""
        return f"{branches}{attention}, {damped}{super().describe()}"

    def for_few_queries(self) -> Self:
        return replace(self, rounds=0, centre="support", damping=0.0)

    def decays(self, name: str) -> bool:
        return not name.startswith("variation.")  # a model of the features as they are, not a part of the network

    @property
    def _damped(self) -> bool:
        return self.variation > 0 and self.damping > 0

    def model(self, backbone: Backbone, episode: EpisodeSpec) -> HeadModel:
        given = backbone.branches if isinstance(backbone, Conv4Backbone) else self.branches
        require(self.branches == given, f"method.branches is {self.branches}: it must be {given}, as backbone.branches")
        whole = backbone.n_features % self.branches == 0
        require(whole, f"method.branches is {self.branches}: it must divide the {backbone.n_features} features")
        maps, channels = backbone.n_cells % self.branches == 0, backbone.n_features // backbone.n_cells
        for name in ("attention", "variation"):
            unused = not getattr(self, name)
            require(unused or maps, f"method.{name} needs the feature maps of {self.branches} networks")
        features = backbone.n_features // self.branches
        few = f"method.variation is {self.variation}: it must be at most {features}, the features of a branch"
        require(self.variation <= features, few)
        if self.attention:
            multiple = f"method.attention needs a multiple of {HEADS} channels, not {channels}: set backbone.channels"
            require(channels % HEADS == 0, multiple)
        return super().model(backbone, episode)

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        layer = Linear("classes", n_features // self.branches, self.training_classes)
        starts = [layer.initial(generator) for _ in range(self.branches)]
        return {key: stacked([start[key] for start in starts]) for key in starts[0]}  # (branch, class, ...)

    def initial_on(self, model: HeadModel, generator: torch.Generator) -> Parameters:
        start, backbone = super().initial_on(model, generator), model.backbone
        cells, channels = backbone.n_cells // self.branches, backbone.n_features // backbone.n_cells
        if self.attention:
            start |= initial_attention(self.branches, cells, channels, generator)
        if self.variation:
            start |= initial_variation(self.branches, self.variation, cells, channels, generator)
        return start

    def image_features(self, parameters: Parameters, features: Tensor) -> Tensor:
        return F.normalize(self._of_branches(parameters, features), dim=3).flatten(2)

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        if task.n_queries > 1:
            features = self.damped_features(parameters, features)
        else:
            features = F.normalize(self._apart(features), dim=3).flatten(2)
        return super().head(parameters, features, task)

    def damped_features(self, parameters: Parameters, features: Tensor) -> Tensor:
        """What a pile is compared by: image features, or their mean over views, (task, image, feature)."""
        unit = F.normalize(self._apart(features), dim=3)  # a mean over views is shorter
        return (shortened(parameters, unit, self.damping) if self._damped else unit).flatten(2)

    def training(self, parameters: Parameters, features: Tensor, task: Task, labels: Labels) -> tuple[Tensor, Losses]:
        apart = self._of_branches(parameters, features)
        # (task, image, branch, class)
        logits = torch.einsum("tibf,bcf->tibc", apart, parameters["classes.weight"]) + parameters["classes.bias"]
        truth = labels.queries
        losses = {"classes": cross_entropy(logits.flatten(1, 2), truth.repeat_interleave(self.branches, 1))}
        total, unit = losses["classes"], F.normalize(apart, dim=3)
        if self.prototype_weight:
            losses["prototypes"] = self._prototype_loss(unit, truth)
            total = total + self.prototype_weight * losses["prototypes"]
        if self.variation:
            losses["variation"] = negative_log_likelihood(parameters, unit.detach(), truth, self.training_classes)
            total = total + losses["variation"]
        return logits.mean(2), losses | {"total": total}

    def _of_branches(self, parameters: Parameters, features: Tensor) -> Tensor:
        """What the layers of the branches make of features (task, image, feature): (task, image, branch, feature)."""
        apart = self._apart(features)
        return attend(parameters, apart) if self.attention else apart

    def _apart(self, features: Tensor) -> Tensor:
        """(task, image, feature) -> (task, image, branch, feature)."""
        return features.reshape(*features.shape[:2], self.branches, -1)

    def _prototype_loss(self, unit: Tensor, classes: Tensor) -> Tensor:
        """Of features (task, image, branch, feature) of unit length with their classes (task, image) -> (task,)."""
        own = F.one_hot(classes, self.training_classes).to(unit)  # (task, image, class)
        sums = torch.einsum("tic,tibf->tbcf", own, unit)
        of_others = own.sum(1, keepdim=True) - own  # (task, image, class): how many other images
        own = own[:, :, None]
        products = torch.einsum("tibf,tbcf->tibc", unit, sums)
        # The image itself is taken out of the sum of its class: f . (s - f) = f . s - 1 for f of unit length.
        squared = sums.square().sum(3)[:, None] - own * (2 * products - 1)
        cosines = (products - own) / squared.clamp(min=TINY).sqrt()
        logits = torch.where(of_others[:, :, None] > 0.5, self.prototype_scale * cosines, NEVER)
        right = logits.log_softmax(3).gather(3, classes[:, :, None, None].expand(-1, -1, self.branches, 1))
        counts = (of_others.gather(2, classes[:, :, None]) > 0.5).to(unit)  # (task, image, 1): the class has others
        return -(right[..., 0] * counts).sum((1, 2)) / (self.branches * counts.sum((1, 2)).clamp(min=1))


# The variation. A network that was trained as a classifier varies most along directions that tell its training classes
# apart. They dominate distances between images of new classes, so it helps to make features shorter along them.


def initial_variation(
    branches: int, directions: int, cells: int, channels: int, generator: torch.Generator
) -> Parameters:
    return {
        "variation.cells": normal((branches, directions, RANK, cells), LENGTH / cells**0.5, generator),
        "variation.channels": normal((branches, directions, RANK, channels), LENGTH / channels**0.5, generator),
        "variation.log_noise": torch.full((branches,), LOG_NOISE),
    }


def directions_of(parameters: Parameters) -> Tensor:
    """Not of unit length: their squared lengths are variances. (branch, direction, cell * channel)."""
    cells, channels = parameters["variation.cells"], parameters["variation.channels"]
    return torch.einsum("bdrc,bdrk->bdck", cells, channels).flatten(2)


def negative_log_likelihood(parameters: Parameters, unit: Tensor, classes: Tensor, n_classes: int) -> Tensor:
    """How badly the Gaussian fits a batch: a loss per feature, without constants.

    It takes the difference of each image from the mean of its class in the batch, and the covariance

        sum over directions d of d d^T  +  noise I.

    Features (task, image, branch, feature), classes (task, image) -> (task,). A class with n images in the batch has
    n - 1 degrees of freedom; a class with one image does not count.
    """
    one_hot = F.one_hot(classes, n_classes).to(unit)  # (task, image, class)
    counts = one_hot.sum(1)  # (task, class)
    means = torch.einsum("tic,tibf->tcbf", one_hot / counts.clamp(min=1)[:, None], unit)
    residuals = unit - torch.einsum("tic,tcbf->tibf", one_hot, means)
    freedom = (counts - 1).clamp(min=0).sum(1)  # (task,)

    directions, log_noise = directions_of(parameters), parameters["variation.log_noise"]  # (branch, ...) each
    noise = log_noise.exp()
    n_directions, n_features = directions.shape[1:]
    identity = torch.eye(n_directions, dtype=unit.dtype, device=unit.device)
    # By Woodbury's identity, only a matrix of the directions' products has to be factorised.
    factor: Tensor = torch.linalg.cholesky_ex(directions @ directions.mT + noise[:, None, None] * identity).L
    products = torch.einsum("bdf,tibf->tbdi", directions, residuals)
    explained = torch.linalg.solve_triangular(factor, products, upper=False).square().sum((2, 3))  # (task, branch)
    squares = (residuals.square().sum((1, 3)) - explained) / noise  # (task, branch)
    log_determinant = (n_features - n_directions) * log_noise + 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
    each = squares / freedom.clamp(min=1)[:, None] + log_determinant * (freedom > 0)[:, None]
    mean: Tensor = each.mean(1) / (2 * n_features)
    return mean


def shortened(parameters: Parameters, features: Tensor, damping: float) -> Tensor:
    """Features (..., branch, feature), divided by sqrt(1 + damping * variance / largest variance) along each
    principal direction of the variation."""
    directions = directions_of(parameters)  # D: (branch, direction, feature)
    variances, vectors = torch.linalg.eigh(directions @ directions.mT)  # the variances are those of D^T D, too
    slopes = damping / variances.amax(1, keepdim=True).clamp(min=1e-12)
    roots = (1 + slopes * variances.clamp(min=0)).sqrt()  # (branch, direction)
    # f - D^T K D f, where K has the eigenvalues (1 - 1 / root) / variance, written without dividing by the variance.
    kernel = (vectors * (slopes / (roots * (roots + 1)))[:, None]) @ vectors.mT
    along = torch.einsum("...bf,bdf->...bd", features, directions)
    return features - torch.einsum("...bd,bde,bef->...bf", along, kernel, directions)


def initial_attention(branches: int, cells: int, channels: int, generator: torch.Generator) -> Parameters:
    """Random weights for each branch. `output` is zero, so that at the start the features stay as they are."""
    return {
        "attention.positions": normal((branches, cells, channels), POSITIONS, generator),
        "attention.qkv": uniform((branches, channels, 3 * channels), channels, generator),
        "attention.output": torch.zeros(branches, channels, channels),
    }


def attend(parameters: Parameters, features: Tensor) -> Tensor:
    """Maps (task, image, branch, cell * channel) -> the same, with what each cell found in the others added to it.

    Within a branch, with x_i the features of cell i and all heads side by side:

        y_i = layer norm of (x_i + position_i),   (q_i, k_i, v_i) = qkv y_i
        x_i + output sum_j softmax_j(q_i . k_j / sqrt(size of a head)) v_j
    """
    positions = parameters["attention.positions"]  # (branch, cell, channel)
    branches, n_cells, channels = positions.shape
    n_images = features.shape[0] * features.shape[1]
    cells = features.reshape(n_images, branches, n_cells, channels).transpose(0, 1)  # (branch, image, cell, channel)
    seen = F.layer_norm(cells + positions[:, None], (channels,)).flatten(1, 2)  # (branch, image * cell, channel)
    mixed = torch.bmm(seen, parameters["attention.qkv"]).reshape(
        branches * n_images, n_cells, 3, HEADS, channels // HEADS
    )
    queries, keys, values = mixed.permute(2, 0, 3, 1, 4)  # (branch * image, head, cell, size of a head) each
    attended = F.scaled_dot_product_attention(queries, keys, values).transpose(
        1, 2
    )  # (branch * image, cell, head, size)
    added = torch.bmm(attended.reshape(branches, -1, channels), parameters["attention.output"])
    return (cells + added.view_as(cells)).transpose(0, 1).reshape(features.shape)
