"""FEAT: few-shot embedding adaptation with a transformer (Ye et al. 2020)."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, HeadOnFeatures, Losses, Method, Parameters, cross_entropy, setting
from trident.nn.classes import class_means, members_of, squared_distances, weighted_means
from trident.nn.linear import Linear, linear
from trident.tasks.task import Labels, Task, all_labels

PROJECTIONS = ("asks", "answers", "values")  # the parameter names of the query, key and value projections


@dataclass(frozen=True)
class Feat(HeadOnFeatures):
    """The prototypes of a task are adapted to each other by self-attention before queries are compared with them.

    Learned: the backbone, and one attention block. f(x) holds the largest value of every channel of the feature map.

        block(a; b)  = LayerNorm(a + W attention(a; b) + w),    queries from a, keys and values from b, one head
        prototypes   = block(m; m),   m = class means of the support features
        p(y = c | x) ~ exp(-||f(x) - prototype_c||^2 / temperature)

    In training a second cross-entropy is added with weight `balance`: the block is applied to all images of each class,
    support and queries, among themselves, and every image must be nearest to the mean of its class's results, with
    `auxiliary_temperature`.

    With `transductive`, the support features attend to the support and query features; the prototypes are then the
    means of the results and of the queries, each query as far as it seems to belong to the class.

    Left out of the published method are its dropout, and its own pretraining: recipes start from the shipped classifier
    of the training classes. The block starts with torch's usual random values for linear layers.
    """

    takes_cells: ClassVar[bool] = True
    about = About("FEAT", "Ye et al. 2020", "Few-Shot Learning via Embedding Adaptation with Set-to-Set Functions")
    temperature: float = setting(
        64.0, "by which squared distances are divided; the paper has 64 with one shot, else 32", above=0
    )
    auxiliary_temperature: float = setting(
        16.0, "the same in the second loss; the paper has 16 with one shot, else 64", above=0
    )
    balance: float = setting(1.0, "weight of the second loss; the paper has 1 with one shot, else 0.1", least=0)
    transductive: bool = setting(False, "whether the queries take part in the attention, and are classified together")

    @property
    def classifies_together(self) -> bool:
        return self.transductive

    def for_few_queries(self) -> Method:
        return replace(self, transductive=False)

    def describe(self) -> str:
        return "attention to the queries too" if self.transductive else ""

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        start = Parameters()
        for name in PROJECTIONS:
            start |= Linear(f"attention.{name}", n_features, n_features, bias=False).initial(generator)
        start |= Linear("attention.out", n_features, n_features).initial(generator)
        return start | {"attention.gain": torch.ones(n_features), "attention.shift": torch.zeros(n_features)}

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = features.amax(2)  # (task, image, channel)
        prototypes = self._prototypes(parameters, self._adapted(parameters, features, task), task)
        return -squared_distances(features[:, task.queries], prototypes) / self.temperature

    def training(self, parameters: Parameters, features: Tensor, task: Task, labels: Labels) -> tuple[Tensor, Losses]:
        features = self._adapted(parameters, features.amax(2), task)
        queries, prototypes = features[:, task.queries], self._prototypes(parameters, features, task)
        logits = -squared_distances(queries, prototypes) / self.temperature
        known = all_labels(task, labels)  # (task, image)
        same = known[:, :, None] == known[:, None]  # (task, image, image)
        centres = class_means(_block(parameters, features, features, same), known, task.n_way)
        second = cross_entropy(-squared_distances(features, centres) / self.auxiliary_temperature, known)
        fit = cross_entropy(logits, labels.queries)
        return logits, {"total": fit + self.balance * second, "classification": fit, "auxiliary": second}

    def _adapted(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        """All features (task, image, channel). With `transductive`, those of the support set have attended to all."""
        if not self.transductive:
            return features
        return torch.cat([_block(parameters, features[:, task.support], features), features[:, task.queries]], 1)

    def _prototypes(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        members = members_of(task.support_labels, task.n_way, features)  # (task, n_way, n_support)
        means = weighted_means(members, features[:, task.support])
        if not self.transductive:
            return _block(parameters, means, means)
        belongs = torch.softmax(-squared_distances(features[:, task.queries], means) / self.temperature, 2)
        return weighted_means(torch.cat([members, belongs.mT], 2), features)


def _block(parameters: Parameters, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of x (task, a, channel) to a context (task, b, channel), where `mask` (task, a, b) allows it."""
    queries, keys, values = (
        linear(parameters, f"attention.{name}", inputs)
        for name, inputs in zip(PROJECTIONS, (x, context, context), strict=True)
    )
    scores = queries @ keys.mT / math.sqrt(x.shape[2])  # (task, a, b)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    attended = torch.softmax(scores, 2) @ values
    out = x + linear(parameters, "attention.out", attended)
    return F.layer_norm(out, out.shape[2:], parameters["attention.gain"], parameters["attention.shift"])
