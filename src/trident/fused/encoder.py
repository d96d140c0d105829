"""A Conv4 encoder in four passes. `nn/kernels/coefficients.py` has the formulas of batch norm that they share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trident.fused.scaling import largest_of, power_of_two
from trident.nn.batch_norm import EPSILON
from trident.nn.conv4 import BLOCKS
from trident.nn.kernels.coefficients import Lines
from trident.nn.kernels.convolution import convolve, correlate
from trident.nn.kernels.first_layer import PictureRows
from trident.nn.kernels.normalisation import activate, gradient_sums, spread
from trident.nn.parameters import Parameters

GRADIENT_SIZE = 2.0  # largest entry of a scaled gradient where it enters the encoder


@dataclass
class Layer:
    """What a layer keeps for the passes to come."""

    x: Tensor  # (task, image, h, w, input)
    y: Tensor  # (task, image, h, w, channel)
    lines: Lines
    dp: Tensor | None = None  # gradient of the pooled output, scaled
    dy: Tensor | None = None  # gradient of y, scaled


@dataclass
class Encoded:
    """A forward pass, and the backward pass that followed it."""

    pictures: PictureRows
    covariance_weight: Tensor  # (task, 9 * image channel, channel)
    first_table: Tensor  # (task, 4, channel)
    winners: Tensor
    which: Tensor
    layers: list[Layer]
    features: Tensor  # (task, image, h, w, channel) float32
    first_sums: tuple[Tensor, Tensor] | None = None
    scale: Tensor | None = None  # (task,) of all gradients


@dataclass
class Moving:
    """A tangent pass: where everything goes when the parameters move."""

    scale: Tensor  # (task,)
    direction: Parameters  # scaled
    covariance_weight: Tensor
    first_table: Tensor
    outputs: list[Tensor]  # p' of the first layer and of those after it
    y: list[Tensor]
    tables: list[Tensor]
    features: Tensor  # float32, not scaled


@dataclass(frozen=True)
class FusedEncoder:
    name: str
    slope: float
    precision: str

    def parts(self, parameters: Parameters, number: int) -> tuple[Tensor, Tensor, Tensor]:
        layer = f"{self.name}.{number}"
        return parameters[f"{layer}.weight"], parameters[f"{layer}.norm.gain"], parameters[f"{layer}.norm.shift"]

    def forward(self, parameters: Parameters, pictures: PictureRows) -> Encoded:
        weight, gain, offset = self.parts(parameters, 0)
        flat = weight.flatten(1, 3)  # (task, 9 * image channel, channel)
        covariance_weight = _product(pictures.covariance, flat)
        mean = (pictures.mean[:, :, None] * flat).sum(1)
        rstd = torch.rsqrt((flat * covariance_weight).sum(1).clamp(min=0) + EPSILON)
        scale = gain * rstd
        table = torch.stack([mean, rstd, scale, offset - mean * scale], 1)
        winners, which, p = pictures.forward(weight, table, self.slope)
        layers = []
        for number in range(1, BLOCKS):
            weight, gain, offset = self.parts(parameters, number)
            y, partial = convolve(p, weight, self.precision, sums=True)
            lines = Lines(y[0, ..., 0].numel(), True, self.precision)
            lines.set_forward(partial, gain, offset)
            layers.append(Layer(p, y, lines))
            p = activate(y, lines, self.slope, pool=True)
        return Encoded(pictures, covariance_weight, table, winners, which, layers, p.float())

    def backward(self, parameters: Parameters, encoded: Encoded, gradient: Tensor) -> Parameters:
        """The parameters' gradient, from that of the features (task, image, h, w, channel)."""
        encoded.scale = power_of_two(largest_of(gradient), GRADIENT_SIZE)
        undo = 1 / encoded.scale
        dp = (gradient * encoded.scale[:, None, None, None, None]).to(encoded.winners.dtype).contiguous()
        found: Parameters = {}
        for number, layer in reversed(list(enumerate(encoded.layers, 1))):
            weight, _, _ = self.parts(parameters, number)
            layer.dp = dp
            layer.lines.set_gradient(gradient_sums(layer.y, dp, layer.lines, self.slope, pool=True))
            layer.dy = spread(layer.y, dp, layer.lines, self.slope, pool=True)
            name = f"{self.name}.{number}"
            found[f"{name}.weight"] = correlate(layer.x, layer.dy, self.precision, undo)
            found[f"{name}.norm.gain"] = layer.lines.gradient[:, 0] * undo[:, None]
            found[f"{name}.norm.shift"] = layer.lines.gradient[:, 1] * undo[:, None]
            dp, _ = convolve(layer.dy, weight, self.precision, turned=True)
        encoded.first_sums = with_patches, doffset = encoded.pictures.backward(encoded.which, dp, self.slope)
        scale = encoded.first_table[:, 2]
        dgain = self._first_dgain(parameters, encoded, with_patches, doffset)
        dweight = self._first_gradient(encoded, with_patches, doffset, dgain) * (scale * undo[:, None])[:, None]
        found[f"{self.name}.0.weight"] = dweight.view(parameters[f"{self.name}.0.weight"].shape)
        found[f"{self.name}.0.norm.gain"] = dgain * undo[:, None]
        found[f"{self.name}.0.norm.shift"] = doffset * undo[:, None]
        return found

    def _first_dgain(self, parameters: Parameters, encoded: Encoded, with_patches: Tensor, doffset: Tensor) -> Tensor:
        """Sum of delta yhat; that of delta y is the weight times the sum of patch times delta."""
        mean, rstd, _, _ = encoded.first_table.unbind(1)
        weight, _, _ = self.parts(parameters, 0)
        return rstd * ((with_patches * weight.flatten(1, 3)).sum(1) - mean * doffset)

    @staticmethod
    def _first_gradient(encoded: Encoded, with_patches: Tensor, doffset: Tensor, dgain: Tensor) -> Tensor:
        """Sum over all pixels of patch times (delta - doffset / M - yhat dgain / M): (task, 9 * channel, output)."""
        rstd = encoded.first_table[:, 1]
        patch_mean = encoded.pictures.mean[:, :, None]
        return with_patches - doffset[:, None] * patch_mean - (dgain * rstd)[:, None] * encoded.covariance_weight

    def tangent(self, parameters: Parameters, encoded: Encoded, direction: Parameters, scale: Tensor) -> Moving:
        """How the features move when the parameters move along `direction`, which comes multiplied by `scale`."""
        weight1, gain1, offset1 = self.parts(direction, 0)
        flat1 = weight1.flatten(1, 3)
        mean, rstd, line, _ = encoded.first_table.unbind(1)
        mean1 = (encoded.pictures.mean[:, :, None] * flat1).sum(1)
        both = rstd * (encoded.covariance_weight * flat1).sum(1)
        line1 = gain1 * rstd - line * rstd * both
        table1 = torch.stack([mean1, both, line1, offset1 - mean1 * line - mean * line1], 1)
        p1 = encoded.pictures.tangent(weight1, encoded.first_table, table1, encoded.winners, encoded.which, self.slope)
        covariance_weight1 = _product(encoded.pictures.covariance, flat1)
        moving = Moving(scale, direction, covariance_weight1, table1, [p1], [], [], p1)
        for number, layer in enumerate(encoded.layers, 1):
            weight, gain, _ = self.parts(parameters, number)
            weight1, gain1, offset1 = self.parts(direction, number)
            y1, partial = convolve(p1, weight, self.precision, second=(layer.x, weight1), sums_with=layer.y)
            table1 = layer.lines.tangent(partial, gain, gain1, offset1)
            p1 = activate(layer.y, layer.lines, self.slope, pool=True, tangent=(y1, table1))
            moving.y.append(y1)
            moving.tables.append(table1)
            moving.outputs.append(p1)
        moving.features = p1.float() / scale[:, None, None, None, None]
        return moving

    def tangent_backward(
        self, parameters: Parameters, encoded: Encoded, moving: Moving, gradient1: Tensor
    ) -> Parameters:
        """How the parameters' gradient moves, given how the features' gradient does."""
        assert encoded.scale is not None and encoded.first_sums is not None
        both = encoded.scale * moving.scale
        # Tangents may have to be taken smaller, where the features' gradient moves more than its size suggests.
        smaller = power_of_two(largest_of(gradient1) * both, GRADIENT_SIZE).clamp(max=1)
        both = both * smaller
        undo = 1 / both
        dp1 = (gradient1 * both[:, None, None, None, None]).to(encoded.winners.dtype).contiguous()
        found: Parameters = {}
        for number, layer in reversed(list(enumerate(encoded.layers, 1))):
            assert layer.dp is not None and layer.dy is not None
            weight, _, _ = self.parts(parameters, number)
            weight1, _, _ = self.parts(moving.direction, number)
            y1, x1 = moving.y[number - 1], moving.outputs[number - 1]
            partial = gradient_sums(layer.y, layer.dp, layer.lines, self.slope, pool=True, tangent=(y1, dp1))
            table = layer.lines.tangent_gradient(partial, moving.tables[number - 1], smaller)
            dy1 = spread(layer.y, layer.dp, layer.lines, self.slope, pool=True, tangent=(y1, dp1, table))
            name = f"{self.name}.{number}"
            found[f"{name}.weight"] = correlate(layer.x, dy1, self.precision, undo, second=(x1, layer.dy, smaller))
            found[f"{name}.norm.gain"] = table[:, 0] * undo[:, None]
            found[f"{name}.norm.shift"] = table[:, 1] * undo[:, None]
            second = (layer.dy, weight1 * smaller[:, None, None, None, None])
            dp1, _ = convolve(dy1, weight, self.precision, second=second, turned=True)
        with_patches, doffset = encoded.first_sums
        with_patches1, doffset1 = encoded.pictures.backward(encoded.which, dp1, self.slope)
        rstd, line = encoded.first_table[:, 1], encoded.first_table[:, 2]
        mean1, correlation, line1, _ = (moving.first_table * smaller[:, None, None]).unbind(1)
        dgain = self._first_dgain(parameters, encoded, with_patches, doffset)
        dgain1 = self._first_dgain(parameters, encoded, with_patches1, doffset1)
        weight1, _, _ = self.parts(moving.direction, 0)
        with_y1 = (with_patches * weight1.flatten(1, 3)).sum(1) * smaller[:, None]
        dgain1 += rstd * (with_y1 - mean1 * doffset) - rstd * correlation * dgain
        # Mean of patch times yhat', where yhat' = r (y' - mean') - r correlation yhat.
        moved = rstd[:, None] * (
            moving.covariance_weight * smaller[:, None, None]
            - (rstd * correlation)[:, None] * encoded.covariance_weight
        )
        dweight1 = line1[:, None] * self._first_gradient(encoded, with_patches, doffset, dgain)
        dweight1 += line[:, None] * (
            self._first_gradient(encoded, with_patches1, doffset1, dgain1) - dgain[:, None] * moved
        )
        found[f"{self.name}.0.weight"] = (dweight1 * undo[:, None, None]).view(
            parameters[f"{self.name}.0.weight"].shape
        )
        found[f"{self.name}.0.norm.gain"] = dgain1 * undo[:, None]
        found[f"{self.name}.0.norm.shift"] = doffset1 * undo[:, None]
        return found

    def statistics(self, parameters: Parameters, encoded: Encoded) -> Parameters:
        """Mean and variance that each batch norm saw, (task, channel) each, as `BatchNorm` reports them."""
        tables = [encoded.first_table, *(layer.lines.forward for layer in encoded.layers)]
        seen: Parameters = {}
        for number, table in enumerate(tables):
            name = f"{self.name}.{number}"
            seen[f"{name}.norm.mean"] = table[:, 0] + parameters[f"{name}.bias"]
            seen[f"{name}.norm.variance"] = 1 / table[:, 1].square() - EPSILON
        return seen


def _product(covariance: Tensor, weight: Tensor) -> Tensor:
    """In full precision whatever the matrix products' setting: smooth images make this cancel."""
    return (covariance[:, :, :, None] * weight[:, None]).sum(2)
