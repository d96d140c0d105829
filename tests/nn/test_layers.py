"""Each layer against torch's own, on fresh random inputs, and its derivatives of first and second order."""

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny import doubles
from trident.nn import batch_norm, conv4
from trident.nn.attfex import Attfex, TaskFeatures
from trident.nn.batch_norm import BatchNorm, BatchNormStatistics, mean_and_variance
from trident.nn.conv4 import Conv4, ConvLayer
from trident.nn.convolution import LARGE, convolve, convolve_patches, max_pool, patches_of, upsample
from trident.nn.gaussian import Gaussian
from trident.nn.linear import activate
from trident.nn.parameters import Parameters, for_each_task

TASKS, IMAGES, CHANNELS = 2, 3, 4


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def to_torch(x: Tensor) -> Tensor:
    """One task's channels-last images as torch wants them."""
    return x.permute(0, 3, 1, 2)


@pytest.mark.parametrize("outputs", [1, 3, 5])
@pytest.mark.parametrize("size", [5, 6])
def test_convolution_is_torchs(size: int, outputs: int) -> None:
    images, weight = random(TASKS, IMAGES, size, size, CHANNELS), random(TASKS, 3, 3, CHANNELS, outputs)
    expected = torch.stack(
        [
            F.conv2d(to_torch(x), w.permute(3, 2, 0, 1), padding=1).permute(0, 2, 3, 1)
            for x, w in zip(images, weight, strict=True)
        ]
    )
    torch.testing.assert_close(convolve(images, weight), expected)
    torch.testing.assert_close(convolve_patches(patches_of(images), weight), expected)


@pytest.mark.parametrize("shared", [True, False])
def test_large_float32_convolutions_go_another_way_to_the_same_numbers(shared: bool) -> None:
    """On a CPU; first and second derivatives against the matrix products in float64."""
    images = torch.randn(TASKS, 7, 14, 15, CHANNELS)
    weight = torch.randn(1 if shared else TASKS, 3, 3, CHANNELS, 6).expand(TASKS, 3, 3, CHANNELS, 6)
    assert images[0, ..., 0].numel() >= LARGE
    outcomes = []
    for function, dtype in ((convolve, torch.float32), (by_patches, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (images, weight)]
        outcomes.append(with_derivatives(function, leaves))
    for actual, expected in zip(*outcomes, strict=True):
        close_in_float32(actual, expected)


def by_patches(images: Tensor, weight: Tensor) -> Tensor:
    return convolve_patches(patches_of(images), weight)


def with_derivatives(function: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """The output, its first derivatives with and without a graph, and second derivatives."""
    output = function(*leaves)
    plain = torch.autograd.grad(output.square().sum(), leaves, retain_graph=True)
    first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), leaves)
    return [output, *plain, *first, *second]


def close_in_float32(actual: Tensor, expected: Tensor) -> None:
    error = (actual.detach().double() - expected.detach()).abs().max() / expected.detach().abs().max()
    assert float(error) < 2e-5


def test_patches_of_grey_images_are_those_of_a_colour() -> None:
    images = random(TASKS, IMAGES, 5, 6, 3)
    grey = patches_of(images[..., 1:2])
    assert torch.equal(grey, patches_of(images)[..., 1::3])
    assert grey[:, 1:].reshape(TASKS, -1, 9).data_ptr() == grey[:, 1:].data_ptr()  # no copy on the way to a product


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_convolution_has_exact_first_and_second_derivatives(outputs: int) -> None:
    images = random(1, 2, 3, 4, 2).requires_grad_()
    weight = random(1, 3, 3, 2, outputs).requires_grad_()
    assert torch.autograd.gradcheck(convolve, (images, weight))
    assert torch.autograd.gradgradcheck(convolve, (images, weight))


@pytest.mark.parametrize("size", [6, 7])
def test_pooling_is_torchs(size: int) -> None:
    images = random(TASKS, IMAGES, size, size, CHANNELS)
    expected = torch.stack([F.max_pool2d(to_torch(x), 2).permute(0, 2, 3, 1) for x in images])
    assert torch.equal(max_pool(images), expected)
    assert torch.equal(max_pool(images.requires_grad_()), expected)


@pytest.mark.parametrize(("small", "large"), [(5, 10), (10, 21), (21, 42), (42, 84), (1, 3), (3, 7), (7, 14)])
def test_upsampling_is_torchs_nearest_neighbour(small: int, large: int) -> None:
    images = random(TASKS, IMAGES, small, small, CHANNELS)
    expected = torch.stack([F.interpolate(to_torch(x), size=large, mode="nearest").permute(0, 2, 3, 1) for x in images])
    assert torch.equal(upsample(images, large), expected)


@pytest.mark.parametrize(("small", "large"), [(2, 4), (2, 5)])
def test_upsampling_has_exact_first_and_second_derivatives(small: int, large: int) -> None:
    images = random(1, 2, small, small, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: upsample(x, large), images)
    assert torch.autograd.gradgradcheck(lambda x: upsample(x, large), images)


def batch_norm_parameters() -> Parameters:
    return {"norm.gain": random(TASKS, CHANNELS), "norm.shift": random(TASKS, CHANNELS)}


def test_transductive_batch_norm_is_torchs_in_training_mode() -> None:
    x, bias, parameters = random(TASKS, IMAGES, 4, 4, CHANNELS), random(TASKS, CHANNELS), batch_norm_parameters()
    actual, seen = BatchNorm("norm", CHANNELS)(parameters, x, bias, BatchNormStatistics())
    for task in range(TASKS):
        given = to_torch(x[task] + bias[task])
        expected = F.batch_norm(
            given, None, None, parameters["norm.gain"][task], parameters["norm.shift"][task], training=True
        )
        torch.testing.assert_close(to_torch(actual[task]), expected)
        torch.testing.assert_close(seen["norm.mean"][task], given.mean((0, 2, 3)))
        torch.testing.assert_close(seen["norm.variance"][task], given.var((0, 2, 3), correction=0))


def test_running_batch_norm_is_torchs_in_evaluation_mode() -> None:
    x, bias, parameters = random(TASKS, IMAGES, 4, 4, CHANNELS), random(TASKS, CHANNELS), batch_norm_parameters()
    mean, variance = random(CHANNELS), random(CHANNELS).exp()
    statistics = BatchNormStatistics("running", running={"norm.mean": mean, "norm.variance": variance})
    actual, seen = BatchNorm("norm", CHANNELS)(parameters, x, bias, statistics)
    assert not seen  # nothing was measured
    for task in range(TASKS):
        expected = F.batch_norm(
            to_torch(x[task] + bias[task]),
            mean,
            variance,
            parameters["norm.gain"][task],
            parameters["norm.shift"][task],
        )
        torch.testing.assert_close(to_torch(actual[task]), expected)


def test_support_batch_norm_never_looks_at_the_queries() -> None:
    x, bias, parameters = random(TASKS, IMAGES, 4, 4, CHANNELS), random(TASKS, CHANNELS), batch_norm_parameters()
    norm = BatchNorm("norm", CHANNELS)
    before, seen = norm(parameters, x, bias, BatchNormStatistics("support", n_support=2))
    changed = x.clone()
    changed[:, 2:] += 1
    after, _ = norm(parameters, changed, bias, BatchNormStatistics("support", n_support=2))
    assert torch.equal(before[:, :2], after[:, :2])
    alone, seen_alone = norm(parameters, x[:, :2], bias, BatchNormStatistics())
    torch.testing.assert_close(before[:, :2], alone)
    torch.testing.assert_close(seen, seen_alone)


@pytest.mark.parametrize("large", [0, batch_norm.LARGE])
def test_mean_and_variance_are_torchs_with_exact_derivatives(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_norm, "LARGE", large)
    x = (3 + random(TASKS, IMAGES, 3, 2, CHANNELS)).requires_grad_()
    variance, mean = torch.var_mean(x, (1, 2, 3), correction=0)
    torch.testing.assert_close(mean_and_variance(x), (mean, variance))
    assert torch.autograd.gradcheck(mean_and_variance, x)
    assert torch.autograd.gradgradcheck(mean_and_variance, x)


def layer_parameters() -> Parameters:
    """Of a convolution layer with two inputs."""
    return {
        "conv.weight": random(TASKS, 3, 3, 2, CHANNELS),
        "conv.bias": random(TASKS, CHANNELS),
        "conv.norm.gain": random(TASKS, CHANNELS),  # some fall, some rise
        "conv.norm.shift": random(TASKS, CHANNELS),
    }


def running_statistics() -> Parameters:
    return {"conv.norm.mean": random(CHANNELS), "conv.norm.variance": 1 + random(CHANNELS).square()}


@pytest.mark.parametrize("source", ["transductive", "support", "running"])
def test_pooling_before_the_last_pass_of_batch_norm_gives_the_same_numbers(source: str) -> None:
    layer = ConvLayer("conv", 2, CHANNELS, batch_norm=True)
    images = random(TASKS, IMAGES, 4, 5, 2).requires_grad_()
    parameters = layer_parameters()
    leaves = [images, *(value.requires_grad_() for value in parameters.values())]
    running = running_statistics()
    outcomes = []
    for pooled in (True, False):
        statistics = BatchNormStatistics(source, 2, running)
        if pooled:
            output, seen = layer.pooled(parameters, images, statistics)
        else:
            output, seen = layer(parameters, images, statistics)
            output = max_pool(output)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(
            torch.stack([x.square().sum() for x in first]).sum(), leaves, materialize_grads=True
        )
        outcomes.append([output, *first, *second, *seen.values()])
    for actual, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(actual, expected)


Call = Callable[[Parameters, Tensor, BatchNormStatistics], tuple[Tensor, Parameters]]


def layer_calls() -> dict[str, Call]:
    layer = ConvLayer("conv", 2, CHANNELS, batch_norm=True)
    return {
        "layer": layer,
        "pooled": layer.pooled,
        "batch norm": lambda parameters, images, statistics: layer.norm(
            parameters, images.repeat(1, 1, 1, 1, CHANNELS // 2), parameters["conv.bias"], statistics
        ),
    }


@pytest.mark.parametrize("call", list(layer_calls()))
@pytest.mark.parametrize("source", ["transductive", "support", "running"])
@pytest.mark.parametrize("n_images", [IMAGES, conv4.MOST_AT_ONCE + 20])
def test_a_call_changes_none_of_its_arguments(call: str, source: str, n_images: int) -> None:
    """What batch norm has seen is returned. Many images are processed in slices, and in place."""
    parameters, running = layer_parameters(), running_statistics()
    images = random(TASKS, n_images, 4, 4, 2)
    statistics = BatchNormStatistics(source, 2, running)
    before = [{key: value.clone() for key, value in part.items()} for part in (parameters, running)]
    copy = images.clone()
    with torch.no_grad():
        output, seen = layer_calls()[call](parameters, images, statistics)
        again, seen_again = layer_calls()[call](parameters, images, statistics)
    assert torch.equal(images, copy)
    for part, kept in zip((parameters, running), before, strict=True):
        assert part.keys() == kept.keys()
        assert all(torch.equal(value, kept[key]) for key, value in part.items())
    assert statistics == BatchNormStatistics(source, 2, running)
    assert torch.equal(output, again)
    assert seen.keys() == seen_again.keys() == (set() if source == "running" else running.keys())
    assert all(torch.equal(value, seen_again[key]) for key, value in seen.items())
    with pytest.raises(FrozenInstanceError):
        statistics.source = "running"  # type: ignore[misc]


@pytest.mark.parametrize("source", ["transductive", "support", "running"])
def test_many_images_in_slices_give_the_same_numbers(source: str) -> None:
    layer, parameters = ConvLayer("conv", 2, CHANNELS, batch_norm=True), layer_parameters()
    images = random(TASKS, conv4.MOST_AT_ONCE + 20, 4, 4, 2)
    statistics = BatchNormStatistics(source, conv4.SLICE + 10, running_statistics())
    expected = layer.pooled(parameters, images, statistics)
    with torch.no_grad():
        torch.testing.assert_close(layer.pooled(parameters, images, statistics), expected)


def test_kl_is_torch_distributions() -> None:
    loc, log_var = random(2, 3, 7), random(2, 3, 7)
    prior = torch.distributions.Normal(torch.zeros_like(loc), torch.ones_like(loc))
    posterior = torch.distributions.Normal(loc, torch.exp(0.5 * log_var))
    expected = torch.distributions.kl_divergence(posterior, prior).sum(-1)
    torch.testing.assert_close(Gaussian(loc, log_var).kl_to_standard_normal(), expected)


def test_sampling_shifts_and_scales_the_noise() -> None:
    gaussian = Gaussian(torch.tensor([[[1.0, -2.0]]]), torch.tensor([[[0.0, math.log(9.0)]]]))
    assert torch.equal(gaussian.sample(torch.zeros(1, 1, 2)), gaussian.loc)
    torch.testing.assert_close(gaussian.sample(torch.tensor([[[0.5, 2.0]]])), torch.tensor([[[1.5, 4.0]]]))


def attfex_by_the_equations(features: Tensor, parameters: Parameters, activation: bool, scale_inside: bool) -> Tensor:
    """The paper's equations for M, N, Q, K, V and G, one channel and one weight at a time.

    `features` is F of one task, (image, channel, height, width); the result is G, (channel, height, width). The sum
    over j weighs V_j: the paper prints V_i, which would make every weighted sum the same single map.
    """
    weights = {key.split(".")[1]: value for key, value in parameters.items()}
    transposed = features.transpose(0, 1)  # F': (channel, image, height, width)
    channels, _, height, width = transposed.shape

    def conv1x1(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x[None], w[:, :, None, None])[0]

    n = []
    for i in range(channels):
        m_i = F.leaky_relu(conv1x1(transposed[i], weights["w_m"]), 0.2)
        n.append(F.leaky_relu(conv1x1(m_i, weights["w_n"]), 0.2))
    maps: dict[str, list[Tensor]] = {"query": [], "key": [], "value": []}
    for part, found in maps.items():
        for i in range(channels):
            x = conv1x1(n[i], weights[part])[0]
            found.append(F.leaky_relu(x, 0.2) if activation else x)
    root = math.sqrt(width * height)
    mask = []
    for i in range(channels):
        similarity = torch.stack([(maps["query"][i] * maps["key"][j]).sum() for j in range(channels)])
        if scale_inside:
            exponentials = torch.exp(similarity / root)
            weight = exponentials / exponentials.sum()
        else:
            exponentials = torch.exp(similarity)
            weight = exponentials / (root * exponentials.sum())
        mask.append(sum((weight[j] * maps["value"][j] for j in range(channels)), torch.zeros(height, width)))
    return torch.stack(mask)


@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize("scale", ["inside", "outside"])
def test_attfex_is_the_papers_equations(activation: bool, scale: str) -> None:
    attfex = Attfex("attfex", IMAGES, 6, 5, "leaky_relu", activation, scale, residual=False)
    start = doubles(attfex.initial(torch.Generator().manual_seed(1)))
    parameters = {key: torch.stack([value, 2 * value]) for key, value in start.items()}
    features = random(TASKS, IMAGES, 3, 2, CHANNELS)
    actual = attfex(parameters, TaskFeatures(features, torch.zeros(len(features), 1, dtype=torch.int64), 1))
    assert actual.shape == (TASKS, 1, 3, 2, CHANNELS)
    for task in range(TASKS):
        own = {key: value[task] for key, value in parameters.items()}
        expected = attfex_by_the_equations(to_torch(features[task]), own, activation, scale == "inside")
        torch.testing.assert_close(actual[task, 0].permute(2, 0, 1), expected)


@pytest.mark.parametrize("activation", ["leaky_relu", "relu"])
def test_both_orders_in_a_block_give_the_same_numbers(activation: str) -> None:
    """Pooling before the activation, as here, or after it, as in the released code."""
    encoder = Conv4("encoder", 1, CHANNELS, activation)
    parameters = for_each_task(doubles(encoder.initial(torch.Generator().manual_seed(0))), TASKS)
    images, statistics = random(TASKS, IMAGES, 19, 19, 1), BatchNormStatistics()
    actual, seen = encoder(parameters, images, statistics)
    expected, expected_seen = images, Parameters()
    for layer in encoder.layers:
        expected, more = layer(parameters, expected, statistics)
        expected = max_pool(activate(expected, activation))
        expected_seen |= more
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(seen, expected_seen)
    assert seen.keys() == encoder.initial_running().keys()
