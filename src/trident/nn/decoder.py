"""The generative network p(x | z_label, z_semantic): latents to an image with values in 0 .. 1."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.conv4 import BLOCKS, ConvLayer, feature_sizes
from trident.nn.convolution import upsample
from trident.nn.linear import Linear, activate
from trident.nn.parameters import Parameters


@dataclass(frozen=True)
class Decoder:
    """The encoder's sizes in reverse, 5 -> 10 -> 21 -> 42 -> 84, with a 3x3 convolution after each step."""

    name: str
    latents: int
    image_size: int
    image_channels: int
    channels: int
    activation: str
    batch_norm: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        return feature_sizes(self.image_size)[::-1]

    @property
    def linear(self) -> Linear:
        return Linear(f"{self.name}.linear", self.latents, self.channels * self.sizes[0] ** 2)

    @property
    def layers(self) -> tuple[ConvLayer, ...]:
        outputs = [self.channels] * (BLOCKS - 1) + [self.image_channels]
        return tuple(
            ConvLayer(f"{self.name}.{i}", self.channels, width, self.batch_norm) for i, width in enumerate(outputs)
        )

    def initial(self, generator: torch.Generator) -> Parameters:
        start = self.linear.initial(generator)
        return start | {key: value for layer in self.layers for key, value in layer.initial(generator).items()}

    def initial_running(self) -> Parameters:
        return {key: value for layer in self.layers for key, value in layer.initial_running().items()}

    def __call__(
        self, parameters: Parameters, latents: Tensor, statistics: BatchNormStatistics
    ) -> tuple[Tensor, Parameters]:
        """(task, image, latent) -> (task, image, size, size, image_channels), and the statistics batch norm saw."""
        x, seen = self.hidden(parameters, latents), Parameters()
        for layer, size in zip(self.layers, self.sizes[1:], strict=True):
            x, more = layer(parameters, upsample(x, size), statistics)
            x = torch.sigmoid(x) if layer == self.layers[-1] else activate(x, self.activation)
            seen |= more
        return x, seen

    def hidden(self, parameters: Parameters, latents: Tensor) -> Tensor:
        """The smallest feature maps, from the latents: (task, image, size // 16, size // 16, channels)."""
        x = activate(self.linear(parameters, latents), self.activation)
        return x.view(*x.shape[:2], self.sizes[0], self.sizes[0], self.channels)
