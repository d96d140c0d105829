"""AttFEX: a mask over the feature maps, computed from all images of a task.

An extractor computes `width_m` feature maps of the whole task, M in the paper. `Positional` is the paper's extractor.
`SetStatistics` does not depend on the order of the images. The rest, from M to the mask G, is the same for both.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trident.nn.classes import members_of, weighted_means
from trident.nn.linear import Linear, activate
from trident.nn.parameters import Parameters


class TaskFeatures(NamedTuple):
    """The inputs of AttFEX. It sees the queries' feature maps but not their labels."""

    maps: Tensor  # (task, image, h, w, c), the support set first
    support_labels: Tensor  # (task, n_support) int64
    n_way: int

    @property
    def flat(self) -> Tensor:
        return self.maps.flatten(2)  # (task, image, h * w * c)

    @property
    def n_support(self) -> int:
        return self.support_labels.shape[1]


class Extractor(Protocol):
    """Computes M from the feature maps of a task."""

    def initial(self, generator: torch.Generator) -> Parameters: ...

    def __call__(self, parameters: Parameters, features: TaskFeatures) -> Tensor:
        """-> (task, width_m, h * w * c)."""


@dataclass(frozen=True)
class Positional:
    """W_M as published: one weight for each image position in the task.

    So it needs exactly `n_images` images. If queries are sorted by class, it can read a query's class off its position.
    """

    name: str
    n_images: int
    width_m: int

    @property
    def w_m(self) -> Linear:
        return Linear(f"{self.name}.w_m", self.n_images, self.width_m, bias=False)

    def initial(self, generator: torch.Generator) -> Parameters:
        return self.w_m.initial(generator)

    def __call__(self, parameters: Parameters, features: TaskFeatures) -> Tensor:
        return torch.bmm(parameters[f"{self.w_m.name}.weight"], features.flat)


@dataclass(frozen=True)
class SetStatistics:
    """Learned mixtures of five statistics of a task, which do not depend on the order of its images.

    They are the mean and standard deviation of all images, the mean and standard deviation of the support classes'
    means, and the standard deviation of the support images around their class mean.
    """

    name: str
    width_m: int

    @property
    def w_m(self) -> Linear:
        return Linear(f"{self.name}.w_m", 5, self.width_m, bias=False)

    def initial(self, generator: torch.Generator) -> Parameters:
        return self.w_m.initial(generator)

    def __call__(self, parameters: Parameters, features: TaskFeatures) -> Tensor:
        flat, labels = features.flat, features.support_labels
        support = flat[:, : features.n_support]
        members = members_of(labels, features.n_way, flat)
        means = weighted_means(members, support)  # (task, n_way, h * w * c)
        within = support - torch.bmm(members.transpose(1, 2), means)
        statistics = [flat.mean(1), deviation(flat), means.mean(1), deviation(means), deviation(within)]
        return torch.bmm(parameters[f"{self.w_m.name}.weight"], torch.stack(statistics, 1))


def deviation(images: Tensor) -> Tensor:
    """Standard deviation over images, (task, image, ...) -> (task, ...). Never 0, so that it is differentiable."""
    return torch.sqrt((images - images.mean(1, keepdim=True)).square().mean(1) + 1e-5)


@dataclass(frozen=True)
class Attfex:
    name: str
    extractor: Extractor
    width_m: int
    width_n: int
    activation: str
    attention_activation: bool
    attention_scale: str
    residual: bool

    @property
    def layers(self) -> tuple[Linear, ...]:
        maps = [Linear(f"{self.name}.{part}", self.width_n, 1, bias=False) for part in ("query", "key", "value")]
        return (Linear(f"{self.name}.w_n", self.width_m, self.width_n, bias=False), *maps)

    def initial(self, generator: torch.Generator) -> Parameters:
        start = self.extractor.initial(generator)
        return start | {key: value for layer in self.layers for key, value in layer.initial(generator).items()}

    def __call__(self, parameters: Parameters, features: TaskFeatures) -> Tensor:
        """The mask G (task, 1, h, w, c), or 1 + G."""
        tasks, _, height, width, channels = features.maps.shape

        def mix(x: Tensor, *parts: str) -> Tensor:  # 1x1 convolutions over the second axis: one product
            weights = [parameters[f"{self.name}.{part}.weight"] for part in parts]
            return torch.bmm(torch.cat(weights, 1) if len(weights) > 1 else weights[0], x)

        m = activate(self.extractor(parameters, features), self.activation)  # (task, width_m, h * w * c)
        n = activate(mix(m, "w_n"), self.activation)  # (task, width_n, h * w * c)
        maps = mix(n, "query", "key", "value")  # (task, 3, h * w * c)
        maps = activate(maps, self.activation) if self.attention_activation else maps
        query, key, value = maps.view(tasks, 3, height * width, channels).transpose(2, 3).unbind(1)  # (task, c, h * w)
        scale = 1 / math.sqrt(height * width)
        similarity = torch.bmm(query, key.transpose(1, 2))  # (task, c, c)
        if self.attention_scale == "inside":
            mask = torch.bmm(torch.softmax(similarity * scale, -1), value)
        else:
            mask = torch.bmm(torch.softmax(similarity, -1), value) * scale  # the paper's equation for G
        mask = mask.transpose(1, 2).reshape(tasks, 1, height, width, channels)
        return 1 + mask if self.residual else mask
