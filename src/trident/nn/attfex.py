"""AttFEX of the paper: a mask over the feature maps that is made from all images of a task."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trident.nn.activation import activate
from trident.nn.linear import Linear
from trident.nn.parameters import Parameters


@dataclass(frozen=True)
class PositionalAttfex:
    """AttFEX as published: W_M holds one weight for each image position in the task.

    So it takes exactly `n_images` images, and it can tell a query's class from its position when queries come sorted.
    """

    name: str
    n_images: int
    width_m: int
    width_n: int
    activation: str
    attention_activation: bool
    attention_scale: str

    @property
    def layers(self) -> tuple[Linear, ...]:
        maps = [Linear(f"{self.name}.{part}", self.width_n, 1, bias=False) for part in ("query", "key", "value")]
        return (
            Linear(f"{self.name}.w_m", self.n_images, self.width_m, bias=False),
            Linear(f"{self.name}.w_n", self.width_m, self.width_n, bias=False),
            *maps,
        )

    def initial(self, generator: torch.Generator) -> Parameters:
        return {key: value for layer in self.layers for key, value in layer.initial(generator).items()}

    def __call__(self, parameters: Parameters, features: Tensor) -> Tensor:
        """Feature maps of all images of a task (task, image, h, w, c) -> the mask G (task, 1, h, w, c)."""
        tasks, _, height, width, channels = features.shape

        def mix(x: Tensor, *parts: str) -> Tensor:  # 1x1 convolutions over the second axis: one product
            weights = [parameters[f"{self.name}.{part}.weight"] for part in parts]
            return torch.bmm(torch.cat(weights, 1) if len(weights) > 1 else weights[0], x)

        m = activate(mix(features.flatten(2), "w_m"), self.activation)  # (task, width_m, h * w * c)
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
        return mask.transpose(1, 2).reshape(tasks, 1, height, width, channels)
