"""Relation Networks (Sung et al. 2018)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, HeadOnFeatures, Labels, Losses, Task, cross_entropy, setting
from trident.nn.classes import class_means
from trident.nn.linear import Linear, linear
from trident.nn.parameters import Parameters, uniform


@dataclass(frozen=True)
class RelationNetwork(HeadOnFeatures):
    """A small network looks at a query's feature map and a class's feature map together, and scores how alike they are.

    Learned: the backbone, and the network that scores a pair. At test nothing is adapted:

        class map_c  = mean of the support maps of class c
        r(x, c)      = two dense layers on two convolution blocks on [class map_c, map of x], one map over the other
        p(y = c | x) ~ exp(r(x, c))

    The training loss is the mean of (sigmoid(r) - 1 if the query is of the class, else 0)^2, as published, or the
    cross-entropy of p. A block is a 3x3 convolution, a normalisation, ReLU and, where the map has more than one cell,
    2x2 max pooling; a mean over the cells that are left makes the dense layers fit maps of any size.

    The published code sums the support maps, and normalises with the statistics of all pairs of the task, so that the
    queries change each other's scores. Here class maps are means, and each pair is normalised for itself (group
    normalisation with one group), so that queries are classified alone.
    """

    takes_cells: ClassVar[bool] = True
    about = About(
        "Relation Networks", "Sung et al. 2018", "Learning to Compare: Relation Network for Few-Shot Learning"
    )
    width: int = setting(64, "feature maps in the two blocks of the relation network", most=4096, least=1)
    hidden: int = setting(8, "hidden units between its two dense layers", most=4096, least=1)
    loss: Literal["squared_error", "cross_entropy"] = setting("squared_error", "loss of the scores in training")

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        start = Parameters()
        for block, inputs in enumerate((2 * n_features, self.width)):
            start |= {
                f"relation.{block}.weight": uniform((self.width, inputs, 3, 3), 9 * inputs, generator),
                f"relation.{block}.bias": uniform((self.width,), 9 * inputs, generator),
                f"relation.{block}.gain": torch.ones(self.width),
                f"relation.{block}.shift": torch.zeros(self.width),
            }
        start |= Linear("relation.hidden", self.width, self.hidden).initial(generator)
        return start | Linear("relation.score", self.hidden, 1).initial(generator)

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        side = math.isqrt(features.shape[2])
        maps = features.reshape(*features.shape[:2], side, side, -1).movedim(-1, 2)  # (task, image, channel, h, w)
        support, queries = maps[:, task.support], maps[:, task.queries]
        classes = class_means(support.flatten(2), task.support_labels, task.n_way)
        classes = classes.reshape(-1, *support.shape[2:])  # (task * class, channel, h, w)

        # A convolution of two maps, one over the other, is the sum of a convolution of each: far fewer than of pairs.
        for_class, for_query = parameters["relation.0.weight"].chunk(2, 1)
        of_classes = _convolved(classes, for_class, parameters["relation.0.bias"])
        of_queries = _convolved(queries.flatten(0, 1), for_query)
        of_classes = of_classes.view(task.n_tasks, 1, task.n_way, *of_classes.shape[1:])
        of_queries = of_queries.view(task.n_tasks, task.n_queries, 1, *of_queries.shape[1:])
        pairs = (of_classes + of_queries).flatten(0, 2)  # (task * query * class, width, h, w)

        pairs = self._finished(parameters, 0, pairs)
        pairs = _convolved(pairs, parameters["relation.1.weight"], parameters["relation.1.bias"])
        pairs = self._finished(parameters, 1, pairs).mean((2, 3))  # (task * query * class, width)
        hidden = F.relu(linear(parameters, "relation.hidden", pairs))
        scores = linear(parameters, "relation.score", hidden)
        return scores.view(task.n_tasks, task.n_queries, task.n_way)

    def _finished(self, parameters: Parameters, block: int, pairs: Tensor) -> Tensor:
        """What follows a block's convolution."""
        gain, shift = parameters[f"relation.{block}.gain"], parameters[f"relation.{block}.shift"]
        pairs = F.relu(F.group_norm(pairs, 1, gain, shift))
        return F.max_pool2d(pairs, 2) if pairs.shape[-1] > 1 else pairs

    def losses(self, logits: Tensor, labels: Labels) -> Losses:
        if self.loss == "cross_entropy":
            return {"total": cross_entropy(logits, labels.queries)}
        wanted = F.one_hot(labels.queries, logits.shape[2])
        return {"total": (torch.sigmoid(logits) - wanted).square().mean((1, 2))}


def _convolved(maps: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A 3x3 convolution with zeros around the maps (image, channel, h, w)."""
    if maps.shape[-1] == 1:  # only the middle of the kernel meets anything but zeros
        return F.linear(maps.flatten(1), weight[:, :, 1, 1], bias)[:, :, None, None]
    return F.conv2d(maps, weight, bias, padding=1)
