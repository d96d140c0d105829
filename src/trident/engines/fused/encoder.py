"""A Conv4 encoder in four passes. `engines/kernels/coefficients.py` has their batch norm formulas."""

from dataclasses import dataclass

from torch import Tensor

from trident.engines.kernels.coefficients import Lines
from trident.engines.kernels.convolution import convolve, correlate
from trident.engines.kernels.first_coefficients import FirstLines, forward_lines, tangent_lines
from trident.engines.kernels.first_coefficients import gradient as first_gradient
from trident.engines.kernels.first_coefficients import tangent_gradient as first_tangent_gradient
from trident.engines.kernels.first_layer import PictureRows
from trident.engines.kernels.normalisation import activate, gradient_sums, input_gradient
from trident.engines.kernels.scaling import scale_into_range
from trident.nn.batch_norm import EPSILON
from trident.nn.conv4 import BLOCKS
from trident.nn.parameters import Parameters

GRADIENT_SIZE = 2.0  # largest entry of the scaled gradient of the features


@dataclass
class Layer:
    """What a layer keeps for the later passes."""

    x: Tensor  # (task, image, h, w, input)
    y: Tensor  # (task, image, h, w, channel)
    lines: Lines
    dp: Tensor | None = None  # gradient of the pooled output, scaled
    dy: Tensor | None = None  # gradient of y, scaled


@dataclass
class Encoded:
    """The results of a forward pass, and of the backward pass after it."""

    first: FirstLines
    winners: Tensor
    which: Tensor
    layers: list[Layer]
    features: Tensor  # (task, image, h, w, channel) float32
    first_sums: Tensor | None = None
    scale: Tensor | None = None  # (task,) of all gradients


@dataclass
class Tangents:
    """The results of a tangent pass: derivatives of all layers along a direction of the parameters."""

    scale: Tensor  # (task,)
    direction: Parameters  # scaled
    first: FirstLines
    outputs: list[Tensor]  # p' of the first layer and of those after it
    y: list[Tensor]
    tables: list[Tensor]
    features: Tensor  # float32, not scaled


@dataclass(frozen=True)
class FusedEncoder:
    """Gradients are written to `out`: a tensor (task, ...) for each parameter, all with the same task stride."""

    name: str
    slope: float
    precision: str

    def parts(self, parameters: Parameters, number: int) -> tuple[Tensor, Tensor, Tensor]:
        layer = f"{self.name}.{number}"
        return parameters[f"{layer}.weight"], parameters[f"{layer}.norm.gain"], parameters[f"{layer}.norm.shift"]

    def forward(self, parameters: Parameters, pictures: PictureRows) -> Encoded:
        weight, gain, offset = self.parts(parameters, 0)
        first = forward_lines(pictures, weight, gain, offset)
        winners, which, p = pictures.forward(weight, first.table, self.slope)
        layers = []
        for number in range(1, BLOCKS):
            weight, gain, offset = self.parts(parameters, number)
            y, partial = convolve(p, weight, self.precision, sums=True)
            lines = Lines(y[0, ..., 0].numel(), True, self.precision)
            lines.set_forward(partial, gain, offset)
            layers.append(Layer(p, y, lines))
            p = activate(y, lines, self.slope, pool=True)
        return Encoded(first, winners, which, layers, p.float())

    def backward(self, parameters: Parameters, encoded: Encoded, gradient: Tensor, out: Parameters) -> None:
        """The gradient of the parameters, given that of the features (task, image, h, w, channel)."""
        dp, encoded.scale, undo = scale_into_range(
            gradient.contiguous(), GRADIENT_SIZE, encoded.winners.dtype, self.precision
        )
        for number, layer in reversed(list(enumerate(encoded.layers, 1))):
            weight, _, _ = self.parts(parameters, number)
            dweight, *rest = self.parts(out, number)
            layer.dp = dp
            partial = gradient_sums(layer.y, dp, layer.lines, self.slope, pool=True)
            layer.lines.set_gradient(partial, undo, (rest[0], rest[1]))
            layer.dy = input_gradient(layer.y, dp, layer.lines, self.slope, pool=True)
            correlate(layer.x, layer.dy, self.precision, undo, dweight)
            dp, _ = convolve(layer.dy, weight, self.precision, transposed=True)
        total = encoded.first.rows.backward(encoded.which, dp, self.slope)
        encoded.first_sums = first_gradient(encoded.first, total, undo, self.parts(out, 0))

    def tangent(self, parameters: Parameters, encoded: Encoded, direction: Parameters, scale: Tensor) -> Tangents:
        """The derivative of the features along `direction`, which is already multiplied by `scale`."""
        weight1, gain1, offset1 = self.parts(direction, 0)
        first = tangent_lines(encoded.first, weight1, gain1, offset1)
        p1 = encoded.first.rows.tangent(
            weight1, encoded.first.table, first.table, encoded.winners, encoded.which, self.slope
        )
        tangents = Tangents(scale, direction, first, [p1], [], [], p1)
        for number, layer in enumerate(encoded.layers, 1):
            weight, _, _ = self.parts(parameters, number)
            weight1, gain1, offset1 = self.parts(direction, number)
            y1, partial = convolve(p1, weight, self.precision, second=(layer.x, weight1, None), sums_with=layer.y)
            table1 = layer.lines.tangent(partial, gain1, offset1)
            p1 = activate(layer.y, layer.lines, self.slope, pool=True, tangent=(y1, table1))
            tangents.y.append(y1)
            tangents.tables.append(table1)
            tangents.outputs.append(p1)
        tangents.features = p1 / scale[:, None, None, None, None]
        return tangents

    def tangent_backward(
        self, parameters: Parameters, encoded: Encoded, tangents: Tangents, gradient1: Tensor, out: Parameters
    ) -> None:
        """The tangent of the parameters' gradient, given the tangent of the features' gradient."""
        assert encoded.scale is not None and encoded.first_sums is not None
        # If the tangent of the features' gradient is large, scale all tangents down further to stay in range.
        dp1, smaller, undo = scale_into_range(
            gradient1.contiguous(),
            GRADIENT_SIZE,
            encoded.winners.dtype,
            self.precision,
            base=encoded.scale * tangents.scale,
        )
        for number, layer in reversed(list(enumerate(encoded.layers, 1))):
            assert layer.dp is not None and layer.dy is not None
            weight, _, _ = self.parts(parameters, number)
            weight1, _, _ = self.parts(tangents.direction, number)
            dweight, *rest = self.parts(out, number)
            y1, x1 = tangents.y[number - 1], tangents.outputs[number - 1]
            partial = gradient_sums(layer.y, layer.dp, layer.lines, self.slope, pool=True, tangent=(y1, dp1))
            table = layer.lines.tangent_gradient(
                partial, tangents.tables[number - 1], smaller, undo, (rest[0], rest[1])
            )
            dy1 = input_gradient(layer.y, layer.dp, layer.lines, self.slope, pool=True, tangent=(y1, dp1, table))
            correlate(layer.x, dy1, self.precision, undo, dweight, second=(x1, layer.dy, smaller))
            dp1, _ = convolve(dy1, weight, self.precision, second=(layer.dy, weight1, smaller), transposed=True)
        total1 = encoded.first.rows.backward(encoded.which, dp1, self.slope)
        first_tangent_gradient(
            encoded.first, tangents.first, total1, encoded.first_sums, smaller, undo, self.parts(out, 0)
        )

    def statistics(self, parameters: Parameters, encoded: Encoded) -> Parameters:
        """Mean and variance that each batch norm saw, (task, channel) each, in the form of `BatchNorm`."""
        tables = [encoded.first.table, *(layer.lines.forward for layer in encoded.layers)]
        seen: Parameters = {}
        for number, table in enumerate(tables):
            name = f"{self.name}.{number}"
            seen[f"{name}.norm.mean"] = table[:, 0] + parameters[f"{name}.bias"]
            seen[f"{name}.norm.variance"] = 1 / table[:, 1].square() - EPSILON
        return seen
