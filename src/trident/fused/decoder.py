"""The decoder's convolutions in four passes, down to the squared error of the images they make."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from trident.fused.scaling import stored
from trident.nn.batch_norm import EPSILON
from trident.nn.conv4 import BLOCKS
from trident.nn.kernels.coefficients import Lines
from trident.nn.kernels.convolution import convolve, correlate
from trident.nn.kernels.first_layer import PictureRows
from trident.nn.kernels.normalisation import activate, gradient_sums, spread
from trident.nn.kernels.picture import compare, fold
from trident.nn.parameters import Parameters

NO_ACTIVATION = 1.0  # the sigmoid at the end belongs to the comparison


@dataclass
class Layer:
    x: Tensor  # before upsampling
    y: Tensor
    lines: Lines
    dp: Tensor | None = None
    dy: Tensor | None = None


@dataclass
class Decoded:
    pictures: PictureRows
    layers: list[Layer]
    delta: Tensor  # gradient of the squared error with respect to what goes into the sigmoid
    error: Tensor  # (task,): summed over images


@dataclass
class Moving:
    scale: Tensor
    direction: Parameters
    inputs: list[Tensor]
    y: list[Tensor]
    tables: list[Tensor]
    delta: Tensor


@dataclass(frozen=True)
class FusedDecoder:
    name: str
    sizes: tuple[int, ...]  # after each upsampling
    image_channels: int
    norm: bool
    slope: float
    precision: str

    def parts(self, parameters: Parameters, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weight, gain and offset of a layer; the last one's outputs padded to four, as the images' channels are."""
        layer = f"{self.name}.{number}"
        weight = parameters[f"{layer}.weight"]
        if self.norm:
            gain, offset = parameters[f"{layer}.norm.gain"], parameters[f"{layer}.norm.shift"]
        else:
            gain = offset = parameters[f"{layer}.bias"]
        if number == BLOCKS - 1:
            padding = (0, 4 - self.image_channels)
            weight, gain, offset = (F.pad(x, padding) for x in (weight, gain, offset))
        return weight, gain, offset

    def _slope(self, number: int) -> float:
        return NO_ACTIVATION if number == BLOCKS - 1 else self.slope

    def forward(self, parameters: Parameters, hidden: Tensor, pictures: PictureRows) -> Decoded:
        """`hidden` is (task, image, h, w, channel); `pictures` are the images to be made."""
        x = stored(hidden, pictures.pictures.padded.dtype, self.precision)
        layers: list[Layer] = []
        for number, size in enumerate(self.sizes):
            weight, gain, offset = self.parts(parameters, number)
            y, partial = convolve(x, weight, self.precision, size=size, sums=self.norm)
            lines = Lines(y[0, ..., 0].numel(), self.norm, self.precision)
            lines.set_forward(partial, gain, offset)
            layers.append(Layer(x, y, lines))
            if number < BLOCKS - 1:
                x = activate(y, lines, self.slope, pool=False)
        delta, error = compare(layers[-1].y, layers[-1].lines, pictures.pictures, pictures.first)
        assert error is not None
        return Decoded(pictures, layers, delta, error)

    def backward(self, parameters: Parameters, decoded: Decoded, weight_of_error: float) -> tuple[Tensor, Parameters]:
        """Gradients of `weight_of_error` times the squared error: of the hidden features, and of the parameters."""
        dp = decoded.delta
        undo = decoded.error.new_full(decoded.error.shape, weight_of_error)
        found: Parameters = {}
        for number, layer in reversed(list(enumerate(decoded.layers))):
            weight, _, _ = self.parts(parameters, number)
            layer.dp = dp
            layer.lines.set_gradient(gradient_sums(layer.y, dp, layer.lines, self._slope(number), pool=False))
            layer.dy = spread(layer.y, dp, layer.lines, self._slope(number), pool=False)
            dweight = correlate(layer.x, layer.dy, self.precision, undo)
            found |= self._named(number, dweight, layer.lines.gradient[:, 0], layer.lines.gradient[:, 1], undo)
            dx, _ = convolve(layer.dy, weight, self.precision, turned=True)
            dp = fold(dx, layer.x.shape[2])
        return dp.float() * weight_of_error, found

    def _named(self, number: int, weight: Tensor, gain: Tensor, offset: Tensor, undo: Tensor) -> Parameters:
        layer = f"{self.name}.{number}"
        if number == BLOCKS - 1:
            weight, gain, offset = (x[..., : self.image_channels] for x in (weight, gain, offset))
        if self.norm:
            named = {f"{layer}.norm.gain": gain * undo[:, None], f"{layer}.norm.shift": offset * undo[:, None]}
        else:
            named = {f"{layer}.bias": offset * undo[:, None]}
        return {f"{layer}.weight": weight} | named

    def tangent(
        self, parameters: Parameters, decoded: Decoded, hidden1: Tensor, direction: Parameters, scale: Tensor
    ) -> Moving:
        """How everything moves with the hidden features and the parameters; `direction` comes multiplied by `scale`."""
        x1 = stored(hidden1 * scale[:, None, None, None, None], decoded.delta.dtype, self.precision)
        moving = Moving(scale, direction, [], [], [], decoded.delta)
        for number, layer in enumerate(decoded.layers):
            weight, gain, _ = self.parts(parameters, number)
            weight1, gain1, offset1 = self.parts(direction, number)
            y1, partial = convolve(
                x1, weight, self.precision, second=(layer.x, weight1), size=layer.y.shape[2],
                sums_with=layer.y if self.norm else None,
            )  # fmt: skip
            table1 = layer.lines.tangent(partial, gain, gain1, offset1)
            moving.inputs.append(x1)
            moving.y.append(y1)
            moving.tables.append(table1)
            if number < BLOCKS - 1:
                x1 = activate(layer.y, layer.lines, self.slope, pool=False, tangent=(y1, table1))
        last = decoded.layers[-1]
        moving.delta, _ = compare(
            last.y, last.lines, decoded.pictures.pictures, decoded.pictures.first, (moving.y[-1], moving.tables[-1])
        )
        return moving

    def tangent_backward(
        self, parameters: Parameters, decoded: Decoded, moving: Moving, weight_of_error: float
    ) -> tuple[Tensor, Parameters]:
        undo = weight_of_error / moving.scale
        ones = moving.scale.new_ones(moving.scale.shape)
        dp1 = moving.delta
        found: Parameters = {}
        for number, layer in reversed(list(enumerate(decoded.layers))):
            assert layer.dp is not None and layer.dy is not None
            weight, _, _ = self.parts(parameters, number)
            weight1, _, _ = self.parts(moving.direction, number)
            slope, y1, x1 = self._slope(number), moving.y[number], moving.inputs[number]
            partial = gradient_sums(layer.y, layer.dp, layer.lines, slope, pool=False, tangent=(y1, dp1))
            table = layer.lines.tangent_gradient(partial, moving.tables[number], ones)
            dy1 = spread(layer.y, layer.dp, layer.lines, slope, pool=False, tangent=(y1, dp1, table))
            dweight = correlate(layer.x, dy1, self.precision, undo, second=(x1, layer.dy, ones))
            found |= self._named(number, dweight, table[:, 0], table[:, 1], undo)
            dx1, _ = convolve(dy1, weight, self.precision, second=(layer.dy, weight1), turned=True)
            dp1 = fold(dx1, layer.x.shape[2])
        return dp1.float() * undo[:, None, None, None, None], found

    def statistics(self, parameters: Parameters, decoded: Decoded) -> Parameters:
        seen: Parameters = {}
        if self.norm:
            for number, layer in enumerate(decoded.layers):
                name = f"{self.name}.{number}"
                bias = parameters[f"{name}.bias"]
                table = layer.lines.forward[..., : bias.shape[1]]
                seen[f"{name}.norm.mean"] = table[:, 0] + bias
                seen[f"{name}.norm.variance"] = 1 / table[:, 1].square() - EPSILON
        return seen
