"""Batch norm with an explicit source of its statistics."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trident.nn.parameters import Parameters

WithStatistics = tuple[Tensor, Parameters]  # a result, and the statistics (task, channel) that batch norm saw
EPSILON = 1e-5
Moments = tuple[int, Tensor, Tensor]  # number of some images of each task, mean and variance, (task, channel) each
LARGE = 24_000  # pixels per task from which torch's own statistics are faster, one call per task


@dataclass(frozen=True)
class BatchNormStatistics:
    """Where batch norm takes its mean and variance from."""

    source: str = "transductive"  # all images; support: the first `n_support`; running: statistics from training
    n_support: int = 0
    running: Parameters = field(default_factory=dict)  # (channel,) each

    def counted(self, n_images: int) -> int:
        """The number of leading images that the statistics are computed from."""
        return {"running": 0, "support": min(self.n_support, n_images)}.get(self.source, n_images)


class UsedStatistics(NamedTuple):
    """The mean and variance to normalise with, and those seen in the batch, which update the running statistics."""

    mean: Tensor  # (task, channel)
    variance: Tensor  # (task, channel)
    seen: Parameters  # (task, channel) each; empty for running statistics


@dataclass(frozen=True)
class BatchNorm:
    name: str
    channels: int

    def initial(self) -> Parameters:
        return {f"{self.name}.gain": torch.ones(self.channels), f"{self.name}.shift": torch.zeros(self.channels)}

    def initial_running(self) -> Parameters:
        return {f"{self.name}.mean": torch.zeros(self.channels), f"{self.name}.variance": torch.ones(self.channels)}

    def __call__(
        self, parameters: Parameters, x: Tensor, bias: Tensor, statistics: BatchNormStatistics
    ) -> WithStatistics:
        """Normalise `x + bias`, where x is (task, image, h, w, channel) and bias the convolution's, (task, channel).

        The bias cancels if the statistics come from the batch itself. Not adding it saves a pass over the feature maps
        and makes its gradient exactly zero. With rounding noise, an inner Adam would update it at full rate.
        """
        used = self.measure(x, bias, statistics)
        return self.normalise(parameters, x, used), used.seen

    def measure(
        self, x: Tensor, bias: Tensor, statistics: BatchNormStatistics, sign: Tensor | float = 1.0
    ) -> UsedStatistics:
        """Mean and variance of x. `sign` is -1 for channels whose sign was flipped."""
        counted = statistics.counted(x.shape[1])
        moments = [(counted, *mean_and_variance(x[:, :counted]))] if counted else []
        return self.combine_moments(moments, bias, statistics, sign)

    def combine_moments(
        self, slices: list[Moments], bias: Tensor, statistics: BatchNormStatistics, sign: Tensor | float = 1.0
    ) -> UsedStatistics:
        """What `measure` returns, from the moments of slices of x."""
        if statistics.source == "running":
            mean = statistics.running[f"{self.name}.mean"] * sign - bias
            return UsedStatistics(mean, statistics.running[f"{self.name}.variance"].expand_as(bias), {})
        mean, variance = _combined(slices)
        seen = {
            f"{self.name}.mean": ((mean + bias) * sign).detach(),
            f"{self.name}.variance": variance.detach(),
        }
        return UsedStatistics(mean, variance, seen)

    def normalise(self, parameters: Parameters, x: Tensor, used: UsedStatistics, sign: Tensor | float = 1.0) -> Tensor:
        gain = parameters[f"{self.name}.gain"]  # (task, channel)
        scale = gain * sign * torch.rsqrt(used.variance + EPSILON)
        return torch.addcmul(
            _over_pixels(parameters[f"{self.name}.shift"]), x - _over_pixels(used.mean), _over_pixels(scale)
        )


def _combined(moments: list[Moments]) -> tuple[Tensor, Tensor]:
    """Mean and variance of all images, given those of slices."""
    if len(moments) == 1:
        return moments[0][1:]
    numbers, *each = zip(*moments, strict=True)
    means, variances = (torch.stack(part) for part in each)
    counts = torch.tensor(numbers).to(means)[:, None, None]  # (slice, 1, 1)
    shares = counts / counts.sum()
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0)


def mean_and_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Over images and pixels: (task, image, h, w, channel) -> (task, channel) each."""
    mean, variance = _MeanAndVariance.apply(x)  # type: ignore[no-untyped-call]
    return mean, variance


class _MeanAndVariance(torch.autograd.Function):
    """Ten times as fast as torch.var_mean on channels-last CPU tensors. Its gradient is linear in x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        share = x.shape[4] / x[0].numel()
        if x.device.type == "cpu" and x[0, ..., 0].numel() >= LARGE:
            each = [torch.batch_norm_update_stats(task.permute(0, 3, 1, 2), None, None, 0.0) for task in x]
            mean, variance = torch.stack([mean for mean, _ in each]), torch.stack([variance for _, variance in each])
        else:
            mean = x.sum((1, 2, 3)) * share
            variance = (x - _over_pixels(mean)).square_().sum((1, 2, 3)) * share
        ctx.save_for_backward(x, mean)
        return mean, variance

    @staticmethod
    def backward(ctx: Any, for_mean: Tensor, for_variance: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        share = x.shape[4] / x[0].numel()
        slope = 2 * share * for_variance
        return torch.addcmul(_over_pixels(share * for_mean - slope * mean), x, _over_pixels(slope))


def _over_pixels(per_channel: Tensor) -> Tensor:
    return per_channel[:, None, None, None, :]  # (task, 1, 1, 1, channel)
