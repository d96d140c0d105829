"""A Conv4 encoder in four passes. `nn/kernels/coefficients.py` has the formulas of batch norm that they share."""

from dataclasses import dataclass

from torch import Tensor

from trident.engines.kernels.coefficients import Lines
from trident.engines.kernels.convolution import convolve, correlate
from trident.engines.kernels.first_coefficients import FirstLines, forward_lines, tangent_lines
from trident.engines.kernels.first_coefficients import gradient as first_gradient
from trident.engines.kernels.first_coefficients import tangent_gradient as first_tangent_gradient
from trident.engines.kernels.first_layer import PictureRows
from trident.engines.kernels.normalisation import activate, gradient_sums, spread
from trident.engines.kernels.scaling import enter
from trident.nn.batch_norm import EPSILON
from trident.nn.conv4 import BLOCKS
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

    first: FirstLines
    winners: Tensor
    which: Tensor
    layers: list[Layer]
    features: Tensor  # (task, image, h, w, channel) float32
    first_sums: Tensor | None = None
    scale: Tensor | None = None  # (task,) of all gradients


@dataclass
class Moving:
    """A tangent pass: where everything goes when the parameters move."""

    scale: Tensor  # (task,)
    direction: Parameters  # scaled
    first: FirstLines
    outputs: list[Tensor]  # p' of the first layer and of those after it
    y: list[Tensor]
    tables: list[Tensor]
    features: Tensor  # float32, not scaled


@dataclass(frozen=True)
class FusedEncoder:
    """Gradients are written to `out`, a place for each parameter, (task, ...) with one task stride."""

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
        """The parameters' gradient, from that of the features (task, image, h, w, channel)."""
        dp, encoded.scale, undo = enter(gradient.contiguous(), GRADIENT_SIZE, encoded.winners.dtype, self.precision)
        for number, layer in reversed(list(enumerate(encoded.layers, 1))):
            weight, _, _ = self.parts(parameters, number)
            dweight, *rest = self.parts(out, number)
            layer.dp = dp
            partial = gradient_sums(layer.y, dp, layer.lines, self.slope, pool=True)
            layer.lines.set_gradient(partial, undo, (rest[0], rest[1]))
            layer.dy = spread(layer.y, dp, layer.lines, self.slope, pool=True)
            correlate(layer.x, layer.dy, self.precision, undo, dweight)
            dp, _ = convolve(layer.dy, weight, self.precision, turned=True)
        total = encoded.first.rows.backward(encoded.which, dp, self.slope)
        encoded.first_sums = first_gradient(encoded.first, total, undo, self.parts(out, 0))

    def tangent(self, parameters: Parameters, encoded: Encoded, direction: Parameters, scale: Tensor) -> Moving:
        """How the features move when the parameters move along `direction`, which comes multiplied by `scale`."""
        weight1, gain1, offset1 = self.parts(direction, 0)
        first = tangent_lines(encoded.first, weight1, gain1, offset1)
        p1 = encoded.first.rows.tangent(
            weight1, encoded.first.table, first.table, encoded.winners, encoded.which, self.slope
        )
        moving = Moving(scale, direction, first, [p1], [], [], p1)
        for number, layer in enumerate(encoded.layers, 1):
            weight, _, _ = self.parts(parameters, number)
            weight1, gain1, offset1 = self.parts(direction, number)
            y1, partial = convolve(p1, weight, self.precision, second=(layer.x, weight1, None), sums_with=layer.y)
            table1 = layer.lines.tangent(partial, gain1, offset1)
            p1 = activate(layer.y, layer.lines, self.slope, pool=True, tangent=(y1, table1))
            moving.y.append(y1)
            moving.tables.append(table1)
            moving.outputs.append(p1)
        moving.features = p1 / scale[:, None, None, None, None]
        return moving

    def tangent_backward(
        self, parameters: Parameters, encoded: Encoded, moving: Moving, gradient1: Tensor, out: Parameters
    ) -> None:
        """How the parameters' gradient moves, given how the features' gradient does."""
        assert encoded.scale is not None and encoded.first_sums is not None
        # Tangents may have to be taken smaller, where the features' gradient moves more than its size suggests.
        dp1, smaller, undo = enter(
            gradient1.contiguous(),
            GRADIENT_SIZE,
            encoded.winners.dtype,
            self.precision,
            base=encoded.scale * moving.scale,
        )
        for number, layer in reversed(list(enumerate(encoded.layers, 1))):
            assert layer.dp is not None and layer.dy is not None
            weight, _, _ = self.parts(parameters, number)
            weight1, _, _ = self.parts(moving.direction, number)
            dweight, *rest = self.parts(out, number)
            y1, x1 = moving.y[number - 1], moving.outputs[number - 1]
            partial = gradient_sums(layer.y, layer.dp, layer.lines, self.slope, pool=True, tangent=(y1, dp1))
            table = layer.lines.tangent_gradient(partial, moving.tables[number - 1], smaller, undo, (rest[0], rest[1]))
            dy1 = spread(layer.y, layer.dp, layer.lines, self.slope, pool=True, tangent=(y1, dp1, table))
            correlate(layer.x, dy1, self.precision, undo, dweight, second=(x1, layer.dy, smaller))
            dp1, _ = convolve(dy1, weight, self.precision, second=(layer.dy, weight1, smaller), turned=True)
        total1 = encoded.first.rows.backward(encoded.which, dp1, self.slope)
        first_tangent_gradient(
            encoded.first, moving.first, total1, encoded.first_sums, smaller, undo, self.parts(out, 0)
        )

    def statistics(self, parameters: Parameters, encoded: Encoded) -> Parameters:
        """Mean and variance that each batch norm saw, (task, channel) each, as `BatchNorm` reports them."""
        tables = [encoded.first.table, *(layer.lines.forward for layer in encoded.layers)]
        seen: Parameters = {}
        for number, table in enumerate(tables):
            name = f"{self.name}.{number}"
            seen[f"{name}.norm.mean"] = table[:, 0] + parameters[f"{name}.bias"]
            seen[f"{name}.norm.variance"] = 1 / table[:, 1].square() - EPSILON
        return seen
