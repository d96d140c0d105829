"""Each kernel of the fused engine against float64 on its own inputs. Needs an NVIDIA GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu import gpu, gpu_nan

STORAGE = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BAR = {"fp32": 1e-5, "tf32": 1e-3, "fp16": 1e-3, "bf16": 5e-3}  # of a single kernel, relative
precisions = pytest.mark.parametrize("precision", BAR)
SLOPE = 0.2


def products(precision: str) -> str:
    return "tf32x3" if precision == "fp32" else "tf32"


def close(actual: Tensor, expected: Tensor, precision: str) -> None:
    error = float((actual.double() - expected.detach()).norm() / expected.detach().norm())
    assert error < BAR[precision], f"relative error {error:.1e}"


def in_store(x: Tensor, precision: str) -> Tensor:
    """As the engine keeps what its products read."""
    from trident.engines.kernels.scaling import stored

    return stored(x, STORAGE[precision], products(precision))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def plain_convolution(x: Tensor, weight: Tensor, size: int | None = None) -> Tensor:
    """Task after task, in the precision of what comes in."""

    def one(x: Tensor, weight: Tensor) -> Tensor:
        x = x.permute(0, 3, 1, 2)
        x = x if size is None else F.interpolate(x, size=size, mode="nearest")
        return F.conv2d(x, weight.permute(3, 2, 0, 1), padding=1).permute(0, 2, 3, 1)

    return torch.stack([one(a, b) for a, b in zip(x, weight, strict=True)])


# Channels, sizes before and after upsampling: the encoders', the decoder's, and its last layer's.
SHAPES = [(32, 32, 21, None), (16, 16, 7, None), (64, 64, 10, None), (32, 32, 5, 10), (32, 32, 10, 21), (32, 4, 12, 24)]


@gpu
@pytest.mark.parametrize(
    ("precision", "inputs", "outputs", "height", "size"),
    # 64 channels are for 16 bits only.
    [(p, *shape) for p in BAR for shape in SHAPES if shape[0] < 64 or p in ("fp16", "bf16")],
)
def test_convolutions(precision: str, inputs: int, outputs: int, height: int, size: int | None) -> None:
    from trident.engines.kernels.convolution import convolve, correlate

    x, x2 = (in_store(randn(3, 5, height, height, inputs, seed=i), precision) for i in (0, 1))
    weight, weight2 = (randn(3, 3, 3, inputs, outputs, seed=i) / (9 * inputs) ** 0.5 for i in (2, 3))
    rounded, rounded2 = in_store(weight, precision).double(), in_store(weight2, precision).double()
    inputs64 = [x.double().requires_grad_(), rounded.requires_grad_()]
    expected = plain_convolution(inputs64[0], inputs64[1], size)
    y, partial = convolve(x, weight, products(precision), size=size, sums=True)
    close(y, expected, precision)
    assert partial is not None
    close(partial.sum(1), torch.stack([expected.sum((1, 2, 3)), expected.square().sum((1, 2, 3))], 1), precision)

    gradient = in_store(randn(*y.shape, seed=4), precision)
    for_x, for_weight = torch.autograd.grad(expected, inputs64, gradient.double())
    ones = torch.ones(3, device="cuda")
    found = torch.empty(3, 2 * for_weight[0].numel(), device="cuda")[:, : for_weight[0].numel()].view_as(for_weight)
    correlate(x, gradient, products(precision), ones, found)
    close(found, for_weight, precision)
    if size is None:
        close(convolve(gradient, weight, products(precision), transposed=True)[0], for_x, precision)
    else:
        from trident.engines.kernels.picture import upsample_backward

        back, _ = convolve(gradient, weight, products(precision), transposed=True)
        assert float((upsample_backward(back, height).double() - for_x).norm() / for_x.norm()) < 2 * BAR[precision]

    both = expected.detach() + plain_convolution(x2.double(), rounded2, size)
    y, partial = convolve(x, weight, products(precision), second=(x2, weight2, None), size=size, sums_with=gradient)
    close(y, both, precision)
    assert partial is not None
    sums = torch.stack([both.sum((1, 2, 3)), (both * gradient.double()).sum((1, 2, 3))], 1)
    assert float((partial.sum(1).double() - sums).abs().max()) < 50 * BAR[precision] * float(sums.abs().max())
    second_gradient = in_store(randn(*y.shape, seed=5), precision)
    factor = torch.tensor([1.0, 0.5, 0.25], device="cuda")
    pair = plain_weight_gradient(x2.double() * factor[:, None, None, None, None], second_gradient.double(), size)
    correlate(x, gradient, products(precision), 2 * ones, found, second=(x2, second_gradient, factor))
    close(found, 2 * (for_weight + pair), precision)
    if size is None:
        halves = plain_convolution(second_gradient.double() * factor[:, None, None, None, None], transposed(rounded2))
        second = (second_gradient, weight2, factor)
        close(convolve(gradient, weight, products(precision), second, transposed=True)[0], for_x + halves, precision)


def transposed(weight: Tensor) -> Tensor:
    return weight.flip(1, 2).transpose(3, 4)


def plain_weight_gradient(x: Tensor, gradient: Tensor, size: int | None) -> Tensor:
    weight = torch.zeros(len(x), 3, 3, x.shape[4], gradient.shape[4], device=x.device, dtype=x.dtype)
    return torch.autograd.grad(plain_convolution(x, weight.requires_grad_(), size), weight, gradient)[0]


def plain_norm(y: Tensor, gain: Tensor, offset: Tensor, pool: bool, slope: float, norm: bool) -> Tensor:
    """Batch norm or bias, activation, pooling: (task, image, h, w, channel)."""

    def one(y: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
        y = y.permute(0, 3, 1, 2)
        y = F.batch_norm(y, None, None, gain, offset, training=True) if norm else y + offset[:, None, None]
        y = F.leaky_relu(y, slope)
        return (F.max_pool2d(y, 2) if pool else y).permute(0, 2, 3, 1)

    return torch.stack([one(*each) for each in zip(y, gain, offset, strict=True)])


@gpu
@precisions
@pytest.mark.parametrize(("pool", "norm"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("height", [10, 21])
def test_norm_activation_and_pooling_in_four_passes(precision: str, pool: bool, norm: bool, height: int) -> None:
    from trident.engines.kernels.coefficients import Lines
    from trident.engines.kernels.normalisation import activate, gradient_sums, input_gradient

    dtype = STORAGE[precision]
    y, y1 = (randn(3, 4, height, height, 32, seed=i).to(dtype) for i in (0, 1))
    gain, offset, gain1, offset1 = (randn(3, 32, seed=i) for i in (2, 3, 4, 5))
    inputs = [x.double().requires_grad_() for x in (y, gain, offset)]
    expected = plain_norm(inputs[0], inputs[1], inputs[2], pool, SLOPE, norm)
    lines = Lines(y[0, ..., 0].numel(), norm, products(precision))
    lines.set_forward(sums_of(y, y), gain, offset)
    close(activate(y, lines, SLOPE, pool), expected, precision)

    dp, dp1 = (randn(*expected.shape, seed=i).to(dtype) for i in (6, 7))
    weights = dp.double().requires_grad_()
    first = torch.autograd.grad(expected, inputs, weights, create_graph=True, materialize_grads=True)
    ones, dgain, doffset = torch.ones(3, device="cuda"), torch.empty_like(gain), torch.empty_like(offset)
    lines.set_gradient(gradient_sums(y, dp, lines, SLOPE, pool), 2 * ones, (dgain, doffset))
    close(input_gradient(y, dp, lines, SLOPE, pool), first[0], precision)
    close(doffset, 2 * first[2], precision)
    if norm:
        close(dgain, 2 * first[1], precision)

    # The tangent along (y', gain', offset', dp'), by the transpose of the transpose; half of y', to try the factor.
    directions = [x.double() for x in (y1, gain1, offset1)]
    moved = torch.autograd.grad(first, weights, directions, retain_graph=True)[0]
    table = lines.tangent(sums_of(y1, y), gain1, offset1)
    close(activate(y, lines, SLOPE, pool, tangent=(y1, table)), moved, precision)
    half = torch.full((3,), 0.5, device="cuda")
    second = torch.autograd.grad(first, inputs, [x / 2 for x in directions], retain_graph=True, materialize_grads=True)
    more = torch.autograd.grad(expected, inputs, dp1.double(), materialize_grads=True)
    partial = gradient_sums(y, dp, lines, SLOPE, pool, tangent=(y1, dp1))
    found = lines.tangent_gradient(partial, table, half, ones, (dgain, doffset))
    close(input_gradient(y, dp, lines, SLOPE, pool, tangent=(y1, dp1, found)), second[0] + more[0], precision)
    close(doffset, second[2] + more[2], precision)
    if norm:
        close(dgain, second[1] + more[1], precision)


def sums_of(a: Tensor, b: Tensor) -> Tensor:
    """As a convolution leaves them: (task, part, 2, channel)."""
    a, b = a.float(), b.float()
    return torch.stack([a.sum((1, 2, 3)), (a * b).sum((1, 2, 3))], 1)[:, None]


@gpu
@precisions
@pytest.mark.parametrize("channels", [1, 3])
def test_first_layer_in_four_passes(precision: str, channels: int) -> None:
    from trident.engines.kernels.first_layer import Pictures

    dtype = STORAGE[precision]
    pixels = (randn(3, 6, 20, 20, channels).sigmoid() * 255).to(torch.uint8)
    rows = Pictures(pixels, dtype, products(precision)).rows(2, 4)
    images = pixels[:, 2:].double() / 255
    patches = F.unfold(images.flatten(0, 1).permute(0, 3, 1, 2), 3, padding=1).view(3, 4, channels, 9, 400)
    patches = patches.permute(0, 1, 4, 3, 2).reshape(3, 1600, 9 * channels)
    mean = patches.mean(1)
    close(rows.mean, mean, "fp32")
    close(rows.covariance, patches.mT @ patches / 1600 - mean[:, :, None] * mean[:, None], "fp32")

    weight, weight1 = (randn(3, 3, 3, channels, 32, seed=i) / 5 for i in (1, 2))
    table, table1 = randn(3, 4, 32, seed=3), randn(3, 4, 32, seed=4)
    rounded, rounded1 = (in_store(w * 256 / 255, precision).double() * 255 / 256 for w in (weight, weight1))

    def row(table: Tensor, number: int) -> Tensor:
        return table.double()[:, None, None, None, number]

    y = plain_convolution(images, rounded)
    z = F.max_pool2d((row(table, 2) * y + row(table, 3)).flatten(0, 1).permute(0, 3, 1, 2), 2)
    winners, which, p = rows.forward(weight, table, SLOPE)
    expected = F.leaky_relu(z, SLOPE).permute(0, 2, 3, 1).view_as(p)
    close(p, expected, precision)

    # From here on with the kernel's own choice of winners: of two that are equal up to rounding, either may be one.
    code = which.flatten(0, 1).permute(0, 3, 1, 2).long()  # (task * image, channel, 10, 10)
    row_of, column_of = torch.meshgrid(torch.arange(10, device="cuda"), torch.arange(10, device="cuda"), indexing="ij")
    places = (2 * row_of + (code & 3) // 2) * 20 + 2 * column_of + (code & 3) % 2

    def of_winners(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1).permute(0, 3, 1, 2).flatten(2)
        return flat.gather(2, places.flatten(2)).view_as(code).permute(0, 2, 3, 1).view_as(p)

    close(winners, of_winners(y), precision)
    slope = torch.where(which >= 4, 1.0, SLOPE).double()
    moved = row(table, 2) * of_winners(plain_convolution(images, rounded1)) + row(table1, 2) * winners.double()
    found = rows.tangent(weight1, table, table1, winners, which, SLOPE)
    close(found, slope * (moved + row(table1, 3)), precision)

    dp = randn(*p.shape, seed=5).to(dtype)
    delta = torch.zeros_like(y).flatten(0, 1).permute(0, 3, 1, 2).flatten(2)
    delta.scatter_(2, places.flatten(2), (dp.double() * slope).flatten(0, 1).permute(0, 3, 1, 2).flatten(2))
    delta = delta.view(12, 32, 400).mT.reshape(3, 1600, 32)
    total = rows.backward(which, dp, SLOPE).view(3, 4, 4, 4, 2, 2, 32)  # patch's row, column, channel; cell's; output
    shifted = [total[:, i : i + 3, j : j + 3, :channels, i, j] for i in (0, 1) for j in (0, 1)]
    close(torch.stack(shifted).sum(0).reshape(3, -1, 32) * 256 / 255, patches.mT @ delta, precision)
    close(total[:, 0, 0, 3].sum((1, 2)), delta.sum(1), precision)


def in_one(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Side by side in one matrix (task, ...), as the engine keeps parameters."""
    flat = torch.cat([x.flatten(1) for x in tensors], 1)
    pieces = torch.split_with_sizes(flat, [x[0].numel() for x in tensors], 1)
    return tuple(piece.view(x.shape) for piece, x in zip(pieces, tensors, strict=True))


@gpu
@pytest.mark.parametrize("channels", [1, 3])
def test_first_layers_batch_norm_from_moments(channels: int) -> None:
    """The whole layer and its derivatives against autograd's, in full precision."""
    from trident.engines.kernels.first_coefficients import forward_lines, gradient, tangent_gradient, tangent_lines
    from trident.engines.kernels.first_layer import Pictures

    pixels = (randn(3, 6, 20, 20, channels).sigmoid() * 255).to(torch.uint8)
    rows = Pictures(pixels, torch.float32, "tf32x3").rows(1, 5)
    weight, weight1 = (randn(3, 3, 3, channels, 32, seed=i) / 5 for i in (1, 2))
    gain, offset, gain1, offset1 = (randn(3, 32, seed=i) for i in (3, 4, 5, 6))
    weight, gain, offset = in_one(weight, gain, offset)
    weight1, gain1, offset1 = in_one(weight1, gain1, offset1)
    inputs = [x.double().requires_grad_() for x in (weight, gain, offset)]
    y = plain_convolution(pixels[:, 1:].double() / 255, inputs[0])
    expected = plain_norm(y, inputs[1], inputs[2], True, SLOPE, True)
    lines = forward_lines(rows, weight, gain, offset)
    winners, which, p = rows.forward(weight, lines.table, SLOPE)
    close(p, expected, "fp32")

    dp, dp1 = (randn(*p.shape, seed=i) for i in (7, 8))
    weights = dp.double().requires_grad_()
    first = torch.autograd.grad(expected, inputs, weights, create_graph=True)
    dweight, dgain, doffset = in_one(weight, gain, offset)
    out = (dweight, dgain, doffset)
    ones, half = torch.ones(3, device="cuda"), torch.full((3,), 0.5, device="cuda")
    sums = gradient(lines, rows.backward(which, dp, SLOPE), 2 * ones, out)
    for found, wanted in zip(out, first, strict=True):
        close(found, 2 * wanted, "fp32")

    directions = [x.double() for x in (weight1, gain1, offset1)]
    moved = torch.autograd.grad(first, weights, directions, retain_graph=True)[0]
    moving = tangent_lines(lines, weight1, gain1, offset1)
    close(rows.tangent(weight1, lines.table, moving.table, winners, which, SLOPE), moved, "fp32")
    second = torch.autograd.grad(first, inputs, [x / 2 for x in directions], retain_graph=True)
    more = torch.autograd.grad(expected, inputs, dp1.double())
    tangent_gradient(lines, moving, rows.backward(which, dp1, SLOPE), sums, half, ones, out)
    for found, a, b in zip(out, second, more, strict=True):
        close(found, a + b, "fp32")


@gpu
def test_entering_scales_by_powers_of_two() -> None:
    from trident.engines.kernels.scaling import scale_into_range

    x = randn(4, 7, 300) * torch.tensor([1e-9, 1.0, 1e6, 0.0], device="cuda")[:, None, None]
    entered = scale_into_range(x, 2.0, torch.float32, "tf32x3")
    largest = entered.stored.abs().amax((1, 2))
    assert bool(((largest > 1) & (largest <= 2) | (x.abs().amax((1, 2)) == 0)).all())
    assert torch.equal(entered.stored * entered.undo[:, None, None], x)
    smaller = scale_into_range(x, 2.0, torch.float16, "tf32", base=torch.full((4,), 8.0, device="cuda"))
    assert smaller.factor.tolist()[:2] == [1.0, 2.0 ** float(torch.floor(torch.log2(0.25 / x[1].abs().max())))]
    torch.testing.assert_close(smaller.stored.float() * smaller.undo[:, None, None], x, rtol=1e-3, atol=1e-6)
    x[0, 0, 0], x[1, 0, 0] = gpu_nan(), torch.inf
    for dtype in (torch.float16, torch.float32):
        for base in (None, torch.ones(4, device="cuda")):
            spoilt = scale_into_range(x, 2.0, dtype, "tf32", base=base)
            assert bool(spoilt.stored[0].isnan().any())
            assert bool(spoilt.undo[0].isnan())
            assert not bool(spoilt.stored[1].isfinite().all())
            assert bool(spoilt.stored[2:].isfinite().all())
