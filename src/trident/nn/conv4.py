"""Conv4 (ConvEnc in the paper): four blocks of 3x3 convolution, batch norm, 2x2 max pooling and activation.

The released code puts the activation before the pooling. Both activations are monotone, so the numbers are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.conv_layer import ConvLayer
from trident.nn.linear import activate
from trident.nn.parameters import Parameters

BLOCKS = 4


@dataclass(frozen=True)
class Conv4:
    name: str
    image_channels: int
    channels: int
    activation: str

    @property
    def layers(self) -> tuple[ConvLayer, ...]:
        widths = (self.image_channels, *[self.channels] * BLOCKS)
        return tuple(
            ConvLayer(f"{self.name}.{i}", widths[i], widths[i + 1], batch_norm=True, from_patches=i == 0)
            for i in range(BLOCKS)
        )

    def n_features(self, image_size: int) -> int:
        return self.channels * feature_sizes(image_size)[-1] ** 2

    def initial(self, generator: torch.Generator) -> Parameters:
        return {key: value for layer in self.layers for key, value in layer.initial(generator).items()}

    def initial_running(self) -> Parameters:
        return {key: value for layer in self.layers for key, value in layer.initial_running().items()}

    def __call__(
        self,
        parameters: Parameters,
        images: Tensor,
        statistics: BatchNormStatistics,
        before_block: Callable[[int, Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Parameters]:
        """Patches, or images, (task, image, size, size, ...) -> (task, image, size // 16, size // 16, channels).

        Also returns the statistics that its batch norms saw. `before_block(i, maps)` may change what block i takes.
        """
        features, seen = images, Parameters()
        for place, layer in enumerate(self.layers):
            if before_block is not None:
                features = before_block(place, features)
            features, more = layer.pooled(parameters, features, statistics)
            features = activate(features, self.activation)
            seen |= more
        return features, seen


def feature_sizes(image_size: int) -> tuple[int, ...]:
    """Height and width before the first block and after each one: 84 -> (84, 42, 21, 10, 5)."""
    sizes = [image_size]
    for _ in range(BLOCKS):
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)
