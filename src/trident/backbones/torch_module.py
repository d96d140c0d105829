"""Runs a frozen torch module fast: channels last, traced and frozen on a CPU, 16 bits on a GPU."""

import math
import warnings
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from trident.backbones.pretrained import BATCH, Compute, Facts, Pretrained, check_output, fingerprint_of, short_message
from trident.errors import TridentError


class _FromPixels(nn.Module):
    """Scales pixels and applies the module."""

    mean: Tensor
    std: Tensor

    def __init__(self, module: nn.Module, facts: Facts):
        super().__init__()
        self.module = module
        self.register_buffer("mean", torch.tensor(facts.mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(facts.std).view(1, 3, 1, 1), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:  # (picture, 3, size, size) uint8
        features: Tensor = self.module((pixels.to(self.mean.dtype) - self.mean) / self.std)
        return features


def from_module(name: str, facts: Facts, weights: bytes, module: nn.Module, device: str) -> Pretrained:
    """A backbone from a torch module that takes scaled pictures (picture, 3, size, size) and returns features."""
    compute, n_features = _compiled(name, facts, module, device)
    return _pretrained(name, facts, n_features, weights, compute, device)


def from_weights(
    name: str, facts: Facts, n_features: int, weights: bytes, make: Callable[[], nn.Module], device: str
) -> Pretrained:
    """A backbone whose module `make` builds at the first picture: with cached features it is not needed at all."""
    compiled = cache(lambda: _compiled(name, facts, make(), device)[0])
    return _pretrained(name, facts, n_features, weights, lambda pixels: compiled()(pixels), device)


def probe(module: nn.Module, facts: Facts) -> bytes:
    """The features of a fixed picture, so coarse that they hardly depend on the processor: for the fingerprint.

    These are eight projections of their direction, in tenths, and the power of two next to their length. Two processors
    differ by about 1e-6, so they disagree once in thousands of networks.
    """
    generator, size = np.random.default_rng(0), facts.image_size
    picture = generator.integers(0, 256, (1, size, size, 3), np.uint8)
    try:
        with torch.inference_mode():
            batch = _on_device(picture.repeat(BATCH, 0), "cpu")  # some modules take no other number
            output = _FromPixels(module, facts).eval()(batch)[0].flatten().double()
        turned = torch.from_numpy(generator.standard_normal((8, len(output)))) @ output / output.norm()
        return repr([round(10 * value) for value in turned.tolist()] + [round(math.log2(output.norm()))]).encode()
    except Exception:  # the user's module may raise anything, which is reported when it is compiled
        return b""


def _pretrained(name: str, facts: Facts, n_features: int, weights: bytes, compute: Compute, device: str) -> Pretrained:
    # 16-bit features differ a little from 32-bit ones, so the cache must not mix them.
    own = fingerprint_of(facts, weights + (b"fp16" if torch.device(device).type == "cuda" else b""))
    return Pretrained(name, facts, n_features, own, compute, device, fingerprint_of(facts, weights))


def _compiled(name: str, facts: Facts, module: nn.Module, device: str) -> tuple[Compute, int]:
    """A function from a batch of pixels to features, and the number of features."""
    size = facts.image_size
    noise = np.random.default_rng(0).integers(0, 256, (2, BATCH, size, size, 3), np.uint8)
    example, other = (_on_device(pixels, device) for pixels in noise)
    try:
        network = _FromPixels(module, facts).eval().requires_grad_(False)
        network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if torch.device(device).type == "cuda":
            network = network.half()
        with torch.inference_mode():
            output = network(example)
    except Exception as error:  # the user's module may raise anything
        raise TridentError(f"backbone {name} cannot take {size}x{size} pictures: {short_message(error)}") from error
    if not isinstance(output, Tensor):
        raise TridentError(f"backbone {name} returned {type(output).__name__}: it must return a tensor of features")
    n_features = check_output(name, output.float().cpu().numpy())
    run = _traced(network, output, example, other) if torch.device(device).type == "cpu" else network

    def compute(pixels: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            features: Tensor = run(_on_device(pixels, device))
            return features.float().cpu().numpy()

    return compute, n_features


def _on_device(pixels: np.ndarray, device: str) -> Tensor:
    """(picture, height, width, channel) -> (picture, channel, height, width), channels last in memory."""
    return torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2)


def _traced(network: nn.Module, expected: Tensor, example: Tensor, other: Tensor) -> nn.Module:
    """The network as a frozen trace, which is faster. A module that cannot be traced runs as it is.

    It is traced with one picture of one batch, because that is fast, and compared on another batch, `example`, for
    which the network gave `expected`. A module that makes decisions by its input would be traced wrongly: tracing warns
    about them, and then it is not used.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        try:
            recorded = torch.jit.trace(network, other[:1], check_trace=False)  # type: ignore[no-untyped-call]
            traced = torch.jit.freeze(recorded)
            traced(other)  # the first call measures and the second optimises; later ones repeat the second bit by bit
            same = torch.allclose(traced(example), expected, atol=1e-3, rtol=1e-3)
        except Exception:  # tracing has many ways to fail, none of which matters
            return network
        return traced if same else network
