"""Batch norm written out, with the source of its statistics made explicit."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trident.nn.parameters import Parameters

EPSILON = 1e-5


@dataclass
class BatchNormStatistics:
    """Where batch norm takes mean and variance from, and what it saw on the way.

    `transductive` uses all images at hand, `support` the first `n_support` of them, `running` what training gathered.
    """

    source: str = "transductive"
    n_support: int = 0
    running: Parameters = field(default_factory=dict)  # (channel,) each
    seen: Parameters = field(default_factory=dict)  # (task, channel) each


@dataclass(frozen=True)
class BatchNorm:
    name: str
    channels: int

    def initial(self) -> Parameters:
        return {f"{self.name}.gain": torch.ones(self.channels), f"{self.name}.shift": torch.zeros(self.channels)}

    def initial_running(self) -> Parameters:
        return {f"{self.name}.mean": torch.zeros(self.channels), f"{self.name}.variance": torch.ones(self.channels)}

    def __call__(self, parameters: Parameters, x: Tensor, bias: Tensor, statistics: BatchNormStatistics) -> Tensor:
        """Normalise `x + bias`, where x is (task, image, h, w, channel) and bias the convolution's, (task, channel)."""
        mean, variance = self._mean_and_variance(x, bias, statistics)
        scale = parameters[f"{self.name}.gain"] * torch.rsqrt(variance + EPSILON)
        offset = parameters[f"{self.name}.shift"] - mean * scale
        return torch.addcmul(_over_pixels(offset), x, _over_pixels(scale))

    def _mean_and_variance(self, x: Tensor, bias: Tensor, statistics: BatchNormStatistics) -> tuple[Tensor, Tensor]:
        """Of x without its bias, (task, channel) each.

        The bias cancels where the statistics come from the batch itself. Never adding it saves a pass over the feature
        maps and makes its gradient exactly zero, where rounding noise would move an inner Adam at full rate.
        """
        if statistics.source == "running":
            mean, variance = statistics.running[f"{self.name}.mean"], statistics.running[f"{self.name}.variance"]
            return mean - bias, variance.expand_as(bias)
        batch = x[:, : statistics.n_support] if statistics.source == "support" else x
        variance, mean = torch.var_mean(batch, (1, 2, 3), correction=0)
        statistics.seen[f"{self.name}.mean"] = (mean + bias).detach()
        statistics.seen[f"{self.name}.variance"] = variance.detach()
        return mean, variance


def _over_pixels(per_channel: Tensor) -> Tensor:
    return per_channel[:, None, None, None, :]  # (task, 1, 1, 1, channel)
