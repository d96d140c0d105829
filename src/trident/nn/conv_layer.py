"""A 3x3 convolution with its bias or the batch norm that follows it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trident.nn.batch_norm import BatchNorm, BatchNormStatistics
from trident.nn.convolution import convolve, convolve_patches
from trident.nn.parameters import Parameters, uniform


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

    def __call__(self, parameters: Parameters, images: Tensor, statistics: BatchNormStatistics) -> Tensor:
        bias = parameters[f"{self.name}.bias"]  # (task, outputs)
        convolution = convolve_patches if self.from_patches else convolve
        features = convolution(images, parameters[f"{self.name}.weight"])  # (task, image, h, w, outputs)
        if self.batch_norm:
            return self.norm(parameters, features, bias, statistics)
        return features + bias[:, None, None, None, :]
