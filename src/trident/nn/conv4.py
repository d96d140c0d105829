"""Conv4 (ConvEnc in the paper): four blocks of 3x3 convolution, batch norm, 2x2 max pooling and activation.

The released code puts the activation before the pooling. Both activations are monotone, so the numbers are the same.
The decoder has the same layers in reverse.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trident.nn.batch_norm import BatchNorm, BatchNormStatistics, Moments, WithStatistics, mean_and_variance
from trident.nn.convolution import convolve, convolve_patches, max_pool, patches_of, upsample
from trident.nn.linear import Linear, activate
from trident.nn.parameters import Parameters, uniform

MOST_AT_ONCE = 100  # images of a task; more are convolved in slices, if no gradient is needed
SLICE = 50


def in_slices(n_images: int) -> bool:
    """Whether so many images are convolved in slices, which takes a tenth of the memory."""
    return n_images > MOST_AT_ONCE and not torch.is_grad_enabled()


@dataclass(frozen=True)
class ConvLayer:
    """A 3x3 convolution with bias or batch norm."""

    name: str
    inputs: int
    outputs: int
    batch_norm: bool
    from_patches: bool = False  # the input may be `patches_of(images)`, computed once for images that stay the same

    @property
    def norm(self) -> BatchNorm:
        return BatchNorm(f"{self.name}.norm", self.outputs)

    def initial(self, generator: torch.Generator) -> Parameters:
        fan_in = 9 * self.inputs
        start = {
            f"{self.name}.weight": uniform((3, 3, self.inputs, self.outputs), fan_in, generator),
            f"{self.name}.bias": uniform((self.outputs,), fan_in, generator),
        }
        return start | self.norm.initial() if self.batch_norm else start

    def initial_running(self) -> Parameters:
        return self.norm.initial_running() if self.batch_norm else {}

    def pooled(self, parameters: Parameters, images: Tensor, statistics: BatchNormStatistics) -> WithStatistics:
        """Convolution, batch norm and 2x2 max pooling; and the statistics that batch norm saw.

        Pooling comes before normalisation, which then works on a quarter of the pixels. The result is the same: batch
        norm is a straight line for each channel, so the largest of four normalised values is the normalised largest
        value. Where the gain is negative, the weight's sign is flipped first.
        """
        weight, bias = parameters[f"{self.name}.weight"], parameters[f"{self.name}.bias"]
        negative = parameters[f"{self.norm.name}.gain"].detach() < 0  # (task, outputs)
        sign: Tensor | float = 1.0
        if negative.is_cuda or bool(negative.any()):  # rare; on a GPU the check costs more than it saves
            sign = torch.where(negative, -1.0, 1.0).to(weight)
            weight, bias = weight * sign[:, None, None, None, :], bias * sign
        if in_slices(images.shape[1]):
            pooled, moments = self._pooled_slices(images, weight, statistics)
            used = self.norm.combine_moments(moments, bias, statistics, sign)
            for part in torch.split(pooled, SLICE, 1):
                part.copy_(self.norm.normalise(parameters, part, used, sign))
            return pooled, used.seen
        features = self._convolution(images, weight)
        used = self.norm.measure(features, bias, statistics, sign)
        return self.norm.normalise(parameters, max_pool(features), used, sign), used.seen

    def _pooled_slices(
        self, images: Tensor, weight: Tensor, statistics: BatchNormStatistics
    ) -> tuple[Tensor, list[Moments]]:
        """Convolve and pool slice by slice. Also return the moments of the convolutions, before pooling."""
        tasks, n, height, width, _ = images.shape
        pooled = weight.new_empty(tasks, n, height // 2, width // 2, self.outputs)
        slices = []
        left = statistics.counted(n)
        for part, into in zip(torch.split(images, SLICE, 1), torch.split(pooled, SLICE, 1), strict=True):
            features = self._convolution(part, weight)
            counted = min(left, part.shape[1])
            if counted:
                slices.append((counted, *mean_and_variance(features[:, :counted])))
            left -= counted
            into.copy_(max_pool(features))
        return pooled, slices

    def __call__(self, parameters: Parameters, images: Tensor, statistics: BatchNormStatistics) -> WithStatistics:
        """The feature maps, and the statistics that batch norm saw."""
        bias = parameters[f"{self.name}.bias"]  # (task, outputs)
        features = self._convolution(images, parameters[f"{self.name}.weight"])  # (task, image, h, w, outputs)
        if self.batch_norm:
            return self.norm(parameters, features, bias, statistics)
        return features + bias[:, None, None, None, :], {}

    def _convolution(self, images: Tensor, weight: Tensor) -> Tensor:
        if not self.from_patches:
            return convolve(images, weight)
        # With many images these are pixels, to save memory; with few, `first_layer_input` has made patches of them.
        patches = patches_of(images) if images.shape[4] == self.inputs else images
        return convolve_patches(patches, weight)


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
    ) -> WithStatistics:
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


@dataclass(frozen=True)
class Decoder:
    """The network p(x | z_label, z_semantic), with the encoder's sizes in reverse: latents to images in 0 .. 1."""

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

    def __call__(self, parameters: Parameters, latents: Tensor, statistics: BatchNormStatistics) -> WithStatistics:
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
