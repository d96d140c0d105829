"""AttFEX: a mask over the feature maps, computed from all images of a task."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trident.nn.classes import members_of, weighted_means
from trident.nn.linear import Linear, activate
from trident.nn.parameters import Parameters

N_STATISTICS = 5


class TaskFeatures(NamedTuple):
    """The inputs of AttFEX. It sees the queries' feature maps but not their labels."""

    maps: Tensor  # (task, image, h, w, c), the support set first
    support_labels: Tensor  # (task, n_support) int64
    n_way: int

    @property
    def flat(self) -> Tensor:
        return self.maps.flatten(2)  # (task, image, h * w * c)


def set_statistics(features: TaskFeatures) -> Tensor:
    """Five means and deviations of images and class means, in any order of the images: (task, 5, h * w * c)."""
    flat = features.flat
    support = flat[:, : features.support_labels.shape[1]]
    members = members_of(features.support_labels, features.n_way, flat)
    means = weighted_means(members, support)  # (task, n_way, h * w * c)
    within = support - torch.bmm(members.transpose(1, 2), means)
    return torch.stack([flat.mean(1), deviation(flat), means.mean(1), deviation(means), deviation(within)], 1)


def deviation(images: Tensor) -> Tensor:
    """Standard deviation over images, (task, image, ...) -> (task, ...). Never 0, so that it is differentiable."""
    return torch.sqrt((images - images.mean(1, keepdim=True)).square().mean(1) + 1e-5)


@dataclass(frozen=True)
class Attfex:
    """W_M extracts `width_m` maps M of the whole task. As published, it has one weight for each image position.

    So it needs exactly `n_images` images. If queries are sorted by class, it can read a query's class off its position.
    With `n_images` None it mixes `set_statistics` instead, which do not depend on the order of the images.
    """

    name: str
    n_images: int | None
    width_m: int
    width_n: int
    activation: str
    attention_activation: bool
    attention_scale: str
    residual: bool

    @property
    def layers(self) -> tuple[Linear, ...]:
        maps = [Linear(f"{self.name}.{part}", self.width_n, 1, bias=False) for part in ("query", "key", "value")]
        rows = N_STATISTICS if self.n_images is None else self.n_images
        w_m = Linear(f"{self.name}.w_m", rows, self.width_m, bias=False)
        return (w_m, Linear(f"{self.name}.w_n", self.width_m, self.width_n, bias=False), *maps)

    def initial(self, generator: torch.Generator) -> Parameters:
        return {key: value for layer in self.layers for key, value in layer.initial(generator).items()}

    def __call__(self, parameters: Parameters, features: TaskFeatures) -> Tensor:
        """The mask G (task, 1, h, w, c), or 1 + G."""
        tasks, _, height, width, channels = features.maps.shape

        def mix(x: Tensor, *parts: str) -> Tensor:  # 1x1 convolutions over the second axis: one product
            weights = [parameters[f"{self.name}.{part}.weight"] for part in parts]
            return torch.bmm(torch.cat(weights, 1) if len(weights) > 1 else weights[0], x)

        images = set_statistics(features) if self.n_images is None else features.flat
        m = activate(mix(images, "w_m"), self.activation)  # (task, width_m, h * w * c)
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
