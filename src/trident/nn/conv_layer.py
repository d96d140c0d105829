"""A 3x3 convolution with its bias or the batch norm that follows it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trident.nn.batch_norm import BatchNorm, BatchNormStatistics
from trident.nn.convolution import convolve, convolve_patches
from trident.nn.parameters import Parameters, uniform
from trident.nn.resampling import max_pool


@dataclass(frozen=True)
class ConvLayer:
    name: str
    inputs: int
    outputs: int
    batch_norm: bool
    from_patches: bool = False  # the input is `patches_of(images)`: made once where the images stay the same

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

    def pooled(self, parameters: Parameters, images: Tensor, statistics: BatchNormStatistics) -> Tensor:
        """Convolution, batch norm, 2x2 max pooling: the same numbers, with the batch norm's last pass on a quarter.

        Batch norm is a straight line for each channel, so the largest of four normalised values is the normalised
        largest one where the line rises. Where it falls, the weight's sign is turned, and so is the line.
        """
        weight, bias = parameters[f"{self.name}.weight"], parameters[f"{self.name}.bias"]
        falls = parameters[f"{self.norm.name}.gain"].detach() < 0  # (task, outputs)
        sign: Tensor | float = 1.0
        if falls.is_cuda or bool(falls.any()):  # rarely; to ask a GPU costs more than to turn nothing
            sign = torch.where(falls, -1.0, 1.0).to(weight)
            weight, bias = weight * sign[:, None, None, None, :], bias * sign
        features = self._convolution(images, weight)
        mean, variance = self.norm.gather(features, bias, statistics, sign)
        return self.norm.normalise(parameters, max_pool(features), mean, variance, sign)

    def __call__(self, parameters: Parameters, images: Tensor, statistics: BatchNormStatistics) -> Tensor:
        bias = parameters[f"{self.name}.bias"]  # (task, outputs)
        features = self._convolution(images, parameters[f"{self.name}.weight"])  # (task, image, h, w, outputs)
        if self.batch_norm:
            return self.norm(parameters, features, bias, statistics)
        return features + bias[:, None, None, None, :]

    def _convolution(self, images: Tensor, weight: Tensor) -> Tensor:
        return convolve_patches(images, weight) if self.from_patches else convolve(images, weight)
