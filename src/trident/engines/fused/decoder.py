"""The decoder's convolutions in four passes, including the squared error of the decoded images."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from trident.engines.kernels.coefficients import Lines
from trident.engines.kernels.convolution import convolve, correlate
from trident.engines.kernels.first_layer import PictureRows
from trident.engines.kernels.normalisation import activate, gradient_sums, input_gradient
from trident.engines.kernels.picture import squared_error_gradient, upsample_backward
from trident.engines.kernels.scaling import stored
from trident.nn.batch_norm import EPSILON
from trident.nn.conv4 import BLOCKS
from trident.nn.parameters import Parameters

LAST = BLOCKS - 1
NO_ACTIVATION = 1.0  # `squared_error_gradient` applies the final sigmoid


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
    parameters: Parameters  # padded
    layers: list[Layer]
    delta: Tensor  # gradient of the squared error with respect to the sigmoid's input
    error: Tensor  # (task,): summed over images


@dataclass
class Tangents:
    scale: Tensor
    direction: Parameters  # padded and scaled
    inputs: list[Tensor]
    y: list[Tensor]
    tables: list[Tensor]
    delta: Tensor


@dataclass(frozen=True)
class FusedDecoder:
    """Gradients are written to `out`: a tensor (task, ...) for each parameter, all with the same task stride."""

    name: str
    sizes: tuple[int, ...]  # after each upsampling
    image_channels: int
    norm: bool
    slope: float
    precision: str

    def parts(self, parameters: Parameters, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weight, gain and offset of a layer. Without batch norm the offset is the bias and the gain is unused."""
        layer = f"{self.name}.{number}"
        weight = parameters[f"{layer}.weight"]
        if self.norm:
            return weight, parameters[f"{layer}.norm.gain"], parameters[f"{layer}.norm.shift"]
        return weight, parameters[f"{layer}.bias"], parameters[f"{layer}.bias"]

    def _padded(self, parameters: Parameters) -> Parameters:
        """Pad the last layer's outputs to four channels, like the images."""
        last = {key: value for key, value in parameters.items() if key.startswith(f"{self.name}.{LAST}.")}
        return parameters | {key: F.pad(value, (0, 4 - self.image_channels)) for key, value in last.items()}

    def _slope(self, number: int) -> float:
        return NO_ACTIVATION if number == LAST else self.slope

    def forward(self, parameters: Parameters, hidden: Tensor, pictures: PictureRows) -> Decoded:
        """`hidden` is (task, image, h, w, channel); `pictures` are the targets."""
        parameters = self._padded(parameters)
        x = stored(hidden, pictures.pictures.padded.dtype, self.precision)
        layers: list[Layer] = []
        for number, size in enumerate(self.sizes):
            weight, gain, offset = self.parts(parameters, number)
            y, partial = convolve(x, weight, self.precision, size=size, sums=self.norm)
            lines = Lines(y[0, ..., 0].numel(), self.norm, self.precision)
            lines.set_forward(partial, gain, offset)
            layers.append(Layer(x, y, lines))
            if number < LAST:
                x = activate(y, lines, self.slope, pool=False)
        delta, error = squared_error_gradient(layers[-1].y, layers[-1].lines, pictures.pictures, pictures.first)
        assert error is not None
        return Decoded(pictures, parameters, layers, delta, error)

    def backward(self, decoded: Decoded, weight_of_error: float, out: Parameters) -> Tensor:
        """The gradient of `weight_of_error` times the squared error. Returns the gradient of the hidden features."""
        dp = decoded.delta
        undo = decoded.error.new_full(decoded.error.shape, weight_of_error)
        for number, layer in reversed(list(enumerate(decoded.layers))):
            weight, _, _ = self.parts(decoded.parameters, number)
            dweight, dgain, doffset = self.parts(out, number)
            layer.dp = dp
            partial = gradient_sums(layer.y, dp, layer.lines, self._slope(number), pool=False)
            layer.lines.set_gradient(partial, undo, (dgain, doffset))
            layer.dy = input_gradient(layer.y, dp, layer.lines, self._slope(number), pool=False)
            self._correlate(layer, layer.dy, undo, dweight)
            dx, _ = convolve(layer.dy, weight, self.precision, transposed=True)
            dp = upsample_backward(dx, layer.x.shape[2])
        return dp.float() * weight_of_error

    def _correlate(
        self, layer: Layer, dy: Tensor, undo: Tensor, out: Tensor, second: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> None:
        if out.shape[4] == dy.shape[4]:
            correlate(layer.x, dy, self.precision, undo, out, second)
        else:  # the last layer is padded
            padded = out.new_empty(*out.shape[:4], dy.shape[4])
            correlate(layer.x, dy, self.precision, undo, padded, second)
            out.copy_(padded[..., : out.shape[4]])

    def tangent(self, decoded: Decoded, hidden1: Tensor, direction: Parameters, scale: Tensor) -> Tangents:
        """Derivatives along `hidden1` and `direction`, which is already multiplied by `scale`."""
        direction = self._padded(direction)
        x1 = stored(hidden1 * scale[:, None, None, None, None], decoded.delta.dtype, self.precision)
        tangents = Tangents(scale, direction, [], [], [], decoded.delta)
        for number, layer in enumerate(decoded.layers):
            weight, _, _ = self.parts(decoded.parameters, number)
            weight1, gain1, offset1 = self.parts(direction, number)
            y1, partial = convolve(
                x1, weight, self.precision, second=(layer.x, weight1, None), size=layer.y.shape[2],
                sums_with=layer.y if self.norm else None,
            )  # fmt: skip
            table1 = layer.lines.tangent(partial, gain1, offset1)
            tangents.inputs.append(x1)
            tangents.y.append(y1)
            tangents.tables.append(table1)
            if number < LAST:
                x1 = activate(layer.y, layer.lines, self.slope, pool=False, tangent=(y1, table1))
        last = decoded.layers[-1]
        tangents.delta, _ = squared_error_gradient(
            last.y, last.lines, decoded.pictures.pictures, decoded.pictures.first, (tangents.y[-1], tangents.tables[-1])
        )
        return tangents

    def tangent_backward(self, decoded: Decoded, tangents: Tangents, weight_of_error: float, out: Parameters) -> Tensor:
        undo = weight_of_error / tangents.scale
        ones = tangents.scale.new_ones(tangents.scale.shape)
        dp1 = tangents.delta
        for number, layer in reversed(list(enumerate(decoded.layers))):
            assert layer.dp is not None and layer.dy is not None
            weight, _, _ = self.parts(decoded.parameters, number)
            weight1, _, _ = self.parts(tangents.direction, number)
            dweight, dgain, doffset = self.parts(out, number)
            slope, y1, x1 = self._slope(number), tangents.y[number], tangents.inputs[number]
            partial = gradient_sums(layer.y, layer.dp, layer.lines, slope, pool=False, tangent=(y1, dp1))
            table = layer.lines.tangent_gradient(partial, tangents.tables[number], ones, undo, (dgain, doffset))
            dy1 = input_gradient(layer.y, layer.dp, layer.lines, slope, pool=False, tangent=(y1, dp1, table))
            self._correlate(layer, dy1, undo, dweight, (x1, layer.dy, ones))
            dx1, _ = convolve(dy1, weight, self.precision, second=(layer.dy, weight1, None), transposed=True)
            dp1 = upsample_backward(dx1, layer.x.shape[2])
        return dp1 * undo[:, None, None, None, None]

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
